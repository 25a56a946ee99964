//! Starts of sequences, and the cached blocks that they reuse.
use crate::cache::state::history::History;
use crate::cache::state::lookup::PrefixHit;
use crate::cache::state::stats::ByTier;
use crate::cache::state::{CacheState, Group};
use crate::error::{BlocksExhausted, CacheError, OptionProblem, PlanError};
use crate::events::Tier;
use crate::eviction::{Retention, Return};
use crate::ids::{BlockId, SequenceId};
use crate::invariant::Invariant;
use crate::num::{to_u32, to_u64, to_usize};
use crate::reuse::{ContentSpan, Namespace};
use crate::spec::PrefixReuse;

/// Options of a sequence's start, among them the salt and adapter that tell equal tokens apart.
///
/// ```
/// use kv::StartOptions;
/// let options = StartOptions::default().with_salt(b"tenant 7").with_adapter(3);
/// assert_eq!(options.adapter(), Some(3));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StartOptions<'a> {
    pub(in crate::cache) reserve: u32,
    pub(in crate::cache) salt: &'a [u8],
    pub(in crate::cache) adapter: Option<u64>,
    pub(in crate::cache) contents: &'a [ContentSpan],
    pub(in crate::cache) retention: Option<&'a Retention>,
    pub(in crate::cache) hint: Option<Return>,
    pub(in crate::cache) backoff_blocks: u32,
    pub(in crate::cache) reuse: bool,
    pub(in crate::cache) resumed: bool,
    pub(in crate::cache) stops: &'a [u32],
}

impl Default for StartOptions<'_> {
    /// Reuses blocks of the model itself, without a salt; reserves nothing.
    fn default() -> Self {
        Self {
            reserve: 0,
            salt: &[],
            adapter: None,
            contents: &[],
            retention: None,
            hint: None,
            backoff_blocks: 0,
            reuse: true,
            resumed: false,
            stops: &[],
        }
    }
}

