//! `KvCacheManager`: one fixed slot for each sequence, rows appended layer by layer, lengths
//! advanced by the caller.
//!
//! Owns the planes, a block table with one block in each row, and the number of rows that each
//! layer has after a sequence's length. Checks and describes work through the plans of `kv_core`.
mod memory;

use hashbrown::HashMap;
use kv_core::backend::{AnyBackend, Backend, KvStorage, Plane, PlaneView, Queue};
use kv_core::block::BlockTables;
use kv_core::calibration::PlaneConstants;
use kv_core::error::{OptionProblem, PlanError};
use kv_core::num::to_u32;
use kv_core::plan::{AttendArgs, BatchEntry, PlanBuffers, WriteArgs};
use kv_core::{
    AttentionOptions, Axes, BlockId, BlockOrder, CacheError, CacheSpec, KvFormat, LayerId,
    SequenceId, TensorView, TensorViewMut,
};

/// What a [`KvCacheManager`] holds. Every number must be at least 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "a literal names each of the six settings")]
pub struct SlotConfig {
    /// Layers of the model.
    pub num_layers: u16,
    /// Heads of K and V.
    pub num_kv_heads: u32,
    /// Values of one row of K and of V.
    pub head_dim: u32,
    /// Tokens a slot holds.
    pub max_seq_len: u32,
    /// Number of slots.
    pub max_batch_size: u32,
    /// Stored format.
    pub format: KvFormat,
}

/// A cache of equal slots, each held by one sequence from [`Self::allocate_sequence`] to
/// [`Self::release_sequence`].
///
/// A forward pass appends the new rows to every layer and attends over them, layer by layer; then
/// [`Self::advance_seq_len`] makes them part of the sequence. Appending is stateless: always at the
/// sequence's length, so a pass that was given up is simply repeated.
///
/// A slot is a block of [`max_seq_len`](SlotConfig::max_seq_len) tokens. There is nothing to
/// allocate in a step, so this type has no [`KvCache`](kv_core::KvCache): it makes the plans that a
/// cache would make, from a block table with one entry in each row.
///
/// # Source
/// tiny-llm, `KVCacheManager`. It clamps an advance to the slot and does not ask whether rows were
/// appended; here both are errors.
///
/// # Examples
/// ```
/// use kv_compat::{KvCacheManager, SlotConfig};
/// use kv::backend::NullBackend;
/// use kv::{AttentionOptions, KvFormat, TensorView, TensorViewMut};
///
/// let config = SlotConfig {
///     num_layers: 2,
///     num_kv_heads: 1,
///     head_dim: 2,
///     max_seq_len: 64,
///     max_batch_size: 4,
///     format: KvFormat::F32,
/// };
/// let mut cache = KvCacheManager::new(NullBackend::new(), config)?;
/// let seq = cache.allocate_sequence(32)?;
/// let rows = [0.0_f32; 3 * 2];
/// for layer in 0..2_u16 {
///     let k = TensorView::host(&rows, &[3, 1, 2]);
///     cache.append_kv(seq, layer, k, k, 3)?;
///     let mut out = [0.0_f32; 3 * 2];
///     let out = TensorViewMut::host(&mut out, &[3, 1, 2]);
///     cache.attend(layer, &[(seq, 3)], k, out, &AttentionOptions::causal(0.7))?;
/// }
/// cache.advance_seq_len(seq, 3)?;
/// assert_eq!(cache.seq_len(seq), Some(3));
/// cache.release_sequence(seq)?;
/// # Ok::<(), kv::CacheError>(())
/// ```
#[derive(Debug)]
pub struct KvCacheManager<B: Backend = AnyBackend> {
    backend: B,
    queue: B::Queue,
    spec: CacheSpec,
    storage: KvStorage<B::Buffer>,
    /// Row `i` is block `i`, which is slot `i`; a row is added when its slot is first taken.
    tables: BlockTables,
    /// Buffers of every plan.
    plans: PlanBuffers,
    next_id: u64,
    sequences: HashMap<SequenceId, Sequence>,
    /// Slots that were released.
    free: Vec<BlockId>,
    /// Lists of released sequences, to be used again.
    spare: Vec<Vec<u32>>,
    /// The batch of an attention; kept for its memory.
    batch: Vec<BatchEntry>,
}

