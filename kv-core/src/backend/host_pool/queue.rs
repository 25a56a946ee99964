//! A host pool over the uploads and downloads of a queue.
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use super::{ChunkLayout, HostPool, PendingChunk};
use crate::backend::{Queue, Readback, Reserved};
use crate::error::{DeviceError, DeviceErrorKind};
use crate::ids::BlockId;
use crate::invariant::Invariant;
use crate::num::to_u64;
use crate::storage::StorageView;

/// A host pool for a device that has only a [`Queue`]: blocks are uploaded and downloaded one plane
/// at a time, on a queue of the pool's own.
#[derive(Debug)]
pub struct QueueHostPool<Q> {
    queue: Q,
    layout: ChunkLayout,
    unused: Arc<Unused>,
    #[expect(dead_code, reason = "held for its destructor")]
    reserved: Reserved,
}

/// Memory of chunks that nothing uses.
#[derive(Debug)]
struct Unused(Mutex<UnusedChunks>);

#[derive(Debug)]
struct UnusedChunks {
    /// Memory of chunks that were dropped.
    memory: Vec<Vec<u8>>,
    /// Chunks that never had memory.
    untouched: u32,
}

/// A chunk in ordinary host memory.
pub struct QueueChunk {
    /// [`ChunkLayout::ALIGN`] bytes more than the chunk has.
    memory: Vec<u8>,
    begin: usize,
    bytes: usize,
    unused: Arc<Unused>,
}

impl fmt::Debug for QueueChunk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QueueChunk").field("bytes", &self.bytes).finish_non_exhaustive()
    }
}

impl Unused {
    fn with<T>(&self, act: impl FnOnce(&mut UnusedChunks) -> T) -> T {
        act(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn take(self: &Arc<Self>, bytes: usize) -> Option<QueueChunk> {
        let recycled = self.with(|unused| match unused.memory.pop() {
            None if unused.untouched == 0 => None,
            None => {
                unused.untouched -= 1;
                Some(None)
            }
            recycled => Some(recycled),
        })?;
        // Zeroed memory costs nothing before its first use, and is not counted before it.
        let memory = recycled.unwrap_or_else(|| vec![0; bytes + ChunkLayout::ALIGN]);
        let begin = memory.as_ptr().align_offset(ChunkLayout::ALIGN);
        assert!(begin <= ChunkLayout::ALIGN, "bytes can be aligned");
        Some(QueueChunk { memory, begin, bytes, unused: Arc::clone(self) })
    }
}

impl Drop for QueueChunk {
    fn drop(&mut self) {
        let memory = std::mem::take(&mut self.memory);
        self.unused.with(|unused| unused.memory.push(memory));
    }
}

impl AsRef<[u8]> for QueueChunk {
    fn as_ref(&self) -> &[u8] {
        let end = self.begin + self.bytes;
        self.memory.get(self.begin..end).invariant("a chunk's memory is longer than the chunk")
    }
}

impl AsMut<[u8]> for QueueChunk {
    fn as_mut(&mut self) -> &mut [u8] {
        let end = self.begin + self.bytes;
        self.memory.get_mut(self.begin..end).invariant("a chunk's memory is longer than the chunk")
    }
}

impl<Q: Queue> QueueHostPool<Q> {
    /// Creates a pool of `chunks` chunks that copies on `queue`.
    pub fn new(queue: Q, layout: ChunkLayout, chunks: u32) -> Self {
        let unused = UnusedChunks { memory: Vec::new(), untouched: chunks };
        let unused = Arc::new(Unused(Mutex::new(unused)));
        Self { queue, layout, unused, reserved: Reserved::default() }
    }

    /// Keeps the reservation of all chunks as long as the pool exists.
    #[must_use]
    pub fn with_reserved(self, reserved: Reserved) -> Self {
        Self { reserved, ..self }
    }

    /// Calls `copy` with buffer, offset and bytes of every block in every plane, and the piece of
    /// the chunk.
    fn each_piece(
        layout: &ChunkLayout,
        storage: StorageView<'_, Q::Buffer>,
        (blocks, first): (&[BlockId], u32),
        operation: &'static str,
        mut copy: impl FnMut(&Q::Buffer, u64, std::ops::Range<usize>) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        let roles = layout.planes().as_slice();
        let planes = (0..).flat_map(|layer| roles.iter().map(move |(role, _)| (layer, *role)));
        for ((layer, role), view) in planes.zip(storage.planes()) {
            for (block, place) in blocks.iter().zip(first..) {
                let (segment, offset) = view.layout().locate(block.0);
                let Some(buffer) = view.segment(segment) else {
                    return Err(DeviceError::new(DeviceErrorKind::ForeignHandle, operation));
                };
                copy(buffer, offset, layout.piece(place, layer, role))?;
            }
        }
        Ok(())
    }

    fn check(
        &self,
        storage: StorageView<'_, Q::Buffer>,
        (blocks, first): (&[BlockId], u32),
        chunk: &QueueChunk,
        operation: &'static str,
    ) -> Result<(), DeviceError> {
        if !Arc::ptr_eq(&chunk.unused, &self.unused) {
            return Err(DeviceError::new(DeviceErrorKind::ForeignHandle, operation));
        }
        self.layout.check(storage, (blocks, first), operation)
    }
}

/// A chunk whose pieces are being downloaded.
#[derive(Debug)]
pub struct QueuePendingChunk<R> {
    /// `None` once it was returned.
    chunk: Option<QueueChunk>,
    /// The downloads that have not arrived, and where their bytes go.
    pieces: Vec<(R, std::ops::Range<usize>)>,
}

impl<R: Readback> QueuePendingChunk<R> {
    fn put(chunk: &mut Option<QueueChunk>, piece: std::ops::Range<usize>, bytes: &[u8]) {
        let chunk = chunk.as_mut().invariant("a pending chunk was not returned");
        let to = chunk.as_mut().get_mut(piece).invariant("a piece lies in its chunk");
        to.copy_from_slice(bytes);
    }
}

impl<R: Readback> PendingChunk for QueuePendingChunk<R> {
    type Chunk = QueueChunk;

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<QueueChunk, DeviceError>> {
        while let Some((readback, piece)) = self.pieces.last_mut() {
            match readback.poll(cx) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                Poll::Ready(Ok(bytes)) => Self::put(&mut self.chunk, piece.clone(), &bytes),
            }
            self.pieces.pop();
        }
        Poll::Ready(Ok(self.chunk.take().invariant("a pending chunk is returned once")))
    }

    fn wait(mut self) -> Result<QueueChunk, DeviceError> {
        for (readback, piece) in self.pieces {
            Self::put(&mut self.chunk, piece, &readback.wait()?);
        }
        Ok(self.chunk.invariant("a pending chunk is returned once"))
    }
}

impl<Q: Queue> HostPool for QueueHostPool<Q> {
    type Buffer = Q::Buffer;
    type Fence = Q::Fence;
    type Chunk = QueueChunk;
    type Pending = QueuePendingChunk<Q::Readback>;

