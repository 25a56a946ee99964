//! Snapshots: copies of recurrent states that other prompts with the same tokens go on from.
//!
//! A state is worth something only behind exactly the tokens that it was computed from. A snapshot
//! is therefore named as a block is, by the key of the blocks before and the tokens behind them,
//! and may end at any position; unlike a block it is not replaced by one with more tokens. It is a
//! block of one more pool, evicted by a policy of its own.
use crate::block::{BlockPool, Fill, Ledger};
use crate::cache::state::history::History;
use crate::cache::state::lookup::PrefixHit;
use crate::cache::state::states::{Current, StateGroup};
use crate::cache::state::{CacheState, Group, Unwiped};
use crate::error::PlanError;
use crate::ids::{BlockId, GroupId, SequenceId};
use crate::invariant::Invariant;
use crate::num::to_usize;
use crate::reuse::{Content, Offered};
use crate::slot_map::SlotMap;
use crate::spec::PrefixReuse;

/// The snapshots of the states of some layers.
#[derive(Debug)]
pub(super) struct Snapshots {
    group: GroupId,
    pub(super) pool: BlockPool,
    /// Number of sequences that went on from each, up to 255.
    uses: Vec<u8>,
    /// The most along one text.
    per_path: Option<u32>,
}

/// The keys that name snapshots: those of the blocks of a group.
#[derive(Debug, Clone, Copy)]
pub(super) struct Names {
    pub(super) chain: usize,
    pub(super) map: SlotMap,
}

impl Snapshots {
    pub(super) fn new(group: GroupId, pool: BlockPool, per_path: Option<u32>) -> Self {
        let uses = vec![0; to_usize(pool.num_blocks())];
        Self { group, pool, uses, per_path }
    }

    pub(super) fn group(&self) -> GroupId {
        self.group
    }

    /// Adds a holder that keeps a snapshot.
    pub(super) fn retain(&mut self, block: BlockId) {
        self.pool.retain(block);
    }
    /// Removes a holder.
    pub(super) fn release(&mut self, block: BlockId, unwiped: &mut Unwiped) {
        if self.pool.release(block) {
            unwiped.note(self.group, block);
        }
    }
    /// Adds a holder for a sequence that goes on from a snapshot.
    fn reuse(&mut self, block: BlockId) {
        self.pool.reuse(block);
        let uses = self.uses.get_mut(to_usize(block.0)).invariant("a snapshot of the pool");
        // Only one and more than one differ.
        *uses = uses.saturating_add(1);
    }
    /// Takes a block for a new snapshot; `None` if sequences and pins hold all.
    pub(super) fn take(&mut self, ledger: &mut Ledger) -> Option<BlockId> {
        let block = self.pool.allocate(ledger)?.block;
        *self.uses.get_mut(to_usize(block.0)).invariant("a snapshot of the pool") = 0;
        Some(block)
    }
    /// Removes a snapshot without holders from the index; `false` if it has one.
    fn forget_idle(&mut self, block: BlockId, ledger: &mut Ledger, unwiped: &mut Unwiped) -> bool {
        let is_idle = self.pool.is_idle(block);
        if is_idle && self.pool.forget(block, ledger) {
            unwiped.note(self.group, block);
        }
        is_idle
    }
    /// Removes snapshots of the first `len` tokens of a text, but the longest, until there are no
    /// more than a text may have: first those that one text alone went on from, then the others,
    /// and of each kind the shortest first. Those with holders stay.
    fn bound(
        &mut self,
        (history, names, len): (&mut History, &Names, u32),
        ledger: &mut Ledger,
        unwiped: &mut Unwiped,
    ) {
        let Some(most) = self.per_path else {
            return;
        };
        let mut all = Vec::new();
        let mut limit = Some(len);
        while let Some((block, at)) = limit.and_then(|limit| self.longest(history, names, limit)) {
            all.push(block);
            limit = at.checked_sub(1);
        }
        let mut surplus = all.len().saturating_sub(to_usize(most));
        if surplus == 0 {
            return;
        }
        let is_shared = |block: &BlockId| self.uses.get(to_usize(block.0)).is_some_and(|n| *n > 1);
        let shorter = all.iter().skip(1).rev().copied();
        let (shared, passed): (Vec<_>, Vec<_>) = shorter.partition(is_shared);
        for block in passed.into_iter().chain(shared) {
            if surplus > 0 && self.forget_idle(block, ledger, unwiped) {
                surplus -= 1;
            }
        }
    }
    /// Removes all snapshots from the index.
    pub(super) fn clear(&mut self, ledger: &mut Ledger, unwiped: &mut Unwiped) {
        for block in self.pool.clear(ledger) {
            unwiped.note(self.group, block);
        }
    }

