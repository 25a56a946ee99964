//! Metadata of a GGUF file by key; numbers of every width are read alike.
use std::collections::HashMap;

use candle_core::quantized::gguf_file::{Content, Value};

use crate::error::ConfigError;
use crate::num::to_f64;

/// The metadata of one GGUF file; numbers of every width are read alike.
#[derive(Debug, Clone, Copy)]
pub struct Metadata<'a> {
    values: &'a HashMap<String, Value>,
    /// `general.architecture`, which most keys begin with.
    architecture: &'a str,
}

impl<'a> Metadata<'a> {
    pub(super) fn new(content: &'a Content) -> Self {
        let values = &content.metadata;
        let architecture = match values.get("general.architecture") {
            Some(Value::String(name)) => name.as_str(),
            _ => "",
        };
        Self { values, architecture }
    }

    /// Returns `general.architecture`; empty if the file lacks it.
    pub(crate) fn architecture(&self) -> &'a str {
        self.architecture
    }

    /// Returns the full name of a key of the architecture.
    pub(crate) fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture)
    }

    /// Returns the value of a key without the architecture's prefix.
    pub(super) fn general(&self, key: &str) -> Option<&'a Value> {
        self.values.get(key)
    }

    /// Returns the value of a key of the architecture.
    pub(super) fn value(&self, key: &str) -> Option<&'a Value> {
        self.values.get(&self.key(key))
    }

    pub(super) fn text(&self, key: &str) -> Option<&'a str> {
        match self.value(key) {
            Some(Value::String(text)) => Some(text),
            _ => None,
        }
    }

    /// Returns whether the architecture's key exists.
    pub(crate) fn has(&self, key: &str) -> bool {
        self.value(key).is_some()
    }

    /// Returns whether the architecture's key holds a list.
    pub(crate) fn is_list(&self, key: &str) -> bool {
        matches!(self.value(key), Some(Value::Array(_)))
    }

    /// Reads one number, or the common value of a list. `None` if the key is absent.
    pub(crate) fn count(&self, key: &str) -> Result<Option<u32>, ConfigError> {
        let Some(list) = self.counts(key)? else {
            return Ok(None);
        };
        match list.as_slice() {
            [first, rest @ ..] if rest.iter().all(|count| count == first) => Ok(Some(*first)),
            [] => Err(self.wrong(key, "has no entries".to_owned())),
            list => Err(self.wrong(key, format!("is {}: it differs by layer", cut(list)))),
        }
    }

    /// Reads one number, or a list with one per layer. `None` if the key is absent.
    pub(crate) fn counts(&self, key: &str) -> Result<Option<Vec<u32>>, ConfigError> {
        let Some(value) = self.value(key) else {
            return Ok(None);
        };
        let values = match value {
            Value::Array(values) => values.as_slice(),
            one => std::slice::from_ref(one),
        };
        let count = |value| {
            whole(value).ok_or_else(|| {
                self.wrong(key, "is not one whole number, or a list of them".to_owned())
            })
        };
        values.iter().map(count).collect::<Result<_, _>>().map(Some)
    }

    /// Reads a list of booleans, or of numbers with 0 for false. `None` if the key is absent or
    /// holds no list.
    pub(crate) fn flags(&self, key: &str) -> Result<Option<Vec<bool>>, ConfigError> {
        let Some(Value::Array(values)) = self.value(key) else {
            return Ok(None);
        };
        let flag = |value: &Value| match value {
            Value::Bool(flag) => Ok(*flag),
            other => whole(other)
                .map(|number| number != 0)
                .ok_or_else(|| self.wrong(key, "is not a list of true and false".to_owned())),
        };
        values.iter().map(flag).collect::<Result<_, _>>().map(Some)
    }

    /// Reads a number of at least 1, or the common value of a list; the key must exist.
    pub(crate) fn required(&self, key: &str) -> Result<u32, ConfigError> {
        match self.count(key)? {
            None => Err(self.wrong(key, "is missing".to_owned())),
            Some(0) => Err(self.wrong(key, "is 0, at least 1 is needed".to_owned())),
            Some(count) => Ok(count),
        }
    }

    /// Reads a finite number, `None` if the key is absent.
    pub(super) fn number(&self, key: &str) -> Result<Option<f64>, ConfigError> {
        let number = match self.value(key) {
            None => return Ok(None),
            Some(Value::F32(x)) => Some(f64::from(*x)),
            Some(Value::F64(x)) => Some(*x),
            Some(other) => other.to_u64().ok().map(to_f64),
        };
        match number.filter(|number| number.is_finite()) {
            Some(number) => Ok(Some(number)),
            None => Err(self.wrong(key, "is not a finite number".to_owned())),
        }
    }

    /// Reads a number above 0, `None` if the key is absent or 0, which means the same.
    pub(super) fn positive(&self, key: &str) -> Result<Option<f64>, ConfigError> {
        match self.number(key)? {
            Some(number) if number < 0.0 => {
                Err(self.wrong(key, format!("is {number}, a number above 0 is needed")))
            }
            number => Ok(number.filter(|number| *number > 0.0)),
        }
    }

    /// Returns the template that makes prompts of chats, and its key: the model's only one, or of
    /// several named ones the default, or without that the first by name. `None` without one.
    ///
    /// # Errors
    /// [`ConfigError::Field`] for a template that is not a text.
    pub fn chat_template(&self) -> Result<Option<(&'a str, &'a str)>, ConfigError> {
        let named = |key: &&String| key.starts_with("tokenizer.chat_template.");
        let default = ["tokenizer.chat_template", "tokenizer.chat_template.default"];
        let first = default.iter().find_map(|key| self.values.get_key_value(*key));
        let found = first.or_else(|| {
            let key = self.values.keys().filter(named).min()?;
            self.values.get_key_value(key)
        });
        match found {
            None => Ok(None),
            Some((key, Value::String(source))) => Ok(Some((key, source))),
            Some((key, _)) => {
                let problem = "is not a text".to_owned();
                Err(ConfigError::Field { field: key.clone(), problem })
            }
        }
    }

    /// Returns the texts of special tokens, by the names that chat templates use.
    pub fn special_tokens(&self) -> impl Iterator<Item = (&'static str, &'a str)> + use<'a> {
        const NAMES: [(&str, &str); 4] = [
            ("bos_token", "tokenizer.ggml.bos_token_id"),
            ("eos_token", "tokenizer.ggml.eos_token_id"),
            ("unk_token", "tokenizer.ggml.unknown_token_id"),
            ("pad_token", "tokenizer.ggml.padding_token_id"),
        ];
        let values = self.values;
        let text = move |key: &str| {
            let id = usize::try_from(whole(values.get(key)?)?).ok()?;
            match values.get("tokenizer.ggml.tokens")? {
                Value::Array(tokens) => match tokens.get(id)? {
                    Value::String(text) => Some(text.as_str()),
                    _ => None,
                },
                _ => None,
            }
        };
        NAMES.into_iter().filter_map(move |(name, key)| Some((name, text(key)?)))
    }

    /// Makes an error that names the key in full.
    pub(super) fn wrong(&self, key: &str, problem: String) -> ConfigError {
        ConfigError::Field { field: self.key(key), problem }
    }
}

/// Converts a whole number to `u32`.
pub(super) fn whole(value: &Value) -> Option<u32> {
    let number = match value {
        Value::I8(n) => u64::try_from(*n).ok(),
        Value::I16(n) => u64::try_from(*n).ok(),
        Value::I32(n) => u64::try_from(*n).ok(),
        Value::I64(n) => u64::try_from(*n).ok(),
        Value::Bool(_) => None,
        other => other.to_u64().ok(),
    };
    number.and_then(|number| u32::try_from(number).ok())
}

/// Formats a list of numbers; the end of a long one is left out.
fn cut(list: &[u32]) -> String {
    let first: Vec<_> = list.iter().take(8).map(u32::to_string).collect();
    let dots = if list.len() > 8 { ", .." } else { "" };
    format!("[{}{dots}]", first.join(", "))
}
