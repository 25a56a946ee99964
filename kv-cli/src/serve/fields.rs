//! The fields of a JSON object, by the names that this server knows.
//!
//! A value stays the bytes that the client sent until a field is read, and every read is limited:
//! memory and time of a refused request are those of one walk over its body.
// Reads requests that may be anything.
#![warn(clippy::arithmetic_side_effects, clippy::indexing_slicing)]
use std::borrow::Cow;
use std::cell::Cell;
use std::fmt;

use serde::Deserialize;
use serde::de::{
    DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor,
};
use serde_json::Value;
use serde_json::error::Category;
use serde_json::value::RawValue;

use super::error::ApiError;
use super::unsupported::{OF_PROMPTS, UNSUPPORTED};

/// The fields of an object that have a name of a list.
#[derive(Debug)]
pub(super) struct Fields<'a> {
    /// The place of the object, such as `messages[0].`; empty for the body.
    place: String,
    given: Vec<(&'static str, &'a RawValue)>,
}

/// Most fields of an object.
const FIELDS_MAX: usize = 1000;

/// Most bytes of a value that may change nothing, such as `{"type": "text"}`.
const NOTHING_BYTES_MAX: usize = 64;

/// Most characters of a client's own text in an answer.
const SHOWN_MAX: usize = 60;

/// Returns a text of a client for a message: its beginning, in quotation marks.
pub(super) fn shown(text: &str) -> String {
    match text.char_indices().nth(SHOWN_MAX) {
        None => format!("{text:?}"),
        Some((end, _)) => format!("{:?}..", text.get(..end).unwrap_or_default()),
    }
}

impl<'a> Fields<'a> {
    /// Parses the body of a request, of which fields in `names` or [`UNSUPPORTED`] are kept.
    pub(super) fn parse(body: &'a [u8], names: &'static [&'static str]) -> Result<Self, ApiError> {
        let text = std::str::from_utf8(body).map_err(|error| {
            ApiError::bad(format!("the body is not UTF-8 from byte {} on", error.valid_up_to()))
        })?;
        let known = |name: &str| {
            let found = names.iter().find(|known| **known == name).copied();
            found.or_else(|| UNSUPPORTED.iter().find(|(known, _)| *known == name).map(|(n, _)| *n))
        };
        let is_full = Cell::new(false);
        match read_object(text, &known, &is_full) {
            Ok(parsed) => Self::once(String::new(), parsed),
            Err(_) if is_full.get() => {
                let error = format!("the body has more than {FIELDS_MAX} fields");
                Err(ApiError::bad(error))
            }
            Err(error) if error.classify() == Category::Data => {
                Err(ApiError::bad("the body is JSON, but no object"))
            }
            Err(error) => Err(ApiError::bad(format!("the body is not JSON: {error}"))),
        }
    }

    /// Parses an object inside of the body.
    pub(super) fn parse_inner(
        place: &str,
        value: &'a RawValue,
        names: &'static [&'static str],
    ) -> Result<Self, ApiError> {
        let known = |name: &str| names.iter().find(|known| **known == name).copied();
        let is_full = Cell::new(false);
        let why = match read_object(value.get(), &known, &is_full) {
            Ok(parsed) => return Self::once(format!("{place}."), parsed),
            Err(_) if is_full.get() => format!("more than {FIELDS_MAX} fields"),
            Err(_) => "expected an object".to_owned(),
        };
        Err(ApiError::bad(format!("{place}: {why}")).about(place))
    }

    /// Refuses a field that is there twice: two readers could take one each.
    fn once(place: String, parsed: Parsed<'a>) -> Result<Self, ApiError> {
        let fields = Self { place, given: parsed.given };
        match parsed.twice {
            None => Ok(fields),
            Some(name) => Err(fields.wrong(name, "given twice")),
        }
    }

    /// Makes the refusal of a field.
    pub(super) fn wrong(&self, name: &str, why: impl fmt::Display) -> ApiError {
        let field = format!("{}{name}", self.place);
        ApiError::bad(format!("{field}: {why}")).about(field)
    }