    /// Finds the longest snapshot behind at most `limit` tokens of a prompt, and its length.
    pub(super) fn longest(
        &self,
        history: &mut History,
        names: &Names,
        limit: u32,
    ) -> Option<(BlockId, u32)> {
        let Names { chain, map } = names;
        let full = map.full_blocks(limit);
        history.make_keys(*chain, map, full);
        (0..=full).rev().find_map(|index| {
            // Nearly every block ends without a snapshot in it.
            let parent = history.parent(*chain, index)?;
            if !self.pool.index().has_children(parent) {
                return None;
            }
            let end = map.tokens(index + 1).min(limit);
            let Content { parent, namespace, tokens, contents, .. } =
                history.partial(*chain, map, (index, end))?;
            let found = self.pool.index().longest_whole(parent, namespace, (tokens, contents));
            found.map(|(block, len)| (block, map.tokens(index) + len))
        })
    }
}

impl Names {
    /// Returns the content of a snapshot behind the first `len` tokens of a sequence; `None` if
    /// their ids are unknown.
    fn content<'a>(&self, history: &'a mut History, len: u32) -> Option<Content<'a>> {
        let Self { chain, map } = self;
        let full = map.full_blocks(len);
        history.make_keys(*chain, map, full);
        if map.tokens(full) < len {
            return history.partial(*chain, map, (full, len));
        }
        history.full(*chain, map, full.checked_sub(1)?)
    }
}

impl PrefixHit {
    /// Shortens a hit of rows to the longest one behind which every group of states has a snapshot.
    pub(super) fn agree_with_states(
        &mut self,
        (groups, states, names): (&[Group], &[StateGroup], &Names),
        history: &mut History,
        backoff: u32,
        reuse: PrefixReuse,
    ) {
        self.rows = self.tokens();
        let mut limit = self.rows;
        while let Some((found, len)) = longest_of_all(states, history, names, limit) {
            let whole = self.agree(groups, len, backoff);
            (self.whole, self.part) = (whole, 0);
            self.groups.iter_mut().for_each(|found| found.donor = None);
            if whole < len && reuse == PrefixReuse::Partial && backoff == 0 {
                self.find_part(groups, history, len);
            }
            if self.tokens() == len {
                self.states = found;
                return;
            }
            limit = len - 1;
        }
        (self.whole, self.part) = (0, 0);
        self.groups.iter_mut().for_each(|found| found.donor = None);
    }
}

/// A copy of a state that the device makes.
#[derive(Debug, Clone, Copy)]
pub(in crate::cache) struct TakenSnapshot {
    /// Index of the group of states.
    pub(in crate::cache) group: usize,
    /// The slot that is copied, and the block for the copy.
    pub(in crate::cache) slot: u32,
    pub(in crate::cache) block: BlockId,
    /// The tokens behind which the state is: the first `len` of a row.
    row: u32,
    len: u32,
}

const TAKEN: &str = "a snapshot was taken of a group that has some";

/// Returns the snapshots with the number of a group; `None` for that of a group with rows.
pub(super) fn snapshots_of(states: &mut [StateGroup], group: GroupId) -> Option<&mut Snapshots> {
    let mut all = states.iter_mut().filter_map(|of| of.snapshots.as_mut());
    all.find(|of| of.group() == group)
}

