//! Names of GPU architectures, and which of them a device runs.
use std::fmt;
use std::str::FromStr;

/// What code is compiled for: machine code of one architecture, or PTX, which a driver translates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Arch {
    capability: u32,
    /// With instructions that only this very architecture has (`sm_90a`).
    specific: bool,
    ptx: bool,
}

impl Arch {
    /// What archives are made for. PTX comes last: it serves devices that no other entry does.
    pub const SHIPPED: [Self; 7] = [
        Self::machine(80),
        Self::machine(86),
        Self::machine(89),
        Self::specific(90),
        Self::specific(100),
        Self::machine(120),
        Self::PTX,
    ];
    /// PTX that every supported device understands.
    pub const PTX: Self = Self { capability: 80, specific: false, ptx: true };
    /// The oldest capability that kernels are written for.
    pub const CAPABILITY_MIN: u32 = 80;

    const fn machine(capability: u32) -> Self {
        Self { capability, specific: false, ptx: false }
    }

    const fn specific(capability: u32) -> Self {
        Self { capability, specific: true, ptx: false }
    }

    /// What a compiler on the device's own machine is asked for: exactly this device.
    pub(crate) fn native(capability: u32) -> Self {
        // Tensor instructions of these are not part of the architectures after them.
        let specific = (90..120).contains(&capability);
        Self { capability, specific, ptx: false }
    }

    /// PTX for a device that a compiler does not know, from the newest that it does.
    pub(crate) fn newest_ptx(capability: u32, known: &[u32]) -> Option<Self> {
        let known = known.iter().copied().filter(|known| *known <= capability);
        let capability = known.max().filter(|known| *known >= Self::CAPABILITY_MIN)?;
        Some(Self { capability, specific: false, ptx: true })
    }

    /// The shipped machine code that a device of this capability runs, `None` where there is none.
    ///
    /// Code of `X.Y` runs on `X.Z` for `Z >= Y`, except between desktop parts and the embedded ones
    /// (8.7, 10.1, 11.0), and never where it is specific.
    pub(crate) fn shipped_for(capability: u32) -> Option<Self> {
        let arch = match capability {
            80 | 86 | 89 | 120 => Self::machine(capability),
            90 | 100 => Self::specific(capability),
            121 => Self::machine(120),
            _ => return None,
        };
        Self::SHIPPED.contains(&arch).then_some(arch)
    }

    /// Whether a driver translates it.
    pub fn is_ptx(self) -> bool {
        self.ptx
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = if self.ptx { "compute" } else { "sm" };
        let suffix = if self.specific { "a" } else { "" };
        write!(f, "{kind}_{}{suffix}", self.capability)
    }
}

/// A name that no architecture has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnknownArch(String);

impl fmt::Display for UnknownArch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} is no architecture such as sm_90a or compute_80", self.0)
    }
}

impl std::error::Error for UnknownArch {}

impl FromStr for Arch {
    type Err = UnknownArch;

    fn from_str(text: &str) -> Result<Self, UnknownArch> {
        let unknown = || UnknownArch(text.to_owned());
        let (kind, number) = text.split_once('_').ok_or_else(unknown)?;
        let ptx = match kind {
            "sm" => false,
            "compute" => true,
            _ => return Err(unknown()),
        };
        let (number, specific) =
            number.strip_suffix('a').map_or((number, false), |number| (number, true));
        let digits = number.bytes().all(|byte| byte.is_ascii_digit());
        let capability = number.parse().ok().filter(|_| digits).ok_or_else(unknown)?;
        Ok(Self { capability, specific, ptx })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_and_written() {
        let names: Vec<_> = Arch::SHIPPED.iter().map(ToString::to_string).collect();
        assert_eq!(names, ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120", "compute_80"]);
        for (name, arch) in names.iter().zip(Arch::SHIPPED) {
            assert_eq!(name.parse::<Arch>().unwrap(), arch);
        }
        for text in ["", "sm", "sm_", "sm_x", "sm_+90", "cm_80", "90a", "sm_a"] {
            assert!(text.parse::<Arch>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn a_device_gets_code_that_it_runs() {
        let name = |capability| Arch::shipped_for(capability).map(|arch| arch.to_string());
        for (capability, code) in
            [(80, "sm_80"), (86, "sm_86"), (89, "sm_89"), (90, "sm_90a"), (121, "sm_120")]
        {
            assert_eq!(name(capability).as_deref(), Some(code));
        }
        // Embedded parts run no desktop code, and what is specific runs on nothing newer.
        for capability in [75, 87, 101, 103, 110, 130] {
            assert_eq!(name(capability), None);
        }
        assert_eq!(Arch::native(103).to_string(), "sm_103a");
        assert_eq!(Arch::native(87).to_string(), "sm_87");
        let ptx = |capability, known: &[u32]| Arch::newest_ptx(capability, known);
        assert_eq!(ptx(130, &[75, 90, 120]).unwrap().to_string(), "compute_120");
        assert_eq!(ptx(87, &[75, 80, 86, 89]).unwrap().to_string(), "compute_86");
        assert_eq!(ptx(80, &[75]), None);
    }
}
