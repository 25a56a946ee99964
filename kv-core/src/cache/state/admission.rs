//! Questions of a scheduler before it admits a sequence, answered with the counts that allocation
//! uses.
use crate::cache::state::block_demand::{Demand, Exchanged};
use crate::cache::state::input::{bounded, check_queries};
use crate::cache::state::lookup::{Needed, first_live, sink_blocks};
use crate::cache::state::start::{Lookup, exhausted};
use crate::cache::state::{CacheState, Group, StartOptions, StepInput};
use crate::error::{BlocksExhausted, CacheError, PlanError};
use crate::ids::{BlockId, GroupId, SequenceId};
use crate::invariant::Invariant;
use crate::num::to_u32;
use crate::plan::{BatchEntry, Growth};

/// Conditions under which [`CacheState::check_admission`] admits a prompt.
///
/// ```
/// use kv::scheduling::Admission;
/// let admission = Admission::default().with_chunk(512).with_watermark(8);
/// assert_eq!((admission.chunk(), admission.watermark()), (Some(512), 8));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Admission {
    chunk: Option<u32>,
    lookahead: u32,
    watermark: u32,
    free_slots: u32,
    must_fit: bool,
}

impl Admission {
    /// Limits the tokens that the first step computes of the prompt, after those that are reused;
    /// all of them unless set.
    #[must_use]
    pub fn with_chunk(self, tokens: u32) -> Self {
        Self { chunk: Some(tokens), ..self }
    }
    /// Counts the slots of `tokens` tokens after these too ([`StepInput::with_lookahead`]).
    #[must_use]
    pub fn with_lookahead(self, tokens: u32) -> Self {
        Self { lookahead: tokens, ..self }
    }
    /// Keeps `blocks` blocks of every group with rows free, so that running sequences can grow.
    #[must_use]
    pub fn with_watermark(self, blocks: u32) -> Self {
        Self { watermark: blocks, ..self }
    }
    /// Keeps `slots` slots of recurrent states free, for the states of running sequences that the
    /// same step writes, or of their drafts.
    #[must_use]
    pub fn with_free_slots(self, slots: u32) -> Self {
        Self { free_slots: slots, ..self }
    }
    /// Sets whether the whole prompt must fit, computed alone and in steps of [`Self::chunk`]
    /// tokens, not just the first step's tokens: false unless set. Windows release what they leave
    /// on the way. Blocks that turn out to be cached when they are full, and are then shared, count
    /// as unshared.
    #[must_use]
    pub fn with_must_fit(self, must_fit: bool) -> Self {
        Self { must_fit, ..self }
    }
    /// Returns the most tokens that the first step computes, `None` for all.
    pub fn chunk(&self) -> Option<u32> {
        self.chunk
    }
    /// Returns the tokens after these whose slots are counted too.
    pub fn lookahead(&self) -> u32 {
        self.lookahead
    }
    /// Returns the blocks of every group with rows that stay free.
    pub fn watermark(&self) -> u32 {
        self.watermark
    }
    /// Returns the slots of recurrent states that stay free.
    pub fn free_slots(&self) -> u32 {
        self.free_slots
    }
    /// Returns whether the whole prompt must fit.
    pub fn must_fit(&self) -> bool {
        self.must_fit
    }
}

/// Blocks of one group that a step allocates, and blocks that it can allocate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "two numbers to compare")]
pub struct BlockDemand {
    /// Blocks that must be allocated.
    pub needed: u32,
    /// Blocks without a holder, including those that leave a window when the step begins.
    pub free: u32,
}

impl BlockDemand {
    /// Returns whether this group has enough blocks for the step.
    pub fn fits(&self) -> bool {
        self.needed <= self.free
    }
}