impl CacheState {
    pub(super) fn names(&self) -> Names {
        let first = self.groups.at(0);
        Names { chain: first.chain, map: first.slot_map() }
    }

    /// Returns the pool of the snapshots with this id.
    pub(super) fn snapshot_pool(&self, group: GroupId) -> Option<&BlockPool> {
        let mut all = self.states.iter().filter_map(|of| of.snapshots.as_ref());
        all.find(|snapshots| snapshots.group == group).map(|snapshots| &snapshots.pool)
    }

    /// Returns the next length at which a step of a sequence should end, so that its recurrent
    /// states are kept there for other prompts. `None` for an unknown sequence and without further
    /// stops; without states there are none.
    ///
    /// Stops are in front of the last token of a prompt, so that the same prompt again computes
    /// only that; where its rows were cached and its state was not, so that a third prompt that
    /// branches off there finds both; and at
    /// [`StartOptions::with_stops`](crate::StartOptions::with_stops). The end of a sequence needs
    /// no stop. A step that ends later keeps a state at a stop only if the tokens after the stop
    /// are its [drafts](crate::StepInput::with_drafts).
    pub fn next_stop(&self, sequence: SequenceId) -> Option<u32> {
        let (row, state) = self.sequences.get(sequence).ok()?;
        let stops = self.stops.get(to_usize(row))?;
        stops.iter().copied().find(|stop| *stop > state.len)
    }

    /// Returns the longest length up to `len` behind which the cache keeps recurrent states: a
    /// multiple of every [grid](crate::spec::StatesBuilder::grid), and where prompts reuse whole
    /// blocks alone, the end of one.
    pub fn kept_length(&self, mut len: u32) -> u32 {
        loop {
            let before = len;
            for spec in self.spec.states() {
                len -= len % spec.grid();
            }
            if self.spec.prefix_reuse() == PrefixReuse::FullBlocks {
                let map = self.groups.at(0).slot_map();
                len = map.tokens(map.full_blocks(len));
            }
            if len == before {
                return len;
            }
        }
    }

    /// Adds a stop to a sequence: see [`KvCache::add_stop`](crate::KvCache::add_stop).
    pub(in crate::cache) fn add_stop(
        &mut self,
        sequence: SequenceId,
        len: u32,
    ) -> Result<(), PlanError> {
        self.check_closed("add stop")?;
        let (row, state) = self.sequences.get(sequence)?;
        let (before, stop) = (state.len, self.kept_length(len));
        let has_names = self.sequences.history(row).0.space().is_some();
        if self.states.is_empty() || !has_names || stop <= before {
            return Ok(()); // Nothing is kept there.
        }
        let stops = self.stops.get_mut(to_usize(row)).invariant("a row has stops");
        if let Err(at) = stops.binary_search(&stop) {
            stops.insert(at, stop);
        }
        Ok(())
    }

    /// Lists the stops of a sequence that begins with `reused` tokens of a prompt of `len`, of
    /// which the rows of `rows` tokens were cached.
    pub(super) fn set_stops(
        &mut self,
        row: u32,
        (reused, rows, len): (u32, u32, u32),
        named: &[u32],
    ) {
        let has_names = self.sequences.history(row).0.space().is_some();
        if self.states.is_empty() || !has_names {
            return; // Nothing of the sequence is kept for others.
        }
        let own = [len.saturating_sub(1), rows];
        let stops = own.into_iter().chain(named.iter().copied()).map(|stop| self.kept_length(stop));
        let mut stops: Vec<_> = stops.filter(|stop| *stop > reused).collect();
        stops.sort_unstable();
        stops.dedup();
        *self.stops.get_mut(to_usize(row)).invariant("a row has stops") = stops;
    }

