//! How sequences begin, and what they take over from cached prompts.
use crate::cache::state::history::History;
use crate::cache::state::lookup::PrefixHit;
use crate::cache::state::{CacheState, Group};
use crate::error::{BlocksExhausted, CacheError, PlanError};
use crate::eviction::Retention;
use crate::ids::{BlockId, SequenceId};
use crate::num::{to_u32, to_u64, to_usize};
use crate::reuse::{ContentSpan, Namespace};
use crate::spec::PrefixReuse;

/// How a sequence starts, and what tells its tokens from equal ones.
///
/// ```
/// use kv_core::StartOptions;
/// let options = StartOptions::default().salt(b"tenant 7").adapter(3);
/// # let _ = options;
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct StartOptions<'a> {
    /// Tokens whose blocks are taken at once and stay with the sequence for life.
    pub reserve: u32,
    /// Isolates tenants: prompts share blocks only where the salt is equal, so that nobody can tell
    /// by the time it takes what others have asked.
    pub salt: &'a [u8],
    /// The adapter (`LoRA`) that K and V come from, `None` for the model itself.
    pub adapter: Option<u64>,
    /// What lies behind placeholder tokens of the prompt.
    pub contents: &'a [ContentSpan],
    /// What the blocks of this sequence are worth once nobody holds them; the default level for all
    /// unless set. Blocks that it takes over get these priorities too.
    pub retention: Option<&'a Retention>,
    /// Takes over so many full blocks less than are there, for draft models whose K and V come from
    /// the token before (EAGLE: 1): what they wrote at the end of a hit belongs to another token.
    ///
    /// A hit counts only where so many blocks more than it are cached, in every group: those are
    /// computed anew. Of a group with a window, they must follow the window of the hit without a
    /// gap, so that a window is asked for that is so many blocks longer. Groups of other block
    /// sizes count in blocks of their own.
    pub backoff_blocks: u32,
    /// Computes the whole prompt, and offers none of it to others.
    pub no_reuse: bool,
    /// The sequence was [preempted](CacheState::preempt) before: its lookup counts apart.
    pub resumed: bool,
}

impl<'a> StartOptions<'a> {
    /// Takes the blocks of `tokens` tokens at once, so that no step up to there can run out of
    /// blocks. A sequence that is cut back into a block which it shares, and then writes there,
    /// needs a block more for the copy.
    #[must_use]
    pub fn reserve(self, tokens: u32) -> Self {
        Self { reserve: tokens, ..self }
    }
    /// Sets [`Self::salt`].
    #[must_use]
    pub fn salt(self, salt: &'a [u8]) -> Self {
        Self { salt, ..self }
    }
    /// Sets [`Self::adapter`].
    #[must_use]
    pub fn adapter(self, adapter: u64) -> Self {
        Self { adapter: Some(adapter), ..self }
    }
    /// Sets [`Self::contents`].
    #[must_use]
    pub fn contents(self, contents: &'a [ContentSpan]) -> Self {
        Self { contents, ..self }
    }
    /// Sets [`Self::retention`].
    #[must_use]
    pub fn retention(self, retention: &'a Retention) -> Self {
        Self { retention: Some(retention), ..self }
    }
    /// Sets [`Self::backoff_blocks`].
    #[must_use]
    pub fn backoff_blocks(self, blocks: u32) -> Self {
        Self { backoff_blocks: blocks, ..self }
    }
    /// Sets [`Self::no_reuse`].
    #[must_use]
    pub fn no_reuse(self) -> Self {
        Self { no_reuse: true, ..self }
    }
    /// Sets [`Self::resumed`].
    #[must_use]
    pub fn resumed(self) -> Self {
        Self { resumed: true, ..self }
    }
}

/// The lookup of one prompt, and the history it was made with.
#[derive(Debug, Default)]
pub(super) struct Lookup {
    pub(super) found: PrefixHit,
    pub(super) history: History,
}

