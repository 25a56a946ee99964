//! Running states of sequences: the slot of each, and the slots that the open step writes.
//!
//! A step reads the slot of a sequence's state and writes the next states to others. The commit
//! makes one of them the sequence's, and every other end of the step frees them: nothing is copied
//! or restored. Forks share a slot, because nothing ever writes to one that a sequence has.
use crate::cache::state::by_kind::GroupUsage;
use crate::cache::state::input::bounded;
use crate::cache::state::snapshots::Snapshots;
use crate::cache::state::step_state::OpenStep;
use crate::cache::state::{CacheState, Unwiped};
use crate::error::{BlocksExhausted, CacheError, OptionProblem, PlanError};
use crate::ids::{BlockId, GroupId, LayerId};
use crate::invariant::Invariant;
use crate::num::{to_u32, to_usize};
use crate::plan::BatchEntry;
use crate::spec::StatesSpec;

/// Slots of the states of some layers.
#[derive(Debug)]
pub(super) struct StateGroup {
    group: GroupId,
    pub(super) snapshots: Option<Snapshots>,
    /// Most draft tokens of an entry.
    drafts: u32,
    num_slots: u32,
    /// Free slots, the next one last.
    free: Vec<u32>,
    /// Sequences and entries of the open step that have each slot.
    holders: Vec<u32>,
    /// The state of each row's sequence.
    current: Vec<Current>,
    open: OpenStates,
}

/// The place of a sequence's state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Current {
    /// None: a sequence begins with zeros.
    #[default]
    Zeros,
    /// A slot that the sequence holds.
    Slot(u32),
    /// A snapshot that the sequence holds, until a step has given it another state.
    Snapshot(BlockId),
}

/// The states of one group in the open step, entry by entry.
#[derive(Debug, Default)]
struct OpenStates {
    entries: Vec<OpenEntryStates>,
    /// Slots that entries write, one entry after another.
    slots: Vec<u32>,
    /// Snapshots that entries begin with.
    restored: Vec<Restored>,
    /// Whether a part was written, `[place in slots][layer][part]`, and the number that were.
    written: Vec<bool>,
    num_written: usize,
}

#[derive(Debug, Clone, Copy)]
struct OpenEntryStates {
    read: Option<u32>,
    /// The slots in the list of the step.
    begin: usize,
    count: u32,
    /// New tokens of the entry.
    new_tokens: u32,
}

impl OpenEntryStates {
    /// Returns the place in the list of the slot for the state behind `tokens` new tokens; `None`
    /// if the step keeps none there.
    fn place(&self, tokens: u32) -> Option<usize> {
        let before = self.new_tokens.checked_sub(tokens).filter(|before| *before < self.count)?;
        Some(self.begin + to_usize(self.count - 1 - before))
    }
}

/// A snapshot that the open step copies to a slot.
#[derive(Debug, Clone, Copy)]
struct Restored {
    entry: usize,
    block: BlockId,
    slot: u32,
}

const SLOT: &str = "a slot is below the number of slots";
const ENTRY: &str = "every entry of a batch has its states";

impl StateGroup {
    pub(super) fn new(spec: &StatesSpec, group: GroupId, snapshots: Option<Snapshots>) -> Self {
        let num_slots = spec.slots();
        Self {
            group,
            snapshots,
            drafts: spec.drafts(),
            num_slots,
            free: (0..num_slots).rev().collect(),
            holders: vec![0; to_usize(num_slots)],
            current: Vec::new(),
            open: OpenStates::default(),
        }
    }

