//! Drives any backend alike: shares one opened device, stages inputs, fetches outputs.
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use kv_core::backend::{
    AnyBackend, Backend, Capabilities, ChunkShape, Fence, PendingChunk, Queue, Readback, Reserved,
    StorageView,
};
use kv_core::error::DeviceError;
use kv_core::{TensorView, TensorViewMut};

use crate::tokens::{Tensor, TokenLayout};

/// A backend whose handle can be cloned, so that several caches of a case use one device.
pub trait Device: Backend + Clone {}
impl<B: Backend + Clone> Device for B {}

/// One opened device with several owners, and a table of capabilities of its own.
#[derive(Debug)]
pub struct Shared<B> {
    inner: Arc<B>,
    capabilities: Capabilities,
}

impl<B> Clone for Shared<B> {
    fn clone(&self) -> Self {
        Self { inner: Arc::clone(&self.inner), capabilities: self.capabilities.clone() }
    }
}

impl<B: Backend> Shared<B> {
    /// Wraps an opened device.
    pub fn new(backend: B) -> Self {
        let capabilities = backend.capabilities().clone();
        Self { inner: Arc::new(backend), capabilities }
    }
}

impl<B: Backend> Backend for Shared<B> {
    type Buffer = B::Buffer;
    type Queue = B::Queue;
    type HostPool = B::HostPool;
    fn name(&self) -> &'static str {
        self.inner.name()
    }
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }
    fn reserve_planes(&self, bytes: u64) -> Result<Reserved, DeviceError> {
        self.inner.reserve_planes(bytes)
    }
    fn alloc(&self, bytes: u64) -> Result<B::Buffer, DeviceError> {
        self.inner.alloc(bytes)
    }
    fn queue(&self) -> Result<B::Queue, DeviceError> {
        self.inner.queue()
    }
    fn host_pool(
        &self,
        storage: StorageView<'_, B::Buffer>,
        shape: ChunkShape,
        chunks: u32,
    ) -> Result<B::HostPool, DeviceError> {
        self.inner.host_pool(storage, shape, chunks)
    }
}

/// Returns the same device with other capabilities: more segments, other splits.
pub fn limited<B: Device>(
    backend: &B,
    limit: impl FnOnce(Capabilities) -> Capabilities,
) -> Shared<B> {
    let capabilities = limit(backend.capabilities().clone());
    Shared { inner: Arc::new(backend.clone()), capabilities }
}

/// Erases the type of [`limited`] again, so that a case runs the code that other cases run.
pub(crate) fn limited_erased(
    backend: &AnyBackend,
    limit: impl FnOnce(Capabilities) -> Capabilities,
) -> AnyBackend {
    AnyBackend::new(limited(backend, limit))
}

/// Returns a `head_dim` that the device supports: the wanted one, or the next larger one.
pub(crate) fn dim<B: Backend>(backend: &B, wanted: u32) -> u32 {
    wanted.next_multiple_of(backend.capabilities().head_dim_multiple)
}

/// Waits for a fence, polling where a thread may not block.
pub(crate) fn wait<F: Fence>(capabilities: &Capabilities, fence: &F) -> Result<(), DeviceError> {
    if capabilities.blocking_wait {
        return fence.wait();
    }
    let mut cx = Context::from_waker(Waker::noop());
    loop {
        if let Poll::Ready(done) = fence.poll(&mut cx) {
            return done;
        }
        std::thread::yield_now();
    }
}

/// Waits for a chunk, polling where a thread may not block.
pub(crate) fn arrive<P: PendingChunk>(
    capabilities: &Capabilities,
    mut pending: P,
) -> Result<P::Chunk, DeviceError> {
    if capabilities.blocking_wait {
        return pending.wait();
    }
    let mut cx = Context::from_waker(Waker::noop());
    loop {
        if let Poll::Ready(chunk) = pending.poll(&mut cx) {
            return chunk;
        }
        std::thread::yield_now();
    }
}

