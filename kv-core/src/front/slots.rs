//! `KvCacheManager`: one fixed slot a sequence, rows appended layer by layer, lengths advanced by
//! hand.
//!
//! Owns what a step would otherwise know: how many rows each layer has behind a sequence's length.
use hashbrown::HashMap;

use crate::backend::{AnyBackend, Backend};
use crate::cache::{KvCache, StartOptions};
use crate::error::{CacheError, PlanError};
use crate::format::KvFormat;
use crate::geometry::{BlockOrder, QkvFormat};
use crate::ids::{BlockId, GroupId, LayerId, SequenceId};
use crate::num::to_u32;
use crate::plan::{AttentionOptions, BatchEntry};
use crate::spec::{CacheSpec, GroupSpec};
use crate::storage::{Plane, PlaneView};
use crate::tensor::{TensorView, TensorViewMut};

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

/// A cache of equal slots, each the home of one sequence from [`Self::allocate_sequence`] to
/// [`Self::release_sequence`].
///
/// A forward pass appends the new rows to every layer and attends over them, layer by layer; then
/// [`Self::advance_seq_len`] makes them part of the sequence. Appending is stateless: always at the
/// sequence's length, so a pass that was given up is simply repeated.
///
/// # Source
/// tiny-llm, `KVCacheManager`. It clamps an advance to the slot and does not ask whether rows were
/// appended; here both are errors.
///
/// # Examples
/// ```
/// use kv_core::backend::NullBackend;
/// use kv_core::front::{KvCacheManager, SlotConfig};
/// use kv_core::{AttentionOptions, KvFormat, TensorView, TensorViewMut};
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
/// # Ok::<(), kv_core::CacheError>(())
/// ```
#[derive(Debug)]
pub struct KvCacheManager<B: Backend = AnyBackend> {
    cache: KvCache<B>,
    next_id: u64,
    slots: HashMap<SequenceId, Slot>,
    /// Lists of released slots, to be used again.
    spare: Vec<Vec<u32>>,
    /// The batch of an attention; kept for its memory.
    queries: Vec<BatchEntry>,
}