impl<'a> StartOptions<'a> {
    /// Takes the blocks of `tokens` tokens at once, which stay with the sequence until it is
    /// released: no step up to there can run out of blocks. A sequence that is cut back into a
    /// block which it shares, and then writes there, needs a block more for the copy.
    #[must_use]
    pub fn with_reserve(self, tokens: u32) -> Self {
        Self { reserve: tokens, ..self }
    }
    /// Isolates tenants: prompts share blocks only if the salt is equal, so that response times
    /// reveal nothing about other tenants' prompts.
    #[must_use]
    pub fn with_salt(self, salt: &'a [u8]) -> Self {
        Self { salt, ..self }
    }
    /// Names the adapter (`LoRA`) that K and V come from; the model itself unless set.
    #[must_use]
    pub fn with_adapter(self, adapter: u64) -> Self {
        Self { adapter: Some(adapter), ..self }
    }
    /// Sets the contents of placeholder tokens of the prompt, such as images.
    #[must_use]
    pub fn with_contents(self, contents: &'a [ContentSpan]) -> Self {
        Self { contents, ..self }
    }
    /// Sets the eviction priorities of the sequence's blocks once no sequence holds them; the
    /// default level for all unless set. Blocks that it reuses get these priorities too.
    #[must_use]
    pub fn with_retention(self, retention: &'a Retention) -> Self {
        Self { retention: Some(retention), ..self }
    }
    /// Sets what is expected after the end of the sequence, unless
    /// [`KvCache::hint`](crate::KvCache::hint) says otherwise before; nothing unless set.
    #[must_use]
    pub fn with_hint(self, hint: Return) -> Self {
        Self { hint: Some(hint), ..self }
    }
    /// Reuses `blocks` full blocks less than are cached, for draft models whose K and V come from
    /// the token before (EAGLE: 1): the rows at the end of a hit belong to another token.
    ///
    /// A hit counts only where `blocks` further blocks are cached, in every group: these blocks are
    /// computed anew. In a group with a window, they must follow the window of the hit without a
    /// gap, so that the window that is looked up is `blocks` blocks longer. Groups of other block
    /// sizes count in blocks of their own.
    #[must_use]
    pub fn with_backoff_blocks(self, blocks: u32) -> Self {
        Self { backoff_blocks: blocks, ..self }
    }
    /// Sets whether cached blocks are reused and blocks of this sequence are offered to others:
    /// true unless set. Without reuse the whole prompt is computed.
    #[must_use]
    pub fn with_reuse(self, reuse: bool) -> Self {
        Self { reuse, ..self }
    }
    /// Marks the sequence as [preempted](crate::KvCache::preempt) before, so that its lookup counts
    /// apart in [`Stats`](crate::Stats): false unless set.
    #[must_use]
    pub fn with_resumed(self, resumed: bool) -> Self {
        Self { resumed, ..self }
    }
    /// Names lengths of the prompt, ascending, at which recurrent states are kept for other
    /// prompts: ends of messages, or where a template's last tokens begin. They join the cache's
    /// own, see [`CacheState::next_stop`]. No effect in a cache without states.
    #[must_use]
    pub fn with_stops(self, stops: &'a [u32]) -> Self {
        Self { stops, ..self }
    }
    /// Returns the tokens whose blocks are taken at once.
    pub fn reserve(&self) -> u32 {
        self.reserve
    }
    /// Returns the tenant's salt; empty without one.
    pub fn salt(&self) -> &'a [u8] {
        self.salt
    }
    /// Returns the adapter that K and V come from, `None` for the model itself.
    pub fn adapter(&self) -> Option<u64> {
        self.adapter
    }
    /// Returns the contents of the placeholder tokens of the prompt.
    pub fn contents(&self) -> &'a [ContentSpan] {
        self.contents
    }
    /// Returns the eviction priorities of the blocks, `None` for the default level.
    pub fn retention(&self) -> Option<&'a Retention> {
        self.retention
    }
    /// Returns what is expected after the end of the sequence, `None` for nothing.
    pub fn hint(&self) -> Option<Return> {
        self.hint
    }
    /// Returns the full blocks of a hit that are computed anew.
    pub fn backoff_blocks(&self) -> u32 {
        self.backoff_blocks
    }
    /// Returns whether cached blocks are reused and the sequence's blocks are offered to others.
    pub fn reuse(&self) -> bool {
        self.reuse
    }
    /// Returns the lengths of the prompt at which recurrent states are kept.
    pub fn stops(&self) -> &'a [u32] {
        self.stops
    }
    /// Returns whether the sequence was preempted before.
    pub fn resumed(&self) -> bool {
        self.resumed
    }
}

/// The lookup of one prompt, and the history it was made with.
#[derive(Debug, Default)]
pub(super) struct Lookup {
    pub(super) found: PrefixHit,
    pub(super) history: History,
}

impl CacheState {
    /// Refuses a sequence that cannot start, whatever blocks are free.
    pub(in crate::cache) fn check_start(
        &self,
        sequence: SequenceId,
        prompt: &[u32],
        options: &StartOptions<'_>,
    ) -> Result<(), PlanError> {
        let asked = to_u64(prompt.len()).max(u64::from(options.reserve));
        let max = self.spec.max_seq_len();
        if asked > u64::from(max) {
            return Err(PlanError::SequenceTooLong { sequence, len: 0, new: asked, max });
        }
        check_stops(prompt, options)?;
        self.check_new(sequence)
    }

    /// Begins a sequence, after [`Self::check_start`]: see
    /// [`KvCache::start`](crate::KvCache::start).
    pub(in crate::cache) fn start_checked(
        &mut self,
        sequence: SequenceId,
        prompt: &[u32],
        options: StartOptions<'_>,
    ) -> Result<u32, CacheError> {
        let mut lookup = std::mem::take(&mut self.lookup);
        let is_off = !options.reuse || self.spec.prefix_reuse() == PrefixReuse::Off;
        let space = (!is_off).then(|| self.ledger.join(options.salt, options.adapter));
        self.look_up(&mut lookup, space, prompt, &options);
        let started = self.take_found(sequence, prompt, &mut lookup, &options);
        if started.is_err() {
            lookup.history.end(&mut self.ledger);
            lookup.history.clear();
        }
        self.lookup = lookup;
        let tokens = started?;
        if !is_off && !prompt.is_empty() {
            self.note_lookup(to_u32(prompt.len()), options.resumed);
        }
        self.note_peak();
        Ok(tokens)
    }