/// What is known of one live sequence.
#[derive(Debug)]
struct Sequence {
    slot: BlockId,
    len: u32,
    max_len: u32,
    /// Rows after the length, by layer.
    appended: Vec<u32>,
}

/// Where one sequence's rows of one layer are.
#[derive(Debug)]
#[non_exhaustive]
pub struct SlotView<'a, Buf> {
    /// Keys of the layer, of all slots: `[max_batch_size, max_seq_len, num_kv_heads, head_dim]`.
    pub k: PlaneView<'a, Buf>,
    /// Values of the layer, of all slots.
    pub v: PlaneView<'a, Buf>,
    /// The sequence's slot.
    pub slot: BlockId,
    /// Tokens in it; rows past them are appended but not advanced over, or meaningless.
    pub len: u32,
    /// Tokens the sequence may have.
    pub max_len: u32,
}

impl<B: Backend> KvCacheManager<B> {
    /// Reserves all slots, zeroed. Rows of a slot lie as `[max_seq_len, num_kv_heads, head_dim]`.
    ///
    /// # Errors
    /// [`CacheError::Spec`] for a 0 or a product that overflows; the device's own.
    pub fn new(backend: B, config: SlotConfig) -> Result<Self, CacheError> {
        Self::with_block_order(backend, config, BlockOrder::Nhd)
    }

    /// As [`Self::new`], with the axes inside a slot chosen: [`BlockOrder::Hnd`] makes attention
    /// stream.
    ///
    /// # Errors
    /// As [`Self::new`].
    pub fn with_block_order(
        backend: B,
        config: SlotConfig,
        order: BlockOrder,
    ) -> Result<Self, CacheError> {
        let spec = CacheSpec::builder()
            .layers(config.num_layers)
            .kv_heads(config.num_kv_heads)
            .head_dim(config.head_dim)
            .format(config.format)
            .block_order(order)
            .contiguous(config.max_batch_size, config.max_seq_len)
            .build()?;
        let [group] = spec.groups() else {
            unreachable!("a spec whose layers are alike has one group");
        };
        let [k, v] = group.layouts();
        let constants = [
            PlaneConstants::new(LayerId(0), Plane::Key, k, None)?,
            PlaneConstants::new(LayerId(0), Plane::Value, v, None)?,
        ];
        let mut storage = KvStorage::new(&backend, [*k, *v])?;
        let mut queue = backend.queue()?;
        for layer in 0..usize::from(config.num_layers) {
            let constants = constants.each_ref().map(Option::as_ref);
            storage.allocate_with((&backend, &mut queue), layer, constants)?;
        }
        Ok(Self {
            backend,
            queue,
            tables: BlockTables::new(group.num_blocks(), 1),
            storage,
            spec,
            plans: PlanBuffers::default(),
            next_id: 0,
            sequences: HashMap::new(),
            free: Vec::new(),
            spare: Vec::new(),
            batch: Vec::new(),
        })
    }

    /// Takes a slot for a sequence of at most `max_len` tokens. Ids ascend and are never used
    /// again.
    ///
    /// The slot is taken whole whatever `max_len` is.
    ///
    /// # Errors
    /// [`PlanError::Option`] for 0, [`PlanError::TooMany`] above the length of a slot,
    /// [`PlanError::NoFreeSlot`].
    pub fn allocate_sequence(&mut self, max_len: u32) -> Result<SequenceId, CacheError> {
        let max = self.spec.max_seq_len();
        if max_len == 0 {
            let problem = OptionProblem::Zero;
            return Err(PlanError::Option { option: "max_len", problem }.into());
        }
        if max_len > max {
            let (got, max) = (u64::from(max_len), u64::from(max));
            return Err(PlanError::TooMany { what: "tokens of a sequence", got, max }.into());
        }
        let (used, total) = (self.active_sequences(), self.max_sequences());
        if used >= total {
            return Err(PlanError::NoFreeSlot { used, total }.into());
        }
        let slot = self.free.pop().unwrap_or_else(|| add_row(&mut self.tables));
        let id = SequenceId(self.next_id);
        self.next_id += 1;
        let mut appended = self.spare.pop().unwrap_or_default();
        appended.clear();
        appended.resize(usize::from(self.spec.num_layers()), 0);
        self.sequences.insert(id, Sequence { slot, len: 0, max_len, appended });
        Ok(id)
    }