    fn layout(&self) -> &ChunkLayout {
        &self.layout
    }

    fn take(&mut self) -> Option<QueueChunk> {
        self.unused.take(self.layout.bytes())
    }

    fn copy_out(
        &mut self,
        after: &Q::Fence,
        storage: StorageView<'_, Q::Buffer>,
        blocks: &[BlockId],
        chunk: QueueChunk,
        first: u32,
    ) -> Result<QueuePendingChunk<Q::Readback>, DeviceError> {
        const COPY_OUT: &str = "copy blocks to host memory";
        self.check(storage, (blocks, first), &chunk, COPY_OUT)?;
        self.queue.wait_for(after)?;
        let mut pieces = Vec::new();
        let queue = &mut self.queue;
        let read = |buffer: &Q::Buffer, offset, piece: std::ops::Range<usize>| {
            pieces.push((queue.download(buffer, offset, to_u64(piece.len()))?, piece));
            Ok(())
        };
        Self::each_piece(&self.layout, storage, (blocks, first), COPY_OUT, read)?;
        self.queue.flush()?;
        Ok(QueuePendingChunk { chunk: Some(chunk), pieces })
    }

    fn copy_in(
        &mut self,
        after: &Q::Fence,
        storage: StorageView<'_, Q::Buffer>,
        blocks: &[BlockId],
        chunk: &QueueChunk,
        first: u32,
    ) -> Result<Q::Fence, DeviceError> {
        const COPY_IN: &str = "copy blocks from host memory";
        self.check(storage, (blocks, first), chunk, COPY_IN)?;
        ChunkLayout::check_distinct(blocks, COPY_IN)?;
        self.queue.wait_for(after)?;
        let queue = &mut self.queue;
        let write = |buffer: &Q::Buffer, offset, piece: std::ops::Range<usize>| {
            let bytes = chunk.as_ref().get(piece).invariant("a piece lies in its chunk");
            queue.upload(buffer, offset, bytes)
        };
        Self::each_piece(&self.layout, storage, (blocks, first), COPY_IN, write)?;
        self.queue.submit()
    }

    fn fence(&mut self) -> Result<Q::Fence, DeviceError> {
        self.queue.submit()
    }
}
