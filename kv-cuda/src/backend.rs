//! Opening a device.
use std::sync::Arc;

use kv_core::DeviceError;
use kv_core::backend::{Backend, Capabilities};

use crate::buffer::CudaBuffer;
use crate::driver::{CudaGpu, CudaOptions};
#[cfg(feature = "emulated")]
use crate::emulated::{Emulator, EmulatorOptions};
use crate::gpu::Gpu;
use crate::queue::CudaQueue;
use crate::waiter::Waiter;

/// A CUDA device.
#[derive(Debug)]
pub struct CudaBackend {
    gpu: Arc<dyn Gpu>,
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

    /// The same kernels and the same host code on the CPU, a thread at a time: for tests.
    ///
    /// # Errors
    /// `Unsupported` when the emulator's library is not there or is another version's.
    #[cfg(feature = "emulated")]
    pub fn emulated(options: &EmulatorOptions) -> Result<Self, DeviceError> {
        Ok(Self::on(Arc::new(Emulator::open(options)?)))
    }

    fn on(gpu: Arc<dyn Gpu>) -> Self {
        let facts = gpu.facts();
        let capabilities = Capabilities::minimal()
            .with_buffer_bytes_max(facts.memory)
            .with_binding_bytes_max(u64::MAX)
            .with_blocking_wait()
            .with_workers(facts.multiprocessors);
        Self { gpu, capabilities, waiter: Arc::new(Waiter::default()) }
    }

    /// Memory of the caller's own as a buffer: `len` bytes at `address`, not freed. Nothing is
    /// copied.
    ///
    /// # Safety
    /// 1. The range lies in memory of this device, aligned to 16 bytes, and stays as long as any
    ///    handle.
    /// 2. Work of other streams that uses it is ordered with the queue's by the caller.
    pub unsafe fn wrap(&self, address: u64, len: u64) -> CudaBuffer {
        // SAFETY: condition 1.
        unsafe { CudaBuffer::foreign(&self.gpu, address, len) }
    }

    /// Name of the card.
    pub fn card(&self) -> &str {
        &self.gpu.facts().card
    }
}

impl Backend for CudaBackend {
    type Buffer = CudaBuffer;
    type Queue = CudaQueue;

    fn name(&self) -> &'static str {
        self.gpu.name()
    }
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }
    fn alloc(&self, bytes: u64) -> Result<CudaBuffer, DeviceError> {
        let max = self.capabilities.buffer_bytes_max;
        if bytes > max {
            let why = format!("{bytes} bytes, the device has {max}");
            return Err(crate::tensors::unsupported("alloc", why));
        }
        CudaBuffer::alloc(&self.gpu, bytes)
    }
    fn queue(&self) -> Result<CudaQueue, DeviceError> {
        CudaQueue::new(&self.gpu, &self.waiter)
    }
}
