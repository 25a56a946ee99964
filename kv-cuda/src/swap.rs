//! Swapping of blocks to page-locked host memory and back, on a stream of its own.
//!
//! Owns the host memory and the order of copies: the copies of a call are one batch after the event
//! they wait for. Does not know why a block moves, or which sequence it belongs to.
mod erased;
#[cfg(test)]
#[cfg(feature = "emulated")]
mod tests;

use std::sync::Arc;

use kv_core::BlockId;
use kv_core::backend::{PlaneLayout, PlaneView, StorageView};
use kv_core::error::{DeviceError, DeviceErrorKind};

use crate::backend::CudaBackend;
use crate::buffer::CudaBuffer;
use crate::fence::CudaFence;
use crate::gpu::{Gpu, HostCopy, Pinned, Stream};
use crate::params::Address;
use crate::tensors::unsupported;
use crate::waiter::Waiter;
use kv_core::num::{to_offset, to_u32, to_usize};

/// Swap space: page-locked host memory for blocks of one group, and the stream that copies them.
///
/// A preempted sequence's blocks are swapped out and back in instead of being computed again.
/// Copies run beside the cache's queue and are ordered with it by fences alone; no call blocks. A
/// *host block* is a number below [`capacity`](Self::capacity), which the caller assigns.
///
/// # Shapes
/// A host block holds `[layer][K, V]`, the unchanged bytes of a block in each allocated plane, each
/// aligned to 16.
///
/// For a cache over [`AnyBackend`](kv_core::backend::AnyBackend), use [`CudaBackend::swap_any`],
/// [`swap_out_any`](Self::swap_out_any) and [`swap_in_any`](Self::swap_in_any).
///
/// # Guarantees
/// Calls on one `CudaSwap` take effect in order, so a host block may be swapped in, and out again,
/// without a wait in between. A refused call changes nothing. Dropping it waits for pending copies,
/// and thus for what they wait for.
///
/// # Source
/// `swap_out`, `swap_in` and the swap space of vLLM.
///
/// # Examples
///
/// ```no_run
/// use std::sync::Arc;
///
/// use kv_core::backend::Queue;
/// use kv_core::{BlockId, CacheSpec, GroupId, KvCache};
/// use kv_cuda::{CudaBackend, CudaOptions};
///
/// let device = Arc::new(CudaBackend::open(&CudaOptions::default())?);
/// let spec = CacheSpec::builder().layers(2).kv_heads(8).head_dim(128).paged(16, 1024).build()?;
/// let mut cache = KvCache::new(Arc::clone(&device), spec)?;
/// for layer in 0..2 {
///     cache.allocate_layer(layer)?;
/// }
/// let Some(storage) = cache.storage(GroupId(0)) else { return Ok(()) };
/// let mut swap = device.swap(storage.view(), 256)?;
///
/// // Blocks 7 and 3 are swapped out, after everything the cache has recorded.
/// let written = cache.queue_mut().submit()?;
/// let Some(storage) = cache.storage(GroupId(0)) else { return Ok(()) };
/// let away = swap.swap_out(&written, storage.view(), &[(BlockId(7), 0), (BlockId(3), 1)])?;
/// // Work that the cache records from here on may overwrite them.
/// cache.queue_mut().wait_for(&away)?;
///
/// // They are swapped in to other blocks.
/// let free = cache.queue_mut().submit()?;
/// let Some(storage) = cache.storage(GroupId(0)) else { return Ok(()) };
/// let back = swap.swap_in(&free, storage.view(), &[(BlockId(40), 0), (BlockId(41), 1)])?;
/// cache.queue_mut().wait_for(&back)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct CudaSwap {
    gpu: Arc<dyn Gpu>,
    waiter: Arc<Waiter>,
    stream: Box<dyn Stream>,
    /// Taken when this is dropped.
    room: Option<Box<dyn Pinned>>,
    planes: Vec<SwapPlane>,
    /// Bytes from one host block to the next.
    block_bytes: u64,
    /// Whether each host block holds a block.
    filled: Vec<bool>,
}

/// One plane of the storage, and its place in a host block.
#[derive(Debug, PartialEq, Eq)]
struct SwapPlane {
    layout: PlaneLayout,
    /// Addresses of the segments.
    segments: Vec<Address>,
    /// Offset in a host block, in bytes.
    begin: u64,
}