    pub(super) fn ensure_rows(&mut self, rows: usize) {
        if self.current.len() < rows {
            self.current.resize(rows, Current::Zeros);
        }
    }
    pub(super) fn of_row(&self, row: u32) -> Current {
        self.current.get(to_usize(row)).copied().unwrap_or_default()
    }
    /// Sets the state of a row, which holds it already, and releases the one before.
    pub(super) fn set(&mut self, row: u32, to: Current, unwiped: &mut Unwiped) {
        let current = self.current.get_mut(to_usize(row)).invariant("a sequence has a row");
        match std::mem::replace(current, to) {
            Current::Zeros => {}
            Current::Slot(slot) => self.release(slot, unwiped),
            Current::Snapshot(block) => self.snapshots_mut().release(block, unwiped),
        }
    }
    fn snapshots_mut(&mut self) -> &mut Snapshots {
        self.snapshots.as_mut().invariant("a sequence that goes on from a snapshot has some")
    }
    fn hold(&mut self, slot: u32) {
        *self.holders.get_mut(to_usize(slot)).invariant(SLOT) += 1;
    }
    fn release(&mut self, slot: u32, unwiped: &mut Unwiped) {
        let holders = self.holders.get_mut(to_usize(slot)).invariant(SLOT);
        assert!(*holders > 0, "release of slot {slot}, which has no holder");
        *holders -= 1;
        if *holders == 0 {
            self.free.push(slot);
            unwiped.note(self.group, BlockId(slot));
        }
    }

    /// Returns the fill of the slots.
    pub(super) fn usage(&self) -> GroupUsage {
        GroupUsage {
            total: self.num_slots,
            used: self.num_slots - to_u32(self.free.len()),
            cached: 0,
        }
    }

    /// Gives the row of a fork the state of its parent.
    pub(super) fn fork(&mut self, from: u32, to: u32) {
        let state = self.of_row(from);
        match state {
            Current::Zeros => {}
            Current::Slot(slot) => self.hold(slot),
            Current::Snapshot(block) => self.snapshots_mut().retain(block),
        }
        assert!(self.of_row(to) == Current::Zeros, "row {to} was free");
        *self.current.get_mut(to_usize(to)).invariant("a sequence has a row") = state;
    }

    /// Returns the slots that entries take: rows, new tokens and drafts.
    fn needed(&self, entries: impl Iterator<Item = (u32, u32, u32)>) -> u32 {
        // Saturating: those who ask for a demand may name a sequence many times.
        let slots = entries.map(|(row, new, drafts)| {
            let is_restored = matches!(self.of_row(row), Current::Snapshot(_));
            StatesSpec::slots_of_entry(new, drafts).saturating_add(u32::from(is_restored))
        });
        slots.fold(0, u32::saturating_add)
    }

    /// Takes the slots of the entries of a step from `first` on, or changes nothing.
    fn take(&mut self, open: &OpenStep, first: usize) -> Result<(), CacheError> {
        let count = |at: usize| {
            let (BatchEntry { row, new_tokens, .. }, details) = open.entry(at);
            (row, new_tokens, details.drafts)
        };
        let entries = first..open.batch.len();
        let needed = self.needed(entries.clone().map(count));
        let free = to_u32(self.free.len());
        if needed > free {
            return Err(BlocksExhausted { group: self.group, needed, free, evictable: 0 }.into());
        }
        for (entry, (row, new_tokens, drafts)) in entries.clone().zip(entries.map(count)) {
            let begin = self.open.slots.len();
            let count = StatesSpec::slots_of_entry(new_tokens, drafts);
            for _ in 0..count {
                let slot = self.take_one();
                self.open.slots.push(slot);
            }
            let read = match self.of_row(row) {
                Current::Zeros => None,
                Current::Slot(slot) => Some(slot),
                Current::Snapshot(block) => {
                    let slot = self.take_one();
                    self.open.restored.push(Restored { entry, block, slot });
                    Some(slot)
                }
            };
            self.open.entries.push(OpenEntryStates { read, begin, count, new_tokens });
        }
        Ok(())
    }

    fn take_one(&mut self) -> u32 {
        let slot = self.free.pop().invariant("slots are counted before they are taken");
        self.hold(slot);
        slot
    }

