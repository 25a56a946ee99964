//! A device that fails when it is told to: what a cache does then must not be seen afterwards.
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use kv_core::backend::{Backend, Capabilities, Queue};
use kv_core::plan::{
    AttendArgs, AttentionPlan, ConvertArgs, ConvertPlan, CopyArgs, CopyPlan, GatherArgs,
    GatherPlan, WriteArgs, WritePlan,
};
use kv_core::{DeviceError, DeviceErrorKind};

use crate::device::Device;

/// Another device, of which one operation fails, before it is done or afterwards.
#[derive(Debug)]
pub(crate) struct Erratic<B> {
    inner: B,
    fault: Arc<Fault>,
}

/// When to fail.
#[derive(Debug)]
struct Fault {
    /// Operations that still succeed.
    left: AtomicU64,
    is_late: AtomicBool,
    has_fired: AtomicBool,
}

/// Operations until a failure that never comes.
const NEVER: u64 = u64::MAX;

impl Fault {
    /// Runs an operation, or fails.
    fn run(
        &self,
        operation: &'static str,
        done: impl FnOnce() -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        match self.left.load(Ordering::Relaxed) {
            NEVER => return done(),
            0 => self.left.store(NEVER, Ordering::Relaxed),
            more => {
                self.left.store(more - 1, Ordering::Relaxed);
                return done();
            }
        }
        self.has_fired.store(true, Ordering::Relaxed);
        if self.is_late.load(Ordering::Relaxed) {
            done()?;
        }
        let error = DeviceError::new(DeviceErrorKind::Driver, operation);
        Err(error.with_detail("failure of an erratic device"))
    }
}

impl<B: Device> Erratic<B> {
    /// A device that does not fail yet.
    pub(crate) fn new(inner: B) -> Self {
        let (left, off) = (AtomicU64::new(NEVER), AtomicBool::default);
        Self { inner, fault: Arc::new(Fault { left, is_late: off(), has_fired: off() }) }
    }

    /// Fails the operation behind the next `more`, once; if `is_late`, when its work is done.
    pub(crate) fn fail_after(&self, more: u64, is_late: bool) {
        self.fault.left.store(more, Ordering::Relaxed);
        self.fault.is_late.store(is_late, Ordering::Relaxed);
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
        self.inner.alloc(bytes)
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
    type Fence = Q::Fence;
    type Readback = Q::Readback;

    fn upload(&mut self, dst: &Q::Buffer, at: u64, src: &[u8]) -> Result<(), DeviceError> {
        self.fault.run("upload", || self.inner.upload(dst, at, src))
    }
    fn download(
        &mut self,
        src: &Q::Buffer,
        at: u64,
        bytes: u64,
    ) -> Result<Q::Readback, DeviceError> {
        self.inner.download(src, at, bytes)
    }
    fn zero(&mut self, dst: &Q::Buffer, offset: u64, bytes: u64) -> Result<(), DeviceError> {
        self.fault.run("zero", || self.inner.zero(dst, offset, bytes))
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
    fn submit(&mut self) -> Result<Q::Fence, DeviceError> {
        self.inner.submit()
    }
    fn wait_for(&mut self, fence: &Q::Fence) -> Result<(), DeviceError> {
        self.inner.wait_for(fence)
    }
}
