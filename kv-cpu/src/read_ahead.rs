//! How memory that is read once is asked for ahead of need.
//!
//! CPUs of one instruction set differ in it: some have few reads into their first cache under way
//! and more into their second one, and some find rows that follow each other by themselves. So it
//! is chosen by the CPU, and changes no result. `docs/performance.md` says which CPUs were
//! measured.
use std::str::FromStr;

use kv_core::{DeviceError, UnknownName};

use crate::encoding::unsupported;

/// What becomes of a line that is wanted soon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fetch {
    /// It is brought into the first cache, and takes the place of no others in those behind it
    /// where that is possible.
    First,
    /// It is brought into the second cache.
    Second,
    /// The same shortly before it is wanted: the CPU goes on from there by itself. Where pieces are
    /// asked for as wholes, it is as [`Self::Second`].
    Near,
    /// It is brought into the second cache, and asked for once more some time later: the CPU drops
    /// what is asked for while too many lines are under way. In streams it is as [`Self::Second`].
    Twice,
    /// Nothing: the CPU is left to find it.
    Nothing,
}

/// What becomes of lines that are wanted soon, by how much is done with each.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ReadAhead {
    /// Where one query row meets rows of K and V that need no decoding.
    pub(crate) one_row: Fetch,
    /// Where several do, or rows are decoded.
    pub(crate) other: Fetch,
}

impl ReadAhead {
    /// The same for all.
    pub(crate) const fn all(fetch: Fetch) -> Self {
        Self { one_row: fetch, other: fetch }
    }

    /// What is best on this CPU.
    fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        return Self::of_x86(&x86::vendor(), x86::family());
        #[cfg(not(target_arch = "x86_64"))]
        return Self::all(Fetch::First);
    }

    /// Reads a setting such as that of `KV_CPU_READ_AHEAD`: `first`, `second`, `near`, `twice` or
    /// `none`, or one of them for one query row and one for all else, with a `/` between.
    /// Absent or empty means what is best on this CPU.
    pub(crate) fn from_setting(setting: Option<&str>) -> Result<Self, DeviceError> {
        let Some(setting) = setting.map(str::trim).filter(|setting| !setting.is_empty()) else {
            return Ok(Self::detect());
        };
        let (one_row, other) = setting.split_once('/').unwrap_or((setting, setting));
        let fetch = |name: &str| {
            name.parse()
                .map_err(|unknown: UnknownName| unsupported("open cpu", unknown.to_string()))
        };
        Ok(Self { one_row: fetch(one_row)?, other: fetch(other)? })
    }

    /// What is best on a CPU of a vendor and a family.
    #[cfg(any(target_arch = "x86_64", test))]
    fn of_x86(vendor: &[u8; 12], family: u32) -> Self {
        /// Zen 3 and Zen 4.
        const AMD_19: u32 = 0x19;
        match (vendor, family) {
            (b"AuthenticAMD", AMD_19) => Self { one_row: Fetch::Near, other: Fetch::Twice },
            (b"GenuineIntel", _) => Self::all(Fetch::Second),
            _ => Self::all(Fetch::First),
        }
    }
}

impl FromStr for Fetch {
    type Err = UnknownName;
    fn from_str(name: &str) -> Result<Self, UnknownName> {
        match name {
            "first" => Ok(Self::First),
            "second" => Ok(Self::Second),
            "near" => Ok(Self::Near),
            "twice" => Ok(Self::Twice),
            "none" => Ok(Self::Nothing),
            _ => {
                let known = "first, second, near, twice, none";
                Err(UnknownName::new("place to read ahead into", name, known))
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::__cpuid;

    /// As leaf 0 has it.
    pub(super) fn vendor() -> [u8; 12] {
        let leaf = __cpuid(0);
        let mut vendor = [0; 12];
        for (to, word) in vendor.chunks_exact_mut(4).zip([leaf.ebx, leaf.edx, leaf.ecx]) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        vendor
    }

    /// The family, to which those of later CPUs add a second number.
    pub(super) fn family() -> u32 {
        let version = __cpuid(1).eax;
        let (family, extended) = (version >> 8 & 0xf, version >> 20 & 0xff);
        if family == 0xf { family.saturating_add(extended) } else { family }
    }
}

#[cfg(test)]
mod tests {
    use kv_core::DeviceErrorKind;

    use super::*;

    #[test]
    fn cpus_are_told_apart_by_vendor_and_family() {
        let zen_4 = ReadAhead::of_x86(b"AuthenticAMD", 0x19);
        assert_eq!((zen_4.one_row, zen_4.other), (Fetch::Near, Fetch::Twice));
        let first = ReadAhead::all(Fetch::First);
        assert_eq!(ReadAhead::of_x86(b"AuthenticAMD", 0x1a), first);
        assert_eq!(ReadAhead::of_x86(b"GenuineIntel", 6), ReadAhead::all(Fetch::Second));
        assert_eq!(ReadAhead::of_x86(b"HygonGenuine", 0x18), first);
    }

    #[test]
    fn a_setting_is_obeyed_or_refused_in_words() {
        let setting = |text| ReadAhead::from_setting(Some(text));
        let both = ReadAhead { one_row: Fetch::Near, other: Fetch::Second };
        assert_eq!(setting(" near/second ").unwrap(), both);
        assert_eq!(setting("first").unwrap(), ReadAhead::all(Fetch::First));
        assert_eq!(setting("").unwrap(), ReadAhead::detect());
        assert_eq!(ReadAhead::from_setting(None).unwrap(), ReadAhead::detect());
        for refused in ["third", "first/", "first/second/none"] {
            let error = setting(refused).unwrap_err();
            assert_eq!(error.kind(), DeviceErrorKind::Unsupported, "{refused}");
            assert!(error.to_string().contains("none"), "{error}");
        }
    }
}
