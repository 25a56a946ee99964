//! One forward pass, as its caller sees it.
use crate::backend::{AnyBackend, Backend};
use crate::cache::KvCache;
use crate::cache::open::Owner;
use crate::cache::state::{StartOptions, StepInput};
use crate::error::CacheError;
#[cfg(doc)]
use crate::error::PlanError;
use crate::geometry::QkvFormat;
use crate::ids::{GroupId, LayerId, SequenceId};
use crate::plan::{AttentionOptions, AttentionPlan, PlannedSequence, WritePlan};
use crate::tensor::{TensorView, TensorViewMut};

/// A step in progress. Dropped without [`Self::commit`], it never happened, unless it is held:
/// [`KvCache::open_step`] says what that means.
///
/// All tensors of a step have a batch entry for each [`StepInput`], in the order they were given; a
/// `bshd` or `sbhd` tensor may have further entries and longer ones, a `thd` tensor further rows.
/// Those are padding: never read in inputs, zero in outputs.
///
/// A step that is leaked ([`std::mem::forget`]) never happened either: the next call that takes the
/// cache by `&mut` takes it back first.
#[derive(Debug)]
pub struct Step<'c, B: Backend = AnyBackend> {
    cache: &'c mut KvCache<B>,
}

impl<B: Backend> Drop for Step<'_, B> {
    fn drop(&mut self) {
        if self.cache.owner == Owner::Borrow {
            self.cache.roll_back();
        }
    }
}

impl<B: Backend> Step<'_, B> {
    /// Position of every query in its sequence, entries one after another: what RoPE needs.
    pub fn positions(&self) -> &[u32] {
        self.cache.state.positions()
    }
    /// The batch as it was planned for the first group: query rows, lengths.
    pub fn sequences(&self) -> &[PlannedSequence] {
        self.cache.state.planned_sequences()
    }
    /// The write plan of one group, for callers that drive the backend themselves.
    pub fn write_plan(&self, group: GroupId) -> Option<WritePlan<'_>> {
        self.cache.state.plans(group).map(|(write, _)| write)
    }
    /// The attention plan of one group, for callers that drive the backend themselves.
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
    /// device's own. The step stays open.
    pub fn write(
        &mut self,
        layer: impl Into<LayerId>,
        k: TensorView<'_, B::Buffer>,
        v: TensorView<'_, B::Buffer>,
        format: QkvFormat,
    ) -> Result<(), CacheError> {
        self.cache.write_open(layer.into(), [k, v], format)
    }

    /// Attends this step's queries over each sequence's cached rows, this step's included.
    ///
    /// # Shapes
    /// `q` is `[t, num_q_heads, head_dim_k]` and `out` `[t, num_q_heads, head_dim_v]` for `thd`,
    /// and likewise for the other formats ([`AttentionOptions::with_qkv_format`]). `out` has the
    /// element type of `q`; `num_q_heads` is a multiple of `num_kv_heads`.
    ///
    /// An `out` in host memory holds its rows when the call returns. On a GPU that costs a
    /// submission and a wait for every call; an `out` in device memory costs neither. It is refused
    /// as `Unsupported` while launches are captured and where a thread may not wait.
    ///
    /// # Errors
    /// [`PlanError`] for a layer that is unknown or not written in this step, or that got memory
    /// when tokens were cached already which the step would attend to, a tensor or an option that
    /// does not fit; the device's own. The step stays open.
    pub fn attend(
        &mut self,
        layer: impl Into<LayerId>,
        q: TensorView<'_, B::Buffer>,
        out: TensorViewMut<'_, B::Buffer>,
        options: &AttentionOptions<'_>,
    ) -> Result<(), CacheError> {
        self.cache.attend_open(layer.into(), q, (out, None), options)
    }

    /// As [`Self::attend`], and writes the natural log-sum-exp of every query and head to `lse`
    /// (`[t, num_q_heads]`, f32), sink logits included.
    ///
    /// # Errors
    /// As [`Self::attend`].
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

    /// The cache's lane of work, for what a device can do besides: capturing the launches of a
    /// step, or replaying them.
    pub fn queue_mut(&mut self) -> &mut B::Queue {
        &mut self.cache.queue
    }

    /// Says that every layer is written by work the caller has submitted, as when launches of an
    /// earlier step are replayed. What that work does is the caller's affair.
    pub fn mark_written(&mut self) {
        self.cache.mark_all_written();
    }

    /// Ends the step: lengths advance, and recorded work goes to the device.
    ///
    /// # Errors
    /// [`PlanError::LayersUnwritten`] when a layer with memory was not written, or the device's
    /// own. Either way the step is rolled back.
    pub fn commit(self) -> Result<(), CacheError> {
        self.cache.commit_open(None)
        // Dropping `self` finds the step closed, or rolls it back.
    }

    /// As [`Self::commit`], but of the new tokens of entry `b` only the first `accepted[b]` stay:
    /// the others were drafts that the model did not confirm. Their slots stay with the sequence
    /// for its next step.
    ///
    /// # Errors
    /// As [`Self::commit`]; [`PlanError::LengthMismatch`] for a list of another length than the
    /// batch, [`PlanError::TooMany`] for more than an entry brought.
    pub fn commit_accepted(self, accepted: &[u32]) -> Result<(), CacheError> {
        self.cache.commit_open(Some(accepted))
    }

    /// Starts a sequence while the step is open, before its first write. With
    /// [`PublishAt::Begin`](crate::PublishAt) it finds the blocks that this step fills: two
    /// requests with one system prompt compute it once though they arrive together. Of blocks that
    /// this step fills no part is taken over: it would be copied before it is written. The sequence
    /// goes away with the step if that is rolled back.
    ///
    /// # Errors
    /// As [`KvCache::start`].
    pub fn start(
        &mut self,
        sequence: SequenceId,
        prompt: &[u32],
        options: StartOptions<'_>,
    ) -> Result<u32, CacheError> {
        self.cache.start_open(sequence, prompt, options)
    }

    /// Takes a further sequence into the batch, as its last entry, or changes nothing. A scheduler
    /// adds one after another until the blocks are [exhausted](CacheError::Exhausted).
    ///
    /// # Errors
    /// As [`KvCache::begin_step`]; [`PlanError::State`] once a layer is written.
    pub fn add(&mut self, input: StepInput<'_>) -> Result<(), CacheError> {
        self.cache.add_open(input)
    }

    /// Ends the step as if it had never begun. Dropping a step that is not held does the same.
    pub fn roll_back(self) {
        self.cache.roll_back();
    }

    /// The cache the step runs on; its lengths are those before the step.
    pub fn cache(&self) -> &KvCache<B> {
        self.cache
    }
}

