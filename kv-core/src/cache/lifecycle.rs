//! Sequences and prefixes of a cache: calls that change the bookkeeping outside a step.
//!
//! Each call first rolls back a leaked step. None touches the device but [`KvCache::wipe`], those
//! that hand out blocks at once, and in a cache with recurrent states the end of a sequence, which
//! keeps a snapshot.
use crate::backend::Backend;
use crate::block::BlockChange;
use crate::cache::KvCache;
use crate::cache::state::{BlockHold, CacheState, Import, Pin, PinId, PrefixProbe, StartOptions};
use crate::error::CacheError;
#[cfg(doc)]
use crate::error::PlanError;
use crate::events::{Event, EventKind, Tier};
use crate::eviction::{EvictionPolicy, Priority, Return};
use crate::ids::{BlockId, GroupId, SequenceId};
use crate::reuse::BlockKey;

impl<B: Backend> KvCache<B> {
    /// Begins a sequence. Returns the number of tokens of `prompt` that are cached already and need
    /// no step. The first step computes the rest ([`StepInput::prompt`](crate::StepInput::prompt)):
    /// at least the last token, whose logits are needed.
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
        self.wipe_released()?;
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
    /// held.
    ///
    /// [`GroupBuilder::window_slack`]: crate::spec::GroupBuilder::window_slack
    pub fn truncate(&mut self, sequence: SequenceId, len: u32) -> Result<(), CacheError> {
        Ok(self.recovered().truncate(sequence, len)?)
    }

    /// Ends a sequence; blocks without other holders become free. Their content can be reused until
    /// the blocks are needed. Recurrent states are kept for other prompts, unless the device cannot
    /// copy them.
    ///
    /// # Errors
    /// [`PlanError::UnknownSequence`]; [`PlanError::State`] while a step is held.
    pub fn release(&mut self, sequence: SequenceId) -> Result<(), CacheError> {
        self.keep_last_state(sequence);
        Ok(self.recovered().release(sequence)?)
    }

    /// Sets what is expected after the end of a sequence, in place of what
    /// [`StartOptions::with_hint`] or an earlier call said; `None` takes it back. A fork inherits
    /// the hint of its parent: both are answers to the same request.
    ///
    /// The eviction policy learns of it for each block that the sequence is the last to release,
    /// with [`Self::release`] or [`Self::reset`]. Blocks released earlier, by [`Self::truncate`],
    /// by a window or by [`Self::preempt`], are released without a hint: they are not what the
    /// sequence ends with. Nor do hints reach the policy of snapshots of recurrent states. A host
    /// tier hears those of [`StartOptions`] with which a prompt is looked up.
    ///
    /// ```
    /// use std::time::Duration;
    /// use kv::backend::NullBackend;
    /// use kv::eviction::Return;
    /// use kv::{CacheSpec, KvCache, SequenceId, StartOptions};
    ///
    /// let spec = CacheSpec::builder().layers(1).kv_heads(1).head_dim(4).paged(2, 8).build()?;
    /// let mut cache = KvCache::new(NullBackend::new(), spec)?;
    /// let options = StartOptions::default().with_hint(Return::Idle);
    /// cache.start(SequenceId(0), &[1, 2, 3], options)?;
    /// // The answer asks for a tool: the conversation goes on in a few seconds.
    /// cache.hint(SequenceId(0), Return::Within(Duration::from_secs(3)))?;
    /// cache.release(SequenceId(0))?;
    /// # Ok::<(), kv::CacheError>(())
    /// ```
    ///
    /// # Errors
    /// [`PlanError::UnknownSequence`].
    pub fn hint(
        &mut self,
        sequence: SequenceId,
        hint: impl Into<Option<Return>>,
    ) -> Result<(), CacheError> {
        Ok(self.recovered().hint(sequence, hint.into())?)
    }

    /// Ends a sequence whose blocks are needed more urgently. It restarts with
    /// [`StartOptions::with_resumed`], and reuses the blocks that are still cached.
    ///
    /// # Errors
    /// Those of [`Self::release`].
    pub fn preempt(&mut self, sequence: SequenceId) -> Result<(), CacheError> {
        self.keep_last_state(sequence);
        Ok(self.recovered().preempt(sequence)?)
    }

    /// Ends every sequence; their cached blocks can be reused.
    ///
    /// # Errors
    /// [`PlanError::State`] while a step is held.
    pub fn reset(&mut self) -> Result<(), CacheError> {
        let sequences: Vec<_> = self.recovered().sequences().collect();
        for sequence in sequences {
            self.keep_last_state(sequence);
        }
        Ok(self.recovered().reset()?)
    }

