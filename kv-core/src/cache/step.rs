//! The API of one forward pass.
use crate::backend::{AnyBackend, Backend};
use crate::cache::KvCache;
use crate::cache::state::{StartOptions, StepInput};
use crate::error::{CacheError, PlanError};
use crate::geometry::Axes;
use crate::ids::Plane;
use crate::ids::{GroupId, LayerId, SequenceId};
use crate::plan::{AttentionOptions, AttentionPlan, PlannedSequence, WritePlan};
use crate::tensor::{TensorView, TensorViewMut};

/// A step: one forward pass over some sequences of a cache, in progress.
///
/// For every layer, [`Self::write`] stores K and V of the new tokens, then [`Self::attend`]
/// computes the attention of their queries over all tokens of each sequence. [`Self::commit`] ends
/// the step; a step that is dropped before is rolled back. [`Self::hold`] keeps the step open
/// beyond its borrow of the cache, and [`KvCache::held`] returns it.
///
/// All tensors of a step have a batch entry for each [`StepInput`], in the order of the inputs. A
/// `bshd` or `sbhd` tensor may have further entries and longer ones, a `thd` tensor further rows.
/// These are padding: never read in inputs, zero in outputs.
///
/// A step that is leaked ([`std::mem::forget`]) is rolled back too, by the next call that takes the
/// cache by `&mut`.
#[derive(Debug)]
pub struct Step<'c, B: Backend = AnyBackend> {
    cache: &'c mut KvCache<B>,
}

impl<B: Backend> Drop for Step<'_, B> {
    fn drop(&mut self) {
        if !self.cache.is_held {
            self.cache.roll_back();
        }
    }
}

