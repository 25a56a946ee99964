//! Instruction sets: their names, which of them this CPU has, and which one is used.
//!
//! The one place that detects. Knows nothing of what the instructions are used for.
use std::fmt;
use std::str::FromStr;

use kv_core::{DeviceError, UnknownName};

use crate::encoding::unsupported;

/// An instruction set that kernels exist for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Isa {
    /// Plain Rust, one value at a time: the reference.
    Scalar,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// x86-64 with AVX-512 F, BW, DQ and VL.
    Avx512,
    /// The same with AMX, tiles of bf16. Linux is asked for them for the whole process as soon as
    /// somebody wants to know whether they are there.
    Amx,
    /// 64-bit Arm.
    Neon,
}

impl Isa {
    /// Every instruction set, least to most capable.
    pub const ALL: &'static [Self] =
        &[Self::Scalar, Self::Neon, Self::Avx2, Self::Avx512, Self::Amx];

    /// Whether this CPU has it.
    pub fn is_available(self) -> bool {
        match self {
            Self::Scalar => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => {
                is_x86_feature_detected!("avx2")
                    && is_x86_feature_detected!("fma")
                    && is_x86_feature_detected!("f16c")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512vl")
            }
            #[cfg(target_arch = "x86_64")]
            Self::Amx => Self::Avx512.is_available() && crate::kernel::has_amx(),
            #[cfg(target_arch = "aarch64")]
            Self::Neon => std::arch::is_aarch64_feature_detected!("neon"),
            _ => false,
        }
    }

    /// The instruction sets of this CPU, least to most capable.
    pub fn available() -> impl DoubleEndedIterator<Item = Self> {
        Self::ALL.iter().copied().filter(|isa| isa.is_available())
    }

    /// The most capable one of this CPU.
    pub fn detect() -> Self {
        Self::available().next_back().unwrap_or(Self::Scalar)
    }

    /// Refuses an instruction set that this CPU lacks.
    pub(crate) fn require(self) -> Result<Self, DeviceError> {
        if self.is_available() {
            return Ok(self);
        }
        Err(unsupported("open cpu", format!("this CPU has no {self}, possible are {}", possible())))
    }

    /// Reads a setting such as that of `KV_CPU_ISA`; absent or empty means the best there is.
    pub(crate) fn from_setting(setting: Option<&str>) -> Result<Self, DeviceError> {
        match setting.map(str::trim) {
            None | Some("") => Ok(Self::detect()),
            Some(name) => match name.parse::<Self>() {
                Ok(isa) => isa.require(),
                Err(unknown) => Err(unsupported(
                    "open cpu",
                    format!("{unknown}; possible on this CPU are {}", possible()),
                )),
            },
        }
    }
}

fn possible() -> String {
    let names: Vec<_> = Isa::available().map(|isa| isa.to_string()).collect();
    names.join(", ")
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Scalar => "scalar",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Amx => "amx",
            Self::Neon => "neon",
        })
    }
}

impl FromStr for Isa {
    type Err = UnknownName;
    fn from_str(name: &str) -> Result<Self, UnknownName> {
        Self::ALL.iter().copied().find(|isa| isa.to_string() == name).ok_or_else(|| {
            UnknownName::new("instruction set", name, "scalar, avx2, avx512, amx, neon")
        })
    }
}

#[cfg(test)]
mod tests {
    use kv_core::DeviceErrorKind;

    use super::*;

    #[test]
    fn names_survive_a_round_trip() {
        for isa in Isa::ALL {
            assert_eq!(isa.to_string().parse(), Ok(*isa));
        }
    }

    #[test]
    fn a_setting_is_obeyed_or_refused_in_words() {
        assert_eq!(Isa::from_setting(None).unwrap(), Isa::detect());
        assert_eq!(Isa::from_setting(Some("")).unwrap(), Isa::detect());
        assert_eq!(Isa::from_setting(Some(" scalar ")).unwrap(), Isa::Scalar);
        let refused = Isa::from_setting(Some("sse9")).unwrap_err();
        assert_eq!(refused.kind(), DeviceErrorKind::Unsupported);
        let text = refused.to_string();
        assert!(text.contains("sse9") && text.contains("scalar"), "{text}");
    }

    #[test]
    fn a_set_this_cpu_lacks_is_refused() {
        for isa in Isa::ALL.iter().filter(|isa| !isa.is_available()) {
            let refused = Isa::from_setting(Some(&isa.to_string())).unwrap_err();
            assert_eq!(refused.kind(), DeviceErrorKind::Unsupported);
            assert!(refused.to_string().contains(&isa.to_string()));
        }
    }
}