    /// Returns the number of tokens of `prompt` that a sequence started now would reuse. Changes
    /// nothing: neither the age of blocks nor the counters.
    pub fn probe(&self, prompt: &[u32], options: StartOptions<'_>) -> u32 {
        let mut lookup = Lookup::default();
        self.look_up_unnamed(&mut lookup, prompt, &options);
        lookup.found.tokens()
    }

    /// Looks up a prompt without becoming a user of its namespace.
    pub(super) fn look_up_unnamed(
        &self,
        lookup: &mut Lookup,
        prompt: &[u32],
        options: &StartOptions<'_>,
    ) {
        let space = self.ledger.find_namespace(options.salt, options.adapter);
        let space = space.filter(|_| options.reuse);
        self.look_up(lookup, space, prompt, options);
    }

    /// Looks up a prompt except its last token, which is always computed.
    fn look_up(
        &self,
        lookup: &mut Lookup,
        space: Option<Namespace>,
        prompt: &[u32],
        options: &StartOptions<'_>,
    ) {
        let limit = to_u32(prompt.len()).saturating_sub(1).min(self.spec.max_seq_len());
        self.look_up_to(lookup, (space, limit), prompt, options);
    }

    /// Looks up at most the first `limit` tokens of a prompt.
    pub(super) fn look_up_to(
        &self,
        lookup: &mut Lookup,
        (space, limit): (Option<Namespace>, u32),
        prompt: &[u32],
        options: &StartOptions<'_>,
    ) {
        let sizes = (self.chains.len(), self.groups.len());
        lookup.history.begin(space, (prompt, options), sizes);
        let limits = (limit, options.backoff_blocks);
        let reuse = self.spec.prefix_reuse();
        lookup.found.search(&self.groups, &mut lookup.history, limits, reuse);
        if !self.states.is_empty() {
            let names = self.names();
            lookup.found.agree_with_states(
                (&self.groups, &self.states, &names),
                &mut lookup.history,
                options.backoff_blocks,
                reuse,
            );
        }
    }

    /// Creates the sequence from a hit and returns its tokens; or changes nothing.
    fn take_found(
        &mut self,
        sequence: SequenceId,
        prompt: &[u32],
        lookup: &mut Lookup,
        options: &StartOptions<'_>,
    ) -> Result<u32, CacheError> {
        let Lookup { found, history } = lookup;
        for group in self.groups.iter().filter(|_| options.reserve > 0) {
            let map = group.slot_map();
            let needed = found.needed(group.id, group.window, &map);
            let taken = to_u32(needed.iter(found.part > 0).count());
            let reserved = map.blocks_reserved(options.reserve).saturating_sub(taken);
            let idle = needed.iter(found.part > 0).flatten();
            let idle = to_u32(idle.filter(|block| group.pool.is_idle(*block)).count());
            let free = group.pool.num_free() - idle;
            if reserved > free {
                let evictable = group.pool.num_idle() - idle;
                return Err(exhausted(group, reserved, (free, evictable)).into());
            }
        }
        let tokens = found.tokens();
        let row = self.insert(sequence, tokens)?;
        let Self { groups, ledger, unwiped, .. } = self;
        let mut imported = ByTier::default();
        for group in groups.iter_mut() {
            let mut of_group = ByTier::default();
            let map = group.slot_map();
            let needed = found.needed(group.id, group.window, &map);
            group.tables.set_live(row, needed.live(found.part > 0));
            for (block, at) in needed.iter(found.part > 0).zip(0_u32..) {
                if let Some(block) = block {
                    let tier = group.pool.reuse_imported(block);
                    if tier != Tier::Device {
                        let end = map.tokens(at + 1).min(tokens);
                        of_group.add(tier, end - map.tokens(at));
                    }
                    if options.retention.is_some() {
                        let priority = history.priority(map.tokens(at));
                        group.pool.set_priority(block, priority, ledger);
                    }
                }
                // A vacant entry is in range and never read.
                group.push(row, block.unwrap_or(BlockId(0)));
            }
            group.tables.set_coded(row, tokens);
            history.set_stored(group.id, map.full_blocks(found.whole));
            for _ in group.tables.row_len(row)..map.blocks_reserved(options.reserve) {
                let block = group.take(ledger, unwiped);
                group.push(row, block);
            }
            group.pool.tick();
            imported.raise_to(of_group);
        }
        self.note_imported(imported);
        self.sequences.at_mut(row).reserved = options.reserve;
        self.sequences.swap_history(row, history);
        self.begin_with(row, &found.states);
        self.set_stops(row, (tokens, found.rows, to_u32(prompt.len())), options.stops);
        Ok(tokens)
    }

