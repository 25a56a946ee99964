//! A GPU emulated on the CPU: the emulator's library runs the kernels' own source.
//!
//! Device memory is host memory, and work is done when the call that submits it returns. A launch
//! that fails (deadlocked threads, shared memory overrun) is an error with the kernel, the block,
//! the thread and the line. Owns memory and streams; `library` owns the calls.
mod idle;
mod library;
mod memory;
mod stream;
#[cfg(test)]
mod tests;

use std::ffi::c_void;
use std::path::PathBuf;
use std::sync::Arc;

use kv_core::error::{DeviceError, DeviceErrorKind};

use crate::gpu::{Event, Facts, Gpu, Pinned, Stream};
use crate::params::Address;
pub(crate) use idle::Idle;
use library::Library;
use memory::{HostMemory, Memory};
use stream::EmulatedStream;
#[cfg(test)]
pub(crate) use stream::kernels_of;

/// Name of the backend.
const NAME: &str = "emulated";

/// Options for opening an emulated GPU.
///
/// # Examples
///
/// ```
/// use kv::cuda::EmulatorOptions;
///
/// let options = EmulatorOptions::default().with_seed(7).with_multiprocessors(3);
/// assert_eq!(options, EmulatorOptions::default().with_multiprocessors(3).with_seed(7));
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use]
pub struct EmulatorOptions {
    place: Option<PathBuf>,
    seed: u32,
    multiprocessors: u32,
    memory: u64,
    reserved_bytes: u64,
}

impl Default for EmulatorOptions {
    /// Returns in-order execution on 4 multiprocessors, with 8 GiB of memory.
    fn default() -> Self {
        Self { place: None, seed: 0, multiprocessors: 4, memory: 8 << 30, reserved_bytes: 0 }
    }
}

impl EmulatorOptions {
    /// Uses the library at this path, built by `cargo xtask emulator`. By default, the variable
    /// `KV_CUDA_EMULATOR` names it, or it is `target/emulator/libkv_emulator.so` of this workspace.
    pub fn with_library(mut self, path: impl Into<PathBuf>) -> Self {
        self.place = Some(path.into());
        self
    }

    /// Shuffles the blocks of a launch and the threads of a block, differently for each launch of a
    /// stream. The default, 0, keeps them in order.
    pub fn with_seed(mut self, seed: u32) -> Self {
        self.seed = seed;
        self
    }

    /// Sets the reported number of multiprocessors, which decides how work is split. At least 1.
    pub fn with_multiprocessors(mut self, multiprocessors: u32) -> Self {
        self.multiprocessors = multiprocessors.max(1);
        self
    }

    /// Sets the bytes of device memory: allocations beyond it fail with `OutOfMemory`.
    pub fn with_memory(mut self, bytes: u64) -> Self {
        self.memory = bytes;
        self
    }

    /// Reserves bytes of device memory when it is opened, as
    /// [`CudaOptions::with_reserved_bytes`](crate::CudaOptions::with_reserved_bytes) does.
    /// More than it has
    /// fails with `OutOfMemory`.
    pub fn with_reserved_bytes(mut self, bytes: u64) -> Self {
        self.reserved_bytes = bytes;
        self
    }

    fn path(&self) -> PathBuf {
        let named = || std::env::var_os("KV_CUDA_EMULATOR").map(PathBuf::from);
        self.place.clone().or_else(named).unwrap_or_else(|| {
            let target = concat!(env!("CARGO_MANIFEST_DIR"), "/../target");
            PathBuf::from(target).join("emulator/libkv_emulator.so")
        })
    }
}

/// The emulated GPU.
#[derive(Debug)]
pub(crate) struct Emulator {
    kernels: Arc<Library>,
    memory: Arc<Memory>,
    facts: Facts,
    seed: u32,
}

impl Emulator {
    /// Loads the library.
    ///
    /// # Errors
    /// `Unsupported` without a library, or for one that is not the emulator's; `OutOfMemory` if
    /// more is to be reserved than the device has.
    pub(crate) fn open(options: &EmulatorOptions) -> Result<Self, DeviceError> {
        let kernels = Arc::new(Library::load(&options.path())?);
        let facts = Facts {
            card: "CUDA emulator on the CPU".to_owned(),
            multiprocessors: options.multiprocessors,
            capability: 90,
            memory: options.memory,
            shared_bytes_max: SHARED_BYTES_MAX,
        };
        let memory = Arc::new(Memory::new(options.memory, options.reserved_bytes)?);
        Ok(Self { kernels, memory, facts, seed: options.seed })
    }

    /// Returns the number of allocations that were not freed, and their bytes.
    #[cfg(test)]
    pub(crate) fn allocated(&self) -> (usize, u64) {
        self.memory.allocated()
    }
}

impl Gpu for Emulator {
    fn name(&self) -> &'static str {
        NAME
    }

    fn facts(&self) -> &Facts {
        &self.facts
    }

    fn alloc(&self, bytes: u64) -> Result<Address, DeviceError> {
        self.memory.alloc(bytes)
    }

    unsafe fn free(&self, address: Address) {
        // All submitted work is done: nothing to wait for.
        self.memory.free(address);
    }

    fn pinned(&self, bytes: usize) -> Result<Box<dyn Pinned>, DeviceError> {
        let memory = HostMemory::new(bytes).ok_or_else(|| {
            let detail = format!("{bytes} bytes of host memory");
            DeviceError::new(DeviceErrorKind::OutOfMemory, "pinned").with_detail(detail)
        })?;
        Ok(Box::new(memory))
    }

    fn check_foreign(&self, address: Address, bytes: u64) -> Result<(), DeviceError> {
        self.memory.find(address, bytes, "wrap device memory").map(drop)
    }

    fn stream(&self) -> Result<Box<dyn Stream>, DeviceError> {
        let (kernels, memory) = (Arc::clone(&self.kernels), Arc::clone(&self.memory));
        Ok(Box::new(EmulatedStream::new(kernels, memory, self.seed)))
    }

    /// Takes any handle, which it never uses: work is done when it is submitted, so streams need
    /// not be told apart.
    unsafe fn foreign_stream(&self, _raw: *mut c_void) -> Result<Box<dyn Stream>, DeviceError> {
        self.stream()
    }

    unsafe fn mark_foreign(&self, _raw: *mut c_void) -> Result<Arc<dyn Event>, DeviceError> {
        self.stream()?.record()
    }

    unsafe fn hold_foreign(
        &self,
        _raw: *mut c_void,
        event: &Arc<dyn Event>,
    ) -> Result<(), DeviceError> {
        self.stream()?.wait_for(event)
    }
}

/// Shared memory of a block on `sm_90`, in bytes; the library refuses more.
const SHARED_BYTES_MAX: u32 = 232_448;
