//! A cache and the tiers below it, as one object.
use std::time::{Duration, Instant};

use kv_core::backend::{AnyBackend, Backend};
use kv_core::events::Snapshot;
use kv_core::invariant::Invariant;
use kv_core::reuse::Import;
use kv_core::scheduling::CacheState;
use kv_core::{KvCache, SequenceId, StartOptions, Step, StepInput};

use crate::engine::{
    Export, ExportId, ExportState, Forgotten, PrefetchId, TierError, TierOptions, Tiers,
    TiersStats, Unwritten, Wait,
};
use crate::handoff::{Handoff, HandoffError};
use crate::identity::Identity;
#[cfg(doc)]
use crate::policy::WritePolicy;

/// A [`KvCache`] with host memory and stores below its prefix cache.
///
/// Full blocks with reusable content are copied to host memory and, as each store's
/// [`WriteRule`](crate::policy::WriteRule) says, to stores. For a prompt, [`Self::prefetch`] looks
/// for the blocks that the device lacks and reads them to host memory; [`Self::start`] brings them
/// to the device and starts the sequence. Blocks that are late, lost or wrong are computed by the
/// next step as if no tier had existed.
///
/// [`Self::begin_step`] lets the tiers work; a caller without steps to run calls [`Self::poll`]. No
/// call but [`Self::flush`], [`Self::wait`] and those that forget waits for a store.
/// [`Self::cache_mut`] is the cache, for everything that tiers have no part in.
///
/// ```
/// use kv::backend::NullBackend;
/// use kv::{CacheSpec, KvCache, SequenceId, StartOptions, StepInput};
/// use kv::tier::{Identity, MemoryStore, ModelDigest, TierOptions, TieredCache};
///
/// let spec = CacheSpec::builder().layers(2).kv_heads(2).head_dim(64).paged(16, 64).changes(256);
/// let cache = KvCache::new(NullBackend::new(), spec.build()?)?;
/// let identity = Identity::new(ModelDigest::of_bytes(b"weights"));
/// let options = TierOptions::new().with_store(Box::new(MemoryStore::new(1 << 20)));
/// let mut cache = TieredCache::new(cache, identity, options)?;
///
/// let (seq, prompt) = (SequenceId(0), [7; 100]);
/// let prefetch = cache.prefetch(&prompt, &StartOptions::default());
/// // A scheduler goes on with other sequences until `cache.is_ready(prefetch)`.
/// cache.start(prefetch, seq, StartOptions::default())?;
/// let step = cache.begin_step(&[StepInput::prompt(seq, &prompt)])?;
/// // Write and attend, then commit.
/// # drop(step);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct TieredCache<B: Backend = AnyBackend> {
    cache: KvCache<B>,
    tiers: Tiers<B>,
    /// Number of the cache, which the tiers were made for.
    id: u64,
    /// Blocks that were brought for sequences of the next step.
    brought: Vec<Import>,
    /// Whether the step that uses `brought` has begun.
    has_begun: bool,
}

impl<B: Backend> TieredCache<B> {
    /// Reserves host memory for the chunks of a cache and starts the threads of the stores.
    ///
    /// # Errors
    /// [`TierError::NoChanges`] or [`TierError::NoReuse`] for a cache that was not built for tiers;
    /// [`TierError::Chunk`] for blocks that cannot be chunked; [`TierError::HostTooSmall`];
    /// [`TierError::TooManyStores`]; [`TierError::Cache`] if the device cannot reserve the memory;
    /// [`TierError::Thread`].
    pub fn new(
        cache: KvCache<B>,
        identity: Identity,
        options: TierOptions,
    ) -> Result<Self, TierError> {
        let tiers = Tiers::new(&cache, identity, options)?;
        let id = cache.state().id();
        Ok(Self { cache, tiers, id, brought: Vec::new(), has_begun: false })
    }

    /// Returns the cache.
    pub fn cache(&self) -> &KvCache<B> {
        &self.cache
    }
    /// Returns the bookkeeping of the cache, to read.
    pub fn state(&self) -> &CacheState {
        self.cache.state()
    }
    /// Returns the cache, for calls that tiers have no part in: forks, truncations, releases, the
    /// step that is held. Calls that forget are those of this type: the cache's own forget on the
    /// device alone.
    ///
    /// A caller that puts another cache in its place gets a panic from the next call of this type.
    pub fn cache_mut(&mut self) -> &mut KvCache<B> {
        &mut self.cache
    }
    /// Returns the cache without its tiers. A held step is rolled back.
    pub fn into_cache(mut self) -> KvCache<B> {
        drop(self.cache.held());
        self.release_brought();
        self.cache
    }

