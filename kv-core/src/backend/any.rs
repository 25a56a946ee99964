//! Type erasure: choose a backend at run time and use the generic API.
mod host_pool;

use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::task::{Context, Poll};

pub use host_pool::{AnyChunk, AnyHostPool, AnyPendingChunk};

use super::{Backend, Capabilities, ChunkShape, Fence, Queue, Readback, Reserved};
use crate::error::{DeviceError, DeviceErrorKind};
use crate::ids::GroupId;
use crate::invariant::Invariant;
use crate::plan::AttendParts;
use crate::plan::{
    AttendArgs, AttentionPlan, ConvertArgs, ConvertEnds, ConvertPlan, CopyArgs, CopyPlan,
    GatherArgs, GatherPlan, WriteArgs, WritePlan,
};
use crate::storage::{AnyBuffer, PlaneView, StorageView};
use crate::tensor::{TokenTensor, TokenTensorMut};

/// What an [`AnyBackend`] holds: a backend whose types are erased.
trait DynBackend: Any + Backend<Buffer = AnyBuffer, Queue = AnyQueue, HostPool = AnyHostPool> {}
impl<B: Backend> DynBackend for Erased<B> {}

type DynQueue = dyn Queue<Buffer = AnyBuffer, Fence = AnyFence, Readback = AnyReadback>;

type Recorded = Result<(), DeviceError>;

trait DynFence: Any + fmt::Debug + Send + Sync {
    fn poll(&self, cx: &mut Context<'_>) -> Poll<Recorded>;
    fn wait(&self) -> Recorded;
}

trait DynReadback: fmt::Debug + Send {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Vec<u8>, DeviceError>>;
    fn wait(self: Box<Self>) -> Result<Vec<u8>, DeviceError>;
}

/// A backend chosen at run time.
#[derive(Debug, Clone)]
pub struct AnyBackend(Arc<dyn DynBackend>);
/// Command queue of an [`AnyBackend`].
#[derive(Debug)]
pub struct AnyQueue(Box<DynQueue>);
/// Fence of an [`AnyQueue`].
#[derive(Debug, Clone)]
pub struct AnyFence(Arc<dyn DynFence>);
/// Readback of an [`AnyQueue`].
#[derive(Debug)]
pub struct AnyReadback(Box<dyn DynReadback>);

impl AnyBackend {
    /// Erases a concrete backend; an erased one is returned unchanged.
    pub fn new<B: Backend>(backend: B) -> Self {
        let any: &dyn Any = &backend;
        if let Some(erased) = any.downcast_ref::<Self>() {
            return erased.clone();
        }
        Self(Arc::new(Erased(backend)))
    }

    /// Returns the concrete backend, `None` if it has another type.
    pub fn downcast_ref<B: Backend>(&self) -> Option<&B> {
        let any: &dyn Any = &*self.0;
        any.downcast_ref::<Erased<B>>().map(|erased| &erased.0)
    }
}

/// Returns the concrete buffer; refuses one of another backend.
fn cast<'b, T: Any>(buffer: &'b AnyBuffer, operation: &'static str) -> Result<&'b T, DeviceError> {
    buffer.downcast_ref().ok_or_else(|| foreign(operation))
}

impl AnyQueue {
    /// Erases a queue of a concrete backend, such as one that wraps the caller's stream. An erased
    /// one is returned unchanged.
    pub fn new<Q: Queue>(queue: Q) -> Self {
        let mut queue = Some(queue);
        let any: &mut dyn Any = &mut queue;
        if let Some(erased) = any.downcast_mut::<Option<Self>>().and_then(Option::take) {
            return erased;
        }
        Self(Box::new(Erased(queue.invariant("only an erased queue was taken out"))))
    }
}

impl AnyFence {
    /// Erases a fence that a concrete backend returned outside the contract, so that an
    /// [`AnyQueue`] can wait for it.
    pub fn new<F: Fence>(fence: F) -> Self {
        let any: &dyn Any = &fence;
        if let Some(erased) = any.downcast_ref::<Self>() {
            return erased.clone();
        }
        Self(Arc::new(Erased(fence)))
    }
    /// Returns the concrete fence, `None` if it belongs to another backend.
    pub fn downcast_ref<F: Fence>(&self) -> Option<&F> {
        let any: &dyn Any = &*self.0;
        any.downcast_ref::<Erased<F>>().map(|erased| &erased.0)
    }
}

fn foreign(operation: &'static str) -> DeviceError {
    DeviceError::new(DeviceErrorKind::ForeignHandle, operation)
}

type Input<'a, T> = Result<TokenTensor<'a, T>, DeviceError>;
type Output<'a, T> = Result<TokenTensorMut<'a, T>, DeviceError>;

fn input<'a, T: Any>(tensor: TokenTensor<'a, AnyBuffer>, operation: &'static str) -> Input<'a, T> {
    tensor.try_map(|buffer| cast(buffer, operation))
}
fn output<'a, T: Any>(
    tensor: TokenTensorMut<'a, AnyBuffer>,
    operation: &'static str,
) -> Output<'a, T> {
    tensor.try_map(|buffer| cast(buffer, operation))
}
fn plane<'a, T: Any>(
    view: PlaneView<'a, AnyBuffer>,
    operation: &'static str,
) -> Result<PlaneView<'a, T>, DeviceError> {
    view.downcast().ok_or_else(|| foreign(operation))
}

