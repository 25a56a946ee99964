//! Settings of one group of layers.
use kv_format::KvFormat;

use crate::error::{SpecConflict, SpecError};
use crate::geometry::{BlockOrder, PlaneLayout, PlaneShape};
use crate::ids::LayerId;
use crate::num::to_u64;
use crate::spec::GroupSpec;
use crate::spec::reuse::Window;

/// Collects the settings of one group of layers, as [`CacheSpecBuilder`] does for all layers.
///
/// [`CacheSpecBuilder::group`] passes it to the caller with the settings made so far.
///
/// [`CacheSpecBuilder`]: crate::spec::CacheSpecBuilder
/// [`CacheSpecBuilder::group`]: crate::spec::CacheSpecBuilder::group
#[derive(Debug, Clone, Default)]
pub struct GroupBuilder {
    kv_heads: Option<u32>,
    head_dim_k: Option<u32>,
    head_dim_v: Option<u32>,
    format_k: Option<KvFormat>,
    format_v: Option<KvFormat>,
    order: BlockOrder,
    transform: Transform,
    full_precision_prefix: u32,
    tail: bool,
    key_mean: KeyMean,
    window_left: Option<u32>,
    sink_tokens: u32,
    window_slack: u32,
    blocks: Option<Blocks>,
}

/// The transform of rows before they are stored; see [`calibration`](crate::calibration).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[expect(clippy::exhaustive_enums, reason = "as the format asks, or as the caller does")]
pub enum Transform {
    /// For formats that are designed for it ([`KvFormat::is_for_transformed`]).
    #[default]
    Auto,
    /// Never: codes are as in other systems.
    Off,
    /// In every quantised plane.
    On,
}

impl Transform {
    fn applies(self, format: KvFormat) -> bool {
        match self {
            Self::Auto => format.is_for_transformed(),
            Self::Off => false,
            Self::On => format.is_quantised(),
        }
    }
}

/// The mean that is subtracted from keys before they are quantised.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[expect(clippy::exhaustive_enums, reason = "of the model or of the block")]
pub enum KeyMean {
    /// The calibration's; none without a calibration. Needs no memory.
    #[default]
    Calibrated,
    /// Each block's own, computed when the block is full and stored with it, as f16. Needs
    /// [`GroupBuilder::tail`].
    PerBlock,
}

#[derive(Debug, Clone, Copy)]
enum Blocks {
    Paged { block_size: u32, num_blocks: u32 },
    PagedWithin { block_size: u32, bytes: u64 },
    Contiguous { max_sequences: u32, max_seq_len: u32 },
}

