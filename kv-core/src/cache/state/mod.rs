//! The bookkeeping of a cache: blocks of sequences, reusable content, and the open step.
//!
//! Owns pools, tables, sequences, the prefix index, pins, holds, imports, counters and plans. Knows
//! no device: it lists the blocks to zero and to copy, and the owner of the memory does that.
mod admission;
mod begin;
mod block_demand;
mod by_kind;
mod commit;
mod history;
mod hold;
mod import;
mod input;
mod invalidation;
mod known;
mod late;
mod lookup;
mod pins;
mod probe;
mod publish;
mod release;
mod reserve;
mod rows;
mod sequences;
mod shared_list;
mod snapshots;
mod start;
mod states;
mod stats;
mod step_state;
#[cfg(test)]
pub(super) mod tests;
mod undo;
mod usage;

use std::ops::{Deref, DerefMut, Range};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::block::{BlockPool, BlockTables, Ledger};
use crate::error::PlanError;
use crate::eviction::{Clock, SystemClock};
use crate::geometry::PlaneLayout;
use crate::ids::{BlockId, GroupId, LayerId, SequenceId};
use crate::invariant::Invariant;
use crate::num::{to_u32, to_u64};
use crate::reuse::NamespaceId;
use crate::slot_map::SlotMap;
use crate::spec::{CacheSpec, GroupSpec, Window};
pub use admission::{Admission, BlockDemand};
pub use by_kind::{GroupUsage, HitByKind};
pub use hold::BlockHold;
pub use import::{Import, ImportBlock};
pub use input::StepInput;
pub use known::SequenceText;
pub use pins::{Pin, PinId};
pub use probe::{PrefixProbe, ProbedBlock};
pub(super) use rows::{Kept, Run, tokens};
pub(super) use snapshots::TakenSnapshot;
pub use start::StartOptions;
pub(super) use states::StatePlace;
pub use stats::Stats;
pub(super) use step_state::Added;
pub use usage::Usage;

/// The bookkeeping of a cache, read-only: lengths and blocks of sequences, free blocks, reusable
/// content, counters. [`KvCache`](crate::KvCache) changes it together with the memory that it
/// describes; [`KvCache::state`](crate::KvCache::state) returns it. The state knows no device and
/// no byte of K or V.
///
/// A simulation of a scheduler or of an eviction policy runs a cache on a
/// [`NullBackend`](crate::backend::NullBackend), which keeps no rows:
///
/// ```
/// use kv::backend::NullBackend;
/// use kv::{CacheSpec, KvCache, SequenceId, StartOptions, StepInput};
///
/// let spec = CacheSpec::builder().layers(1).kv_heads(1).head_dim(4).paged(2, 8).build()?;
/// let mut cache = KvCache::new(NullBackend::new(), spec)?;
/// let prompt = [1, 2, 3, 4, 5];
/// for (id, cached) in [(SequenceId(0), 0), (SequenceId(1), 4)] {
///     assert_eq!(cache.start(id, &prompt, StartOptions::default())?, cached);
///     let mut step = cache.begin_step(&[StepInput::prompt(id, &prompt)])?;
///     step.mark_written();
///     step.commit()?;
/// }
/// assert_eq!(cache.state().usage().blocks_used, 4); // two are shared
/// # Ok::<(), kv::CacheError>(())
/// ```
#[derive(Debug)]
pub struct CacheState {
    spec: CacheSpec,
    encoding_key: u128,
    groups: Groups,
    /// Slot maps of the groups, without duplicates: they determine where the blocks of tokens end.
    chains: Vec<SlotMap>,
    ledger: Ledger,
    has_windows: bool,
    /// Buffers of the last lookup.
    lookup: start::Lookup,
    pins: pins::Pins,
    holds: hold::Holds,
    imports: import::Imports,
    /// A number that no other cache in this process has.
    id: u64,
    /// Another one, which changes when everything cached becomes invalid.
    epoch: u64,
    stats: Stats,
    sequences: sequences::Sequences,
    open: step_state::OpenStep,
    /// Slots of recurrent states, in the order of the spec.
    states: Vec<states::StateGroup>,
    /// Lengths at which each row's sequence should have a snapshot, ascending.
    stops: Vec<Vec<u32>>,
    unwiped: Unwiped,
    /// Rows that late layers lack.
    late: late::Late,
    blocks_peak: u32,
}

