//! Errors of libraries below this crate.
use std::error::Error as StdError;
use std::fmt;

use candle_core::Error as CandleError;

/// An error of a library below this crate, whose type is not part of the interface.
#[derive(Debug)]
pub struct ForeignError(Box<dyn StdError + Send + Sync>);

impl ForeignError {
    pub(crate) fn new(error: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        Self(error.into())
    }
}

impl fmt::Display for ForeignError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl StdError for ForeignError {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.source()
    }
}

/// candle adds a backtrace to its errors if the environment requests one. It is left out, because
/// the message is for users of a program.
impl From<CandleError> for ForeignError {
    fn from(error: CandleError) -> Self {
        Self::new(describe(&error))
    }
}

fn describe(error: &CandleError) -> String {
    match error {
        CandleError::WithBacktrace { inner, .. } => describe(inner),
        CandleError::WithPath { inner, path } => {
            format!("{}: {}", path.display(), describe(inner))
        }
        CandleError::Context { inner, context } => format!("{context}: {}", describe(inner)),
        error => error.to_string(),
    }
}
