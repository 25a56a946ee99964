//! Values in memory: elements of tensors and rows of planes.
//!
//! Maps the element types and the stored formats of `kv-format` to the encodings that kernels exist
//! for, and returns `None` for every other: a new stored format is unsupported here until it has a
//! decoder.
use kv_format::{DType, KvFormat, ScaleGroup, Scaling};

use kv_format::num::{to_offset, to_usize};

/// Type of a tensor's elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names say it")]
#[non_exhaustive]
pub enum Element {
    F32,
    F16,
    Bf16,
}

impl Element {
    /// Every element type, in the order of tables.
    pub const ALL: [Self; 3] = [Self::F32, Self::F16, Self::Bf16];

    /// Returns the element type of a tensor, `None` where no kernel reads it.
    pub fn of_tensor(dtype: DType) -> Option<Self> {
        match dtype {
            DType::F32 => Some(Self::F32),
            DType::F16 => Some(Self::F16),
            DType::Bf16 => Some(Self::Bf16),
            _ => None,
        }
    }
    /// Returns the element type of an unquantised plane, `None` for a quantised one.
    pub fn of_format(format: KvFormat) -> Option<Self> {
        match format {
            KvFormat::F32 => Some(Self::F32),
            KvFormat::F16 => Some(Self::F16),
            KvFormat::Bf16 => Some(Self::Bf16),
            _ => None,
        }
    }
    /// Returns the bytes of one value.
    pub const fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }
}

/// The part of a row that a kernel decodes: codes and the scales of groups. A scale of the whole
/// row is not part of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[expect(missing_docs, reason = "the names of stored formats")]
#[non_exhaustive]
pub enum Encoding {
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
    /// bf16 with the even values of each group of 32 before the odd ones; see
    /// [`RowLayout::in_pairs`].
    Bf16Pairs,
}

impl Encoding {
    /// Number of encodings.
    pub const COUNT: usize = 16;

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

    /// Index into a table with one entry an encoding.
    pub(crate) const fn index(self) -> usize {
        #[expect(clippy::as_conversions, reason = "the discriminant of a field-less enum")]
        {
            self as usize
        }
    }
}

/// Layout of a row of `dim` values. Fields are private because kernels trust the offsets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowLayout {
    encoding: Encoding,
    dim: usize,
    bytes: usize,
    scales: usize,
    has_scale: bool,
}

impl RowLayout {
    /// Returns the layout of `dim` values in a stored format, `None` where no kernel reads it.
    pub fn of(format: KvFormat, dim: u32) -> Option<Self> {
        Some(Self {
            encoding: Encoding::of(format)?,
            dim: to_usize(dim),
            bytes: to_offset(format.row_bytes(dim)),
            scales: to_offset(format.scales_begin(dim)),
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
    /// Returns the layout of `dim` elements.
    pub fn plain(element: Element, dim: usize) -> Self {
        let encoding = match element {
            Element::F32 => Encoding::F32,
            Element::F16 => Encoding::F16,
            Element::Bf16 => Encoding::Bf16,
        };
        let bytes = dim * element.size();
        Self { encoding, dim, bytes, scales: bytes, has_scale: false }
    }
    /// Returns the same row read as [`Encoding::Bf16Pairs`] where it is bf16: a 32-bit word of
    /// memory holds an even and an odd value, so two vectors of `f32` cost a shift and a mask
    /// instead of two widening loads. Queries must have the same order ([`Kernels::split_pairs`]),
    /// and outputs get it ([`Kernels::join_pairs`]).
    ///
    /// [`Kernels::split_pairs`]: crate::Kernels::split_pairs
    /// [`Kernels::join_pairs`]: crate::Kernels::join_pairs
    #[must_use]
    pub fn in_pairs(self) -> Self {
        let encoding = match self.encoding {
            Encoding::Bf16 => Encoding::Bf16Pairs,
            other => other,
        };
        Self { encoding, ..self }
    }
    /// Returns the encoding of the values.
    pub fn encoding(&self) -> Encoding {
        self.encoding
    }
    /// Values of the row.
    pub fn dim(&self) -> usize {
        self.dim
    }
    /// Returns the bytes of the row.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
    /// Returns the offset of the scales, which lie after the codes.
    pub fn scales(&self) -> usize {
        self.scales
    }
    /// Returns whether one f16 scales the whole row.
    pub fn has_scale(&self) -> bool {
        self.has_scale
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_format_has_an_encoding() {
        let layout = |format| RowLayout::of(format, 64).unwrap();
        let mut seen: Vec<_> = KvFormat::all().map(|f| layout(f).encoding().index()).collect();
        seen.push(RowLayout::plain(Element::Bf16, 64).in_pairs().encoding().index());
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen, (0..Encoding::COUNT).collect::<Vec<_>>());
    }
}
