//! The layout of chunks: the place of each block's bytes.
use std::ops::Range;

use crate::backend::{BlockPlanes, StorageView};
use crate::error::{DeviceError, DeviceErrorKind};
use crate::ids::{BlockId, PlaneRole};
use crate::invariant::Invariant;
use crate::num::{to_offset, to_u32, to_usize};

/// The size of a chunk, by the caller's choice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "two numbers that a caller chooses")]
pub struct ChunkShape {
    /// Blocks of a chunk.
    pub blocks: u32,
    /// Bytes before the first block, for the caller; rounded up to [`ChunkLayout::ALIGN`].
    pub header_bytes: u32,
}

/// The place of each block's bytes in a chunk: a header, then `[block][layer][plane]`.
///
/// A *piece* is the unchanged bytes of one block in one plane. Pieces begin at multiples of
/// [`Self::PIECE_ALIGN`]; the header and the chunk end at multiples of [`Self::ALIGN`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkLayout {
    shape: ChunkShape,
    /// The planes of every layer.
    planes: BlockPlanes,
    num_layers: u32,
    /// Bytes from a layer to the next one.
    layer_bytes: usize,
    bytes: usize,
}

impl ChunkLayout {
    /// Alignment of a chunk, its header and its end, in bytes, for direct I/O.
    pub const ALIGN: usize = 4096;
    /// Alignment of a piece in a chunk, in bytes.
    pub const PIECE_ALIGN: usize = 16;

    /// Computes the layout for `num_layers` layers with these planes.
    ///
    /// # Errors
    /// `Unsupported` without layers or blocks, `OutOfMemory` for a chunk larger than host memory
    /// can address.
    pub fn new(
        planes: impl Into<BlockPlanes>,
        num_layers: u32,
        shape: ChunkShape,
    ) -> Result<Self, DeviceError> {
        let planes = planes.into();
        let error = |kind, detail: &str| {
            Err(DeviceError::new(kind, "lay out a chunk").with_detail(detail.to_owned()))
        };
        if num_layers == 0 || shape.blocks == 0 {
            return error(
                DeviceErrorKind::Unsupported,
                "no layer has memory, or no block is asked",
            );
        }
        let sizes = || {
            let layer = planes.layouts().try_fold(0_usize, |sum, plane| {
                let bytes = usize::try_from(plane.block_bytes()).ok()?;
                sum.checked_add(bytes.checked_next_multiple_of(Self::PIECE_ALIGN)?)
            })?;
            let block = layer.checked_mul(to_usize(num_layers))?;
            let header = to_usize(shape.header_bytes).checked_next_multiple_of(Self::ALIGN)?;
            let bytes = block.checked_mul(to_usize(shape.blocks))?.checked_add(header)?;
            let bytes = bytes.checked_next_multiple_of(Self::ALIGN)?;
            isize::try_from(bytes).is_ok().then_some((layer, bytes))
        };
        match sizes() {
            Some((layer_bytes, bytes)) => {
                Ok(Self { shape, planes, num_layers, layer_bytes, bytes })
            }
            None => error(DeviceErrorKind::OutOfMemory, "a chunk exceeds the address space"),
        }
    }

    /// Computes the layout for all layers of a storage that have memory.
    ///
    /// # Errors
    /// Those of [`Self::new`].
    pub fn of<Buf: 'static>(
        storage: StorageView<'_, Buf>,
        shape: ChunkShape,
    ) -> Result<Self, DeviceError> {
        Self::new(*storage.layouts(), to_u32(storage.num_layers()), shape)
    }

    /// Returns the number of blocks of a chunk.
    pub fn num_blocks(&self) -> u32 {
        self.shape.blocks
    }
    /// Returns the number of layers.
    pub fn num_layers(&self) -> u32 {
        self.num_layers
    }
    /// Returns the planes of every layer.
    pub fn planes(&self) -> &BlockPlanes {
        &self.planes
    }
    /// Returns the bytes before the first block.
    pub fn header_bytes(&self) -> usize {
        to_usize(self.shape.header_bytes).next_multiple_of(Self::ALIGN)
    }
    /// Returns the bytes of one block in all planes, each rounded up to [`Self::PIECE_ALIGN`].
    pub fn block_bytes(&self) -> usize {
        self.layer_bytes * to_usize(self.num_layers)
    }
    /// Returns the bytes of a whole chunk.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns the place of a block's bytes in one plane of the layer with this index.
    ///
    /// # Panics
    /// If the block, the layer or the plane does not exist.
    pub fn piece(&self, block: u32, layer: u32, role: impl Into<PlaneRole>) -> Range<usize> {
        let role = role.into();
        assert!(block < self.shape.blocks, "block {block} of a chunk of {}", self.shape.blocks);
        assert!(layer < self.num_layers, "layer {layer} of {}", self.num_layers);
        // Within the chunk, whose size was checked when the layout was made.
        let mut begin = self.block_bytes() * to_usize(block)
            + self.layer_bytes * to_usize(layer)
            + self.header_bytes();
        let mut planes = self.planes.as_slice().iter();
        let found = planes.find_map(|(of, plane)| {
            let bytes = to_offset(plane.block_bytes());
            let piece = begin..begin + bytes;
            begin += bytes.next_multiple_of(Self::PIECE_ALIGN);
            (*of == role).then_some(piece)
        });
        found.invariant("a chunk has the planes that its layout lists")
    }

    /// Refuses a call whose storage, blocks or places the layout does not have.
    ///
    /// # Errors
    /// `Unsupported` for storage with other planes, `OutOfRange` for blocks and places.
    pub fn check<Buf: 'static>(
        &self,
        storage: StorageView<'_, Buf>,
        (blocks, first): (&[BlockId], u32),
        operation: &'static str,
    ) -> Result<(), DeviceError> {
        let error =
            |kind, detail: String| Err(DeviceError::new(kind, operation).with_detail(detail));
        if *storage.layouts() != self.planes || to_u32(storage.num_layers()) != self.num_layers {
            let why = "the planes are not those that the host pool was made for";
            return error(DeviceErrorKind::Unsupported, why.to_owned());
        }
        let (count, places) = (blocks.len(), self.shape.blocks);
        if count > to_usize(places.saturating_sub(first)) {
            let asked = format!("{count} blocks from place {first}, of {places}");
            return error(DeviceErrorKind::OutOfRange, asked);
        }
        let num_blocks = self.planes.num_blocks();
        match blocks.iter().find(|block| block.0 >= num_blocks) {
            Some(block) => {
                let asked = format!("block {block} of {num_blocks}");
                error(DeviceErrorKind::OutOfRange, asked)
            }
            None => Ok(()),
        }
    }

    /// Refuses blocks of which one is named twice: copies of a call may run in any order.
    ///
    /// # Errors
    /// `Unsupported`.
    pub fn check_distinct(blocks: &[BlockId], operation: &'static str) -> Result<(), DeviceError> {
        let mut sorted = blocks.to_vec();
        sorted.sort_unstable();
        let twice = sorted.array_windows().find(|[block, next]| block == next);
        match twice {
            Some([block, _]) => Err(DeviceError::new(DeviceErrorKind::Unsupported, operation)
                .with_detail(format!("block {block} is named twice"))),
            None => Ok(()),
        }
    }
}
