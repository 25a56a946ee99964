//! One forward pass, as its caller sees it.
use crate::backend::{AnyBackend, Backend};
use crate::cache::open::OpenEntry;
use crate::cache::{KvCache, StartOptions};
use crate::error::{CacheError, PlanError};
use crate::geometry::QkvFormat;
use crate::ids::{GroupId, LayerId, SequenceId};
use crate::num::to_u64;
use crate::plan::{AttentionOptions, AttentionPlan, BatchEntry, PlannedSequence, WritePlan};
use crate::spec::CacheSpec;
use crate::tensor::{TensorView, TensorViewMut};

/// What one sequence brings to a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepInput<'a> {
    pub(super) sequence: SequenceId,
    brings: Brings<'a>,
    drafts: u32,
    lookahead: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Brings<'a> {
    Tokens(&'a [u32]),
    Count(u32),
    Query(u32),
    Nothing,
}

impl<'a> StepInput<'a> {
    fn new(sequence: SequenceId, brings: Brings<'a>) -> Self {
        Self { sequence, brings, drafts: 0, lookahead: 0 }
    }
    /// New tokens, whose K and V the step writes and whose queries attend.
    pub fn tokens(sequence: SequenceId, tokens: &'a [u32]) -> Self {
        Self::new(sequence, Brings::Tokens(tokens))
    }
    /// So many new tokens, from a caller without token ids; such tokens are never reused.
    pub fn count(sequence: SequenceId, tokens: u32) -> Self {
        Self::new(sequence, Brings::Count(tokens))
    }
    /// Queries over what is cached, writing nothing: cross-attention over an encoder's K and V.
    /// All of one step are at most [`max_queries`](crate::CacheSpec::max_queries).
    pub fn query(sequence: SequenceId, queries: u32) -> Self {
        Self::new(sequence, Brings::Query(queries))
    }
    /// A batch row that neither writes nor attends, so that rows keep their places.
    pub fn idle(sequence: SequenceId) -> Self {
        Self::new(sequence, Brings::Nothing)
    }

    /// The last `drafts` new tokens, which may be all of them, are guesses of a draft model: blocks
    /// that hold one are not reusable before a later step. [`Step::commit_accepted`] or
    /// [`KvCache::truncate`] takes back what was not accepted.
    #[must_use]
    pub fn drafts(self, drafts: u32) -> Self {
        Self { drafts, ..self }
    }
    /// Takes the slots of `tokens` tokens behind the new ones too, for the steps to come. No effect
    /// for groups with a tail. The pools are the bound: a lookahead beyond them is
    /// [exhausted](CacheError::Exhausted).
    #[must_use]
    pub fn lookahead(self, tokens: u32) -> Self {
        Self { lookahead: tokens, ..self }
    }

    /// Ids of the new tokens, if known.
    pub(super) fn ids(&self) -> Option<&'a [u32]> {
        match self.brings {
            Brings::Tokens(tokens) => Some(tokens),
            _ => None,
        }
    }
    pub(super) fn details(&self) -> OpenEntry {
        OpenEntry { drafts: self.drafts, lookahead: self.lookahead }
    }

    /// New tokens and queries of a sequence that has `len` tokens and may have `max`: every count
    /// that the input gives is within bounds but that of its queries, see [`check_queries`].
    #[inline]
    pub(super) fn counts(&self, len: u32, max: u32) -> Result<(u32, u32), PlanError> {
        let sequence = self.sequence;
        let (new, queries) = match self.brings {
            Brings::Tokens(tokens) => (to_u64(tokens.len()), 0),
            Brings::Count(n) => (u64::from(n), 0),
            Brings::Query(n) => (0, n),
            Brings::Nothing => (0, 0),
        };
        if new == 0 && queries == 0 && self.brings != Brings::Nothing {
            return Err(PlanError::ZeroTokens { sequence });
        }
        let new_tokens = u32::try_from(new).ok();
        let Some(new_tokens) = new_tokens.filter(|new| *new <= max.saturating_sub(len)) else {
            return Err(PlanError::SequenceTooLong { sequence, len, new, max });
        };
        bounded("drafts", self.drafts, new_tokens)?;
        // All new tokens attend.
        Ok((new_tokens, queries.max(new_tokens)))
    }
}

