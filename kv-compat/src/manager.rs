//! The contract between [`InferenceParams`](crate::InferenceParams) and what stores its K and V.
use std::any::Any;
use std::fmt;

use kv_core::backend::{Backend, Plane, PlaneView};
use kv_core::{
    AttentionOptions, Axes, BlockId, CacheError, DType, SequenceId, TensorView, TensorViewMut,
};

use crate::BlockManager;

/// What a cache manager is constructed from: the keywords that TransformerEngine passes to one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "the keywords of the original, all of them")]
pub struct CacheManagerConfig {
    /// The most sequences in one step.
    pub max_batch_size: u32,
    /// The most tokens of one sequence.
    pub max_seqlen: u32,
    /// Heads of K and V.
    pub num_heads: u32,
    /// Values of one row of K.
    pub head_dim_k: u32,
    /// Element type of the cache.
    pub dtype: DType,
    /// Values of one row of V.
    pub head_dim_v: u32,
    /// The pool, `None` when not paged.
    pub pages: Option<PageConfig>,
}

/// The pool of a paged cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "the keywords of the original, all of them")]
pub struct PageConfig {
    /// Pages of the pool.
    pub total_num_pages: u32,
    /// Tokens a page holds.
    pub page_size: u32,
}

impl CacheManagerConfig {
    /// The built-in manager, paged or not: what a custom one may wrap.
    ///
    /// # Errors
    /// As [`BlockManager::new`].
    pub fn build<B: Backend>(&self, backend: B) -> Result<Box<dyn CacheManager<B>>, CacheError> {
        Ok(Box::new(BlockManager::new(backend, self)?))
    }

    /// Entries of one row of the page table: pages of the longest sequence, 1 when not paged.
    pub fn max_pages_per_sequence(&self) -> u32 {
        self.pages.map_or(1, |pages| self.max_seqlen.div_ceil(pages.page_size.max(1)))
    }
}

/// One row of the batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "custom managers make it by a literal")]
pub struct TrackedSequence {
    /// Its name.
    pub id: SequenceId,
    /// Tokens before the step.
    pub pre_step_len: u32,
    /// Tokens after the step.
    pub len: u32,
}

/// Stores K and V and decides which sequence has which pages.
///
/// [`InferenceParams`](crate::InferenceParams) keeps the prefix sums, the page table and their
/// device buffers, and asks a manager for everything else. It owns the device and its queue,
/// because all work of one cache goes through one queue, in order.
///
/// # Guarantees a manager gives
/// 1. A call that returns [`CacheError::Plan`] or [`CacheError::Exhausted`] has changed nothing.
/// 2. After [`Self::pre_step`], entry `i` of [`Self::sequences`] is entry `i` of the step.
/// 3. [`Self::step`] is stateless: it may be repeated, and layers may come in any order.
///
/// # Source
/// TransformerEngine, `KVCacheManager`; there a class whose attributes the caller reads.
///
/// # Examples
/// A manager that counts steps and leaves the rest to the built-in one:
/// ```
/// use kv_compat::{CacheManager, InferenceConfig, InferenceParams, TrackedSequence};
/// use kv::backend::{Backend, NullBackend};
/// use kv::backend::{Plane, PlaneView};
/// use kv::{AttentionOptions, Axes, BlockId, CacheError, DType};
/// use kv::{SequenceId, TensorView, TensorViewMut};
///
/// #[derive(Debug)]
/// struct Counting<B: Backend> {
///     inner: Box<dyn CacheManager<B>>,
///     steps: u64,
/// }
///
/// impl<B: Backend> CacheManager<B> for Counting<B> {
///     fn pre_step(&mut self, step: &[(SequenceId, u32)]) -> Result<(), CacheError> {
///         self.inner.pre_step(step)?;
///         self.steps += 1;
///         Ok(())
///     }
///     // Everything else is passed on.
///     fn backend(&self) -> &B {
///         self.inner.backend()
///     }
///     fn queue_mut(&mut self) -> &mut B::Queue {
///         self.inner.queue_mut()
///     }
///     fn allocate_memory(&mut self, layer: usize) -> Result<bool, CacheError> {
///         self.inner.allocate_memory(layer)
///     }
///     fn reset(&mut self) -> Result<(), CacheError> {
///         self.inner.reset()
///     }
///     fn roll_back(&mut self) {
///         self.inner.roll_back();
///     }
///     fn step(
///         &mut self,
///         layer: usize,
///         kv: [TensorView<'_, B::Buffer>; 2],
///         format: Axes,
///     ) -> Result<(), CacheError> {
///         self.inner.step(layer, kv, format)
///     }
///     fn attend(
///         &mut self,
///         layer: usize,
///         q: TensorView<'_, B::Buffer>,
///         outputs: (TensorViewMut<'_, B::Buffer>, Option<TensorViewMut<'_, B::Buffer>>),
///         options: &AttentionOptions<'_>,
///     ) -> Result<(), CacheError> {
///         self.inner.attend(layer, q, outputs, options)
///     }
///     fn gather(
///         &mut self,
///         layer: usize,
///         plane: Plane,
///         out: TensorViewMut<'_, B::Buffer>,
///     ) -> Result<(), CacheError> {
///         self.inner.gather(layer, plane, out)
///     }
///     fn sequences(&self) -> &[TrackedSequence] {
///         self.inner.sequences()
///     }
///     fn pages(&self, sequence: SequenceId) -> &[BlockId] {
///         self.inner.pages(sequence)
///     }
///     fn num_free_pages(&self) -> u32 {
///         self.inner.num_free_pages()
///     }
///     fn plane(&self, layer: usize, plane: Plane) -> Option<PlaneView<'_, B::Buffer>> {
///         self.inner.plane(layer, plane)
///     }
/// }
///
/// let config = InferenceConfig::new(4, 16).num_heads_kv(2).head_dim_k(4).dtype(DType::F32);
/// let mut params = InferenceParams::with_manager(NullBackend::new(), config, |backend, config| {
///     Ok(Box::new(Counting { inner: config.build(backend)?, steps: 0 }))
/// })?;
/// params.pre_step(&[(7_u64, 3)])?;
/// params.pre_step(&[(7_u64, 1), (8, 5)])?;
/// let manager: &dyn std::any::Any = params.manager();
/// assert_eq!(manager.downcast_ref::<Counting<NullBackend>>().map(|m| m.steps), Some(2));
/// # Ok::<(), CacheError>(())
/// ```
pub trait CacheManager<B: Backend>: Any + fmt::Debug + Send {
    /// The device.
    fn backend(&self) -> &B;
    /// The queue that all work of this cache is recorded on.
    fn queue_mut(&mut self) -> &mut B::Queue;

