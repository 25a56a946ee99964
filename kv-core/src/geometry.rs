//! Axes of tensors and the byte layout of a plane.
use std::fmt;
use std::str::FromStr;

use kv_format::KvFormat;

use crate::error::{PlanError, SpecConflict, SpecError, UnknownName};
use crate::num::{to_u64, to_usize};
use crate::slot_map::{Place, SlotMap};

/// Axes of an incoming q, k or v tensor: batch, sequence, head, dim; `t` is the ragged total.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Axes {
    /// `[batch, sequence, head, dim]`; row `(b, i)` is token `i` of batch entry `b`.
    Bshd,
    /// `[sequence, batch, head, dim]`.
    Sbhd,
    /// `[total, head, dim]`: the entries' tokens one after another, without gaps.
    Thd,
}

impl fmt::Display for Axes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Bshd => "bshd",
            Self::Sbhd => "sbhd",
            Self::Thd => "thd",
        })
    }
}

impl FromStr for Axes {
    type Err = UnknownName;
    fn from_str(name: &str) -> Result<Self, UnknownName> {
        match name {
            "bshd" => Ok(Self::Bshd),
            "sbhd" => Ok(Self::Sbhd),
            "thd" => Ok(Self::Thd),
            _ => Err(UnknownName::new("axes", name, "bshd, sbhd, thd")),
        }
    }
}

/// Order of the two inner axes of a block of a plane.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum BlockOrder {
    /// `[block_size, num_kv_heads, head_dim]`: a token's heads lie together, so a write is one run.
    Nhd,
    /// `[num_kv_heads, block_size, head_dim]`: a head's tokens lie together, so attention streams.
    #[default]
    Hnd,
}

/// The pool and the policies mark blocks with the highest bit of their numbers.
const NUM_BLOCKS_MAX: u32 = (1 << 31) - 1;

/// Returns the number of values of a plane's constants for this many heads and channels.
pub(crate) const fn constants_len(heads: usize, head_dim: usize) -> usize {
    heads * head_dim * 3 + heads * 2
}

/// Placement of every row of one plane (the K or the V of one layer).
///
/// A plane consists of *segments* of `blocks_per_segment` whole blocks, each a separate buffer, so
/// that no buffer exceeds the limits of a device. CPU and CUDA use one segment per plane.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PlaneLayout {
    num_blocks: u32,
    block_size: u32,
    num_kv_heads: u32,
    head_dim: u32,
    order: BlockOrder,
    format: KvFormat,
    row_bytes: u64,
    block_bytes: u64,
    blocks_per_segment: u32,
    slot_map: SlotMap,
    transforms: bool,
    block_means: bool,
}

/// The numbers of a [`PlaneLayout`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[expect(clippy::exhaustive_structs, reason = "a literal names each of the six numbers")]
pub struct PlaneShape {
    /// Blocks in the pool.
    pub num_blocks: u32,
    /// Tokens a block holds.
    pub block_size: u32,
    /// Heads of K and V.
    pub num_kv_heads: u32,
    /// Values of one row.
    pub head_dim: u32,
    /// Axes inside a block.
    pub order: BlockOrder,
    /// Encoding of a row.
    pub format: KvFormat,
}

impl PlaneLayout {
    /// Checks a geometry; the plane has one segment until [`Self::with_segments_of`].
    ///
    /// # Errors
    /// [`SpecError::Zero`] for a zero field, [`SpecError::Overflow`] when the number of slots does
    /// not fit `u32` or the bytes of the plane do not fit `u64` or `isize`,
    /// [`SpecError::TooLarge`] for more than 2^31 - 1 blocks.
    pub fn new(shape: PlaneShape) -> Result<Self, SpecError> {
        let PlaneShape { num_blocks, block_size, num_kv_heads, head_dim, order, format } = shape;
        for (field, n) in [
            ("num_blocks", num_blocks),
            ("block_size", block_size),
            ("num_kv_heads", num_kv_heads),
            ("head_dim", head_dim),
        ] {
            if n == 0 {
                return Err(SpecError::Zero { field });
            }
        }
        num_blocks
            .checked_mul(block_size)
            .ok_or(SpecError::Overflow { what: "num_blocks * block_size" })?;
        let row_bytes = format.row_bytes(head_dim);
        let overflow = SpecError::Overflow { what: "bytes of one plane" };
        let block_bytes = row_bytes
            .checked_mul(u64::from(num_kv_heads))
            .and_then(|n| n.checked_mul(u64::from(block_size)))
            .ok_or_else(|| overflow.clone())?;
        let plane =
            block_bytes.checked_mul(u64::from(num_blocks)).ok_or_else(|| overflow.clone())?;
        // A host slice is never longer than isize::MAX bytes. Constants have up to 20 bytes for a
        // channel, which may be more than rows of few bits have in all blocks.
        let constants = u64::from(num_kv_heads)
            .checked_mul(u64::from(head_dim))
            .and_then(|n| n.checked_mul(20));
        if isize::try_from(plane).is_err() || constants.is_none() {
            return Err(overflow);
        }
        if num_blocks > NUM_BLOCKS_MAX {
            let (got, max) = (num_blocks.into(), NUM_BLOCKS_MAX.into());
            return Err(SpecError::TooLarge { field: "num_blocks", got, max });
        }
        Ok(Self {
            num_blocks,
            block_size,
            num_kv_heads,
            head_dim,
            order,
            format,
            row_bytes,
            block_bytes,
            blocks_per_segment: num_blocks,
            slot_map: SlotMap::plain(block_size),
            transforms: false,
            block_means: false,
        })
    }

