//! The cache: the one place where pool, tables, sequences, plans and a backend meet.
//!
//! [`KvCache`] owns the life of sequences; [`Step`] is one forward pass over some of them. Every
//! call checks its arguments before it changes anything, and a step applies whole or not at all.
mod admission;
mod commit;
mod constants;
mod demand;
mod end;
mod front;
mod history;
mod keep;
mod late;
mod lookup;
mod open;
mod recalibrate;
mod reserve;
mod rows;
mod sequences;
mod shared_list;
mod start;
mod stats;
mod step;
mod store;
#[cfg(test)]
mod tests;
mod undo;
mod usage;

use std::ops::Range;
use std::sync::Arc;

use crate::backend::{AnyBackend, Backend, Queue};
use crate::block::{BlockPool, BlockTables, Ledger};
use crate::calibration::Calibration;
use crate::error::{CacheError, DeviceError, PlanError};
use crate::eviction::{Clock, SystemClock};
use crate::ids::{BlockId, GroupId, LayerId, SequenceId};
use crate::num::to_u64;
use crate::plan::PlanBuffers;
use crate::slot_map::SlotMap;
use crate::spec::{CacheSpec, GroupSpec, Window};
use crate::storage::KvStorage;
pub use admission::{Admission, BlockDemand};
pub use keep::{Pin, PinId};
use open::OpenStep;
use sequences::Sequences;
pub use start::StartOptions;
pub use stats::Stats;
pub use step::{Step, StepInput};
pub use usage::Usage;

/// A KV cache on one device.
///
/// ```
/// use kv_core::backend::NullBackend;
/// use kv_core::{CacheSpec, KvCache, SequenceId, StartOptions, StepInput};
///
/// let spec = CacheSpec::builder().layers(1).kv_heads(1).head_dim(4).paged(16, 8).build()?;
/// let mut cache = KvCache::new(NullBackend::new(), spec)?;
/// let seq = SequenceId(7);
/// cache.start(seq, &[1, 2, 3], StartOptions::default())?;
/// let step = cache.begin_step(&[StepInput::tokens(seq, &[1, 2, 3])])?;
/// assert_eq!(step.positions(), [0, 1, 2]);
/// drop(step); // nothing was written, so nothing happened
/// assert_eq!(cache.seq_len(seq), Some(0));
/// # Ok::<(), kv_core::CacheError>(())
/// ```
#[derive(Debug)]
pub struct KvCache<B: Backend = AnyBackend> {
    backend: B,
    queue: B::Queue,
    spec: CacheSpec,
    constants: constants::Constants,
    groups: Vec<Group<B::Buffer>>,
    /// Where the blocks of tokens end, for each of the ways groups have.
    chains: Vec<SlotMap>,
    ledger: Ledger,
    has_windows: bool,
    /// Buffers of the last lookup.
    lookup: start::Lookup,
    pins: keep::Pins,
    stats: Stats,
    sequences: Sequences,
    open: OpenStep,
    /// Buffers of plans outside a step.
    scratch: PlanBuffers,
    /// Blocks that lost their last holder and wait to be zeroed.
    unwiped: Vec<(usize, BlockId)>,
    /// What a failed exchange of constants has yet to put back.
    unrestored: Vec<recalibrate::Saved<B::Buffer>>,
    /// Rows that layers on demand lack.
    late: late::Late,
    blocks_peak: u32,
}

/// Pool, tables and planes of one group of layers.
#[derive(Debug)]
struct Group<Buf> {
    id: usize,
    pool: BlockPool,
    tables: BlockTables,
    storage: KvStorage<Buf>,
    window: Option<Window>,
    /// Groups whose blocks end at the same tokens share the keys of their blocks: index in
    /// [`KvCache::chains`].
    chain: usize,
}

impl<Buf> Group<Buf> {
    /// Entries of a row that fell out of the window.
    fn vacant(&self, row: u32) -> Range<u32> {
        let live = self.tables.live(row);
        if live == 0 { 0..0 } else { lookup::sink_blocks(self.window, &slot_map(self))..live }
    }
}

impl<B: Backend> KvCache<B> {
    /// Reserves all memory of `spec` on `backend`; layers on demand get theirs later. Transforms
    /// have no mean and no balance.
    ///
    /// # Errors
    /// [`CacheError::Calibration`] when a format needs a given scale; [`CacheError::Device`]:
    /// `OutOfMemory`, or `Unsupported` when the device does not take a `head_dim` of the spec or
    /// one block exceeds what it can bind, which is found before anything is allocated.
    pub fn new(backend: B, spec: CacheSpec) -> Result<Self, CacheError> {
        Self::build(backend, spec, None)
    }

