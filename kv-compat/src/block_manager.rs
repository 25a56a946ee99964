//! The built-in cache manager, paged and not.
use hashbrown::{HashMap, HashSet};
use kv_core::backend::{AnyBackend, Backend, Plane, PlaneView};
use kv_core::error::{BlocksExhausted, LayerProblem, PlanError, StateProblem};
use kv_core::num::{to_u32, to_u64};
use kv_core::spec::LateLayers;
use kv_core::{
    AttentionOptions, Axes, BlockId, BlockOrder, CacheError, CacheSpec, GroupId, KvCache, LayerId,
    SequenceId, StartOptions, Step, StepInput, TensorView, TensorViewMut,
};

use crate::buffers::new_len;
use crate::config::stored_format;
use crate::manager::{CacheManager, CacheManagerConfig, TrackedSequence};

/// A [`CacheManager`] over [`KvCache`]; a cache that is not paged has one page a sequence.
///
/// No sequence ever moves: where the original re-indexes histories when the batch changes, a row's
/// pages say where its tokens are.
#[derive(Debug)]
pub struct BlockManager<B: Backend = AnyBackend> {
    cache: KvCache<B>,
    max_batch_size: u32,
    max_seqlen: u32,
    block_size: u32,
    /// The batch, lengths after the open step.
    tracked: Vec<TrackedSequence>,
    /// Length of each tracked sequence after the open step.
    lens: HashMap<SequenceId, u32>,
    /// The cache's own ids of the caller's layer numbers, and back.
    layers: HashMap<usize, LayerId>,
    numbers: Vec<usize>,
    /// The step under examination; kept for its memory.
    next: Vec<TrackedSequence>,
    named: HashSet<SequenceId>,
    inputs: Vec<StepInput<'static>>,
}

impl<B: Backend> BlockManager<B> {
    /// A manager whose pages lie as `[page_size, num_heads, head_dim]`, as the original's do.
    ///
    /// # Errors
    /// [`CacheError::Spec`] for an impossible geometry, [`CacheError::Plan`] for an element type
    /// that cannot be stored, the device's own.
    pub fn new(backend: B, config: &CacheManagerConfig) -> Result<Self, CacheError> {
        Self::with_block_order(backend, config, BlockOrder::Nhd)
    }

    /// As [`Self::new`], with a queue of the caller's, such as one on a stream that other work is
    /// ordered with.
    ///
    /// ```
    /// use kv_compat::{BlockManager, InferenceConfig, InferenceParams};
    /// use kv::DType;
    /// use kv::backend::{Backend, NullBackend};
    ///
    /// let (backend, config) = (NullBackend::new(), InferenceConfig::new(4, 64).num_heads_kv(1));
    /// let queue = backend.queue()?;
    /// let config = config.head_dim_k(2).dtype(DType::F32);
    /// let params = InferenceParams::with_manager(backend, config, |backend, config| {
    ///     Ok(Box::new(BlockManager::with_queue(backend, queue, config)?))
    /// })?;
    /// assert_eq!(params.num_free_pages(), 4);
    /// # Ok::<(), kv::CacheError>(())
    /// ```
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn with_queue(
        backend: B,
        queue: impl Into<Option<B::Queue>>,
        config: &CacheManagerConfig,
    ) -> Result<Self, CacheError> {
        Self::open((backend, queue.into()), config, BlockOrder::Nhd)
    }

