//! The cache: bookkeeping, planes and a queue.
//!
//! [`CacheState`] does the bookkeeping: sequences, block tables, pools, the prefix index and the
//! open step. [`KvCache`] adds the memory: it checks a call, delegates to the state, and records
//! the device's work. [`Step`] is one forward pass over some of the sequences. Every call checks
//! its arguments before it changes anything, and a step applies whole or not at all.
mod builder;
mod constants;
mod gather;
mod lifecycle;
mod open;
mod reads;
mod recalibrate;
mod state;
mod state_parts;
mod states;
mod step;
#[cfg(test)]
mod tests;

use crate::backend::{AnyBackend, Backend, Queue, Reserved};
use crate::error::{CacheError, DeviceError};
use crate::ids::{GroupId, LayerId};
use crate::invariant::Invariant;
use crate::plan::PlanBuffers;
use crate::spec::CacheSpec;
use crate::storage::KvStorage;
pub use builder::KvCacheBuilder;
use open::Written;
pub use state::{
    Admission, BlockDemand, BlockHold, CacheState, GroupUsage, HitByKind, Import, ImportBlock, Pin,
    PinId, PrefixProbe, ProbedBlock, SequenceText, StartOptions, Stats, StepInput, Usage,
};
pub use states::StateSlots;
pub use step::Step;

/// A KV cache on one device.
///
/// [`start`](Self::start) begins a sequence and says how many tokens of its prompt are cached
/// already. [`begin_step`](Self::begin_step) opens a [`Step`], which writes and attends.
/// [`fork`](Self::fork) lets a second sequence share a first one's tokens,
/// [`truncate`](Self::truncate) removes the last tokens of a sequence, and
/// [`release`](Self::release) ends it; its full blocks stay cached until they are evicted. `B` is
/// the backend, [`AnyBackend`] unless it is named.
///
/// [`state`](Self::state) is its read-only bookkeeping: lengths and block tables of sequences, free
/// blocks, counters, and the checks of a scheduler before it starts a sequence
/// ([`check_admission`](CacheState::check_admission),
/// [`blocks_for_step`](CacheState::blocks_for_step)).
///
/// ```
/// use kv::backend::NullBackend;
/// use kv::{CacheSpec, KvCache, SequenceId, StartOptions, StepInput};
///
/// let spec = CacheSpec::builder().layers(1).kv_heads(1).head_dim(4).paged(16, 8).build()?;
/// let mut cache = KvCache::new(NullBackend::new(), spec)?;
/// let seq = SequenceId(7);
/// cache.start(seq, &[1, 2, 3], StartOptions::default())?;
/// let step = cache.begin_step(&[StepInput::tokens(seq, &[1, 2, 3])])?;
/// assert_eq!(step.positions(), [0, 1, 2]);
/// drop(step); // nothing was written, so nothing happened
/// assert_eq!(cache.state().seq_len(seq), Some(0));
/// # Ok::<(), kv::CacheError>(())
/// ```
#[derive(Debug)]
pub struct KvCache<B: Backend = AnyBackend> {
    backend: B,
    queue: B::Queue,
    state: CacheState,
    /// Planes, by group.
    storages: Vec<KvStorage<B::Buffer>>,
    /// Slots of recurrent states, in the order of the spec.
    states: Vec<KvStorage<B::Buffer>>,
    /// Their snapshots.
    snapshots: Vec<Option<KvStorage<B::Buffer>>>,
    /// Snapshots that the commit of a step, or the end of a sequence, takes.
    taken: Vec<state::TakenSnapshot>,
    /// The memory of the planes.
    reserved: Vec<Reserved>,
    constants: constants::Constants,
    /// Whether the open step is held, rather than borrowing the cache as a [`Step`].
    is_held: bool,
    /// Layers that the open step has written.
    written: Written,
    /// Buffers of plans outside a step.
    scratch: PlanBuffers,
    /// Blocks that are read beside the queue.
    reads: reads::Reads<<B::Queue as Queue>::Fence>,
    /// Whether the device lacks the plans of the open step.
    is_unprepared: bool,
    /// Bytes that a failed exchange of constants has yet to restore.
    unrestored: Vec<recalibrate::Saved<B::Buffer>>,
}

impl<B: Backend> KvCache<B> {
    /// Allocates all memory of `spec` on `backend`; layers on demand are allocated later.
    /// Transforms have neither mean nor balance ([`KvCacheBuilder::calibration`]).
    ///
    /// # Errors
    /// [`CacheError::Calibration`] if a format needs a given scale; [`CacheError::Device`]:
    /// `OutOfMemory`, or `Unsupported` if the device does not support a `head_dim` of the spec or
    /// cannot bind a block, which is found before anything is allocated.
    pub fn new(backend: B, spec: CacheSpec) -> Result<Self, CacheError> {
        Self::builder(backend, spec).build()
    }