impl<B: Backend> Step<'_, B> {
    /// Returns the position of every query in its sequence, entries one after another: RoPE needs
    /// it.
    pub fn positions(&self) -> &[u32] {
        self.cache.state.positions()
    }
    /// Returns the batch as planned for the first group: query rows, lengths.
    pub fn sequences(&self) -> &[PlannedSequence] {
        self.cache.state.planned_sequences()
    }
    /// Returns the write plan of one group, for callers that drive the backend themselves.
    pub fn write_plan(&self, group: GroupId) -> Option<WritePlan<'_>> {
        self.cache.state.plans(group).map(|(write, _)| write)
    }
    /// Returns the attention plan of one group, for callers that drive the backend themselves.
    pub fn attention_plan(&self, group: GroupId) -> Option<AttentionPlan<'_>> {
        self.cache.state.plans(group).map(|(_, attend)| attend)
    }

    /// Writes the K and V of this step's new tokens into one layer.
    ///
    /// Stateless: positions come from committed lengths, so layers may come in any order and a
    /// write may be repeated.
    ///
    /// # Shapes
    /// | argument | `thd` | `bshd` | `sbhd` |
    /// |---|---|---|---|
    /// | `k` | `[t, num_kv_heads, head_dim_k]` | `[b, s, ..]` | `[s, b, ..]` |
    /// | `v` | `[t, num_kv_heads, head_dim_v]` | `[b, s, ..]` | `[s, b, ..]` |
    ///
    /// Elements are f32, f16 or bf16, whatever the stored format is.
    ///
    /// # Errors
    /// [`PlanError`] for an unknown or unallocated layer or a tensor that does not fit; the
    /// device's errors. The step stays open.
    pub fn write(
        &mut self,
        layer: impl Into<LayerId>,
        k: TensorView<'_, B::Buffer>,
        v: TensorView<'_, B::Buffer>,
        axes: Axes,
    ) -> Result<(), CacheError> {
        self.cache.write_open(layer.into(), [k, v], axes)
    }

    /// Attends this step's queries over each sequence's cached rows, this step's included.
    ///
    /// # Shapes
    /// `q` is `[t, num_q_heads, head_dim_k]` and `out` `[t, num_q_heads, head_dim_v]` for `thd`,
    /// and likewise for the other formats ([`AttentionOptions::with_axes`]). `out` has the
    /// element type of `q`; `num_q_heads` is a multiple of `num_kv_heads`.
    ///
    /// An `out` in host memory holds its rows when the call returns. On a GPU that costs a
    /// submission and a wait for every call; an `out` in device memory costs neither. It is refused
    /// as `Unsupported` during a capture of launches, and if the thread may not wait.
    ///
    /// # Errors
    /// [`PlanError`] for a layer that is unknown, not written in this step, or allocated after
    /// tokens that the step would attend to were cached
    /// ([`LateLayers::Refuse`](crate::spec::LateLayers)), and for a tensor or an option that does
    /// not fit; the device's errors. The step stays open.
    pub fn attend(
        &mut self,
        layer: impl Into<LayerId>,
        q: TensorView<'_, B::Buffer>,
        out: TensorViewMut<'_, B::Buffer>,
        options: &AttentionOptions<'_>,
    ) -> Result<(), CacheError> {
        self.cache.attend_open(layer.into(), q, (out, None), options)
    }

    /// Does what [`Self::attend`] does, and writes the natural log-sum-exp of every query and head
    /// to `lse` (`[t, num_q_heads]`, f32), sink logits included.
    ///
    /// # Errors
    /// Those of [`Self::attend`].
    pub fn attend_lse(
        &mut self,
        layer: impl Into<LayerId>,
        q: TensorView<'_, B::Buffer>,
        out: TensorViewMut<'_, B::Buffer>,
        lse: TensorViewMut<'_, B::Buffer>,
        options: &AttentionOptions<'_>,
    ) -> Result<(), CacheError> {
        self.cache.attend_open(layer.into(), q, (out, Some(lse)), options)
    }

    /// Reads all cached rows of the batch from one layer, this step's included, decoded to the
    /// element type of `out`: for attention that knows no block tables. Batch entry `b` fills entry
    /// `b` of `out`; rows past a length become zero.
    ///
    /// # Shapes
    /// `out` is `[b, s, num_kv_heads, head_dim]` for `bshd`, `s` at least the longest length, and
    /// likewise for the other formats; `head_dim` is the plane's.
    ///
    /// # Errors
    /// [`PlanError`] for a layer that is unknown, unallocated or not written in this step; for rows
    /// that have left a window, or that a late layer lacks; for a group with a tail, whose rows are
    /// read after the step ([`KvCache::gather`]); for a shape that does not fit. The device's own.
    /// The step stays open.
    ///
    /// ```
    /// use kv::backend::{NullBackend, Plane};
    /// use kv::{Axes, CacheSpec, KvCache, SequenceId, StartOptions};
    /// use kv::{StepInput, TensorView, TensorViewMut};
    ///
    /// let spec = CacheSpec::builder().layers(1).kv_heads(1).head_dim(2).paged(16, 8).build()?;
    /// let mut cache = KvCache::new(NullBackend::new(), spec)?;
    /// let [a, b] = [SequenceId(0), SequenceId(1)];
    /// cache.start(a, &[], StartOptions::default())?;
    /// cache.start(b, &[], StartOptions::default())?;
    /// let mut step = cache.begin_step(&[StepInput::count(a, 3), StepInput::count(b, 1)])?;
    /// let rows = TensorView::host(&[0.5_f32; 8], &[4, 1, 2]); // 3 tokens and 1
    /// step.write(0, rows, rows, Axes::Thd)?;
    /// let mut keys = [0.0_f32; 12];
    /// let out = TensorViewMut::host(&mut keys, &[2, 3, 1, 2]); // 2 sequences of at most 3 tokens
    /// step.gather(0, Plane::Key, out, Axes::Bshd)?;
    /// step.commit()?;
    /// # Ok::<(), kv::CacheError>(())
    /// ```
    pub fn gather(
        &mut self,
        layer: impl Into<LayerId>,
        plane: Plane,
        out: TensorViewMut<'_, B::Buffer>,
        axes: Axes,
    ) -> Result<(), CacheError> {
        self.cache.gather_open(layer.into(), plane, out, axes)
    }

    /// Checks that every layer with memory and every state is written, as [`Self::commit`] does,
    /// and leaves the step open: a commit that finds one unwritten rolls the step back.
    ///
    /// # Errors
    /// [`PlanError::LayersUnwritten`], [`PlanError::StateUnwritten`].
    pub fn check_written(&self) -> Result<(), PlanError> {
        self.cache.check_all_written(None)
    }

    /// Returns the cache's command queue, for further functions of a device, such as capturing the
    /// launches of a step or replaying them.
    pub fn queue_mut(&mut self) -> &mut B::Queue {
        self.cache.prepare_for_caller();
        &mut self.cache.queue
    }

    /// Marks every layer and every state as written by work that the caller has submitted, such as
    /// a replay of an earlier step's launches. The caller is responsible for the results of that
    /// work.
    pub fn mark_written(&mut self) {
        self.cache.mark_all_written();
    }

    /// Ends the step: lengths advance, and recorded work is submitted to the device.
    ///
    /// # Errors
    /// [`PlanError::LayersUnwritten`] if a layer with memory was not written,
    /// [`PlanError::StateUnwritten`] if a state was not, or the device's errors. Either way the
    /// step is rolled back.
    pub fn commit(self) -> Result<(), CacheError> {
        self.cache.commit_open(None)
        // Dropping `self` finds the step closed, or rolls it back.
    }

    /// Does what [`Self::commit`] does, but keeps only the first `accepted[b]` new tokens of entry
    /// `b`: the others were drafts that the model rejected. Their slots stay with the sequence for
    /// its next step. Recurrent states must be written behind the tokens that stay
    /// ([`Self::write_state_after`]).
    ///
    /// # Errors
    /// Those of [`Self::commit`]; [`PlanError::LengthMismatch`] for a list of another length than
    /// the batch, [`PlanError::TooMany`] for more than an entry's new tokens.
    pub fn commit_accepted(self, accepted: &[u32]) -> Result<(), CacheError> {
        self.cache.commit_open(Some(accepted))
    }

    /// Starts a sequence while the step is open, before its first write. With
    /// [`PublishAt::Begin`](crate::spec::PublishAt) it finds the blocks that this step fills: two
    /// requests with one system prompt that arrive together compute it once. Only whole blocks of
    /// this step are reused, because a part would be copied before it is written. The sequence is
    /// removed if the step is rolled back.
    ///
    /// # Errors
    /// Those of [`KvCache::start`].
    pub fn start(
        &mut self,
        sequence: SequenceId,
        prompt: &[u32],
        options: StartOptions<'_>,
    ) -> Result<u32, CacheError> {
        self.cache.start_open(sequence, prompt, options)
    }

    /// Adds a sequence to the batch, as its last entry, or changes nothing. A scheduler adds one
    /// after another until the blocks are [exhausted](CacheError::Exhausted).
    ///
    /// The cost of a call depends on its sequence, not on the number in the step: contexts are
    /// split anew only when the batch has grown by an eighth, and a GPU receives the plans before
    /// the first call that uses them or the queue.
    ///
    /// # Errors
    /// Those of [`KvCache::begin_step`]; [`PlanError::State`] once a layer is written.
    pub fn add(&mut self, input: StepInput<'_>) -> Result<(), CacheError> {
        self.cache.add_open(input)
    }

    /// Rolls the step back, as if it had never begun. Dropping it does the same.
    ///
    /// Two things stay, neither of which affects later results: content evicted for the step is
    /// gone, and blocks that left a window when it began are free, because the step may have
    /// overwritten them. No query from the sequence's length on sees them; a truncation that would
    /// need them is refused.
    pub fn roll_back(self) {
        self.cache.roll_back();
    }

    /// Keeps the step open without borrowing the cache, across await points and calls from other
    /// languages, until [`KvCache::held`] returns it.
    ///
    /// ```
    /// use kv::backend::NullBackend;
    /// use kv::{Axes, CacheSpec, KvCache, SequenceId, StartOptions};
    /// use kv::{StepInput, TensorView};
    ///
    /// let spec = CacheSpec::builder().layers(2).kv_heads(1).head_dim(2).paged(16, 8).build()?;
    /// let mut cache = KvCache::new(NullBackend::new(), spec)?;
    /// let seq = SequenceId(0);
    /// cache.start(seq, &[5, 6], StartOptions::default())?;
    /// cache.begin_step(&[StepInput::tokens(seq, &[5, 6])])?.hold();
    /// for layer in 0..2 {
    ///     // Another call, or another await point: the step is still there.
    ///     let mut step = cache.held().expect("a step is held");
    ///     let rows = TensorView::host(&[0.5_f32; 4], &[2, 1, 2]);
    ///     step.write(layer, rows, rows, Axes::Thd)?; // an error would roll the step back
    ///     step.hold();
    /// }
    /// cache.held().expect("a step is held").commit()?;
    /// assert_eq!(cache.state().seq_len(seq), Some(2));
    /// # Ok::<(), kv::CacheError>(())
    /// ```
    ///
    /// While a step is held, everything that only reads works, with the lengths before the step:
    /// [`KvCache::state`], [`KvCache::storage`] and so on. Of the calls that take the cache by
    /// `&mut`, [`KvCache::queue_mut`], [`KvCache::allocate_layer`], [`KvCache::pin_prefix`],
    /// [`KvCache::prioritise_prefix`], [`KvCache::hint`], [`KvCache::set_policy`],
    /// [`KvCache::take_events`], [`KvCache::announce`], [`KvCache::drain_changes`] and
    /// [`KvCache::wipe`] work. All others are refused with [`PlanError::State`] and change nothing,
    /// because the step could not be rolled back after them; [`Self::start`] works in place of
    /// [`KvCache::start`].
    pub fn hold(self) {
        self.cache.is_held = true;
    }

    pub(super) fn cache_mut(&mut self) -> &mut KvCache<B> {
        self.cache
    }

    /// Returns the cache that the step runs on; its lengths are those before the step.
    pub fn cache(&self) -> &KvCache<B> {
        self.cache
    }
}

