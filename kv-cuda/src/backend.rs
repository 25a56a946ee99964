//! The backend: an opened device.
use std::ffi::c_void;
use std::sync::Arc;

use crate::params::FORMATS;
#[cfg(doc)]
use kv_core::backend::Queue;
use kv_core::backend::{Backend, Capabilities, ChunkShape, StorageView};
use kv_core::error::DeviceError;

use crate::buffer::CudaBuffer;
use crate::driver::{CudaGpu, CudaOptions};
#[cfg(feature = "emulated")]
use crate::emulated::{Emulator, EmulatorOptions, Idle};
use crate::fence::CudaFence;
use crate::gpu::Gpu;
use crate::host_pool::CudaHostPool;
use crate::op;
use crate::queue::CudaQueue;
use crate::waiter::Waiter;

/// A CUDA device: a cheap handle.
#[derive(Debug, Clone)]
pub struct CudaBackend {
    pub(crate) gpu: Arc<dyn Gpu>,
    capabilities: Capabilities,
    waiter: Arc<Waiter>,
}

impl CudaBackend {
    /// Opens a GPU.
    ///
    /// # Errors
    /// `Unsupported` without a driver, without the device, for one older than compute capability
    /// 8.0, and where no code for it is embedded and none can be compiled here; `OutOfMemory`,
    /// `Lost` and `Driver` from the driver.
    pub fn open(options: &CudaOptions) -> Result<Self, DeviceError> {
        Ok(Self::on(Arc::new(CudaGpu::open(options)?)))
    }

    /// Opens the emulator: the same kernels and the same host code, run on the CPU one thread at a
    /// time. For tests.
    ///
    /// # Errors
    /// `Unsupported` if the emulator's library is missing or of another version.
    #[cfg(feature = "emulated")]
    pub fn emulated(options: &EmulatorOptions) -> Result<Self, DeviceError> {
        Ok(Self::on(Arc::new(Emulator::open(options)?)))
    }

    /// Opens a device that does nothing, so that benches measure the host's work alone. Outputs are
    /// undefined.
    #[cfg(feature = "emulated")]
    #[doc(hidden)]
    pub fn idle(multiprocessors: u32) -> Self {
        Self::on(Arc::new(Idle::new(multiprocessors.max(1))))
    }

    pub(crate) fn on(gpu: Arc<dyn Gpu>) -> Self {
        let facts = gpu.facts();
        let capabilities = Capabilities::minimal()
            .with_buffer_bytes_max(facts.memory)
            .with_binding_bytes_max(u64::MAX)
            .with_blocking_wait()
            .with_host_outputs()
            .with_workers(facts.multiprocessors)
            .with_head_dims(1, op::head_dim_max(facts.shared_bytes_max))
            .with_formats(FORMATS);
        Self { gpu, capabilities, waiter: Arc::new(Waiter::default()) }
    }

    /// Wraps the caller's memory as a buffer: `len` bytes at `address`, neither copied nor freed.
    ///
    /// # Safety
    /// 1. The memory outlives every handle.
    /// 2. The caller orders other streams' work on it with the queue's.
    ///
    /// # Errors
    /// `ForeignHandle` for an address that does not belong to this device, `OutOfRange` for a range
    /// past the end of its allocation, `Unsupported` for an address that is not a multiple of 16.
    pub unsafe fn wrap(&self, address: u64, len: u64) -> Result<CudaBuffer, DeviceError> {
        require_aligned(address)?;
        self.gpu.check_foreign(address, len)?;
        // SAFETY: `check_foreign` found the range in memory of this device; condition 1 for the
        // rest.
        Ok(unsafe { CudaBuffer::foreign(&self.gpu, address, len) })
    }

    /// Does what [`Self::wrap`] does without two questions to the driver: for callers that made the
    /// memory, and wrap some for every layer.
    ///
    /// # Safety
    /// 1. `len` bytes at `address` are memory of this device's primary context.
    /// 2. The memory outlives every handle.
    /// 3. The caller orders other streams' work on it with the queue's.
    ///
    /// # Errors
    /// `Unsupported` for an address that is not a multiple of 16.
    pub unsafe fn wrap_unchecked(&self, address: u64, len: u64) -> Result<CudaBuffer, DeviceError> {
        require_aligned(address)?;
        // SAFETY: all three conditions.
        Ok(unsafe { CudaBuffer::foreign(&self.gpu, address, len) })
    }

