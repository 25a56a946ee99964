//! A device that fails on demand: what a cache does then must not be seen afterwards.
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::task::{Context, Poll};

use kv_core::backend::{Backend, Capabilities, Fence, Queue, Readback};
use kv_core::plan::{
    AttendArgs, AttentionPlan, ConvertArgs, ConvertPlan, CopyArgs, CopyPlan, GatherArgs,
    GatherPlan, WriteArgs, WritePlan,
};
use kv_core::{DeviceError, DeviceErrorKind, GroupId};

use crate::device::Device;

/// Another device, of which one operation fails, or all from one on.
#[derive(Debug)]
pub(crate) struct Erratic<B> {
    inner: B,
    fault: Arc<Fault>,
}

/// How an operation fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Failing {
    /// Before its work is done, once.
    Early,
    /// When its work is done, once.
    Late,
    /// It and every further one, until the device is [calm](Erratic::calm) again.
    Lasting,
}

impl Failing {
    pub(crate) const ALL: [Self; 3] = [Self::Early, Self::Late, Self::Lasting];
}

/// When to fail.
#[derive(Debug)]
struct Fault {
    /// Operations that still succeed.
    left: AtomicU64,
    /// Index in [`Failing::ALL`].
    failing: AtomicU8,
    has_fired: AtomicBool,
}

/// Operations until a failure that never comes.
const NEVER: u64 = u64::MAX;

impl Fault {
    /// Runs an operation, or fails.
    fn run<T>(
        &self,
        operation: &'static str,
        done: impl FnOnce() -> Result<T, DeviceError>,
    ) -> Result<T, DeviceError> {
        let failing = Failing::ALL[usize::from(self.failing.load(Ordering::Relaxed))];
        match self.left.load(Ordering::Relaxed) {
            NEVER => return done(),
            0 if failing == Failing::Lasting => {}
            0 => self.left.store(NEVER, Ordering::Relaxed),
            more => {
                self.left.store(more - 1, Ordering::Relaxed);
                return done();
            }
        }
        self.has_fired.store(true, Ordering::Relaxed);
        if failing == Failing::Late {
            done()?;
        }
        let error = DeviceError::new(DeviceErrorKind::Driver, operation);
        Err(error.with_detail("failure of an erratic device"))
    }
}

impl<B: Device> Erratic<B> {
    /// A device that does not fail yet.
    pub(crate) fn new(inner: B) -> Self {
        let (left, failing) = (AtomicU64::new(NEVER), AtomicU8::new(0));
        let fault = Fault { left, failing, has_fired: AtomicBool::new(false) };
        Self { inner, fault: Arc::new(fault) }
    }

    /// Fails the operation behind the next `more`.
    pub(crate) fn fail(&self, more: u64, failing: Failing) {
        self.fault.left.store(more, Ordering::Relaxed);
        self.fault.failing.store(failing as u8, Ordering::Relaxed);
    }

    /// Fails no more; whether it did since it was asked last.
    pub(crate) fn calm(&self) -> bool {
        self.fault.left.store(NEVER, Ordering::Relaxed);
        self.fault.has_fired.swap(false, Ordering::Relaxed)
    }
}

impl<B: Clone> Clone for Erratic<B> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), fault: Arc::clone(&self.fault) }
    }
}

impl<B: Device> Backend for Erratic<B> {
    type Buffer = B::Buffer;
    type Queue = ErraticQueue<B::Queue>;

    fn name(&self) -> &'static str {
        self.inner.name()
    }
    fn capabilities(&self) -> &Capabilities {
        self.inner.capabilities()
    }
    fn alloc(&self, bytes: u64) -> Result<B::Buffer, DeviceError> {
        self.fault.run("alloc", || self.inner.alloc(bytes))
    }
    fn queue(&self) -> Result<Self::Queue, DeviceError> {
        Ok(ErraticQueue { inner: self.inner.queue()?, fault: Arc::clone(&self.fault) })
    }
}

/// A lane of an erratic device.
#[derive(Debug)]
pub(crate) struct ErraticQueue<Q> {
    inner: Q,
    fault: Arc<Fault>,
}

impl<Q: Queue> Queue for ErraticQueue<Q> {
    type Buffer = Q::Buffer;
    type Fence = ErraticFence<Q::Fence>;
    type Readback = ErraticReadback<Q::Readback>;

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
        Ok(ErraticReadback { inner, fault: Arc::clone(&self.fault) })
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
        Ok(ErraticFence { inner, fault: Arc::clone(&self.fault) })
    }
    fn wait_for(&mut self, fence: &Self::Fence) -> Result<(), DeviceError> {
        self.inner.wait_for(&fence.inner)
    }
}

/// A fence whose wait may fail.
#[derive(Debug, Clone)]
pub(crate) struct ErraticFence<F> {
    inner: F,
    fault: Arc<Fault>,
}

impl<F: Fence> Fence for ErraticFence<F> {
    fn poll(&self, cx: &mut Context<'_>) -> Poll<Result<(), DeviceError>> {
        self.inner.poll(cx)
    }
    fn wait(&self) -> Result<(), DeviceError> {
        self.fault.run("wait", || self.inner.wait())
    }
}

/// Bytes that may fail to arrive.
#[derive(Debug)]
pub(crate) struct ErraticReadback<R> {
    inner: R,
    fault: Arc<Fault>,
}

impl<R: Readback> Readback for ErraticReadback<R> {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Vec<u8>, DeviceError>> {
        self.inner.poll(cx)
    }
    fn wait(self) -> Result<Vec<u8>, DeviceError> {
        self.fault.run("read back", || self.inner.wait())
    }
}
