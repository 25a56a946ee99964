//! Sequences and prefixes of a cache: calls that change the bookkeeping outside a step.
//!
//! Each call first rolls back a leaked step, then delegates to the state, and zeroes the blocks
//! that lost their last holder if the spec says so.
use crate::backend::Backend;
use crate::block::BlockChange;
use crate::cache::KvCache;
use crate::cache::state::{BlockHold, CacheState, Import, Pin, PinId, PrefixProbe, StartOptions};
use crate::error::CacheError;
#[cfg(doc)]
use crate::error::PlanError;
use crate::events::{Event, EventKind, Tier};
use crate::eviction::{EvictionPolicy, Priority};
use crate::ids::{BlockId, GroupId, SequenceId};
use crate::reuse::BlockKey;

impl<B: Backend> KvCache<B> {
    /// Begins a sequence. Returns how many tokens of `prompt` are cached already and need no step.
    /// The first step computes the rest ([`StepInput::prompt`](crate::StepInput::prompt)): at least
    /// the last token, whose logits are needed.
    ///
    /// Blocks of the cached tokens are shared with their other holders and cannot be evicted while
    /// the sequence is live.
    ///
    /// # Errors
    /// [`PlanError::SequenceExists`], [`PlanError::TooMany`] sequences,
    /// [`PlanError::SequenceTooLong`] for the prompt or the reserve, [`CacheError::Exhausted`] for
    /// the reserve, [`PlanError::State`] while a step is held
    /// ([`Step::start`](crate::Step::start)). Nothing changed then.
    pub fn start(
        &mut self,
        sequence: SequenceId,
        prompt: &[u32],
        options: StartOptions<'_>,
    ) -> Result<u32, CacheError> {
        let state = self.recovered();
        state.check_closed("start")?;
        state.check_start(sequence, prompt, &options)?;
        self.wipe()?;
        self.state.start_checked(sequence, prompt, options)
    }

    /// Begins `child` with everything `parent` has committed. All blocks are shared; the last
    /// partial one is copied when either writes to it first. Token ids are shared too, so that only
    /// the names of the blocks are copied and their holders counted.
    ///
    /// # Errors
    /// [`PlanError::UnknownSequence`], [`PlanError::SequenceExists`], [`PlanError::TooMany`];
    /// [`PlanError::State`] while a step is held.
    pub fn fork(&mut self, parent: SequenceId, child: SequenceId) -> Result<(), CacheError> {
        Ok(self.recovered().fork(parent, child)?)
    }

    /// Truncates `sequence` to `len` tokens; blocks beyond are released unless reserved.
    ///
    /// # Errors
    /// [`PlanError::UnknownSequence`], [`PlanError::SequenceTooShort`], [`PlanError::OutOfWindow`]
    /// if a window no longer holds what the next token sees (a window keeps
    /// [`GroupBuilder::window_slack`] tokens more for this): the shortest possible length is the
    /// sum of the error's `kept` and the window's `left`; [`PlanError::State`] while a step is
    /// held; a device failure of the wipe, after which the truncation stands and the wipe is
    /// retried before any block is handed out.
    ///
    /// [`GroupBuilder::window_slack`]: crate::spec::GroupBuilder::window_slack
    pub fn truncate(&mut self, sequence: SequenceId, len: u32) -> Result<(), CacheError> {
        self.recovered().truncate(sequence, len)?;
        Ok(self.wipe()?)
    }

    /// Ends a sequence; blocks without other holders become free. Their content can be reused until
    /// the blocks are needed.
    ///
    /// # Errors
    /// [`PlanError::UnknownSequence`]; [`PlanError::State`] while a step is held; a device failure
    /// of the wipe as for [`Self::truncate`].
    pub fn release(&mut self, sequence: SequenceId) -> Result<(), CacheError> {
        self.recovered().release(sequence)?;
        Ok(self.wipe()?)
    }

    /// Ends a sequence whose blocks are needed more urgently. It restarts with
    /// [`StartOptions::with_resumed`], and reuses what is still cached.
    ///
    /// # Errors
    /// Those of [`Self::release`].
    pub fn preempt(&mut self, sequence: SequenceId) -> Result<(), CacheError> {
        self.recovered().preempt(sequence)?;
        Ok(self.wipe()?)
    }

    /// Ends every sequence; what they have cached can be reused.
    ///
    /// # Errors
    /// [`PlanError::State`] while a step is held; a device failure of the wipe as for
    /// [`Self::truncate`].
    pub fn reset(&mut self) -> Result<(), CacheError> {
        self.recovered().reset()?;
        Ok(self.wipe()?)
    }

