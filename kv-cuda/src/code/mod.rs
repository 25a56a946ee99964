//! Machine code of the kernels: sources, compiler, archives, cache.
//!
//! Knows how a kernel's source becomes an image that a driver can load, and nothing of devices.
//! Public only for `cargo xtask kernels`, which compiles every kernel ahead of time; no promise of
//! stability.
use std::ffi::OsStr;
use std::path::Path;
use std::{fs, io};

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
    units_among(&sources().collect::<Vec<_>>())
}

fn units_among(all: &[Source<'static>]) -> Vec<Unit<'static>> {
    let units = all.iter().filter(|source| source.is_unit());
    units.map(|source| Unit::new(*source, all)).collect()
}

/// Every unit of the files in a folder, instead of those of this crate: for kernels that are edited
/// on the machine that runs them. Embedded code serves those that were not touched. The texts are
/// kept for good, as embedded ones are.
///
/// # Errors
/// Where the folder or a file in it cannot be read, and for a folder that has no unit.
pub(crate) fn units_in(folder: &Path) -> io::Result<Vec<Unit<'static>>> {
    let mut all = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let extension = path.extension().and_then(OsStr::to_str);
        let name = path.file_name().and_then(OsStr::to_str);
        if let (Some("cu" | "h"), Some(name)) = (extension, name) {
            let text = fs::read_to_string(&path)?.leak();
            all.push(Source { name: name.to_owned().leak(), text });
        }
    }
    all.sort_by_key(|source| source.name);
    let units = units_among(&all);
    if units.is_empty() { Err(io::Error::other("no kernels are there")) } else { Ok(units) }
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

    #[test]
    fn units_of_a_folder_take_the_place_of_embedded_ones() {
        let folder = tempfile::tempdir().unwrap();
        for source in sources() {
            fs::write(folder.path().join(source.name), source.text).unwrap();
        }
        fs::write(folder.path().join("notes.txt"), "no source").unwrap();
        let keys = |units: Vec<Unit<'static>>| -> Vec<_> {
            units.iter().map(|unit| (unit.name(), unit.key(Arch::PTX, 13000))).collect()
        };
        assert_eq!(keys(units_in(folder.path()).unwrap()), keys(units()));
        // An edited header changes the units that include it, and no other.
        let header = folder.path().join("pieces.h");
        let text = fs::read_to_string(&header).unwrap();
        let edited = text.replace("KV_DECODE_SHARE_MIN = 4", "KV_DECODE_SHARE_MIN = 3");
        assert_ne!(text, edited);
        fs::write(header, edited).unwrap();
        let (before, after) = (keys(units()), keys(units_in(folder.path()).unwrap()));
        let changed = before.iter().zip(&after).filter(|(before, after)| before != after);
        let changed: Vec<_> = changed.map(|((name, _), _)| *name).collect();
        assert!(changed.contains(&"plan.cu") && changed.contains(&"decode_bf16.cu"), "{changed:?}");
        assert!(!changed.contains(&"write.cu"), "{changed:?}");
        let empty = tempfile::tempdir().unwrap();
        assert!(units_in(empty.path()).is_err());
        assert!(units_in(&empty.path().join("none")).is_err());
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
