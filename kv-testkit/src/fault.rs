//! Fault injection: a device that fails on demand. A failed call must leave no trace in the cache.
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::task::{Context, Poll};

use kv_core::backend::{
    Backend, Capabilities, ChunkLayout, ChunkShape, Fence, HostPool, Queue, Readback, Reserved,
    StorageView,
};
use kv_core::error::{DeviceError, DeviceErrorKind};
use kv_core::plan::{
    AttendArgs, AttentionPlan, ConvertArgs, ConvertPlan, CopyArgs, CopyPlan, GatherArgs,
    GatherPlan, WriteArgs, WritePlan,
};
use kv_core::{BlockId, GroupId};

use crate::device::Device;

/// A wrapper of another device that fails one chosen operation, or all operations from one on.
#[derive(Debug)]
pub struct FaultInjector<B> {
    inner: B,
    fault: Arc<Fault>,
}

/// The way in which an operation fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultKind {
    /// Fails once, before the work is done.
    Early,
    /// Fails once, after the work is done.
    Late,
    /// Fails from this operation on, until [`FaultInjector::clear`].
    Persistent,
}

impl FaultKind {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Early, Self::Late, Self::Persistent];
}

/// The fault that is armed.
#[derive(Debug)]
struct Fault {
    /// Operations before the failing one.
    left: AtomicU64,
    /// Index in [`FaultKind::ALL`].
    kind: AtomicU8,
    has_fired: AtomicBool,
}

/// Value of `left` when no fault is armed.
const NEVER: u64 = u64::MAX;

impl Fault {
    /// Runs an operation or makes it fail.
    fn run<T>(
        &self,
        operation: &'static str,
        done: impl FnOnce() -> Result<T, DeviceError>,
    ) -> Result<T, DeviceError> {
        let kind = FaultKind::ALL[usize::from(self.kind.load(Ordering::Relaxed))];
        match self.left.load(Ordering::Relaxed) {
            NEVER => return done(),
            0 if kind == FaultKind::Persistent => {}
            0 => self.left.store(NEVER, Ordering::Relaxed),
            more => {
                self.left.store(more - 1, Ordering::Relaxed);
                return done();
            }
        }
        self.has_fired.store(true, Ordering::Relaxed);
        if kind == FaultKind::Late {
            done()?;
        }
        let error = DeviceError::new(DeviceErrorKind::Driver, operation);
        Err(error.with_detail("injected failure"))
    }
}

impl<B: Device> FaultInjector<B> {
    /// Wraps a device; no fault is armed yet.
    pub fn new(inner: B) -> Self {
        let (left, kind) = (AtomicU64::new(NEVER), AtomicU8::new(0));
        let fault = Fault { left, kind, has_fired: AtomicBool::new(false) };
        Self { inner, fault: Arc::new(fault) }
    }

    /// Arms a fault that lets `more` operations succeed first.
    pub fn fail(&self, more: u64, kind: FaultKind) {
        self.fault.left.store(more, Ordering::Relaxed);
        self.fault.kind.store(kind as u8, Ordering::Relaxed);
    }

    /// Disarms the fault; returns whether it fired since the last call.
    pub fn clear(&self) -> bool {
        self.fault.left.store(NEVER, Ordering::Relaxed);
        self.fault.has_fired.swap(false, Ordering::Relaxed)
    }
}

impl<B: Clone> Clone for FaultInjector<B> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), fault: Arc::clone(&self.fault) }
    }
}

impl<B: Device> Backend for FaultInjector<B> {
    type Buffer = B::Buffer;
    type Queue = FaultyQueue<B::Queue>;
    type HostPool = FaultyHostPool<B::HostPool>;

    fn name(&self) -> &'static str {
        self.inner.name()
    }
    fn capabilities(&self) -> &Capabilities {
        self.inner.capabilities()
    }
    fn reserve_planes(&self, bytes: u64) -> Result<Reserved, DeviceError> {
        self.fault.run("reserve planes", || self.inner.reserve_planes(bytes))
    }
    fn alloc(&self, bytes: u64) -> Result<B::Buffer, DeviceError> {
        self.fault.run("alloc", || self.inner.alloc(bytes))
    }
    fn queue(&self) -> Result<Self::Queue, DeviceError> {
        Ok(FaultyQueue { inner: self.inner.queue()?, fault: Arc::clone(&self.fault) })
    }
    fn host_pool(
        &self,
        storage: StorageView<'_, B::Buffer>,
        shape: ChunkShape,
        chunks: u32,
    ) -> Result<Self::HostPool, DeviceError> {
        let inner = self.inner.host_pool(storage, shape, chunks)?;
        Ok(FaultyHostPool { inner, fault: Arc::clone(&self.fault) })
    }
}

/// The command queue of a [`FaultInjector`].
#[derive(Debug)]
pub struct FaultyQueue<Q> {
    inner: Q,
    fault: Arc<Fault>,
}

impl<Q: Queue> Queue for FaultyQueue<Q> {
    type Buffer = Q::Buffer;
    type Fence = FaultyFence<Q::Fence>;
    type Readback = FaultyReadback<Q::Readback>;

