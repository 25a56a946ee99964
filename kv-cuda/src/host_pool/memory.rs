//! Page-locked memory of a host pool: slots of one chunk each, and the copies that still use them.
//!
//! Owns when a slot can be used again and when the memory can be freed. Does not know streams.
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use kv_core::backend::ChunkLayout;
use kv_core::error::{DeviceError, DeviceErrorKind};
use kv_core::invariant::Invariant;
use kv_core::num::to_usize;

use crate::gpu::{Event, Gpu, Pinned};

/// One page-locked allocation for all chunks of a pool.
///
/// The pool and every chunk hold it. Dropping it waits for pending copies; if the device fails, the
/// memory is leaked.
pub(super) struct ChunkMemory {
    /// Taken when this is dropped.
    pinned: Option<Box<dyn Pinned>>,
    /// Offset of the first slot, whose address is a multiple of [`ChunkLayout::ALIGN`].
    begin: usize,
    chunk_bytes: usize,
    slots: Mutex<Slots>,
}

struct Slots {
    /// The last copies of each slot.
    copies: Vec<Copies>,
    /// Slots without a chunk.
    unused: Vec<usize>,
}

/// The completion of the copies to and from a slot.
#[derive(Clone)]
pub(super) enum Copies {
    /// Now.
    Done,
    /// With this event.
    Until(Arc<dyn Event>),
    /// Never known: no event could be recorded after them.
    Unmarked,
}

/// A chunk in page-locked memory of a [`CudaHostPool`](super::CudaHostPool).
///
/// It keeps the memory of the whole pool. Dropped, it can be taken again when its last copies are
/// done.
#[derive(Debug)]
pub struct CudaChunk {
    memory: Arc<ChunkMemory>,
    /// Slot that no other chunk has.
    index: usize,
}

impl Copies {
    /// Returns whether they are done; false if the device failed.
    fn is_done(&mut self) -> bool {
        match self {
            Self::Done => return true,
            Self::Until(event) if matches!(event.is_done(), Ok(true)) => {}
            Self::Until(_) | Self::Unmarked => return false,
        }
        *self = Self::Done;
        true
    }

    /// Blocks until they are done, and returns whether they are; false if the device failed.
    fn wait(&self) -> bool {
        match self {
            Self::Done => true,
            Self::Until(event) => event.wait().is_ok(),
            Self::Unmarked => false,
        }
    }
}

impl ChunkMemory {
    /// Allocates memory for `chunks` chunks of `chunk_bytes` bytes, a multiple of
    /// [`ChunkLayout::ALIGN`].
    pub(super) fn new(
        gpu: &Arc<dyn Gpu>,
        chunk_bytes: usize,
        chunks: u32,
    ) -> Result<Self, DeviceError> {
        assert!(chunk_bytes.is_multiple_of(ChunkLayout::ALIGN), "chunks end on a page");
        let chunks = to_usize(chunks);
        // More bytes, to align the first slot: `Gpu` promises no alignment.
        let bytes = chunk_bytes
            .checked_mul(chunks)
            .and_then(|bytes| bytes.checked_add(ChunkLayout::ALIGN))
            .filter(|bytes| isize::try_from(*bytes).is_ok());
        let Some(bytes) = bytes else {
            let asked = format!("{chunks} chunks of {chunk_bytes} bytes");
            return Err(DeviceError::new(DeviceErrorKind::OutOfMemory, "make a host pool")
                .with_detail(asked));
        };
        let pinned = gpu.pinned(bytes)?;
        let begin = pinned.base().align_offset(ChunkLayout::ALIGN);
        assert!(begin <= ChunkLayout::ALIGN, "bytes can be aligned");
        let copies = std::iter::repeat_with(|| Copies::Done).take(chunks).collect();
        // The first slot is taken first.
        let slots = Slots { copies, unused: (0..chunks).rev().collect() };
        Ok(Self { pinned: Some(pinned), begin, chunk_bytes, slots: Mutex::new(slots) })
    }

    fn with<T>(&self, act: impl FnOnce(&mut Slots) -> T) -> T {
        act(&mut self.slots.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Takes a slot without pending copies; does not wait.
    pub(super) fn take(memory: &Arc<Self>) -> Option<CudaChunk> {
        let index = memory.with(|Slots { copies, unused }| {
            let is_done = |slot: &usize| copies.get_mut(*slot).is_some_and(Copies::is_done);
            // The one that was used last, whose bytes the CPU may still cache.
            let at = unused.iter().rposition(is_done)?;
            Some(unused.remove(at))
        })?;
        Some(CudaChunk { memory: Arc::clone(memory), index })
    }
}

impl fmt::Debug for ChunkMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChunkMemory").field("pinned", &self.pinned).finish_non_exhaustive()
    }
}

impl Drop for ChunkMemory {
    fn drop(&mut self) {
        let slots = self.slots.get_mut().unwrap_or_else(PoisonError::into_inner);
        if !slots.copies.iter().all(Copies::wait) {
            // The device failed and may still use the bytes: leak them.
            std::mem::forget(self.pinned.take());
        }
    }
}

impl CudaChunk {
    pub(super) fn is_of(&self, memory: &Arc<ChunkMemory>) -> bool {
        Arc::ptr_eq(&self.memory, memory)
    }

    /// Notes the last copies to or from its bytes.
    pub(super) fn set_copies(&self, copies: Copies) {
        self.memory.with(|slots| {
            *slots.copies.get_mut(self.index).invariant("a chunk has a slot") = copies;
        });
    }

    /// Returns the address of byte `offset`, which must be in the chunk.
    pub(super) fn at(&self, offset: usize) -> *mut u8 {
        let ChunkMemory { pinned, begin, chunk_bytes, .. } = &*self.memory;
        let base = pinned.as_ref().invariant("chunks have memory until it is dropped").base();
        // Within the allocation, whose size `ChunkMemory::new` computed for all slots.
        let chunk = chunk_bytes * self.index + *begin;
        base.wrapping_add(chunk + offset)
    }
}

impl AsRef<[u8]> for CudaChunk {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: `ChunkMemory::new` allocated `chunk_bytes` bytes for every slot, and the chunk
        // keeps them alive; pages of the driver have values before the first write. Only this chunk
        // has the slot (`ChunkMemory::take`). Nothing writes it meanwhile: `as_mut` borrows the
        // chunk, and the device writes only what a pending chunk has (`copy_out`).
        unsafe { std::slice::from_raw_parts(self.at(0).cast_const(), self.memory.chunk_bytes) }
    }
}

impl AsMut<[u8]> for CudaChunk {
    fn as_mut(&mut self) -> &mut [u8] {
        let copies = self.memory.with(|slots| slots.copies.get(self.index).cloned());
        // Waits without the lock, which `take` needs. No copy can begin meanwhile: it would borrow
        // the chunk.
        if copies.invariant("a chunk has a slot").wait() {
            self.set_copies(Copies::Done);
        }
        // SAFETY: as for `as_ref`; the borrow of the chunk is exclusive. Copies from these bytes
        // are done, by `wait` above; or the device failed, and what it still reads of them goes to
        // blocks whose content is undefined by then.
        unsafe { std::slice::from_raw_parts_mut(self.at(0), self.memory.chunk_bytes) }
    }
}

impl Drop for CudaChunk {
    fn drop(&mut self) {
        self.memory.with(|slots| slots.unused.push(self.index));
    }
}