/// Pool and tables of one group of layers.
#[derive(Debug)]
struct Group {
    id: usize,
    /// The layout that plans are made with: every plane of the group has the same blocks, in
    /// segments if the device needs them.
    layout: PlaneLayout,
    pool: BlockPool,
    tables: BlockTables,
    window: Option<Window>,
    /// Index in [`CacheState::chains`]: groups whose blocks end at the same tokens share block
    /// keys.
    chain: usize,
}

/// The groups of a cache. Indices come from the spec or from a group, so a wrong one is a bug of
/// this crate; the caller's numbers go through [`CacheState::find_group`].
#[derive(Debug)]
struct Groups(Vec<Group>);

/// Blocks that lost their last holder and wait to be zeroed, if the spec says so.
#[derive(Debug)]
struct Unwiped {
    is_on: bool,
    blocks: Vec<(GroupId, BlockId)>,
}

impl Groups {
    #[inline]
    fn at(&self, index: usize) -> &Group {
        self.0.get(index).invariant(GROUP)
    }
    #[inline]
    fn at_mut(&mut self, index: usize) -> &mut Group {
        self.0.get_mut(index).invariant(GROUP)
    }
    fn have_tail(&self) -> bool {
        self.iter().any(|group| group.slot_map().has_tail())
    }
}

const GROUP: &str = "the index of a group is below the number of groups";

impl Deref for Groups {
    type Target = [Group];
    fn deref(&self) -> &[Group] {
        &self.0
    }
}

impl DerefMut for Groups {
    fn deref_mut(&mut self) -> &mut [Group] {
        &mut self.0
    }
}

impl Unwiped {
    fn note(&mut self, group: GroupId, block: BlockId) {
        if self.is_on {
            self.blocks.push((group, block));
        }
    }
}

impl Group {
    fn new(spec: &CacheSpec, index: usize, chain: usize, clock: &Arc<dyn Clock>) -> Self {
        let group = spec.groups().get(index).invariant(GROUP);
        let num_blocks = group.num_blocks();
        let policy = spec.eviction().policy(num_blocks, clock);
        Self {
            id: index,
            layout: *group.layout(),
            pool: BlockPool::new(group_id(index), num_blocks, group.block_size(), policy),
            tables: BlockTables::new(num_blocks, if group.is_contiguous() { 1 } else { 4 }),
            window: group.window(),
            chain,
        }
    }

    fn group_id(&self) -> GroupId {
        group_id(self.id)
    }
    fn layout(&self) -> &PlaneLayout {
        &self.layout
    }
    fn slot_map(&self) -> SlotMap {
        *self.layout().slot_map()
    }
    fn block_size(&self) -> u32 {
        self.layout().block_size()
    }

    /// Returns the entries of a row that left the window.
    fn vacant(&self, row: u32) -> Range<u32> {
        let live = self.tables.live(row);
        if live == 0 { 0..0 } else { lookup::sink_blocks(self.window, &self.slot_map())..live }
    }

    /// Allocates a block that the demand of the step or of the reserve has counted.
    fn take(&mut self, ledger: &mut Ledger, unwiped: &mut Unwiped) -> BlockId {
        self.try_take(ledger, unwiped).invariant("blocks are counted before they are taken")
    }

    fn try_take(&mut self, ledger: &mut Ledger, unwiped: &mut Unwiped) -> Option<BlockId> {
        let taken = self.pool.allocate(ledger)?;
        if taken.evicted {
            unwiped.note(self.group_id(), taken.block);
        }
        Some(taken.block)
    }

    /// Adds a holder to a block that was found for its content.
    fn hold(&mut self, block: BlockId) {
        assert!(self.pool.hold(block), "block {block} was found for its content and has none");
    }

    /// Removes one holder from a block.
    fn release_holder(&mut self, block: BlockId, unwiped: &mut Unwiped) {
        if self.pool.release(block) {
            unwiped.note(self.group_id(), block);
        }
    }

    /// Removes the content of a block from the index.
    fn forget(&mut self, block: BlockId, ledger: &mut Ledger, unwiped: &mut Unwiped) {
        if self.pool.forget(block, ledger) {
            unwiped.note(self.group_id(), block);
        }
    }

    /// Appends a block of this group's pool to a row.
    fn push(&mut self, row: u32, block: BlockId) {
        self.tables.push(row, block).invariant("a sequence has a row, and the pool its blocks");
    }