    /// Divides the plane into segments of `blocks` blocks (at least 1, at most all).
    #[must_use]
    pub fn with_segments_of(mut self, blocks: u32) -> Self {
        self.blocks_per_segment = blocks.clamp(1, self.num_blocks);
        self
    }

    /// Returns the plane with rows kept in 16 bits: the rows of the first `full_precision_prefix`
    /// tokens of every sequence, and optionally of the tail. Each row takes `wide_slots` slots (see
    /// [`SlotMap`]), enough for the wider of K and V.
    ///
    /// # Errors
    /// [`SpecError::Conflict`] when a block is too small for one such row, or the slots for it.
    pub fn with_wide_rows(
        mut self,
        full_precision_prefix: u32,
        tail: bool,
        wide_slots: u32,
    ) -> Result<Self, SpecError> {
        let needed = self.format.wide_slots(self.head_dim);
        if (full_precision_prefix > 0 || tail) && wide_slots < needed {
            let problem = SpecConflict::TooFewSlots { needed, got: wide_slots };
            return Err(SpecError::Conflict { what: "full_precision_prefix", problem });
        }
        self.slot_map = SlotMap::new(self.block_size, wide_slots, full_precision_prefix, tail)?;
        Ok(self)
    }

    /// Adds a mean of each kv head after the rows of every block: `head_dim` values in f16, in the
    /// transformed domain. It is subtracted from rows that are quantised, and attention adds `q .
    /// mean` once per block.
    ///
    /// # Errors
    /// [`SpecError::Overflow`] when the bytes of the plane do not fit.
    pub fn with_block_means(mut self) -> Result<Self, SpecError> {
        let overflow = SpecError::Overflow { what: "bytes of one plane" };
        let means = KvFormat::F16
            .row_bytes(self.head_dim)
            .checked_mul(u64::from(self.num_kv_heads))
            .ok_or_else(|| overflow.clone())?;
        if !self.block_means {
            self.block_bytes =
                self.block_bytes.checked_add(means).ok_or_else(|| overflow.clone())?;
        }
        self.block_means = true;
        let plane = self.block_bytes.checked_mul(u64::from(self.num_blocks));
        // A host slice is never longer than isize::MAX bytes.
        match plane.map(isize::try_from) {
            Some(Ok(_)) => Ok(self),
            _ => Err(overflow),
        }
    }

    /// Sets whether rows are transformed before they are stored; see
    /// [`calibration`](crate::calibration).
    #[must_use]
    pub fn with_transform(mut self, transforms: bool) -> Self {
        self.transforms = transforms;
        self
    }

