//! Traces of lengths only, as CSV: of Azure's inference services, and `BurstGPT`. They have no
//! content.
//!
//! Fields hold neither quotes nor line ends, so a comma separates them and no crate is needed: the
//! crate `csv` without quotes splits a line no further, and would have to be fed single lines,
//! because `source` reads them for every kind of trace and gives the line's number to errors. A
//! quote is a character of a field, where a number or a time refuses it.
// Reads files that may be anything.
#![warn(clippy::arithmetic_side_effects, clippy::indexing_slicing)]
use std::num::NonZeroU32;

use super::trace::{Format, TraceError};

pub(super) const AZURE: &str = "TIMESTAMP,ContextTokens,GeneratedTokens";
pub(super) const BURST_GPT: &str =
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type";

/// Default tokens per block.
pub(super) const BLOCK_SIZE: NonZeroU32 = NonZeroU32::MIN.saturating_add(15);

/// The content of a column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Column {
    /// Date and time.
    Time,
    /// Seconds from the begin of the trace.
    Seconds,
    /// Either of these.
    TimeOrSeconds,
    /// The input tokens of a request.
    Input,
    /// The tokens that were generated.
    Output,
    Count,
    /// A column that nothing needs.
    Other,
}

/// A known header, with its columns in the published order.
type Header = (Format, &'static [(&'static str, Column)]);

const HEADERS: [Header; 4] = [
    (
        Format::Azure,
        &[
            ("TIMESTAMP", Column::Time),
            ("ContextTokens", Column::Input),
            ("GeneratedTokens", Column::Output),
        ],
    ),
    // Of multimodal models: image tokens are part of the context.
    (
        Format::Azure,
        &[
            ("TIMESTAMP", Column::TimeOrSeconds),
            ("NumImages", Column::Count),
            ("ContextTokens", Column::Input),
            ("GeneratedTokens", Column::Output),
        ],
    ),
    (
        Format::BurstGpt,
        &[
            ("Timestamp", Column::Seconds),
            ("Model", Column::Other),
            ("Request tokens", Column::Input),
            ("Response tokens", Column::Output),
            ("Total tokens", Column::Count),
            ("Log Type", Column::Other),
        ],
    ),
    (
        Format::BurstGpt,
        &[
            ("Timestamp", Column::Seconds),
            ("Session ID", Column::Other),
            ("Elapsed time", Column::Other),
            ("Model", Column::Other),
            ("Request tokens", Column::Input),
            ("Response tokens", Column::Output),
            ("Total tokens", Column::Count),
            ("Log Type", Column::Other),
        ],
    ),
];

/// One request.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Row {
    /// Its input tokens.
    pub(super) tokens: u64,
    /// The tokens that were generated for it.
    pub(super) output_tokens: u64,
    /// Its time, from any fixed moment.
    pub(super) seconds: f64,
}

/// The columns of one file, in its order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Columns {
    pub(super) format: Format,
    columns: Vec<(&'static str, Column)>,
}

impl Columns {
    /// Recognises a header with the columns of a known one, in any order.
    pub(super) fn of_header(line: &[u8]) -> Option<Self> {
        let text = std::str::from_utf8(line).ok()?;
        let names: Vec<_> = text.split(',').map(str::trim).collect();
        HEADERS.iter().find_map(|(format, known)| {
            let column = |name: &&str| known.iter().find(|(known, _)| known == name).copied();
            let mut columns = Vec::with_capacity(names.len());
            for name in &names {
                let column = column(name)?;
                if columns.contains(&column) {
                    return None;
                }
                columns.push(column);
            }
            (columns.len() == known.len()).then_some(Self { format: *format, columns })
        })
    }

    /// Refuses an unknown header.
    pub(super) fn check_header(line: &[u8]) -> Result<Self, TraceError> {
        Self::of_header(line).ok_or_else(|| {
            // A first line may be anything; its start is enough.
            let start = line.get(..80).unwrap_or(line);
            TraceError::Header { got: String::from_utf8_lossy(start).into_owned() }
        })
    }

