//! Names and byte sizes of stored formats.
//!
//! A *row* is one token of one kv head: its codes, then its scales if the format has any.
//! Everything above this crate counts rows and bytes and never looks inside. [`row`](crate::row)
//! defines the meaning of the bytes, and `docs/formats.md` draws them.
use std::fmt;
use std::str::FromStr;

use crate::element::DType;
use crate::num::{to_f64, to_offset, to_u32, to_u64};
use crate::unknown_name::UnknownName;

/// Values that share a scale in formats with grouped scales, and that are packed together in
/// Lloyd-Max formats.
const GROUP: u64 = 32;
/// Values that share a scale in NVFP4.
const NVFP4_GROUP: u64 = 16;

/// How a row of K or V is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum KvFormat {
    /// IEEE binary32, unscaled.
    F32,
    /// IEEE binary16, unscaled; values beyond 65504 become infinite.
    F16,
    /// bfloat16, unscaled.
    Bf16,
    /// OCP FP8 E4M3 (no infinity, largest 448), saturating.
    Fp8E4m3(Scaling),
    /// OCP FP8 E5M2 (largest finite 57344), saturating.
    Fp8E5m2(Scaling),
    /// Signed integers in -127..=127.
    Int8(Scaling),
    /// 64 levels, Lloyd-Max for the normal distribution.
    L6(ScaleGroup),
    /// 16 levels, Lloyd-Max for the normal distribution.
    L4(ScaleGroup),
    /// 8 levels, Lloyd-Max for the normal distribution.
    L3(ScaleGroup),
    /// llama.cpp's blocks of 32: an f16 scale and 32 signed bytes.
    Q8_0,
    /// llama.cpp's blocks of 32: an f16 scale and 32 nibbles.
    Q4_0,
    /// NVIDIA's FP4: E2M1 values, an E4M3 scale for every 16, a given scale for the tensor.
    Nvfp4,
}

/// The values that one scale of an FP8 or INT8 format covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[expect(clippy::exhaustive_enums, reason = "a tensor, a head, a row: there is nothing between")]
pub enum Scaling {
    /// One given scale for a layer's K, one for its V.
    Tensor,
    /// One given scale for every kv head of a layer's K and of its V.
    Head,
    /// One scale per row, computed when the row is written and stored after it as f16.
    Row,
}

/// The values that one scale of a Lloyd-Max format covers. The scale is computed when the row is
/// written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[expect(clippy::exhaustive_enums, reason = "the two that are defined to the bit")]
pub enum ScaleGroup {
    /// A row; f16.
    Row,
    /// 32 neighbouring values; E4M3.
    Group32,
}

/// Every format and its name.
const NAMES: &[(KvFormat, &str)] = &[
    (KvFormat::F32, "f32"),
    (KvFormat::F16, "f16"),
    (KvFormat::Bf16, "bf16"),
    (KvFormat::Fp8E4m3(Scaling::Tensor), "fp8-e4m3"),
    (KvFormat::Fp8E4m3(Scaling::Head), "fp8-e4m3-head"),
    (KvFormat::Fp8E4m3(Scaling::Row), "fp8-e4m3-row"),
    (KvFormat::Fp8E5m2(Scaling::Tensor), "fp8-e5m2"),
    (KvFormat::Fp8E5m2(Scaling::Head), "fp8-e5m2-head"),
    (KvFormat::Fp8E5m2(Scaling::Row), "fp8-e5m2-row"),
    (KvFormat::Int8(Scaling::Row), "int8"),
    (KvFormat::Int8(Scaling::Tensor), "int8-tensor"),
    (KvFormat::Int8(Scaling::Head), "int8-head"),
    (KvFormat::L6(ScaleGroup::Row), "l6"),
    (KvFormat::L6(ScaleGroup::Group32), "l6-g32"),
    (KvFormat::L4(ScaleGroup::Row), "l4"),
    (KvFormat::L4(ScaleGroup::Group32), "l4-g32"),
    (KvFormat::L3(ScaleGroup::Row), "l3"),
    (KvFormat::L3(ScaleGroup::Group32), "l3-g32"),
    (KvFormat::Q8_0, "q8_0"),
    (KvFormat::Q4_0, "q4_0"),
    (KvFormat::Nvfp4, "nvfp4"),
];

impl KvFormat {
    /// The formats that store values unscaled, rounded at most.
    pub const PLAIN: &'static [Self] = &[Self::F32, Self::F16, Self::Bf16];

    /// Iterates over all formats, in the order of the documentation.
    pub fn all() -> impl ExactSizeIterator<Item = Self> + Clone {
        NAMES.iter().map(|(format, _)| *format)
    }