    /// Returns a builder: for a calibration, or a queue of the caller.
    pub fn builder(backend: B, spec: CacheSpec) -> KvCacheBuilder<B> {
        KvCacheBuilder::new(backend, spec)
    }

    /// Returns the bookkeeping, to read.
    pub fn state(&self) -> &CacheState {
        &self.state
    }
    /// Returns the device.
    pub fn backend(&self) -> &B {
        &self.backend
    }
    /// Returns the command queue on which all work of this cache is recorded, for callers that
    /// order their own work with it.
    pub fn queue_mut(&mut self) -> &mut B::Queue {
        self.recover();
        self.prepare_for_caller();
        &mut self.queue
    }
    /// Returns the planes of one group, of rows, states or snapshots.
    pub fn storage(&self, group: GroupId) -> Option<&KvStorage<B::Buffer>> {
        let all = self.storages.iter().chain(&self.states).map(Some);
        all.chain(self.snapshots.iter().map(Option::as_ref)).nth(usize::from(group.0))?
    }
    /// Returns the bytes of host memory of block tables and plans, including memory that they keep
    /// for later steps. It grows with the blocks of live sequences and with the largest recent
    /// step. Pools and their index are not included: they take a fixed size per block.
    pub fn plan_bytes(&self) -> usize {
        self.state.plan_bytes() + self.scratch.host_bytes()
    }

    /// Allocates a layer; `false` if it has memory already.
    ///
    /// A layer that is allocated late lacks the rows of all tokens cached before. From then on,
    /// nothing cached so far can be reused, and sequences that have tokens offer nothing more.
    /// Attention and gathers that would read the missing rows are refused
    /// ([`PlanError::RowsUnwritten`]), or read zeros, as [`CacheSpecBuilder::late_layers`] says.
    /// Give all layers their memory before the first step, or start such sequences anew.
    ///
    /// # Errors
    /// [`PlanError::UnknownLayer`], [`CacheError::Calibration`] if the calibration has no constants
    /// that fit the layer, or the device's `OutOfMemory`.
    ///
    /// [`CacheSpecBuilder::late_layers`]: crate::spec::CacheSpecBuilder::late_layers
    /// [`PlanError::RowsUnwritten`]: crate::error::PlanError::RowsUnwritten
    /// [`PlanError::UnknownLayer`]: crate::error::PlanError::UnknownLayer
    pub fn allocate_layer(&mut self, layer: impl Into<LayerId>) -> Result<bool, CacheError> {
        let layer = layer.into();
        self.recover();
        let (group, index) = self.state.locate(layer)?;
        let storage = self.storages.get_mut(group).invariant(STORAGE);
        if storage.is_allocated(index) {
            return Ok(false);
        }
        let spec = self.state.spec().groups().get(group).invariant(STORAGE);
        let constants = self.constants.layer(layer, spec.layouts())?;
        let constants = constants.each_ref().map(Option::as_ref);
        // Such a spec counts one layer.
        let reserved = self.backend.reserve_planes(self.state.spec().memory().all_bytes())?;
        let device = (&self.backend, &mut self.queue);
        let is_new = storage.allocate_with(device, index, constants)?;
        if is_new {
            self.reserved.push(reserved);
            self.state.note_late(layer);
        }
        Ok(is_new)
    }

    /// Returns the planes of the group with an index from the spec.
    fn storage_at(&self, index: usize) -> &KvStorage<B::Buffer> {
        self.storages.get(index).invariant(STORAGE)
    }

    /// Zeroes the blocks that lost their last holder or their content, if the spec says so
    /// ([`wipe_on_release`](crate::spec::CacheSpecBuilder::wipe_on_release)). The queue waits for
    /// pending reads of these blocks. Every call that hands out blocks does this first: call it to
    /// zero them earlier.
    ///
    /// # Errors
    /// The device's. Blocks that are left wait for the next call, and none is written before.
    pub fn wipe(&mut self) -> Result<(), DeviceError> {
        self.recover();
        self.wipe_released()
    }

    /// Does what [`Self::wipe`] does, while a step begins or is open.
    fn wipe_released(&mut self) -> Result<(), DeviceError> {
        self.wait_for_reads()?;
        self.restore()?;
        while let Some(&(group, block)) = self.state.unwiped().last() {
            let Self { queue, storages, states, snapshots, .. } = self;
            let all = storages.iter().chain(states.iter()).map(Some);
            let mut all = all.chain(snapshots.iter().map(Option::as_ref));
            let storage = all.nth(usize::from(group.0)).flatten().invariant(STORAGE);
            for plane in storage.view().planes() {
                let (segment, offset) = plane.layout().locate(block.0);
                let buffer = plane.segment(segment).invariant("a block lies in a segment");
                queue.zero(buffer, offset, plane.layout().block_bytes())?;
            }
            self.state.pop_unwiped();
        }
        Ok(())
    }
}

const STORAGE: &str = "every group of the spec has its planes";
