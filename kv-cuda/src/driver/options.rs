//! Options for opening a device.
use std::path::PathBuf;

/// Options for opening a CUDA device. Unset options come from the environment: `KV_NVRTC` (the
/// compiler's library or its folder), `KV_CUDA_SOURCES` (a folder of kernels),
/// `KV_CUDA_DEPENDENT_LAUNCHES` (`0` switches them off) and `XDG_CACHE_HOME`.
///
/// ```
/// use kv::cuda::CudaOptions;
/// let options = CudaOptions::new(1).with_nvrtc("/opt/cuda/lib64").without_cache();
/// assert_eq!(options.device(), 1);
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CudaOptions {
    pub(super) ordinal: u32,
    pub(super) nvrtc: Option<PathBuf>,
    pub(super) sources: Option<PathBuf>,
    pub(super) cache: CacheChoice,
    pub(super) reserved_bytes: u64,
    pub(super) dependent_launches: Option<bool>,
}

/// The place of kernels that were compiled on this machine.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) enum CacheChoice {
    #[default]
    OfUser,
    Folder(PathBuf),
    Nowhere,
}

impl CudaOptions {
    /// Chooses the device of this ordinal, as the driver counts the devices that
    /// `CUDA_VISIBLE_DEVICES` leaves.
    pub fn new(ordinal: u32) -> Self {
        Self { ordinal, ..Self::default() }
    }
    /// Uses this NVRTC to compile kernels: a library, or its folder.
    #[must_use]
    pub fn with_nvrtc(self, place: impl Into<PathBuf>) -> Self {
        Self { nvrtc: Some(place.into()), ..self }
    }
    /// Uses the kernels of this folder, an edited copy of `kv-cuda/kernels`, to try a change on the
    /// machine that has the card. Units that differ from this build are compiled on first use,
    /// which requires NVRTC.
    #[must_use]
    pub fn with_sources(self, folder: impl Into<PathBuf>) -> Self {
        Self { sources: Some(folder.into()), ..self }
    }
    /// Keeps compiled kernels in this folder instead of the user's cache.
    #[must_use]
    pub fn with_cache(self, folder: impl Into<PathBuf>) -> Self {
        Self { cache: CacheChoice::Folder(folder.into()), ..self }
    }
    /// Keeps no compiled kernels: every start compiles the kernels that no archive has.
    #[must_use]
    pub fn without_cache(self) -> Self {
        Self { cache: CacheChoice::Nowhere, ..self }
    }
    /// Reserves this many bytes of device memory when the device is opened, for buffers of this
    /// backend only: neither later allocations nor other programs can take them. The default, 0,
    /// allocates memory as buffers need it.
    ///
    /// Buffers beyond the reserve are allocated as usual. Either way, freed memory is kept for
    /// later buffers until the device is closed.
    #[must_use]
    pub fn with_reserved_bytes(self, bytes: u64) -> Self {
        Self { reserved_bytes: bytes, ..self }
    }
    /// Lets kernels start before the previous kernel on the stream has ended, and wait for it then,
    /// or starts them one after another. The default is to do it wherever the card, its driver and
    /// the loaded code can: it takes microseconds off every layer of a small batch.
    ///
    /// Kernels of other libraries on the same stream stay ordered with these. The exception is one
    /// that is launched in this way and ends without having waited (`griddepcontrol.wait`): a
    /// program with such a kernel between those of this backend switches dependent launches off.
    #[must_use]
    pub fn with_dependent_launches(self, is_wanted: bool) -> Self {
        Self { dependent_launches: Some(is_wanted), ..self }
    }
    /// Returns the ordinal of the device.
    pub fn device(&self) -> u32 {
        self.ordinal
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_call_of_a_setter_counts() {
        let options = CudaOptions::default();
        assert_eq!((options.device(), &options.cache), (0, &CacheChoice::OfUser));
        let options =
            CudaOptions::new(3).without_cache().with_cache("/kept").with_nvrtc("a").with_nvrtc("b");
        assert_eq!(options.device(), 3);
        assert_eq!(options.cache, CacheChoice::Folder("/kept".into()));
        assert_eq!(options.nvrtc, Some("b".into()));
        let options = options.with_sources("x").with_sources("y");
        assert_eq!(options.sources, Some("y".into()));
        let options = options.with_reserved_bytes(1 << 40).with_reserved_bytes(1 << 30);
        assert_eq!((options.reserved_bytes, options.dependent_launches), (1 << 30, None));
        let options = options.with_dependent_launches(false).with_dependent_launches(true);
        assert_eq!(options.dependent_launches, Some(true));
        assert_eq!(options.without_cache().cache, CacheChoice::Nowhere);
    }
}
