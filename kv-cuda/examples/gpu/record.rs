//! Records as lines of JSON.
use std::fmt::Write as _;

/// One flat JSON object.
#[derive(Debug)]
pub(crate) struct Record(String);

impl Record {
    /// Starts a record of a kind: `fact`, `check`, `measure` or `skipped`.
    pub(crate) fn new(kind: &str, name: &str) -> Self {
        Self("{".to_owned()).text("kind", kind).text("name", name)
    }
    pub(crate) fn text(self, key: &str, value: &str) -> Self {
        let mut quoted = String::from("\"");
        for letter in value.chars() {
            match letter {
                '"' | '\\' => quoted.extend(['\\', letter]),
                '\n' => quoted.push_str("\\n"),
                control if control < ' ' => {
                    let _ = write!(quoted, "\\u{:04x}", u32::from(control));
                }
                other => quoted.push(other),
            }
        }
        quoted.push('"');
        self.raw(key, &quoted)
    }
    /// Adds a number, unless it is not finite.
    pub(crate) fn number(self, key: &str, value: f64) -> Self {
        if value.is_finite() { self.raw(key, &value.to_string()) } else { self }
    }
    pub(crate) fn truth(self, key: &str, value: bool) -> Self {
        self.raw(key, if value { "true" } else { "false" })
    }
    pub(crate) fn line(self) -> String {
        format!("{}}}\n", self.0)
    }

    fn raw(mut self, key: &str, value: &str) -> Self {
        if self.0.len() > 1 {
            self.0.push(',');
        }
        let _ = write!(self.0, "\"{key}\":{value}");
        self
    }
}
