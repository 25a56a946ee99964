//! What a device or its driver could not do.
use std::error::Error as StdError;
use std::fmt;

/// What went wrong on a device, as far as a caller can act on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DeviceErrorKind {
    /// Device memory is exhausted.
    OutOfMemory,
    /// The device is gone; every handle of this backend is dead.
    Lost,
    /// This device, or this build, cannot do it.
    Unsupported,
    /// A handle made by another backend or device was passed in.
    ForeignHandle,
    /// A range reaches past the end of a buffer.
    OutOfRange,
    /// The driver reported something else.
    Driver,
}

/// A device failure with the operation that met it.
#[derive(Debug, thiserror::Error)]
#[error("{operation}: {kind:?}{}", Detail(detail.as_deref()))]
pub struct DeviceError {
    kind: DeviceErrorKind,
    operation: &'static str,
    detail: Option<String>,
    #[source]
    source: Option<Box<dyn StdError + Send + Sync>>,
}

impl DeviceError {
    /// Makes an error without an underlying cause.
    pub fn new(kind: DeviceErrorKind, operation: &'static str) -> Self {
        Self { kind, operation, detail: None, source: None }
    }

    /// Adds what was asked or found, for people.
    #[must_use]
    pub fn with_detail(mut self, detail: impl Into<String>) -> Self {
        self.detail = Some(detail.into());
        self
    }

    /// Attaches the driver's own error.
    #[must_use]
    pub fn with_source(mut self, source: impl StdError + Send + Sync + 'static) -> Self {
        self.source = Some(Box::new(source));
        self
    }

    /// The category to match on.
    pub fn kind(&self) -> DeviceErrorKind {
        self.kind
    }

    /// The operation that failed.
    pub fn operation(&self) -> &'static str {
        self.operation
    }
}

/// ` (detail)`, or nothing.
struct Detail<'a>(Option<&'a str>);

impl fmt::Display for Detail<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |detail| write!(f, " ({detail})"))
    }
}