    /// Takes a block for every snapshot that the commit of the open step keeps: behind the stops
    /// that the step passes, where it wrote a state.
    pub(in crate::cache) fn take_snapshots(
        &mut self,
        accepted: Option<&[u32]>,
        taken: &mut Vec<TakenSnapshot>,
    ) {
        if self.states.is_empty() || self.spec.prefix_reuse() == PrefixReuse::Off {
            return;
        }
        for at in 0..self.open.batch.len() {
            let (entry, details) = self.open.entry(at);
            let accepted = accepted.and_then(|accepted| accepted.get(at)).copied();
            // Without a word of the caller, drafts are not certain.
            let kept = accepted.unwrap_or(entry.new_tokens - details.drafts);
            let (cached, end) = (entry.cached, entry.cached + kept);
            let stops = self.stops.get(to_usize(entry.row)).invariant("a row has stops");
            let is_due = |stop: &u32| *stop > cached && *stop <= end;
            let due: Vec<_> = stops.iter().copied().filter(is_due).collect();
            for len in due {
                let slot = |group| self.written_slot(group, at, len - cached);
                let slots: Option<Vec<_>> = (0..self.states.len()).map(slot).collect();
                if let Some(slots) = slots {
                    self.take_at((entry.row, len), &slots, taken);
                }
            }
        }
    }

    /// Takes blocks for snapshots of the states with which a sequence ends.
    pub(in crate::cache) fn take_last(
        &mut self,
        sequence: SequenceId,
        taken: &mut Vec<TakenSnapshot>,
    ) {
        let Ok((row, state)) = self.sequences.get(sequence) else {
            return;
        };
        let (len, is_certain) = (state.len, state.certain >= state.len);
        let is_off = self.spec.prefix_reuse() == PrefixReuse::Off;
        if self.states.is_empty() || is_off || !is_certain || self.kept_length(len) != len {
            return;
        }
        // Other states than those of slots are snapshots already.
        let slots = self.states.iter().map(|group| match group.of_row(row) {
            Current::Slot(slot) => Some(slot),
            Current::Zeros | Current::Snapshot(_) => None,
        });
        if let Some(slots) = slots.collect::<Option<Vec<_>>>() {
            self.take_at((row, len), &slots, taken);
        }
    }

    /// Takes a block in every group of states for those behind `len` tokens of a row.
    fn take_at(&mut self, (row, len): (u32, u32), slots: &[u32], taken: &mut Vec<TakenSnapshot>) {
        let names = self.names();
        let Self { states, sequences, ledger, .. } = self;
        let (_, history) = sequences.both_mut(row);
        let hint = history.hint;
        let Some(content) = names.content(history, len) else {
            return;
        };
        for (group, (of, slot)) in states.iter_mut().zip(slots).enumerate() {
            let snapshots = of.snapshots.as_mut().invariant(TAKEN);
            if let Some(known) = snapshots.pool.find(&content) {
                snapshots.pool.renew(known, hint);
            } else if let Some(block) = snapshots.take(ledger) {
                taken.push(TakenSnapshot { group, slot: *slot, block, row, len });
            }
        }
    }

    /// Makes snapshots findable whose copies the device has recorded.
    pub(in crate::cache) fn publish_snapshots(&mut self, taken: &mut Vec<TakenSnapshot>) {
        let names = self.names();
        let Self { states, sequences, ledger, unwiped, .. } = self;
        for of in taken.drain(..) {
            let (_, history) = sequences.both_mut(of.row);
            let priority = history.priority(of.len - 1);
            let content = names.content(history, of.len);
            let content = content.invariant("the tokens of a snapshot are known");
            let snapshots = states.get_mut(of.group).and_then(|group| group.snapshots.as_mut());
            let snapshots = snapshots.invariant(TAKEN);
            // Two entries of a step may have the same text: the second block is empty again.
            let offered = snapshots.pool.offer(of.block, &content, (priority, Fill::Full), ledger);
            assert!(offered != Offered::Refused, "a snapshot is refused by its pool");
            snapshots.release(of.block, unwiped);
            snapshots.bound((history, &names, of.len), ledger, unwiped);
        }
    }

