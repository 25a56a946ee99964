//! Pinned prefixes, priorities of cached blocks, events and changes.
use hashbrown::HashMap;

use crate::block::BlockChange;
use crate::cache::state::snapshots::snapshots_of;
use crate::cache::state::start::Lookup;
use crate::cache::state::{CacheState, Group, StartOptions, group_id};
use crate::error::PlanError;
use crate::events::{Event, EventKind, Snapshot, StoredBlock, Tier};
use crate::eviction::{EvictionPolicy, Priority};
use crate::ids::{BlockId, GroupId};
use crate::invariant::Invariant;
use crate::num::to_u32;
use crate::reuse::IndexedBlock;

/// Identifies a pinned prefix.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PinId(u64);

/// A pinned prefix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "a name and what it names")]
pub struct Pin {
    /// The ID for [`KvCache::unpin`](crate::KvCache::unpin).
    pub id: PinId,
    /// Pinned tokens: fewer than the prefix has if fewer are cached. Up to a block boundary, or to
    /// a snapshot of the recurrent states, which is pinned too.
    pub tokens: u32,
}

/// Blocks held by pins, group by group.
#[derive(Debug, Default)]
pub(super) struct Pins {
    next: u64,
    /// Number of changes.
    revision: u64,
    held: HashMap<PinId, Vec<(usize, BlockId)>>,
}

impl Pins {
    pub(super) fn blocks(&self) -> impl Iterator<Item = (usize, BlockId)> + '_ {
        self.held.values().flatten().copied()
    }
}

impl CacheState {
    /// Pins the cached blocks of a prefix until [`Self::unpin`]: see
    /// [`KvCache::pin_prefix`](crate::KvCache::pin_prefix).
    pub(in crate::cache) fn pin_prefix(
        &mut self,
        tokens: &[u32],
        options: StartOptions<'_>,
    ) -> Pin {
        let mut lookup = self.look_up_whole(tokens, &options);
        // A block that the open step has not written yet may never be.
        while let Some(written) = self.written_before(&lookup) {
            let tokens = tokens.get(..crate::num::to_usize(written)).unwrap_or(tokens);
            lookup = self.look_up_whole(tokens, &options);
        }
        let mut blocks = Vec::new();
        // A state is of use with the rows of all tokens before it alone.
        let with_part = !lookup.found.states.is_empty() && lookup.found.part > 0;
        for (index, group) in self.groups.iter_mut().enumerate() {
            let map = group.slot_map();
            let needed = lookup.found.needed(index, group.window, &map);
            for block in needed.iter(with_part).flatten() {
                group.pool.reuse(block);
                blocks.push((index, block));
            }
        }
        let tokens = if with_part { lookup.found.tokens() } else { lookup.found.whole };
        let first = self.groups.len() + self.states.len();
        let snapshots = self.states.iter_mut().filter_map(|group| group.snapshots.as_mut());
        for ((snapshots, block), index) in snapshots.zip(&lookup.found.states).zip(first..) {
            snapshots.pool.reuse(*block);
            blocks.push((index, *block));
        }
        let id = PinId(self.pins.next);
        self.pins.next += 1;
        self.pins.revision += 1;
        self.pins.held.insert(id, blocks);
        self.note_peak();
        Pin { id, tokens }
    }

    /// Returns the tokens before the first block of a hit that the open step has not written yet;
    /// `None` if all are written.
    fn written_before(&self, lookup: &Lookup) -> Option<u32> {
        if !self.open.is_open {
            return None;
        }
        let unwritten = |group: &Group| {
            let map = group.slot_map();
            let needed = lookup.found.needed(group.id, group.window, &map);
            let mut blocks = needed.iter(false).zip(0..);
            let first = blocks.find(|(block, _)| block.is_some_and(|b| group.pool.is_unwritten(b)));
            first.map(|(_, at)| map.tokens(at))
        };
        self.groups.iter().filter_map(unwritten).min()
    }

    /// Unpins a prefix; `false` for one that is not pinned.
    pub(in crate::cache) fn unpin(&mut self, pin: PinId) -> Result<bool, PlanError> {
        self.check_closed("unpin")?;
        let Some(blocks) = self.pins.held.remove(&pin) else {
            return Ok(false);
        };
        self.pins.revision += 1;
        blocks.into_iter().rev().for_each(|(index, block)| self.release_held(index, block));
        Ok(true)
    }