#[derive(Debug)]
struct Erased<T>(T);

impl<B: Backend> Backend for Erased<B> {
    type Buffer = AnyBuffer;
    type Queue = AnyQueue;
    type HostPool = AnyHostPool;
    fn name(&self) -> &'static str {
        self.0.name()
    }
    fn capabilities(&self) -> &Capabilities {
        self.0.capabilities()
    }
    fn reserve_planes(&self, bytes: u64) -> Result<Reserved, DeviceError> {
        self.0.reserve_planes(bytes)
    }
    fn alloc(&self, bytes: u64) -> Result<AnyBuffer, DeviceError> {
        Ok(AnyBuffer::new(self.0.alloc(bytes)?))
    }
    fn queue(&self) -> Result<AnyQueue, DeviceError> {
        Ok(AnyQueue(Box::new(Erased(self.0.queue()?))))
    }
    fn host_pool(
        &self,
        storage: StorageView<'_, AnyBuffer>,
        shape: ChunkShape,
        chunks: u32,
    ) -> Result<AnyHostPool, DeviceError> {
        let storage = storage.downcast().ok_or_else(|| foreign("reserve host memory"))?;
        Ok(AnyHostPool(Box::new(Erased(self.0.host_pool(storage, shape, chunks)?))))
    }
}

impl<Q: Queue> Queue for Erased<Q> {
    type Buffer = AnyBuffer;
    type Fence = AnyFence;
    type Readback = AnyReadback;
    fn upload(&mut self, dst: &AnyBuffer, at: u64, src: &[u8]) -> Recorded {
        self.0.upload(cast(dst, "upload")?, at, src)
    }
    fn download(&mut self, src: &AnyBuffer, at: u64, n: u64) -> Result<AnyReadback, DeviceError> {
        let readback = self.0.download(cast(src, "download")?, at, n)?;
        Ok(AnyReadback(Box::new(Erased(readback))))
    }
    fn zero(&mut self, dst: &AnyBuffer, at: u64, bytes: u64) -> Recorded {
        self.0.zero(cast(dst, "zero")?, at, bytes)
    }
    fn prepare(
        &mut self,
        group: GroupId,
        write: &WritePlan<'_>,
        attend: &AttentionPlan<'_>,
    ) -> Recorded {
        self.0.prepare(group, write, attend)
    }
    fn write_kv(&mut self, plan: &WritePlan<'_>, args: WriteArgs<'_, AnyBuffer>) -> Recorded {
        let ([k, v], [k_plane, v_plane]) = args.into_parts();
        let tensors = [input(k, "write_kv k")?, input(v, "write_kv v")?];
        let planes = [plane(k_plane, "write_kv k plane")?, plane(v_plane, "write_kv v plane")?];
        self.0.write_kv(plan, WriteArgs::from_parts(tensors, planes))
    }
    fn attend(&mut self, plan: &AttentionPlan<'_>, args: AttendArgs<'_, AnyBuffer>) -> Recorded {
        let AttendParts { q, outputs: (out, lse), planes: [k, v], options } = args.into_parts();
        let parts = AttendParts {
            q: input(q, "attend q")?,
            outputs: (
                output(out, "attend out")?,
                lse.map(|lse| output(lse, "attend lse")).transpose()?,
            ),
            planes: [plane(k, "attend k plane")?, plane(v, "attend v plane")?],
            options,
        };
        self.0.attend(plan, AttendArgs::from_parts(parts))
    }
    fn copy_blocks(&mut self, plan: &CopyPlan<'_>, args: CopyArgs<'_, AnyBuffer>) -> Recorded {
        let storage = args.storage().downcast().ok_or_else(|| foreign("copy_blocks"))?;
        self.0.copy_blocks(plan, CopyArgs::from_parts(storage))
    }
    fn gather(&mut self, plan: &GatherPlan<'_>, args: GatherArgs<'_, AnyBuffer>) -> Recorded {
        let (view, out) = args.into_parts();
        let args = GatherArgs::from_parts(plane(view, "gather plane")?, output(out, "gather out")?);
        self.0.gather(plan, args)
    }
    fn convert(&mut self, plan: &ConvertPlan, args: ConvertArgs<'_, AnyBuffer>) -> Recorded {
        const SRC: &str = "convert src";
        const DST: &str = "convert dst";
        let ends = match args.into_ends() {
            ConvertEnds::Tensors(src, dst) => {
                ConvertEnds::Tensors(input(src, SRC)?, output(dst, DST)?)
            }
            ConvertEnds::Encode(src, dst) => {
                ConvertEnds::Encode(input(src, SRC)?, dst.try_map(|buffer| cast(buffer, DST))?)
            }
            ConvertEnds::Decode(src, dst) => {
                ConvertEnds::Decode(src.try_map(|buffer| cast(buffer, SRC))?, output(dst, DST)?)
            }
        };
        self.0.convert(plan, ConvertArgs::from_ends(ends))
    }
    fn flush(&mut self) -> Recorded {
        self.0.flush()
    }
    fn submit(&mut self) -> Result<AnyFence, DeviceError> {
        Ok(AnyFence(Arc::new(Erased(self.0.submit()?))))
    }
    fn wait_for(&mut self, fence: &AnyFence) -> Recorded {
        self.0.wait_for(fence.downcast_ref().ok_or_else(|| foreign("wait_for"))?)
    }
}

