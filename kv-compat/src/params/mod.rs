//! `InferenceParams`: the cache as TransformerEngine's callers know it.
//!
//! Owns the arrays that describe a step; pages and tokens are the manager's.
mod accessors;
mod output;

use kv_core::backend::{AnyBackend, Backend, Plane};
use kv_core::error::{PlanError, StateProblem};
use kv_core::{AttentionOptions, Axes, CacheError, SequenceId, TensorView, TensorViewMut};

use crate::buffers::{StepBuffers, new_len};
use crate::config::{FormatArg, InferenceConfig, OutputFormat};
use crate::manager::{CacheManager, CacheManagerConfig, TrackedSequence};
pub use output::{CacheView, StepOutput};

/// A KV cache driven by one call a step and one a layer.
///
/// `pre_step` names the sequences of a step and their numbers of new tokens; row `i` of every
/// tensor of the step is entry `i`. Sequences that a step does not name are finished and lose their
/// pages, unknown ones begin. A live sequence may bring any number of tokens: one to decode,
/// several to verify a draft or to prefill in chunks, none to keep its row. A new one may bring
/// none, too: it has a row, length 0 and no page.
///
/// # Guarantees
/// - A step is refused before anything changes, or it is prepared whole; pages that departures free
///   serve the same step's arrivals.
/// - The arrays of a step, on the host and on the device, never move.
/// - No history is ever moved: [`Self::page_table`] says where a row's tokens are, paged or not.
///
/// # Source
/// TransformerEngine, `InferenceParams` (v2.8 to v2.13). What differs on purpose:
/// `docs/adr/0003-te-front-end.md`.
///
/// # Examples
/// ```
/// use kv_compat::{InferenceConfig, InferenceParams};
/// use kv::backend::NullBackend;
/// use kv::{AttentionOptions, DType, TensorView, TensorViewMut};
///
/// let config = InferenceConfig::new(4, 64)
///     .num_heads_kv(1)
///     .head_dim_k(2)
///     .dtype(DType::F32)
///     .is_paged(true)
///     .page_size(16)
///     .total_num_pages(8);
/// let mut params = InferenceParams::new(NullBackend::new(), config)?;
/// params.allocate_memory(1)?;
///
/// params.pre_step(&[(40_u64, 3), (41, 1)])?; // two prompts, of 3 tokens and of 1
/// assert_eq!(params.cu_seqlens_kv(), [0, 3, 4, 4, 4]);
/// let kv = [0.0_f32; 4 * 2];
/// let k = TensorView::host(&kv, &[4, 1, 2]);
/// let output = params.step(1, k, k, "thd")?;
/// assert_eq!((output.k.shape(), output.format.name()), ([8, 16, 1, 2], "thd_2bshd"));
/// let mut out = [0.0_f32; 4 * 2];
/// let out = TensorViewMut::host(&mut out, &[4, 1, 2]);
/// params.attend(1, k, out, &AttentionOptions::causal(0.7))?;
///
/// params.pre_step(&[(41_u64, 1)])?; // 40 is finished, 41 decodes
/// assert_eq!(params.get_seqlens_pre_step(), [1, 0, 0, 0]);
/// # params.step(1, k, k, "thd")?;
/// # Ok::<(), kv::CacheError>(())
/// ```
#[derive(Debug)]
pub struct InferenceParams<B: Backend = AnyBackend> {
    manager: Box<dyn CacheManager<B>>,
    config: CacheManagerConfig,
    max_ctx_len: Option<u32>,
    input_format: Axes,
    buffers: StepBuffers<B::Buffer>,
    /// The step being prepared; kept for its memory.
    step: Vec<(SequenceId, u32)>,
}

impl<B: Backend> InferenceParams<B> {
    /// A cache with the built-in manager. Layers get memory from [`Self::allocate_memory`].
    ///
    /// # Errors
    /// [`CacheError::Spec`] naming the argument that is missing, 0, too large or does not divide;
    /// [`CacheError::Plan`] for an unknown format name ([`PlanError::Name`]) or an element type
    /// that cannot be stored ([`PlanError::ElementType`]); the device's own.
    pub fn new(backend: B, config: InferenceConfig) -> Result<Self, CacheError> {
        Self::with_manager(backend, config, |backend, config| config.build(backend))
    }

    /// A cache with a manager of the caller's own, made by `factory` from the device and the
    /// checked configuration; [`CacheManager`] has an example.
    ///
    /// # Errors
    /// As [`Self::new`], and the factory's.
    pub fn with_manager<F>(
        backend: B,
        config: InferenceConfig,
        factory: F,
    ) -> Result<Self, CacheError>
    where
        F: FnOnce(B, &CacheManagerConfig) -> Result<Box<dyn CacheManager<B>>, CacheError>,
    {
        let checked = config.check()?;
        let manager = factory(backend, &checked.manager)?;
        let buffers = StepBuffers::new(manager.backend(), &checked.manager)?;
        Ok(Self {
            manager,
            config: checked.manager,
            max_ctx_len: checked.max_ctx_len,
            input_format: checked.format,
            buffers,
            step: Vec::new(),
        })
    }

