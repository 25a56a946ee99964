//! Names of GPU architectures, and which of them run on a device.
use std::fmt;
use std::str::FromStr;

/// A compilation target: machine code of one architecture, or PTX, which the driver translates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Arch {
    capability: u32,
    /// Uses instructions that only exactly this architecture has (`sm_90a`).
    specific: bool,
    ptx: bool,
}

impl Arch {
    /// Targets of archives. PTX comes last: it serves devices that no other entry does.
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
    /// The oldest compute capability that the kernels support.
    pub const CAPABILITY_MIN: u32 = 80;

    const fn machine(capability: u32) -> Self {
        Self { capability, specific: false, ptx: false }
    }

    const fn specific(capability: u32) -> Self {
        Self { capability, specific: true, ptx: false }
    }

    /// Returns the target for compiling on the device's own machine: exactly this device.
    pub(crate) fn native(capability: u32) -> Self {
        // Their tensor instructions are not part of later architectures.
        let specific = (90..120).contains(&capability);
        Self { capability, specific, ptx: false }
    }

    /// Returns PTX for a device that the compiler does not know, of the newest architecture that it
    /// does.
    pub(crate) fn newest_ptx(capability: u32, known: &[u32]) -> Option<Self> {
        let known = known.iter().copied().filter(|known| *known <= capability);
        let capability = known.max().filter(|known| *known >= Self::CAPABILITY_MIN)?;
        Some(Self { capability, specific: false, ptx: true })
    }

    /// Returns the shipped machine code that runs on a device of this capability, if any.
    ///
    /// Code of `X.Y` runs on `X.Z` for `Z >= Y`, except between desktop parts and embedded ones
    /// (8.7, 10.1, 11.0), and except architecture-specific code.
    pub(crate) fn shipped_for(capability: u32) -> Option<Self> {
        let arch = match capability {
            80 | 86 | 89 | 120 => Self::machine(capability),
            90 | 100 => Self::specific(capability),
            121 => Self::machine(120),
            _ => return None,
        };
        Self::SHIPPED.contains(&arch).then_some(arch)
    }

    /// Returns the compute capability that it is for: 90 for 9.0.
    pub(crate) fn capability(self) -> u32 {
        self.capability
    }

    /// Returns whether the driver translates it.
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

/// A name that is not an architecture.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnknownArch(String);

impl fmt::Display for UnknownArch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} is not an architecture such as sm_90a or compute_80", self.0)
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
    fn devices_get_code_that_they_run() {
        let name = |capability| Arch::shipped_for(capability).map(|arch| arch.to_string());
        for (capability, code) in
            [(80, "sm_80"), (86, "sm_86"), (89, "sm_89"), (90, "sm_90a"), (121, "sm_120")]
        {
            assert_eq!(name(capability).as_deref(), Some(code));
        }
        // Embedded parts do not run desktop code, and architecture-specific code runs on nothing
        // newer.
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
