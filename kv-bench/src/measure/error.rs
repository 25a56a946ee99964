//! What can go wrong in a measurement.
use kv::error::{DeviceError, DeviceErrorKind, PlanError, SpecError};
use kv::{CacheError, Device};

/// A measurement that cannot be made, or failed on the way.
///
/// A message says one thing; [`source`](std::error::Error::source) goes on with the cause.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// One case of several failed.
    #[error("{name}")]
    Case {
        /// What was measured.
        name: String,
        /// Why it failed.
        source: Box<Self>,
    },
    /// The cache refused, or its device failed.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// The batch is larger than any cache.
    #[error("too many sequences")]
    TooManySequences,
    /// The contexts need more blocks than a cache can have.
    #[error("the contexts have more than 2^32 blocks")]
    TooManyBlocks,
    /// Every case of the grid is too large for the device.
    #[error("no case fits")]
    NoCase,
    /// A device that this program cannot measure, or was built without.
    #[error("{device} cannot be measured")]
    Device {
        /// The device.
        device: Device,
    },
}

impl Error {
    /// Names the case that an error is about.
    pub(super) fn of_case(self, name: impl Into<String>) -> Self {
        Self::Case { name: name.into(), source: Box::new(self) }
    }

    /// Whether the device lacks the memory or the means for a case.
    pub(super) fn is_beyond_device(&self) -> bool {
        match self {
            Self::Case { source, .. } => source.is_beyond_device(),
            Self::Cache(CacheError::Device(error)) => {
                matches!(error.kind(), DeviceErrorKind::OutOfMemory | DeviceErrorKind::Unsupported)
            }
            _ => false,
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_a_device_cannot_do_is_left_out() {
        let error = |kind| Error::from(DeviceError::new(kind, "alloc")).of_case("a case");
        for kind in [DeviceErrorKind::OutOfMemory, DeviceErrorKind::Unsupported] {
            assert!(error(kind).is_beyond_device(), "{kind:?}");
            let inside = CacheError::from(DeviceError::new(kind, "alloc"));
            assert!(Error::from(inside).is_beyond_device(), "{kind:?}");
        }
        assert!(!error(DeviceErrorKind::Lost).is_beyond_device());
        assert!(!Error::NoCase.is_beyond_device());
    }
}
