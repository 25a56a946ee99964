//! Device memory that callers hold.
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use kv_core::error::{DeviceError, DeviceErrorKind};

use crate::gpu::Gpu;
use crate::params::Address;

/// A range of device memory: a cheap handle that keeps the memory alive.
#[derive(Clone)]
pub struct CudaBuffer {
    memory: Arc<Memory>,
    begin: u64,
    len: u64,
}

/// One allocation.
struct Memory {
    gpu: Arc<dyn Gpu>,
    address: Address,
    owner: Owner,
    /// Whether others may have submitted work with the memory, on any stream.
    is_exposed: AtomicBool,
}

/// The owner that frees the memory of a buffer.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Owner {
    /// The last handle.
    Handles,
    /// The caller, some time after the last handle.
    Caller,
    /// The caller, in the order of this stream: only a queue on it may use the memory.
    Lender(CallerStream),
}

/// A stream of the caller, by its handle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CallerStream(pub(crate) usize);

/// The device and stream on which a buffer is used.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place<'a> {
    pub(crate) gpu: &'a Arc<dyn Gpu>,
    /// The stream, if the queue is on one that memory can be lent on.
    pub(crate) stream: Option<CallerStream>,
}

impl Memory {
    fn new(gpu: &Arc<dyn Gpu>, address: Address, owner: Owner) -> Self {
        Self { gpu: Arc::clone(gpu), address, owner, is_exposed: AtomicBool::new(false) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.owner == Owner::Handles {
            if *self.is_exposed.get_mut() {
                self.gpu.expect_others();
            }
            // SAFETY: `alloc` of this device returned the address, and it is freed nowhere else; no
            // handle is left to submit work that uses it.
            unsafe { self.gpu.free(self.address) };
        }
    }
}

impl fmt::Debug for CudaBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut buffer = f.debug_struct("CudaBuffer");
        buffer.field("address", &format_args!("{:#x}", self.address()));
        buffer.field("len", &self.len).finish_non_exhaustive()
    }
}

impl CudaBuffer {
    /// Allocates zeroed memory.
    pub(crate) fn alloc(gpu: &Arc<dyn Gpu>, len: u64) -> Result<Self, DeviceError> {
        // The driver refuses allocations of 0 bytes.
        let address = gpu.alloc(len.max(1))?;
        let memory = Memory::new(gpu, address, Owner::Handles);
        Ok(Self { memory: Arc::new(memory), begin: 0, len })
    }

    /// Wraps the caller's memory: `len` bytes at `address`, which are not freed.
    ///
    /// # Safety
    /// 1. The range lies in memory of this device and outlives every handle.
    pub(crate) unsafe fn foreign(gpu: &Arc<dyn Gpu>, address: Address, len: u64) -> Self {
        let memory = Memory::new(gpu, address, Owner::Caller);
        Self { memory: Arc::new(memory), begin: 0, len }
    }

    /// Borrows the caller's memory: `len` bytes at `address`.
    ///
    /// # Safety
    /// 1. The range lies in memory of this device and outlives every handle.
    /// 2. Work on `stream` may use it as long as a handle exists.
    pub(crate) unsafe fn lent(
        gpu: &Arc<dyn Gpu>,
        (address, len): (Address, u64),
        stream: CallerStream,
    ) -> Self {
        let memory = Memory::new(gpu, address, Owner::Lender(stream));
        Self { memory: Arc::new(memory), begin: 0, len }
    }

    /// Returns whether the memory is lent for one call, so that nothing may keep a handle.
    pub(crate) fn is_lent(&self) -> bool {
        matches!(self.memory.owner, Owner::Lender(_))
    }

    /// Returns whether no other handle of this memory exists.
    pub(crate) fn is_only_handle(&self) -> bool {
        Arc::strong_count(&self.memory) == 1
    }

    /// Returns the number of bytes.
    pub fn len(&self) -> u64 {
        self.len
    }
    /// Returns whether the range is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
    /// Returns the device address of the first byte, for kernels of the caller. They must run on
    /// the stream of the queue that uses the buffer, or be ordered with it.
    pub fn address(&self) -> u64 {
        self.memory.address + self.begin
    }

    /// Does what [`Self::address`] does, for others that keep the address as long as a handle of
    /// the buffer, and whose last work with it may still run when they drop it: tensors of a
    /// framework. Before the memory is freed, the host waits for all work of the device.
    pub fn expose(&self) -> u64 {
        self.memory.is_exposed.store(true, Ordering::Relaxed);
        self.address()
    }

    /// Returns the `len` bytes from byte `offset` on, as a handle to the same memory.
    ///
    /// # Errors
    /// `OutOfRange` past the end.
    pub fn view(&self, offset: u64, len: u64) -> Result<Self, DeviceError> {
        self.range((offset, len), "view")?;
        let begin = self.begin + offset;
        Ok(Self { memory: Arc::clone(&self.memory), begin, len })
    }

    /// Returns the address of bytes `offset..offset + len`.
    pub(crate) fn range(
        &self,
        (offset, len): (u64, u64),
        operation: &'static str,
    ) -> Result<Address, DeviceError> {
        match offset.checked_add(len) {
            Some(end) if end <= self.len => Ok(self.address() + offset),
            _ => {
                let asked = format!("{len} bytes at {offset} of {}", self.len);
                Err(DeviceError::new(DeviceErrorKind::OutOfRange, operation).with_detail(asked))
            }
        }
    }

    /// Does the same for a buffer that must belong to the device, and if it is lent, to the stream.
    pub(crate) fn on(
        &self,
        place: Place<'_>,
        range: (u64, u64),
        operation: &'static str,
    ) -> Result<Address, DeviceError> {
        if !Arc::ptr_eq(place.gpu, &self.memory.gpu) {
            return Err(DeviceError::new(DeviceErrorKind::ForeignHandle, operation));
        }
        if let Owner::Lender(stream) = self.memory.owner
            && place.stream != Some(stream)
        {
            let error = DeviceError::new(DeviceErrorKind::ForeignHandle, operation);
            return Err(error.with_detail("memory that is lent on another stream"));
        }
        self.range(range, operation)
    }
}
