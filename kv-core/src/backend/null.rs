//! A device that stores nothing and computes nothing, for planning without memory: admission
//! simulations, planner benches, tests of the life cycle.
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};

use super::{
    Backend, Capabilities, ChunkLayout, ChunkShape, Fence, Queue, QueueHostPool, Readback,
};
use crate::error::{DeviceError, DeviceErrorKind};
use crate::ids::GroupId;
use crate::plan::{
    AttendArgs, AttentionPlan, ConvertArgs, ConvertPlan, CopyArgs, CopyPlan, GatherArgs,
    GatherPlan, WriteArgs, WritePlan,
};
use crate::storage::StorageView;

/// Counts operations, and can fail one of them.
#[derive(Debug)]
pub struct NullBackend {
    capabilities: Capabilities,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    recorded: AtomicU64,
    fail_at: AtomicU64,
}

/// A size without memory.
#[derive(Debug, Clone)]
pub struct NullBuffer {
    bytes: u64,
}

/// Accepts everything.
#[derive(Debug)]
pub struct NullQueue {
    shared: Arc<Shared>,
}

/// Always signalled.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct NullFence;

/// A download of zeros.
#[derive(Debug)]
pub struct NullReadback {
    bytes: u64,
}

impl Default for NullBackend {
    fn default() -> Self {
        Self::new()
    }
}

impl NullBackend {
    /// Creates a device of unlimited size.
    pub fn new() -> Self {
        Self {
            capabilities: Capabilities::minimal()
                .with_buffer_bytes_max(u64::MAX)
                .with_binding_bytes_max(u64::MAX)
                .with_blocking_wait()
                .with_host_outputs(),
            shared: Arc::new(Shared {
                recorded: AtomicU64::new(0),
                fail_at: AtomicU64::new(u64::MAX),
            }),
        }
    }

    /// Replaces the capabilities of the device.
    #[must_use]
    pub fn with_capabilities(mut self, capabilities: Capabilities) -> Self {
        self.capabilities = capabilities;
        self
    }

    /// Returns a handle that counts and fails operations while a cache owns the backend.
    pub fn control(&self) -> NullControl {
        NullControl(Arc::clone(&self.shared))
    }
}

/// Remote control of a [`NullBackend`].
#[derive(Debug, Clone)]
pub struct NullControl(Arc<Shared>);

impl NullControl {
    /// Returns the number of operations recorded so far, including submissions.
    pub fn recorded(&self) -> u64 {
        self.0.recorded.load(Ordering::Relaxed)
    }
    /// Fails the operation after `more` further ones with [`DeviceErrorKind::Driver`], once.
    pub fn fail_after(&self, more: u64) {
        let at = self.recorded().saturating_add(more); // too many: never
        self.0.fail_at.store(at, Ordering::Relaxed);
    }
}

impl Shared {
    fn record(&self, operation: &'static str) -> Result<(), DeviceError> {
        let index = self.recorded.fetch_add(1, Ordering::Relaxed);
        if index == self.fail_at.load(Ordering::Relaxed) {
            return Err(DeviceError::new(DeviceErrorKind::Driver, operation)
                .with_detail("failure injected by NullControl"));
        }
        Ok(())
    }
}

fn in_range(
    buffer: &NullBuffer,
    at: u64,
    bytes: u64,
    what: &'static str,
) -> Result<(), DeviceError> {
    match at.checked_add(bytes) {
        Some(end) if end <= buffer.bytes => Ok(()),
        _ => Err(DeviceError::new(DeviceErrorKind::OutOfRange, what)),
    }
}

impl Backend for NullBackend {
    type Buffer = NullBuffer;
    type Queue = NullQueue;
    type HostPool = QueueHostPool<Self::Queue>;
    fn name(&self) -> &'static str {
        "null"
    }
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }
    fn alloc(&self, bytes: u64) -> Result<NullBuffer, DeviceError> {
        self.shared.record("alloc")?;
        Ok(NullBuffer { bytes })
    }
    fn queue(&self) -> Result<NullQueue, DeviceError> {
        Ok(NullQueue { shared: Arc::clone(&self.shared) })
    }
    fn host_pool(
        &self,
        storage: StorageView<'_, NullBuffer>,
        shape: ChunkShape,
        chunks: u32,
    ) -> Result<Self::HostPool, DeviceError> {
        let layout = ChunkLayout::of(storage, shape)?;
        Ok(QueueHostPool::new(self.queue()?, layout, chunks))
    }
}

