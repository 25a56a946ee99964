//! The host pool: chunks of blocks in page-locked memory, copied on a stream of the pool's own.
//!
//! Owns the order of copies: the copies of a call are one batch after the event that they wait for.
//! [`memory`] owns the bytes. Neither knows why a block moves, or which sequence has it.
mod memory;
#[cfg(test)]
#[cfg(feature = "emulated")]
mod tests;

use std::sync::Arc;
use std::task::{Context, Poll};

use kv_core::BlockId;
use kv_core::backend::{ChunkLayout, ChunkShape, Fence, HostPool, PendingChunk, StorageView};
use kv_core::error::{DeviceError, DeviceErrorKind};
use kv_core::invariant::Invariant;
use kv_core::num::to_usize;

pub use memory::CudaChunk;
use memory::{ChunkMemory, Copies};

use crate::buffer::{CudaBuffer, Place};
use crate::fence::CudaFence;
use crate::gpu::{Gpu, HostCopy, Stream};
use crate::params::Address;
use crate::tensors::unsupported;
use crate::waiter::Waiter;

const COPY_OUT: &str = "copy blocks to host memory";
const COPY_IN: &str = "copy blocks from host memory";

/// Chunks in page-locked host memory for blocks of one group, and the stream that copies them.
///
/// [`Backend::host_pool`](kv_core::backend::Backend::host_pool) of a
/// [`CudaBackend`](crate::CudaBackend) makes one, for one storage: another with equal planes is
/// refused with `Unsupported`.
///
/// # Guarantees
/// Calls on one pool take effect in order, so a chunk may be copied in, and blocks out to it again,
/// without a wait in between. The memory is freed when the pool and all chunks are dropped; the
/// last drop waits for pending copies, and thus for what they wait for.
///
/// # Source
/// `swap_out`, `swap_in` and the swap space of vLLM.
///
/// # Examples
///
/// ```no_run
/// use std::sync::Arc;
///
/// use kv::backend::{Backend, ChunkShape, HostPool, PendingChunk, Queue};
/// use kv::{BlockId, CacheSpec, GroupId, KvCache};
/// use kv::cuda::{CudaBackend, CudaOptions};
///
/// let device = Arc::new(CudaBackend::open(&CudaOptions::default())?);
/// let spec = CacheSpec::builder().layers(2).kv_heads(8).head_dim(128).paged(16, 1024).build()?;
/// let mut cache = KvCache::new(Arc::clone(&device), spec)?;
/// for layer in 0..2 {
///     cache.allocate_layer(layer)?;
/// }
/// let Some(storage) = cache.storage(GroupId(0)) else { return Ok(()) };
/// let shape = ChunkShape { blocks: 4, header_bytes: 0 };
/// let mut pool = device.host_pool(storage.view(), shape, 256)?;
///
/// // Blocks 7 and 3 are copied out, after everything the cache has recorded.
/// let written = cache.queue_mut().submit()?;
/// let Some(storage) = cache.storage(GroupId(0)) else { return Ok(()) };
/// let Some(chunk) = pool.take() else { return Ok(()) };
/// let pending = pool.copy_out(&written, storage.view(), &[BlockId(7), BlockId(3)], chunk, 0)?;
/// // Once the chunk has arrived, the blocks may be overwritten.
/// let chunk = pending.wait()?;
///
/// // They are copied in to other blocks.
/// let free = cache.queue_mut().submit()?;
/// let Some(storage) = cache.storage(GroupId(0)) else { return Ok(()) };
/// let copied = pool.copy_in(&free, storage.view(), &[BlockId(40), BlockId(41)], &chunk, 0)?;
/// cache.queue_mut().wait_for(&copied)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct CudaHostPool {
    gpu: Arc<dyn Gpu>,
    waiter: Arc<Waiter>,
    stream: Box<dyn Stream>,
    layout: ChunkLayout,
    /// Addresses of the segments of every plane, plane by plane.
    segments: Vec<Address>,
    memory: Arc<ChunkMemory>,
}

/// A chunk of a [`CudaHostPool`] that blocks are being copied to.
#[derive(Debug)]
pub struct CudaPendingChunk {
    fence: CudaFence,
    /// `None` once it was returned.
    chunk: Option<CudaChunk>,
}

impl CudaHostPool {
    /// Allocates the chunks and opens the stream.
    pub(crate) fn new(
        gpu: &Arc<dyn Gpu>,
        waiter: &Arc<Waiter>,
        storage: StorageView<'_, CudaBuffer>,
        shape: ChunkShape,
        chunks: u32,
    ) -> Result<Self, DeviceError> {
        let layout = ChunkLayout::of(storage, shape)?;
        Ok(Self {
            gpu: Arc::clone(gpu),
            waiter: Arc::clone(waiter),
            segments: segments(gpu, storage, "make a host pool")?,
            memory: Arc::new(ChunkMemory::new(gpu, layout.bytes(), chunks)?),
            stream: gpu.stream()?,
            layout,
        })
    }

    /// Refuses a chunk of another pool, and storage or places that this pool does not have.
    fn check(
        &self,
        storage: StorageView<'_, CudaBuffer>,
        (blocks, first): (&[BlockId], u32),
        chunk: &CudaChunk,
        operation: &'static str,
    ) -> Result<(), DeviceError> {
        if !chunk.is_of(&self.memory) {
            return Err(DeviceError::new(DeviceErrorKind::ForeignHandle, operation));
        }
        if segments(&self.gpu, storage, operation)? != self.segments {
            let why = "the planes are not those that the host pool was made for";
            return Err(unsupported(operation, why));
        }
        self.layout.check(storage, (blocks, first), operation)
    }