    /// Pins the cached blocks of a prefix, such as a system prompt, until [`Self::unpin`]. In
    /// groups with a window it pins those that a sequence with exactly this prefix needs. Blocks
    /// that a held step has not written yet are not pinned.
    pub fn pin_prefix(&mut self, tokens: &[u32], options: StartOptions<'_>) -> Pin {
        self.recovered().pin_prefix(tokens, options)
    }

    /// Unpins a prefix; `false` for one that is not pinned.
    ///
    /// # Errors
    /// [`PlanError::State`] while a step is held; a device failure of the wipe, as for
    /// [`Self::truncate`].
    pub fn unpin(&mut self, pin: PinId) -> Result<bool, CacheError> {
        let was_pinned = self.recovered().unpin(pin)?;
        if was_pinned {
            self.wipe()?;
        }
        Ok(was_pinned)
    }

    /// Removes from the index what only this sequence has cached: its blocks, last first, up to the
    /// first that another sequence holds or continues. The sequence goes on without offering
    /// further blocks. Returns the number of these blocks in all groups. Lower tiers keep theirs:
    /// `kv_tier::Tiers::forget_sequence` removes those too.
    ///
    /// # Errors
    /// [`PlanError::UnknownSequence`]; [`PlanError::State`] while a step is held.
    pub fn forget_sequence(&mut self, sequence: SequenceId) -> Result<u32, CacheError> {
        Ok(self.recovered().forget_sequence(sequence)?)
    }

    /// Evicts the cached blocks of a prompt after its first `keep` tokens, last first, up to the
    /// first that is held or that another prompt continues. Returns the number of these blocks in
    /// all groups. Lower tiers keep theirs: `kv_tier::Tiers::forget_prefix` removes those too.
    ///
    /// # Errors
    /// [`PlanError::State`] while a step is held; a device failure of the wipe, as for
    /// [`Self::truncate`].
    pub fn forget_prefix(
        &mut self,
        tokens: &[u32],
        options: StartOptions<'_>,
        keep: u32,
    ) -> Result<u32, CacheError> {
        let forgotten = self.recovered().forget_prefix(tokens, options, keep)?;
        self.wipe()?;
        Ok(forgotten)
    }

    /// Evicts everything that is cached with a salt, of all adapters, but what is held and the
    /// blocks before it; an empty salt stands for prompts without one. Returns the number of blocks
    /// in all groups. Lower tiers keep theirs: `kv_tier::Tiers::forget_salt` removes those too.
    ///
    /// # Errors
    /// [`PlanError::State`] while a step is held; a device failure of the wipe, as for
    /// [`Self::truncate`].
    pub fn forget_salt(&mut self, salt: &[u8]) -> Result<u32, CacheError> {
        let forgotten = self.recovered().forget_salt(salt)?;
        self.wipe()?;
        Ok(forgotten)
    }

    /// Evicts everything cached; `false`, and no change, while a sequence, a pin, a hold or an
    /// import holds a block. Lower tiers keep theirs: `kv_tier::Tiers::forget_all` empties them
    /// too.
    ///
    /// # Errors
    /// [`PlanError::State`] while a step is held; a device failure of the wipe, as for
    /// [`Self::truncate`].
    pub fn reset_prefixes(&mut self) -> Result<bool, CacheError> {
        let is_reset = self.recovered().reset_prefixes()?;
        if is_reset {
            self.wipe()?;
        }
        Ok(is_reset)
    }

    /// Replaces the eviction policy of a group, by one of the caller or one with another clock. It
    /// must be made for the group's number of blocks. `false`, and no change, for an unknown group
    /// or one that has anything cached.
    pub fn set_policy(&mut self, group: GroupId, policy: Box<dyn EvictionPolicy>) -> bool {
        self.recovered().set_policy(group, policy)
    }

    /// Sets the priority of the cached blocks of a prompt. Returns the number of their tokens.
    pub fn prioritise_prefix(
        &mut self,
        tokens: &[u32],
        options: StartOptions<'_>,
        priority: Priority,
    ) -> u32 {
        self.recovered().prioritise_prefix(tokens, options, priority)
    }

    /// Returns the [events](crate::events) since the last call; none unless
    /// [`CacheSpecBuilder::events`](crate::spec::CacheSpecBuilder::events) enabled them.
    pub fn take_events(&mut self) -> Vec<Event> {
        self.recovered().take_events()
    }

    /// Appends an event of a tier below the device: see [`CacheState::announce`].
    pub fn announce(&mut self, kind: EventKind) -> bool {
        self.recovered().announce(kind)
    }