    /// Opens a queue on the caller's stream (a `CUstream`), which the caller keeps.
    ///
    /// # Safety
    /// 1. `stream` belongs to this device's primary context and outlives the queue.
    /// 2. While the queue is used, no other thread captures on it.
    ///
    /// # Errors
    /// `Lost` or `Driver`.
    pub unsafe fn queue_on(&self, stream: *mut c_void) -> Result<CudaQueue, DeviceError> {
        // SAFETY: both conditions are this function's.
        let stream = unsafe { self.gpu.foreign_stream(stream)? };
        Ok(CudaQueue::on(&self.gpu, &self.waiter, stream))
    }

    /// Marks the work that a stream of the caller (a `CUstream`) has now, so that a queue can wait
    /// for it: the stream is another than the queue's, and its results are inputs.
    ///
    /// # Safety
    /// 1. `stream` is a live stream.
    /// 2. Nobody captures on it.
    ///
    /// # Errors
    /// `ForeignHandle` for a stream of another device; `Lost` or `Driver`.
    pub unsafe fn mark_stream(&self, stream: *mut c_void) -> Result<CudaFence, DeviceError> {
        // SAFETY: both conditions are this function's.
        let event = unsafe { self.gpu.mark_foreign(stream)? };
        Ok(CudaFence::on(&self.gpu, &self.waiter, event))
    }

    /// Makes later work of a stream of the caller (a `CUstream`) wait for a fence, as
    /// [`Queue::wait_for`] does for a queue: the stream uses outputs, or memory of inputs anew.
    ///
    /// # Safety
    /// 1. `stream` is a live stream.
    /// 2. Nobody captures on it.
    ///
    /// # Errors
    /// `ForeignHandle` for a stream or a fence of another device; `Lost` or `Driver`.
    pub unsafe fn hold_stream(
        &self,
        stream: *mut c_void,
        fence: &CudaFence,
    ) -> Result<(), DeviceError> {
        let event = fence.event_on(&self.gpu, "hold a stream")?;
        // SAFETY: both conditions are this function's.
        unsafe { self.gpu.hold_foreign(stream, event) }
    }

    /// Returns the reason for which kernels start one after another, `None` if a kernel may start
    /// before the previous one has ended ([`CudaOptions::with_dependent_launches`]). Before the
    /// first launch it is what the card, its driver and the embedded code allow.
    pub fn serial_launches(&self) -> Option<String> {
        self.gpu.serial_launches()
    }

    /// Returns the name of the card.
    pub fn card(&self) -> &str {
        &self.gpu.facts().card
    }
}

/// Refuses memory that kernels cannot read 16 bytes at a time.
pub(crate) fn require_aligned(address: u64) -> Result<(), DeviceError> {
    if address.is_multiple_of(16) {
        return Ok(());
    }
    let why = "the address is not a multiple of 16";
    Err(crate::tensors::unsupported("wrap device memory", why))
}

impl Backend for CudaBackend {
    type Buffer = CudaBuffer;
    type Queue = CudaQueue;
    type HostPool = CudaHostPool;

    fn name(&self) -> &'static str {
        self.gpu.name()
    }
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }
    fn alloc(&self, bytes: u64) -> Result<CudaBuffer, DeviceError> {
        let max = self.capabilities.buffer_bytes_max;
        if bytes > max {
            let why = format!("{bytes} bytes; a buffer holds at most {max}");
            return Err(crate::tensors::unsupported("alloc", why));
        }
        CudaBuffer::alloc(&self.gpu, bytes)
    }
    fn queue(&self) -> Result<CudaQueue, DeviceError> {
        CudaQueue::new(&self.gpu, &self.waiter)
    }
    fn host_pool(
        &self,
        storage: StorageView<'_, CudaBuffer>,
        shape: ChunkShape,
        chunks: u32,
    ) -> Result<CudaHostPool, DeviceError> {
        CudaHostPool::new(&self.gpu, &self.waiter, storage, shape, chunks)
    }
}
