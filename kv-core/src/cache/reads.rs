//! Blocks whose bytes are read beside the cache's queue: later writes wait for the reads.
//!
//! A reader with its own queue, such as a copy to host memory, holds a block only until its read is
//! recorded. From then on the block is like any other: a step may evict its content and take it.
//! Before a write to the block, the cache's queue waits for the reader's fence. So a reader costs a
//! step a wait on the device, and never a block.
use std::task::{Context, Waker};

use hashbrown::HashMap;

use crate::backend::{Backend, Fence, Queue};
use crate::cache::KvCache;
use crate::cache::state::{BlockHold, CacheState};
use crate::error::{CacheError, DeviceError};
use crate::ids::{BlockId, GroupId};

/// The fences of reads, by block.
#[derive(Debug)]
pub(super) struct Reads<F> {
    fences: HashMap<(GroupId, BlockId), Vec<F>>,
    /// Number of blocks at which reads that are done are dropped.
    room: usize,
}

/// Blocks of which done reads are kept.
const ROOM_MIN: usize = 256;

impl<F> Default for Reads<F> {
    fn default() -> Self {
        Self { fences: HashMap::new(), room: ROOM_MIN }
    }
}

impl<F: Fence> Reads<F> {
    fn insert(&mut self, place: (GroupId, BlockId), fence: &F, state: &mut CacheState) {
        if self.fences.len() >= self.room {
            self.drop_done(state);
        }
        let fences = self.fences.entry(place).or_default();
        fences.retain(is_pending);
        fences.push(fence.clone());
    }

    /// Drops the reads that are done. A read that failed is over too.
    fn drop_done(&mut self, state: &mut CacheState) {
        self.fences.retain(|place, fences| {
            fences.retain(is_pending);
            if fences.is_empty() {
                state.end_read(*place);
            }
            !fences.is_empty()
        });
        self.room = (self.fences.len() * 2).max(ROOM_MIN);
    }
}

fn is_pending<F: Fence>(fence: &F) -> bool {
    fence.poll(&mut Context::from_waker(Waker::noop())).is_pending()
}

impl<B: Backend> KvCache<B> {
    /// Releases a block whose bytes are read by work that is recorded on another queue and done
    /// when `fence` is. The block can be evicted and taken at once: later writes to it wait for
    /// `fence` on the device, and no call waits on the host.
    ///
    /// ```
    /// use kv::backend::{Backend, ChunkShape, HostPool, NullBackend, PendingChunk, Queue};
    /// use kv::{CacheSpec, GroupId, KvCache, SequenceId, StartOptions, StepInput};
    ///
    /// let spec = CacheSpec::builder().layers(1).kv_heads(1).head_dim(4).paged(2, 8).changes(16);
    /// let mut cache = KvCache::new(NullBackend::new(), spec.build()?)?;
    /// # cache.start(SequenceId(0), &[1, 2, 3], StartOptions::default())?;
    /// # let mut step = cache.begin_step(&[StepInput::tokens(SequenceId(0), &[1, 2, 3])])?;
    /// # step.mark_written();
    /// # step.commit()?;
    /// let storage = cache.storage(GroupId(0)).expect("a group");
    /// let shape = ChunkShape { blocks: 4, header_bytes: 0 };
    /// let mut pool = cache.backend().host_pool(storage.view(), shape, 1)?;
    ///
    /// let mut changes = Vec::new();
    /// cache.drain_changes(&mut changes);
    /// let stored = changes[0];
    /// let hold = cache.hold_block(stored.group, stored.block, stored.key)?.expect("it is cached");
    /// let after = cache.queue_mut().submit()?;
    /// let storage = cache.storage(GroupId(0)).expect("a group").view();
    /// let chunk = pool.take().expect("a new pool has a chunk");
    /// let pending = pool.copy_out(&after, storage, &[hold.block()], chunk, 0)?;
    /// cache.release_hold_after(hold, &pool.fence()?)?;
    /// // Steps go on, and may take the block.
    /// let chunk = pending.wait()?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`Self::release_hold`].
    pub fn release_hold_after(
        &mut self,
        hold: BlockHold,
        fence: &<B::Queue as Queue>::Fence,
    ) -> Result<(), CacheError> {
        self.recover();
        let place = (hold.group(), hold.block());
        self.state.release_hold_in_read(hold)?;
        self.reads.insert(place, fence, &mut self.state);
        Ok(())
    }

    /// Lets the queue wait for the reads of blocks that may be written from now on.
    pub(super) fn wait_for_reads(&mut self) -> Result<(), DeviceError> {
        while let Some(place) = self.state.outlived_reads().last().copied() {
            for fence in self.reads.fences.get(&place).into_iter().flatten() {
                self.queue.wait_for(fence)?;
            }
            self.reads.fences.remove(&place);
            self.state.pop_outlived_read();
        }
        Ok(())
    }

    /// Lets the queue wait for all reads.
    pub(super) fn wait_for_all_reads(&mut self) -> Result<(), DeviceError> {
        for fence in self.reads.fences.values().flatten() {
            self.queue.wait_for(fence)?;
        }
        for (place, _) in self.reads.fences.drain() {
            self.state.end_read(place);
        }
        self.wait_for_reads()
    }
}