    /// Frees the slots of the entries from `first` on.
    pub(super) fn take_back(&mut self, first: usize, unwiped: &mut Unwiped) {
        let Some(entry) = self.open.entries.get(first) else {
            return;
        };
        for slot in self.open.slots.split_off(entry.begin).into_iter().rev() {
            self.release(slot, unwiped);
        }
        self.open.entries.truncate(first);
        while let Some(last) = self.open.restored.pop_if(|of| of.entry >= first) {
            self.release(last.slot, unwiped);
        }
    }

    /// Forgets which states were written.
    fn begin(&mut self) {
        self.open.written.clear();
        self.open.num_written = 0;
    }

    /// Records that the states of all entries behind `tokens` of their new tokens, or behind all
    /// of them, were written: part `index` of `of` in a layer-by-layer list.
    fn mark(&mut self, (index, of): (usize, usize), tokens: Option<u32>) {
        let OpenStates { entries, slots, written, num_written, .. } = &mut self.open;
        written.resize(slots.len() * of, false);
        for entry in entries.iter() {
            let Some(place) = entry.place(tokens.unwrap_or(entry.new_tokens)) else {
                continue;
            };
            let written = written.get_mut(place * of + index).invariant(ENTRY);
            *num_written += usize::from(!std::mem::replace(written, true));
        }
    }

    /// Returns the first part, in a layer-by-layer list of `of` parts, that was not written to the
    /// slot at a place of the list of slots.
    fn unwritten(&self, place: usize, of: usize) -> Option<usize> {
        let written = self.open.written.get(place * of..(place + 1) * of);
        match written {
            Some(written) => written.iter().position(|written| !written),
            None => Some(0),
        }
    }

    /// Makes the state behind the `kept` new tokens of each entry that of its sequence, and frees
    /// the others.
    fn commit(&mut self, open: &OpenStep, kept: impl Fn(usize) -> u32, unwiped: &mut Unwiped) {
        for at in 0..open.batch.len() {
            let (BatchEntry { row, .. }, _) = open.entry(at);
            let tokens = kept(at);
            if tokens == 0 {
                continue;
            }
            let entry = self.open.entries.get(at).invariant(ENTRY);
            let place = entry.place(tokens).invariant("a commit keeps states that were written");
            let slot = *self.open.slots.get(place).invariant(ENTRY);
            self.hold(slot);
            self.set(row, Current::Slot(slot), unwiped);
        }
        self.take_back(0, unwiped);
    }
}

/// A part of the state of a layer, by the indices of group, layer and part.
#[derive(Debug, Clone, Copy)]
pub(in crate::cache) struct StatePlace {
    pub(in crate::cache) group: usize,
    pub(in crate::cache) layer: usize,
    pub(in crate::cache) part: usize,
}

impl CacheState {
    /// Returns the place of a part of a layer's state.
    pub(in crate::cache) fn locate_state(
        &self,
        layer: LayerId,
        part: usize,
    ) -> Result<StatePlace, PlanError> {
        let num_layers = self.spec.num_layers();
        let Some((group, index)) = self.spec.locate_state(layer) else {
            let is_known = layer.0 < num_layers;
            return Err(if is_known {
                PlanError::NoState { layer }
            } else {
                PlanError::UnknownLayer { layer, num_layers }
            });
        };
        let parts = self.spec.states().get(group).invariant(super::GROUP).parts().len();
        if part >= parts {
            return Err(PlanError::UnknownPart { layer, part, parts });
        }
        Ok(StatePlace { group, layer: index, part })
    }