    /// Reads one request.
    pub(super) fn parse(&self, line: &[u8]) -> Result<Row, TraceError> {
        let text = String::from_utf8_lossy(line);
        let fields: Vec<_> = text.split(',').collect();
        if fields.len() != self.columns.len() {
            let names: Vec<_> = self.columns.iter().map(|(name, _)| *name).collect();
            let (got, expected) = (fields.len(), names.len());
            return Err(TraceError::Fields { got, expected, header: names.join(",") });
        }
        let mut row = Row { tokens: 0, output_tokens: 0, seconds: 0.0 };
        for (text, (name, column)) in fields.iter().zip(&self.columns) {
            match column {
                Column::Input => row.tokens = count(name, text)?,
                Column::Output => row.output_tokens = count(name, text)?,
                Column::Count => {
                    count(name, text)?;
                }
                Column::Time => row.seconds = time(name, text, timestamp(text))?,
                Column::Seconds => row.seconds = time(name, text, seconds(text))?,
                Column::TimeOrSeconds => {
                    let read = timestamp(text).or_else(|| seconds(text));
                    row.seconds = time(name, text, read)?;
                }
                Column::Other => {}
            }
        }
        Ok(row)
    }
}

fn time(field: &'static str, text: &str, read: Option<f64>) -> Result<f64, TraceError> {
    read.ok_or_else(|| {
        let expected = match field {
            "TIMESTAMP" => "a time such as 2023-11-16 18:15:46.6805900",
            _ => "seconds from 0",
        };
        TraceError::Field { field, got: start_of(text), expected }
    })
}

/// Reads seconds, with or without a fraction.
fn seconds(text: &str) -> Option<f64> {
    let (whole, part) = text.split_once('.').unwrap_or((text, "0"));
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    text.parse().ok().filter(|_| is_number(whole) && is_number(part))
}

fn start_of(text: &str) -> String {
    text.chars().take(40).collect()
}

fn count(field: &'static str, text: &str) -> Result<u64, TraceError> {
    // A count has no sign.
    let digits = text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|_| digits).ok_or_else(|| {
        let expected = "a count from 0";
        TraceError::Field { field, got: start_of(text), expected }
    })
}

/// Reads a date and a time, with or without a fraction of a second and an offset, as seconds from
/// a fixed moment.
fn timestamp(text: &str) -> Option<f64> {
    let (date, time) = text.split_once([' ', 'T'])?;
    let end = time.find(['+', '-', 'Z']).unwrap_or(time.len());
    let (time, offset) = time.split_at(end);
    let (time, fraction) = time.split_once('.').unwrap_or((time, "0"));
    let offset_minutes = match offset.strip_prefix(['+', '-']) {
        Some(behind) => {
            let [hours, minutes] = numbers(behind, ':', [(2, 0, 23), (2, 0, 59)])?;
            let ahead = hours * 60.0 + minutes;
            if offset.starts_with('-') { -ahead } else { ahead }
        }
        None => Some(0.0).filter(|_| offset.is_empty() || offset == "Z")?,
    };
    let [year, month, day] = numbers(date, '-', [(4, 0, 9999), (2, 1, 12), (2, 1, 31)])?;
    let [hour, minute, second] = numbers(time, ':', [(2, 0, 23), (2, 0, 59), (2, 0, 60)])?;
    let part = seconds(&format!("0.{fraction}"))?;
    let minutes = days(year, month, day) * 1440.0 + hour * 60.0 + minute - offset_minutes;
    Some(minutes * 60.0 + second + part)
}

/// Returns the days from a fixed day to a date of the Gregorian calendar. Its years begin in March,
/// so that a leap day is the last of its year and 153 days are five months.
fn days(year: f64, month: f64, day: f64) -> f64 {
    let (year, month) = if month < 3.0 { (year - 1.0, month + 9.0) } else { (year, month - 3.0) };
    let leap_days = (year / 4.0).floor() - (year / 100.0).floor() + (year / 400.0).floor();
    year * 365.0 + leap_days + (month.mul_add(153.0, 2.0) / 5.0).floor() + day
}

