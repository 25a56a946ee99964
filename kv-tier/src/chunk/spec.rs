//! The geometry of the chunks of one group.
use std::ops::Range;

use kv_core::backend::{
    BlockPlanes, ChunkLayout, ChunkShape, Dims, PlaneLayout, PlaneRole, SlotMap,
};
use kv_core::num::to_u32;

use kv_core::{BlockOrder, CacheSpec, GroupId};

use super::field::{OF_ROWS, OF_STATES, token_bytes};
use super::header::{CONTENT_BYTES, PAGE};
use super::plane;

/// Geometry of the chunks of one group: how many blocks a chunk has, and where their bytes lie in
/// it. All chunks of a group have the same size. A chunk of the snapshots of recurrent states has
/// one snapshot, which is named by the tokens of a block as a block is.
///
/// ```
/// use kv::backend::Plane;
/// use kv::{CacheSpec, GroupId, KvFormat};
/// use kv::tier::ChunkSpec;
///
/// let spec = CacheSpec::builder().layers(32).kv_heads(8).head_dim(128).format(KvFormat::Bf16);
/// let chunks = ChunkSpec::new(&spec.paged(16, 4096).build()?, GroupId(0))?;
/// assert_eq!((chunks.blocks(), chunks.payload_bytes()), (1, 2 << 20));
/// assert_eq!(chunks.piece(0, 0, Plane::Value), 4096 + (32 << 10)..4096 + (64 << 10));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkSpec {
    group: GroupId,
    num_kv_heads: u32,
    order: BlockOrder,
    slot_map: SlotMap,
    block_size: u32,
    /// The group whose blocks name the chunks.
    named_by: GroupId,
    /// Extents of the parts of a state, `None` for rows.
    parts: Option<[Dims; BlockPlanes::MAX]>,
    layout: ChunkLayout,
}

impl ChunkSpec {
    /// Lists the groups of a cache whose blocks have bytes: those of layers with rows, then the
    /// snapshots of recurrent states.
    pub fn groups_of(spec: &CacheSpec) -> Vec<GroupId> {
        let rows = (0..=u8::MAX).map(GroupId).zip(spec.groups());
        let rows = rows.filter(|(_, group)| !group.layers().is_empty()).map(|(id, _)| id);
        let states = spec.snapshot_groups().zip(spec.states());
        let states = states.filter(|(_, of)| of.snapshots().is_some()).map(|(id, _)| id);
        rows.chain(states).collect()
    }

    /// Computes the geometry of a group's chunks. One of rows has the smallest power of two of
    /// blocks that makes it at least 1 MiB, as long as it has at most 256 tokens; at least one
    /// block.
    ///
    /// # Errors
    /// [`ChunkSpecError::UnknownGroup`], also for a group without layers;
    /// [`ChunkSpecError::LayersOnDemand`] for a cache whose number of layers is not fixed;
    /// [`ChunkSpecError::TooLarge`] for blocks of more tokens than a header holds.
    pub fn new(spec: &CacheSpec, group: GroupId) -> Result<Self, ChunkSpecError> {
        if let Some(states) = Self::of_states(spec, group)? {
            return Ok(states);
        }
        let one = Self::one_block(spec, group)?;
        let stride = one.layout.block_bytes().max(1);
        let enough = CHUNK_BYTES_MIN.div_ceil(stride).next_power_of_two();
        // The largest power of two that 256 tokens allow.
        let most = TOKENS_MAX.checked_div(one.block_size).unwrap_or(0).checked_ilog2();
        let most = 1_u32.checked_shl(most.unwrap_or(0)).unwrap_or(1);
        one.with_blocks(u32::try_from(enough).unwrap_or(most).min(most))
    }