    /// As [`Self::new`], with the axes inside a page chosen: [`BlockOrder::Hnd`] makes attention
    /// stream, and the views of a step lose the shape they are said to have.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn with_block_order(
        backend: B,
        config: &CacheManagerConfig,
        order: BlockOrder,
    ) -> Result<Self, CacheError> {
        Self::open((backend, None), config, order)
    }

    fn open(
        (backend, queue): (B, Option<B::Queue>),
        config: &CacheManagerConfig,
        order: BlockOrder,
    ) -> Result<Self, CacheError> {
        let builder = CacheSpec::builder()
            .layers_on_demand()
            .late_layers(LateLayers::Zeros)
            .kv_heads(config.num_heads)
            .head_dims(config.head_dim_k, config.head_dim_v)
            .format(stored_format(config.dtype)?)
            .block_order(order)
            .max_sequences(config.max_batch_size)
            .max_seq_len(config.max_seqlen);
        // Not paged is one page a sequence, as long as the longest.
        let block_size = config.pages.map_or(config.max_seqlen, |pages| pages.page_size);
        let builder = match config.pages {
            Some(pages) => builder.paged(pages.page_size, pages.total_num_pages),
            None => builder.contiguous(config.max_batch_size, config.max_seqlen),
        };
        Ok(Self {
            cache: KvCache::builder(backend, builder.build()?).queue(queue).build()?,
            max_batch_size: config.max_batch_size,
            max_seqlen: config.max_seqlen,
            block_size,
            tracked: Vec::new(),
            lens: HashMap::new(),
            layers: HashMap::new(),
            numbers: Vec::new(),
            next: Vec::new(),
            named: HashSet::new(),
            inputs: Vec::new(),
        })
    }

    /// The cache underneath.
    pub fn cache(&self) -> &KvCache<B> {
        &self.cache
    }

    /// Everything that can be said against a step; fills `next` and changes nothing else.
    fn check(&mut self, step: &[(SequenceId, u32)]) -> Result<(), CacheError> {
        let (got, max) = (to_u64(step.len()), u64::from(self.max_batch_size));
        if got > max {
            return Err(PlanError::TooMany { what: "sequences in a step", got, max }.into());
        }
        self.next.clear();
        self.named.clear();
        let mut needed = 0_u32;
        for &(id, tokens) in step {
            if !self.named.insert(id) {
                return Err(PlanError::DuplicateSequence { sequence: id }.into());
            }
            let (pre_step_len, max) = (self.lens.get(&id).copied().unwrap_or(0), self.max_seqlen);
            let grown = pre_step_len.checked_add(tokens).filter(|len| *len <= max);
            let len = grown.ok_or(PlanError::SequenceTooLong {
                sequence: id,
                len: pre_step_len,
                new: u64::from(tokens),
                max,
            })?;
            let held = to_u32(self.pages(id).len());
            // Of sequences that fit one by one; more than `u32` counts do not fit together.
            needed = needed.saturating_add(len.div_ceil(self.block_size).saturating_sub(held));
            self.next.push(TrackedSequence { id, pre_step_len, len });
        }
        // A page that a departure frees may be taken in the same step.
        let finished = self.finished().map(|id| to_u32(self.pages(id).len()));
        let free = self.num_free_pages() + finished.sum::<u32>();
        if needed > free {
            return Err(BlocksExhausted { group: GroupId(0), needed, free, evictable: 0 }.into());
        }
        let written = self.cache.held().map_or(Ok(()), |step| {
            let written = step.check_written();
            step.hold();
            written
        });
        written.map_err(|error| by_number(&self.numbers, error).into())
    }

    /// Tracked sequences that the step under examination does not name.
    fn finished(&self) -> impl Iterator<Item = SequenceId> + '_ {
        self.tracked.iter().map(|s| s.id).filter(|id| !self.named.contains(id))
    }

    /// Carries a checked step out: only the device can fail.
    fn apply(&mut self) -> Result<(), CacheError> {
        if let Some(step) = self.cache.held() {
            step.commit()?;
        }
        for sequence in &self.tracked {
            if !self.named.contains(&sequence.id) {
                self.cache.release(sequence.id)?;
            }
        }
        std::mem::swap(&mut self.tracked, &mut self.next);
        self.inputs.clear();
        for sequence in &self.tracked {
            if !self.cache.state().contains(sequence.id) {
                self.cache.start(sequence.id, &[], StartOptions::default())?;
            }
            self.inputs.push(match new_len(sequence) {
                0 => StepInput::idle(sequence.id),
                tokens => StepInput::count(sequence.id, tokens),
            });
        }
        self.cache.begin_step(&self.inputs)?.hold();
        Ok(())
    }

    /// Makes the lengths those of the cache; after a failure of the device.
    fn follow_cache(&mut self) {
        self.tracked.retain(|sequence| self.cache.state().contains(sequence.id));
        for sequence in &mut self.tracked {
            sequence.len = self.cache.state().seq_len(sequence.id).unwrap_or(0);
            sequence.pre_step_len = sequence.len;
        }
        self.note_lens();
    }

    fn note_lens(&mut self) {
        self.lens.clear();
        self.lens.extend(self.tracked.iter().map(|sequence| (sequence.id, sequence.len)));
    }

    /// Calls the prepared step with the cache's own id of a layer; an error names the caller's
    /// number.
    fn on_step(
        &mut self,
        operation: &'static str,
        number: usize,
        call: impl FnOnce(&mut Step<'_, B>, LayerId) -> Result<(), CacheError>,
    ) -> Result<(), CacheError> {
        let problem = StateProblem::NotPrepared;
        let mut step = self.cache.held().ok_or(PlanError::State { operation, problem })?;
        let problem = LayerProblem::Unallocated;
        let layer = self.layers.get(&number).copied();
        let layer = layer.ok_or(PlanError::LayerNumber { number, problem });
        let called = layer.map_err(CacheError::from).and_then(|layer| call(&mut step, layer));
        step.hold();
        called.map_err(|error| match error {
            CacheError::Plan(error) => by_number(&self.numbers, error).into(),
            other => other,
        })
    }
}

