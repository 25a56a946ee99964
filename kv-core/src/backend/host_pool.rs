//! Host memory for chunks of blocks, and copies between it and the device.
//!
//! [`HostPool`] is the contract, [`ChunkLayout`] where each block's bytes are, and
//! [`QueueHostPool`] the implementation for every device that has only a [`Queue`].
mod layout;
mod queue;
#[cfg(test)]
mod tests;

use std::any::Any;
use std::fmt;
use std::task::{Context, Poll};

pub use layout::{ChunkLayout, ChunkShape};
pub use queue::{QueueChunk, QueueHostPool, QueuePendingChunk};

use crate::backend::Fence;
use crate::error::DeviceError;
use crate::ids::BlockId;
use crate::storage::StorageView;

/// A fixed number of chunks in host memory, and the copies between them and blocks of one group.
///
/// Copies run beside the cache's queue and are ordered with it by fences alone: a copy starts when
/// the fence that it is given is done. No call waits for the device.
///
/// The contract, and the conformance case that proves each part (`kv-testkit`):
/// 1. a block copied out and in again, to any block, has the same bytes in every plane
///    (`tier/round_trip`);
/// 2. a chunk has the bytes of a block where [`ChunkLayout::piece`] says (`tier/pieces`), and other
///    blocks of the chunk keep theirs (`tier/places`);
/// 3. copies start after the fence that they are given (`tier/order`);
/// 4. a dropped chunk can be taken again, whatever is pending on it (`tier/drop_anytime`);
/// 5. a refused call copies nothing (`tier/refusals`);
/// 6. the fence of a pool follows the copies before it, in both directions (`tier/fence`).
pub trait HostPool: fmt::Debug + Send + 'static {
    /// The backend's buffer handle.
    type Buffer: 'static;
    /// The fence of the backend's queue.
    type Fence: Fence;
    /// One chunk's bytes. Dropped, it can be taken again.
    type Chunk: HostChunk;
    /// A chunk that blocks are being copied to.
    type Pending: PendingChunk<Chunk = Self::Chunk>;

    /// Returns where the bytes of a chunk are.
    fn layout(&self) -> &ChunkLayout;

    /// Takes an unused chunk, whose bytes are arbitrary; `None` if all are in use.
    fn take(&mut self) -> Option<Self::Chunk>;

    /// Copies blocks to places `first..` of a chunk, once `after` is done.
    ///
    /// `after` must follow the last write to these blocks, and they must not be written until the
    /// chunk has arrived, unless by work that waits for [`Self::fence`]. Dropping the returned
    /// chunk early is allowed.
    ///
    /// # Errors
    /// `OutOfRange` for a block or a place that does not exist; `ForeignHandle` for a fence or
    /// storage of another device, and for a chunk of another pool; `Unsupported` for storage with
    /// other planes than those that the pool was made for. `Lost` or `Driver`. The chunk is
    /// dropped.
    fn copy_out(
        &mut self,
        after: &Self::Fence,
        storage: StorageView<'_, Self::Buffer>,
        blocks: &[BlockId],
        chunk: Self::Chunk,
        first: u32,
    ) -> Result<Self::Pending, DeviceError>;

    /// Copies places `first..` of a chunk to blocks, once `after` is done, and returns the fence of
    /// the copies.
    ///
    /// `after` must follow the last use of these blocks. Later reads of them must wait for the
    /// returned fence: let the cache's queue [`wait_for`](crate::backend::Queue::wait_for) it. The
    /// chunk may be dropped when the call returns.
    ///
    /// # Errors
    /// Those of [`Self::copy_out`], and `Unsupported` for a block that is named twice. After `Lost`
    /// or `Driver`, the blocks' content is undefined.
    fn copy_in(
        &mut self,
        after: &Self::Fence,
        storage: StorageView<'_, Self::Buffer>,
        blocks: &[BlockId],
        chunk: &Self::Chunk,
        first: u32,
    ) -> Result<Self::Fence, DeviceError>;

    /// Returns the fence of all copies that were recorded so far.
    ///
    /// # Errors
    /// `Lost` or `Driver`.
    fn fence(&mut self) -> Result<Self::Fence, DeviceError>;
}

/// A chunk: [`ChunkLayout::bytes`] bytes that begin at a multiple of [`ChunkLayout::ALIGN`].
///
/// Borrowing them for writing waits for a copy to the device that still reads them.
pub trait HostChunk: Any + AsRef<[u8]> + AsMut<[u8]> + fmt::Debug + Send + Sync {}
impl<T: Any + AsRef<[u8]> + AsMut<[u8]> + fmt::Debug + Send + Sync> HostChunk for T {}

/// A chunk that blocks are being copied to.
pub trait PendingChunk: fmt::Debug + Send + 'static {
    /// The chunk.
    type Chunk;
    /// Returns the chunk once all bytes have arrived, and registers the waker until then.
    ///
    /// # Panics
    /// If the chunk was returned before.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Self::Chunk, DeviceError>>;
    /// Blocks the thread until all bytes have arrived.
    ///
    /// # Errors
    /// Those of [`Fence::wait`].
    fn wait(self) -> Result<Self::Chunk, DeviceError>;
}