impl CacheState {
    /// Checks whether [`KvCache::start`](crate::KvCache::start) and a first step would succeed now,
    /// and returns the number of tokens that would be reused. Changes nothing.
    ///
    /// # Errors
    /// [`CacheError::Exhausted`] for the first group with too few blocks: `needed` is the sum of
    /// the blocks for the step, the watermark and cached blocks that would be held again.
    /// [`PlanError::TooMany`] for a reserve beyond the longest sequence.
    pub fn check_admission(
        &self,
        prompt: &[u32],
        options: StartOptions<'_>,
        admission: &Admission,
    ) -> Result<u32, CacheError> {
        bounded("reserved tokens", options.reserve, self.spec.max_seq_len())?;
        let mut lookup = Lookup::default();
        self.look_up_unnamed(&mut lookup, prompt, &options);
        let found = &lookup.found;
        let (len, reused) = (to_u32(prompt.len()), found.tokens());
        let rest = len - reused;
        let chunk = admission.chunk.map_or(rest, |chunk| chunk.min(rest));
        for group in self.groups.iter() {
            let map = group.slot_map();
            let has_part = found.part > 0;
            let blocks = found.needed(group.id, group.window, &map);
            let held = to_u32(blocks.iter(has_part).count());
            let idle = blocks.iter(has_part).flatten().filter(|block| group.pool.is_idle(*block));
            let idle = to_u32(idle.count());
            // A block that a sequence holds is copied before it is written. One that is reused to
            // its end, as smaller blocks of another group may be, is not written.
            let is_written = has_part && map.tokens(map.full_blocks(reused)) < reused;
            let copied = blocks.donor().filter(|block| is_written && !group.pool.is_idle(*block));
            let needed = |new: u32, ahead: u32| {
                let growth = Growth::new(&map, found.whole, reused, reused + new);
                // Saturating from here on: lookahead and watermark may be any numbers.
                let ahead = (reused + new).saturating_add(ahead);
                let ahead = if map.has_tail() || new == 0 { 0 } else { map.blocks(ahead) };
                let reserved = map.blocks_reserved(options.reserve);
                let blocks = growth.blocks().max(ahead).max(reserved).saturating_sub(held);
                blocks.saturating_add(u32::from(copied.is_some() && new > 0))
            };
            let step = needed(chunk, admission.lookahead).saturating_add(idle);
            let all = if admission.must_fit {
                let prompt = Chunks { reused, len, chunk, reserve: options.reserve, admission };
                prompt.blocks(group, &blocks, has_part, copied)
            } else {
                0
            };
            let total = step.max(all).saturating_add(admission.watermark);
            let (free, evictable) = (group.pool.num_free(), group.pool.num_idle());
            if total > free {
                return Err(exhausted(group, total, (free, evictable)).into());
            }
        }
        // A first step writes one state, and copies the snapshot that it goes on from.
        for group in self.state_groups() {
            let step = [(u32::MAX, chunk, 0)].into_iter();
            let (needed, free) = self.slots_for(group, step).invariant("a group of the cache");
            let needed = needed + u32::from(reused > 0);
            // Any number may be asked for.
            let needed = needed.saturating_add(admission.free_slots);
            if needed > free {
                return Err(BlocksExhausted { group, needed, free, evictable: 0 }.into());
            }
        }
        Ok(reused)
    }

