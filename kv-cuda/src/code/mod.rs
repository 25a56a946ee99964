//! Machine code of the kernels: sources, compiler, archives, cache.
//!
//! Knows how a kernel's source becomes an image that a driver can load; knows nothing of devices.
//! Public only for `cargo xtask kernels`, which compiles every kernel ahead of time, without a
//! promise of stability.
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

/// Iterates over the embedded kernel sources: units (`.cu`) and the headers they include (`.h`).
pub fn sources() -> impl Iterator<Item = Source<'static>> {
    SOURCES.iter().map(|(name, text)| Source { name, text })
}

/// Returns every unit of [`sources`], ordered by name.
pub fn units() -> Vec<Unit<'static>> {
    units_among(&sources().collect::<Vec<_>>())
}

fn units_among(all: &[Source<'static>]) -> Vec<Unit<'static>> {
    let units = all.iter().filter(|source| source.is_unit());
    units.map(|source| Unit::new(*source, all)).collect()
}

/// Reads the units of a folder, which replace the units of this crate: for kernels that are edited
/// on the machine that runs them. Unchanged units use the embedded code. The texts are leaked, so
/// that they are `'static` like the embedded ones.
///
/// # Errors
/// Those of reading the folder and its files, and one for a folder without a unit.
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
    if units.is_empty() { Err(io::Error::other("the folder has no kernels")) } else { Ok(units) }
}

/// Finds the unit that exports a kernel, as far as the sources show it without a compiler.
pub(crate) fn exporting<'a>(units: &'a [Unit<'static>], kernel: &str) -> Option<&'a Unit<'static>> {
    let fitting = units.iter().filter_map(|unit| Some((unit.fit(kernel)?, unit)));
    fitting.max_by_key(|(fit, _)| *fit).map(|(_, unit)| unit)
}

/// Returns the embedded archive for an architecture, `None` if this build has none.
///
/// # Errors
/// [`Damaged`] for bytes that are not an archive.
pub(crate) fn embedded(arch: Arch) -> Option<Result<Archive<'static>, Damaged>> {
    let name = format!("{arch}.kva");
    let (_, bytes) = ARCHIVES.iter().find(|(file, _)| *file == name)?;
    Some(Archive::parse(bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_found_in_their_units() {
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
    fn units_that_round_like_the_host_disable_fma() {
        for unit in units() {
            let text = unit.text();
            let needs = text.contains("encode.h\"") || text.contains("Needs `--fmad=false`");
            let has = unit.options(Arch::PTX).iter().any(|option| option == "--fmad=false");
            assert!(has || !needs, "{}: its first line does not say it", unit.name());
        }
    }

    #[test]
    fn units_of_a_folder_replace_embedded_ones() {
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
        let header = folder.path().join("decode_plan.h");
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

    /// Embedded code was compiled, without spills, from the current sources. If this fails, run
    /// `cargo xtask kernels --write`.
    #[test]
    fn embedded_code_is_current() {
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