/// Refuses a count above its limit.
#[inline]
pub(super) fn bounded(what: &'static str, got: u32, max: u32) -> Result<(), PlanError> {
    if got <= max {
        return Ok(());
    }
    Err(PlanError::TooMany { what, got: got.into(), max: max.into() })
}

/// Refuses more queries without tokens of their own than a step of the cache may ask.
pub(super) fn check_queries(batch: &[BatchEntry], spec: &CacheSpec) -> Result<(), PlanError> {
    let only_asks = batch.iter().filter(|entry| entry.new_tokens == 0);
    let got = only_asks.fold(0_u64, |n, entry| n.saturating_add(entry.queries.into()));
    // Nearly every step brings tokens alone.
    let max = if got == 0 { 0 } else { u64::from(spec.max_queries()) };
    if got <= max {
        return Ok(());
    }
    Err(PlanError::TooMany { what: "queries in a step", got, max })
}

/// A step in progress. Dropped without [`Self::commit`], it never happened.
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
        self.cache.roll_back();
    }
}

impl<B: Backend> Step<'_, B> {
    /// Position of every query in its sequence, entries one after another: what RoPE needs.
    pub fn positions(&self) -> &[u32] {
        &self.cache.open.positions
    }
    /// The batch as it was planned for the first group: query rows, lengths.
    pub fn sequences(&self) -> &[PlannedSequence] {
        self.cache.open_sequences()
    }
    /// The write plan of one group, for callers that drive the backend themselves.
    pub fn write_plan(&self, group: GroupId) -> Option<WritePlan<'_>> {
        self.cache.open_plans(group).map(|(write, _)| write)
    }
    /// The attention plan of one group, for callers that drive the backend themselves.
    pub fn attention_plan(&self, group: GroupId) -> Option<AttentionPlan<'_>> {
        self.cache.open_plans(group).map(|(_, attend)| attend)
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
    /// and likewise for the other formats ([`AttentionOptions::qkv_format`]). `out` has the element
    /// type of `q`; `num_q_heads` is a multiple of `num_kv_heads`.
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
    /// (`[t, num_q_heads]`, f32), sinks included.
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
        let layers = self.cache.spec.num_layers();
        (0..layers).for_each(|layer| self.cache.open.set_written(LayerId(layer)));
        // Layers without memory are not written, and not asked for.
        let allocated = self.cache.groups.iter().map(|group| group.storage.num_allocated());
        self.cache.open.num_written = allocated.sum();
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
    ) -> Result<usize, CacheError> {
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

    /// Ends the step as if it had never begun. Dropping it does the same.
    pub fn roll_back(self) {}

    /// The cache the step runs on; its lengths are those before the step.
    pub fn cache(&self) -> &KvCache<B> {
        self.cache
    }
}

impl<B: Backend> KvCache<B> {
    /// Plans and reserves a step for the whole batch, or changes nothing.
    ///
    /// # Errors
    /// - [`PlanError::UnknownSequence`], [`PlanError::DuplicateSequence`],
    ///   [`PlanError::ZeroTokens`], [`PlanError::SequenceTooLong`];
    /// - [`PlanError::TooMany`] for more drafts than new tokens, or more queries than
    ///   [`CacheSpec::max_queries`];
    /// - [`CacheError::Exhausted`] with what the whole step needs and what is free;
    /// - the device's own, for the copy of shared blocks.
    pub fn begin_step(&mut self, inputs: &[StepInput<'_>]) -> Result<Step<'_, B>, CacheError> {
        self.begin_borrowed(inputs)?;
        Ok(Step { cache: self })
    }
}