    /// Returns the copies of a call, after all checks.
    fn copies(
        &self,
        storage: StorageView<'_, CudaBuffer>,
        (blocks, first): (&[BlockId], u32),
        chunk: &CudaChunk,
        operation: &'static str,
    ) -> Result<Vec<HostCopy>, DeviceError> {
        self.check(storage, (blocks, first), chunk, operation)?;
        let mut copies = Vec::new();
        let mut segments = self.segments.as_slice();
        for layer in 0..self.layout.num_layers() {
            for (role, layout) in self.layout.planes().as_slice() {
                let (own, others) = segments.split_at(to_usize(layout.num_segments()));
                segments = others;
                for (block, place) in blocks.iter().zip(first..) {
                    let (segment, offset) = layout.locate(block.0);
                    let segment = own.get(segment).invariant("the block was checked");
                    let device = segment + offset;
                    let piece = self.layout.piece(place, layer, *role);
                    let host = chunk.at(piece.start);
                    copies.push(HostCopy { host, device, bytes: piece.len() });
                }
            }
        }
        Ok(copies)
    }

    /// Submits copies of a chunk with `submit`, and an event after them, which the chunk gets.
    fn submit(
        &mut self,
        chunk: &CudaChunk,
        submit: impl FnOnce(&mut dyn Stream) -> Result<(), DeviceError>,
    ) -> Result<CudaFence, DeviceError> {
        // Replaced below, unless the event cannot be recorded.
        chunk.set_copies(Copies::Unmarked);
        let submitted = submit(self.stream.as_mut());
        // A batch that failed may have begun: the event must follow this part of it too.
        let fence = CudaFence::record(&self.gpu, &self.waiter, self.stream.as_mut());
        if let Ok(fence) = &fence {
            chunk.set_copies(Copies::Until(Arc::clone(fence.event())));
        }
        submitted.and(fence)
    }
}

impl HostPool for CudaHostPool {
    type Buffer = CudaBuffer;
    type Fence = CudaFence;
    type Chunk = CudaChunk;
    type Pending = CudaPendingChunk;

    fn layout(&self) -> &ChunkLayout {
        &self.layout
    }

    fn take(&mut self) -> Option<CudaChunk> {
        ChunkMemory::take(&self.memory)
    }

    fn copy_out(
        &mut self,
        after: &CudaFence,
        storage: StorageView<'_, CudaBuffer>,
        blocks: &[BlockId],
        chunk: CudaChunk,
        first: u32,
    ) -> Result<CudaPendingChunk, DeviceError> {
        let event = after.event_on(&self.gpu, COPY_OUT)?;
        let copies = self.copies(storage, (blocks, first), &chunk, COPY_OUT)?;
        self.stream.wait_for(event)?;
        // SAFETY: `copies` took addresses from planes of this device that reach to their last
        // block, and host pieces of a chunk of this pool, which do not overlap. `ChunkMemory` keeps
        // them until the event that `submit` records; nothing reads or writes them before it,
        // because the pending chunk has the chunk.
        let download = |stream: &mut dyn Stream| unsafe { stream.download_batch(&copies) };
        let fence = self.submit(&chunk, download)?;
        Ok(CudaPendingChunk { fence, chunk: Some(chunk) })
    }

    fn copy_in(
        &mut self,
        after: &CudaFence,
        storage: StorageView<'_, CudaBuffer>,
        blocks: &[BlockId],
        chunk: &CudaChunk,
        first: u32,
    ) -> Result<CudaFence, DeviceError> {
        let event = after.event_on(&self.gpu, COPY_IN)?;
        let copies = self.copies(storage, (blocks, first), chunk, COPY_IN)?;
        ChunkLayout::check_distinct(blocks, COPY_IN)?;
        self.stream.wait_for(event)?;
        // SAFETY: `copies` took addresses from planes of this device that reach to their last
        // block, and host pieces of a chunk of this pool. `ChunkMemory` keeps them until the event
        // that `submit` records. Before it, `CudaChunk::as_mut` waits and `ChunkMemory::take`
        // does not hand them out; later copies to them are on this stream, in order.
        let upload = |stream: &mut dyn Stream| unsafe { stream.upload_batch(&copies) };
        self.submit(chunk, upload)
    }

    fn fence(&mut self) -> Result<CudaFence, DeviceError> {
        CudaFence::record(&self.gpu, &self.waiter, self.stream.as_mut())
    }
}

impl PendingChunk for CudaPendingChunk {
    type Chunk = CudaChunk;

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<CudaChunk, DeviceError>> {
        self.fence
            .poll(cx)
            .map_ok(|()| self.chunk.take().invariant("a pending chunk is returned once"))
    }

    fn wait(self) -> Result<CudaChunk, DeviceError> {
        self.fence.wait()?;
        Ok(self.chunk.invariant("a pending chunk is returned once"))
    }
}

/// Returns the addresses of the segments of every plane, of a storage that must be of `gpu`.
fn segments(
    gpu: &Arc<dyn Gpu>,
    storage: StorageView<'_, CudaBuffer>,
    operation: &'static str,
) -> Result<Vec<Address>, DeviceError> {
    let (mut addresses, place) = (Vec::new(), Place { gpu, stream: None });
    for view in storage.planes() {
        for index in 0..view.layout().num_segments() {
            let buffer = view.segment(to_usize(index));
            let buffer = buffer.invariant("allocated planes have all segments");
            addresses.push(buffer.on(place, (0, view.layout().segment_bytes(index)), operation)?);
        }
    }
    Ok(addresses)
}