    /// Writes `n` rows of one layer after the sequence's length, over whatever was appended there.
    ///
    /// # Shapes
    /// `k` and `v` are `[n, num_kv_heads, head_dim]`, f32, f16 or bf16; further rows are padding.
    ///
    /// # Errors
    /// [`PlanError::UnknownSequence`], [`PlanError::UnknownLayer`], [`PlanError::ZeroTokens`],
    /// [`PlanError::SequenceTooLong`], [`PlanError::Shape`], [`PlanError::ElementType`],
    /// [`PlanError::TensorBytes`]; the device's own, after which the layer has no appended rows.
    pub fn append_kv(
        &mut self,
        sequence: SequenceId,
        layer: impl Into<LayerId>,
        k: TensorView<'_, B::Buffer>,
        v: TensorView<'_, B::Buffer>,
        n: u32,
    ) -> Result<(), CacheError> {
        let layer = layer.into();
        let [k_plane, v_plane] = planes(&self.storage, &self.spec, layer)?;
        let state = self.sequences.get_mut(&sequence);
        let state = state.ok_or(PlanError::UnknownSequence { sequence })?;
        check_room(sequence, state, n)?;
        let (row, cached) = (state.slot.0, state.len);
        let entry = BatchEntry { row, cached, new_tokens: n, queries: 0 };
        let (layout, determinism) = (self.storage.layouts().first(), self.spec.determinism());
        let (plan, _) = self.plans.plan(layout, &self.tables, &[entry], 1, determinism)?;
        let args = WriteArgs::new(&plan, k, v, Axes::Thd, k_plane, v_plane)?;
        let written = self.queue.write_kv(&plan, args);
        // The device may have written some of them.
        state.appended[usize::from(layer.0)] = if written.is_ok() { n } else { 0 };
        Ok(written?)
    }

    /// Makes `n` appended rows part of the sequence and hands the work to the device.
    ///
    /// # Errors
    /// [`PlanError::UnknownSequence`], [`PlanError::ZeroTokens`], [`PlanError::SequenceTooLong`],
    /// [`PlanError::LayersUnwritten`] when a layer has fewer than `n` appended rows; the device's
    /// own, after which the length is unchanged and the call may be repeated.
    pub fn advance_seq_len(&mut self, sequence: SequenceId, n: u32) -> Result<(), CacheError> {
        let state = self.sequences.get_mut(&sequence);
        let state = state.ok_or(PlanError::UnknownSequence { sequence })?;
        let end = check_room(sequence, state, n)?;
        let mut missing = state.appended.iter().zip(0..).filter(|(rows, _)| **rows < n);
        if let Some((_, layer)) = missing.next() {
            let (layer, others) = (LayerId(layer), missing.count());
            return Err(PlanError::LayersUnwritten { layer, others }.into());
        }
        self.queue.flush()?;
        state.len = end;
        for rows in &mut state.appended {
            *rows -= n;
        }
        Ok(())
    }

    /// Attends `batch` entries `(sequence, queries)` over one layer: over each sequence's tokens
    /// and the rows of this layer that were appended after them.
    ///
    /// # Shapes
    /// `q` and `out` are `[t, num_q_heads, head_dim]`, the entries' queries one after another, or
    /// as [`AttentionOptions::axes`] says.
    ///
    /// # Errors
    /// [`PlanError`] for an unknown sequence or layer, no queries, more than
    /// [`CacheSpec::max_queries`] of one sequence, a tensor or an option that does not fit; the
    /// device's own.
    pub fn attend(
        &mut self,
        layer: impl Into<LayerId>,
        batch: &[(SequenceId, u32)],
        q: TensorView<'_, B::Buffer>,
        out: TensorViewMut<'_, B::Buffer>,
        options: &AttentionOptions<'_>,
    ) -> Result<(), CacheError> {
        let layer = layer.into();
        let planes = planes(&self.storage, &self.spec, layer)?;
        let max = self.spec.max_queries();
        self.batch.clear();
        for &(sequence, queries) in batch {
            let state = self.sequences.get(&sequence);
            let state = state.ok_or(PlanError::UnknownSequence { sequence })?;
            if queries == 0 {
                return Err(PlanError::ZeroTokens { sequence }.into());
            }
            if queries > max {
                let (got, max) = (u64::from(queries), u64::from(max));
                return Err(PlanError::TooMany { what: "queries", got, max }.into());
            }
            let appended = state.appended[usize::from(layer.0)];
            let (row, cached) = (state.slot.0, state.len + appended);
            self.batch.push(BatchEntry { row, cached, new_tokens: 0, queries });
        }
        let (layout, determinism) = (self.storage.layouts().first(), self.spec.determinism());
        let workers = self.backend.capabilities().workers_of_heads(layout.num_kv_heads());
        let (tables, batch) = (&self.tables, &self.batch);
        let (_, plan) = self.plans.plan(layout, tables, batch, workers, determinism)?;
        let args = AttendArgs::new(&plan, q, out, None, planes, *options)?;
        Ok(self.queue.attend(&plan, args)?)
    }