    /// Returns a field as its bytes; `None` if it is absent or null.
    pub(super) fn raw(&self, name: &str) -> Option<&'a RawValue> {
        let found = self.given.iter().find(|(given, _)| *given == name)?;
        (found.1.get() != "null").then_some(found.1)
    }

    /// Returns a field; `None` if it is absent or null. A value of another kind is refused with the
    /// `expected` one.
    pub(super) fn get<T: Deserialize<'a>>(
        &self,
        name: &str,
        expected: &str,
    ) -> Result<Option<T>, ApiError> {
        let Some(value) = self.raw(name) else { return Ok(None) };
        match serde_json::from_str(value.get()) {
            Ok(value) => Ok(Some(value)),
            // The parser's words are about types of this program.
            Err(_) => Err(self.wrong(name, format_args!("expected {expected}"))),
        }
    }

    /// Returns a field that is a text.
    pub(super) fn text(&self, name: &str) -> Result<Option<Cow<'a, str>>, ApiError> {
        let Some(value) = self.raw(name) else { return Ok(None) };
        text(value).map(Some).map_err(|why| self.wrong(name, why))
    }

    /// Refuses fields that would change the answer and that this server does not support. Unknown
    /// fields are ignored.
    pub(super) fn check_supported(&self) -> Result<(), ApiError> {
        self.check_those(|_| true)
    }

    /// Does what [`Self::check_supported`] does for a request that asks for tokens of its prompts
    /// alone.
    pub(super) fn check_prompt_supported(&self) -> Result<(), ApiError> {
        self.check_those(|name| OF_PROMPTS.contains(&name))
    }

    fn check_those(&self, matters: impl Fn(&str) -> bool) -> Result<(), ApiError> {
        for (name, changes_nothing) in UNSUPPORTED.iter().filter(|(name, _)| matters(name)) {
            let Some(value) = self.raw(name) else { continue };
            if !changes_nothing.iter().any(|nothing| is_equal(value.get(), nothing)) {
                let error = self.wrong(name, "not supported");
                return Err(error.with_code("unsupported_parameter"));
            }
        }
        Ok(())
    }
}

/// A value that is no text.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum NoText {
    #[error("expected a text")]
    Kind,
    #[error("an escape is half a character: \\ud800 to \\udfff stand in pairs")]
    Surrogate,
}

/// Returns the text that a value is, without a copy where the client wrote it as it is.
pub(super) fn text(value: &RawValue) -> Result<Cow<'_, str>, NoText> {
    #[derive(Deserialize)]
    #[serde(transparent)]
    struct Text<'a>(#[serde(borrow)] Cow<'a, str>);
    match serde_json::from_str(value.get()) {
        Ok(Text(text)) => Ok(text),
        Err(_) if is_text(value) => Err(NoText::Surrogate),
        Err(_) => Err(NoText::Kind),
    }
}

pub(super) fn is_text(value: &RawValue) -> bool {
    value.get().starts_with('"')
}

fn read_object<'a>(
    text: &'a str,
    known: &dyn Fn(&str) -> Option<&'static str>,
    is_full: &Cell<bool>,
) -> serde_json::Result<Parsed<'a>> {
    let mut json = serde_json::Deserializer::from_str(text);
    let parsed = json.deserialize_map(Object { known, is_full })?;
    json.end()?;
    Ok(parsed)
}

/// Returns whether two JSON texts are the same value; 1 and 1.0 are.
fn is_equal(given: &str, known: &str) -> bool {
    if given.len() > NOTHING_BYTES_MAX {
        return false;
    }
    let values = [given, known].map(serde_json::from_str::<Value>);
    match &values {
        [Ok(Value::Number(one)), Ok(Value::Number(other))] => one.as_f64() == other.as_f64(),
        [Ok(one), Ok(other)] => one == other,
        _ => false,
    }
}

/// A list that has more entries than are read.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct TooMany;

/// Returns the entries of a list; `None` for another value.
pub(super) fn entries(value: &RawValue, max: usize) -> Option<Result<Vec<&RawValue>, TooMany>> {
    let is_full = Cell::new(false);
    let mut json = serde_json::Deserializer::from_str(value.get());
    match json.deserialize_seq(Entries { max, is_full: &is_full }) {
        Ok(entries) => Some(Ok(entries)),
        Err(_) => is_full.get().then_some(Err(TooMany)),
    }
}

/// Reads a list up to a number of entries; later entries are not looked at.
struct Entries<'k> {
    max: usize,
    is_full: &'k Cell<bool>,
}

impl<'de> Visitor<'de> for Entries<'_> {
    type Value = Vec<&'de RawValue>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
        let mut entries = Vec::new();
        while let Some(entry) = list.next_element()? {
            if entries.len() == self.max {
                self.is_full.set(true);
                return Err(A::Error::custom("too many entries"));
            }
            entries.push(entry);
        }
        Ok(entries)
    }
}

/// Reads an object up to a number of fields.
struct Object<'k> {
    known: &'k dyn Fn(&str) -> Option<&'static str>,
    is_full: &'k Cell<bool>,
}

/// The result of the walk.
#[derive(Debug, Default)]
struct Parsed<'a> {
    given: Vec<(&'static str, &'a RawValue)>,
    twice: Option<&'static str>,
}

impl<'de> Visitor<'de> for Object<'_> {
    type Value = Parsed<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let (mut parsed, mut left) = (Parsed::default(), FIELDS_MAX);
        while let Some(name) = map.next_key_seed(Name(self.known))? {
            let Some(fewer) = left.checked_sub(1) else {
                self.is_full.set(true);
                return Err(A::Error::custom("too many fields"));
            };
            left = fewer;
            let Some(name) = name else {
                map.next_value::<IgnoredAny>()?;
                continue;
            };
            let value = map.next_value()?;
            if parsed.given.iter().any(|(given, _)| *given == name) {
                parsed.twice.get_or_insert(name);
            } else {
                parsed.given.push((name, value));
            }
        }
        Ok(parsed)
    }
}

