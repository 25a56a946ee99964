//! The specification of a cache, checked once.
mod builder;
mod group;
mod reuse;
mod states;
#[cfg(test)]
mod tests;

pub use builder::CacheSpecBuilder;
pub use group::{GroupBuilder, KeyMean, Transform};
pub(crate) use reuse::Reuse;
pub use reuse::{PrefixReuse, PublishAt, Window};
pub use states::{SnapshotsSpec, StateFormat, StatePart, StatesBuilder, StatesSpec};

use crate::eviction::Eviction;
use crate::geometry::PlaneLayout;
use crate::ids::{GroupId, LayerId};
use crate::invariant::Invariant;
use crate::num::to_u64;
use crate::plan::Determinism;
use crate::slot_map::SlotMap;

/// A checked cache geometry: groups of layers, each with planes, a pool and tables of its own.
///
/// ```
/// use kv::{CacheSpec, KvFormat};
/// let spec = CacheSpec::builder()
///     .layers(32)
///     .kv_heads(8)
///     .head_dim(128)
///     .format(KvFormat::Bf16)
///     .paged(16, 4096)
///     .build()?;
/// assert_eq!(spec.memory().bytes_per_token, 32 * 2 * 8 * 128 * 2);
/// # Ok::<(), kv::error::SpecError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CacheSpec {
    groups: Vec<GroupSpec>,
    /// Group and index inside it, by layer, `None` for a layer without rows; empty for layers on
    /// demand.
    layers: Vec<Option<(GroupId, usize)>>,
    states: Vec<StatesSpec>,
    on_demand: bool,
    late_layers: LateLayers,
    max_sequences: u32,
    max_seq_len: u32,
    determinism: Determinism,
    wipe_on_release: bool,
    reuse: Reuse,
}

/// The result of attention and gathers on a layer on demand at positions that were cached before
/// the layer had memory.
///
/// Neither choice makes such tokens reusable: see [`KvCache::allocate_layer`].
///
/// [`KvCache::allocate_layer`]: crate::KvCache::allocate_layer
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[expect(
    clippy::exhaustive_enums,
    reason = "an error, or the only content that memory starts with"
)]
pub enum LateLayers {
    /// Nothing: the call is refused with [`PlanError::RowsUnwritten`](crate::error::PlanError).
    #[default]
    Refuse,
    /// Zeros, which the layer's memory was allocated with. A query gives such keys the score 0, so
    /// they take part in its softmax. For formats that store values as they are
    /// ([`KvFormat::PLAIN`](crate::KvFormat::PLAIN)).
    Zeros,
}

/// One group of a [`CacheSpec`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupSpec {
    layers: Vec<LayerId>,
    layouts: [PlaneLayout; 2],
    contiguous: bool,
    window: Option<Window>,
}

impl GroupSpec {
    /// Returns the layers of the group, in ascending order; none for layers on demand, and in a
    /// cache whose layers have states alone.
    pub fn layers(&self) -> &[LayerId] {
        &self.layers
    }
    /// Returns the layouts of the K and the V plane.
    pub fn layouts(&self) -> &[PlaneLayout; 2] {
        &self.layouts
    }
    /// Returns the layout whose blocks stand for those of both planes.
    pub(crate) fn layout(&self) -> &PlaneLayout {
        &self.layouts[0]
    }
    /// Returns the tokens of a block.
    pub fn block_size(&self) -> u32 {
        self.layouts[0].block_size()
    }
    /// Returns the blocks of the pool.
    pub fn num_blocks(&self) -> u32 {
        self.layouts[0].num_blocks()
    }
    /// Returns where tokens lie in a sequence's blocks; the same for K and V.
    pub fn slot_map(&self) -> &SlotMap {
        self.layouts[0].slot_map()
    }
    /// Returns whether a sequence is one block.
    pub fn is_contiguous(&self) -> bool {
        self.contiguous
    }
    /// Returns the window of the group, `None` if it keeps all tokens.
    pub fn window(&self) -> Option<Window> {
        self.window
    }
    /// Returns the maximum blocks of a sequence that grows to `tokens` tokens one by one.
    pub fn blocks_to_grow(&self, tokens: u32) -> u32 {
        let map = self.slot_map();
        let Some(window) = self.window else {
            return map.blocks_to_grow(tokens);
        };
        // The window is the caller's, and bounded by the tokens at the end. One that ends inside a
        // block begins inside another.
        let seen =
            window.left.saturating_add(window.slack).div_ceil(self.block_size()).saturating_add(1);
        let seen = seen.saturating_add(map.blocks(window.sink_tokens));
        seen.saturating_add(map.tail_blocks_max()).min(map.blocks_to_grow(tokens))
    }
    /// Returns the bytes of one block of one layer, K and V.
    pub fn layer_block_bytes(&self) -> u64 {
        let [k, v] = &self.layouts;
        k.block_bytes() + v.block_bytes()
    }
}

