//! Ages of chunks as text.
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// A time span, shown by its largest unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Age(pub(crate) Duration);

impl fmt::Display for Age {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.0.as_secs();
        let units = [("d", 86_400), ("h", 3_600), ("m", 60)];
        let unit = units.into_iter().find(|(_, unit)| seconds >= *unit).unwrap_or(("s", 1));
        let number = seconds.checked_div(unit.1).unwrap_or(0);
        f.pad(&format!("{number}{}", unit.0))
    }
}

impl FromStr for Age {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let digits = text.bytes().take_while(u8::is_ascii_digit).count();
        let (number, unit) = text.split_at(digits);
        let unit = match unit {
            "s" => 1,
            "m" => 60,
            "h" => 3_600,
            "d" => 86_400,
            _ => return Err("expected a number and a unit, such as 90m, 12h or 30d".to_owned()),
        };
        let seconds = number.parse::<u64>().ok().and_then(|number| number.checked_mul(unit));
        let seconds = seconds.ok_or_else(|| "not a number of seconds".to_owned())?;
        Ok(Self(Duration::from_secs(seconds)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ages_have_units() {
        for (text, seconds) in [("0s", 0), ("90m", 5_400), ("12h", 43_200), ("30d", 2_592_000)] {
            assert_eq!(text.parse(), Ok(Age(Duration::from_secs(seconds))), "{text}");
        }
        for text in ["", "7", "d", "7w", "-1d", "1.5h", "7 d", "99999999999999999999d"] {
            assert!(text.parse::<Age>().is_err(), "{text}");
        }
    }

    #[test]
    fn ages_have_one_unit() {
        for (seconds, shown) in
            [(0, "0s"), (59, "59s"), (60, "1m"), (7_199, "1h"), (86_400, "1d"), (8_640_000, "100d")]
        {
            assert_eq!(Age(Duration::from_secs(seconds)).to_string(), shown);
        }
    }
}