/// The same error with the caller's layer number, `numbers` being those of the cache's layers.
fn by_number(numbers: &[usize], error: PlanError) -> PlanError {
    let (layer, problem) = match error {
        PlanError::LayersUnwritten { layer, others } => (layer, LayerProblem::Unwritten { others }),
        PlanError::AttendBeforeWrite { layer } => (layer, LayerProblem::ReadBeforeWrite),
        PlanError::LayerUnallocated { layer } => (layer, LayerProblem::Unallocated),
        other => return other,
    };
    let number = numbers.get(usize::from(layer.0)).copied();
    PlanError::LayerNumber { number: number.unwrap_or(usize::from(layer.0)), problem }
}

impl<B: Backend> CacheManager<B> for BlockManager<B> {
    fn backend(&self) -> &B {
        self.cache.backend()
    }
    fn queue_mut(&mut self) -> &mut B::Queue {
        self.cache.queue_mut()
    }

    fn allocate_memory(&mut self, layer: usize) -> Result<bool, CacheError> {
        if self.layers.contains_key(&layer) {
            return Ok(false);
        }
        let (used, max) = (self.numbers.len(), self.cache.state().spec().num_layers());
        let id = u16::try_from(used).ok().filter(|id| *id < max).ok_or(PlanError::TooMany {
            what: "layers",
            got: to_u64(used) + 1,
            max: u64::from(max),
        })?;
        self.cache.allocate_layer(id)?;
        self.layers.insert(layer, LayerId(id));
        self.numbers.push(layer);
        Ok(true)
    }

    fn reset(&mut self) -> Result<(), CacheError> {
        drop(self.cache.held());
        let done = self.cache.reset();
        self.follow_cache();
        done
    }

    fn pre_step(&mut self, step: &[(SequenceId, u32)]) -> Result<(), CacheError> {
        self.check(step)?;
        let applied = self.apply();
        if applied.is_err() {
            self.follow_cache();
        }
        self.note_lens();
        applied
    }

    fn roll_back(&mut self) {
        drop(self.cache.held());
        self.follow_cache();
    }

    fn step(
        &mut self,
        layer: usize,
        [k, v]: [TensorView<'_, B::Buffer>; 2],
        format: Axes,
    ) -> Result<(), CacheError> {
        self.on_step("step", layer, |step, layer| step.write(layer, k, v, format))
    }

    fn attend(
        &mut self,
        layer: usize,
        q: TensorView<'_, B::Buffer>,
        (out, lse): (TensorViewMut<'_, B::Buffer>, Option<TensorViewMut<'_, B::Buffer>>),
        options: &AttentionOptions<'_>,
    ) -> Result<(), CacheError> {
        self.on_step("attend", layer, |step, layer| match lse {
            Some(lse) => step.attend_lse(layer, q, out, lse, options),
            None => step.attend(layer, q, out, options),
        })
    }

    fn gather(
        &mut self,
        layer: usize,
        plane: Plane,
        out: TensorViewMut<'_, B::Buffer>,
    ) -> Result<(), CacheError> {
        self.on_step("gather", layer, |step, layer| step.gather(layer, plane, out, Axes::Bshd))
    }

    fn sequences(&self) -> &[TrackedSequence] {
        &self.tracked
    }
    fn pages(&self, sequence: SequenceId) -> &[BlockId] {
        self.cache.state().block_table(sequence, GroupId(0)).unwrap_or_default()
    }
    fn num_free_pages(&self) -> u32 {
        self.cache.state().free_blocks(GroupId(0))
    }
    fn plane(&self, layer: usize, plane: Plane) -> Option<PlaneView<'_, B::Buffer>> {
        let layer = self.layers.get(&layer)?;
        self.cache.storage(GroupId(0))?.plane(usize::from(layer.0), plane)
    }
}
