//! Fields of a `config.json` by the names that models use.
use serde_json::{Map, Value};

use super::geometry::{COUNT_MAX, GeometryError, bounded};

/// The object that describes the decoder, and the defaults of absent fields.
#[derive(Debug, Clone, Copy)]
pub(super) struct Keys<'a> {
    fields: &'a Map<String, Value>,
    defaults: &'static [(&'static str, u32)],
}

impl<'a> Keys<'a> {
    pub(super) fn new(fields: &'a Map<String, Value>) -> Self {
        Self { fields, defaults: &[] }
    }

    pub(super) fn with_defaults(self, defaults: &'static [(&'static str, u32)]) -> Self {
        Self { defaults, ..self }
    }

    /// Returns whether the field exists, null included.
    pub(super) fn has(&self, key: &str) -> bool {
        self.fields.contains_key(key)
    }

    /// Returns the field, unless it is null.
    pub(super) fn value(&self, key: &str) -> Option<&'a Value> {
        self.fields.get(key).filter(|value| !value.is_null())
    }

    /// Returns the first of the fields that exists.
    pub(super) fn first(&self, keys: &[&'static str]) -> Option<(&'static str, &'a Value)> {
        keys.iter().find_map(|key| self.value(key).map(|value| (*key, value)))
    }

    pub(super) fn text(&self, key: &str) -> Option<&'a str> {
        self.value(key).and_then(Value::as_str)
    }

    /// Returns a Boolean field.
    pub(super) fn flag(&self, key: &str) -> Result<Option<bool>, GeometryError> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(*flag)),
            Some(other) => Err(wrong(key, other, "true or false")),
        }
    }

    pub(super) fn list(&self, key: &str) -> Result<Option<&'a [Value]>, GeometryError> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Array(list)) => Ok(Some(list)),
            Some(other) => Err(wrong(key, other, "a list")),
        }
    }

    /// Returns the object in the field.
    pub(super) fn object(&self, key: &str) -> Result<Option<Self>, GeometryError> {
        match self.value(key) {
            None => Ok(None),
            Some(Value::Object(fields)) => Ok(Some(Self::new(fields))),
            Some(other) => Err(wrong(key, other, "an object")),
        }
    }

    /// Returns a count of at least 1 that any of these fields may give; all that exist must agree.
    /// If none exists, a default is used and noted.
    pub(super) fn count(
        &self,
        keys: &[&'static str],
        notes: &mut Vec<String>,
    ) -> Result<Option<u32>, GeometryError> {
        let mut found: Option<(&str, u32)> = None;
        for key in keys {
            let Some(value) = self.value(key) else {
                continue;
            };
            let count = bounded(key, whole(key, value)?, COUNT_MAX)?;
            match found {
                None => found = Some((key, count)),
                Some((_, known)) if known == count => {}
                Some((first, known)) => return Err(contradiction((first, known), (key, count))),
            }
        }
        if found.is_some() || keys.iter().any(|key| self.has(key)) {
            return Ok(found.map(|(_, count)| count));
        }
        let default = self.defaults.iter().find(|(key, _)| keys.contains(key));
        Ok(default.map(|(key, count)| {
            notes
                .push(format!("{key} is not in the file: {count}, as models of this type have it"));
            *count
        }))
    }

    /// Returns a number from 0, such as the index of a first layer.
    pub(super) fn number(&self, key: &str) -> Result<Option<u32>, GeometryError> {
        let number = self.value(key).map(|value| whole(key, value)).transpose()?;
        number.map(|number| number_u32(key, number)).transpose()
    }

    /// Returns a count that must exist.
    pub(super) fn required(
        &self,
        keys: &[&'static str],
        notes: &mut Vec<String>,
    ) -> Result<u32, GeometryError> {
        let field = keys.first().copied().unwrap_or_default();
        self.count(keys, notes)?.ok_or(GeometryError::Missing { field })
    }

    /// Returns numbers from 0.
    pub(super) fn numbers(&self, key: &str) -> Result<Option<Vec<u32>>, GeometryError> {
        let Some(list) = self.list(key)? else {
            return Ok(None);
        };
        let number = |value| number_u32(key, whole(key, value)?);
        list.iter().map(number).collect::<Result<_, _>>().map(Some)
    }
}

fn number_u32(key: &str, number: u64) -> Result<u32, GeometryError> {
    u32::try_from(number).map_err(|_| GeometryError::TooLarge {
        field: key.to_owned(),
        got: number,
        max: u32::MAX,
    })
}

pub(super) fn whole(key: &str, value: &Value) -> Result<u64, GeometryError> {
    value.as_u64().ok_or_else(|| wrong(key, value, "a whole number from 0"))
}

/// Makes the error for a field of the wrong type; long values are shortened.
pub(super) fn wrong(key: &str, value: &Value, expected: &'static str) -> GeometryError {
    let text = value.to_string();
    let got = if text.len() > 60 {
        format!("{}..", text.chars().take(57).collect::<String>())
    } else {
        text
    };
    GeometryError::Field { field: key.to_owned(), got, expected }
}

pub(super) fn contradiction((first, a): (&str, u32), (second, b): (&str, u32)) -> GeometryError {
    GeometryError::Contradiction {
        first: first.to_owned(),
        first_value: a.to_string(),
        second: second.to_owned(),
        second_value: b.to_string(),
    }
}