    /// As [`Self::new`], with the scales and the transform's constants of a model.
    ///
    /// # Errors
    /// As [`Self::new`]; [`CacheError::Calibration`] when `calibration` does not fit `spec`.
    pub fn with_calibration(
        backend: B,
        spec: CacheSpec,
        calibration: Calibration,
    ) -> Result<Self, CacheError> {
        Self::build(backend, spec, Some(calibration))
    }

    fn build(
        backend: B,
        spec: CacheSpec,
        calibration: Option<Calibration>,
    ) -> Result<Self, CacheError> {
        let constants = constants::Constants::new(&spec, calibration)?;
        // Every group is checked before the first one takes memory.
        let cut = |group: &GroupSpec| KvStorage::new(&backend, *group.layouts());
        let storages = spec.groups().iter().map(cut).collect::<Result<Vec<_>, _>>()?;
        let mut queue = backend.queue()?;
        let clock: Arc<dyn Clock> = Arc::new(SystemClock::new());
        let mut groups = Vec::with_capacity(spec.groups().len());
        let mut chains = Vec::new();
        for (group, mut storage) in spec.groups().iter().zip(storages) {
            for (layer, index) in group.layers().iter().zip(0..) {
                let constants = constants.layer(*layer, group.layouts())?;
                let constants = constants.each_ref().map(Option::as_ref);
                storage.allocate_with((&backend, &mut queue), index, constants)?;
            }
            let tables =
                BlockTables::new(group.num_blocks(), if group.is_contiguous() { 1 } else { 4 });
            let num_blocks = group.num_blocks();
            let policy = spec.eviction().policy(num_blocks, &clock);
            let id = GroupId(u8::try_from(groups.len()).unwrap_or(u8::MAX));
            let pool = BlockPool::new(id, num_blocks, group.block_size(), policy);
            let map = *group.slot_map();
            let chain = chains.iter().position(|known| *known == map).unwrap_or_else(|| {
                chains.push(map);
                chains.len().saturating_sub(1)
            });
            let (index, window) = (groups.len(), group.window());
            groups.push(Group { id: index, pool, tables, storage, window, chain });
        }
        let open = OpenStep::new(groups.len());
        let ledger = Ledger::new(constants.key(), spec.events());
        Ok(Self {
            ledger,
            chains,
            has_windows: groups.iter().any(|group| group.window.is_some()),
            lookup: start::Lookup::default(),
            pins: keep::Pins::default(),
            stats: Stats::default(),
            backend,
            queue,
            spec,
            constants,
            groups,
            sequences: Sequences::default(),
            open,
            scratch: PlanBuffers::default(),
            unwiped: Vec::new(),
            unrestored: Vec::new(),
            late: late::Late::default(),
            blocks_peak: 0,
        })
    }

    /// The geometry.
    pub fn spec(&self) -> &CacheSpec {
        &self.spec
    }
    /// What the bytes of a block depend on besides its tokens: formats, transforms, sinks, and the
    /// constants, hashed (XXH3). Blocks may go from one cache to another only where this is equal
    /// and the model is the same.
    pub fn encoding_key(&self) -> u128 {
        self.constants.key()
    }
    /// The device.
    pub fn backend(&self) -> &B {
        &self.backend
    }
    /// The lane all work of this cache is recorded on, for callers that order their own work with
    /// it.
    pub fn queue_mut(&mut self) -> &mut B::Queue {
        self.recover();
        &mut self.queue
    }

    /// Gives a layer its memory; `false` when it had it already.
    ///
    /// A layer that comes late lacks the rows of all tokens cached before. Nothing cached so far
    /// can be reused from then on, sequences that have tokens offer nothing more, and attention
    /// and gathers of theirs that would read the missing rows are refused
    /// ([`PlanError::RowsUnwritten`]). Give all layers their memory before the first step, or start
    /// such sequences anew.
    ///
    /// # Errors
    /// [`PlanError::UnknownLayer`], [`CacheError::Calibration`] when the calibration has no
    /// constants that fit the layer, or the device's `OutOfMemory`.
    pub fn allocate_layer(&mut self, layer: impl Into<LayerId>) -> Result<bool, CacheError> {
        let layer = layer.into();
        self.recover();
        let (group, index) = self.locate(layer)?;
        let Some(group) = self.groups.get_mut(group) else {
            return Ok(false);
        };
        let constants = self.constants.layer(layer, group.storage.layouts())?;
        let constants = constants.each_ref().map(Option::as_ref);
        let device = (&self.backend, &mut self.queue);
        let is_new = group.storage.allocate_with(device, index, constants)?;
        if is_new {
            self.note_late(layer);
        }
        Ok(is_new)
    }