impl CacheSpec {
    /// Starts an empty specification.
    pub fn builder() -> CacheSpecBuilder {
        CacheSpecBuilder::default()
    }
    /// Returns the groups, ordered by [`GroupId`].
    pub fn groups(&self) -> &[GroupSpec] {
        &self.groups
    }
    /// Returns the layers of the model; for layers on demand, their maximum number.
    pub fn num_layers(&self) -> u16 {
        if self.on_demand {
            return u16::MAX;
        }
        u16::try_from(self.layers.len()).invariant("a layer has a number of 16 bits")
    }
    /// Returns whether layers are allocated one by one, on demand.
    pub fn layers_on_demand(&self) -> bool {
        self.on_demand
    }
    /// Returns the result of reads where a layer on demand lacks rows.
    pub fn late_layers(&self) -> LateLayers {
        self.late_layers
    }
    /// Returns the recurrent states, in the order in which the builder was given them. Their
    /// [`GroupId`]s follow those of [`Self::groups`]; those of their snapshots follow in turn.
    pub fn states(&self) -> &[StatesSpec] {
        &self.states
    }
    /// Iterates over the groups of the snapshots of [`Self::states`], in their order, whether any
    /// are kept or not.
    pub fn snapshot_groups(&self) -> impl Iterator<Item = GroupId> + use<> {
        let first = self.groups.len() + self.states.len();
        (0..=u8::MAX).map(GroupId).skip(first).take(self.states.len())
    }
    /// Returns the index in [`Self::states`] of a layer's state, and the layer's index in it.
    pub fn locate_state(&self, layer: LayerId) -> Option<(usize, usize)> {
        let mut groups = self.states.iter().enumerate();
        groups.find_map(|(group, of)| Some((group, of.layers().binary_search(&layer).ok()?)))
    }
    /// Returns the group of a layer with rows and the layer's index in it.
    pub fn locate(&self, layer: LayerId) -> Option<(GroupId, usize)> {
        if self.on_demand {
            return (layer.0 < u16::MAX).then_some((GroupId(0), usize::from(layer.0)));
        }
        self.layers.get(usize::from(layer.0)).copied().flatten()
    }
    /// Returns the maximum number of live sequences.
    pub fn max_sequences(&self) -> u32 {
        self.max_sequences
    }
    /// Returns how many sequences may have new tokens in every step: with recurrent states, half of
    /// the slots, because a sequence keeps its state while a step writes the next one. Without
    /// states it is [`Self::max_sequences`].
    pub fn max_sequences_in_step(&self) -> u32 {
        self.states.iter().map(StatesSpec::sequences).fold(self.max_sequences, u32::min)
    }
    /// Returns the maximum tokens of one sequence.
    pub fn max_seq_len(&self) -> u32 {
        self.max_seq_len
    }
    /// Returns the maximum number of queries without tokens
    /// ([`StepInput::query`](crate::StepInput::query)) over all sequences of a step: the tokens of
    /// the smallest pool, but at least 65,536. More queries take several steps, which does not
    /// change the results.
    pub fn max_queries(&self) -> u32 {
        const AT_LEAST: u32 = 1 << 16;
        let tokens = u32::try_from(self.memory().tokens);
        tokens.invariant("the slots of a pool are numbered in 32 bits").max(AT_LEAST)
    }
    /// Returns how much of a cached prompt another prompt may reuse.
    pub fn prefix_reuse(&self) -> PrefixReuse {
        self.reuse.prefixes
    }
    /// Returns when blocks that a step fills become reusable.
    pub fn publish_at(&self) -> PublishAt {
        self.reuse.publish_at
    }
    /// Returns which cached block is evicted first.
    pub fn eviction(&self) -> Eviction {
        self.reuse.eviction
    }
    /// Returns the number of events kept until they are taken; 0 for none.
    pub fn events(&self) -> usize {
        self.reuse.events
    }
    /// Returns the number of changes of blocks kept until they are taken; 0 for none.
    pub fn changes(&self) -> usize {
        self.reuse.changes
    }
    /// Returns the inputs of KV splits.
    pub fn determinism(&self) -> Determinism {
        self.determinism
    }
    /// Returns whether blocks are zeroed when their last holder releases them.
    pub fn wipe_on_release(&self) -> bool {
        self.wipe_on_release
    }
}

