//! What can go wrong between a model's files and its last token.
use std::error::Error as StdError;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use candle_core::Error as CandleError;
use kv::CacheError;
use kv::error::{DeviceError, PlanError, SpecError};
use kv::quant::calibrate::CalibrateError;
use kv::quant::file::FileError;

use crate::config::ConfigError;
use crate::gguf::GgufError;
use crate::sampler::SampleError;
use crate::scheduler::ScheduleError;
use crate::text::TextError;
use crate::weights::WeightError;

/// Anything that reading or running a model can fail with.
///
/// A message says one thing; [`StdError::source`] goes on with the cause, so a program prints the
/// whole chain.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file could not be used; the source says why.
    #[error("{}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: Box<Self>,
    },
    /// The operating system refused.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// A text is no JSON.
    #[error(transparent)]
    Json(ForeignError),
    /// A text cannot be read, or cannot be turned into tokens.
    #[error(transparent)]
    Text(#[from] TextError),
    /// A model is described wrongly, or in a way that is not supported.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A weight is not what the configuration says.
    #[error(transparent)]
    Weights(#[from] WeightError),
    /// A GGUF file cannot be used.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// A tensor operation failed.
    #[error(transparent)]
    Tensor(ForeignError),
    /// Rows cannot be calibrated with.
    #[error(transparent)]
    Calibrate(#[from] CalibrateError),
    /// A calibration file is damaged, or of another model.
    #[error(transparent)]
    CalibrationFile(#[from] FileError),
    /// A request cannot run.
    #[error(transparent)]
    Schedule(#[from] ScheduleError),
    /// No token can be chosen from logits.
    #[error(transparent)]
    Sample(#[from] SampleError),
    /// The cache refused, or its device failed.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// A [`Model`](crate::Model) that is not of this crate failed.
    #[error(transparent)]
    Model(Box<dyn StdError + Send + Sync>),
}

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

/// candle adds a backtrace to its errors where the environment asks for one. It is left out: the
/// message is for the user of a program.
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

impl From<CandleError> for Error {
    fn from(error: CandleError) -> Self {
        Self::Tensor(error.into())
    }
}

impl From<serde_json::Error> for Error {
    fn from(error: serde_json::Error) -> Self {
        Self::Json(ForeignError::new(error))
    }
}

impl From<SpecError> for Error {
    fn from(error: SpecError) -> Self {
        Self::Cache(error.into())
    }
}

impl From<PlanError> for Error {
    fn from(error: PlanError) -> Self {
        Self::Cache(error.into())
    }
}

impl From<DeviceError> for Error {
    fn from(error: DeviceError) -> Self {
        Self::Cache(error.into())
    }
}

/// Names the file that an error is about.
pub(crate) trait InFile<T> {
    fn in_file(self, path: &Path) -> Result<T, Error>;
}

impl<T, E: Into<Error>> InFile<T> for Result<T, E> {
    fn in_file(self, path: &Path) -> Result<T, Error> {
        self.map_err(|error| Error::File { path: path.to_owned(), source: Box::new(error.into()) })
    }
}

/// The messages of an error and its sources, as a program shows them.
#[cfg(test)]
pub(crate) fn chain(error: &dyn StdError) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_backtrace_is_no_part_of_a_message() {
        let error = CandleError::WithBacktrace {
            inner: Box::new(CandleError::Msg("no such tensor".to_owned())),
            backtrace: Box::new(std::backtrace::Backtrace::force_capture()),
        };
        let error = Err::<(), _>(error).in_file(Path::new("model.gguf")).unwrap_err();
        assert_eq!(chain(&error), "model.gguf: no such tensor");
    }

    #[test]
    fn is_send_and_sync() {
        fn check<T: Send + Sync + 'static>() {}
        check::<Error>();
    }
}
