//! Errors of the cache.
use kv::CacheError;
use kv::error::SpecError;

/// A cache or a step that cannot be made, or a step that cannot end.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The cache refused a call, or its device failed.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// The device cannot be opened.
    #[error(transparent)]
    Device(#[from] kv::Error),
    /// candle failed to make a tensor of the step.
    #[error(transparent)]
    Candle(#[from] candle_core::Error),
    /// No backend of the cache works on this device of candle.
    #[error("a cache on {device} is not built in: {instead}")]
    Unsupported {
        /// The device.
        device: String,
        /// What to do instead.
        instead: &'static str,
    },
    /// A tensor has axes that the call does not take, or a wrong extent.
    #[error("{tensor} has shape {got:?}, expected {expected}: {hint}")]
    Shape {
        /// The tensor.
        tensor: &'static str,
        /// Its shape, as the caller passed it.
        got: Vec<usize>,
        /// The axes that the call takes, and the extents where they are known.
        expected: String,
        /// What to do.
        hint: &'static str,
    },
    /// The step of [`CandleStep::over_mut`](crate::CandleStep::over_mut) ends with its owner.
    #[error("a lent step is ended by its owner")]
    Lent,
}

kv::cache_errors!(Error: SpecError);

/// For functions that return candle's own error.
impl From<Error> for candle_core::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Candle(error) => error,
            error => Self::wrap(error),
        }
    }
}
