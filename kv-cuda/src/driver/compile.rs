//! Kernels compiled on the user's machine, for devices that no embedded code fits.
//!
//! Results are kept on disk (see [`Cache`]), so that each version of the sources and of the
//! compiler is compiled once for each architecture.
use std::path::PathBuf;
use std::sync::OnceLock;

use super::options::{CacheChoice, CudaOptions};
use crate::code::{Arch, Cache, CompileError, Nvrtc, Unit};

/// The compiler for one device, loaded on first use.
#[derive(Debug)]
pub(super) struct Compiler {
    capability: u32,
    /// The CUDA version of the driver.
    driver: u32,
    place: Option<PathBuf>,
    cache: Option<Cache>,
    nvrtc: OnceLock<Result<Nvrtc, CompileError>>,
}

impl Compiler {
    pub(super) fn new(capability: u32, driver: u32, options: &CudaOptions) -> Self {
        let cache = match &options.cache {
            CacheChoice::OfUser => Cache::of_user(),
            CacheChoice::Folder(folder) => Some(Cache::new(folder)),
            CacheChoice::Nowhere => None,
        };
        let (place, nvrtc) = (options.nvrtc.clone(), OnceLock::new());
        Self { capability, driver, place, cache, nvrtc }
    }

    /// Returns the compute capability of the device.
    pub(super) fn capability(&self) -> u32 {
        self.capability
    }

    /// Returns the compiler and its target.
    ///
    /// # Errors
    /// [`CompileError::NoCompiler`], also for a compiler whose code this driver or device cannot
    /// run.
    pub(super) fn load(&self) -> Result<(&Nvrtc, Arch), CompileError> {
        let load = || Nvrtc::load(self.place.as_deref());
        let nvrtc = self.nvrtc.get_or_init(load).as_ref().map_err(CompileError::clone)?;
        let version = nvrtc.version();
        if !is_loadable(version, self.driver) {
            let reason =
                format!("driver {} cannot load code of NVRTC version {version}", self.driver);
            return Err(CompileError::NoCompiler { reason });
        }
        let arch = choose(self.capability, nvrtc.capabilities()).ok_or_else(|| {
            let reason = format!("NVRTC version {version} supports no architecture of this device");
            CompileError::NoCompiler { reason }
        })?;
        Ok((nvrtc, arch))
    }

    /// Returns the image for the driver: from disk, or compiled now.
    ///
    /// # Errors
    /// Those of the compiler.
    pub(super) fn image(&self, unit: &Unit<'_>) -> Result<Vec<u8>, CompileError> {
        let (nvrtc, arch) = self.load()?;
        let compile = || nvrtc.compile(unit, arch).map(|compiled| compiled.image);
        match &self.cache {
            Some(cache) => cache.load_or(unit.key(arch, nvrtc.version()), compile),
            None => compile(),
        }
    }
}

/// Returns whether a driver loads machine code of a compiler: of its own major version or an older
/// one.
fn is_loadable(compiler: u32, driver: u32) -> bool {
    compiler / 1000 <= driver / 1000
}

/// Chooses code for the device itself, else PTX that its driver translates.
fn choose(capability: u32, known: &[u32]) -> Option<Arch> {
    if known.contains(&capability) {
        return Some(Arch::native(capability));
    }
    Arch::newest_ptx(capability, known)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::code::Source;

    #[test]
    fn targets_are_those_the_compiler_knows() {
        let choose = |capability, known: &[u32]| choose(capability, known).map(|a| a.to_string());
        assert_eq!(choose(90, &[80, 90]).as_deref(), Some("sm_90a"));
        assert_eq!(choose(87, &[80, 87]).as_deref(), Some("sm_87"));
        assert_eq!(choose(103, &[80, 90]).as_deref(), Some("compute_90"));
        assert_eq!(choose(103, &[]), None);
    }

    #[test]
    fn drivers_load_code_that_is_not_newer() {
        assert!(is_loadable(13030, 13000) && is_loadable(12040, 13000));
        assert!(!is_loadable(13000, 12090));
    }

    #[test]
    fn no_compiler_is_an_error_every_time() {
        let options = CudaOptions::default().with_nvrtc("/nowhere").without_cache();
        let compiler = Compiler::new(80, 13000, &options);
        let unit = Unit::new(Source { name: "x.cu", text: "" }, &[]);
        for _ in 0..2 {
            let error = compiler.image(&unit).unwrap_err();
            assert!(matches!(error, CompileError::NoCompiler { .. }), "{error}");
        }
    }

    /// Runs only where a compiler is: `KV_NVRTC` names it, or the system has one.
    #[test]
    fn compiled_images_are_kept() {
        if let Err(reason) = Nvrtc::load(None) {
            return println!("skipped: {reason}");
        }
        let folder = tempfile::tempdir().unwrap();
        let compiler =
            || Compiler::new(80, 99000, &CudaOptions::default().with_cache(folder.path()));
        let text = "extern \"C\" __global__ void nothing() {}";
        let unit = Unit::new(Source { name: "nothing.cu", text }, &[]);
        let image = compiler().image(&unit).unwrap();
        let kept: Vec<_> = std::fs::read_dir(folder.path()).unwrap().collect();
        assert_eq!(kept.len(), 1);
        assert_eq!(compiler().image(&unit).unwrap(), image);
        let wrong = Unit::new(Source { name: "wrong.cu", text: "?" }, &[]);
        assert!(compiler().image(&wrong).is_err(), "failures are not kept");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
