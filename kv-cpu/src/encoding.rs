//! The element encodings that kernels exist for.
//!
//! Knows the two enums of the core (element types of tensors, stored formats of planes) and maps
//! both to one; refuses every other member of them, so that a new stored format is `Unsupported`
//! here until it has a kernel.
use kv_core::{DType, DeviceError, DeviceErrorKind, KvFormat};

/// How a value lies in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Encoding {
    F32,
    F16,
    Bf16,
}

impl Encoding {
    /// The encoding of a tensor's elements.
    pub(crate) fn of_tensor(dtype: DType, operation: &'static str) -> Result<Self, DeviceError> {
        match dtype {
            DType::F32 => Ok(Self::F32),
            DType::F16 => Ok(Self::F16),
            DType::Bf16 => Ok(Self::Bf16),
            _ => Err(unsupported(operation, format!("element type {dtype}"))),
        }
    }
    /// The encoding of a plane's rows.
    pub(crate) fn of_plane(format: KvFormat, operation: &'static str) -> Result<Self, DeviceError> {
        match format {
            KvFormat::F32 => Ok(Self::F32),
            KvFormat::F16 => Ok(Self::F16),
            KvFormat::Bf16 => Ok(Self::Bf16),
            _ => Err(unsupported(operation, format!("stored format {format}"))),
        }
    }
    /// Bytes of one value.
    pub(crate) const fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }
}

/// An `Unsupported` error with its detail.
pub(crate) fn unsupported(operation: &'static str, detail: impl Into<String>) -> DeviceError {
    DeviceError::new(DeviceErrorKind::Unsupported, operation).with_detail(detail)
}