    /// Returns entry `at` of a row.
    fn entry(&self, row: u32, at: u32) -> BlockId {
        let block = self.tables.row(row).get(crate::num::to_usize(at)).copied();
        block.invariant("a row has an entry for every block of its sequence")
    }
}

/// Returns a number that no other call in this process returns, so that handles of one cache are
/// not taken for handles of another.
fn unique() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Makes the groups of recurrent states: slots, then snapshots, numbered after the `groups`.
fn state_groups(
    spec: &CacheSpec,
    groups: &[Group],
    clock: &Arc<dyn Clock>,
) -> Vec<states::StateGroup> {
    let first = groups.len();
    let each = spec.states().iter().enumerate();
    let each = each.map(|(index, of)| {
        let snapshots = of.snapshots().map(|snapshots| {
            let (id, count) = (group_id(first + spec.states().len() + index), snapshots.count());
            // A snapshot has the tokens of one block at most.
            let tokens = groups.first().invariant("a spec has a group").block_size();
            let policy = spec.eviction().of_snapshots().policy(count, clock);
            let pool = BlockPool::new(id, count, tokens, policy);
            snapshots::Snapshots::new(id, pool, snapshots.per_path())
        });
        states::StateGroup::new(of, group_id(first + index), snapshots)
    });
    each.collect()
}

fn group_id(index: usize) -> GroupId {
    GroupId(u8::try_from(index).invariant("a spec has at most 255 groups"))
}

impl CacheState {
    /// Creates the state of an empty cache. `encoding_key` identifies the inputs of a block's bytes
    /// besides its tokens ([`Self::encoding_key`]), and is part of the keys of blocks; use any
    /// number if blocks are not exchanged with other caches.
    pub(in crate::cache) fn new(spec: CacheSpec, encoding_key: u128) -> Self {
        let clock: Arc<dyn Clock> = Arc::new(SystemClock::new());
        let mut groups = Vec::with_capacity(spec.groups().len());
        let mut chains = Vec::new();
        for (index, map) in spec.groups().iter().map(GroupSpec::slot_map).enumerate() {
            let chain = chains.iter().position(|known| known == map).unwrap_or_else(|| {
                chains.push(*map);
                chains.len() - 1
            });
            groups.push(Group::new(&spec, index, chain, &clock));
        }
        let states = state_groups(&spec, &groups, &clock);
        let ledger = Ledger::new(encoding_key, spec.events()).with_changes(spec.changes());
        Self {
            ledger,
            states,
            stops: Vec::new(),
            chains,
            has_windows: groups.iter().any(|group| group.window.is_some()),
            lookup: start::Lookup::default(),
            pins: pins::Pins::default(),
            holds: hold::Holds::default(),
            imports: import::Imports::default(),
            id: unique(),
            epoch: unique(),
            stats: Stats::default(),
            sequences: sequences::Sequences::default(),
            open: step_state::OpenStep::new(groups.len()),
            unwiped: Unwiped { is_on: spec.wipe_on_release(), blocks: Vec::new() },
            late: late::Late::default(),
            blocks_peak: 0,
            encoding_key,
            groups: Groups(groups),
            spec,
        }
    }

    /// Sets the layouts with a device's segments that plans are made with; blocks and slots stay.
    pub(super) fn set_layouts(&mut self, layouts: impl IntoIterator<Item = PlaneLayout>) {
        for (group, layout) in self.groups.iter_mut().zip(layouts) {
            group.layout = layout;
        }
    }

    /// Returns a number that no other cache in this process has.
    pub fn id(&self) -> u64 {
        self.id
    }
    /// Returns the geometry.
    pub fn spec(&self) -> &CacheSpec {
        &self.spec
    }
    /// Returns a hash (XXH3) of the inputs of a block's bytes besides its tokens: formats,
    /// transforms, full-precision prefix, and constants. Caches may exchange blocks only if their
    /// hashes are equal and their models are the same.
    pub fn encoding_key(&self) -> u128 {
        self.encoding_key
    }