impl GroupBuilder {
    /// Sets the heads of K and V: as many as query heads for MHA, fewer for GQA, 1 for MQA.
    #[must_use]
    pub fn kv_heads(mut self, heads: u32) -> Self {
        self.kv_heads = Some(heads);
        self
    }
    /// Sets the values of one row of K and of V.
    #[must_use]
    pub fn head_dim(self, dim: u32) -> Self {
        self.head_dims(dim, dim)
    }
    /// Sets the values of one row of K, and of V.
    #[must_use]
    pub fn head_dims(mut self, k: u32, v: u32) -> Self {
        (self.head_dim_k, self.head_dim_v) = (Some(k), Some(v));
        self
    }
    /// Sets the stored format of K and V.
    #[must_use]
    pub fn format(self, format: KvFormat) -> Self {
        self.formats(format, format)
    }
    /// Sets the stored formats of K and of V.
    #[must_use]
    pub fn formats(mut self, k: KvFormat, v: KvFormat) -> Self {
        (self.format_k, self.format_v) = (Some(k), Some(v));
        self
    }
    /// Sets the axes inside a block; [`BlockOrder::Hnd`] by default.
    #[must_use]
    pub fn block_order(mut self, order: BlockOrder) -> Self {
        self.order = order;
        self
    }
    /// Sets whether quantised rows are transformed; [`Transform::Auto`] by default.
    #[must_use]
    pub fn transform(mut self, transform: Transform) -> Self {
        self.transform = transform;
        self
    }
    /// Keeps the first `tokens` tokens of every sequence in 16 bits where the rest is quantised;
    /// none unless set, 4 are enough. Each takes several slots, see
    /// [`SlotMap`](crate::backend::SlotMap).
    #[must_use]
    pub fn full_precision_prefix(mut self, tokens: u32) -> Self {
        self.full_precision_prefix = tokens;
        self
    }
    /// Keeps the tokens of the block that a sequence is filling in 16 bits while the rest is
    /// quantised; they are quantised when the block is full. A sequence needs additional blocks for
    /// them, see [`SlotMap`](crate::backend::SlotMap). Not for contiguous caches.
    #[must_use]
    pub fn tail(mut self, tail: bool) -> Self {
        self.tail = tail;
        self
    }
    /// Sets the mean that is subtracted from keys; [`KeyMean::Calibrated`] by default.
    #[must_use]
    pub fn key_mean(mut self, key_mean: KeyMean) -> Self {
        self.key_mean = key_mean;
        self
    }
    /// Limits attention of these layers to a sliding window: a query sees `tokens` keys before its
    /// own position. Blocks outside a sequence's window are freed when its next step begins. All
    /// tokens are kept by default.
    #[must_use]
    pub fn window_left(mut self, tokens: u32) -> Self {
        self.window_left = Some(tokens);
        self
    }
    /// With a window, keeps the first `tokens` tokens of every sequence too
    /// ([`AttentionOptions::with_sink_tokens`](crate::AttentionOptions::with_sink_tokens)).
    #[must_use]
    pub fn sink_tokens(mut self, tokens: u32) -> Self {
        self.sink_tokens = tokens;
        self
    }
    /// With a window, keeps `tokens` tokens before it, so that [`KvCache::truncate`] can always
    /// remove up to that many: 0 by default. Of a reused prompt, a sequence gets the window alone.
    ///
    /// [`KvCache::truncate`]: crate::KvCache::truncate
    #[must_use]
    pub fn window_slack(mut self, tokens: u32) -> Self {
        self.window_slack = tokens;
        self
    }
    /// Sets a pool of `num_blocks` blocks of `block_size` tokens each. Fewer blocks than the worst
    /// case are usual: that is the point of paging.
    #[must_use]
    pub fn paged(mut self, block_size: u32, num_blocks: u32) -> Self {
        self.blocks = Some(Blocks::Paged { block_size, num_blocks });
        self
    }
    /// Sets a pool of as many blocks of `block_size` tokens as fit in `bytes`, over all layers of
    /// the group.
    #[must_use]
    pub fn paged_within(mut self, block_size: u32, bytes: u64) -> Self {
        self.blocks = Some(Blocks::PagedWithin { block_size, bytes });
        self
    }
    /// Sets a pool of one block of `max_seq_len` tokens for each of `max_sequences` sequences.
    #[must_use]
    pub fn contiguous(mut self, max_sequences: u32, max_seq_len: u32) -> Self {
        self.blocks = Some(Blocks::Contiguous { max_sequences, max_seq_len });
        self
    }

    /// Returns settings of blocks without rows, for a cache whose layers have states alone.
    pub(super) fn without_rows(self) -> Self {
        self.kv_heads(1).head_dim(1).format(KvFormat::F16)
    }

