//! Instruction sets: names, the sets of this CPU, and the set in use.
//!
//! The only place that detects CPU features. An [`Isa`] is a base set of vector instructions with
//! optional parts, and names all that its kernels need: pinned to it, a CPU with more features runs
//! the same code.
use std::fmt;
use std::str::FromStr;

use kv_format::UnknownName;

/// Base set of vector instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Vectors {
    Scalar,
    Avx2,
    Avx512,
    Neon,
    #[cfg(any(test, feature = "testing"))]
    Emulated,
}

/// A set of instructions that kernels exist for, such as `avx512+bf16`.
///
/// ```
/// use kv_cpu_kernels::Isa;
///
/// let best = Isa::detect();
/// assert!(best.is_available());
/// assert_eq!(best.to_string().parse(), Ok(best));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Isa {
    vectors: Vectors,
    bf16: bool,
    vbmi: bool,
    amx: bool,
}

impl Isa {
    /// Plain Rust, one value at a time: the reference.
    pub const SCALAR: Self = Self::base(Vectors::Scalar);
    /// x86-64 with AVX2, FMA and F16C.
    pub const AVX2: Self = Self::base(Vectors::Avx2);
    /// x86-64 with AVX-512 F, BW, DQ and VL.
    pub const AVX512: Self = Self::base(Vectors::Avx512);
    /// 64-bit Arm.
    pub const NEON: Self = Self::base(Vectors::Neon);

    /// Every set that has separate kernels, least to most capable.
    pub const ALL: &'static [Self] = &[
        Self::SCALAR,
        Self::NEON,
        Self::AVX2,
        Self::AVX512,
        Self::AVX512.with_vbmi(),
        Self::AVX512.with_bf16(),
        Self::AVX512.with_bf16().with_vbmi(),
        Self::AVX512.with_vbmi().with_amx(),
        Self::AVX512.with_bf16().with_vbmi().with_amx(),
    ];

    /// Sixteen lanes in plain Rust with every part but AMX; see `Kernels::emulated`.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) const EMULATED: Self =
        Self { vectors: Vectors::Emulated, bf16: true, vbmi: true, amx: false };
    /// The same with AMX in plain Rust; see `Kernels::emulated_amx`.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) const EMULATED_AMX: Self = Self::EMULATED.with_amx();

    const fn base(vectors: Vectors) -> Self {
        Self { vectors, bf16: false, vbmi: false, amx: false }
    }
    /// Adds AVX-512 BF16: products of pairs of bf16.
    const fn with_bf16(self) -> Self {
        Self { bf16: true, ..self }
    }
    /// Adds AVX-512 VBMI: lookups of bytes.
    const fn with_vbmi(self) -> Self {
        Self { vbmi: true, ..self }
    }
    /// Adds AMX: matrix products of tiles of bf16. Linux gives a process the tile registers on
    /// request, and detection makes the request.
    const fn with_amx(self) -> Self {
        Self { amx: true, ..self }
    }

    pub(crate) const fn is_scalar(self) -> bool {
        matches!(self.vectors, Vectors::Scalar)
    }
    #[cfg(target_arch = "x86_64")]
    pub(crate) const fn is_avx2(self) -> bool {
        matches!(self.vectors, Vectors::Avx2)
    }
    #[cfg(target_arch = "x86_64")]
    pub(crate) const fn is_avx512(self) -> bool {
        matches!(self.vectors, Vectors::Avx512)
    }
    #[cfg(target_arch = "aarch64")]
    pub(crate) const fn is_neon(self) -> bool {
        matches!(self.vectors, Vectors::Neon)
    }
    /// Returns whether every instruction is plain Rust.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) const fn is_emulated(self) -> bool {
        matches!(self.vectors, Vectors::Emulated)
    }
    /// Returns whether products of bf16 are used.
    pub const fn has_bf16(self) -> bool {
        self.bf16
    }
    /// Returns whether lookups of bytes are used.
    pub const fn has_vbmi(self) -> bool {
        self.vbmi
    }
    /// Returns whether AMX is used.
    pub const fn has_amx(self) -> bool {
        self.amx
    }

    /// Returns the same set without AMX.
    #[must_use]
    pub const fn without_amx(self) -> Self {
        Self { amx: false, ..self }
    }

    /// Returns whether this CPU has every instruction of the set.
    pub fn is_available(self) -> bool {
        #[cfg(any(test, feature = "testing"))]
        if self.is_emulated() {
            return true;
        }
        let parts = (!self.bf16 || detect::bf16())
            && (!self.vbmi || detect::vbmi())
            && (!self.amx || detect::amx());
        parts
            && match self.vectors {
                Vectors::Scalar => true,
                Vectors::Avx2 => detect::avx2(),
                Vectors::Avx512 => detect::avx512(),
                Vectors::Neon => detect::neon(),
                #[cfg(any(test, feature = "testing"))]
                Vectors::Emulated => true,
            }
    }

    /// Returns the sets that this CPU has, least to most capable.
    pub fn available() -> impl DoubleEndedIterator<Item = Self> {
        Self::ALL.iter().copied().filter(|isa| isa.is_available())
    }

    /// Returns the most capable set of this CPU.
    pub fn detect() -> Self {
        Self::available().next_back().unwrap_or(Self::SCALAR)
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.vectors {
            Vectors::Scalar => "scalar",
            Vectors::Avx2 => "avx2",
            Vectors::Avx512 => "avx512",
            Vectors::Neon => "neon",
            #[cfg(any(test, feature = "testing"))]
            Vectors::Emulated => "emulated",
        })?;
        let parts = [(self.bf16, "+bf16"), (self.vbmi, "+vbmi"), (self.amx, "+amx")];
        parts.iter().filter(|(has, _)| *has).try_for_each(|(_, name)| f.write_str(name))
    }
}