impl CudaBackend {
    /// Reserves swap space for `capacity` blocks of a group, in page-locked host memory, and opens
    /// a stream for it.
    ///
    /// All layers of the group must have memory already: layers allocated later need another
    /// `CudaSwap`.
    ///
    /// # Errors
    /// `Unsupported` if no layer has memory, `ForeignHandle` for storage of another device,
    /// `OutOfMemory` if the host lacks the memory, `Lost` or `Driver`.
    pub fn swap(
        &self,
        storage: StorageView<'_, CudaBuffer>,
        capacity: u32,
    ) -> Result<CudaSwap, DeviceError> {
        const SWAP: &str = "reserve swap space";
        let (gpu, waiter) = self.parts();
        let (planes, block_bytes) = planes(gpu, storage, SWAP)?;
        if planes.is_empty() {
            return Err(unsupported(SWAP, "no layer of the group has memory"));
        }
        // The driver refuses page-locked allocations of 0 bytes.
        let room =
            block_bytes.checked_mul(u64::from(capacity)).map_or(usize::MAX, to_offset).max(1);
        if isize::try_from(room).is_err() {
            let asked = format!("{capacity} blocks of {block_bytes} bytes");
            return Err(DeviceError::new(DeviceErrorKind::OutOfMemory, SWAP).with_detail(asked));
        }
        Ok(CudaSwap {
            gpu: Arc::clone(gpu),
            waiter: Arc::clone(waiter),
            stream: gpu.stream()?,
            room: Some(gpu.pinned(room)?),
            planes,
            block_bytes,
            filled: vec![false; to_usize(capacity)],
        })
    }
}

impl CudaSwap {
    /// Copies blocks to host blocks, in all planes, once `after` is done.
    ///
    /// `after` must follow the last write to these blocks. Later writes to them must wait for the
    /// returned fence: let the cache's queue [`wait_for`](kv_core::backend::Queue::wait_for) it
    /// before the blocks are reused. Host blocks that hold something already are overwritten.
    ///
    /// # Errors
    /// `OutOfRange` for a block or a host block that does not exist; `ForeignHandle` for a fence or
    /// storage of another device; `Unsupported` for storage other than this was made for, or with
    /// other planes by now, and for a host block that occurs twice. These change nothing. `Lost` or
    /// `Driver`; then [`holds`](Self::holds) says which host blocks can still be swapped in.
    pub fn swap_out(
        &mut self,
        after: &CudaFence,
        storage: StorageView<'_, CudaBuffer>,
        blocks: &[(BlockId, u32)],
    ) -> Result<CudaFence, DeviceError> {
        const SWAP_OUT: &str = "swap out";
        let event = after.event_on(&self.gpu, SWAP_OUT)?;
        let copies = self.copies(storage, blocks, SWAP_OUT)?;
        self.stream.wait_for(event)?;
        self.fill(blocks, false);
        // SAFETY: `copies` took addresses from planes of this device that reach to their last
        // block; the page-locked bytes stay until `drop` has waited, and only this stream, in
        // order, reads or writes them. Ranges of host blocks do not overlap, and none occurs twice.
        unsafe { self.stream.download_batch(&copies) }?;
        let fence = CudaFence::record(&self.gpu, &self.waiter, self.stream.as_mut())?;
        self.fill(blocks, true);
        Ok(fence)
    }

    /// Copies host blocks to blocks, in all planes, once `after` is done. The host blocks keep
    /// their content.
    ///
    /// `after` must follow the last use of these blocks. Later reads of them must wait for the
    /// returned fence: let the cache's queue [`wait_for`](kv_core::backend::Queue::wait_for) it.
    ///
    /// # Errors
    /// Those of [`Self::swap_out`], and `Unsupported` for a host block that holds nothing and for a
    /// block that occurs twice. After `Lost` or `Driver`, the blocks' content is undefined.
    pub fn swap_in(
        &mut self,
        after: &CudaFence,
        storage: StorageView<'_, CudaBuffer>,
        blocks: &[(BlockId, u32)],
    ) -> Result<CudaFence, DeviceError> {
        const SWAP_IN: &str = "swap in";
        let event = after.event_on(&self.gpu, SWAP_IN)?;
        let copies = self.copies(storage, blocks, SWAP_IN)?;
        if let Some((_, host)) = blocks.iter().find(|(_, host)| !self.holds(*host)) {
            return Err(unsupported(SWAP_IN, format!("host block {host} holds nothing")));
        }
        if let Some(block) = named_twice(blocks.iter().map(|(block, _)| block.0)) {
            return Err(unsupported(SWAP_IN, format!("block {block} is named twice")));
        }
        self.stream.wait_for(event)?;
        // SAFETY: `copies` took addresses from planes of this device that reach to their last
        // block; the page-locked bytes stay until `drop` has waited, and only this stream, in
        // order, reads or writes them.
        unsafe { self.stream.upload_batch(&copies) }?;
        CudaFence::record(&self.gpu, &self.waiter, self.stream.as_mut())
    }

