//! Device memory that callers hold.
use std::fmt;
use std::sync::Arc;

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

/// One allocation, freed with the last handle.
struct Memory {
    gpu: Arc<dyn Gpu>,
    address: Address,
    owned: bool,
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.owned {
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
        let memory = Memory { gpu: Arc::clone(gpu), address, owned: true };
        Ok(Self { memory: Arc::new(memory), begin: 0, len })
    }

    /// Wraps the caller's memory: `len` bytes at `address`, which are not freed.
    ///
    /// # Safety
    /// 1. The range lies in memory of this device and outlives every handle.
    pub(crate) unsafe fn foreign(gpu: &Arc<dyn Gpu>, address: Address, len: u64) -> Self {
        let memory = Memory { gpu: Arc::clone(gpu), address, owned: false };
        Self { memory: Arc::new(memory), begin: 0, len }
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
        self.memory.address.saturating_add(self.begin)
    }

    /// Returns the `len` bytes from byte `offset` on, as a handle to the same memory.
    ///
    /// # Errors
    /// `OutOfRange` past the end.
    pub fn view(&self, offset: u64, len: u64) -> Result<Self, DeviceError> {
        self.range((offset, len), "view")?;
        let begin = self.begin.saturating_add(offset);
        Ok(Self { memory: Arc::clone(&self.memory), begin, len })
    }

    /// Returns the address of bytes `offset..offset + len`.
    pub(crate) fn range(
        &self,
        (offset, len): (u64, u64),
        operation: &'static str,
    ) -> Result<Address, DeviceError> {
        match offset.checked_add(len) {
            Some(end) if end <= self.len => Ok(self.address().saturating_add(offset)),
            _ => {
                let asked = format!("{len} bytes at {offset} of {}", self.len);
                Err(DeviceError::new(DeviceErrorKind::OutOfRange, operation).with_detail(asked))
            }
        }
    }

    /// Does the same for a buffer that must belong to `gpu`.
    pub(crate) fn on(
        &self,
        gpu: &Arc<dyn Gpu>,
        range: (u64, u64),
        operation: &'static str,
    ) -> Result<Address, DeviceError> {
        if !Arc::ptr_eq(gpu, &self.memory.gpu) {
            return Err(DeviceError::new(DeviceErrorKind::ForeignHandle, operation));
        }
        self.range(range, operation)
    }
}