    /// Gives a layer its memory, zeroed. Any number names a layer.
    ///
    /// `false` when the layer has memory already: then nothing changes and its rows stay. (The
    /// original replaces them by zeros.) A layer that gets memory while sequences are live has
    /// zeros where their earlier tokens would be.
    ///
    /// # Errors
    /// The device's `OutOfMemory`; [`PlanError::TooMany`] layers, 65,535 being the most.
    pub fn allocate_memory(&mut self, layer: usize) -> Result<bool, CacheError> {
        self.manager.allocate_memory(layer)
    }

    /// Forgets every sequence; a step that was prepared is dropped. Layers keep their memory, and
    /// the arrays of the step become zero.
    ///
    /// # Errors
    /// The device's own; every sequence is gone all the same.
    pub fn reset(&mut self) -> Result<(), CacheError> {
        let reset = self.manager.reset();
        self.buffers.clear();
        self.buffers.upload(self.manager.queue_mut())?;
        reset
    }

    /// Ends the step before and prepares the next, entry by entry `(sequence, new tokens)`.
    ///
    /// An empty step ends every sequence.
    ///
    /// # Errors
    /// Nothing has changed after:
    /// - [`PlanError::TooMany`] sequences, [`PlanError::DuplicateSequence`],
    ///   [`PlanError::SequenceTooLong`];
    /// - [`CacheError::Exhausted`], whose `free` counts the pages that departures would free;
    /// - [`PlanError::LayerNumber`] when the step before brought tokens and a layer with memory was
    ///   not written.
    ///
    /// After a failure of the device no step is prepared, lengths are those of the last step whose
    /// work the device took, and the arrays of the step are zero.
    pub fn pre_step<S: Into<SequenceId> + Copy>(
        &mut self,
        step: &[(S, u32)],
    ) -> Result<(), CacheError> {
        self.step.clear();
        self.step.extend(step.iter().map(|(id, tokens)| ((*id).into(), *tokens)));
        match self.manager.pre_step(&self.step) {
            Ok(()) => {}
            Err(CacheError::Device(error)) => {
                self.buffers.clear();
                return Err(error.into());
            }
            Err(refused) => return Err(refused),
        }
        let published = self.publish();
        if published.is_err() {
            self.roll_back();
        }
        published
    }

    fn publish(&mut self) -> Result<(), CacheError> {
        let rows = self.manager.sequences();
        let as_named = |(row, (id, tokens)): (&TrackedSequence, &(SequenceId, u32))| {
            row.id == *id && new_len(row) == *tokens && row.pre_step_len <= row.len
        };
        if rows.len() != self.step.len() || !rows.iter().zip(&self.step).all(as_named) {
            let problem = StateProblem::OtherRows;
            return Err(PlanError::State { operation: "pre_step", problem }.into());
        }
        self.buffers.fill(&*self.manager)?;
        Ok(self.buffers.upload(self.manager.queue_mut())?)
    }

    /// Takes the prepared step back, for a caller that gives it up half way: lengths are those
    /// before it and the arrays of the step are zero. Sequences it finished stay finished; those it
    /// began stay, with length 0, until the next step names them or not.
    pub fn roll_back(&mut self) {
        self.manager.roll_back();
        self.buffers.clear();
    }

