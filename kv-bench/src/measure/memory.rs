//! Free memory of this machine.

/// Returns the bytes that programs may still allocate, as Linux reports them; a guess on other
/// systems.
pub(super) fn available() -> u64 {
    const GUESS: u64 = 8 << 30;
    let facts = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    available_in(&facts).unwrap_or(GUESS)
}

fn available_in(facts: &str) -> Option<u64> {
    let rest = facts.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kilobytes: u64 = rest.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kilobytes.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn free_memory_is_read_from_the_kernel() {
        let facts = "MemTotal:       24689764 kB\nMemAvailable:     2048 kB\nCached: 1 kB\n";
        assert_eq!(available_in(facts), Some(2 << 20));
        assert_eq!(available_in("MemAvailable: many kB\n"), None);
        assert_eq!(available_in(""), None);
        assert!(available() > 0);
    }
}
