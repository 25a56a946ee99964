//! How values lie in memory: elements of tensors, and rows of planes.
//!
//! Knows the two enums of the core (element types of tensors, stored formats of planes) and maps
//! both to what kernels exist for; refuses every other member of them, so that a new stored format
//! is `Unsupported` here until it has a kernel. Byte offsets inside a row are the core's.
use kv_core::{DType, DeviceError, DeviceErrorKind, KvFormat, ScaleGroup, Scaling};

use crate::num::{offset, to_usize};

/// How an element of a tensor lies in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Element {
    F32,
    F16,
    Bf16,
}

impl Element {
    /// The encoding of a tensor's elements.
    pub(crate) fn of_tensor(dtype: DType, operation: &'static str) -> Result<Self, DeviceError> {
        match dtype {
            DType::F32 => Ok(Self::F32),
            DType::F16 => Ok(Self::F16),
            DType::Bf16 => Ok(Self::Bf16),
            _ => Err(unsupported(operation, format!("element type {dtype}"))),
        }
    }
    /// The elements of an unquantised plane.
    pub(crate) fn of_format(format: KvFormat) -> Option<Self> {
        match format {
            KvFormat::F32 => Some(Self::F32),
            KvFormat::F16 => Some(Self::F16),
            KvFormat::Bf16 => Some(Self::Bf16),
            _ => None,
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

/// What a kernel decodes: the codes of a row and the scales among them. A scale of the whole row is
/// no part of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Encoding {
    F32,
    F16,
    Bf16,
    E4m3,
    E5m2,
    Int8,
    L6,
    L4,
    L3,
    L6Group32,
    L4Group32,
    L3Group32,
    Q8Block,
    Q4Block,
    Nvfp4,
    /// bf16 taken in another order of values; no format has it, attention chooses it.
    Bf16Pairs,
}

impl Encoding {
    /// How many there are.
    pub(crate) const COUNT: usize = 16;

    fn of(format: KvFormat) -> Option<Self> {
        Some(match format {
            KvFormat::F32 => Self::F32,
            KvFormat::F16 => Self::F16,
            KvFormat::Bf16 => Self::Bf16,
            KvFormat::Fp8E4m3(_) => Self::E4m3,
            KvFormat::Fp8E5m2(_) => Self::E5m2,
            KvFormat::Int8(_) => Self::Int8,
            KvFormat::L6(ScaleGroup::Row) => Self::L6,
            KvFormat::L4(ScaleGroup::Row) => Self::L4,
            KvFormat::L3(ScaleGroup::Row) => Self::L3,
            KvFormat::L6(ScaleGroup::Group32) => Self::L6Group32,
            KvFormat::L4(ScaleGroup::Group32) => Self::L4Group32,
            KvFormat::L3(ScaleGroup::Group32) => Self::L3Group32,
            KvFormat::Q8_0 => Self::Q8Block,
            KvFormat::Q4_0 => Self::Q4Block,
            KvFormat::Nvfp4 => Self::Nvfp4,
            _ => return None,
        })
    }

    /// Place in a table with one entry an encoding.
    pub(crate) const fn index(self) -> usize {
        #[expect(clippy::as_conversions, reason = "the discriminant of a field-less enum")]
        {
            self as usize
        }
    }
}

/// How a row of `dim` values lies in memory. Its offsets are those of its encoding, which is why
/// they can only be read: kernels trust them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RowLayout {
    encoding: Encoding,
    dim: usize,
    bytes: usize,
    scales: usize,
    has_scale: bool,
}

impl RowLayout {
    /// The row of `dim` values of a stored format, `None` where no kernel knows it.
    pub(crate) fn of(format: KvFormat, dim: u32) -> Option<Self> {
        Some(Self {
            encoding: Encoding::of(format)?,
            dim: to_usize(dim),
            bytes: offset(format.row_bytes(dim)),
            scales: offset(format.scales_begin(dim)),
            has_scale: matches!(
                format,
                KvFormat::Fp8E4m3(Scaling::Row)
                    | KvFormat::Fp8E5m2(Scaling::Row)
                    | KvFormat::Int8(Scaling::Row)
                    | KvFormat::L6(ScaleGroup::Row)
                    | KvFormat::L4(ScaleGroup::Row)
                    | KvFormat::L3(ScaleGroup::Row)
            ),
        })
    }
    /// A run of elements.
    pub(crate) fn plain(element: Element, dim: usize) -> Self {
        let encoding = match element {
            Element::F32 => Encoding::F32,
            Element::F16 => Encoding::F16,
            Element::Bf16 => Encoding::Bf16,
        };
        let bytes = dim.saturating_mul(element.size());
        Self { encoding, dim, bytes, scales: bytes, has_scale: false }
    }
    /// The same row, its values in the order that is fastest to take them in.
    pub(crate) fn in_pairs(self) -> Self {
        let encoding = match self.encoding {
            Encoding::Bf16 => Encoding::Bf16Pairs,
            other => other,
        };
        Self { encoding, ..self }
    }
    pub(crate) fn encoding(&self) -> Encoding {
        self.encoding
    }
    /// Values of the row.
    pub(crate) fn dim(&self) -> usize {
        self.dim
    }
    /// Bytes of the row.
    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }
    /// Where the scales behind the codes begin.
    pub(crate) fn scales(&self) -> usize {
        self.scales
    }
    /// Whether one f16 for the whole row stands there.
    pub(crate) fn has_scale(&self) -> bool {
        self.has_scale
    }
}

/// An `Unsupported` error with its detail.
pub(crate) fn unsupported(operation: &'static str, detail: impl Into<String>) -> DeviceError {
    DeviceError::new(DeviceErrorKind::Unsupported, operation).with_detail(detail)
}
