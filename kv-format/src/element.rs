//! Element types of host and device tensors.
use std::fmt;
use std::str::FromStr;

use bytemuck::Pod;

use crate::unknown_name::UnknownName;

/// Runtime tag of an element type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DType {
    /// IEEE binary32.
    F32,
    /// IEEE binary16.
    F16,
    /// bfloat16: the upper half of a binary32.
    Bf16,
    /// 32-bit unsigned: block tables, lengths, prefix sums.
    U32,
}

impl DType {
    /// Returns the size of one element, in bytes.
    pub const fn size(self) -> usize {
        match self {
            Self::F32 | Self::U32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    /// Returns whether q, k and v may have this type.
    pub const fn is_float(self) -> bool {
        !matches!(self, Self::U32)
    }

    /// Returns the number of a type of q, k and v in the sources of GPU kernels; `u32` has none of
    /// its own.
    #[doc(hidden)]
    pub const fn kernel_code(self) -> u32 {
        match self {
            Self::F32 | Self::U32 => 0,
            Self::F16 => 1,
            Self::Bf16 => 2,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::U32 => "u32",
        })
    }
}

impl FromStr for DType {
    type Err = UnknownName;
    fn from_str(name: &str) -> Result<Self, UnknownName> {
        match name {
            "f32" => Ok(Self::F32),
            "f16" => Ok(Self::F16),
            "bf16" => Ok(Self::Bf16),
            "u32" => Ok(Self::U32),
            _ => Err(UnknownName::new("element type", name, "f32, f16, bf16, u32")),
        }
    }
}

mod sealed {
    /// Prevents foreign implementations.
    #[expect(unnameable_types, reason = "sealed on purpose")]
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for half::f16 {}
    impl Sealed for half::bf16 {}
    impl Sealed for u32 {}
}

/// A plain-old-data element with a known [`DType`].
pub trait Element: Pod + sealed::Sealed + Send + Sync {
    /// The tag of this type.
    const DTYPE: DType;
}
impl Element for f32 {
    const DTYPE: DType = DType::F32;
}
impl Element for half::f16 {
    const DTYPE: DType = DType::F16;
}
impl Element for half::bf16 {
    const DTYPE: DType = DType::Bf16;
}
impl Element for u32 {
    const DTYPE: DType = DType::U32;
}