    /// Gives a layer its memory, zeroed; `false`, and nothing changes, when it has some already.
    ///
    /// # Errors
    /// The device's `OutOfMemory`; a limit on the number of layers.
    fn allocate_memory(&mut self, layer: usize) -> Result<bool, CacheError>;
    /// Forgets every sequence; layers keep their memory.
    ///
    /// # Errors
    /// The device's own.
    fn reset(&mut self) -> Result<(), CacheError>;

    /// Ends the step before and prepares the next: sequences that `step` does not name are
    /// finished, unknown ones begin, row `i` is entry `i`.
    ///
    /// # Errors
    /// [`CacheError::Plan`] or [`CacheError::Exhausted`], and nothing has changed; the device's
    /// own.
    fn pre_step(&mut self, step: &[(SequenceId, u32)]) -> Result<(), CacheError>;
    /// Takes the tokens of the prepared step back. Called when the step cannot be used because the
    /// device failed.
    fn roll_back(&mut self);
    /// Writes the step's K and V, in this order, into one layer.
    ///
    /// # Errors
    /// [`CacheError::Plan`] for a layer without memory, a shape, or a call before
    /// [`Self::pre_step`]; the device's own.
    fn step(
        &mut self,
        layer: usize,
        kv: [TensorView<'_, B::Buffer>; 2],
        format: Axes,
    ) -> Result<(), CacheError>;
    /// Attends the step's queries over the cached rows of one layer, this step's included. The
    /// outputs are the attention's, and the log-sum-exp where it is asked for.
    ///
    /// # Errors
    /// As [`Self::step`], and for a layer that was not written in this step.
    fn attend(
        &mut self,
        layer: usize,
        q: TensorView<'_, B::Buffer>,
        outputs: (TensorViewMut<'_, B::Buffer>, Option<TensorViewMut<'_, B::Buffer>>),
        options: &AttentionOptions<'_>,
    ) -> Result<(), CacheError>;
    /// Reads all rows of every sequence of the step into `out`, `[b, s, h, d]`; zeros past a
    /// length.
    ///
    /// # Errors
    /// As [`Self::attend`].
    fn gather(
        &mut self,
        layer: usize,
        plane: Plane,
        out: TensorViewMut<'_, B::Buffer>,
    ) -> Result<(), CacheError>;

    /// The batch, in the order of the step.
    fn sequences(&self) -> &[TrackedSequence];
    /// Pages of a sequence in token order; none for an unknown one.
    fn pages(&self, sequence: SequenceId) -> &[BlockId];
    /// Pages that no sequence holds; free slots when not paged.
    fn num_free_pages(&self) -> u32;
    /// One plane of a layer, `None` while it has no memory.
    fn plane(&self, layer: usize, plane: Plane) -> Option<PlaneView<'_, B::Buffer>>;
}