    /// Writes the K and V of the step's tokens into one layer, and says where to read them.
    ///
    /// Stateless: it may be repeated, and layers may come in any order.
    ///
    /// # Shapes
    /// | `format` | `k` (and `v`, with `head_dim_v`) | padding |
    /// |---|---|---|
    /// | `bshd` | `[b, s, num_heads_kv, head_dim_k]` | `b` up to `max_batch_size`, any `s` |
    /// | `sbhd` | `[s, b, num_heads_kv, head_dim_k]` | the same |
    /// | `thd` | `[t, num_heads_kv, head_dim_k]`, no gaps between sequences | rows at the end |
    ///
    /// Padding is never read, so shapes may stay fixed while the batch changes.
    ///
    /// # Errors
    /// [`PlanError::Name`], [`PlanError::State`] before [`Self::pre_step`],
    /// [`PlanError::LayerNumber`], [`PlanError::ElementType`] for any but the cache's own,
    /// [`PlanError::Shape`], [`PlanError::TooMany`] batch entries, [`PlanError::TensorBytes`]; the
    /// device's own. The step stays prepared.
    pub fn step<'n>(
        &mut self,
        layer: usize,
        k: TensorView<'_, B::Buffer>,
        v: TensorView<'_, B::Buffer>,
        format: impl Into<FormatArg<'n>>,
    ) -> Result<StepOutput<'_, B>, CacheError> {
        let format = format.into().resolve().map_err(PlanError::from)?;
        for (tensor, view) in [("k", &k), ("v", &v)] {
            self.check_new(tensor, view, format)?;
        }
        self.manager.step(layer, [k, v], format)?;
        self.input_format = format;
        let batch = batch_extent(&k, format).unwrap_or(self.config.max_batch_size);
        Ok(StepOutput {
            k: self.view(layer, Plane::Key, batch)?,
            v: self.view(layer, Plane::Value, batch)?,
            cu_seqlens_q: self.cu_seqlens_q(),
            cu_seqlens_kv: self.cu_seqlens_kv(),
            cu_seqlens_q_buffer: self.cu_seqlens_q_buffer(),
            cu_seqlens_kv_buffer: self.cu_seqlens_kv_buffer(),
            max_sequence_length: self.config.max_seqlen,
            format: OutputFormat::of(format),
        })
    }

    /// Attends the step's queries over each sequence's cached rows, this step's included.
    ///
    /// # Shapes
    /// `q` is `[.., num_q_heads, head_dim_k]` and `out` `[.., num_q_heads, head_dim_v]`, outer axes
    /// by [`AttentionOptions::axes`]; padding of `out` becomes zero.
    ///
    /// # Errors
    /// [`PlanError`] for a call before [`Self::pre_step`], a layer without memory or not written in
    /// this step, a tensor or an option that does not fit; the device's own.
    pub fn attend(
        &mut self,
        layer: usize,
        q: TensorView<'_, B::Buffer>,
        out: TensorViewMut<'_, B::Buffer>,
        options: &AttentionOptions<'_>,
    ) -> Result<(), CacheError> {
        self.manager.attend(layer, q, (out, None), options)
    }

    /// As [`Self::attend`], and writes the natural log-sum-exp of every query and head to `lse`,
    /// f32.
    ///
    /// # Errors
    /// As [`Self::attend`].
    pub fn attend_lse(
        &mut self,
        layer: usize,
        q: TensorView<'_, B::Buffer>,
        out: TensorViewMut<'_, B::Buffer>,
        lse: TensorViewMut<'_, B::Buffer>,
        options: &AttentionOptions<'_>,
    ) -> Result<(), CacheError> {
        self.manager.attend(layer, q, (out, Some(lse)), options)
    }

    /// Gathers one layer's rows of the step's sequences, this step's included, for attention that
    /// knows no pages. Works whether paged or not.
    ///
    /// # Shapes
    /// `k` is `[batch, s, num_heads_kv, head_dim_k]`, `v` the same with `head_dim_v`; `s` is
    /// usually `max_sequence_length` and at least the longest length. Rows past a length become
    /// zero. (The original shows another sequence's rows there.)
    ///
    /// # Errors
    /// As [`Self::attend`].
    pub fn convert_paged_to_nonpaged(
        &mut self,
        layer: usize,
        k: TensorViewMut<'_, B::Buffer>,
        v: TensorViewMut<'_, B::Buffer>,
    ) -> Result<(), CacheError> {
        self.manager.gather(layer, Plane::Key, k)?;
        self.manager.gather(layer, Plane::Value, v)
    }

    fn check_new(
        &self,
        tensor: &'static str,
        view: &TensorView<'_, B::Buffer>,
        format: Axes,
    ) -> Result<(), PlanError> {
        let got = view.dtype();
        if got != self.config.dtype {
            let expected = "the element type of the cache";
            return Err(PlanError::ElementType { tensor, expected, got });
        }
        let max = self.config.max_batch_size;
        match batch_extent(view, format) {
            Some(got) if got > max => {
                let (got, max) = (u64::from(got), u64::from(max));
                Err(PlanError::TooMany { what: "batch entries of a tensor", got, max })
            }
            _ => Ok(()),
        }
    }

    fn view(
        &self,
        layer: usize,
        plane: Plane,
        batch: u32,
    ) -> Result<CacheView<'_, B::Buffer>, PlanError> {
        let found = self.manager.plane(layer, plane);
        let (operation, problem) = ("step", StateProblem::NoPlane);
        let rows = found.ok_or(PlanError::State { operation, problem })?;
        let CacheManagerConfig { num_heads, head_dim_k, head_dim_v, .. } = self.config;
        let dim = match plane {
            Plane::Key => head_dim_k,
            Plane::Value => head_dim_v,
        };
        let [outer, tokens] = match self.config.pages {
            Some(pages) => [pages.total_num_pages, pages.page_size],
            None => [batch, self.config.max_seqlen],
        };
        Ok(CacheView::new([outer, tokens, num_heads, dim], rows))
    }
}

/// Batch entries a tensor has room for, `None` where its axes do not say.
fn batch_extent<Buf>(view: &TensorView<'_, Buf>, format: Axes) -> Option<u32> {
    let dims = view.dims();
    match format {
        Axes::Bshd => dims.as_slice().first().copied(),
        Axes::Sbhd => dims.as_slice().get(1).copied(),
        _ => None,
    }
}
