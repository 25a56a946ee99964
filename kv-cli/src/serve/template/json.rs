//! The filter `tojson` as transformers has it: Python's `json.dumps`, which escapes nothing for
//! HTML and keeps the order of keys.
// Writes values that may be anything.
#![warn(clippy::arithmetic_side_effects, clippy::indexing_slicing)]
use std::fmt::Write as _;

use minijinja::value::{Kwargs, Rest, ValueKind};
use minijinja::{Error, ErrorKind, Value};

/// Deepest nesting that is written.
const DEPTH_MAX: usize = 128;

/// Writes a value: `tojson(ensure_ascii=false, indent=none, separators=none, sort_keys=false)`.
#[expect(clippy::needless_pass_by_value, reason = "the engine hands arguments over so")]
pub(super) fn tojson(value: &Value, args: Rest<Value>, named: Kwargs) -> Result<String, Error> {
    let mut args = args.0.into_iter();
    let mut option = |name: &str| match args.next() {
        Some(value) => Ok(Some(value)),
        None => named.get::<Option<Value>>(name),
    };
    let is_ascii = option("ensure_ascii")?.is_some_and(|value| value.is_true());
    let indent = option("indent")?.map(|value| indent(&value)).transpose()?.flatten();
    let separators = option("separators")?.filter(|value| !value.is_none());
    let sorts = option("sort_keys")?.is_some_and(|value| value.is_true());
    named.assert_all_used()?;
    let (item, key) = match separators {
        Some(pair) => (text_at(&pair, 0)?, text_at(&pair, 1)?),
        None if indent.is_some() => (",".to_owned(), ": ".to_owned()),
        None => (", ".to_owned(), ": ".to_owned()),
    };
    let mut writer = Writer { out: String::new(), is_ascii, indent, item, key, sorts };
    writer.value(value, 0)?;
    Ok(writer.out)
}

/// Returns the indentation of a level: a number of spaces, or a text.
fn indent(value: &Value) -> Result<Option<String>, Error> {
    if value.is_none() || value.is_undefined() {
        return Ok(None);
    }
    if let Some(text) = value.as_str() {
        return Ok(Some(text.to_owned()));
    }
    let spaces = usize::try_from(i64::try_from(value.clone())?.max(0)).unwrap_or(0);
    if spaces > DEPTH_MAX {
        return Err(Error::new(ErrorKind::InvalidOperation, "tojson: indent is too large"));
    }
    Ok(Some(" ".repeat(spaces)))
}

fn text_at(pair: &Value, at: usize) -> Result<String, Error> {
    let text = pair.get_item(&Value::from(at))?;
    let refused = || Error::new(ErrorKind::InvalidOperation, "tojson: separators are two texts");
    text.as_str().map(str::to_owned).ok_or_else(refused)
}

struct Writer {
    out: String,
    is_ascii: bool,
    /// The indentation of a level; without it everything is on one line.
    indent: Option<String>,
    /// Between items, and between a key and its value.
    item: String,
    key: String,
    sorts: bool,
}

impl Writer {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > DEPTH_MAX {
            return Err(refused("the value is nested too deeply"));
        }
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.out.push_str(&number(value)?),
            ValueKind::String => {
                let text = value.as_str().ok_or_else(|| refused("a text is not Unicode"))?;
                self.text(text)?;
            }
            ValueKind::Seq | ValueKind::Iterable => self.list(value, depth)?,
            ValueKind::Map => self.map(value, depth)?,
            kind => return Err(refused(format!("{kind} has no form in JSON"))),
        }
        Ok(())
    }

    fn list(&mut self, list: &Value, depth: usize) -> Result<(), Error> {
        let (mut is_empty, inside) = (true, depth.saturating_add(1));
        self.out.push('[');
        for value in list.try_iter()? {
            self.begin_item(std::mem::take(&mut is_empty), inside);
            self.value(&value, inside)?;
        }
        self.end(']', is_empty, depth);
        Ok(())
    }

    fn map(&mut self, map: &Value, depth: usize) -> Result<(), Error> {
        let inside = depth.saturating_add(1);
        let key_of = |key: Value| Ok((key_text(&key)?, map.get_item(&key)?));
        let mut entries = map.try_iter()?.map(key_of).collect::<Result<Vec<_>, Error>>()?;
        if self.sorts {
            entries.sort_by(|(one, _), (other, _)| one.cmp(other));
        }
        self.out.push('{');
        let mut is_empty = true;
        for (key, value) in entries {
            self.begin_item(std::mem::take(&mut is_empty), inside);
            self.text(&key)?;
            self.out.push_str(&self.key);
            self.value(&value, inside)?;
        }
        self.end('}', is_empty, depth);
        Ok(())
    }

    fn begin_item(&mut self, is_first: bool, depth: usize) {
        if !is_first {
            self.out.push_str(&self.item);
        }
        self.begin_line(depth);
    }

    fn end(&mut self, bracket: char, is_empty: bool, depth: usize) {
        if !is_empty {
            self.begin_line(depth);
        }
        self.out.push(bracket);
    }

    fn begin_line(&mut self, depth: usize) {
        if let Some(indent) = &self.indent {
            self.out.push('\n');
            self.out.push_str(&indent.repeat(depth));
        }
    }

    fn text(&mut self, text: &str) -> Result<(), Error> {
        let quoted = serde_json::to_string(text).map_err(|error| refused(error.to_string()))?;
        if !self.is_ascii {
            self.out.push_str(&quoted);
            return Ok(());
        }
        for character in quoted.chars() {
            if matches!(character, ' '..='~') {
                self.out.push(character);
                continue;
            }
            for unit in character.encode_utf16(&mut [0; 2]) {
                let _ = write!(self.out, "\\u{unit:04x}");
            }
        }
        Ok(())
    }
}

/// Writes a key, which is a text in JSON whatever its type was.
fn key_text(key: &Value) -> Result<String, Error> {
    match key.kind() {
        ValueKind::String => Ok(key.to_string()),
        ValueKind::Number => number(key),
        ValueKind::Bool => Ok(if key.is_true() { "true" } else { "false" }.to_owned()),
        ValueKind::None => Ok("null".to_owned()),
        kind => Err(refused(format!("{kind} cannot be a key"))),
    }
}

/// Writes a number as Python does.
fn number(value: &Value) -> Result<String, Error> {
    if value.is_integer() {
        return Ok(value.to_string());
    }
    let number = f64::try_from(value.clone())?;
    if number.is_nan() {
        return Ok("NaN".to_owned());
    }
    if number.is_infinite() {
        return Ok(if number > 0.0 { "Infinity" } else { "-Infinity" }.to_owned());
    }
    let text = format!("{number:?}");
    Ok(match text.split_once('e') {
        // Rust writes 1e16 and 1e-5 where Python writes 1e+16 and 1e-05.
        Some((digits, exponent)) => match exponent.strip_prefix('-') {
            Some(exponent) => format!("{digits}e-{exponent:0>2}"),
            None => format!("{digits}e+{exponent:0>2}"),
        },
        None => text,
    })
}

fn refused(what: impl std::fmt::Display) -> Error {
    Error::new(ErrorKind::BadSerialization, format!("tojson: {what}"))
}