impl CacheState {
    /// Begins a sequence. Returns how many tokens of `prompt` are cached already and need no step:
    /// see [`KvCache::start`](crate::KvCache::start).
    ///
    /// # Errors
    /// [`PlanError::SequenceExists`], [`PlanError::TooMany`] sequences,
    /// [`PlanError::SequenceTooLong`] for the prompt or the reserve, [`CacheError::Exhausted`] for
    /// the reserve, [`PlanError::State`] while a step is open ([`Self::start_in_step`]). Nothing
    /// changed then.
    pub fn start(
        &mut self,
        sequence: SequenceId,
        prompt: &[u32],
        options: StartOptions<'_>,
    ) -> Result<usize, CacheError> {
        self.check_closed("start")?;
        self.check_start(sequence, prompt, &options)?;
        self.start_checked(sequence, prompt, options)
    }

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
        self.check_new(sequence)
    }

    /// Does what [`Self::start`] does, after [`Self::check_start`].
    pub(in crate::cache) fn start_checked(
        &mut self,
        sequence: SequenceId,
        prompt: &[u32],
        options: StartOptions<'_>,
    ) -> Result<usize, CacheError> {
        let mut lookup = std::mem::take(&mut self.lookup);
        let is_off = options.no_reuse || self.spec.prefix_reuse() == PrefixReuse::Off;
        let space = (!is_off).then(|| self.ledger.join(options.salt, options.adapter));
        self.look_up(&mut lookup, space, prompt, &options);
        let started = self.take_found(sequence, &mut lookup, &options);
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
        Ok(to_usize(tokens))
    }

    /// Returns how many tokens of `prompt` a sequence would reuse that started now. Changes
    /// nothing: neither the age of blocks nor the counters.
    pub fn probe(&self, prompt: &[u32], options: StartOptions<'_>) -> usize {
        let mut lookup = Lookup::default();
        self.look_up_unnamed(&mut lookup, prompt, &options);
        to_usize(lookup.found.tokens())
    }

    /// Looks up a prompt without becoming a user of its namespace.
    pub(super) fn look_up_unnamed(
        &self,
        lookup: &mut Lookup,
        prompt: &[u32],
        options: &StartOptions<'_>,
    ) {
        let space = self.ledger.find_namespace(options.salt, options.adapter);
        let space = space.filter(|_| !options.no_reuse);
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
    }

    /// Creates the sequence from a hit and returns its tokens; or changes nothing.
    fn take_found(
        &mut self,
        sequence: SequenceId,
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
            let free = group.pool.num_free().saturating_sub(idle);
            if reserved > free {
                let evictable = group.pool.num_idle().saturating_sub(idle);
                return Err(exhausted(group, reserved, (free, evictable)).into());
            }
        }
        let tokens = found.tokens();
        let row = self.insert(sequence, tokens)?;
        let Self { groups, ledger, unwiped, .. } = self;
        for group in groups.iter_mut() {
            let map = group.slot_map();
            let needed = found.needed(group.id, group.window, &map);
            group.tables.set_live(row, needed.live(found.part > 0));
            for (block, at) in needed.iter(found.part > 0).zip(0..) {
                if let Some(block) = block {
                    group.pool.reuse(block);
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
        }
        self.sequences.at_mut(row).reserved = options.reserve;
        self.sequences.swap_history(row, history);
        Ok(tokens)
    }

    /// Begins `child` with everything `parent` has committed. All blocks are shared; the last
    /// partial one is copied when either writes to it first. Token ids are shared too, so that only
    /// block IDs are copied and holders counted.
    ///
    /// # Errors
    /// [`PlanError::UnknownSequence`], [`PlanError::SequenceExists`], [`PlanError::TooMany`];
    /// [`PlanError::State`] while a step is open.
    pub fn fork(&mut self, parent: SequenceId, child: SequenceId) -> Result<(), PlanError> {
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

/// Creates the error for a group without enough blocks. `free` counts the blocks that the request
/// could take: empty ones, and the idle ones that `evictable` counts.
pub(super) fn exhausted(
    group: &Group,
    needed: u32,
    (free, evictable): (u32, u32),
) -> BlocksExhausted {
    BlocksExhausted { group: group.group_id(), needed, free, evictable }
}