    pub(super) fn build(
        &self,
        layers: Vec<LayerId>,
    ) -> Result<(GroupSpec, Option<u32>), SpecError> {
        let required = |value: Option<u32>, field| value.ok_or(SpecError::Missing { field });
        let blocks = self.blocks.ok_or(SpecError::Missing { field: "paged or contiguous" })?;
        let format = |format: Option<KvFormat>| format.unwrap_or(KvFormat::F16);
        let shape = |dim: Option<u32>, format: KvFormat, block_size, num_blocks| {
            Ok(PlaneShape {
                num_blocks,
                block_size,
                num_kv_heads: required(self.kv_heads, "kv_heads")?,
                head_dim: required(dim, "head_dim")?,
                order: self.order,
                format,
            })
        };
        let layouts = |block_size, num_blocks| {
            let k = shape(self.head_dim_k, format(self.format_k), block_size, num_blocks)?;
            let v = shape(self.head_dim_v, format(self.format_v), block_size, num_blocks)?;
            self.refine([PlaneLayout::new(k)?, PlaneLayout::new(v)?])
        };
        let (layouts, contiguous, max_seq_len) = match blocks {
            Blocks::Paged { block_size, num_blocks } => {
                (layouts(block_size, num_blocks)?, false, None)
            }
            Blocks::PagedWithin { block_size, bytes } => {
                let [k, v] = layouts(block_size, 1)?;
                let num_blocks = blocks_within([k, v], layers.len(), bytes);
                (layouts(block_size, num_blocks)?, false, None)
            }
            Blocks::Contiguous { max_sequences, max_seq_len } => {
                if self.tail {
                    let problem = SpecConflict::Contiguous;
                    return Err(SpecError::Conflict { what: "tail", problem });
                }
                for (field, n) in [("max_sequences", max_sequences), ("max_seq_len", max_seq_len)] {
                    if n == 0 {
                        return Err(SpecError::Zero { field });
                    }
                }
                // A block has a slot for every token and the further slots of the full-precision
                // prefix.
                let planes = [(self.format_k, self.head_dim_k), (self.format_v, self.head_dim_v)];
                let [k, v] = planes.map(|(f, dim)| format(f).wide_slots(dim.unwrap_or(0)));
                let further = k.max(v).saturating_sub(1);
                let block_size = further
                    .checked_mul(self.full_precision_prefix.min(max_seq_len))
                    .and_then(|further| max_seq_len.checked_add(further))
                    .ok_or(SpecError::Overflow { what: "slots of a sequence" })?;
                (layouts(block_size, max_sequences)?, true, Some(max_seq_len))
            }
        };
        let (sink_tokens, slack) = (self.sink_tokens, self.window_slack);
        let window = self.window_left.map(|left| Window { left, sink_tokens, slack });
        Ok((GroupSpec { layers, layouts, contiguous, window }, max_seq_len))
    }

    /// Adds the transform, and the wide rows, which lie in the same slots of K and V.
    fn refine(&self, layouts: [PlaneLayout; 2]) -> Result<[PlaneLayout; 2], SpecError> {
        let [k, v] = layouts.map(|l| l.with_transform(self.transform.applies(l.format())));
        // Unquantised rows need no 16-bit rows among them.
        let quantised = k.format().is_quantised() || v.format().is_quantised();
        let (full_precision_prefix, tail) =
            if quantised { (self.full_precision_prefix, self.tail) } else { (0, false) };
        let slots = [k, v].map(|l| l.format().wide_slots(l.head_dim())).into_iter().max();
        let slots = slots.unwrap_or(1);
        let k = k.with_wide_rows(full_precision_prefix, tail, slots)?;
        let v = v.with_wide_rows(full_precision_prefix, tail, slots)?;
        match self.key_mean {
            KeyMean::PerBlock if !self.tail => {
                let problem = SpecConflict::NeedsTail;
                Err(SpecError::Conflict { what: "key_mean", problem })
            }
            KeyMean::PerBlock if k.format().is_quantised() => Ok([k.with_block_means()?, v]),
            _ => Ok([k, v]),
        }
    }
}

/// Returns the number of blocks of all layers of a group that fit in `bytes`.
fn blocks_within([k, v]: [PlaneLayout; 2], num_layers: usize, bytes: u64) -> u32 {
    // A block whose bytes overflow is larger than any budget.
    let block = k.block_bytes().saturating_add(v.block_bytes());
    let block = block.saturating_mul(to_u64(num_layers.max(1)));
    // The slots of a pool are numbered in u32.
    let most = u32::MAX / k.block_size();
    // The caller's budget may be any: it is cut to the most.
    let fit = bytes / block;
    u32::try_from(fit).unwrap_or(u32::MAX).min(most)
}