    /// Adds a length at which a running sequence keeps its recurrent states for other prompts, such
    /// as one that has arrived since with the same beginning. It joins the stops of the sequence's
    /// start ([`CacheState::next_stop`]), rounded as they are ([`CacheState::kept_length`]); a
    /// length that the sequence has reached, or a cache without states, leaves them alone.
    ///
    /// # Errors
    /// [`PlanError::UnknownSequence`]; [`PlanError::State`] while a step is held.
    pub fn add_stop(&mut self, sequence: SequenceId, len: u32) -> Result<(), CacheError> {
        Ok(self.recovered().add_stop(sequence, len)?)
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
    /// [`PlanError::State`] while a step is held.
    pub fn unpin(&mut self, pin: PinId) -> Result<bool, CacheError> {
        Ok(self.recovered().unpin(pin)?)
    }

    /// Removes from the index the blocks that only this sequence has cached, last first, up to the
    /// first block that another sequence holds or continues. The sequence goes on without offering
    /// further blocks. Returns the number of removed blocks in all groups. Lower tiers keep their
    /// copies: `kv_tier::TieredCache::forget_sequence` removes those too.
    ///
    /// # Errors
    /// [`PlanError::UnknownSequence`]; [`PlanError::State`] while a step is held.
    pub fn forget_sequence(&mut self, sequence: SequenceId) -> Result<u32, CacheError> {
        Ok(self.recovered().forget_sequence(sequence)?)
    }

    /// Evicts the cached blocks of a prompt after its first `keep` tokens, last first, up to the
    /// first that is held or that another prompt continues. Returns the number of these blocks in
    /// all groups. Lower tiers keep theirs: `kv_tier::TieredCache::forget_prefix` removes those
    /// too.
    ///
    /// # Errors
    /// [`PlanError::State`] while a step is held.
    pub fn forget_prefix(
        &mut self,
        tokens: &[u32],
        options: StartOptions<'_>,
        keep: u32,
    ) -> Result<u32, CacheError> {
        Ok(self.recovered().forget_prefix(tokens, options, keep)?)
    }

    /// Evicts everything that is cached with a salt, of all adapters, except held blocks and the
    /// blocks before them; an empty salt stands for prompts without one. Returns the number of
    /// blocks in all groups. Lower tiers keep their copies: `kv_tier::TieredCache::forget_salt`
    /// removes those too.
    ///
    /// # Errors
    /// [`PlanError::State`] while a step is held.
    pub fn forget_salt(&mut self, salt: &[u8]) -> Result<u32, CacheError> {
        Ok(self.recovered().forget_salt(salt)?)
    }

    /// Evicts everything cached; `false`, and no change, while a sequence, a pin, a hold or an
    /// import holds a block. Lower tiers keep theirs: `kv_tier::TieredCache::forget_all` empties
    /// them too.
    ///
    /// # Errors
    /// [`PlanError::State`] while a step is held.
    pub fn reset_prefixes(&mut self) -> Result<bool, CacheError> {
        Ok(self.recovered().reset_prefixes()?)
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

    /// Appends an event of a tier below the device: [`EventKind::Stored`], [`EventKind::Updated`],
    /// [`EventKind::Removed`] or [`EventKind::Cleared`] of a [`Tier`] other than [`Tier::Device`].
    /// `false`, and no change, for any other event, or if events are off. The announcer of a tier
    /// also adds its blocks to the [snapshots](CacheState::snapshot) of late subscribers.
    pub fn announce(&mut self, kind: EventKind) -> bool {
        self.recovered().announce(kind)
    }

    /// Moves the changes of blocks since the last call to the end of `out`, in order. `false`, and
    /// nothing moved, if there were more than
    /// [`CacheSpecBuilder::changes`](crate::spec::CacheSpecBuilder::changes) keeps: then look at
    /// [`CacheState::stored_blocks`], which includes every change up to now. While a step is held,
    /// only certain changes move: of blocks that the step evicted, not of those that it fills.
    pub fn drain_changes(&mut self, out: &mut Vec<BlockChange>) -> bool {
        self.recovered().drain_changes(out)
    }

    /// Holds a cached block, or a snapshot of recurrent states, while its bytes are read, until
    /// [`Self::release_hold`]. `None` if the block is unknown or does not have the content of this
    /// key (any more).
    ///
    /// ```
    /// use kv::backend::NullBackend;
    /// use kv::block::BlockChangeKind;
    /// use kv::{CacheSpec, KvCache, SequenceId, StartOptions, StepInput};
    ///
    /// let spec = CacheSpec::builder().layers(1).kv_heads(1).head_dim(4).paged(2, 8).changes(16);
    /// let mut cache = KvCache::new(NullBackend::new(), spec.build()?)?;
    /// cache.start(SequenceId(0), &[1, 2, 3], StartOptions::default())?;
    /// let mut step = cache.begin_step(&[StepInput::tokens(SequenceId(0), &[1, 2, 3])])?;
    /// step.mark_written();
    /// step.commit()?;
    ///
    /// let mut changes = Vec::new();
    /// assert!(cache.drain_changes(&mut changes));
    /// let [stored] = changes[..] else { panic!("one block is full") };
    /// assert_eq!(stored.kind, BlockChangeKind::Stored);
    /// let hold = cache.hold_block(stored.group, stored.block, stored.key)?.expect("it is cached");
    /// let content = cache.state().pool(hold.group()).and_then(|pool| pool.content(hold.block()));
    /// assert_eq!(content.map(|content| content.tokens), Some(&[1, 2][..]));
    /// // Copy the bytes, then:
    /// cache.release_hold(hold)?;
    /// # Ok::<(), kv::CacheError>(())
    /// ```
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

    /// Holds a block of a sequence while its bytes are read, with content that other prompts find
    /// or without, such as the block that the sequence writes next. Release it before the next step
    /// ([`Self::release_hold_after`]), which copies the block otherwise. `None` for an index that
    /// the [block table](CacheState::block_table) has not, or that a window has left.
    ///
    /// # Errors
    /// [`PlanError::UnknownSequence`]; those of [`Self::hold_block`].
    pub fn hold_entry(
        &mut self,
        sequence: SequenceId,
        group: GroupId,
        index: u32,
    ) -> Result<Option<BlockHold>, CacheError> {
        self.recovered().check_closed("hold block")?;
        self.restore()?;
        Ok(self.state.hold_entry(sequence, group, index)?)
    }

    /// Releases a block whose bytes are read. Without another holder the block can be evicted
    /// again, as early as without the hold, as far as the eviction policy can tell.
    ///
    /// # Errors
    /// [`PlanError::State`] while a step is held: the hold stays, until [`Self::release_holds`]; or
    /// if the hold ended already or is of another cache.
    pub fn release_hold(&mut self, hold: BlockHold) -> Result<(), CacheError> {
        Ok(self.recovered().release_hold(hold)?)
    }

    /// Releases every hold and returns their number; later calls with one of them are refused. Call
    /// it only if no byte is being read any more.
    ///
    /// # Errors
    /// [`PlanError::State`] while a step is held.
    pub fn release_holds(&mut self) -> Result<u32, CacheError> {
        Ok(self.recovered().release_holds()?)
    }

    /// Takes a block for every content of a probed prompt that a sequence needs to reuse
    /// [`hit(upto)`](PrefixProbe::hit) tokens and that is not cached. The blocks are held and
    /// cannot be found before [`Self::publish_import`]; their bytes are undefined,
    /// or zero if the spec wipes. Needed blocks
    /// that are cached are held too. No block is evicted that computing the same tokens would have
    /// left.
    ///
    /// The prompt is looked up again, so that the probe may be older than the cached blocks.
    ///
    /// ```
    /// use kv::backend::NullBackend;
    /// use kv::events::Tier;
    /// use kv::{CacheSpec, KvCache, SequenceId, StartOptions};
    ///
    /// let spec = CacheSpec::builder().layers(1).kv_heads(1).head_dim(4).paged(2, 8).build()?;
    /// let mut cache = KvCache::new(NullBackend::new(), spec)?;
    /// let (prompt, options) = ([1, 2, 3, 4, 5], StartOptions::default());
    /// let probe = cache.state().probe_keys(&prompt, &options);
    /// assert_eq!((probe.cached(), probe.hit(5)), (0, 4));
    ///
    /// let mut import = cache.reserve_import(&probe, 4)?;
    /// assert_eq!(import.blocks().len(), 2); // copy bytes to these
    /// cache.publish_import(&mut import, 4, Tier::Disk)?;
    /// assert_eq!(cache.start(SequenceId(0), &prompt, options)?, 4);
    /// cache.finish_import(import)?;
    /// assert_eq!(cache.state().stats().disk_hit_tokens, 4);
    /// # Ok::<(), kv::CacheError>(())
    /// ```
    ///
    /// # Errors
    /// [`CacheError::Exhausted`] for the first group with too few blocks; [`PlanError::State`]
    /// while a step is held, or if everything was evicted since the probe, the constants or layers
    /// of the cache changed, or the probe is of another cache; [`PlanError::TooMany`] for more
    /// tokens than the probe's [limit](PrefixProbe::limit); a device failure of the wipe. Nothing
    /// changed then, but evicted content stays gone.
    pub fn reserve_import(&mut self, probe: &PrefixProbe, upto: u32) -> Result<Import, CacheError> {
        let import = self.recovered().reserve_import(probe, upto)?;
        self.wipe_reserved(import)
    }

    /// Does what [`Self::reserve_import`] does, and takes the block of
    /// [`PrefixProbe::part`] too, which may have fewer tokens than fit: the last one of a sequence
    /// whose every token is brought. It is published as the partial block of a sequence that has
    /// ended. The bytes after its last token are never read.
    ///
    /// ```
    /// use kv::backend::NullBackend;
    /// use kv::events::Tier;
    /// use kv::{CacheSpec, KvCache, SequenceId, StartOptions};
    ///
    /// let spec = CacheSpec::builder().layers(1).kv_heads(1).head_dim(4).paged(4, 8).build()?;
    /// let mut cache = KvCache::new(NullBackend::new(), spec)?;
    /// let (prompt, options) = ([1, 2, 3, 4, 5, 6, 7], StartOptions::default());
    /// let probe = cache.state().probe_keys(&prompt, &options);
    /// let mut import = cache.reserve_import_with_part(&probe, 6)?;
    /// assert_eq!((import.blocks().len(), import.hit()), (2, 6));
    /// cache.publish_import(&mut import, 6, Tier::Disk)?;
    /// cache.finish_import(import)?;
    /// assert_eq!(cache.start(SequenceId(0), &prompt, options)?, 6);
    /// # Ok::<(), kv::CacheError>(())
    /// ```
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

    /// Does what [`Self::reserve_import_with_part`] does, and takes the snapshots of recurrent
    /// states behind exactly `upto` tokens, without which a cache with states reuses none of them.
    /// The planes of a snapshot are those of its [`SnapshotsSpec`](crate::spec::SnapshotsSpec). In
    /// a cache without states there is no difference.
    ///
    /// # Errors
    /// Those of [`Self::reserve_import`]; [`CacheError::Exhausted`] names the group of snapshots if
    /// all are held.
    pub fn reserve_import_with_state(
        &mut self,
        probe: &PrefixProbe,
        upto: u32,
    ) -> Result<Import, CacheError> {
        let import = self.recovered().reserve_import_with_state(probe, upto)?;
        self.wipe_reserved(import)
    }

    fn wipe_reserved(&mut self, import: Import) -> Result<Import, CacheError> {
        if let Err(failed) = self.wipe_released() {
            self.state.finish_import(import)?;
            return Err(failed.into());
        }
        Ok(import)
    }

    /// Makes the blocks reusable that end at or before `upto` tokens, whose bytes have come from
    /// `tier`: the work that writes them is recorded on the cache's queue, or done. They stay held
    /// by the import. If another block has got the same content meanwhile, the import holds that
    /// one instead.
    ///
    /// [`Stats`](crate::Stats) counts the tokens as hits of `tier` when a sequence first reuses
    /// them, and the eviction policy counts that reuse as the use that they were imported for.
    ///
    /// # Errors
    /// [`PlanError::State`] while a step is held, if the import has ended or is of another cache,
    /// or if everything was evicted since the probe or the constants or layers of the cache
    /// changed; [`PlanError::TooMany`] for more tokens than were reserved. Nothing changed then.
    pub fn publish_import(
        &mut self,
        import: &mut Import,
        upto: u32,
        tier: Tier,
    ) -> Result<(), CacheError> {
        Ok(self.recovered().publish_import(import, upto, tier)?)
    }

    /// Ends an import: published blocks can be reused and evicted, the others are empty.
    ///
    /// # Errors
    /// [`PlanError::State`] while a step is held: the blocks stay held, until
    /// [`Self::finish_imports`]; or if the import has ended or is of another cache.
    pub fn finish_import(&mut self, import: Import) -> Result<(), CacheError> {
        Ok(self.recovered().finish_import(import)?)
    }

    /// Ends every import and returns their number; later calls with one of them are refused. Call
    /// it only if no byte is being written to their blocks any more.
    ///
    /// # Errors
    /// [`PlanError::State`] while a step is held.
    pub fn finish_imports(&mut self) -> Result<u32, CacheError> {
        Ok(self.recovered().finish_imports()?)
    }

    /// Returns the state, after rolling back a leaked step.
    fn recovered(&mut self) -> &mut CacheState {
        self.recover();
        &mut self.state
    }
}