    /// Does the work between two steps, then begins a step: [`KvCache::begin_step`].
    ///
    /// # Errors
    /// Those of [`Self::poll`] and, in [`TierError::Cache`], of [`KvCache::begin_step`].
    pub fn begin_step(&mut self, inputs: &[StepInput<'_>]) -> Result<Step<'_, B>, TierError> {
        self.poll()?;
        self.has_begun = true;
        Ok(self.cache.begin_step(inputs)?)
    }

    /// Does the work between two steps: takes the results of the threads, follows the changes of
    /// blocks, begins and ends copies from the device, and begins reads. While a step is open it
    /// only takes results.
    ///
    /// # Errors
    /// [`TierError::Cache`] if the device failed. No failure of a store is an error.
    pub fn poll(&mut self) -> Result<(), TierError> {
        self.settle();
        self.tiers.poll(&mut self.cache)
    }

    /// Lets blocks be evicted that [`Self::bring`] has brought and that no sequence has taken;
    /// while a step is open, when it has ended. The first call after the step does this too.
    pub fn release_brought(&mut self) {
        self.has_begun = true;
        self.settle();
    }

    /// Ends the imports whose sequences have started.
    fn settle(&mut self) {
        assert_eq!(self.cache.state().id(), self.id, "tiers keep the cache they were made for");
        if self.has_begun && !self.cache.state().is_step_open() {
            self.has_begun = false;
            for import in self.brought.drain(..) {
                let finished = self.cache.finish_import(import).ok();
                finished.invariant("no step is open, and nobody else ends the import");
            }
        }
    }

    /// Starts the search for the blocks of a prompt that the device lacks, in host memory and
    /// stores. Call it as soon as the prompt is known.
    ///
    /// Chunks that it finds stay in host memory until [`Self::start`] or [`Self::cancel`].
    pub fn prefetch(&mut self, prompt: &[u32], options: &StartOptions<'_>) -> PrefetchId {
        self.tiers.prefetch(&self.cache, prompt, options)
    }

    /// Does what [`Self::prefetch`] does, with another limit of waiting.
    pub fn prefetch_within(
        &mut self,
        prompt: &[u32],
        options: &StartOptions<'_>,
        wait: Wait,
    ) -> PrefetchId {
        self.tiers.prefetch_within(&self.cache, prompt, options, wait)
    }

    /// Returns whether a prompt need not wait any longer: all that can come is here, or its wait
    /// limit has passed. Also `true` for a prefetch that has ended.
    pub fn is_ready(&self, prefetch: PrefetchId) -> bool {
        self.tiers.is_ready(prefetch)
    }

    /// Waits until a prompt [is ready](Self::is_ready), for programs that have nothing else to do.
    ///
    /// # Errors
    /// [`TierError::StepOpen`]; those of [`Self::poll`].
    pub fn wait(&mut self, prefetch: PrefetchId) -> Result<(), TierError> {
        self.settle();
        self.tiers.wait(&mut self.cache, prefetch)
    }

    /// Ends a prefetch whose prompt will not start. `false` if it has ended already.
    pub fn cancel(&mut self, prefetch: PrefetchId) -> bool {
        self.tiers.cancel(prefetch)
    }

    /// Starts a sequence on a prefetched prompt: brings the prefetched blocks to the device, and
    /// returns the number of tokens that need not be computed. The prefetch ends.
    ///
    /// If the device has too few free blocks for them, the sequence starts without them.
    ///
    /// # Errors
    /// [`TierError::UnknownPrefetch`]; [`TierError::OtherOptions`] if salt, adapter, contents or
    /// reuse are not those of the prefetch; [`TierError::Cache`] with the errors of
    /// [`KvCache::start`], or if a copy to the device failed. The prefetch has ended then too, and
    /// no sequence has started.
    pub fn start(
        &mut self,
        prefetch: PrefetchId,
        sequence: SequenceId,
        options: StartOptions<'_>,
    ) -> Result<u32, TierError> {
        self.settle();
        self.tiers.start(&mut self.cache, prefetch, sequence, options)
    }

    /// Brings the prefetched blocks to the device for a sequence that [`Step::start`] starts in the
    /// next step: the start finds them like other cached blocks. They cannot be evicted before that
    /// step of [`Self::begin_step`] has ended. Returns whether any blocks were brought; none are if
    /// the device has too few free blocks. The prefetch ends.
    ///
    /// # Errors
    /// Those of [`Self::start`] without those of [`KvCache::start`].
    pub fn bring(
        &mut self,
        prefetch: PrefetchId,
        options: &StartOptions<'_>,
    ) -> Result<bool, TierError> {
        self.settle();
        let import = self.tiers.bring(&mut self.cache, prefetch, options)?;
        let is_brought = import.is_some();
        self.brought.extend(import);
        Ok(is_brought)
    }

    /// Copies the blocks on the device to host memory, and writes to the stores all chunks that
    /// they should have and lack, until all is done or the deadline has passed. Returns the
    /// remaining work. Call it before the end of the process.
    ///
    /// A store gets the chunks that its rule selects by the uses so far, and the chunks that it
    /// gets only at the end. Its queue is filled as it empties, beginnings of prompts first, and
    /// host memory evicts no chunk that a store has yet to get. A write that fails is repeated,
    /// with pauses; a store that stays down is given up after a second or two.
    ///
    /// # Errors
    /// [`TierError::StepOpen`]; [`TierError::Cache`] if the device failed.
    pub fn flush(&mut self, deadline: Instant) -> Result<Unwritten, TierError> {
        self.settle();
        self.tiers.flush(&mut self.cache, deadline)
    }

    /// Waits until the copies and writes that are due have ended; returns whether they had before
    /// the deadline. Unlike [`Self::flush`] it makes nothing due: chunks that a store gets when
    /// host memory gives them up stay there. For simulations and tests, in which the next prompt is
    /// to find what the one before has left.
    ///
    /// # Errors
    /// Those of [`Self::flush`].
    pub fn drain(&mut self, deadline: Instant) -> Result<bool, TierError> {
        self.settle();
        self.tiers.drain(&mut self.cache, deadline)
    }

    /// Notes how long the model took to compute tokens of prompts: what waiting for a store is
    /// compared with. Without it everything is loaded that a store has.
    pub fn note_compute(&mut self, tokens: u32, time: Duration) {
        self.tiers.note_compute(tokens, time);
    }

    /// Returns the counts of the tiers since their creation.
    pub fn stats(&self) -> TiersStats {
        self.tiers.stats()
    }

    /// Returns all reusable content: blocks of the device, and announced blocks of the tiers. For
    /// subscribers that lost events or joined late: apply the snapshot, then the events from
    /// [`Snapshot::next_id`] on. [`KvCache::snapshot`] has the device's blocks alone.
    ///
    /// [`KvCache::snapshot`]: kv_core::scheduling::CacheState::snapshot
    pub fn snapshot(&mut self) -> Snapshot {
        self.tiers.snapshot(&mut self.cache)
    }

    /// Forgets a prompt after its first `keep` tokens: does what [`KvCache::forget_prefix`] does,
    /// and removes the prompt's chunks from host memory and from all stores. Chunks on their way
    /// are caught: none of them appears after the call has returned.
    ///
    /// In each group chunks go last first, up to the first one that is needed. A chunk is needed if
    /// it ends within `keep`, if its last block stays on the device because a sequence or a pin
    /// holds it or another prompt continues it, or if a chunk in host memory continues it. Prompts
    /// that only stores or other processes have lose a shared beginning and compute it again,
    /// unless `keep` protects it.
    ///
    /// Like [`Self::flush`], the call waits for the stores, until `deadline` at most. Each process
    /// forgets for itself: another process may have the prompt in its memory, and write it again.
    ///
    /// # Errors
    /// [`TierError::StepOpen`]; [`TierError::Cache`] if the device failed. No failure of a store is
    /// an error: see [`Forgotten::failures`].
    pub fn forget_prefix(
        &mut self,
        tokens: &[u32],
        options: StartOptions<'_>,
        keep: u32,
        deadline: Instant,
    ) -> Result<Forgotten, TierError> {
        self.settle();
        self.tiers.forget_prefix(&mut self.cache, tokens, options, keep, deadline)
    }

    /// Forgets a live sequence, as [`KvCache::forget_sequence`] does, and the chunks of its text,
    /// as [`Self::forget_prefix`] does. The sequence goes on, and offers nothing further. One that
    /// offers nothing already has no text: forget it by [`Self::forget_prefix`].
    ///
    /// # Errors
    /// Those of [`Self::forget_prefix`]; [`TierError::Cache`] for an unknown sequence.
    pub fn forget_sequence(
        &mut self,
        sequence: SequenceId,
        deadline: Instant,
    ) -> Result<Forgotten, TierError> {
        self.settle();
        self.tiers.forget_sequence(&mut self.cache, sequence, deadline)
    }

    /// Forgets everything with a salt, of all adapters: does what [`KvCache::forget_salt`] does,
    /// and removes the chunks from host memory and from all stores. An empty salt stands for
    /// prompts without one. Stores must list their content for that; a store that cannot is named
    /// in [`Forgotten::failures`].
    ///
    /// End the sequences with the salt first: their blocks stay on the device, and blocks that they
    /// compute later are kept again. Chunks with constants that a
    /// [recalibration](KvCache::recalibrate) has replaced have other names: only
    /// [`Self::forget_all`] finds and removes them.
    ///
    /// # Errors
    /// Those of [`Self::forget_prefix`].
    pub fn forget_salt(&mut self, salt: &[u8], deadline: Instant) -> Result<Forgotten, TierError> {
        self.settle();
        self.tiers.forget_salt(&mut self.cache, salt, deadline)
    }

    /// Forgets everything: does what [`KvCache::reset_prefixes`] does, empties host memory, and
    /// removes from all stores the chunks of this model, whatever their format, salt, adapter and
    /// writer. Chunks of other models stay. Stores must list their content for that, and a
    /// `SealedStore` cannot tell the model of an object: such stores are named in
    /// [`Forgotten::failures`].
    ///
    /// # Errors
    /// [`TierError::Held`], and no change, while a sequence, a pin, a hold or an import holds a
    /// block; those of [`Self::forget_prefix`].
    pub fn forget_all(&mut self, deadline: Instant) -> Result<Forgotten, TierError> {
        self.settle();
        self.tiers.forget_all(&mut self.cache, deadline)
    }

    /// Begins to write the whole chunks of a sequence to a store, whatever the store's rule for
    /// writes is, and returns the handoff with which a decode engine that shares the store reuses
    /// them ([`Self::import_prefill`]). The handoff can be sent at once: the decode engine waits
    /// for `time` at most, counted from now.
    ///
    /// Call it after the step that computes the end of the prompt, and [`Self::poll`] until the
    /// export [is written](Self::export_state). The sequence may be released meanwhile: its blocks
    /// stay cached until they are evicted.
    ///
    /// Chunks that were published before are in the store already where its rule says so, so that
    /// a prompt in several steps is written while it is computed.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use std::time::Duration;
    ///
    /// use kv::backend::NullBackend;
    /// use kv::{CacheSpec, KvCache, SequenceId, StartOptions};
    /// use kv::tier::handoff::{ExportState, Handoff};
    /// use kv::tier::{Identity, MemoryStore, ModelDigest, TierOptions, TieredCache};
    ///
    /// let store = Arc::new(MemoryStore::new(1 << 20));
    /// let engine = || {
    ///     let spec = CacheSpec::builder().layers(1).kv_heads(1).head_dim(8);
    ///     let spec = spec.paged(4, 64).changes(64);
    ///     let cache = KvCache::new(NullBackend::new(), spec.build()?)?;
    ///     let identity = Identity::new(ModelDigest::of_bytes(b"weights"));
    ///     let options = TierOptions::new().with_store(Box::new(Arc::clone(&store)));
    ///     Ok::<_, Box<dyn std::error::Error>>(TieredCache::new(cache, identity, options)?)
    /// };
    /// let (prompt, options) = ([1, 2, 3, 4, 5, 6], StartOptions::default());
    ///
    /// let mut prefill = engine()?;
    /// prefill.cache_mut().start(SequenceId(0), &prompt, options)?;
    /// // Steps compute the prompt.
    /// let export = prefill.export_prefill(SequenceId(0), 0, Duration::from_secs(5))?;
    /// let message = export.handoff.to_bytes();
    /// prefill.poll()?;
    /// # assert_eq!(prefill.export_state(export.id), Some(ExportState::Written));
    ///
    /// let mut decode = engine()?;
    /// let handoff = Handoff::from_bytes(&message)?;
    /// let prefetch = decode.import_prefill(&handoff, &prompt, &options)?;
    /// while !decode.is_ready(prefetch) {
    ///     decode.poll()?;
    /// }
    /// decode.start(prefetch, SequenceId(0), options)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`HandoffError::NoSequence`]; [`HandoffError::NoStore`] for a store that is not there or
    /// whose rule is [`WritePolicy::Never`]; [`HandoffError::UnknownAdapter`].
    pub fn export_prefill(
        &mut self,
        sequence: SequenceId,
        store: usize,
        time: Duration,
    ) -> Result<Export, HandoffError> {
        self.tiers.export_prefill(&self.cache, sequence, store, time)
    }

    /// Returns how far an export is; `None` once its time has passed.
    pub fn export_state(&self, export: ExportId) -> Option<ExportState> {
        self.tiers.export_state(export)
    }

    /// Starts the search for the blocks of a prompt that another engine has computed, as
    /// [`Self::prefetch`] does, and waits for chunks that are not written yet, until the time in
    /// the handoff. After that time, the prompt takes the chunks in host memory, and tokens that
    /// have not come are computed.
    ///
    /// `prompt` begins with the tokens of the handoff; the token that the prefill engine has
    /// sampled may follow them.
    ///
    /// # Errors
    /// [`HandoffError::Groups`] or [`HandoffError::Root`] for a handoff of another model, format,
    /// salt, adapter or size of chunks; [`HandoffError::Prompt`] for one of another prompt;
    /// [`HandoffError::UnknownAdapter`].
    pub fn import_prefill(
        &mut self,
        handoff: &Handoff,
        prompt: &[u32],
        options: &StartOptions<'_>,
    ) -> Result<PrefetchId, HandoffError> {
        self.tiers.import_prefill(&self.cache, handoff, prompt, options)
    }
}