    /// Gives a sequence's slot back. Its id is never used again.
    ///
    /// No work is recorded, so a failure of the device cannot leave the sequence half released. Its
    /// rows stay in memory until the next sequence of the slot overwrites them.
    ///
    /// # Errors
    /// [`PlanError::UnknownSequence`], also for a second release.
    pub fn release_sequence(&mut self, sequence: SequenceId) -> Result<(), PlanError> {
        let state = self.sequences.remove(&sequence);
        let state = state.ok_or(PlanError::UnknownSequence { sequence })?;
        self.free.push(state.slot);
        self.spare.push(state.appended);
        Ok(())
    }

    /// Where a sequence's rows of one layer are.
    ///
    /// # Errors
    /// [`PlanError::UnknownSequence`], [`PlanError::UnknownLayer`].
    pub fn cache(
        &self,
        sequence: SequenceId,
        layer: impl Into<LayerId>,
    ) -> Result<SlotView<'_, B::Buffer>, PlanError> {
        let state = self.sequences.get(&sequence);
        let state = state.ok_or(PlanError::UnknownSequence { sequence })?;
        let [k, v] = planes(&self.storage, &self.spec, layer.into())?;
        Ok(SlotView { k, v, slot: state.slot, len: state.len, max_len: state.max_len })
    }

    /// Tokens of a sequence, `None` for an unknown one.
    pub fn seq_len(&self, sequence: SequenceId) -> Option<u32> {
        self.sequences.get(&sequence).map(|state| state.len)
    }
    /// Live sequences.
    pub fn active_sequences(&self) -> u32 {
        to_u32(self.sequences.len())
    }
    /// Number of slots.
    pub fn max_sequences(&self) -> u32 {
        self.spec.max_sequences()
    }

    /// The device.
    pub fn backend(&self) -> &B {
        &self.backend
    }
    /// The queue that all work of this cache is recorded on.
    pub fn queue_mut(&mut self) -> &mut B::Queue {
        &mut self.queue
    }
}

/// Adds the row of a slot that was never taken.
fn add_row(tables: &mut BlockTables) -> BlockId {
    let rows = tables.num_rows();
    let slot = BlockId(to_u32(rows));
    tables.ensure_rows(rows + 1);
    let pushed = tables.push(slot.0, slot);
    assert!(pushed.is_ok(), "slot {slot} is one of {}", tables.num_blocks());
    slot
}

/// K and V of one layer.
fn planes<'a, Buf>(
    storage: &'a KvStorage<Buf>,
    spec: &CacheSpec,
    layer: LayerId,
) -> Result<[PlaneView<'a, Buf>; 2], PlanError> {
    let (index, num_layers) = (usize::from(layer.0), spec.num_layers());
    let planes = storage.plane(index, Plane::Key).zip(storage.plane(index, Plane::Value));
    planes.map(Into::into).ok_or(PlanError::UnknownLayer { layer, num_layers })
}

/// The length of a sequence after `n` more tokens, which must fit its limit.
fn check_room(sequence: SequenceId, state: &Sequence, n: u32) -> Result<u32, PlanError> {
    let (len, max) = (state.len, state.max_len);
    if n == 0 {
        return Err(PlanError::ZeroTokens { sequence });
    }
    let end = len.checked_add(n).filter(|end| *end <= max);
    end.ok_or(PlanError::SequenceTooLong { sequence, len, new: u64::from(n), max })
}