    /// Takes the slots that the entries from `first` on write; changes nothing if there are too
    /// few.
    pub(super) fn reserve_states(&mut self, first: usize) -> Result<(), CacheError> {
        if self.states.is_empty() {
            return Ok(());
        }
        for at in first..self.open.batch.len() {
            let (_, details) = self.open.entry(at);
            for group in &self.states {
                bounded("drafts of a sequence with a state", details.drafts, group.drafts)?;
            }
        }
        for index in 0..self.states.len() {
            let Self { states, open, unwiped, .. } = self;
            let (taken, rest) = states.split_at_mut(index);
            let group = rest.first_mut().invariant(super::GROUP);
            if first == 0 {
                group.begin();
            }
            if let Err(refused) = group.take(open, first) {
                for group in taken {
                    group.take_back(first, unwiped);
                }
                return Err(refused);
            }
        }
        Ok(())
    }

    /// Frees the slots of the entries from `first` on of the open step.
    pub(super) fn take_back_states(&mut self, first: usize) {
        let Self { states, unwiped, .. } = self;
        for group in states {
            group.take_back(first, unwiped);
        }
    }

    /// Gives the sequences of the open step their new states.
    pub(super) fn commit_states(&mut self, accepted: Option<&[u32]>) {
        let Self { states, open, unwiped, .. } = self;
        let kept = |at: usize| {
            let (entry, _) = open.entry(at);
            accepted.and_then(|accepted| accepted.get(at)).copied().unwrap_or(entry.new_tokens)
        };
        for group in states {
            group.commit(open, kept, unwiped);
        }
    }

