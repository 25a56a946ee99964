//! The interface to a GPU: memory, streams, events, launches.
//!
//! It has two implementations: the driver (`driver`), and the emulator that runs the same kernels
//! on the CPU (`emulated`). Everything above this module is the same for both, so that tests on a
//! machine without a GPU cover it.
use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;

use kv_core::error::{DeviceError, DeviceErrorKind};

use crate::params::Address;

/// Facts about a device that decide how work is split.
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
    /// Maximum bytes of shared memory of a thread block.
    pub(crate) shared_bytes_max: u32,
}

/// The launch of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Launch {
    /// Name of the kernel, as its `KV_KERNEL` declares it.
    pub(crate) kernel: &'static str,
    /// Thread blocks.
    pub(crate) grid: [u32; 3],
    /// Threads of one block, as declared by `KV_KERNEL`.
    pub(crate) threads: u32,
    /// Bytes of dynamic shared memory.
    pub(crate) shared_bytes: u32,
}

/// One copy of a batch between page-locked host memory and the device.
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
    /// Returns the name of the backend.
    fn name(&self) -> &'static str;
    /// Returns the facts that were read when it was opened.
    fn facts(&self) -> &Facts;
    /// Returns the reason for which kernels start one after another, `None` if they may start
    /// before the previous one has ended.
    fn serial_launches(&self) -> Option<String> {
        Some("not a device of the driver".to_owned())
    }
    /// Allocates memory, zeroed and aligned to 256 bytes. `bytes` is above 0.
    fn alloc(&self, bytes: u64) -> Result<Address, DeviceError>;
    /// Frees memory after the work that was submitted before, on open and closed streams; need not
    /// wait for it.
    ///
    /// # Safety
    /// 1. `address` came from [`Self::alloc`] of this device and was not freed.
    /// 2. Nothing submitted from now on uses it.
    unsafe fn free(&self, address: Address);
    /// Makes the next free wait for all work that the device has been given, on streams that are
    /// not open here, too. Devices on which there are none do nothing.
    fn expect_others(&self) {}
    /// Allocates page-locked host memory. `bytes` is above 0.
    fn pinned(&self, bytes: usize) -> Result<Box<dyn Pinned>, DeviceError>;
    /// Opens a stream.
    fn stream(&self) -> Result<Box<dyn Stream>, DeviceError>;
    /// Checks that `bytes` bytes at `address` are one range of memory of this device.
    ///
    /// This is for memory of a caller, which becomes a buffer without a copy and is never freed
    /// here. The caller guarantees that it outlives the buffer. A wrong address is refused with
    /// `ForeignHandle`, a range past the end of its allocation with `OutOfRange`.
    fn check_foreign(&self, address: Address, bytes: u64) -> Result<(), DeviceError> {
        let _ = (address, bytes);
        Err(DeviceError::new(DeviceErrorKind::Unsupported, "wrap device memory"))
    }
    /// Returns whether a context of the driver (a `CUcontext`) is the one that this device uses.
    fn is_context(&self, raw: *const c_void) -> bool {
        let _ = raw;
        false
    }
    /// Wraps a caller's stream (a `CUstream`), which the caller keeps.
    ///
    /// # Safety
    /// 1. `raw` belongs to this device's primary context and outlives the result.
    /// 2. While the result is used, no other thread captures on `raw`.
    unsafe fn foreign_stream(&self, raw: *mut c_void) -> Result<Box<dyn Stream>, DeviceError> {
        let _ = raw;
        Err(DeviceError::new(DeviceErrorKind::Unsupported, "wrap a stream"))
    }
    /// Marks the work of a caller's stream (a `CUstream`) so far.
    ///
    /// # Safety
    /// 1. `raw` is a live stream.
    /// 2. Nobody captures on it.
    unsafe fn mark_foreign(&self, raw: *mut c_void) -> Result<Arc<dyn Event>, DeviceError> {
        let _ = raw;
        Err(DeviceError::new(DeviceErrorKind::Unsupported, "mark a stream"))
    }
    /// Makes later work of a caller's stream (a `CUstream`) wait for an event of this device.
    ///
    /// # Safety
    /// 1. Both conditions of [`Self::mark_foreign`].
    unsafe fn hold_foreign(
        &self,
        raw: *mut c_void,
        event: &Arc<dyn Event>,
    ) -> Result<(), DeviceError> {
        let _ = (raw, event);
        Err(DeviceError::new(DeviceErrorKind::Unsupported, "hold a stream"))
    }
}