    /// Gives the blocks of snapshots back that the device has not made.
    pub(in crate::cache) fn drop_snapshots(&mut self, taken: &mut Vec<TakenSnapshot>) {
        let Self { states, unwiped, .. } = self;
        for of in taken.drain(..) {
            let snapshots = states.get_mut(of.group).and_then(|group| group.snapshots.as_mut());
            snapshots.invariant(TAKEN).release(of.block, unwiped);
        }
    }

    /// Lets a sequence begin with the snapshots of a hit, one of every group of states.
    pub(super) fn begin_with(&mut self, row: u32, found: &[BlockId]) {
        let Self { states, unwiped, .. } = self;
        for (group, block) in states.iter_mut().zip(found) {
            group.snapshots.as_mut().invariant(TAKEN).reuse(*block);
            group.set(row, Current::Snapshot(*block), unwiped);
        }
    }

    /// Finds the snapshots behind exactly `asked` tokens of a sequence of `len`; none are needed at
    /// its beginning and at its end. Refuses other lengths, and says which are near.
    pub(super) fn state_at(
        &mut self,
        sequence: SequenceId,
        row: u32,
        (len, asked): (u32, u32),
    ) -> Result<Vec<BlockId>, PlanError> {
        let names = self.names();
        let Self { states, sequences, .. } = self;
        if states.is_empty() || asked == len || asked == 0 {
            return Ok(Vec::new());
        }
        let (_, history) = sequences.both_mut(row);
        match longest_of_all(states, history, &names, asked) {
            Some((found, at)) if at == asked => Ok(found),
            found => {
                let shorter = found.map_or(0, |(_, at)| at);
                Err(PlanError::StateMissing { sequence, asked, shorter, longer: len })
            }
        }
    }

    /// Removes the snapshots of a path after its first `keep` tokens that nothing holds.
    pub(super) fn forget_snapshots(&mut self, history: &mut History, len: u32, keep: u32) -> u32 {
        let names = self.names();
        let Self { states, ledger, unwiped, .. } = self;
        let mut forgotten = 0;
        for snapshots in states.iter_mut().filter_map(|group| group.snapshots.as_mut()) {
            let mut limit = len;
            while let Some((block, at)) = snapshots.longest(history, &names, limit) {
                if at <= keep {
                    break;
                }
                forgotten += u32::from(snapshots.forget_idle(block, ledger, unwiped));
                limit = at - 1;
            }
        }
        forgotten
    }

    /// Removes all snapshots of prompts with a salt that nothing holds.
    pub(super) fn forget_snapshots_with(&mut self, salt: &[u8]) -> u32 {
        let Self { states, ledger, unwiped, .. } = self;
        let mut forgotten = 0;
        for snapshots in states.iter_mut().filter_map(|group| group.snapshots.as_mut()) {
            let has_salt = |namespace| ledger.namespace(namespace).is_some_and(|of| of.0 == salt);
            let all = snapshots.pool.index().iter().filter(|of| has_salt(of.namespace));
            let blocks: Vec<_> = all.map(|of| of.block).collect();
            for block in blocks {
                forgotten += u32::from(snapshots.forget_idle(block, ledger, unwiped));
            }
        }
        forgotten
    }
}

/// Finds the longest prefix of at most `limit` tokens behind which every group of states has a
/// snapshot: the snapshots by group, and their length.
pub(super) fn longest_of_all(
    states: &[StateGroup],
    history: &mut History,
    names: &Names,
    mut limit: u32,
) -> Option<(Vec<BlockId>, u32)> {
    loop {
        let before = limit;
        let mut found = Vec::with_capacity(states.len());
        for group in states {
            let (block, len) = group.snapshots.as_ref()?.longest(history, names, limit)?;
            limit = len;
            found.push(block);
        }
        // The first group may have no snapshot where the last one has its longest.
        if limit == before || states.len() == 1 {
            return Some((found, limit));
        }
    }
}
