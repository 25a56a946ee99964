//! Traces of Azure's inference service: a CSV of lengths, from which no content can be told.
use std::num::NonZeroU32;

use super::trace::TraceError;

pub(super) const HEADER: &str = "TIMESTAMP,ContextTokens,GeneratedTokens";

/// Tokens of a block unless another size is asked for.
pub(super) const BLOCK_SIZE: NonZeroU32 = NonZeroU32::MIN.saturating_add(15);

pub(super) fn check_header(line: &[u8]) -> Result<(), TraceError> {
    if line == HEADER.as_bytes() {
        return Ok(());
    }
    // A first line may be anything; the start of it tells enough.
    let start = line.get(..80).unwrap_or(line);
    Err(TraceError::Header { got: String::from_utf8_lossy(start).into_owned() })
}

/// The input tokens of one request.
pub(super) fn parse(line: &[u8]) -> Result<u64, TraceError> {
    let text = String::from_utf8_lossy(line);
    let fields: Vec<_> = text.split(',').collect();
    let [timestamp, context, generated] = fields.as_slice() else {
        return Err(TraceError::Fields { got: fields.len(), expected: 3 });
    };
    if !is_timestamp(timestamp) {
        let got = start_of(timestamp);
        let expected = "a time such as 2023-11-16 18:15:46.6805900";
        return Err(TraceError::Field { field: "TIMESTAMP", got, expected });
    }
    count("GeneratedTokens", generated)?;
    count("ContextTokens", context)
}

fn start_of(text: &str) -> String {
    text.chars().take(40).collect()
}

fn count(field: &'static str, text: &str) -> Result<u64, TraceError> {
    // A sign is no part of a count.
    let digits = text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|_| digits).ok_or_else(|| {
        let expected = "a count from 0";
        TraceError::Field { field, got: start_of(text), expected }
    })
}

/// Date and time, with or without a fraction of a second and an offset.
fn is_timestamp(text: &str) -> bool {
    let Some((date, time)) = text.split_once([' ', 'T']) else {
        return false;
    };
    let end = time.find(['+', '-', 'Z']).unwrap_or(time.len());
    let (time, offset) = time.split_at(end);
    let (time, fraction) = time.split_once('.').unwrap_or((time, "0"));
    let is_offset = match offset.strip_prefix(['+', '-']) {
        Some(offset) => numbers(offset, ':', &[(2, 0, 23), (2, 0, 59)]),
        None => offset.is_empty() || offset == "Z",
    };
    numbers(date, '-', &[(4, 0, 9999), (2, 1, 12), (2, 1, 31)])
        && numbers(time, ':', &[(2, 0, 23), (2, 0, 59), (2, 0, 60)])
        && !fraction.is_empty()
        && fraction.bytes().all(|byte| byte.is_ascii_digit())
        && is_offset
}

/// Whether `text` is numbers of so many digits, from the least to the most.
fn numbers(text: &str, separator: char, expected: &[(usize, u32, u32)]) -> bool {
    let parts: Vec<_> = text.split(separator).collect();
    let fits = |(part, (len, least, most)): (&&str, &(usize, u32, u32))| {
        let number = part.parse().ok().filter(|_| part.bytes().all(|b| b.is_ascii_digit()));
        part.len() == *len && number.is_some_and(|n: u32| (*least..=*most).contains(&n))
    };
    parts.len() == expected.len() && parts.iter().zip(expected).all(fits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timestamp_is_a_date_and_a_time() {
        for text in [
            "2023-11-16 18:15:46.6805900",
            "2023-11-16T18:15:46",
            "2024-05-10 00:00:00.009930+00:00",
            "2024-12-31 23:59:60Z",
        ] {
            assert!(is_timestamp(text), "{text}");
        }
        for text in [
            "",
            "now",
            "2023-11-16",
            "18:15:46",
            "2023-13-16 18:15:46",
            "2023-11-16 24:15:46",
            "2023-11-16 18:15",
            "2023-11-16 18:15:46.",
            "2023-11-16 18:15:46.x",
            "23-11-16 18:15:46",
            "2023-11-16 18:15:46+1",
            "2023-11-16 18:15:46 ",
            "-023-11-16 18:15:46",
        ] {
            assert!(!is_timestamp(text), "{text}");
        }
    }

    #[test]
    fn what_is_no_request_is_refused() {
        let error = |line: &[u8]| parse(line).expect_err("no request").to_string();
        let time = "2023-11-16 18:15:46.6805900";
        assert_eq!(parse(format!("{time},374,44").as_bytes()).expect("a request"), 374);
        for (rest, words) in [
            ("", "1 fields, expected the 3"),
            (",1", "2 fields"),
            (",1,2,3", "4 fields"),
            (",-1,2", "ContextTokens is \"-1\""),
            (",+1,2", "ContextTokens is \"+1\""),
            (",1,-2", "GeneratedTokens is \"-2\""),
            (",1.5,2", "ContextTokens is \"1.5\""),
            (",,2", "ContextTokens is \"\""),
            (",\"1\",2", "ContextTokens"),
            (",99999999999999999999,2", "ContextTokens is \"99999999999999999999\""),
        ] {
            let error = error(format!("{time}{rest}").as_bytes());
            assert!(error.contains(words), "{rest}: {error}");
        }
        assert!(error(b"yesterday,1,2").contains("TIMESTAMP is \"yesterday\""));
        assert!(error(b"\xff\xfe,1,2").contains("TIMESTAMP"));
    }
}
