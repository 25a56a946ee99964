//! Where the bytes of each block are in a chunk.
use std::ops::Range;

use crate::error::{DeviceError, DeviceErrorKind};
use crate::geometry::PlaneLayout;
use crate::num::{to_offset, to_usize};
use crate::storage::StorageView;

/// The size of a chunk: what a caller chooses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "two numbers that a caller chooses")]
pub struct ChunkShape {
    /// Blocks of a chunk.
    pub blocks: u32,
    /// Bytes before the first block, for the caller; rounded up to [`ChunkLayout::ALIGN`].
    pub header_bytes: u32,
}

/// Where the bytes of each block are in a chunk: a header, then `[block][layer][K, V]`.
///
/// A *piece* is the unchanged bytes of one block in one plane. Pieces begin at multiples of 16, the
/// blocks and the end of the chunk at the same and at [`Self::ALIGN`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChunkLayout {
    shape: ChunkShape,
    /// Layouts of K and V of each layer with memory, in order.
    planes: Vec<PlaneLayout>,
    /// Offset of each plane's piece in a block.
    begins: Vec<usize>,
    /// Bytes from one block to the next.
    block_bytes: usize,
    bytes: usize,
}

impl ChunkLayout {
    /// Alignment of a chunk, its header and its end, in bytes: what direct I/O needs.
    pub const ALIGN: usize = 4096;
    /// Alignment of a piece in a block, in bytes.
    pub const PIECE_ALIGN: usize = 16;

    /// Computes the layout for planes in the order `[layer][K, V]`.
    ///
    /// # Errors
    /// `Unsupported` without planes or blocks, `OutOfMemory` for a chunk larger than host memory
    /// can address.
    pub fn new(
        planes: impl IntoIterator<Item = PlaneLayout>,
        shape: ChunkShape,
    ) -> Result<Self, DeviceError> {
        let error = |kind, detail: &str| {
            Err(DeviceError::new(kind, "lay out a chunk").with_detail(detail.to_owned()))
        };
        let planes: Vec<_> = planes.into_iter().collect();
        if planes.is_empty() || shape.blocks == 0 {
            return error(DeviceErrorKind::Unsupported, "no layer has memory, or no block asked");
        }
        let end = |begin: usize, plane: &PlaneLayout| {
            let bytes = usize::try_from(plane.block_bytes()).ok()?;
            begin.checked_add(bytes)?.checked_next_multiple_of(Self::PIECE_ALIGN)
        };
        let mut begins = Vec::with_capacity(planes.len());
        let mut block_bytes = Some(0);
        for plane in &planes {
            begins.push(block_bytes.unwrap_or_default());
            block_bytes = block_bytes.and_then(|begin| end(begin, plane));
        }
        let header = to_usize(shape.header_bytes).checked_next_multiple_of(Self::ALIGN);
        let whole = block_bytes.zip(header).and_then(|(block, header)| {
            let bytes = block.checked_mul(to_usize(shape.blocks))?.checked_add(header)?;
            let bytes = bytes.checked_next_multiple_of(Self::ALIGN)?;
            isize::try_from(bytes).is_ok().then_some((block, bytes))
        });
        match whole {
            Some((block_bytes, bytes)) => Ok(Self { shape, planes, begins, block_bytes, bytes }),
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
        Self::new(storage.planes().map(|plane| *plane.layout()), shape)
    }

    /// Returns the number of blocks of a chunk.
    pub fn num_blocks(&self) -> u32 {
        self.shape.blocks
    }
    /// Returns the number of planes: twice that of layers with memory.
    pub fn num_planes(&self) -> usize {
        self.planes.len()
    }
    /// Returns the layout of a plane.
    pub fn planes(&self) -> &[PlaneLayout] {
        &self.planes
    }
    /// Returns the bytes before the first block.
    pub fn header_bytes(&self) -> usize {
        to_usize(self.shape.header_bytes).next_multiple_of(Self::ALIGN)
    }
    /// Returns the bytes of one block in all planes, each rounded up to [`Self::PIECE_ALIGN`].
    pub fn block_bytes(&self) -> usize {
        self.block_bytes
    }
    /// Returns the bytes of a whole chunk.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
    /// Returns the bytes of a chunk that has only its first `blocks` blocks.
    pub fn bytes_of(&self, blocks: u32) -> usize {
        // At most `bytes`, which fits.
        let blocks = to_usize(blocks.min(self.shape.blocks));
        self.block_bytes
            .saturating_mul(blocks)
            .saturating_add(self.header_bytes())
            .next_multiple_of(Self::ALIGN)
    }

    /// Returns the bytes of a block at a place, in one plane.
    ///
    /// # Panics
    /// If the place or the plane does not exist.
    pub fn piece(&self, place: u32, index: usize) -> Range<usize> {
        let layout = self.planes.get(index).zip(self.begins.get(index));
        assert!(place < self.shape.blocks && layout.is_some(), "place {place}, plane {index}");
        let (bytes, begin) =
            layout.map_or((0, 0), |(layout, begin)| (to_offset(layout.block_bytes()), *begin));
        // Within the chunk, whose size was checked when the layout was made.
        let block = self.block_bytes.saturating_mul(to_usize(place));
        let begin = self.header_bytes().saturating_add(block).saturating_add(begin);
        begin..begin.saturating_add(bytes)
    }

    /// Refuses a call whose storage, blocks or places the layout does not have.
    pub(crate) fn check<Buf: 'static>(
        &self,
        storage: StorageView<'_, Buf>,
        (blocks, first): (usize, u32),
        operation: &'static str,
    ) -> Result<(), DeviceError> {
        let error =
            |kind, detail: String| Err(DeviceError::new(kind, operation).with_detail(detail));
        let mut planes = storage.planes();
        let is_own = self.planes.iter().all(|own| planes.next().is_some_and(|p| p.layout() == own));
        if !is_own || planes.next().is_some() {
            let why = "the planes are not those that the host pool was made for";
            return error(DeviceErrorKind::Unsupported, why.to_owned());
        }
        if blocks > to_usize(self.shape.blocks.saturating_sub(first)) {
            let asked = format!("{blocks} blocks from place {first}, of {}", self.shape.blocks);
            return error(DeviceErrorKind::OutOfRange, asked);
        }
        Ok(())
    }
}