    /// Committed tokens of a sequence, `None` for an unknown one.
    pub fn seq_len(&self, sequence: SequenceId) -> Option<u32> {
        self.sequences.get(sequence).ok().map(|(_, state)| state.len)
    }
    /// Whether a sequence is live.
    pub fn contains(&self, sequence: SequenceId) -> bool {
        self.sequences.contains(sequence)
    }
    /// Live sequences, in no particular order.
    pub fn sequences(&self) -> impl Iterator<Item = SequenceId> + '_ {
        self.sequences.ids()
    }
    /// Number of live sequences.
    pub fn num_sequences(&self) -> usize {
        self.sequences.len()
    }
    /// Blocks of a sequence in token order, reserved ones included.
    pub fn block_table(&self, sequence: SequenceId, group: GroupId) -> Option<&[BlockId]> {
        let row = self.sequences.row(sequence).ok()?;
        Some(self.groups.get(usize::from(group.0))?.tables.row(row))
    }
    /// Blocks of a group that nobody holds.
    pub fn free_blocks(&self, group: GroupId) -> u32 {
        self.groups.get(usize::from(group.0)).map_or(0, |group| group.pool.num_free())
    }
    /// Planes of one group.
    pub fn storage(&self, group: GroupId) -> Option<&KvStorage<B::Buffer>> {
        self.groups.get(usize::from(group.0)).map(|group| &group.storage)
    }
    /// Pool of one group.
    pub fn pool(&self, group: GroupId) -> Option<&BlockPool> {
        self.groups.get(usize::from(group.0)).map(|group| &group.pool)
    }

    /// Group index and index inside the group of a layer.
    fn locate(&self, layer: LayerId) -> Result<(usize, usize), PlanError> {
        let num_layers = self.spec.num_layers();
        let place = self.spec.locate(layer).ok_or(PlanError::UnknownLayer { layer, num_layers })?;
        Ok((usize::from(place.0.0), place.1))
    }

    fn check_new(&self, sequence: SequenceId) -> Result<(), PlanError> {
        if self.sequences.contains(sequence) {
            return Err(PlanError::SequenceExists { sequence });
        }
        let (got, max) =
            (to_u64(self.sequences.len()).saturating_add(1), self.spec.max_sequences());
        if got > u64::from(max) {
            return Err(PlanError::TooMany { what: "sequences", got, max: u64::from(max) });
        }
        Ok(())
    }

    /// A row for a new sequence, empty in all tables.
    fn insert(&mut self, sequence: SequenceId, len: u32) -> Result<u32, PlanError> {
        let row = self.sequences.insert(sequence, len)?;
        let rows = self.sequences.num_rows();
        for group in &mut self.groups {
            group.tables.ensure_rows(rows);
        }
        Ok(row)
    }

    /// Zeroes blocks that wait for it, behind whatever waits to be put back; those left by a device
    /// failure wait for the next call, and none is handed out before.
    fn wipe(&mut self) -> Result<(), DeviceError> {
        self.restore()?;
        while let Some(&(group, block)) = self.unwiped.last() {
            if let Some(group) = self.groups.get(group) {
                for plane in group.storage.view().planes() {
                    let (segment, offset) = plane.layout().locate(block.0);
                    if let Some(buffer) = plane.segment(segment) {
                        self.queue.zero(buffer, offset, plane.layout().block_bytes())?;
                    }
                }
            }
            self.unwiped.pop();
        }
        Ok(())
    }

    fn note_peak(&mut self) {
        let used = self.groups.iter().map(|group| group.pool.num_used()).sum();
        self.blocks_peak = self.blocks_peak.max(used);
    }
}

fn slot_map<Buf>(group: &Group<Buf>) -> SlotMap {
    let [k, _] = group.storage.layouts();
    *k.slot_map()
}

fn block_size<Buf>(group: &Group<Buf>) -> u32 {
    let [k, _] = group.storage.layouts();
    k.block_size()
}

/// Appends a block that a pool of the same size handed out.
fn push_held(tables: &mut BlockTables, row: u32, block: Option<BlockId>) {
    let pushed = block.is_some_and(|block| tables.push(row, block).is_ok());
    debug_assert!(pushed, "the pool was asked for its free blocks and the row was made before");
}
