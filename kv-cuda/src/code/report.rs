//! The compiler's report of kernels: registers, shared memory, spills.

/// The assembler's report of one kernel.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct KernelReport {
    /// Name of the kernel.
    pub name: String,
    /// Registers per thread.
    pub registers: u32,
    /// Bytes of static shared memory.
    pub shared_bytes: u32,
    /// Bytes of stack per thread.
    pub stack_bytes: u32,
    /// Bytes of spill stores and loads.
    pub spill_bytes: u32,
}

/// Parses the compiler's log, as `--ptxas-options=-v` makes it.
pub fn report(log: &str) -> Vec<KernelReport> {
    let mut kernels: Vec<KernelReport> = Vec::new();
    for line in log.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            let name = rest.split('\'').next().unwrap_or_default().to_owned();
            kernels.push(KernelReport { name, ..KernelReport::default() });
        }
        let Some(kernel) = kernels.last_mut() else { continue };
        for part in line.split(',') {
            let number = || part.split_whitespace().find_map(|word| word.parse::<u32>().ok());
            let Some(number) = number() else { continue };
            let part = part.trim();
            if part.ends_with("registers") {
                kernel.registers = number;
            } else if part.ends_with("bytes smem") {
                kernel.shared_bytes = number;
            } else if part.ends_with("bytes stack frame") {
                kernel.stack_bytes = number;
            } else if part.ends_with("bytes spill stores") || part.ends_with("bytes spill loads") {
                // A text may have any number.
                kernel.spill_bytes = kernel.spill_bytes.saturating_add(number);
            }
        }
    }
    kernels
}

/// Lists the names of the kernels in PTX.
pub fn entry_points(ptx: &str) -> Vec<String> {
    let names = ptx.lines().filter_map(|line| {
        let (_, rest) = line.split_once(".entry ")?;
        let name = rest.split('(').next()?.trim();
        (!name.is_empty()).then(|| name.to_owned())
    });
    names.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'attend_8' for 'sm_90a'
ptxas info    : Function properties for attend_8
ptxas         .     16 bytes stack frame, 8 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 118 registers, used 1 barriers, 16 bytes cumulative stack size, 64 bytes smem
ptxas info    : Compile time = 781.052 ms
ptxas info    : Compiling entry function 'copy' for 'sm_90a'
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers
";

    #[test]
    fn a_log_is_read() {
        let kernels = report(LOG);
        assert_eq!(kernels.len(), 2);
        let first = &kernels[0];
        assert_eq!(
            (first.name.as_str(), first.registers, first.shared_bytes),
            ("attend_8", 118, 64)
        );
        assert_eq!((first.stack_bytes, first.spill_bytes), (16, 12));
        assert_eq!((kernels[1].name.as_str(), kernels[1].registers), ("copy", 32));
        assert_eq!(kernels[1].spill_bytes, 0);
        assert_eq!(report("error: no such thing, 7 registers"), []);
    }

    #[test]
    fn entry_points_are_found_in_ptx() {
        let ptx = ".version 9.0\n.visible .entry attend_8(\n\t.param\n.entry copy(\n.func f(\n";
        assert_eq!(entry_points(ptx), ["attend_8", "copy"]);
    }
}
