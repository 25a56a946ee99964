//! A JSON object whose fields are read one by one, so that errors name the field.
use std::fmt;

use serde::Deserialize;
use serde_json::{Map, Value};

use crate::error::ConfigError;
use crate::geometry::{COUNT_MAX, bounded};

/// An object of a configuration, its place in the file for messages, and defaults of absent counts.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Object<'a> {
    /// Empty for the file itself.
    place: &'static str,
    fields: &'a Map<String, Value>,
    defaults: &'static [(&'static str, u32)],
}

impl<'a> Object<'a> {
    pub(crate) fn new(place: &'static str, value: &'a Value) -> Result<Self, ConfigError> {
        match value {
            Value::Object(fields) => Ok(Self { place, fields, defaults: &[] }),
            other => {
                let place = if place.is_empty() { "the file" } else { place };
                Err(wrong(place.to_owned(), other, "an object"))
            }
        }
    }

    pub(crate) fn with_defaults(self, defaults: &'static [(&'static str, u32)]) -> Self {
        Self { defaults, ..self }
    }

    /// Returns the field, unless it is null.
    pub(crate) fn value(&self, key: &str) -> Option<&'a Value> {
        self.fields.get(key).filter(|value| !value.is_null())
    }

    /// Returns whether the field exists, null included.
    pub(crate) fn has(&self, key: &str) -> bool {
        self.fields.contains_key(key)
    }

    /// Returns the first of the fields that exists.
    pub(crate) fn first(&self, keys: &[&'static str]) -> Option<(&'static str, &'a Value)> {
        keys.iter().find_map(|key| self.value(key).map(|value| (*key, value)))
    }

    /// Returns the field as a `T`, `None` if it is absent or null.
    pub(crate) fn get<T: Deserialize<'a>>(&self, key: &str) -> Result<Option<T>, ConfigError> {
        let Some(value) = self.value(key) else {
            return Ok(None);
        };
        // serde's message is "invalid type" or "invalid value", with the expected type.
        let read = T::deserialize(value).map(Some);
        read.map_err(|error| field_error(self.name(key), format!("has an {error}")))
    }

    /// Returns the field as a `T`; it must exist.
    pub(crate) fn required<T: Deserialize<'a>>(&self, key: &'static str) -> Result<T, ConfigError> {
        self.get(key)?.ok_or(ConfigError::Missing { field: key })
    }

    /// Returns the text in the field, `None` for anything else.
    pub(crate) fn text(&self, key: &str) -> Option<&'a str> {
        self.value(key).and_then(Value::as_str)
    }

    /// Returns a Boolean field.
    pub(crate) fn flag(&self, key: &str) -> Result<Option<bool>, ConfigError> {
        let flag = |value: &Value| value.as_bool().ok_or_else(|| self.wrong(key, "true or false"));
        self.value(key).map(flag).transpose()
    }

    pub(crate) fn list(&self, key: &str) -> Result<Option<&'a [Value]>, ConfigError> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Array(list)) => Ok(Some(list)),
            Some(_) => Err(self.wrong(key, "a list")),
        }
    }

    /// Returns the object in the field, `None` if it is absent or null.
    pub(crate) fn object(&self, key: &'static str) -> Result<Option<Self>, ConfigError> {
        self.value(key).map(|value| Self::new(key, value)).transpose()
    }

    /// Returns a count of at least 1 that any of these fields may give; all that exist must agree.
    /// If none exists, a default is used and noted.
    pub(crate) fn count(
        &self,
        keys: &[&'static str],
        notes: &mut Vec<String>,
    ) -> Result<Option<u32>, ConfigError> {
        let mut agreed = Agreed::none();
        for key in keys {
            let name = || self.name(key);
            let read = |value| bounded(&name(), whole(name(), value)?, COUNT_MAX);
            agreed = agreed.with(name(), self.value(key).map(read).transpose()?)?;
        }
        let found = agreed.value();
        if found.is_some() || keys.iter().any(|key| self.has(key)) {
            return Ok(found);
        }
        let default = self.defaults.iter().find(|(key, _)| keys.contains(key));
        Ok(default.map(|(key, count)| {
            notes
                .push(format!("{key} is not in the file: {count}, as models of this type have it"));
            *count
        }))
    }

    /// Returns a count that must exist.
    pub(crate) fn required_count(
        &self,
        keys: &[&'static str],
        notes: &mut Vec<String>,
    ) -> Result<u32, ConfigError> {
        let field = keys.first().copied().unwrap_or_default();
        self.count(keys, notes)?.ok_or(ConfigError::Missing { field })
    }

    /// Returns a number from 0, such as the index of a first layer.
    pub(crate) fn number(&self, key: &str) -> Result<Option<u32>, ConfigError> {
        self.value(key).map(|value| self.number_of(key, value)).transpose()
    }

    /// Returns numbers from 0.
    pub(crate) fn numbers(&self, key: &str) -> Result<Option<Vec<u32>>, ConfigError> {
        let Some(list) = self.list(key)? else {
            return Ok(None);
        };
        list.iter().map(|value| self.number_of(key, value)).collect::<Result<_, _>>().map(Some)
    }

    fn number_of(&self, key: &str, value: &Value) -> Result<u32, ConfigError> {
        let (field, got, max) = (self.name(key), whole(self.name(key), value)?, u32::MAX);
        u32::try_from(got).map_err(|_| ConfigError::TooLarge { field, got, max })
    }

    /// Returns token ids: one, a list, or none if the field is -1, as some files write it. `None`
    /// if the field is absent or null.
    pub(crate) fn ids(&self, key: &str) -> Result<Option<Vec<u32>>, ConfigError> {
        let Some(value) = self.value(key) else {
            return Ok(None);
        };
        let values = match value {
            Value::Array(values) => values.as_slice(),
            one => std::slice::from_ref(one),
        };
        let mut ids = Vec::with_capacity(values.len());
        for value in values.iter().filter(|value| value.as_i64() != Some(-1)) {
            let id = value.as_u64().and_then(|id| u32::try_from(id).ok());
            let expected = "a token id, a list of them, or null or -1 for none";
            ids.push(id.ok_or_else(|| wrong(self.name(key), value, expected))?);
        }
        Ok(Some(ids))
    }

    /// Returns the name of a field for messages.
    pub(crate) fn name(&self, key: &str) -> String {
        if self.place.is_empty() { key.to_owned() } else { format!("{} {key}", self.place) }
    }

    /// Makes the error for a field of the wrong type.
    fn wrong(&self, key: &str, expected: &str) -> ConfigError {
        wrong(self.name(key), self.value(key).unwrap_or(&Value::Null), expected)
    }
}

/// A value that several fields may give; all that exist must agree.
#[derive(Debug)]
pub(crate) struct Agreed<T>(Option<(String, T)>);

impl<T: PartialEq + fmt::Display> Agreed<T> {
    pub(crate) fn none() -> Self {
        Self(None)
    }

    /// Adds the value of one field.
    pub(crate) fn with(mut self, name: String, value: Option<T>) -> Result<Self, ConfigError> {
        let Some(value) = value else {
            return Ok(self);
        };
        match &self.0 {
            None => self.0 = Some((name, value)),
            Some((_, known)) if *known == value => {}
            Some((first, known)) => {
                return Err(ConfigError::Contradiction {
                    first: first.clone(),
                    first_value: known.to_string(),
                    second: name,
                    second_value: value.to_string(),
                });
            }
        }
        Ok(self)
    }

    pub(crate) fn value(self) -> Option<T> {
        self.0.map(|(_, value)| value)
    }
}

pub(crate) fn field_error(field: String, problem: String) -> ConfigError {
    ConfigError::Field { field, problem }
}

pub(crate) fn whole(field: String, value: &Value) -> Result<u64, ConfigError> {
    value.as_u64().ok_or_else(|| wrong(field, value, "a whole number from 0"))
}

/// Makes the error for a value of the wrong type; long values are shortened.
pub(crate) fn wrong(field: String, value: &Value, expected: &str) -> ConfigError {
    let mut got = value.to_string();
    if got.len() > 60 {
        got = format!("{}..", got.chars().take(57).collect::<String>());
    }
    field_error(field, format!("is {got}, expected {expected}"))
}
