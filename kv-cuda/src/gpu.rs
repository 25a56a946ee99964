//! What the rest of the crate asks of a GPU: memory, streams, events, launches.
//!
//! Two things answer: the driver (`driver`), and the emulator that runs the same kernels on the CPU
//! (`emulated`). Everything above this module is the same for both, so that tests on a machine
//! without a GPU test it.
use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;

use kv_core::{DeviceError, DeviceErrorKind};

use crate::params::Address;

/// Facts about a device that decide how work is cut.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Facts {
    /// Name of the card, for people.
    pub(crate) card: String,
    /// Streaming multiprocessors.
    pub(crate) multiprocessors: u32,
    /// Compute capability: 90 for 9.0.
    pub(crate) capability: u32,
    /// Bytes of device memory.
    pub(crate) memory: u64,
    /// Bytes of shared memory that one thread block may ask for.
    pub(crate) shared_bytes_max: u32,
}

/// How a kernel is started.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Launch {
    /// Name of the kernel, as `KV_KERNEL` in its source says.
    pub(crate) kernel: &'static str,
    /// Thread blocks.
    pub(crate) grid: [u32; 3],
    /// Threads of one block; what the kernel's `KV_KERNEL` says.
    pub(crate) threads: u32,
    /// Bytes of dynamic shared memory.
    pub(crate) shared_bytes: u32,
}

/// One piece of a batch of copies between page-locked host memory and the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct HostCopy {
    /// First byte in page-locked memory.
    pub(crate) host: *mut u8,
    /// First byte on the device.
    pub(crate) device: Address,
    /// Bytes; above 0.
    pub(crate) bytes: usize,
}

/// One opened device.
pub(crate) trait Gpu: fmt::Debug + Send + Sync {
    /// Name of the backend.
    fn name(&self) -> &'static str;
    /// Facts, read when it was opened.
    fn facts(&self) -> &Facts;
    /// Reserves memory, zeroed and aligned to 256 bytes. `bytes` is above 0.
    fn alloc(&self, bytes: u64) -> Result<Address, DeviceError>;
    /// Gives memory back behind the work that was submitted before, to streams that are open or
    /// were; need not wait for it.
    ///
    /// # Safety
    /// 1. `address` came from [`Self::alloc`] of this device and was not freed.
    /// 2. Nothing submitted from now on uses it.
    unsafe fn free(&self, address: Address);
    /// Reserves page-locked host memory. `bytes` is above 0.
    fn pinned(&self, bytes: usize) -> Result<Box<dyn Pinned>, DeviceError>;
    /// Opens a stream.
    fn stream(&self) -> Result<Box<dyn Stream>, DeviceError>;
    /// Checks that `bytes` bytes at `address` are memory of this device, in one piece.
    ///
    /// For memory of a caller, which becomes a buffer without a copy and is never freed here. That
    /// it stays as long as the buffer is the caller's promise; a wrong address is refused with
    /// `ForeignHandle`, a range past the end of its allocation with `OutOfRange`.
    fn check_foreign(&self, address: Address, bytes: u64) -> Result<(), DeviceError> {
        let _ = (address, bytes);
        Err(DeviceError::new(DeviceErrorKind::Unsupported, "wrap device memory"))
    }
    /// Wraps a caller's stream (a `CUstream`), which stays the caller's.
    ///
    /// # Safety
    /// 1. `raw` is a stream of this device's primary context and lives as long as the result.
    /// 2. While the result is used, no other thread captures on `raw`.
    unsafe fn foreign_stream(&self, raw: *mut c_void) -> Result<Box<dyn Stream>, DeviceError> {
        let _ = raw;
        Err(DeviceError::new(DeviceErrorKind::Unsupported, "wrap a stream"))
    }
}

/// Page-locked host memory, freed when dropped.
pub(crate) trait Pinned: fmt::Debug + Send + Sync {
    /// First byte.
    fn base(&self) -> *mut u8;
    /// Bytes.
    fn len(&self) -> usize;
}

