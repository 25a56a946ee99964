//! Resident memory of this process, and what the machine has free.
use std::fs;

/// Returns the bytes that programs may still allocate, where Linux reports them.
pub(crate) fn available() -> Option<u64> {
    field(&fs::read_to_string("/proc/meminfo").ok()?, "MemAvailable:")
}

/// The highest mark of resident memory since a moment.
pub(crate) struct Peak {
    before: u64,
}

impl Peak {
    /// Begins at what is resident now. `None` where the kernel keeps no mark that can be set back.
    pub(crate) fn begin() -> Option<Self> {
        fs::write("/proc/self/clear_refs", "5").ok()?;
        Some(Self { before: status("VmRSS:")? })
    }

    /// Returns by how much the mark has risen.
    pub(crate) fn end(&self) -> Option<u64> {
        Some(status("VmHWM:")?.saturating_sub(self.before))
    }
}

fn status(name: &str) -> Option<u64> {
    field(&fs::read_to_string("/proc/self/status").ok()?, name)
}

/// Returns the bytes of a line in kB.
fn field(facts: &str, name: &str) -> Option<u64> {
    let rest = facts.lines().find_map(|line| line.strip_prefix(name))?;
    let kilobytes: u64 = rest.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kilobytes.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_read_in_kilobytes() {
        let facts = "VmPeak:\t 9 kB\nVmHWM:\t    2204 kB\n";
        assert_eq!(field(facts, "VmHWM:"), Some(2204 << 10));
        assert_eq!(field(facts, "VmRSS:"), None);
        assert_eq!(field("VmRSS: many kB", "VmRSS:"), None);
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn memory_that_was_freed_again_counts() {
        let peak = Peak::begin().unwrap();
        drop(std::hint::black_box(vec![1_u8; 256 << 20]));
        // Other tests may return memory meanwhile.
        let rise = peak.end().unwrap();
        assert!(rise > 64 << 20, "{rise}");
        assert!(available().unwrap() > 0);
    }
}