impl Queue for NullQueue {
    type Buffer = NullBuffer;
    type Fence = NullFence;
    type Readback = NullReadback;
    fn upload(&mut self, dst: &NullBuffer, at: u64, src: &[u8]) -> Result<(), DeviceError> {
        in_range(dst, at, crate::num::to_u64(src.len()), "upload")?;
        self.shared.record("upload")
    }
    fn download(
        &mut self,
        src: &NullBuffer,
        at: u64,
        bytes: u64,
    ) -> Result<NullReadback, DeviceError> {
        in_range(src, at, bytes, "download")?;
        self.shared.record("download")?;
        Ok(NullReadback { bytes })
    }
    fn zero(&mut self, dst: &NullBuffer, at: u64, bytes: u64) -> Result<(), DeviceError> {
        in_range(dst, at, bytes, "zero")?;
        self.shared.record("zero")
    }
    fn prepare(
        &mut self,
        _group: GroupId,
        _write: &WritePlan<'_>,
        _attend: &AttentionPlan<'_>,
    ) -> Result<(), DeviceError> {
        self.shared.record("prepare")
    }
    fn write_kv(
        &mut self,
        _plan: &WritePlan<'_>,
        _args: WriteArgs<'_, NullBuffer>,
    ) -> Result<(), DeviceError> {
        self.shared.record("write_kv")
    }
    fn attend(
        &mut self,
        _plan: &AttentionPlan<'_>,
        _args: AttendArgs<'_, NullBuffer>,
    ) -> Result<(), DeviceError> {
        self.shared.record("attend")
    }
    fn copy_blocks(
        &mut self,
        _plan: &CopyPlan<'_>,
        _args: CopyArgs<'_, NullBuffer>,
    ) -> Result<(), DeviceError> {
        self.shared.record("copy_blocks")
    }
    fn gather(
        &mut self,
        _plan: &GatherPlan<'_>,
        _args: GatherArgs<'_, NullBuffer>,
    ) -> Result<(), DeviceError> {
        self.shared.record("gather")
    }
    fn convert(
        &mut self,
        _plan: &ConvertPlan,
        _args: ConvertArgs<'_, NullBuffer>,
    ) -> Result<(), DeviceError> {
        self.shared.record("convert")
    }
    fn flush(&mut self) -> Result<(), DeviceError> {
        self.shared.record("flush")
    }
    fn submit(&mut self) -> Result<NullFence, DeviceError> {
        self.shared.record("submit")?;
        Ok(NullFence)
    }
    fn wait_for(&mut self, _fence: &NullFence) -> Result<(), DeviceError> {
        self.shared.record("wait_for")
    }
}

impl Fence for NullFence {
    fn poll(&self, _cx: &mut Context<'_>) -> Poll<Result<(), DeviceError>> {
        Poll::Ready(Ok(()))
    }
    fn wait(&self) -> Result<(), DeviceError> {
        Ok(())
    }
}

impl Readback for NullReadback {
    fn poll(&mut self, _cx: &mut Context<'_>) -> Poll<Result<Vec<u8>, DeviceError>> {
        Poll::Ready(zeros(self.bytes))
    }
    fn wait(self) -> Result<Vec<u8>, DeviceError> {
        zeros(self.bytes)
    }
}

fn zeros(bytes: u64) -> Result<Vec<u8>, DeviceError> {
    let too_large = || DeviceError::new(DeviceErrorKind::OutOfMemory, "download");
    let len = usize::try_from(bytes).map_err(|_| too_large())?;
    let mut zeros = Vec::new();
    zeros.try_reserve_exact(len).map_err(|error| too_large().with_source(error))?;
    zeros.resize(len, 0);
    Ok(zeros)
}