    /// Returns name and number of the format in the sources of GPU kernels: constants
    /// `KV_FMT_<name>` and `FMT_<name>`. A number is never given to another format.
    #[doc(hidden)]
    pub const fn kernel_constant(self) -> (&'static str, u32) {
        match self {
            Self::F32 => ("F32", 0),
            Self::F16 => ("F16", 1),
            Self::Bf16 => ("BF16", 2),
            Self::Fp8E4m3(Scaling::Tensor) => ("E4M3", 3),
            Self::Fp8E4m3(Scaling::Head) => ("E4M3_HEAD", 4),
            Self::Fp8E4m3(Scaling::Row) => ("E4M3_ROW", 5),
            Self::Fp8E5m2(Scaling::Tensor) => ("E5M2", 6),
            Self::Fp8E5m2(Scaling::Head) => ("E5M2_HEAD", 7),
            Self::Fp8E5m2(Scaling::Row) => ("E5M2_ROW", 8),
            Self::Int8(Scaling::Row) => ("INT8_ROW", 9),
            Self::Int8(Scaling::Tensor) => ("INT8", 10),
            Self::Int8(Scaling::Head) => ("INT8_HEAD", 11),
            Self::L6(ScaleGroup::Row) => ("L6", 12),
            Self::L6(ScaleGroup::Group32) => ("L6_G32", 13),
            Self::L4(ScaleGroup::Row) => ("L4", 14),
            Self::L4(ScaleGroup::Group32) => ("L4_G32", 15),
            Self::L3(ScaleGroup::Row) => ("L3", 16),
            Self::L3(ScaleGroup::Group32) => ("L3_G32", 17),
            Self::Q8_0 => ("Q8_0", 18),
            Self::Q4_0 => ("Q4_0", 19),
            Self::Nvfp4 => ("NVFP4", 20),
        }
    }

    /// Returns the number of [`Self::kernel_constant`].
    #[doc(hidden)]
    pub const fn kernel_code(self) -> u32 {
        self.kernel_constant().1
    }

    /// Returns the bytes of one row of `head_dim` values. Even for every format with scales or
    /// codes.
    pub fn row_bytes(self, head_dim: u32) -> u64 {
        let dim = u64::from(head_dim);
        let even = |bytes: u64| bytes.next_multiple_of(2);
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => {
                dim * to_u64(self.element().map_or(1, DType::size))
            }
            Self::Q8_0 | Self::Q4_0 => self.code_bytes(head_dim),
            _ => even(self.scales_begin(head_dim) + self.scale_bytes(head_dim)),
        }
    }

    /// Returns the bytes of the codes of one row. llama.cpp's blocks hold scales among their codes;
    /// both count here.
    pub fn code_bytes(self, head_dim: u32) -> u64 {
        let dim = u64::from(head_dim);
        // Whole groups of 32 values, and the rest.
        let groups = |whole: u64, part: fn(u64) -> u64| {
            let (full, rest) = (dim.div_euclid(GROUP), dim.rem_euclid(GROUP));
            full * whole + part(rest)
        };
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => self.row_bytes(head_dim),
            Self::Fp8E4m3(_) | Self::Fp8E5m2(_) | Self::Int8(_) => dim,
            Self::L6(_) => groups(24, |n| n.div_ceil(2) + n.div_ceil(4)),
            Self::L4(_) => groups(16, |n| n.div_ceil(2)),
            Self::L3(_) => groups(12, |n| n.div_ceil(4) + n.div_ceil(8)),
            Self::Q8_0 => dim.div_ceil(GROUP) * 34,
            Self::Q4_0 => dim.div_ceil(GROUP) * 18,
            Self::Nvfp4 => dim.div_ceil(2),
        }
    }

    /// Returns where the scales after the codes of a row begin; the row's end without scales.
    pub fn scales_begin(self, head_dim: u32) -> u64 {
        let codes = self.code_bytes(head_dim);
        match self {
            // f16 lies at even bytes.
            Self::Fp8E4m3(_)
            | Self::Fp8E5m2(_)
            | Self::Int8(_)
            | Self::L6(ScaleGroup::Row)
            | Self::L4(ScaleGroup::Row)
            | Self::L3(ScaleGroup::Row) => codes.next_multiple_of(2),
            _ => codes,
        }
    }

    fn scale_bytes(self, head_dim: u32) -> u64 {
        let dim = u64::from(head_dim);
        match self {
            Self::Fp8E4m3(Scaling::Row)
            | Self::Fp8E5m2(Scaling::Row)
            | Self::Int8(Scaling::Row)
            | Self::L6(ScaleGroup::Row)
            | Self::L4(ScaleGroup::Row)
            | Self::L3(ScaleGroup::Row) => 2,
            Self::L6(ScaleGroup::Group32)
            | Self::L4(ScaleGroup::Group32)
            | Self::L3(ScaleGroup::Group32) => dim.div_ceil(GROUP),
            Self::Nvfp4 => dim.div_ceil(NVFP4_GROUP),
            _ => 0,
        }
    }

    /// Returns the stored bits per value, scales included.
    pub fn bits_per_value(self, head_dim: u32) -> f64 {
        to_f64(self.row_bytes(head_dim) * 8) / f64::from(head_dim.max(1))
    }

    /// Returns the element type of an unquantised format, `None` for quantised ones.
    pub const fn element(self) -> Option<DType> {
        match self {
            Self::F32 => Some(DType::F32),
            Self::F16 => Some(DType::F16),
            Self::Bf16 => Some(DType::Bf16),
            _ => None,
        }
    }

    /// Returns the unquantised format of an element type, `None` for integers.
    pub const fn of_element(dtype: DType) -> Option<Self> {
        match dtype {
            DType::F32 => Some(Self::F32),
            DType::F16 => Some(Self::F16),
            DType::Bf16 => Some(Self::Bf16),
            DType::U32 => None,
        }
    }

    /// Returns whether rows are quantised.
    pub const fn is_quantised(self) -> bool {
        self.element().is_none()
    }

    /// Returns the format of 16-bit rows among rows of this format: f16 for quantised formats,
    /// otherwise the format itself.
    #[must_use]
    pub const fn wide_format(self) -> Self {
        if self.is_quantised() { Self::F16 } else { self }
    }

    /// Returns the slots that one 16-bit row takes among rows of this format.
    pub fn wide_slots(self, head_dim: u32) -> u32 {
        let wide = self.wide_format().row_bytes(head_dim);
        let slots = wide.div_ceil(self.row_bytes(head_dim).max(1));
        to_u32(to_offset(slots)).max(1)
    }

    /// Returns whether the format is designed for transformed rows, which are close to normally
    /// distributed: formats with codebooks for normal values, and INT8 with a scale per row. Other
    /// formats store rows as other systems read them.
    pub const fn is_for_transformed(self) -> bool {
        matches!(self, Self::Int8(Scaling::Row) | Self::L6(_) | Self::L4(_) | Self::L3(_))
    }

    /// Returns which scales must be given before a row can be written, `None` if rows have their
    /// own.
    pub const fn given_scales(self) -> Option<Scaling> {
        match self {
            Self::Fp8E4m3(s) | Self::Fp8E5m2(s) | Self::Int8(s) => match s {
                Scaling::Row => None,
                given => Some(given),
            },
            Self::Nvfp4 => Some(Scaling::Tensor),
            _ => None,
        }
    }
}