/// Reads numbers with the given digits, smallest and largest values.
fn numbers<const N: usize>(
    text: &str,
    separator: char,
    expected: [(usize, u32, u32); N],
) -> Option<[f64; N]> {
    let mut parts = text.split(separator);
    let read = expected.map(|(len, least, most)| {
        let part = parts.next()?;
        let is_number = part.len() == len && part.bytes().all(|byte| byte.is_ascii_digit());
        let number: u32 = part.parse().ok().filter(|_| is_number)?;
        (least..=most).contains(&number).then(|| f64::from(number))
    });
    let has_all = parts.next().is_none() && read.iter().all(Option::is_some);
    has_all.then(|| read.map(Option::unwrap_or_default))
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
            assert!(timestamp(text).is_some(), "{text}");
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
            assert_eq!(timestamp(text), None, "{text}");
        }
    }

    #[test]
    fn times_have_their_distance() {
        for (from, to, seconds) in [
            ("2023-11-16 18:15:46.5", "2023-11-16 18:15:47.75", 1.25),
            ("2023-11-16 23:59:59", "2023-11-17T00:00:01Z", 2.0),
            ("2024-02-28 00:00:00", "2024-03-01 00:00:00", 2.0 * 86_400.0),
            ("2023-02-28 00:00:00", "2023-03-01 00:00:00", 86_400.0),
            ("1900-02-28 00:00:00", "1900-03-01 00:00:00", 86_400.0),
            ("2000-02-28 00:00:00", "2000-03-01 00:00:00", 2.0 * 86_400.0),
            ("2023-12-31 00:00:00", "2024-12-31 00:00:00", 366.0 * 86_400.0),
            ("1970-01-01 00:00:00", "2026-11-26 00:00:00", 20_783.0 * 86_400.0),
            ("2024-05-10 10:00:00+00:00", "2024-05-10 10:00:00-01:30", 5400.0),
            ("2024-05-10 10:00:00+02:00", "2024-05-10 10:00:00", 7200.0),
        ] {
            let got = timestamp(to).expect(to) - timestamp(from).expect(from);
            assert!((got - seconds).abs() < 1e-4, "{from} to {to}: {got}");
        }
    }

    #[test]
    fn headers_are_known_by_their_columns() {
        let format = |line: &str| Columns::of_header(line.as_bytes()).map(|known| known.format);
        for (line, expected) in [
            (AZURE, Some(Format::Azure)),
            ("TIMESTAMP,NumImages,ContextTokens,GeneratedTokens", Some(Format::Azure)),
            ("GeneratedTokens, ContextTokens, TIMESTAMP", Some(Format::Azure)),
            (BURST_GPT, Some(Format::BurstGpt)),
            (
                "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,\
                 Total tokens,Log Type",
                Some(Format::BurstGpt),
            ),
            ("TIMESTAMP,ContextTokens", None),
            ("TIMESTAMP,ContextTokens,ContextTokens", None),
            ("TIMESTAMP,ContextTokens,GeneratedTokens,Model", None),
            ("", None),
        ] {
            assert_eq!(format(line), expected, "{line}");
        }
        assert_eq!(Columns::of_header(b"\xff\xfe"), None);
    }

    #[test]
    fn a_request_of_every_header_is_read() {
        for (header, row, tokens) in [
            ("GeneratedTokens,ContextTokens,TIMESTAMP", "44,374,2023-11-16 18:15:46", (374, 44)),
            (
                "TIMESTAMP,NumImages,ContextTokens,GeneratedTokens",
                "2024-10-15 00:00:00.009930+00:00,2,1500,20",
                (1500, 20),
            ),
            ("TIMESTAMP,NumImages,ContextTokens,GeneratedTokens", "12.5,0,7,20", (7, 20)),
            (BURST_GPT, "5,ChatGPT,472,18,490,Conversation log", (472, 18)),
            (BURST_GPT, "5.25,GPT-4,0,0,0,API log", (0, 0)),
            (
                "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,\
                 Total tokens,Log Type",
                "5,,,ChatGPT,472,18,490,API log",
                (472, 18),
            ),
        ] {
            let columns = Columns::of_header(header.as_bytes()).expect(header);
            let row = columns.parse(row.as_bytes()).expect(row);
            assert_eq!((row.tokens, row.output_tokens), tokens);
        }
        let burst = Columns::of_header(BURST_GPT.as_bytes()).expect("a header");
        for (row, words) in [
            ("5,ChatGPT,-1,18,490,x", "Request tokens is \"-1\""),
            ("-5,ChatGPT,1,18,490,x", "Timestamp is \"-5\", expected seconds from 0"),
            ("now,ChatGPT,1,18,490,x", "Timestamp is \"now\""),
            ("5,ChatGPT,1,18,490", "5 fields, expected the 6 of Timestamp,Model"),
            ("5,ChatGPT,,18,490,x", "Request tokens is \"\""),
        ] {
            let error = burst.parse(row.as_bytes()).expect_err(row).to_string();
            assert!(error.contains(words), "{row}: {error}");
        }
    }

    #[test]
    fn invalid_requests_are_refused() {
        let parse = |line: &[u8]| Columns::check_header(AZURE.as_bytes())?.parse(line);
        let error = |line: &[u8]| parse(line).expect_err("no request").to_string();
        let time = "2023-11-16 18:15:46.6805900";
        let read = parse(format!("{time},374,44").as_bytes()).expect("a request");
        assert_eq!(read.tokens, 374);
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
