//! Reads text files.
use std::path::Path;

use crate::error::{Error, InFile, TextError};

/// Byte order marks; of two with a common beginning, the longer one first.
const MARKS: [(&[u8], &str); 5] = [
    (b"\xef\xbb\xbf", "UTF-8"),
    (b"\xff\xfe\0\0", "UTF-32"),
    (b"\0\0\xfe\xff", "UTF-32"),
    (b"\xff\xfe", "UTF-16"),
    (b"\xfe\xff", "UTF-16"),
];

/// Reads a text file of UTF-8, without its byte order mark.
///
/// # Errors
/// [`Error::File`] with the cause: [`Error::Io`], [`TextError::Encoding`], [`TextError::NotUtf8`].
pub fn read_text(path: &Path) -> Result<String, Error> {
    let bytes = std::fs::read(path).in_file(path)?;
    Ok(without_mark(&bytes).in_file(path)?.to_owned())
}

/// Returns the text after a byte order mark of UTF-8; other marks are refused.
fn without_mark(bytes: &[u8]) -> Result<&str, TextError> {
    let found = MARKS.iter().find(|(mark, _)| bytes.starts_with(mark));
    let text = match found {
        None => bytes,
        Some((mark, "UTF-8")) => bytes.strip_prefix(*mark).unwrap_or(bytes),
        Some((_, encoding)) => return Err(TextError::Encoding { encoding }),
    };
    std::str::from_utf8(text)
        .map_err(|error| TextError::NotUtf8 { at: bytes.len() - text.len() + error.valid_up_to() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_are_taken_off_or_refused() {
        for (bytes, text) in
            [(&b"\xef\xbb\xbfab"[..], "ab"), (b"ab", "ab"), (b"\xef\xbb\xbf", ""), (b"", "")]
        {
            assert_eq!(without_mark(bytes).expect("UTF-8"), text, "{bytes:?}");
        }
        for (bytes, encoding) in [
            (&b"\xff\xfea\0"[..], "UTF-16"),
            (b"\xfe\xff\0a", "UTF-16"),
            (b"\xff\xfe\0\0a\0\0\0", "UTF-32"),
            (b"\0\0\xfe\xff\0\0\0a", "UTF-32"),
        ] {
            let refused = without_mark(bytes).expect_err("another encoding");
            assert!(
                matches!(refused, TextError::Encoding { encoding: got } if got == encoding),
                "{bytes:?}: {refused}"
            );
        }
        let refused = without_mark(b"\xef\xbb\xbfa\xffb").expect_err("no UTF-8");
        assert!(matches!(refused, TextError::NotUtf8 { at: 4 }), "{refused}");
    }
}
