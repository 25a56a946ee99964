//! The slots of a block that hold no token of a chunk.
use kv_core::BlockOrder;
use kv_core::invariant::Invariant;
use kv_core::num::{to_offset, to_u64};

use super::ChunkSpec;

/// Zeroes the slots of chunk `index` after the token at position `end - 1`, which other texts may
/// have filled.
pub(crate) fn zero_after(spec: &ChunkSpec, chunk: &mut [u8], index: u32, end: u32) {
    for block in 0..spec.blocks() {
        let span = spec.block_span(index, block);
        // No slot of a block is used that begins later.
        let end = if span.start < end { end.min(span.end) } else { 0 };
        zero_unused(spec, chunk, block, end);
    }
}

/// Zeroes the slots of one block after the token at position `end - 1`, the last one that belongs
/// to the chunk. Rows of an earlier holder of the block may lie there.
pub(crate) fn zero_unused(spec: &ChunkSpec, chunk: &mut [u8], block: u32, end: u32) {
    for (role, layout) in spec.layout().planes().as_slice() {
        let map = layout.slot_map();
        let used = end.checked_sub(1).map_or(0, |last| {
            let place = map.place(last);
            let slots = if place.is_wide { map.wide_slots() } else { 1 };
            place.inside + slots
        });
        if used >= layout.block_size() {
            continue;
        }
        let slots = |slots: u32| u64::from(slots) * layout.token_stride();
        let (from, to) = (slots(used), slots(layout.block_size()));
        // The rows of a head lie together, or those of all heads do.
        let runs = match layout.order() {
            BlockOrder::Hnd => layout.num_kv_heads(),
            _ => 1,
        };
        for layer in 0..spec.num_layers() {
            let piece = spec.piece(block, layer, *role);
            let piece = chunk.get_mut(piece).invariant("pieces lie in their chunk");
            assert!(to_u64(piece.len()) >= layout.block_bytes(), "a piece is a whole block");
            for run in 0..runs {
                let begin = layout.head_stride() * u64::from(run);
                let range = to_offset(begin + from)..to_offset(begin + to);
                piece.get_mut(range).invariant("rows lie in their block").fill(0);
            }
        }
    }
}
