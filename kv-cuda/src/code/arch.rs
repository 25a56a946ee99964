//! Names of GPU architectures, and which of them run on a device.
use std::fmt;
use std::str::FromStr;

/// A compilation target: machine code of one architecture, or PTX, which the driver translates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Arch {
    capability: u32,
    reach: Reach,
    ptx: bool,
}

/// The architectures that have a target's instructions, besides that of its number. The name of a
/// target ends in [`Self::suffix`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Reach {
    /// Later ones of the same major version; for PTX, all later ones.
    Later,
    /// Those of its family (`sm_100f`): 10.0 and 10.3.
    Family,
    /// No other one (`sm_90a`).
    Own,
}

impl Reach {
    const ALL: [Self; 3] = [Self::Later, Self::Family, Self::Own];

    const fn suffix(self) -> &'static str {
        match self {
            Self::Later => "",
            Self::Family => "f",
            Self::Own => "a",
        }
    }
}

impl Arch {
    /// Targets of archives. PTX comes last: it serves devices that no other entry does.
    pub const SHIPPED: [Self; 7] = [
        Self::machine(80, Reach::Later),
        Self::machine(86, Reach::Later),
        Self::machine(89, Reach::Later),
        Self::machine(90, Reach::Own),
        Self::machine(100, Reach::Family),
        Self::machine(120, Reach::Later),
        Self::PTX,
    ];
    /// PTX that every supported device understands.
    pub const PTX: Self = Self { capability: 80, reach: Reach::Later, ptx: true };
    /// The oldest compute capability that the kernels support.
    pub const CAPABILITY_MIN: u32 = 80;

    const fn machine(capability: u32, reach: Reach) -> Self {
        Self { capability, reach, ptx: false }
    }

    /// Returns the target for compiling on the device's own machine: exactly this device.
    pub(crate) fn native(capability: u32) -> Self {
        // Their tensor instructions are not part of later architectures.
        let is_specific = (90..120).contains(&capability);
        Self::machine(capability, if is_specific { Reach::Own } else { Reach::Later })
    }

    /// Returns PTX for a device that the compiler does not know, of the newest architecture that it
    /// does.
    pub(crate) fn newest_ptx(capability: u32, known: &[u32]) -> Option<Self> {
        let known = known.iter().copied().filter(|known| *known <= capability);
        let capability = known.max().filter(|known| *known >= Self::CAPABILITY_MIN)?;
        Some(Self { capability, reach: Reach::Later, ptx: true })
    }

    /// Returns the shipped machine code that runs on a device of this capability, if any.
    ///
    /// Code of `X.Y` runs on `X.Z` for `Z >= Y`, except between desktop parts and embedded ones
    /// (8.7, 10.1, 11.0), and except code with a smaller [`Reach`].
    pub(crate) fn shipped_for(capability: u32) -> Option<Self> {
        let code = match capability {
            80 | 86 | 89 | 90 | 100 | 120 => capability,
            103 => 100,
            121 => 120,
            _ => return None,
        };
        Self::SHIPPED.into_iter().find(|arch| !arch.ptx && arch.capability == code)
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
        write!(f, "{kind}_{}{}", self.capability, self.reach.suffix())
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
        let digits = number.trim_end_matches(|letter: char| !letter.is_ascii_digit());
        let suffix = number.strip_prefix(digits).unwrap_or_default();
        let reach = Reach::ALL.into_iter().find(|reach| reach.suffix() == suffix);
        let is_number = digits.bytes().all(|byte| byte.is_ascii_digit());
        let capability = digits.parse().ok().filter(|_| is_number);
        let (capability, reach) = capability.zip(reach).ok_or_else(unknown)?;
        Ok(Self { capability, reach, ptx })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_and_written() {
        let names: Vec<_> = Arch::SHIPPED.iter().map(ToString::to_string).collect();
        assert_eq!(names, ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100f", "sm_120", "compute_80"]);
        for (name, arch) in names.iter().zip(Arch::SHIPPED) {
            assert_eq!(name.parse::<Arch>().unwrap(), arch);
        }
        for text in [
            "", "sm", "sm_", "sm_x", "sm_+90", "cm_80", "90a", "sm_a", "sm_f", "sm_9f0", "sm_100af",
        ] {
            assert!(text.parse::<Arch>().is_err(), "{text:?}");
        }
    }

    #[test]
    fn devices_get_code_that_they_run() {
        let name = |capability| Arch::shipped_for(capability).map(|arch| arch.to_string());
        for (capability, code) in [
            (80, "sm_80"),
            (86, "sm_86"),
            (89, "sm_89"),
            (90, "sm_90a"),
            (100, "sm_100f"),
            (103, "sm_100f"),
            (120, "sm_120"),
            (121, "sm_120"),
        ] {
            assert_eq!(name(capability).as_deref(), Some(code));
        }
        // Embedded parts do not run desktop code, and are of other families.
        for capability in [75, 87, 101, 110, 130] {
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