    /// Returns the number of blocks in the pool.
    pub fn num_blocks(&self) -> u32 {
        self.num_blocks
    }
    /// Returns the tokens of a block.
    pub fn block_size(&self) -> u32 {
        self.block_size
    }
    /// Returns the heads of K and V.
    pub fn num_kv_heads(&self) -> u32 {
        self.num_kv_heads
    }
    /// Returns the values of one row.
    pub fn head_dim(&self) -> u32 {
        self.head_dim
    }
    /// Returns the order of axes inside a block.
    pub fn order(&self) -> BlockOrder {
        self.order
    }
    /// Returns the encoding of a row.
    pub fn format(&self) -> KvFormat {
        self.format
    }
    /// Returns the encoding of 16-bit rows: f16 in quantised planes, otherwise the plane's own.
    pub fn wide_format(&self) -> KvFormat {
        self.format.wide_format()
    }
    /// Returns the bytes of one 16-bit row.
    pub fn wide_row_bytes(&self) -> u64 {
        self.wide_format().row_bytes(self.head_dim)
    }
    /// Returns whether every block has a mean of each kv head after its rows.
    pub fn has_block_means(&self) -> bool {
        self.block_means
    }
    /// Returns the bytes from the start of a block to the mean of kv head `head`.
    pub fn mean_begin(&self, head: u32) -> u64 {
        let rows = u64::from(self.block_size) * u64::from(self.num_kv_heads);
        let mean = KvFormat::F16.row_bytes(self.head_dim);
        rows * self.row_bytes + mean * u64::from(head)
    }
    /// Returns where tokens lie in a sequence's blocks.
    pub fn slot_map(&self) -> &SlotMap {
        &self.slot_map
    }
    /// Returns whether rows are transformed before they are stored.
    pub fn transforms(&self) -> bool {
        self.transforms
    }
    /// Returns whether the plane needs [`PlaneConstants`](crate::calibration::PlaneConstants).
    pub fn has_constants(&self) -> bool {
        self.transforms || self.format.given_scales().is_some()
    }
    /// Returns the bytes of those constants; 0 without.
    pub fn constants_bytes(&self) -> u64 {
        if !self.has_constants() {
            return 0;
        }
        let (heads, dim) = (to_usize(self.num_kv_heads), to_usize(self.head_dim));
        to_u64(constants_len(heads, dim)) * to_u64(size_of::<f32>())
    }
    /// Returns the bytes of one row (one token of one kv head).
    pub fn row_bytes(&self) -> u64 {
        self.row_bytes
    }
    /// Returns the bytes of one block.
    pub fn block_bytes(&self) -> u64 {
        self.block_bytes
    }
    /// Refuses tables of another pool than one of `num_blocks` blocks.
    pub(crate) fn check_pool(&self, num_blocks: u32) -> Result<(), PlanError> {
        let (expected, got) = (to_usize(self.num_blocks), to_usize(num_blocks));
        if expected == got {
            return Ok(());
        }
        Err(PlanError::LengthMismatch { what: "blocks of the tables' pool", expected, got })
    }
    /// Refuses a plane with other blocks.
    pub(crate) fn check_same_blocks(&self, plane: &Self) -> Result<(), PlanError> {
        let expected = (self.num_blocks, self.block_size);
        let got = (plane.num_blocks, plane.block_size);
        if expected == got && self.slot_map == plane.slot_map {
            return Ok(());
        }
        Err(PlanError::LayoutMismatch { expected, got })
    }
    /// Returns the blocks of a segment; the last segment may be shorter.
    pub fn blocks_per_segment(&self) -> u32 {
        self.blocks_per_segment
    }
    /// Returns the number of segments.
    pub fn num_segments(&self) -> u32 {
        self.num_blocks.div_ceil(self.blocks_per_segment)
    }
    /// Returns the bytes of segment `index`.
    pub fn segment_bytes(&self, index: u32) -> u64 {
        let first = (index * self.blocks_per_segment).min(self.num_blocks);
        let blocks = (self.num_blocks - first).min(self.blocks_per_segment);
        self.block_bytes * u64::from(blocks)
    }
    /// Returns the bytes of the whole plane.
    pub fn plane_bytes(&self) -> u64 {
        self.block_bytes * u64::from(self.num_blocks)
    }
    /// Returns the bytes from one token of a head to the next token of that head, inside a block.
    #[inline]
    pub fn token_stride(&self) -> u64 {
        match self.order {
            BlockOrder::Nhd => self.row_bytes * u64::from(self.num_kv_heads),
            BlockOrder::Hnd => self.row_bytes,
        }
    }
    /// Returns the bytes from one head of a token to the next head of that token, inside a block.
    #[inline]
    pub fn head_stride(&self) -> u64 {
        match self.order {
            BlockOrder::Nhd => self.row_bytes,
            BlockOrder::Hnd => self.row_bytes * u64::from(self.block_size),
        }
    }
    /// Returns the bytes from the start of a block to a token's row of kv head `head`.
    #[inline]
    pub fn row_begin(&self, place: Place, head: u32) -> u64 {
        // The heads of a 16-bit row lie together in its slots.
        let head_stride = match self.order {
            BlockOrder::Nhd if place.is_wide => {
                self.row_bytes * u64::from(self.slot_map.wide_slots())
            }
            _ => self.head_stride(),
        };
        u64::from(place.inside) * self.token_stride() + u64::from(head) * head_stride
    }
    /// Returns where block `block` begins: its segment, and its byte offset in that segment.
    #[inline]
    pub fn locate(&self, block: u32) -> (usize, u64) {
        // `blocks_per_segment` is at least 1 by construction.
        let per = self.blocks_per_segment.max(1);
        let (segment, inside) = (block / per, block % per);
        (to_usize(segment), self.block_bytes * u64::from(inside))
    }
}
