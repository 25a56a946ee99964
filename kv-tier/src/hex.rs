//! Hexadecimal digits of 256-bit numbers.
use std::fmt;

use kv_core::UnknownName;

/// Writes 64 lower-case digits.
pub(crate) fn write(bytes: &[u8; 32], f: &mut fmt::Formatter<'_>) -> fmt::Result {
    bytes.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
}

/// Reads exactly 64 lower-case digits; `what` is for the error.
pub(crate) fn read(what: &'static str, text: &str) -> Result<[u8; 32], UnknownName> {
    parse(text).ok_or_else(|| UnknownName::new(what, text, "64 lower-case hexadecimal digits"))
}

/// Reads exactly 64 lower-case digits; without an error that holds the text.
pub(crate) fn parse(text: &str) -> Option<[u8; 32]> {
    let (pairs, rest) = text.as_bytes().as_chunks::<2>();
    if pairs.len() != 32 || !rest.is_empty() {
        return None;
    }
    let mut bytes = [0; 32];
    for (byte, [high, low]) in bytes.iter_mut().zip(pairs) {
        *byte = digit(*high)?.checked_mul(16)?.checked_add(digit(*low)?)?;
    }
    Some(bytes)
}

fn digit(character: u8) -> Option<u8> {
    match character {
        b'0'..=b'9' => character.checked_sub(b'0'),
        b'a'..=b'f' => character.checked_sub(b'a')?.checked_add(10),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use crate::ChunkName;

    #[test]
    fn names_are_read_back_and_other_text_is_refused() {
        let mut bytes = [0; 32];
        for (byte, value) in bytes.iter_mut().zip((0..=255).step_by(8)) {
            *byte = value;
        }
        let name = ChunkName::new(bytes);
        let text = name.to_string();
        assert_eq!(text.len(), 64);
        assert_eq!(text.parse::<ChunkName>(), Ok(name));
        let upper = text.to_uppercase();
        let signed = format!("+{}", &text[1..]);
        let accented = format!("{}é", &text[2..]);
        for wrong in ["", &text[1..], &text[2..], &format!("{text}00"), &upper, &signed, &accented]
        {
            let error = wrong.parse::<ChunkName>().unwrap_err();
            assert!(error.to_string().contains("64 lower-case"), "{error}");
        }
    }
}