impl fmt::Display for KvFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = NAMES.iter().find(|(format, _)| format == self);
        f.write_str(name.map_or("unnamed", |(_, name)| name))
    }
}

impl FromStr for KvFormat {
    type Err = UnknownName;
    fn from_str(name: &str) -> Result<Self, UnknownName> {
        let found = NAMES.iter().find(|(_, known)| *known == name);
        found.map(|(format, _)| *format).ok_or_else(|| {
            UnknownName::new(
                "stored format",
                name,
                "f32, f16, bf16, fp8-e4m3[-head|-row], fp8-e5m2[-head|-row], \
                 int8[-tensor|-head], l6[-g32], l4[-g32], l3[-g32], q8_0, q4_0, nvfp4",
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_back_and_distinct() {
        for format in KvFormat::all() {
            assert_eq!(format.to_string().parse::<KvFormat>().unwrap(), format);
        }
        assert!("l5".parse::<KvFormat>().unwrap_err().to_string().contains("l6[-g32]"));
    }

    #[test]
    fn kernel_codes_are_distinct_and_plain_formats_come_first() {
        let mut codes: Vec<_> = KvFormat::all().map(KvFormat::kernel_code).collect();
        let plain: Vec<_> = KvFormat::PLAIN.iter().map(|format| format.kernel_code()).collect();
        assert_eq!(plain, [0, 1, 2], "kernels compare with the last of them");
        codes.sort_unstable();
        codes.dedup();
        assert_eq!(codes.len(), KvFormat::all().len());
    }

    #[test]
    fn rows_have_the_documented_bits() {
        let bits = |name: &str, dim| name.parse::<KvFormat>().unwrap().bits_per_value(dim);
        for (name, expected) in [
            ("bf16", 16.0),
            ("fp8-e4m3", 8.0),
            ("fp8-e5m2-row", 8.125),
            ("int8", 8.125),
            ("int8-head", 8.0),
            ("l6", 6.125),
            ("l6-g32", 6.25),
            ("l4", 4.125),
            ("l4-g32", 4.25),
            ("l3", 3.125),
            ("q8_0", 8.5),
            ("q4_0", 4.5),
            ("nvfp4", 4.5),
        ] {
            assert_eq!(bits(name, 128).to_bits(), f64::to_bits(expected), "{name}");
        }
    }

    #[test]
    fn odd_rows_keep_their_scales_at_even_bytes() {
        let row = |format: KvFormat, dim| {
            (format.code_bytes(dim), format.scales_begin(dim), format.row_bytes(dim))
        };
        assert_eq!(row(KvFormat::Int8(Scaling::Row), 5), (5, 6, 8));
        assert_eq!(row(KvFormat::Int8(Scaling::Tensor), 5), (5, 6, 6));
        assert_eq!(row(KvFormat::L3(ScaleGroup::Row), 5), (3, 4, 6));
        assert_eq!(row(KvFormat::L6(ScaleGroup::Row), 80), (60, 60, 62));
        assert_eq!(row(KvFormat::L4(ScaleGroup::Group32), 80), (40, 40, 44));
        assert_eq!(row(KvFormat::Q4_0, 80), (54, 54, 54));
        assert_eq!(row(KvFormat::Nvfp4, 80), (40, 40, 46));
    }
}