/// An ordered lane of work. Work that was submitted goes on when it is dropped.
pub(crate) trait Stream: fmt::Debug + Send {
    /// Copies to the device.
    ///
    /// # Safety
    /// 1. `bytes` bytes at `from` stay and are not written until an event recorded later is done;
    ///    they are page-locked.
    /// 2. `to..to + bytes` lies in memory of the device.
    unsafe fn upload(
        &mut self,
        to: Address,
        from: *const u8,
        bytes: usize,
    ) -> Result<(), DeviceError>;
    /// Copies to the host.
    ///
    /// # Safety
    /// 1. `bytes` bytes at `to` stay and are neither read nor written until an event recorded later
    ///    is done; they are page-locked.
    /// 2. `from..from + bytes` lies in memory of the device.
    unsafe fn download(
        &mut self,
        to: *mut u8,
        from: Address,
        bytes: usize,
    ) -> Result<(), DeviceError>;
    /// Copies from one place of the device to another.
    ///
    /// # Safety
    /// 1. Both ranges lie in memory of the device, and do not overlap.
    unsafe fn copy(&mut self, to: Address, from: Address, bytes: u64) -> Result<(), DeviceError> {
        let _ = (to, from, bytes);
        Err(DeviceError::new(DeviceErrorKind::Unsupported, "copy"))
    }
    /// Sets bytes to zero.
    ///
    /// # Safety
    /// 1. `at..at + bytes` lies in memory of the device.
    unsafe fn zero(&mut self, at: Address, bytes: u64) -> Result<(), DeviceError>;
    /// Starts a kernel.
    ///
    /// # Safety
    /// 1. `params` is what the kernel takes, and every address in it is that of memory as large as
    ///    the kernel uses, until an event recorded later is done.
    unsafe fn launch(&mut self, launch: &Launch, params: &[u8]) -> Result<(), DeviceError>;
    /// Copies many pieces to the device, as a block that comes back from the host needs.
    ///
    /// # Safety
    /// 1. Conditions of [`Self::upload`], for every piece.
    unsafe fn upload_batch(&mut self, copies: &[HostCopy]) -> Result<(), DeviceError> {
        for copy in copies {
            // SAFETY: condition 1.
            unsafe { self.upload(copy.device, copy.host, copy.bytes) }?;
        }
        Ok(())
    }
    /// Copies many pieces to the host.
    ///
    /// # Safety
    /// 1. Conditions of [`Self::download`], for every piece.
    unsafe fn download_batch(&mut self, copies: &[HostCopy]) -> Result<(), DeviceError> {
        for copy in copies {
            // SAFETY: condition 1.
            unsafe { self.download(copy.host, copy.device, copy.bytes) }?;
        }
        Ok(())
    }
    /// Starts to keep work instead of running it, until [`Self::end_capture`]. Kernels must have
    /// been prepared; this thread ends what it began.
    fn begin_capture(&mut self) -> Result<(), DeviceError> {
        Err(DeviceError::new(DeviceErrorKind::Unsupported, "begin capture"))
    }
    /// What was kept, ready to be run many times. Ends the capture also when it fails.
    fn end_capture(&mut self) -> Result<Box<dyn Graph>, DeviceError> {
        Err(DeviceError::new(DeviceErrorKind::Unsupported, "end capture"))
    }
    /// Runs captured work as it was recorded: same addresses, same parameters, same grids.
    ///
    /// # Safety
    /// 1. Conditions of every call that was captured hold now: its memory is there.
    unsafe fn replay(&mut self, graph: &dyn Graph) -> Result<(), DeviceError> {
        let _ = graph;
        Err(DeviceError::new(DeviceErrorKind::Unsupported, "replay"))
    }
    /// Marks the work so far.
    fn record(&mut self) -> Result<Arc<dyn Event>, DeviceError>;
    /// Makes later work wait for an event of the same device.
    fn wait_for(&mut self, event: &Arc<dyn Event>) -> Result<(), DeviceError>;
}

/// Captured work. A replay that was submitted goes on when it is dropped.
pub(crate) trait Graph: fmt::Debug + Send + std::any::Any {}

/// Completion of the work before it.
pub(crate) trait Event: fmt::Debug + Send + Sync + std::any::Any {
    /// Whether it is done; the error of that work if it failed.
    fn is_done(&self) -> Result<bool, DeviceError>;
    /// Blocks until it is.
    fn wait(&self) -> Result<(), DeviceError>;
}