    /// Sets another number of blocks of a chunk. Caches with different numbers never find each
    /// other's chunks.
    ///
    /// # Errors
    /// [`ChunkSpecError::NoBlocks`] for 0; [`ChunkSpecError::TooLarge`] for more tokens than a
    /// header holds, or more bytes than this machine addresses.
    pub fn with_blocks(mut self, blocks: u32) -> Result<Self, ChunkSpecError> {
        if blocks == 0 {
            return Err(ChunkSpecError::NoBlocks);
        }
        let too_large = ChunkSpecError::TooLarge { blocks, block_size: self.block_size };
        let tokens = blocks.checked_mul(self.block_size).ok_or(too_large)?;
        if blocks > 1 && self.is_of_states() {
            return Err(ChunkSpecError::OneState { blocks });
        }
        // Saturating, for hosts of 32 bits.
        let header_bytes = self
            .tokens_at()
            .saturating_add(token_bytes(tokens))
            .saturating_add(CONTENTS_MIN * CONTENT_BYTES)
            .saturating_add(size_of::<u64>())
            .checked_next_multiple_of(PAGE)
            .filter(|bytes| u16::try_from(bytes.div_euclid(PAGE)).is_ok())
            .ok_or(too_large)?;
        let shape = ChunkShape { blocks, header_bytes: to_u32(header_bytes) };
        self.layout = ChunkLayout::new(*self.layout.planes(), self.layout.num_layers(), shape)
            .map_err(|_| too_large)?;
        Ok(self)
    }

    fn one_block(spec: &CacheSpec, id: GroupId) -> Result<Self, ChunkSpecError> {
        if spec.layers_on_demand() {
            return Err(ChunkSpecError::LayersOnDemand);
        }
        let group = spec.groups().get(usize::from(id.0)).filter(|of| !of.layers().is_empty());
        let group = group.ok_or(ChunkSpecError::UnknownGroup { group: id })?;
        let [k, v] = group.layouts();
        let num_layers = to_u32(group.layers().len());
        let shape = ChunkShape { blocks: 1, header_bytes: 0 };
        let block_size = group.block_size();
        let layout = ChunkLayout::new([*k, *v], num_layers, shape)
            .map_err(|_| ChunkSpecError::TooLarge { blocks: 1, block_size })?;
        Ok(Self {
            group: id,
            num_kv_heads: k.num_kv_heads(),
            order: k.order(),
            slot_map: *group.slot_map(),
            block_size,
            named_by: id,
            parts: None,
            layout,
        })
    }

    /// Computes the geometry of the snapshots of recurrent states; `None` for another group.
    fn of_states(spec: &CacheSpec, id: GroupId) -> Result<Option<Self>, ChunkSpecError> {
        let mut numbers = spec.snapshot_groups().zip(spec.states());
        let found =
            numbers.find_map(|(group, of)| of.snapshots().filter(|_| group == id).zip(Some(of)));
        let (Some((snapshots, of)), Some(rows)) = (found, spec.groups().first()) else {
            return Ok(None);
        };
        let mut parts = [Dims::new(&[]); BlockPlanes::MAX];
        for (place, part) in parts.iter_mut().zip(snapshots.parts()) {
            *place = part.shape();
        }
        let block_size = rows.block_size();
        let shape = ChunkShape { blocks: 1, header_bytes: 0 };
        let layout = ChunkLayout::new(*snapshots.planes(), to_u32(of.layers().len()), shape);
        let of_states = Self {
            group: id,
            num_kv_heads: 0,
            order: BlockOrder::Nhd,
            slot_map: *rows.slot_map(),
            block_size,
            named_by: GroupId(0),
            parts: Some(parts),
            layout: layout.map_err(|_| ChunkSpecError::TooLarge { blocks: 1, block_size })?,
        };
        of_states.with_blocks(1).map(Some)
    }

    /// Returns the group.
    pub fn group(&self) -> GroupId {
        self.group
    }
    /// Returns the blocks of a chunk.
    pub fn blocks(&self) -> u32 {
        self.layout.num_blocks()
    }
    /// Returns the layers of the group.
    pub fn num_layers(&self) -> u32 {
        self.layout.num_layers()
    }
    /// Returns the bytes of the header, a multiple of 4,096.
    pub fn header_bytes(&self) -> usize {
        self.layout.header_bytes()
    }
    /// Returns the bytes of the payload, a multiple of 4,096.
    pub fn payload_bytes(&self) -> usize {
        self.layout.bytes() - self.layout.header_bytes()
    }
    /// Returns the bytes of a chunk: header and payload.
    pub fn chunk_bytes(&self) -> usize {
        self.layout.bytes()
    }
    /// Returns how many contents of placeholder tokens the header of a chunk with `num_tokens`
    /// tokens has room for: 64 and more; none if there is no room for the tokens.
    pub(super) fn contents_max(&self, num_tokens: u32) -> usize {
        let used = self.tokens_at().saturating_add(token_bytes(num_tokens));
        let used = used.saturating_add(size_of::<u64>());
        self.header_bytes().saturating_sub(used).div_euclid(CONTENT_BYTES)
    }

