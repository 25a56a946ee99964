//! Code that stores of other systems share: the path of a chunk below a store's prefix, and the
//! parser of URLs that name a store. Knows no protocol.
use std::collections::HashMap;
use std::time::{Duration, Instant};

use url::Url;

use crate::store::{ChunkAddress, StoreError, StoreErrorKind};

/// A URL of a store that cannot be used. No variant holds a password.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StoreUrlError {
    /// The text is not a URL.
    #[error("not a URL of a store: {problem}")]
    Syntax {
        /// The parser's words.
        problem: String,
    },
    /// Another kind of store, or TLS where it is not available.
    #[error("the scheme is {given:?}, expected {expected}")]
    Scheme {
        /// The scheme of the URL.
        given: String,
        /// The schemes that are known.
        expected: &'static str,
    },
    /// A part of the URL is absent or not usable.
    #[error("the URL has no usable {part}: {problem}")]
    Part {
        /// The part, such as `host`.
        part: &'static str,
        /// The reason.
        problem: String,
    },
    /// A parameter that this store does not have.
    #[error("unknown parameter {name:?}, known are {}", known.join(", "))]
    UnknownParameter {
        /// Name of the parameter.
        name: String,
        /// Names of all parameters.
        known: &'static [&'static str],
    },
    /// A parameter that is given twice.
    #[error("parameter {name} is given twice")]
    RepeatedParameter {
        /// Name of the parameter.
        name: &'static str,
    },
    /// A parameter with a value that it cannot have.
    #[error("parameter {name} is {given:?}, expected {expected}")]
    Parameter {
        /// Name of the parameter.
        name: &'static str,
        /// The value of the URL.
        given: String,
        /// The values that are possible.
        expected: &'static str,
    },
}

/// The parameters of a URL, each of a known name and given once.
#[derive(Debug)]
pub(crate) struct Parameters(HashMap<&'static str, String>);

impl Parameters {
    /// Reads the parameters of `url`.
    pub(crate) fn of(url: &Url, known: &'static [&'static str]) -> Result<Self, StoreUrlError> {
        let mut values = HashMap::new();
        for (name, value) in url.query_pairs() {
            let Some(name) = known.iter().find(|known| **known == name) else {
                return Err(StoreUrlError::UnknownParameter { name: name.into_owned(), known });
            };
            if values.insert(*name, value.into_owned()).is_some() {
                return Err(StoreUrlError::RepeatedParameter { name });
            }
        }
        Ok(Self(values))
    }

    /// Takes the text of a parameter.
    pub(crate) fn take(&mut self, name: &'static str) -> Option<String> {
        self.0.remove(name)
    }

    /// Takes a parameter and parses it; `None` if it is absent.
    pub(crate) fn parse<T>(
        &mut self,
        name: &'static str,
        expected: &'static str,
        parse: impl FnOnce(&str) -> Option<T>,
    ) -> Result<Option<T>, StoreUrlError> {
        let Some(given) = self.take(name) else { return Ok(None) };
        match parse(&given) {
            Some(value) => Ok(Some(value)),
            None => Err(StoreUrlError::Parameter { name, given, expected }),
        }
    }
}

/// Parses a URL and refuses a fragment, which no store has.
pub(crate) fn parse_url(text: &str) -> Result<Url, StoreUrlError> {
    let url =
        Url::parse(text).map_err(|error| StoreUrlError::Syntax { problem: error.to_string() })?;
    match url.fragment() {
        None => Ok(url),
        Some(_) => Err(StoreUrlError::Part {
            part: "end",
            problem: "`#` begins a fragment; write it as %23".to_owned(),
        }),
    }
}

/// Parses a time such as `3600`, `90m` or `7d`; without a unit it is in seconds. Zero is refused.
#[cfg(feature = "redis")]
pub(crate) fn parse_duration(text: &str) -> Option<Duration> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let seconds: u64 = match unit {
        "" | "s" => 1,
        "m" => 60,
        "h" => 3_600,
        "d" => 86_400,
        _ => return None,
    };
    let number: u64 = number.parse().ok().filter(|number| *number > 0)?;
    number.checked_mul(seconds).map(Duration::from_secs)
}