    /// Returns the number of host blocks.
    pub fn capacity(&self) -> u32 {
        to_u32(self.filled.len())
    }
    /// Returns the bytes of one host block: those of a block in all planes, each rounded up to 16.
    pub fn block_bytes(&self) -> u64 {
        self.block_bytes
    }
    /// Returns whether a host block holds a block, or will hold one once pending copies are done.
    pub fn holds(&self, host_block: u32) -> bool {
        self.filled.get(to_usize(host_block)).copied().unwrap_or(false)
    }

    fn fill(&mut self, blocks: &[(BlockId, u32)], is_filled: bool) {
        for (_, host) in blocks {
            if let Some(filled) = self.filled.get_mut(to_usize(*host)) {
                *filled = is_filled;
            }
        }
    }

    /// Returns the copies of a call, after all checks.
    fn copies(
        &self,
        storage: StorageView<'_, CudaBuffer>,
        blocks: &[(BlockId, u32)],
        operation: &'static str,
    ) -> Result<Vec<HostCopy>, DeviceError> {
        if planes(&self.gpu, storage, operation)?.0 != self.planes {
            let why = "the planes are not those that swap space was reserved for";
            return Err(unsupported(operation, why));
        }
        if let Some(host) = named_twice(blocks.iter().map(|(_, host)| *host)) {
            return Err(unsupported(operation, format!("host block {host} is named twice")));
        }
        let mut copies = Vec::with_capacity(blocks.len().saturating_mul(self.planes.len()));
        for (block, host) in blocks {
            for plane in &self.planes {
                copies.push(self.copy_in_plane(plane, *block, *host, operation)?);
            }
        }
        Ok(copies)
    }

    fn copy_in_plane(
        &self,
        plane: &SwapPlane,
        block: BlockId,
        host: u32,
        operation: &'static str,
    ) -> Result<HostCopy, DeviceError> {
        let outside = |what: &str, index: u32, count: u32| {
            let asked = format!("{what} {index} of {count}");
            DeviceError::new(DeviceErrorKind::OutOfRange, operation).with_detail(asked)
        };
        let layout = &plane.layout;
        let (segment, offset) = layout.locate(block.0);
        let segment = plane.segments.get(segment).filter(|_| block.0 < layout.num_blocks());
        let Some(segment) = segment else {
            return Err(outside("block", block.0, layout.num_blocks()));
        };
        let Some(room) = self.room.as_ref().filter(|_| host < self.capacity()) else {
            return Err(outside("host block", host, self.capacity()));
        };
        // Within the swap space, whose size was checked when it was allocated.
        let begin = u64::from(host).saturating_mul(self.block_bytes).saturating_add(plane.begin);
        Ok(HostCopy {
            host: room.base().wrapping_add(to_offset(begin)),
            device: segment.saturating_add(offset),
            bytes: to_offset(layout.block_bytes()),
        })
    }
}

impl Drop for CudaSwap {
    fn drop(&mut self) {
        // An event follows every copy, including those of calls that failed half-way.
        let passed = self.stream.record().and_then(|event| event.wait());
        if passed.is_err() {
            // The device is gone and may still use the bytes: leak them.
            std::mem::forget(self.room.take());
        }
    }
}

/// Returns the planes of a storage that must be of `gpu`, and the bytes of a host block.
fn planes(
    gpu: &Arc<dyn Gpu>,
    storage: StorageView<'_, CudaBuffer>,
    operation: &'static str,
) -> Result<(Vec<SwapPlane>, u64), DeviceError> {
    let mut begin = 0_u64;
    let mut planes = Vec::new();
    for view in storage.planes() {
        let layout = *view.layout();
        let segments = (0..layout.num_segments())
            .map(|index| segment(gpu, &view, index, operation))
            .collect::<Result<Vec<_>, _>>()?;
        planes.push(SwapPlane { layout, segments, begin });
        // A plane is shorter than `isize::MAX`, so the next multiple exists; an overflowing sum is
        // refused as too large, whatever the capacity.
        begin = begin.saturating_add(layout.block_bytes().next_multiple_of(ALIGNMENT));
    }
    Ok((planes, begin))
}

fn segment(
    gpu: &Arc<dyn Gpu>,
    view: &PlaneView<'_, CudaBuffer>,
    index: u32,
    operation: &'static str,
) -> Result<Address, DeviceError> {
    let Some(buffer) = view.segment(to_usize(index)) else {
        return Err(unsupported(operation, format!("the plane has no buffer for segment {index}")));
    };
    buffer.on(gpu, (0, view.layout().segment_bytes(index)), operation)
}

/// Returns an index that occurs more than once: copies of a batch run in any order.
fn named_twice(indices: impl Iterator<Item = u32>) -> Option<u32> {
    let mut indices: Vec<u32> = indices.collect();
    indices.sort_unstable();
    indices.array_windows().find_map(|[index, next]| (index == next).then_some(*index))
}

/// Alignment of planes in a host block, in bytes.
const ALIGNMENT: u64 = 16;
