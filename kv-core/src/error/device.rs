//! Errors of devices and drivers.
use std::error::Error as StdError;
use std::fmt;

/// The kind of a device failure, by which a caller can act.
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

/// A device failure and the operation that failed.
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
    /// Creates an error without an underlying cause.
    pub fn new(kind: DeviceErrorKind, operation: &'static str) -> Self {
        Self { kind, operation, detail: None, source: None }
    }

    /// Adds details for people.
    #[must_use]
    pub fn with_detail(mut self, detail: impl Into<String>) -> Self {
        self.detail = Some(detail.into());
        self
    }

    /// Attaches the driver's error.
    #[must_use]
    pub fn with_source(mut self, source: impl StdError + Send + Sync + 'static) -> Self {
        self.source = Some(Box::new(source));
        self
    }

    /// Returns the kind, to match on.
    pub fn kind(&self) -> DeviceErrorKind {
        self.kind
    }

    /// Returns the operation that failed.
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
