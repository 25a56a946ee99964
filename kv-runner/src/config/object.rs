//! A JSON object whose fields are read one by one, so that errors name the field.
use std::fmt;

use serde::Deserialize;
use serde_json::{Map, Value};

use super::ConfigError;

/// An object of a configuration, and its place in the file for messages.
#[derive(Debug, Clone, Copy)]
pub(super) struct Object<'a> {
    /// Empty for the file itself.
    place: &'static str,
    fields: &'a Map<String, Value>,
}

impl<'a> Object<'a> {
    pub(super) fn new(place: &'static str, value: &'a Value) -> Result<Self, ConfigError> {
        match value {
            Value::Object(fields) => Ok(Self { place, fields }),
            other => {
                let place = if place.is_empty() { "the file" } else { place };
                Err(field_error(place.to_owned(), format!("is {other}, expected an object")))
            }
        }
    }

    /// Returns the field, unless it is null.
    pub(super) fn value(&self, key: &str) -> Option<&'a Value> {
        self.fields.get(key).filter(|value| !value.is_null())
    }

    /// Returns whether the field exists, null included.
    pub(super) fn has(&self, key: &str) -> bool {
        self.fields.contains_key(key)
    }

    /// Returns the field as a `T`, `None` if it is absent or null.
    pub(super) fn get<T: Deserialize<'a>>(&self, key: &str) -> Result<Option<T>, ConfigError> {
        let Some(value) = self.value(key) else {
            return Ok(None);
        };
        // serde's message is "invalid type" or "invalid value", with the expected type.
        let read = T::deserialize(value).map(Some);
        read.map_err(|error| field_error(self.name(key), format!("has an {error}")))
    }

    /// Returns the field as a `T`; it must exist.
    pub(super) fn required<T: Deserialize<'a>>(&self, key: &'static str) -> Result<T, ConfigError> {
        self.get(key)?.ok_or(ConfigError::MissingField { field: key })
    }

    /// Returns the object in the field, `None` if it is absent or null.
    pub(super) fn object(&self, key: &'static str) -> Result<Option<Self>, ConfigError> {
        self.value(key).map(|value| Self::new(key, value)).transpose()
    }

    /// Returns token ids: one, a list of them, or none if the field is -1, as some files write it.
    /// `None` if it is absent or null.
    pub(super) fn ids(&self, key: &str) -> Result<Option<Vec<u32>>, ConfigError> {
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
            ids.push(id.ok_or_else(|| {
                let expected = "expected a token id, a list of them, or null or -1 for none";
                field_error(self.name(key), format!("is {value}, {expected}"))
            })?);
        }
        Ok(Some(ids))
    }

    /// Returns the name of a field for messages.
    pub(super) fn name(&self, key: &str) -> String {
        if self.place.is_empty() { key.to_owned() } else { format!("{} {key}", self.place) }
    }
}

/// A value that several fields may give; all that exist must agree.
#[derive(Debug)]
pub(super) struct Agreed<T>(Option<(String, T)>);

impl<T: PartialEq + fmt::Display> Agreed<T> {
    pub(super) fn none() -> Self {
        Self(None)
    }

    /// Adds the value of one field.
    pub(super) fn with(mut self, name: String, value: Option<T>) -> Result<Self, ConfigError> {
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

    pub(super) fn value(self) -> Option<T> {
        self.0.map(|(_, value)| value)
    }
}

pub(super) fn field_error(field: String, problem: String) -> ConfigError {
    ConfigError::Field { field, problem }
}
