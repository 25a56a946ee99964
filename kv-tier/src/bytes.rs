//! Sizes of memory as text.
use std::fmt;
use std::str::FromStr;

use kv_core::num::to_f64;

/// A number of bytes, as text `123`, `24GiB` or `1.5 GB`: units in any case.
///
/// ```
/// use kv::tier::Bytes;
/// assert_eq!("1.5KiB".parse::<Bytes>()?, Bytes(1536));
/// assert_eq!(Bytes(24 << 30).to_string(), "24.00 GiB");
/// # Ok::<(), kv::tier::BytesError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[expect(clippy::exhaustive_structs, reason = "a number")]
pub struct Bytes(pub u64);

/// A text that is no size of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BytesError {
    /// It is no number with a unit.
    #[error("expected a number with an optional unit, such as 24GiB")]
    Form,
    /// It is more than 64 bits.
    #[error("too large")]
    TooLarge,
}

const UNITS: [(&str, u64); 9] = [
    ("TiB", 1 << 40),
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
    ("TB", 1_000_000_000_000),
    ("GB", 1_000_000_000),
    ("MB", 1_000_000),
    ("KB", 1_000),
    ("B", 1),
];

impl FromStr for Bytes {
    type Err = BytesError;

    fn from_str(text: &str) -> Result<Self, BytesError> {
        let lower = text.trim().to_ascii_lowercase();
        let unit = UNITS.iter().find_map(|(name, bytes)| {
            lower.strip_suffix(&name.to_ascii_lowercase()).map(|number| (number, *bytes))
        });
        let (number, unit) = unit.unwrap_or((&lower, 1));
        let (whole, part) = number.trim().split_once('.').unwrap_or((number.trim(), ""));
        let digits = |s: &str| s.bytes().all(|byte| byte.is_ascii_digit());
        if whole.is_empty() || !digits(whole) || !digits(part) || part.len() > 12 {
            return Err(BytesError::Form);
        }
        let scale = 10_u128.checked_pow(u32::try_from(part.len()).unwrap_or(0));
        let value = format!("{whole}{part}").parse::<u128>().ok();
        let bytes = value
            .and_then(|value| value.checked_mul(u128::from(unit)))
            .zip(scale)
            .and_then(|(value, scale)| value.checked_div(scale))
            .and_then(|bytes| u64::try_from(bytes).ok());
        bytes.map(Self).ok_or(BytesError::TooLarge)
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let binary = UNITS.iter().filter(|(name, _)| name.ends_with("iB"));
        match binary.into_iter().find(|(_, bytes)| self.0 >= *bytes) {
            Some((name, bytes)) => write!(f, "{:.2} {name}", to_f64(self.0) / to_f64(*bytes)),
            None => write!(f, "{} B", self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_exactly() {
        for (text, bytes) in [
            ("0", 0),
            ("123", 123),
            ("1B", 1),
            ("24GiB", 24 << 30),
            ("80GB", 80_000_000_000),
            ("80 gb", 80_000_000_000),
            ("1.5KiB", 1536),
            ("0.25MiB", 1 << 18),
            ("2TiB", 2 << 40),
            ("18446744073709551615", u64::MAX),
        ] {
            assert_eq!(text.parse::<Bytes>(), Ok(Bytes(bytes)), "{text}");
        }
        for text in
            ["", "GiB", "-1", "1e9", "1.GiBB", "NaN", "1,5GB", "0x10", "99999999TiB", ".5GB"]
        {
            assert!(text.parse::<Bytes>().is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_are_shown_in_binary_units() {
        assert_eq!(Bytes(1023).to_string(), "1023 B");
        assert_eq!(Bytes(1536).to_string(), "1.50 KiB");
        assert_eq!(Bytes(24 << 30).to_string(), "24.00 GiB");
    }
}