    /// Removes a holder of a block of rows, or of a snapshot.
    fn release_held(&mut self, index: usize, block: BlockId) {
        let Self { groups, states, unwiped, .. } = self;
        match snapshots_of(states, group_id(index)) {
            Some(snapshots) => snapshots.release(block, unwiped),
            None => groups.at_mut(index).release_holder(block, unwiped),
        }
    }

    /// Returns a number that changes with every pin and unpin: [`Self::pinned_blocks`] is the same
    /// while the number is.
    pub fn pins_revision(&self) -> u64 {
        self.pins.revision
    }
    /// Iterates over the blocks of a group that pins hold; a block occurs once for each of its
    /// pins.
    pub fn pinned_blocks(&self, group: GroupId) -> impl Iterator<Item = BlockId> + '_ {
        let index = usize::from(group.0);
        self.pins.blocks().filter(move |(of, _)| *of == index).map(|(_, block)| block)
    }

    /// Replaces the eviction policy of a group: see
    /// [`KvCache::set_policy`](crate::KvCache::set_policy).
    pub(in crate::cache) fn set_policy(
        &mut self,
        group: GroupId,
        policy: Box<dyn EvictionPolicy>,
    ) -> bool {
        let group = self.groups.get_mut(usize::from(group.0));
        group.is_some_and(|group| group.pool.set_policy(policy))
    }

    /// Sets the priority of the cached blocks of a prompt; returns the number of their tokens.
    pub(in crate::cache) fn prioritise_prefix(
        &mut self,
        tokens: &[u32],
        options: StartOptions<'_>,
        priority: Priority,
    ) -> u32 {
        let lookup = self.look_up_whole(tokens, &options);
        for (group, found) in self.groups.iter_mut().zip(&lookup.found.groups) {
            for block in found.blocks.iter().flatten() {
                group.pool.set_priority(*block, priority, &mut self.ledger);
            }
        }
        lookup.found.whole
    }

    /// Returns the events since the last call.
    pub(in crate::cache) fn take_events(&mut self) -> Vec<Event> {
        self.ledger.take_events()
    }

    /// Appends an event of a lower tier: see [`KvCache::announce`](crate::KvCache::announce).
    pub(in crate::cache) fn announce(&mut self, kind: EventKind) -> bool {
        self.ledger.announce(kind)
    }

    /// Moves the changes of blocks to `out`: see
    /// [`KvCache::drain_changes`](crate::KvCache::drain_changes).
    pub(in crate::cache) fn drain_changes(&mut self, out: &mut Vec<BlockChange>) -> bool {
        self.ledger.drain_changes(out)
    }

    /// Iterates over the blocks of a group with reusable content that are full and written, ordered
    /// by ID: those that may be copied to other memory. Those of a [group of
    /// snapshots](crate::CacheSpec::snapshot_groups) are states. None for an unknown group.
    pub fn stored_blocks(&self, group: GroupId) -> impl Iterator<Item = IndexedBlock<'_>> + '_ {
        let blocks = self.pool(group).into_iter().flat_map(|pool| pool.index().iter());
        blocks.filter(|block| !block.is_partial && !block.is_unwritten)
    }

    /// Returns everything that can be reused now, for subscribers that lost events or joined late.
    /// Apply it, then the events from [`Snapshot::next_id`] on.
    pub fn snapshot(&self) -> Snapshot {
        let mut blocks = Vec::new();
        let rows = self.groups.iter().map(|group| (group.group_id(), &group.pool));
        let states = self.states.iter().filter_map(|of| of.snapshots.as_ref());
        let states = states.map(|snapshots| (snapshots.group(), &snapshots.pool));
        for (group, pool) in rows.chain(states) {
            let full = pool.index().iter().filter(|block| !block.is_partial);
            blocks.extend(full.map(|block| {
                let (salt, adapter) = self
                    .ledger
                    .namespace(block.namespace)
                    .invariant("the namespace of indexed content has users");
                StoredBlock {
                    group,
                    key: block.key,
                    parent: block.parent,
                    index: block.index,
                    tokens: block.tokens.into(),
                    tier: Tier::Device,
                    priority: block.priority,
                    salt: salt.into(),
                    adapter,
                }
            }));
        }
        Snapshot { next_id: self.ledger.next_event(), blocks }
    }

    /// Looks up a whole prompt, including its last token.
    pub(super) fn look_up_whole(&self, tokens: &[u32], options: &StartOptions<'_>) -> Lookup {
        let mut lookup = Lookup::default();
        let space = self.ledger.find_namespace(options.salt, options.adapter);
        self.look_up_to(&mut lookup, (space, to_u32(tokens.len())), tokens, options);
        lookup
    }
}
