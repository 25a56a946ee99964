//! Errors of a measurement.
use kv::error::{DeviceError, DeviceErrorKind, PlanError, SpecError};
use kv::{CacheError, Device};

/// A measurement that is not possible, or failed.
///
/// The message names one cause; [`source`](std::error::Error::source) has the next.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// One case of several failed.
    #[error("{name}")]
    Case {
        /// The name of the case.
        name: String,
        /// The reason.
        source: Box<Self>,
    },
    /// The cache refused a call, or its device failed.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// The batch exceeds the most sequences of a cache.
    #[error("too many sequences")]
    TooManySequences,
    /// The contexts need more blocks than a cache can have.
    #[error("the contexts have more than 2^32 blocks")]
    TooManyBlocks,
    /// Every case of the grid is too large for the device.
    #[error("no case fits")]
    NoCase,
    /// This program cannot measure the device, or was built without it.
    #[error("{device} cannot be measured")]
    Device {
        /// The device.
        device: Device,
    },
}

impl Error {
    /// Adds the name of the case.
    pub(super) fn of_case(self, name: impl Into<String>) -> Self {
        Self::Case { name: name.into(), source: Box::new(self) }
    }

    /// Returns whether the device lacks the memory or a feature for a case.
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

kv::cache_errors!(Error: SpecError, PlanError, DeviceError);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_unsupported_cases_are_left_out() {
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
