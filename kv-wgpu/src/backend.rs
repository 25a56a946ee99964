//! The backend: a device that is opened here or that the caller owns.
use std::sync::Arc;

use crate::params::FORMATS;
use kv_core::backend::{
    Backend, Capabilities, ChunkLayout, ChunkShape, QueueHostPool, StorageView,
};
use kv_core::error::{DeviceError, DeviceErrorKind};

use crate::adapter::{self, AdapterFacts, AdapterName};
use crate::buffer::WgpuBuffer;
use crate::device::Shared;
use crate::queue::WgpuQueue;
use crate::tensors::{DIM_MAX, DIM_STEP};

/// Options for opening a device.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct WgpuOptions {
    /// Adapter to open.
    pub adapter: AdapterName,
    /// Whether shaders may use subgroups where the adapter has them. Results do not depend on it;
    /// turn it off for comparisons and for drivers with wrong subgroup operations.
    pub subgroups: bool,
}

impl WgpuOptions {
    /// Chooses the adapter of this name, with defaults for everything else.
    pub fn new(adapter: AdapterName) -> Self {
        Self { adapter, subgroups: true }
    }
    /// Sets whether shaders may use subgroups.
    #[must_use]
    pub fn with_subgroups(mut self, subgroups: bool) -> Self {
        self.subgroups = subgroups;
        self
    }
}

impl Default for WgpuOptions {
    fn default() -> Self {
        Self::new(AdapterName::default())
    }
}

/// A WebGPU device. A clone refers to the same device.
#[derive(Debug, Clone)]
pub struct WgpuBackend {
    pub(crate) shared: Arc<Shared>,
    capabilities: Capabilities,
    facts: Option<AdapterFacts>,
}

/// Workgroups that contexts are split for: WebGPU does not report how many a device runs at once.
const WORKERS: u32 = 64;

impl WgpuBackend {
    /// Opens a device with its adapter's own limits.
    ///
    /// # Errors
    /// `Unsupported` if no adapter has this name, with the names that exist; `Driver` or
    /// `OutOfMemory` from the adapter.
    pub fn open(options: &WgpuOptions) -> Result<Self, DeviceError> {
        const OPEN: &str = "open a device";
        let (adapter, facts) = adapter::find(&options.adapter)?;
        let descriptor = wgpu::DeviceDescriptor {
            label: Some("kv"),
            required_features: adapter.features() & wgpu::Features::SUBGROUP,
            // The default limits are those of every browser: a tenth of a card's.
            required_limits: adapter.limits(),
            memory_hints: wgpu::MemoryHints::Performance,
            ..Default::default()
        };
        let opened = pollster::block_on(adapter.request_device(&descriptor));
        let (device, queue) = opened
            .map_err(|error| DeviceError::new(DeviceErrorKind::Driver, OPEN).with_source(error))?;
        Ok(Self { facts: Some(facts), ..Self::new(device, queue, options.subgroups) })
    }

    /// Uses the caller's device and queue. Submissions of the caller and of the backend run in the
    /// order in which they are made.
    ///
    /// The backend sets the device's lost callback; wgpu keeps one only.
    pub fn on(device: wgpu::Device, queue: wgpu::Queue) -> Self {
        Self::new(device, queue, true)
    }

    fn new(device: wgpu::Device, queue: wgpu::Queue, subgroups: bool) -> Self {
        Self::of(Shared::new(device, queue, subgroups))
    }

    pub(crate) fn of(shared: Shared) -> Self {
        let limits = &shared.limits;
        let minimal = Capabilities::minimal();
        let waiting = |c: Capabilities| c.with_blocking_wait().with_host_outputs();
        let minimal = if shared.may_wait { waiting(minimal) } else { minimal };
        let capabilities = minimal
            .with_buffer_bytes_max(limits.max_buffer_size)
            .with_binding_bytes_max(limits.max_storage_buffer_binding_size)
            .with_workers(WORKERS)
            .with_head_dims(DIM_STEP, DIM_MAX)
            .with_formats(FORMATS);
        Self { shared: Arc::new(shared), capabilities, facts: None }
    }

    /// Uses the caller's buffer in place; nothing is copied.
    ///
    /// # Errors
    /// `Unsupported` for a buffer without the usages `STORAGE`, `COPY_SRC` and `COPY_DST`, or whose
    /// size is not a multiple of 4. A buffer of another device of the same [`wgpu::Instance`] is
    /// found by the first call or submission that uses it, as `Driver`; wgpu does not detect a
    /// buffer of another instance.
    pub fn wrap(&self, buffer: wgpu::Buffer) -> Result<WgpuBuffer, DeviceError> {
        WgpuBuffer::wrap(&self.shared, buffer)
    }

    /// Returns the device.
    pub fn device(&self) -> &wgpu::Device {
        &self.shared.device
    }

    /// Returns the facts of the adapter; `None` for a device that the caller owns.
    pub fn facts(&self) -> Option<&AdapterFacts> {
        self.facts.as_ref()
    }
}

impl Backend for WgpuBackend {
    type Buffer = WgpuBuffer;
    type Queue = WgpuQueue;
    type HostPool = QueueHostPool<Self::Queue>;

    fn name(&self) -> &'static str {
        "wgpu"
    }
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }
    fn alloc(&self, bytes: u64) -> Result<WgpuBuffer, DeviceError> {
        self.shared.notice("alloc")?;
        WgpuBuffer::alloc(&self.shared, bytes, "alloc")
    }
    fn queue(&self) -> Result<WgpuQueue, DeviceError> {
        self.shared.notice("open a queue")?;
        Ok(WgpuQueue::new(&self.shared))
    }
    fn host_pool(
        &self,
        storage: StorageView<'_, WgpuBuffer>,
        shape: ChunkShape,
        chunks: u32,
    ) -> Result<Self::HostPool, DeviceError> {
        let layout = ChunkLayout::of(storage, shape)?;
        Ok(QueueHostPool::new(self.queue()?, layout, chunks))
    }
}
