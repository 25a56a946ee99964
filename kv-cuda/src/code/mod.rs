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

/// The embedded archive for an architecture, `None` where this build has none.
///
/// # Errors
/// [`Damaged`] for bytes that no archive has.
pub(crate) fn embedded(arch: Arch) -> Option<Result<Archive<'static>, Damaged>> {
    let name = format!("{arch}.kva");
    let (_, bytes) = ARCHIVES.iter().find(|(file, _)| *file == name)?;
    Some(Archive::parse(bytes))
}