    fn upload(&mut self, dst: &Q::Buffer, at: u64, src: &[u8]) -> Result<(), DeviceError> {
        self.fault.run("upload", || self.inner.upload(dst, at, src))
    }
    fn download(
        &mut self,
        src: &Q::Buffer,
        at: u64,
        bytes: u64,
    ) -> Result<Self::Readback, DeviceError> {
        let inner = self.fault.run("download", || self.inner.download(src, at, bytes))?;
        Ok(FaultyReadback { inner, fault: Arc::clone(&self.fault) })
    }
    fn zero(&mut self, dst: &Q::Buffer, offset: u64, bytes: u64) -> Result<(), DeviceError> {
        self.fault.run("zero", || self.inner.zero(dst, offset, bytes))
    }
    fn prepare(
        &mut self,
        group: GroupId,
        write: &WritePlan<'_>,
        attend: &AttentionPlan<'_>,
    ) -> Result<(), DeviceError> {
        self.fault.run("prepare", || self.inner.prepare(group, write, attend))
    }
    fn write_kv(
        &mut self,
        plan: &WritePlan<'_>,
        args: WriteArgs<'_, Q::Buffer>,
    ) -> Result<(), DeviceError> {
        self.fault.run("write_kv", || self.inner.write_kv(plan, args))
    }
    fn attend(
        &mut self,
        plan: &AttentionPlan<'_>,
        args: AttendArgs<'_, Q::Buffer>,
    ) -> Result<(), DeviceError> {
        self.fault.run("attend", || self.inner.attend(plan, args))
    }
    fn copy_blocks(
        &mut self,
        plan: &CopyPlan<'_>,
        args: CopyArgs<'_, Q::Buffer>,
    ) -> Result<(), DeviceError> {
        self.fault.run("copy_blocks", || self.inner.copy_blocks(plan, args))
    }
    fn gather(
        &mut self,
        plan: &GatherPlan<'_>,
        args: GatherArgs<'_, Q::Buffer>,
    ) -> Result<(), DeviceError> {
        self.fault.run("gather", || self.inner.gather(plan, args))
    }
    fn convert(
        &mut self,
        plan: &ConvertPlan,
        args: ConvertArgs<'_, Q::Buffer>,
    ) -> Result<(), DeviceError> {
        self.fault.run("convert", || self.inner.convert(plan, args))
    }
    fn flush(&mut self) -> Result<(), DeviceError> {
        self.fault.run("flush", || self.inner.flush())
    }
    fn submit(&mut self) -> Result<Self::Fence, DeviceError> {
        let inner = self.fault.run("submit", || self.inner.submit())?;
        Ok(FaultyFence { inner, fault: Arc::clone(&self.fault) })
    }
    fn wait_for(&mut self, fence: &Self::Fence) -> Result<(), DeviceError> {
        self.inner.wait_for(&fence.inner)
    }
}

/// The host memory of a [`FaultInjector`]: copies fail as a whole, before or after they are
/// recorded.
#[derive(Debug)]
pub struct FaultyHostPool<P> {
    inner: P,
    fault: Arc<Fault>,
}

impl<P: HostPool> HostPool for FaultyHostPool<P> {
    type Buffer = P::Buffer;
    type Fence = FaultyFence<P::Fence>;
    type Chunk = P::Chunk;
    type Pending = P::Pending;

    fn layout(&self) -> &ChunkLayout {
        self.inner.layout()
    }
    fn take(&mut self) -> Option<P::Chunk> {
        self.inner.take()
    }
    fn copy_out(
        &mut self,
        after: &Self::Fence,
        storage: StorageView<'_, P::Buffer>,
        blocks: &[BlockId],
        chunk: P::Chunk,
        first: u32,
    ) -> Result<P::Pending, DeviceError> {
        let (inner, after) = (&mut self.inner, &after.inner);
        self.fault.run("copy out", || inner.copy_out(after, storage, blocks, chunk, first))
    }
    fn copy_in(
        &mut self,
        after: &Self::Fence,
        storage: StorageView<'_, P::Buffer>,
        blocks: &[BlockId],
        chunk: &P::Chunk,
        first: u32,
    ) -> Result<Self::Fence, DeviceError> {
        let (inner, after) = (&mut self.inner, &after.inner);
        let copied =
            self.fault.run("copy in", || inner.copy_in(after, storage, blocks, chunk, first))?;
        Ok(FaultyFence { inner: copied, fault: Arc::clone(&self.fault) })
    }
    fn fence(&mut self) -> Result<Self::Fence, DeviceError> {
        let inner = &mut self.inner;
        let inner = self.fault.run("fence of copies", || inner.fence())?;
        Ok(FaultyFence { inner, fault: Arc::clone(&self.fault) })
    }
}

/// A fence whose wait may fail.
#[derive(Debug, Clone)]
pub struct FaultyFence<F> {
    inner: F,
    fault: Arc<Fault>,
}

impl<F: Fence> Fence for FaultyFence<F> {
    fn poll(&self, cx: &mut Context<'_>) -> Poll<Result<(), DeviceError>> {
        self.inner.poll(cx)
    }
    fn wait(&self) -> Result<(), DeviceError> {
        self.fault.run("wait", || self.inner.wait())
    }
}

/// Bytes that may fail to arrive.
#[derive(Debug)]
pub struct FaultyReadback<R> {
    inner: R,
    fault: Arc<Fault>,
}

impl<R: Readback> Readback for FaultyReadback<R> {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Vec<u8>, DeviceError>> {
        self.inner.poll(cx)
    }
    fn wait(self) -> Result<Vec<u8>, DeviceError> {
        self.fault.run("read back", || self.inner.wait())
    }
}