impl<B: Backend> KvCache<B> {
    /// Plans and reserves a step for the whole batch, or changes nothing: a step that is refused
    /// gives no block back either, not even one that has left a window.
    ///
    /// The step ends with its [`Step`]; [`Self::open_step`] begins one that is held from call to
    /// call.
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
        self.begin(inputs, Owner::Borrow)?;
        Ok(Step { cache: self })
    }

    /// Begins a step that is held: it stays open until [`Self::commit_step`] or
    /// [`Self::roll_back`], across await points and calls from other languages. [`Self::step`]
    /// lends it out in between.
    ///
    /// ```
    /// use kv_core::backend::NullBackend;
    /// use kv_core::{CacheSpec, KvCache, QkvFormat, SequenceId, StartOptions};
    /// use kv_core::{StepInput, TensorView};
    ///
    /// let spec = CacheSpec::builder().layers(2).kv_heads(1).head_dim(2).paged(16, 8).build()?;
    /// let mut cache = KvCache::new(NullBackend::new(), spec)?;
    /// let seq = SequenceId(0);
    /// cache.start(seq, &[5, 6], StartOptions::default())?;
    /// cache.open_step(&[StepInput::tokens(seq, &[5, 6])])?;
    /// for layer in 0..2 {
    ///     // Another call, or another await point: the step is still there.
    ///     let mut step = cache.step().expect("a step is held");
    ///     let rows = TensorView::host(&[0.5_f32; 4], &[2, 1, 2]);
    ///     step.write(layer, rows, rows, QkvFormat::Thd)?;
    /// }
    /// cache.commit_step()?;
    /// assert_eq!(cache.seq_len(seq), Some(2));
    /// # Ok::<(), kv_core::CacheError>(())
    /// ```
    ///
    /// While a step is held, everything that only reads works, with the lengths before the step:
    /// the methods of [`CacheState`](crate::CacheState), [`Self::storage`] and so on. Of the calls
    /// that take the cache by `&mut`, [`Self::queue_mut`], [`Self::allocate_layer`],
    /// [`Self::pin_prefix`], [`Self::prioritise_prefix`], [`Self::set_policy`] and
    /// [`Self::take_events`] work. All others are refused with [`PlanError::State`] and change
    /// nothing, because the step could not be rolled back after them: [`Self::begin_step`],
    /// [`Self::open_step`], [`Self::start`] ([`Step::start`] works), [`Self::fork`],
    /// [`Self::truncate`], [`Self::release`], [`Self::preempt`], [`Self::reset`],
    /// [`Self::unpin`], [`Self::forget_sequence`], [`Self::forget_prefix`],
    /// [`Self::reset_prefixes`], [`Self::gather`] and [`Self::recalibrate`].
    ///
    /// # Errors
    /// As [`Self::begin_step`].
    pub fn open_step(&mut self, inputs: &[StepInput<'_>]) -> Result<(), CacheError> {
        self.begin(inputs, Owner::Caller)
    }

    /// The step that is held, `None` when none is. Dropping what this returns leaves the step open.
    pub fn step(&mut self) -> Option<Step<'_, B>> {
        self.recover();
        self.state.is_step_open().then(|| Step { cache: self })
    }

    /// Ends the step that is held: [`Step::commit`].
    ///
    /// # Errors
    /// [`PlanError::State`] when no step is held; otherwise as [`Step::commit`], and the step is
    /// rolled back.
    pub fn commit_step(&mut self) -> Result<(), CacheError> {
        self.recover();
        self.commit_open(None)
    }

    /// Ends the step that is held, of which only some tokens stay: [`Step::commit_accepted`].
    ///
    /// # Errors
    /// [`PlanError::State`] when no step is held; otherwise as [`Step::commit_accepted`], and the
    /// step is rolled back.
    pub fn commit_step_accepted(&mut self, accepted: &[u32]) -> Result<(), CacheError> {
        self.recover();
        self.commit_open(Some(accepted))
    }

    /// Ends the open step as if it had never begun; nothing to do when none is open.
    ///
    /// Two things stay, neither of which a later step can tell: what was evicted for the step is
    /// gone, and blocks that left a window as it began are free, because the step may have written
    /// over them. No query from the sequence's length on sees them; a truncation that would is
    /// refused.
    pub fn roll_back(&mut self) {
        if self.state.is_step_open() {
            self.state.roll_back();
        }
    }
}
