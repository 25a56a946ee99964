//! Errors from a model's files to its last token.
mod files;
mod foreign;

use std::io;
use std::path::{Path, PathBuf};

use candle_core::Error as CandleError;
use kv::CacheError;
use kv::error::{DeviceError, PlanError, SpecError};
use kv::quant::calibrate::CalibrateError;
use kv::quant::file::FileError;

pub use files::{ConfigError, GgufError, TextError, WeightError};
pub use foreign::ForeignError;

/// Any failure of reading or running a model.
///
/// The message names one cause; [`source`](std::error::Error::source) has the next, so a program
/// prints the whole chain.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file could not be used; the source is the cause.
    #[error("{}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: Box<Self>,
    },
    /// The operating system reported an error.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// A text is not JSON.
    #[error(transparent)]
    Json(ForeignError),
    /// A text cannot be read, or cannot be turned into tokens.
    #[error(transparent)]
    Text(#[from] TextError),
    /// A model's description is invalid or unsupported.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A weight differs from the configuration.
    #[error(transparent)]
    Weights(#[from] WeightError),
    /// A GGUF file cannot be used.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// A tensor operation failed.
    #[error(transparent)]
    Tensor(ForeignError),
    /// Calibration failed on these rows.
    #[error(transparent)]
    Calibrate(#[from] CalibrateError),
    /// A calibration file is damaged, or of another model.
    #[error(transparent)]
    CalibrationFile(#[from] FileError),
    /// The cache refused a call, or its device failed.
    #[error(transparent)]
    Cache(#[from] CacheError),
}

impl From<CandleError> for Error {
    fn from(error: CandleError) -> Self {
        Self::Tensor(error.into())
    }
}

impl From<kv_candle::Error> for Error {
    fn from(error: kv_candle::Error) -> Self {
        match error {
            kv_candle::Error::Cache(error) => error.into(),
            kv_candle::Error::Candle(error) => error.into(),
            error => Self::Tensor(ForeignError::new(error)),
        }
    }
}

impl From<serde_json::Error> for Error {
    fn from(error: serde_json::Error) -> Self {
        Self::Json(ForeignError::new(error))
    }
}

kv::cache_errors!(Error: SpecError, PlanError, DeviceError);

/// Adds the file that an error is about.
pub(crate) trait InFile<T> {
    fn in_file(self, path: &Path) -> Result<T, Error>;
}

impl<T, E: Into<Error>> InFile<T> for Result<T, E> {
    fn in_file(self, path: &Path) -> Result<T, Error> {
        self.map_err(|error| Error::File { path: path.to_owned(), source: Box::new(error.into()) })
    }
}

/// Joins the messages of an error and its sources.
#[cfg(test)]
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
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
    fn messages_have_no_backtrace() {
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