/// Returns the path of a chunk below a store's prefix: `v1/<16 hex of root>/<64 hex of name>`. All
/// chunks of a root share a folder, so that it can be listed, removed or given a lifecycle.
pub(crate) fn chunk_path(chunk: &ChunkAddress) -> String {
    let mut root = chunk.root.to_string();
    root.truncate(ROOT_DIGITS);
    format!("v1/{root}/{}", chunk.name)
}

/// Returns the chunk of a path below a store's prefix. Bytes of the root that the path has not are
/// zeroes.
pub(crate) fn parse_chunk_path(path: &str) -> Option<ChunkAddress> {
    let (root, name) = path.strip_prefix("v1/")?.split_once('/')?;
    if root.len() != ROOT_DIGITS {
        return None;
    }
    let root = format!("{root:0<64}").parse().ok()?;
    Some(ChunkAddress { root, name: name.parse().ok()? })
}

/// Returns the time until the deadline.
///
/// # Errors
/// [`StoreErrorKind::Timeout`] if it has passed.
pub(crate) fn time_left(deadline: Instant, operation: &str) -> Result<Duration, StoreError> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Err(StoreError::new(StoreErrorKind::Timeout, operation));
    }
    Ok(left)
}

/// Digits of a root in a path: enough to tell roots apart, as the name alone identifies a chunk.
const ROOT_DIGITS: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::name::ChunkName;

    #[test]
    fn a_path_has_the_version_the_root_and_the_name() {
        let chunk =
            ChunkAddress { root: ChunkName::new([0xab; 32]), name: ChunkName::new([7; 32]) };
        let expected = format!("v1/{}/{}", "ab".repeat(8), "07".repeat(32));
        assert_eq!(chunk_path(&chunk), expected);
        let parsed = parse_chunk_path(&expected).unwrap();
        assert_eq!((chunk_path(&parsed), parsed.name), (expected.clone(), chunk.name));
        let upper = expected.to_uppercase().replace('V', "v");
        for other in ["", "v1", "v1//", &expected[1..], &expected[..82], &upper] {
            assert_eq!(parse_chunk_path(other), None, "{other}");
        }
        assert_eq!(parse_chunk_path(&format!("{expected}/x")), None);
    }

    #[cfg(feature = "redis")]
    #[test]
    fn durations_have_units_and_are_not_zero() {
        let seconds = |text| parse_duration(text).map(|duration| duration.as_secs());
        assert_eq!(seconds("90"), Some(90));
        assert_eq!(seconds("2m"), Some(120));
        assert_eq!(seconds("3h"), Some(10_800));
        assert_eq!(seconds("7d"), Some(604_800));
        for bad in [
            "",
            "0",
            "0d",
            "d",
            "7w",
            "-1",
            "1.5h",
            "7 d",
            "99999999999999999999",
            "9999999999999999999d",
        ] {
            assert_eq!(parse_duration(bad), None, "{bad}");
        }
    }

    #[test]
    fn parameters_are_known_and_given_once() {
        let read = |text: &str| Parameters::of(&parse_url(text).unwrap(), &["a", "b"]);
        assert_eq!(read("x://h?a=1&b=2").unwrap().take("b").unwrap(), "2");
        assert!(
            matches!(read("x://h?c=1"), Err(StoreUrlError::UnknownParameter { name, .. }) if name == "c")
        );
        assert_eq!(
            read("x://h?a=1&a=2").unwrap_err(),
            StoreUrlError::RepeatedParameter { name: "a" }
        );
        let error = read("x://h?a=1").unwrap().parse("a", "a letter", |_| None::<()>).unwrap_err();
        assert_eq!(error.to_string(), "parameter a is \"1\", expected a letter");
        assert!(matches!(parse_url("x://h#f"), Err(StoreUrlError::Part { part: "end", .. })));
        assert!(matches!(parse_url("h"), Err(StoreUrlError::Syntax { .. })));
    }
}