    /// Returns the committed tokens of a sequence, `None` for an unknown one.
    pub fn seq_len(&self, sequence: SequenceId) -> Option<u32> {
        self.sequences.get(sequence).ok().map(|(_, state)| state.len)
    }
    /// Returns whether a sequence is live.
    pub fn contains(&self, sequence: SequenceId) -> bool {
        self.sequences.contains(sequence)
    }
    /// Iterates over live sequences, in no particular order.
    pub fn sequences(&self) -> impl Iterator<Item = SequenceId> + '_ {
        self.sequences.ids()
    }
    /// Returns the number of live sequences.
    pub fn num_sequences(&self) -> u32 {
        to_u32(self.sequences.len())
    }
    /// Returns the blocks of a sequence in token order, reserved ones included.
    pub fn block_table(&self, sequence: SequenceId, group: GroupId) -> Option<&[BlockId]> {
        let row = self.sequences.row(sequence).ok()?;
        Some(self.find_group(group)?.tables.row(row))
    }
    /// Returns the number of free blocks of a group: empty blocks, and idle blocks, whose content
    /// is evicted on demand. 0 for an unknown group.
    pub fn free_blocks(&self, group: GroupId) -> u32 {
        self.find_group(group).map_or(0, |group| group.pool.num_free())
    }
    /// Returns salt and adapter of a namespace, as [`IndexedBlock`](crate::reuse::IndexedBlock)
    /// names it; `None` once nothing is in it.
    pub fn namespace(&self, id: NamespaceId) -> Option<(&[u8], Option<u64>)> {
        self.ledger.namespace(id)
    }
    /// Returns the pool of one group, or of the snapshots of some layers' states. Their slots have
    /// none.
    pub fn pool(&self, group: GroupId) -> Option<&BlockPool> {
        let of_rows = self.find_group(group).map(|group| &group.pool);
        of_rows.or_else(|| self.snapshot_pool(group))
    }
    /// Returns the window of a group.
    pub(super) fn window(&self, index: usize) -> Option<Window> {
        self.groups.at(index).window
    }
    /// Returns the block tables of one group.
    pub(super) fn tables(&self, index: usize) -> &BlockTables {
        &self.groups.at(index).tables
    }

    /// Returns the group with a caller's number.
    fn find_group(&self, group: GroupId) -> Option<&Group> {
        self.groups.get(usize::from(group.0))
    }

    /// Returns the group index of a layer and the layer's index in the group.
    pub(super) fn locate(&self, layer: LayerId) -> Result<(usize, usize), PlanError> {
        let num_layers = self.spec.num_layers();
        match self.spec.locate(layer) {
            Some((group, index)) => Ok((usize::from(group.0), index)),
            None if layer.0 < num_layers => Err(PlanError::NoRows { layer }),
            None => Err(PlanError::UnknownLayer { layer, num_layers }),
        }
    }

    /// Returns the blocks that must be zeroed before they are handed out, by the setting
    /// [`wipe_on_release`](crate::spec::CacheSpecBuilder::wipe_on_release): the blocks that lost
    /// their last holder or their content. [`Self::pop_unwiped`] removes the last one.
    pub(in crate::cache) fn unwiped(&self) -> &[(GroupId, BlockId)] {
        &self.unwiped.blocks
    }
    /// Records that the last of the [`unwiped`](Self::unwiped) blocks was zeroed, and returns it.
    pub(in crate::cache) fn pop_unwiped(&mut self) -> Option<(GroupId, BlockId)> {
        self.unwiped.blocks.pop()
    }

    fn check_new(&self, sequence: SequenceId) -> Result<(), PlanError> {
        if self.sequences.contains(sequence) {
            return Err(PlanError::SequenceExists { sequence });
        }
        let (got, max) = (to_u64(self.sequences.len()) + 1, self.spec.max_sequences());
        if got > u64::from(max) {
            return Err(PlanError::TooMany { what: "sequences", got, max: u64::from(max) });
        }
        Ok(())
    }

    /// Allocates an empty row for a new sequence in all tables.
    fn insert(&mut self, sequence: SequenceId, len: u32) -> Result<u32, PlanError> {
        let row = self.sequences.insert(sequence, len)?;
        let rows = self.sequences.num_rows();
        for group in &mut *self.groups {
            group.tables.ensure_rows(rows);
        }
        self.states.iter_mut().for_each(|group| group.ensure_rows(rows));
        if !self.states.is_empty() && self.stops.len() < rows {
            self.stops.resize_with(rows, Vec::new);
        }
        Ok(row)
    }

    fn note_peak(&mut self) {
        let used = self.groups.iter().map(|group| group.pool.num_used()).sum();
        self.blocks_peak = self.blocks_peak.max(used);
    }
}