    /// See [`KvCache::fork`](crate::KvCache::fork).
    pub(in crate::cache) fn fork(
        &mut self,
        parent: SequenceId,
        child: SequenceId,
    ) -> Result<(), PlanError> {
        self.check_closed("fork")?;
        let (parent_row, state) = self.sequences.get(parent)?;
        let (len, certain, store_at) = (state.len, state.certain, state.store_at);
        self.check_new(child)?;
        let row = self.insert(child, len)?;
        let state = self.sequences.at_mut(row);
        (state.certain, state.store_at) = (certain, store_at);
        let known = (len, self.chains.as_slice());
        self.sequences.fork_history((parent_row, row), known, &mut self.ledger);
        self.sequences.mark_shared(parent_row);
        self.late.fork(parent_row, row);
        self.states.iter_mut().for_each(|group| group.fork(parent_row, row));
        if let Some(stops) = self.stops.get(to_usize(parent_row)).cloned() {
            *self.stops.get_mut(to_usize(row)).invariant("a row has stops") = stops;
        }
        for group in &mut *self.groups {
            let coded = group.tables.coded(parent_row);
            let count = to_usize(group.slot_map().blocks_in(len, coded));
            group.tables.fork_row(parent_row, row, count);
            let vacant = group.vacant(row);
            let held = group.tables.row(row).iter().zip(0..);
            held.filter(|(_, at)| !vacant.contains(at))
                .for_each(|(block, _)| group.pool.retain(*block));
        }
        Ok(())
    }
}

/// Refuses stops of a prompt out of order, past its end, or inside the content of placeholders.
fn check_stops(prompt: &[u32], options: &StartOptions<'_>) -> Result<(), PlanError> {
    let max = to_u32(prompt.len());
    let mut before = 0;
    for &got in options.stops {
        // The spans are the caller's.
        let mut contents = options.contents.iter();
        let cut =
            contents.find(|span| span.begin < got && got < span.begin.saturating_add(span.len));
        let problem = match cut {
            _ if got <= before => OptionProblem::StopOrder { before, got },
            _ if got > max => OptionProblem::StopPastPrompt { got, max },
            Some(span) => OptionProblem::StopInContent { got, begin: span.begin, len: span.len },
            None => {
                before = got;
                continue;
            }
        };
        return Err(PlanError::Option { option: "stops", problem });
    }
    Ok(())
}

/// Creates the error for a group without enough blocks. `free` counts the blocks that the request
/// could take: empty blocks, and the idle blocks that `evictable` counts.
pub(super) fn exhausted(
    group: &Group,
    needed: u32,
    (free, evictable): (u32, u32),
) -> BlocksExhausted {
    BlocksExhausted { group: group.group_id(), needed, free, evictable }
}