    /// Iterates over the snapshots that the entries from `first` on begin with, and the slots to
    /// which the step copies them: index of the group, block, slot.
    pub(in crate::cache) fn restored(
        &self,
        first: usize,
    ) -> impl Iterator<Item = (usize, BlockId, u32)> + '_ {
        self.states.iter().enumerate().flat_map(move |(index, group)| {
            let restored = group.open.restored.iter().filter(move |of| of.entry >= first);
            restored.map(move |of| (index, of.block, of.slot))
        })
    }

    /// Returns the slot for the state of an entry behind `tokens` of its new tokens, if all of it
    /// was written.
    pub(super) fn written_slot(&self, index: usize, entry: usize, tokens: u32) -> Option<u32> {
        let (layers, parts) = self.state_extent(index);
        let group = self.states.get(index).invariant(super::GROUP);
        let place = group.open.entries.get(entry).invariant(ENTRY).place(tokens)?;
        let is_written = group.unwritten(place, layers * parts).is_none();
        group.open.slots.get(place).copied().filter(|_| is_written)
    }

    /// Returns the slot that an entry of the open step reads; the one after the last for zeros.
    pub(in crate::cache) fn read_slot(&self, group: usize, entry: usize) -> u32 {
        let group = self.states.get(group).invariant(super::GROUP);
        let entry = group.open.entries.get(entry).invariant(ENTRY);
        entry.read.unwrap_or(group.num_slots)
    }

    /// Returns the slot for the state of an entry behind `tokens` of its new tokens, or behind all
    /// of them; `None` if the step keeps none there.
    pub(in crate::cache) fn write_slot(
        &self,
        group: usize,
        entry: usize,
        tokens: Option<u32>,
    ) -> Option<u32> {
        let group = self.states.get(group).invariant(super::GROUP);
        let entry = group.open.entries.get(entry).invariant(ENTRY);
        let place = entry.place(tokens.unwrap_or(entry.new_tokens))?;
        group.open.slots.get(place).copied()
    }

    /// Records that the states of all entries behind `tokens` of their new tokens, or behind all
    /// of them, were written.
    pub(in crate::cache) fn mark_state(&mut self, at: StatePlace, tokens: Option<u32>) {
        let (layers, parts) = self.state_extent(at.group);
        let group = self.states.get_mut(at.group).invariant(super::GROUP);
        group.mark((at.layer * parts + at.part, layers * parts), tokens);
    }

    /// Records that all parts of a layer's state were written to every slot.
    pub(in crate::cache) fn mark_layer_state(&mut self, at: StatePlace) {
        let (layers, parts) = self.state_extent(at.group);
        let (first, of) = (at.layer * parts, layers * parts);
        let group = self.states.get_mut(at.group).invariant(super::GROUP);
        let OpenStates { slots, written, num_written, .. } = &mut group.open;
        written.resize(slots.len() * of, false);
        for place in written.chunks_exact_mut(of) {
            for written in place.iter_mut().skip(first).take(parts) {
                *num_written += usize::from(!std::mem::replace(written, true));
            }
        }
    }

    /// Returns the number of a group of states among all groups.
    pub(in crate::cache) fn state_group(&self, index: usize) -> GroupId {
        self.states.get(index).invariant(super::GROUP).group
    }

    /// Refuses a number of new tokens that no entry of the open step has.
    pub(in crate::cache) fn check_state_tokens(
        &self,
        tokens: Option<u32>,
    ) -> Result<(), PlanError> {
        let Some(got) = tokens else {
            return Ok(());
        };
        if got == 0 {
            let problem = OptionProblem::Zero;
            return Err(PlanError::Option { option: "tokens of a state", problem });
        }
        let most = self.open.batch.iter().map(|entry| entry.new_tokens).max().unwrap_or(0);
        bounded("new tokens before a state", got, most)
    }

    /// Records that every state was written.
    pub(in crate::cache) fn mark_all_states(&mut self) {
        for group in 0..self.states.len() {
            let (layers, parts) = self.state_extent(group);
            let open = &mut self.states.get_mut(group).invariant(super::GROUP).open;
            let all = open.slots.len() * layers * parts;
            (open.written, open.num_written) = (vec![true; all], all);
        }
    }

    fn state_extent(&self, group: usize) -> (usize, usize) {
        let spec = self.spec.states().get(group).invariant(super::GROUP);
        (spec.layers().len(), spec.parts().len())
    }

    /// Checks that every state was written that a commit keeps.
    pub(in crate::cache) fn check_states(&self, accepted: Option<&[u32]>) -> Result<(), PlanError> {
        for (index, group) in self.states.iter().enumerate() {
            let (layers, parts) = self.state_extent(index);
            let of = layers * parts;
            if group.open.num_written == group.open.slots.len() * of && accepted.is_none() {
                continue;
            }
            for (at, (states, entry)) in group.open.entries.iter().zip(&self.open.batch).enumerate()
            {
                let kept = accepted.and_then(|accepted| accepted.get(at)).copied();
                let tokens = kept.unwrap_or(entry.new_tokens);
                if tokens == 0 {
                    continue;
                }
                let place = states.place(tokens);
                let missing = place.map_or(Some(0), |place| group.unwritten(place, of));
                if let Some(missing) = missing {
                    let spec = self.spec.states().get(index).invariant(super::GROUP);
                    let layer = spec.layers().get(missing / parts).copied();
                    let layer = layer.invariant("a state has its layers");
                    let sequence = self.sequences.id(entry.row);
                    let sequence = sequence.invariant("the row of a sequence has its id");
                    let part = missing % parts;
                    return Err(PlanError::StateUnwritten { layer, part, sequence, tokens });
                }
            }
        }
        Ok(())
    }

    /// Makes the states of a row those of zeros.
    pub(super) fn clear_states(&mut self, row: u32) {
        let Self { states, unwiped, .. } = self;
        for group in states {
            group.set(row, Current::Zeros, unwiped);
        }
    }

    /// Returns slots needed and free of one group of states for entries of these rows, new tokens
    /// and drafts; `None` for another group.
    pub(super) fn slots_for(
        &self,
        group: GroupId,
        entries: impl Iterator<Item = (u32, u32, u32)>,
    ) -> Option<(u32, u32)> {
        let group = self.states.iter().find(|of| of.group == group)?;
        Some((group.needed(entries), to_u32(group.free.len())))
    }

    /// Iterates over the groups of states.
    pub(super) fn state_groups(&self) -> impl Iterator<Item = GroupId> + '_ {
        self.states.iter().map(|group| group.group)
    }
}
