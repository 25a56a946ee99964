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
    shortage: Option<MemoryShortage>,
    #[source]
    source: Option<Box<dyn StdError + Send + Sync>>,
}

impl DeviceError {
    /// Creates an error without an underlying cause.
    pub fn new(kind: DeviceErrorKind, operation: &'static str) -> Self {
        Self { kind, operation, detail: None, shortage: None, source: None }
    }

    /// Creates an error for memory that is refused before any of it is taken.
    pub fn out_of_memory(operation: &'static str, shortage: MemoryShortage) -> Self {
        let error = Self::new(DeviceErrorKind::OutOfMemory, operation);
        Self { shortage: Some(shortage), ..error.with_detail(shortage.to_string()) }
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

    /// Returns how much memory is missing, where that was found before any was taken.
    pub fn shortage(&self) -> Option<MemoryShortage> {
        self.shortage
    }

    /// Returns the operation that failed.
    pub fn operation(&self) -> &'static str {
        self.operation
    }
}

/// More memory than there is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "what is needed, what there is, and who says so")]
pub struct MemoryShortage {
    /// Bytes that are needed.
    pub needed: u64,
    /// Bytes that are available.
    pub available: u64,
    /// The exhausted resource, and the remedy.
    pub limit: &'static str,
}

impl fmt::Display for MemoryShortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [needed, available] = [self.needed, self.available].map(Size);
        write!(f, "{needed} needed, {available} available: {}", self.limit)
    }
}

/// Bytes in binary units, with two decimals.
struct Size(u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const MIB: u128 = 1 << 20;
        let mebibytes = u128::from(self.0) * 100 / MIB;
        let (name, hundredths) =
            if self.0 >> 30 > 0 { ("GiB", mebibytes / 1024) } else { ("MiB", mebibytes) };
        write!(f, "{}.{:02} {name}", hundredths / 100, hundredths % 100)
    }
}

/// ` (detail)`, or nothing.
struct Detail<'a>(Option<&'a str>);

impl fmt::Display for Detail<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |detail| write!(f, " ({detail})"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shortage_has_both_numbers_and_words() {
        let shortage = MemoryShortage { needed: 120 << 30, available: 3 << 29, limit: "no more" };
        let error = DeviceError::out_of_memory("reserve a cache", shortage);
        assert_eq!(
            (error.kind(), error.shortage()),
            (DeviceErrorKind::OutOfMemory, Some(shortage))
        );
        let words = "reserve a cache: OutOfMemory (120.00 GiB needed, 1.50 GiB available: no more)";
        assert_eq!(error.to_string(), words);
        assert_eq!(Size((1 << 30) - 1).to_string(), "1023.99 MiB");
        assert_eq!(Size(u64::MAX).to_string(), "17179869183.99 GiB");
    }
}