/// Looks a name up without a copy of it.
struct Name<'k>(&'k dyn Fn(&str) -> Option<&'static str>);

impl<'de> DeserializeSeed<'de> for Name<'_> {
    type Value = Option<&'static str>;

    fn deserialize<D: Deserializer<'de>>(self, name: D) -> Result<Self::Value, D::Error> {
        name.deserialize_str(self)
    }
}

impl Visitor<'_> for Name<'_> {
    type Value = Option<&'static str>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a name")
    }

    fn visit_str<E>(self, name: &str) -> Result<Self::Value, E> {
        Ok((self.0)(name))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAMES: &[&str] = &["n", "text"];

    fn refused(body: &[u8]) -> Value {
        Fields::parse(body, NAMES).expect_err("refused").body()["error"].take()
    }

    #[test]
    fn a_body_that_is_no_object_is_refused() {
        for body in [&b""[..], b"{", b"[]", b"\"x\"", b"7", b"nul", b"{\"n\": 1} 2", b"{n: 1}"] {
            let error = refused(body);
            assert_eq!(error["type"], "invalid_request_error", "{error}");
        }
        let error = refused(b"{\"n\": \"\xff\"}");
        assert!(error["message"].as_str().is_some_and(|text| text.contains("UTF-8")), "{error}");
    }

    #[test]
    fn values_stay_as_they_were_sent() {
        let body = br#"{"other": [[[1e999]]], "\u006e": 1, "text": "a\nb", "echo": null}"#;
        let fields = Fields::parse(body, NAMES).expect("an object");
        assert_eq!(fields.raw("text").map(RawValue::get), Some("\"a\\nb\""));
        assert_eq!(fields.get::<u32>("n", "a number").expect("a number"), Some(1));
        assert!(fields.raw("echo").is_none() && fields.raw("other").is_none());
        assert!(fields.check_supported().is_ok());
        assert_eq!(fields.text("text").expect("a text").as_deref(), Some("a\nb"));
        assert!(fields.text("n").is_err());
        let half: &RawValue = serde_json::from_str("\"a\\ud800\"").expect("JSON");
        assert_eq!(text(half), Err(NoText::Surrogate));
    }

    #[test]
    fn a_field_that_is_there_twice_is_refused() {
        for body in [&b"{\"n\": 1, \"n\": 1}"[..], b"{\"n\": null, \"\\u006e\": 2}"] {
            assert_eq!(refused(body)["param"], "n");
        }
        assert!(Fields::parse(b"{\"x\": 1, \"x\": 2}", NAMES).is_ok(), "it is ignored");
    }

    #[test]
    fn more_than_a_number_of_entries_is_not_read() {
        let list = |text: &'static str, max| {
            let value: &RawValue = serde_json::from_str(text).expect("JSON");
            entries(value, max).map(|list| list.map(|list| list.len()))
        };
        assert_eq!(list("[1, \"]\", [[]]]", 3), Some(Ok(3)));
        assert_eq!(list("[1, \"]\", [[]]]", 2), Some(Err(TooMany)));
        assert_eq!((list("[]", 0), list("{}", 9)), (Some(Ok(0)), None));
        let many = (0..=FIELDS_MAX).map(|at| format!("\"{at}\": 0")).collect::<Vec<_>>();
        let error = refused(format!("{{{}}}", many.join(",")).as_bytes());
        assert_eq!(error["message"], "the body has more than 1000 fields");
        let object = format!("{{{}}}", many[1..].join(","));
        assert!(Fields::parse(object.as_bytes(), NAMES).is_ok());
    }

    #[test]
    fn a_refusal_says_what_is_expected_and_no_more_than_a_part_of_what_came() {
        let body = format!("{{\"n\": \"{}\"}}", "x".repeat(1000));
        let fields = Fields::parse(body.as_bytes(), NAMES).expect("an object");
        let error = fields.get::<u32>("n", "a whole number").expect_err("a text").body();
        assert_eq!(error["error"]["message"], "n: expected a whole number");
        assert_eq!(shown(&"\u{e9}".repeat(61)), format!("\"{}\"..", "\u{e9}".repeat(60)));
        assert_eq!(shown("a\nb"), "\"a\\nb\"");
    }

    #[test]
    fn values_are_compared_and_not_their_spelling() {
        assert!(is_equal("1.0", "1") && is_equal("{ \"type\" : \"text\" }", "{\"type\":\"text\"}"));
        assert!(!is_equal("1", "0") && !is_equal("\"0\"", "0") && !is_equal("[0]", "[]"));
        assert!(!is_equal(&" ".repeat(1000), "0"));
    }
}