    /// Moves the changes of blocks since the last call to the end of `out`; `false` if any were
    /// lost: see [`CacheState::drain_changes`].
    pub fn drain_changes(&mut self, out: &mut Vec<BlockChange>) -> bool {
        self.recovered().drain_changes(out)
    }

    /// Holds a cached block while its bytes are read: see [`CacheState::hold_block`].
    ///
    /// # Errors
    /// [`PlanError::State`] while a step is held; a device failure, if bytes that a failed
    /// [`Self::recalibrate`] has overwritten cannot be restored.
    pub fn hold_block(
        &mut self,
        group: GroupId,
        block: BlockId,
        key: BlockKey,
    ) -> Result<Option<BlockHold>, CacheError> {
        self.recovered().check_closed("hold block")?;
        // The bytes that are read are those of the content.
        self.restore()?;
        Ok(self.state.hold_block(group, block, key)?)
    }

    /// Releases a block whose bytes are read: see [`CacheState::release_hold`].
    ///
    /// # Errors
    /// Those of [`CacheState::release_hold`]; a device failure of the wipe, as for
    /// [`Self::truncate`].
    pub fn release_hold(&mut self, hold: BlockHold) -> Result<(), CacheError> {
        self.recovered().release_hold(hold)?;
        Ok(self.wipe()?)
    }

    /// Releases every hold and returns their number: see [`CacheState::release_holds`].
    ///
    /// # Errors
    /// [`PlanError::State`] while a step is held; a device failure of the wipe, as for
    /// [`Self::truncate`].
    pub fn release_holds(&mut self) -> Result<u32, CacheError> {
        let released = self.recovered().release_holds()?;
        self.wipe()?;
        Ok(released)
    }

    /// Takes blocks for content that somebody brings: see [`CacheState::reserve_import`]. If the
    /// spec says so they are zeroed before the call returns.
    ///
    /// # Errors
    /// Those of [`CacheState::reserve_import`]; a device failure of the wipe, after which no block
    /// is taken, but evicted content stays gone.
    pub fn reserve_import(&mut self, probe: &PrefixProbe, upto: u32) -> Result<Import, CacheError> {
        let import = self.recovered().reserve_import(probe, upto)?;
        self.wipe_reserved(import)
    }

    /// Does what [`Self::reserve_import`] does, with a last block that may be partial: see
    /// [`CacheState::reserve_import_with_part`].
    ///
    /// # Errors
    /// Those of [`Self::reserve_import`].
    pub fn reserve_import_with_part(
        &mut self,
        probe: &PrefixProbe,
        upto: u32,
    ) -> Result<Import, CacheError> {
        let import = self.recovered().reserve_import_with_part(probe, upto)?;
        self.wipe_reserved(import)
    }

    fn wipe_reserved(&mut self, import: Import) -> Result<Import, CacheError> {
        if let Err(failed) = self.wipe() {
            self.state.finish_import(import)?;
            return Err(failed.into());
        }
        Ok(import)
    }

    /// Makes the blocks of an import reusable whose bytes have come: see
    /// [`CacheState::publish_import`]. The work that writes the bytes must be recorded on the
    /// cache's queue, or done, before this call.
    ///
    /// # Errors
    /// Those of [`CacheState::publish_import`]; a device failure of the wipe, as for
    /// [`Self::truncate`].
    pub fn publish_import(
        &mut self,
        import: &mut Import,
        upto: u32,
        tier: Tier,
    ) -> Result<(), CacheError> {
        self.recovered().publish_import(import, upto, tier)?;
        Ok(self.wipe()?)
    }

    /// Ends an import: see [`CacheState::finish_import`].
    ///
    /// # Errors
    /// Those of [`CacheState::finish_import`]; a device failure of the wipe, as for
    /// [`Self::truncate`].
    pub fn finish_import(&mut self, import: Import) -> Result<(), CacheError> {
        self.recovered().finish_import(import)?;
        Ok(self.wipe()?)
    }

    /// Ends every import and returns their number: see [`CacheState::finish_imports`].
    ///
    /// # Errors
    /// [`PlanError::State`] while a step is held; a device failure of the wipe, as for
    /// [`Self::truncate`].
    pub fn finish_imports(&mut self) -> Result<u32, CacheError> {
        let finished = self.recovered().finish_imports()?;
        self.wipe()?;
        Ok(finished)
    }

    /// Returns the state, after rolling back a leaked step.
    fn recovered(&mut self) -> &mut CacheState {
        self.recover();
        &mut self.state
    }
}