/// Downloads a range and waits for it.
pub(crate) fn fetch<Q: Queue>(
    capabilities: &Capabilities,
    queue: &mut Q,
    buffer: &Q::Buffer,
    (offset, bytes): (u64, u64),
) -> Result<Vec<u8>, DeviceError> {
    let mut readback = queue.download(buffer, offset, bytes)?;
    queue.submit()?;
    if capabilities.blocking_wait {
        return readback.wait();
    }
    let mut cx = Context::from_waker(Waker::noop());
    loop {
        if let Poll::Ready(done) = readback.poll(&mut cx) {
            return done;
        }
        std::thread::yield_now();
    }
}

/// The memory of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// Host memory.
    Host,
    /// A buffer of the device, at an offset.
    Device,
}

/// Bytes before a tensor in its buffer, so that a forgotten offset shows.
const OFFSET: u64 = 64;

/// A tensor of token rows in host or device memory, ready for a call.
#[derive(Debug)]
pub(crate) struct Staged<Buf> {
    pub(crate) layout: TokenLayout,
    tensor: Tensor,
    buffer: Option<Buf>,
}

impl<Buf> Staged<Buf> {
    /// Copies a tensor to its place.
    pub(crate) fn new<B: Backend<Buffer = Buf>>(
        backend: &B,
        queue: &mut B::Queue,
        (layout, tensor): (TokenLayout, Tensor),
        place: Place,
    ) -> Result<Self, DeviceError> {
        let mut buffer = None;
        if place == Place::Device {
            let bytes = tensor.bytes().len() as u64;
            let made = backend.alloc(OFFSET + bytes)?;
            queue.upload(&made, OFFSET, tensor.bytes())?;
            buffer = Some(made);
        }
        Ok(Self { layout, tensor, buffer })
    }

    /// Creates an output that is full of NaN.
    pub(crate) fn output<B: Backend<Buffer = Buf>>(
        backend: &B,
        queue: &mut B::Queue,
        (layout, dtype): (TokenLayout, kv_core::DType),
        place: Place,
    ) -> Result<Self, DeviceError> {
        let tensor = Tensor::filled(dtype, layout.num_elements(), f32::NAN);
        Self::new(backend, queue, (layout, tensor), place)
    }

    pub(crate) fn view(&self) -> TensorView<'_, Buf> {
        let (dtype, dims) = (self.tensor.dtype(), self.layout.dims());
        let view = match &self.buffer {
            Some(buffer) => TensorView::device(dtype, buffer, OFFSET, &dims),
            None => TensorView::host_bytes(dtype, self.tensor.bytes(), &dims),
        };
        match self.layout.strides() {
            Some(strides) => view.with_outer_strides(strides),
            None => view,
        }
    }

    pub(crate) fn view_mut(&mut self) -> TensorViewMut<'_, Buf> {
        let dims = self.layout.dims();
        self.view_mut_as(&dims)
    }

    /// Returns the view of a log-sum-exp, which has no dim axis.
    pub(crate) fn lse_mut(&mut self) -> TensorViewMut<'_, Buf> {
        let mut dims = self.layout.dims();
        dims.pop();
        self.view_mut_as(&dims)
    }

    fn view_mut_as(&mut self, dims: &[u32]) -> TensorViewMut<'_, Buf> {
        let (dtype, strides) = (self.tensor.dtype(), self.layout.strides());
        let view = match &self.buffer {
            Some(buffer) => TensorViewMut::device(dtype, buffer, OFFSET, dims),
            None => TensorViewMut::host_bytes(dtype, self.tensor.bytes_mut(), dims),
        };
        match strides {
            Some(strides) => view.with_outer_strides(strides),
            None => view,
        }
    }

    /// Downloads an output.
    pub(crate) fn read<Q: Queue<Buffer = Buf>>(
        &mut self,
        capabilities: &Capabilities,
        queue: &mut Q,
    ) -> Result<&Tensor, DeviceError> {
        if let Some(buffer) = &self.buffer {
            let range = (OFFSET, self.tensor.bytes().len() as u64);
            let bytes = fetch(capabilities, queue, buffer, range)?;
            self.tensor = Tensor::from_bytes(self.tensor.dtype(), &bytes);
        }
        Ok(&self.tensor)
    }
}
