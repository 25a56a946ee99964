//! Machine code of the kernels: sources, compiler, archives, cache.
//!
//! Knows how a kernel's source becomes an image that a driver can load, and nothing of devices.
//! Public only for `cargo xtask kernels`, which compiles every kernel ahead of time; no promise of
//! stability.
mod arch;
mod archive;
mod cache;
mod nvrtc;
mod report;
mod source;

pub use arch::{Arch, UnknownArch};
pub use archive::{Archive, Damaged, Entry, compress, pack};
pub use cache::Cache;
pub use nvrtc::{CompileError, Compiled, Nvrtc};
pub use report::{KernelReport, entry_points, report};
pub use source::{Key, Source, Unit};

include!(concat!(env!("OUT_DIR"), "/kernels.rs"));

/// Files of the kernels, embedded in this crate: units (`.cu`) and what they include (`.h`).
pub fn sources() -> impl Iterator<Item = Source<'static>> {
    SOURCES.iter().map(|(name, text)| Source { name, text })
}

/// Every unit of [`sources`], in order of names.
pub fn units() -> Vec<Unit<'static>> {
    let all: Vec<_> = sources().collect();
    let units = all.iter().filter(|source| source.is_unit());
    units.map(|source| Unit::new(*source, &all)).collect()
}

/// The unit that exports a kernel, as far as the sources show it without a compiler.
pub(crate) fn exporting<'a>(units: &'a [Unit<'static>], kernel: &str) -> Option<&'a Unit<'static>> {
    let fitting = units.iter().filter_map(|unit| Some((unit.fit(kernel)?, unit)));
    fitting.max_by_key(|(fit, _)| *fit).map(|(_, unit)| unit)
}

/// The embedded archive for an architecture, `None` where this build has none.
///
/// # Errors
/// [`Damaged`] for bytes that no archive has.
pub(crate) fn embedded(arch: Arch) -> Option<Result<Archive<'static>, Damaged>> {
    let name = format!("{arch}.kva");
    let (_, bytes) = ARCHIVES.iter().find(|(file, _)| *file == name)?;
    Some(Archive::parse(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_of_this_crate_are_found_in_its_sources() {
        let units = units();
        for (kernel, unit) in [
            ("update_tables", "tables.cu"),
            ("write_rows", "write.cu"),
            ("attend_rows", "attend.cu"),
            ("attend_rows_large", "attend.cu"),
            ("decode_bf16_128", "decode_bf16.cu"),
            ("decode_int8_128", "decode_int8.cu"),
            ("decode_int8_row_128", "decode_int8_row.cu"),
            ("decode_l4_128", "decode_l4.cu"),
            ("prefill_f16_64", "prefill_f16.cu"),
            ("prefill_coded_64", "prefill_coded.cu"),
        ] {
            assert_eq!(exporting(&units, kernel).map(Unit::name), Some(unit), "{kernel}");
        }
        assert!(exporting(&units, "no_such_kernel").is_none());
    }

    #[test]
    fn what_must_round_like_the_host_is_compiled_so() {
        for unit in units() {
            let text = unit.text();
            let needs = text.contains("encode.h\"") || text.contains("Needs `--fmad=false`");
            let has = unit.options(Arch::PTX).iter().any(|option| option == "--fmad=false");
            assert!(has || !needs, "{}: its first line does not say it", unit.name());
        }
    }

    /// What is embedded was compiled, without a spill, from the sources as they are. If this fails:
    /// `cargo xtask kernels --write`.
    #[test]
    fn embedded_code_is_that_of_the_sources() {
        if ARCHIVES.is_empty() {
            return;
        }
        let units = units();
        for arch in Arch::SHIPPED {
            let archive = embedded(arch).expect("one for each").expect("written by this crate");
            assert_eq!(archive.entries.len(), units.len(), "{arch} has other units");
            for unit in &units {
                let key = archive.entry(unit.name()).map(|entry| entry.key);
                let current = unit.key(arch, archive.version);
                assert_eq!(key, Some(current), "{arch}: {} is not current", unit.name());
            }
        }
    }
}
