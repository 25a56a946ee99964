//! Jinja as transformers sets it up for chat templates: its treatment of blanks, and the names that
//! it adds. `apply_chat_template` is the reference, and `tests/data/make_chats.py` records it.
// Reads templates that may be anything.
#![warn(clippy::arithmetic_side_effects, clippy::indexing_slicing)]
use std::fmt::Write as _;
use std::sync::Arc;

use chrono::NaiveDateTime;
use chrono::format::{Item, StrftimeItems};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Tuple, Value, ValueKind, from_args};
use minijinja::{Environment, Error, ErrorKind, State};
use minijinja_contrib::pycompat;

use super::{generation, json};

/// Tells the local time.
pub(super) type Clock = Arc<dyn Fn() -> NaiveDateTime + Send + Sync>;

/// Makes an environment with one template.
///
/// # Errors
/// The first syntax error.
pub(super) fn environment(
    name: &'static str,
    source: &str,
    clock: Clock,
) -> Result<Environment<'static>, Error> {
    let mut environment = Environment::new();
    // A tag that is alone on its line leaves no trace.
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?;
    environment.set_syntax(syntax);
    environment.set_unknown_method_callback(method);
    environment.add_filter("tojson", json::tojson);
    // Any value with a length and items, as in Python.
    environment.add_test("sequence", |value: &Value| {
        matches!(value.kind(), ValueKind::Seq | ValueKind::String | ValueKind::Map)
    });
    environment.add_function("raise_exception", |message: Value| {
        Err::<Value, _>(Error::new(ErrorKind::InvalidOperation, message.to_string()))
    });
    environment.add_function("strftime_now", move |format: Option<String>, named: Kwargs| {
        let format = match format {
            Some(format) => format,
            None => named.get("format")?,
        };
        named.assert_all_used()?;
        strftime(clock(), &format)
    });
    // Python's Jinja reads every line break as this one.
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    environment.add_template_owned(name, generation::rewrite(&source))?;
    Ok(environment)
}

/// Writes a time as Python's `datetime.strftime` does, for a time without a zone.
fn strftime(now: NaiveDateTime, format: &str) -> Result<String, Error> {
    let refused = || {
        let error = format!("strftime_now: {format:?} is no format of a time");
        Error::new(ErrorKind::InvalidOperation, error)
    };
    // Microseconds are six digits; a time without a zone has none to name.
    let (mut translated, mut rest) = (String::new(), format);
    while let Some((before, after)) = rest.split_once('%') {
        translated.push_str(before);
        let directive = after.chars().next().ok_or_else(refused)?;
        match directive {
            'f' => translated.push_str("%6f"),
            'z' | 'Z' => {}
            other => {
                translated.push('%');
                translated.push(other);
            }
        }
        rest = after.get(directive.len_utf8()..).unwrap_or_default();
    }
    translated.push_str(rest);
    let items = StrftimeItems::new(&translated).collect::<Vec<_>>();
    if items.contains(&Item::Error) {
        return Err(refused());
    }
    let mut text = String::new();
    write!(text, "{}", now.format_with_items(items.iter())).map_err(|_| refused())?;
    Ok(text)
}

/// Calls a method of Python's texts, lists and maps.
fn method(
    state: &mut State<'_, '_>,
    value: &Value,
    name: &str,
    args: &[Value],
) -> Result<Value, Error> {
    match (value.kind(), name) {
        (ValueKind::String, _) => {
            let text = value.as_str().unwrap_or_default();
            match text_method(text, name, args)? {
                Some(result) => Ok(result),
                None => pycompat::unknown_method_callback(state, value, name, args),
            }
        }
        (ValueKind::Seq, "index") => {
            let (wanted,): (&Value,) = from_args(args)?;
            let at = value.try_iter()?.position(|item| item == *wanted);
            at.map(Value::from).ok_or_else(|| not_there(wanted))
        }
        _ => pycompat::unknown_method_callback(state, value, name, args),
    }
}

/// Calls a method of a text that the engine's own list lacks.
fn text_method(text: &str, name: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    let result = match name {
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(args)?;
            Value::from(text.strip_prefix(prefix).unwrap_or(text))
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(args)?;
            Value::from(text.strip_suffix(suffix).unwrap_or(text))
        }
        "partition" => {
            let (separator,): (&str,) = from_args(args)?;
            parts(text.split_once(separator), separator, [text, "", ""])
        }
        "rpartition" => {
            let (separator,): (&str,) = from_args(args)?;
            parts(text.rsplit_once(separator), separator, ["", "", text])
        }
        "rsplit" => {
            let (separator, most): (Option<&str>, Option<usize>) = from_args(args)?;
            let separator = separator.ok_or_else(|| {
                Error::new(ErrorKind::MissingArgument, "rsplit without a separator")
            })?;
            let most = most.unwrap_or(text.len()).saturating_add(1);
            let mut found = text.rsplitn(most, separator).collect::<Vec<_>>();
            found.reverse();
            Value::from_iter(found)
        }
        "index" => {
            let (wanted,): (&str,) = from_args(args)?;
            let before = text.split_once(wanted).map(|(before, _)| before.chars().count());
            Value::from(before.ok_or_else(|| not_there(&Value::from(wanted)))?)
        }
        _ => return Ok(None),
    };
    Ok(Some(result))
}

fn parts(split: Option<(&str, &str)>, separator: &str, whole: [&str; 3]) -> Value {
    let parts = split.map_or(whole, |(before, after)| [before, separator, after]);
    Value::from(Tuple::from(parts.map(Value::from)))
}

fn not_there(wanted: &Value) -> Error {
    Error::new(ErrorKind::InvalidOperation, format!("index: {wanted} is not there"))
}

#[cfg(test)]
mod tests {
    use chrono::NaiveDate;

    use super::*;

    #[test]
    fn a_format_that_means_nothing_is_refused() {
        let date = NaiveDate::from_ymd_opt(2026, 2, 3).expect("a date");
        let now = date.and_hms_opt(4, 5, 6).expect("a time");
        assert_eq!(strftime(now, "%Y%%%f").expect("a format"), "2026%000000");
        for format in ["%", "%Q", "%Y %", "%+", "%:z", "%-", "%\u{e9}"] {
            let error = strftime(now, format).expect_err("refused").to_string();
            assert!(error.contains(&format!("{format:?}")), "{error}");
        }
    }
}
