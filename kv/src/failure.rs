//! One error for all calls of the library, from opening a device to the last step.
use kv_core::error::{BlocksExhausted, DeviceError, DeviceErrorKind, PlanError, SpecError};
use kv_core::{CacheError, UnknownName};

/// Any error of the library.
///
/// The narrow errors ([`error`](crate::error)) convert into it, so `?` works in one function for
/// all of them. A full cache is normal operation for a scheduler: [`Self::exhausted`] recognises
/// it.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An error of a cache or of its device.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// A name is none of the known ones.
    #[error(transparent)]
    Name(#[from] UnknownName),
    /// A backend that exists but was not built in.
    #[error("backend {backend} is not in this program: it was built without feature `{backend}`")]
    NotBuilt {
        /// The backend, which is also the name of the feature.
        backend: &'static str,
    },
    /// The part of a device's name after the colon is no index.
    #[error("device {text:?}: expected NAME or NAME:INDEX with a whole number")]
    DeviceIndex {
        /// The text given.
        text: String,
    },
}

impl Error {
    /// Returns the blocks that were missing in a full cache, `None` for any other error.
    pub fn exhausted(&self) -> Option<&BlocksExhausted> {
        match self {
            Self::Cache(CacheError::Exhausted(exhausted)) => Some(exhausted),
            _ => None,
        }
    }

    /// Returns what went wrong on the device, `None` for any other error.
    pub fn device_kind(&self) -> Option<DeviceErrorKind> {
        match self {
            Self::Cache(CacheError::Device(error)) => Some(error.kind()),
            _ => None,
        }
    }
}

/// Converts narrow errors to the variant `Cache` of an error, so that `?` takes them in one step.
#[doc(hidden)]
#[macro_export]
macro_rules! cache_errors {
    ($error:ty: $($narrow:ty),+) => {$(
        impl From<$narrow> for $error {
            fn from(error: $narrow) -> Self {
                Self::Cache(error.into())
            }
        }
    )+};
}

cache_errors!(Error: SpecError, PlanError, BlocksExhausted, DeviceError);

#[cfg(test)]
mod tests {
    use super::*;
    use kv_core::GroupId;

    #[test]
    fn narrow_errors_keep_their_words_and_their_kind() {
        let exhausted = BlocksExhausted { group: GroupId(0), needed: 3, free: 1, evictable: 0 };
        let error = Error::from(exhausted);
        assert_eq!(error.to_string(), exhausted.to_string());
        assert_eq!(error.exhausted(), Some(&exhausted));
        let error = Error::from(DeviceError::new(DeviceErrorKind::Lost, "attend"));
        assert_eq!(error.device_kind(), Some(DeviceErrorKind::Lost));
        assert_eq!(error.exhausted(), None);
    }

    #[test]
    fn is_send_and_sync() {
        fn check<T: Send + Sync + 'static>() {}
        check::<Error>();
    }
}