/// What is known of one live sequence.
#[derive(Debug)]
struct Slot {
    max_len: u32,
    /// Rows behind the length, by layer.
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
        Ok(Self {
            cache: KvCache::new(backend, spec)?,
            next_id: 0,
            slots: HashMap::new(),
            spare: Vec::new(),
            queries: Vec::new(),
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
        let max = self.cache.spec().max_seq_len();
        if max_len == 0 {
            let problem = "0 tokens given, at least 1 is needed";
            return Err(PlanError::Option { option: "max_len", problem }.into());
        }
        if max_len > max {
            let (got, max) = (u64::from(max_len), u64::from(max));
            return Err(PlanError::TooMany { what: "tokens of a sequence", got, max }.into());
        }
        let (used, total) = (to_u32(self.slots.len()), self.max_sequences());
        if used >= total {
            return Err(PlanError::NoFreeSlot { used, total }.into());
        }
        let id = SequenceId(self.next_id);
        self.cache.start(id, &[], StartOptions::default().with_reserve(max_len))?;
        self.next_id = self.next_id.saturating_add(1);
        let mut appended = self.spare.pop().unwrap_or_default();
        appended.clear();
        appended.resize(usize::from(self.cache.spec().num_layers()), 0);
        self.slots.insert(id, Slot { max_len, appended });
        Ok(id)
    }

    /// Writes `n` rows of one layer behind the sequence's length, over whatever was appended there.
    ///
    /// # Shapes
    /// `k` and `v` are `[n, num_kv_heads, head_dim]`, f32, f16 or bf16; further rows are padding.
    ///
    /// # Errors
    /// [`PlanError::UnknownSequence`], [`PlanError::UnknownLayer`], [`PlanError::ZeroTokens`],
    /// [`PlanError::SequenceTooLong`], [`PlanError::Shape`], [`PlanError::ElementType`],
    /// [`PlanError::TensorBytes`]; the device's own.
    pub fn append_kv(
        &mut self,
        sequence: SequenceId,
        layer: impl Into<LayerId>,
        k: TensorView<'_, B::Buffer>,
        v: TensorView<'_, B::Buffer>,
        n: u32,
    ) -> Result<(), CacheError> {
        let layer = layer.into();
        let written = self.cache.write_ahead(sequence, layer, n, [k, v], QkvFormat::Thd);
        let slot = self.slots.get_mut(&sequence);
        if let Some(rows) = slot.and_then(|slot| slot.appended.get_mut(usize::from(layer.0))) {
            match written {
                Ok(()) => *rows = n,
                // The device may have written some of them.
                Err(CacheError::Device(_)) => *rows = 0,
                Err(_) => {}
            }
        }
        written
    }

    /// Makes `n` appended rows part of the sequence and hands the work to the device.
    ///
    /// # Errors
    /// [`PlanError::UnknownSequence`], [`PlanError::ZeroTokens`], [`PlanError::SequenceTooLong`],
    /// [`PlanError::LayersUnwritten`] when a layer has fewer than `n` appended rows; the device's
    /// own.
    pub fn advance_seq_len(&mut self, sequence: SequenceId, n: u32) -> Result<(), CacheError> {
        let slot = self.slots.get_mut(&sequence).ok_or(PlanError::UnknownSequence { sequence })?;
        if n == 0 {
            return Err(PlanError::ZeroTokens { sequence }.into());
        }
        let (len, max) = (self.cache.seq_len(sequence).unwrap_or(0), slot.max_len);
        if len.checked_add(n).is_none_or(|end| end > max) {
            let new = u64::from(n);
            return Err(PlanError::SequenceTooLong { sequence, len, new, max }.into());
        }
        let mut missing = slot.appended.iter().zip(0..).filter(|(rows, _)| **rows < n);
        if let Some((_, layer)) = missing.next() {
            let (layer, others) = (LayerId(layer), missing.count());
            return Err(PlanError::LayersUnwritten { layer, others }.into());
        }
        self.cache.advance(sequence, n)?;
        for rows in &mut slot.appended {
            *rows = rows.saturating_sub(n);
        }
        Ok(())
    }

    /// Attends `batch` entries `(sequence, queries)` over one layer: over each sequence's tokens
    /// and the rows appended behind them to this layer.
    ///
    /// # Shapes
    /// `q` and `out` are `[t, num_q_heads, head_dim]`, the entries' queries one after another, or
    /// as [`AttentionOptions::qkv_format`] says.
    ///
    /// # Errors
    /// [`PlanError`] for an unknown sequence or layer, no queries, a tensor or an option that does
    /// not fit; the device's own.
    pub fn attend(
        &mut self,
        layer: impl Into<LayerId>,
        batch: &[(SequenceId, u32)],
        q: TensorView<'_, B::Buffer>,
        out: TensorViewMut<'_, B::Buffer>,
        options: &AttentionOptions<'_>,
    ) -> Result<(), CacheError> {
        let layer = layer.into();
        self.queries.clear();
        for &(sequence, queries) in batch {
            let slot = self.slots.get(&sequence).ok_or(PlanError::UnknownSequence { sequence })?;
            let ahead = slot.appended.get(usize::from(layer.0)).copied().unwrap_or(0);
            self.queries.push(self.cache.query_ahead(sequence, ahead, queries)?);
        }
        self.cache.attend_ahead(layer, &self.queries, q, out, options)
    }

    /// Gives a sequence's slot back. Its id stays unknown for ever.
    ///
    /// # Errors
    /// [`PlanError::UnknownSequence`], also for a second release.
    pub fn release_sequence(&mut self, sequence: SequenceId) -> Result<(), CacheError> {
        self.cache.release(sequence)?;
        self.spare.extend(self.slots.remove(&sequence).map(|slot| slot.appended));
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
        let unknown = PlanError::UnknownSequence { sequence };
        let (slot, len) =
            self.slots.get(&sequence).zip(self.seq_len(sequence)).ok_or(unknown.clone())?;
        let (layer, num_layers) = (layer.into(), self.cache.spec().num_layers());
        let plane = |plane| {
            let (group, index) = self.cache.spec().locate(layer)?;
            self.cache.storage(group)?.plane(index, plane)
        };
        let planes = plane(Plane::Key).zip(plane(Plane::Value));
        let (k, v) = planes.ok_or(PlanError::UnknownLayer { layer, num_layers })?;
        let blocks = self.cache.block_table(sequence, GroupId(0)).unwrap_or_default();
        let block = blocks.first().copied().ok_or(unknown)?;
        Ok(SlotView { k, v, slot: block, len, max_len: slot.max_len })
    }

    /// Tokens of a sequence, `None` for an unknown one.
    pub fn seq_len(&self, sequence: SequenceId) -> Option<u32> {
        self.cache.seq_len(sequence)
    }
    /// Live sequences.
    pub fn active_sequences(&self) -> u32 {
        to_u32(self.slots.len())
    }
    /// Number of slots.
    pub fn max_sequences(&self) -> u32 {
        self.cache.spec().max_sequences()
    }
    /// Bytes of one slot: K and V of all layers.
    pub fn slot_bytes(&self) -> u64 {
        let layers = u64::from(self.cache.spec().num_layers());
        let layer = self.cache.spec().groups().first().map_or(0, GroupSpec::layer_block_bytes);
        layer.saturating_mul(layers)
    }
    /// Bytes of all slots.
    pub fn total_bytes(&self) -> u64 {
        self.slot_bytes().saturating_mul(u64::from(self.max_sequences()))
    }
    /// Bytes of the slots of live sequences.
    pub fn used_bytes(&self) -> u64 {
        self.slot_bytes().saturating_mul(u64::from(self.active_sequences()))
    }
    /// Bytes of the other slots.
    pub fn free_bytes(&self) -> u64 {
        self.total_bytes().saturating_sub(self.used_bytes())
    }

    /// The device.
    pub fn backend(&self) -> &B {
        self.cache.backend()
    }
    /// The lane all work of this cache is recorded on.
    pub fn queue_mut(&mut self) -> &mut B::Queue {
        self.cache.queue_mut()
    }
}