    /// Returns the blocks of one group, or the slots of one group of states, that
    /// [`KvCache::begin_step`](crate::KvCache::begin_step) would allocate for `inputs`, and those
    /// that it can allocate. The step has enough blocks
    /// if every group [fits](BlockDemand::fits).
    ///
    /// # Errors
    /// [`PlanError::UnknownSequence`], and those of
    /// [`KvCache::begin_step`](crate::KvCache::begin_step) for a count out of bounds.
    pub fn blocks_for_step(
        &self,
        group: GroupId,
        inputs: &[StepInput<'_>],
    ) -> Result<BlockDemand, CacheError> {
        let Some(group) = self.find_group(group) else {
            return self.slots_for_step(group, inputs);
        };
        let mut demand = Demand::default();
        let mut batch = Vec::with_capacity(inputs.len());
        for input in inputs {
            let (row, state) = self.sequences.get(input.sequence)?;
            let (new_tokens, queries) = input.counts(state.len, self.spec.max_seq_len())?;
            let entry = BatchEntry { row, cached: state.len, new_tokens, queries };
            let leaving = group.leaving_entries(&entry, &Exchanged::default());
            group.entries(row, leaving).iter().for_each(|block| demand.leave(*block));
            batch.push(entry);
        }
        check_queries(&batch, &self.spec)?;
        for (entry, input) in batch.iter().zip(inputs) {
            demand.add(group, entry, input.details().lookahead, &Exchanged::default());
        }
        let left = demand.left_by_all(&group.pool).blocks;
        let free = group.pool.num_free() + left;
        Ok(BlockDemand { needed: demand.blocks, free })
    }

    /// Returns the slots of one group of states that a step takes; none for an unknown group.
    fn slots_for_step(
        &self,
        group: GroupId,
        inputs: &[StepInput<'_>],
    ) -> Result<BlockDemand, CacheError> {
        let mut entries = Vec::with_capacity(inputs.len());
        for input in inputs {
            let (row, state) = self.sequences.get(input.sequence)?;
            let (new_tokens, _) = input.counts(state.len, self.spec.max_seq_len())?;
            entries.push((row, new_tokens, input.details().drafts));
        }
        let slots = self.slots_for(group, entries.into_iter());
        let (needed, free) = slots.unwrap_or((0, 0));
        Ok(BlockDemand { needed, free })
    }

    /// Returns the blocks of one group that a sequence still allocates until it has `len` tokens,
    /// growing one by one; with a window, the maximum at any time. 0 for an unknown group.
    ///
    /// # Errors
    /// [`PlanError::UnknownSequence`]; [`PlanError::SequenceTooLong`] for more tokens than a
    /// sequence may have.
    pub fn blocks_to_completion(
        &self,
        group: GroupId,
        sequence: SequenceId,
        len: u32,
    ) -> Result<u32, CacheError> {
        let (row, state) = self.sequences.get(sequence)?;
        let max = self.spec.max_seq_len();
        if len > max {
            let new = u64::from(len - state.len);
            return Err(PlanError::SequenceTooLong { sequence, len: state.len, new, max }.into());
        }
        let spec = self.spec.groups().get(usize::from(group.0));
        let Some((group, spec)) = self.find_group(group).zip(spec) else {
            return Ok(0);
        };
        if len <= state.len {
            return Ok(0);
        }
        let vacant = group.vacant(row);
        let held = to_u32(group.tables.row(row).len()).saturating_sub(to_u32(vacant.len()));
        let mut shared = Demand::default();
        let next = BatchEntry { row, cached: state.len, new_tokens: 1, queries: 1 };
        shared.add(group, &next, 0, &Exchanged::default());
        let first = shared.blocks - group.grown_by(&next);
        Ok(spec.blocks_to_grow(len).saturating_sub(held) + first)
    }
}

/// A prompt that is computed chunk by chunk.
struct Chunks<'a> {
    reused: u32,
    len: u32,
    chunk: u32,
    reserve: u32,
    admission: &'a Admission,
}

impl Chunks<'_> {
    /// Returns the most blocks of a group that this prompt holds at any time, starting with the
    /// blocks `found`. Blocks that leave a window, and a quantised tail, are released.
    fn blocks(
        &self,
        group: &Group,
        found: &Needed<'_>,
        has_part: bool,
        copied: Option<BlockId>,
    ) -> u32 {
        let map = group.slot_map();
        let reserved = map.blocks_reserved(self.reserve);
        let has_steps = group.window.is_some() || map.has_tail();
        let rest = self.len - self.reused;
        let chunk = if has_steps && self.chunk > 0 { self.chunk } else { rest.max(1) };
        let num_sink_blocks = sink_blocks(group.window, &map);
        // Shared blocks cost nothing, and releasing them frees nothing. The copied block is not
        // shared.
        let is_shared = |block: &BlockId| !group.pool.is_idle(*block) && copied != Some(*block);
        let shared = |live: u32| {
            let is_live = |at: u32| at < num_sink_blocks || at >= live;
            let blocks = found.iter(has_part).zip(0..).filter(|(_, at)| is_live(*at));
            to_u32(blocks.filter_map(|(block, _)| block).filter(is_shared).count())
        };
        let (mut at, mut coded, mut most) = (self.reused, self.reused, 0_u32);
        let mut entries = to_u32(found.iter(has_part).count()).max(reserved);
        // If nothing is released on the way, lookahead of the first chunk can be ignored.
        let is_window = has_steps && !map.has_tail();
        let mut ahead = if is_window { self.admission.lookahead } else { 0 };
        while at < self.len {
            let next = at + chunk.min(self.len - at);
            let growth = Growth::new(&map, coded, at, next);
            let live = group.window.map_or(0, |window| {
                let live = first_live(&map, window, window.shortest(at));
                let live = if map.has_tail() { live.min(map.full_blocks(coded)) } else { live };
                live.max(found.live(has_part))
            });
            // Lookahead of a step is kept; it may be any number.
            let before = if map.has_tail() { reserved } else { entries };
            let further = if ahead > 0 { map.blocks(next.saturating_add(ahead)) } else { 0 };
            entries = growth.blocks().max(further).max(before);
            let held = entries.saturating_sub(live.saturating_sub(num_sink_blocks));
            most = most.max(held.saturating_sub(shared(live)));
            (at, coded, ahead) = (next, map.coded_after(coded, next), 0);
        }
        most
    }
}

impl Group {
    /// Returns the blocks that a step appends to a row.
    fn grown_by(&self, entry: &BatchEntry) -> u32 {
        let len = entry.cached + entry.new_tokens;
        let growth = Growth::new(&self.slot_map(), self.tables.coded(entry.row), entry.cached, len);
        growth.blocks().saturating_sub(to_u32(self.tables.row(entry.row).len()))
    }
}