impl<B: Backend> KvCache<B> {
    /// Plans and reserves a step for the whole batch, or changes nothing: a refused step releases
    /// no blocks either, not even those that left a window.
    ///
    /// # Errors
    /// - [`PlanError::UnknownSequence`], [`PlanError::DuplicateSequence`],
    ///   [`PlanError::ZeroTokens`], [`PlanError::SequenceTooLong`];
    /// - [`PlanError::TooMany`] for more drafts than new tokens, or more queries than
    ///   [`CacheSpec::max_queries`](crate::CacheSpec::max_queries);
    /// - [`PlanError::State`] while a step is held;
    /// - [`CacheError::Exhausted`] with what the whole step needs and what is free;
    /// - the device's own, for the copy of shared blocks: the step is rolled back.
    pub fn begin_step(&mut self, inputs: &[StepInput<'_>]) -> Result<Step<'_, B>, CacheError> {
        self.begin(inputs)?;
        Ok(Step { cache: self })
    }

    /// Returns the step that [`Step::hold`] has kept open, `None` if there is none. Dropped, it is
    /// rolled back like any other step: hold it again to keep it.
    pub fn held(&mut self) -> Option<Step<'_, B>> {
        let is_held = std::mem::take(&mut self.is_held);
        if !is_held {
            self.roll_back();
        }
        is_held.then(|| Step { cache: self })
    }
}