/// Page-locked host memory, freed when dropped.
pub(crate) trait Pinned: fmt::Debug + Send + Sync {
    /// Returns the first byte.
    fn base(&self) -> *mut u8;
    /// Returns the number of bytes.
    fn len(&self) -> usize;
}

/// An in-order stream of work. Submitted work completes when it is dropped.
pub(crate) trait Stream: fmt::Debug + Send {
    /// Copies to the device.
    ///
    /// # Safety
    /// 1. `bytes` bytes at `from` are page-locked; they stay valid and are not written until an
    ///    event recorded later is done.
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
    /// 1. `bytes` bytes at `to` are page-locked; they stay valid and are neither read nor written
    ///    until an event recorded later is done.
    /// 2. `from..from + bytes` lies in memory of the device.
    unsafe fn download(
        &mut self,
        to: *mut u8,
        from: Address,
        bytes: usize,
    ) -> Result<(), DeviceError>;
    /// Copies within the device.
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
    /// Launches a kernel.
    ///
    /// # Safety
    /// 1. `params` are the kernel's parameters, and every address in them points to memory as large
    ///    as the kernel uses, until an event recorded later is done.
    unsafe fn launch(&mut self, launch: &Launch, params: &[u8]) -> Result<(), DeviceError>;
    /// Makes many copies to the device, as a chunk that is copied in needs.
    ///
    /// # Safety
    /// 1. Conditions of [`Self::upload`], for every copy.
    unsafe fn upload_batch(&mut self, copies: &[HostCopy]) -> Result<(), DeviceError> {
        for copy in copies {
            // SAFETY: condition 1.
            unsafe { self.upload(copy.device, copy.host, copy.bytes) }?;
        }
        Ok(())
    }
    /// Makes many copies to the host.
    ///
    /// # Safety
    /// 1. Conditions of [`Self::download`], for every copy.
    unsafe fn download_batch(&mut self, copies: &[HostCopy]) -> Result<(), DeviceError> {
        for copy in copies {
            // SAFETY: condition 1.
            unsafe { self.download(copy.host, copy.device, copy.bytes) }?;
        }
        Ok(())
    }
    /// Starts to capture work instead of running it, until [`Self::end_capture`] on the same
    /// thread. Kernels must have been loaded.
    fn begin_capture(&mut self) -> Result<(), DeviceError> {
        Err(DeviceError::new(DeviceErrorKind::Unsupported, "begin capture"))
    }
    /// Ends the capture, also if it fails, and returns the captured work for replays.
    fn end_capture(&mut self) -> Result<Box<dyn Graph>, DeviceError> {
        Err(DeviceError::new(DeviceErrorKind::Unsupported, "end capture"))
    }
    /// Runs captured work as it was recorded: same addresses, same parameters, same grids.
    ///
    /// # Safety
    /// 1. Conditions of every captured call hold now: its memory still exists.
    unsafe fn replay(&mut self, graph: &dyn Graph) -> Result<(), DeviceError> {
        let _ = graph;
        Err(DeviceError::new(DeviceErrorKind::Unsupported, "replay"))
    }
    /// Marks the work so far.
    fn record(&mut self) -> Result<Arc<dyn Event>, DeviceError>;
    /// Makes later work wait for an event of the same device.
    fn wait_for(&mut self, event: &Arc<dyn Event>) -> Result<(), DeviceError>;
}

/// Captured work. A submitted replay completes when it is dropped.
pub(crate) trait Graph: fmt::Debug + Send + std::any::Any {}

/// Completion of the work before it.
pub(crate) trait Event: fmt::Debug + Send + Sync + std::any::Any {
    /// Returns whether that work is done; its error if it failed.
    fn is_done(&self) -> Result<bool, DeviceError>;
    /// Blocks until that work is done.
    fn wait(&self) -> Result<(), DeviceError>;
}