    /// Returns the index of the first block of chunk `index` in its prompt; `u32::MAX` if more.
    pub fn first_block(&self, index: u32) -> u32 {
        index.saturating_mul(self.blocks())
    }
    /// Returns the positions of the tokens of chunk `index`; `u32::MAX` for those past it.
    pub fn span(&self, index: u32) -> Range<u32> {
        let first = self.first_block(index);
        self.slot_map.tokens(first)..self.slot_map.tokens(first.saturating_add(self.blocks()))
    }
    /// Returns the positions of the tokens of block `block` of chunk `index`: `block_size` tokens,
    /// or fewer with a full-precision prefix; `u32::MAX` for those past it.
    pub fn block_span(&self, index: u32, block: u32) -> Range<u32> {
        let block = self.first_block(index).saturating_add(block);
        self.slot_map.tokens(block)..self.slot_map.tokens(block.saturating_add(1))
    }

    /// Returns where in a chunk the bytes of a plane lie for one of its blocks. Pieces begin at
    /// multiples of 16 bytes of the chunk.
    ///
    /// # Panics
    /// If a chunk has no such block, or the group no such layer or plane.
    pub fn piece(&self, block: u32, layer: u32, role: impl Into<PlaneRole>) -> Range<usize> {
        self.layout.piece(block, layer, role)
    }

    /// Returns the place of each block's bytes, for the copies of a
    /// [`HostPool`](kv_core::backend::HostPool).
    pub fn layout(&self) -> &ChunkLayout {
        &self.layout
    }

    /// Returns whether the chunks are snapshots of recurrent states.
    pub fn is_of_states(&self) -> bool {
        self.parts.is_some()
    }
    /// Returns the version of the header.
    pub(crate) fn version(&self) -> u16 {
        if self.is_of_states() { OF_STATES } else { OF_ROWS }
    }
    /// Returns the group whose blocks name the chunks: their own, or for states the first.
    pub(crate) fn named_by(&self) -> GroupId {
        self.named_by
    }
    /// Returns the layouts of K and V; `None` for states.
    pub(super) fn rows(&self) -> Option<[&PlaneLayout; 2]> {
        self.layout.planes().rows()
    }
    /// Iterates over the parts of a state: index, extents and layout. None for rows.
    pub(super) fn parts(&self) -> impl Iterator<Item = (u32, &Dims, &PlaneLayout)> {
        let parts = self.parts.iter().flatten().zip(self.layout.planes().layouts());
        (0..).zip(parts).map(|(index, (shape, layout))| (index, shape, layout))
    }
    /// Returns the place of the first token in the header.
    pub(super) fn tokens_at(&self) -> usize {
        plane::tokens_at(self.parts.map(|_| self.layout.planes().len()))
    }
    pub(super) fn num_kv_heads(&self) -> u32 {
        self.num_kv_heads
    }
    pub(super) fn block_size(&self) -> u32 {
        self.block_size
    }
    pub(super) fn order(&self) -> BlockOrder {
        self.order
    }
}

/// A cache whose blocks cannot be chunked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ChunkSpecError {
    /// The cache has no such group, or one without layers, whose blocks have no bytes.
    #[error("the cache has no group {} with layers", group.0)]
    UnknownGroup {
        /// The group.
        group: GroupId,
    },
    /// Layers are allocated one by one, so blocks have no fixed size.
    #[error("layers on demand have no fixed number, so their blocks form no chunks")]
    LayersOnDemand,
    /// A chunk of several snapshots.
    #[error("a chunk of recurrent states has one snapshot, not {blocks}")]
    OneState {
        /// Blocks asked for.
        blocks: u32,
    },
    /// A chunk of no blocks.
    #[error("a chunk has at least one block")]
    NoBlocks,
    /// The tokens do not fit the header, or the blocks do not fit memory.
    #[error("chunks of {blocks} blocks of {block_size} tokens are too large")]
    TooLarge {
        /// Blocks of a chunk.
        blocks: u32,
        /// Tokens of a block.
        block_size: u32,
    },
}

/// A chunk is at least this large, unless it would have more tokens than [`TOKENS_MAX`].
const CHUNK_BYTES_MIN: usize = 1 << 20;
const TOKENS_MAX: u32 = 256;
/// Contents of placeholder tokens that every header has room for.
const CONTENTS_MIN: usize = 64;