impl FromStr for Isa {
    type Err = UnknownName;
    fn from_str(name: &str) -> Result<Self, UnknownName> {
        Self::ALL.iter().copied().find(|isa| isa.to_string() == name).ok_or_else(|| {
            let known = "scalar, neon, avx2, avx512, avx512+vbmi, avx512+bf16, avx512+bf16+vbmi, \
                         avx512+vbmi+amx, avx512+bf16+vbmi+amx";
            UnknownName::new("instruction set", name, known)
        })
    }
}

#[cfg(target_arch = "x86_64")]
mod detect {
    pub(super) fn avx2() -> bool {
        is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c")
    }
    pub(super) fn avx512() -> bool {
        is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
    }
    pub(super) fn bf16() -> bool {
        is_x86_feature_detected!("avx512bf16")
    }
    pub(super) fn vbmi() -> bool {
        is_x86_feature_detected!("avx512vbmi")
    }
    pub(super) fn amx() -> bool {
        crate::amx::is_available()
    }
    pub(super) fn neon() -> bool {
        false
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod detect {
    pub(super) fn avx2() -> bool {
        false
    }
    pub(super) fn avx512() -> bool {
        false
    }
    pub(super) fn bf16() -> bool {
        false
    }
    pub(super) fn vbmi() -> bool {
        false
    }
    pub(super) fn amx() -> bool {
        false
    }
    #[cfg(target_arch = "aarch64")]
    pub(super) fn neon() -> bool {
        std::arch::is_aarch64_feature_detected!("neon")
    }
    #[cfg(not(target_arch = "aarch64"))]
    pub(super) fn neon() -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_survive_a_round_trip() {
        for isa in Isa::ALL {
            assert_eq!(isa.to_string().parse(), Ok(*isa));
        }
        let unknown = "sse9".parse::<Isa>().unwrap_err().to_string();
        for isa in Isa::ALL {
            assert!(unknown.contains(&isa.to_string()), "{unknown}");
        }
    }

    #[test]
    fn the_best_set_has_every_part_of_this_cpu() {
        let best = Isa::detect();
        assert!(best.is_available());
        if cfg!(target_arch = "x86_64") && best != Isa::SCALAR && best != Isa::AVX2 {
            assert_eq!(best.has_bf16(), detect::bf16());
            assert_eq!(best.has_vbmi(), detect::vbmi());
            assert_eq!(best.has_amx(), detect::amx());
        }
    }
}