impl<F: Fence> DynFence for Erased<F> {
    fn poll(&self, cx: &mut Context<'_>) -> Poll<Recorded> {
        self.0.poll(cx)
    }
    fn wait(&self) -> Recorded {
        self.0.wait()
    }
}

impl<R: Readback> DynReadback for Erased<R> {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Vec<u8>, DeviceError>> {
        self.0.poll(cx)
    }
    fn wait(self: Box<Self>) -> Result<Vec<u8>, DeviceError> {
        self.0.wait()
    }
}

impl Backend for AnyBackend {
    type Buffer = AnyBuffer;
    type Queue = AnyQueue;
    type HostPool = AnyHostPool;
    fn name(&self) -> &'static str {
        self.0.name()
    }
    fn capabilities(&self) -> &Capabilities {
        self.0.capabilities()
    }
    fn reserve_planes(&self, bytes: u64) -> Result<Reserved, DeviceError> {
        self.0.reserve_planes(bytes)
    }
    fn alloc(&self, bytes: u64) -> Result<AnyBuffer, DeviceError> {
        self.0.alloc(bytes)
    }
    fn queue(&self) -> Result<AnyQueue, DeviceError> {
        self.0.queue()
    }
    fn host_pool(
        &self,
        storage: StorageView<'_, AnyBuffer>,
        shape: ChunkShape,
        chunks: u32,
    ) -> Result<AnyHostPool, DeviceError> {
        self.0.host_pool(storage, shape, chunks)
    }
}

impl Queue for AnyQueue {
    type Buffer = AnyBuffer;
    type Fence = AnyFence;
    type Readback = AnyReadback;
    fn upload(&mut self, dst: &AnyBuffer, at: u64, src: &[u8]) -> Recorded {
        self.0.upload(dst, at, src)
    }
    fn download(&mut self, src: &AnyBuffer, at: u64, n: u64) -> Result<AnyReadback, DeviceError> {
        self.0.download(src, at, n)
    }
    fn zero(&mut self, dst: &AnyBuffer, at: u64, bytes: u64) -> Recorded {
        self.0.zero(dst, at, bytes)
    }
    fn prepare(
        &mut self,
        group: GroupId,
        write: &WritePlan<'_>,
        attend: &AttentionPlan<'_>,
    ) -> Recorded {
        self.0.prepare(group, write, attend)
    }
    fn write_kv(&mut self, plan: &WritePlan<'_>, args: WriteArgs<'_, AnyBuffer>) -> Recorded {
        self.0.write_kv(plan, args)
    }
    fn attend(&mut self, plan: &AttentionPlan<'_>, args: AttendArgs<'_, AnyBuffer>) -> Recorded {
        self.0.attend(plan, args)
    }
    fn copy_blocks(&mut self, plan: &CopyPlan<'_>, args: CopyArgs<'_, AnyBuffer>) -> Recorded {
        self.0.copy_blocks(plan, args)
    }
    fn gather(&mut self, plan: &GatherPlan<'_>, args: GatherArgs<'_, AnyBuffer>) -> Recorded {
        self.0.gather(plan, args)
    }
    fn convert(&mut self, plan: &ConvertPlan, args: ConvertArgs<'_, AnyBuffer>) -> Recorded {
        self.0.convert(plan, args)
    }
    fn flush(&mut self) -> Recorded {
        self.0.flush()
    }
    fn submit(&mut self) -> Result<AnyFence, DeviceError> {
        self.0.submit()
    }
    fn wait_for(&mut self, fence: &AnyFence) -> Recorded {
        self.0.wait_for(fence)
    }
}

impl Fence for AnyFence {
    fn poll(&self, cx: &mut Context<'_>) -> Poll<Recorded> {
        self.0.poll(cx)
    }
    fn wait(&self) -> Recorded {
        self.0.wait()
    }
}

impl Readback for AnyReadback {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Vec<u8>, DeviceError>> {
        self.0.poll(cx)
    }
    fn wait(self) -> Result<Vec<u8>, DeviceError> {
        self.0.wait()
    }
}