/// Host and device memory of a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryUsage {
    /// Bytes of K and V of one slot over all layers, scales and means included. A token has one
    /// slot, or several if it is kept in 16 bits. For layers on demand: of one layer.
    pub bytes_per_token: u64,
    /// Bytes of all planes with rows, without their constants.
    pub bytes_total: u64,
    /// Bytes of the slots of all recurrent states.
    pub bytes_states: u64,
    /// Bytes of the constants of all planes: scales and transforms, independent of the pool.
    pub bytes_constants: u64,
    /// Tokens that the smallest pool holds at once; with a window, a sequence may be longer.
    pub tokens: u64,
}

impl MemoryUsage {
    /// Returns the bytes of all planes, their constants, and all states.
    pub fn all_bytes(&self) -> u64 {
        self.bytes_total + self.bytes_constants + self.bytes_states
    }
}

impl CacheSpec {
    /// Returns the memory of the planes. For layers on demand: of one layer.
    pub fn memory(&self) -> MemoryUsage {
        self.memory_checked().invariant("`build` refuses geometry whose bytes overflow")
    }

    /// Returns how many sequences of `tokens` tokens fit at once without sharing.
    pub fn sequences_that_fit(&self, tokens: u32) -> u32 {
        let fit = |group: &GroupSpec| {
            let blocks = group.blocks_to_grow(tokens);
            // Any number fits that has no block.
            group.num_blocks().checked_div(blocks).unwrap_or(u32::MAX)
        };
        let fit = self.groups.iter().map(fit).min().unwrap_or(0);
        if tokens > self.max_seq_len { 0 } else { fit.min(self.max_sequences_in_step()) }
    }

    fn memory_checked(&self) -> Option<MemoryUsage> {
        let (mut per_token, mut total, mut tokens) = (0_u64, 0_u64, u64::MAX);
        let mut constants = 0_u64;
        for group in &self.groups {
            // Layers on demand: of one layer.
            let layers = to_u64(group.layers.len().max(usize::from(self.on_demand)));
            let block =
                group.layouts.iter().try_fold(0_u64, |n, l| n.checked_add(l.block_bytes()))?;
            let block = block.checked_mul(layers)?;
            total = total.checked_add(block.checked_mul(u64::from(group.num_blocks()))?)?;
            per_token = per_token.checked_add(block.checked_div(u64::from(group.block_size()))?)?;
            let mut planes = group.layouts.iter().map(PlaneLayout::constants_bytes);
            let bytes = planes.try_fold(0_u64, u64::checked_add)?.checked_mul(layers)?;
            constants = constants.checked_add(bytes)?;
            let map = group.slot_map();
            let blocks = group.num_blocks().saturating_sub(map.tail_blocks_max());
            tokens = tokens.min(u64::from(map.tokens(blocks)));
        }
        let states = self.states.iter().try_fold(0_u64, |sum, of| sum.checked_add(of.bytes()?))?;
        // A host allocation is never larger than isize::MAX bytes.
        isize::try_from(total.checked_add(constants)?.checked_add(states)?).ok()?;
        Some(MemoryUsage {
            bytes_per_token: per_token,
            bytes_total: total,
            bytes_states: states,
            bytes_constants: constants,
            tokens,
        })
    }
}
