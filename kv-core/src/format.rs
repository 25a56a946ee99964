//! Names and byte sizes of stored formats.
//!
//! A *row* is one token of one kv head: its codes, then its scale where a format has one.
//! Everything above this module counts rows and bytes and never looks inside, so a quantised format
//! adds a variant here and an encoding elsewhere.
use std::fmt;
use std::str::FromStr;

use crate::element::DType;
use crate::error::UnknownName;
use crate::num::to_u64;

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
}

impl KvFormat {
    /// Every format, in the order documentation lists them.
    pub const ALL: &'static [Self] = &[Self::F32, Self::F16, Self::Bf16];

    /// Bytes of one row of `head_dim` values.
    pub fn row_bytes(self, head_dim: u32) -> u64 {
        match self {
            Self::F32 | Self::F16 | Self::Bf16 => {
                u64::from(head_dim).saturating_mul(to_u64(self.element().map_or(1, DType::size)))
            }
        }
    }

    /// The element type of an unquantised format, `None` for codes.
    pub const fn element(self) -> Option<DType> {
        match self {
            Self::F32 => Some(DType::F32),
            Self::F16 => Some(DType::F16),
            Self::Bf16 => Some(DType::Bf16),
        }
    }
}

impl fmt::Display for KvFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
        })
    }
}

impl FromStr for KvFormat {
    type Err = UnknownName;
    fn from_str(name: &str) -> Result<Self, UnknownName> {
        Self::ALL
            .iter()
            .copied()
            .find(|format| format.to_string() == name)
            .ok_or_else(|| UnknownName::new("stored format", name, "f32, f16, bf16"))
    }
}
