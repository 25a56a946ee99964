//! The error of every name that is parsed.

/// An unknown name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown {what} {name:?}, expected one of {expected}")]
pub struct UnknownName {
    what: &'static str,
    name: String,
    expected: &'static str,
}

impl UnknownName {
    /// Creates the error from what was parsed, the input, and the accepted names.
    pub fn new(what: &'static str, name: &str, expected: &'static str) -> Self {
        Self { what, name: name.to_owned(), expected }
    }
}
