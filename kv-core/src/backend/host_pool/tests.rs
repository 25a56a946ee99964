//! Layouts of chunks, and the memory of the pool over a queue.
use kv_format::KvFormat;

use super::*;
use crate::backend::{Backend, NullBackend};
use crate::error::DeviceErrorKind;
use crate::geometry::{BlockOrder, PlaneLayout, PlaneShape};
use crate::ids::Plane;
use crate::storage::KvStorage;

fn plane(block_size: u32, head_dim: u32, format: KvFormat) -> PlaneLayout {
    let order = BlockOrder::Nhd;
    let shape = PlaneShape { num_blocks: 8, block_size, num_kv_heads: 1, head_dim, order, format };
    PlaneLayout::new(shape).unwrap()
}

fn layout(planes: [PlaneLayout; 2], blocks: u32, header_bytes: u32) -> ChunkLayout {
    ChunkLayout::new(planes, 2, ChunkShape { blocks, header_bytes }).unwrap()
}

#[test]
fn pieces_follow_each_other_on_multiples_of_16() {
    // 3 * 7 * 2 = 42 bytes and 3 * 5 * 4 = 60 bytes.
    let layout = layout([plane(3, 7, KvFormat::F16), plane(3, 5, KvFormat::F32)], 2, 1);
    let piece = |place, layer, plane| {
        let piece = layout.piece(place, layer, plane);
        (piece.start, piece.len())
    };
    let pieces = [
        piece(0, 0, Plane::Key),
        piece(0, 0, Plane::Value),
        piece(0, 1, Plane::Key),
        piece(1, 0, Plane::Key),
        piece(1, 1, Plane::Value),
    ];
    let begin = 4096;
    let expected = [(0, 42), (48, 60), (112, 42), (224, 42), (224 + 112 + 48, 60)];
    assert_eq!(pieces, expected.map(|(at, len)| (begin + at, len)));
    assert_eq!((layout.block_bytes(), layout.bytes()), (224, 8192));
}

#[test]
#[should_panic(expected = "block 4 of a chunk of 4")]
fn a_block_past_the_last_is_a_bug() {
    layout([plane(16, 128, KvFormat::F16); 2], 4, 0).piece(4, 0, Plane::Key);
}

#[test]
fn impossible_chunks_are_refused() {
    let large = PlaneShape {
        num_blocks: 1,
        block_size: 1 << 31,
        num_kv_heads: 1 << 16,
        head_dim: 1 << 10,
        order: BlockOrder::Nhd,
        format: KvFormat::F32,
    };
    let large = PlaneLayout::new(large).unwrap();
    let refused = |plane, layers, blocks| {
        let shape = ChunkShape { blocks, header_bytes: 0 };
        ChunkLayout::new([plane; 2], layers, shape).unwrap_err().kind()
    };
    let small = plane(1, 1, KvFormat::F32);
    assert_eq!(refused(small, 0, 1), DeviceErrorKind::Unsupported);
    assert_eq!(refused(small, 1, 0), DeviceErrorKind::Unsupported);
    assert_eq!(refused(large, 1, u32::MAX), DeviceErrorKind::OutOfMemory);
    assert_eq!(refused(large, u32::MAX, 1), DeviceErrorKind::OutOfMemory);
}

#[test]
fn memory_of_a_dropped_chunk_is_used_again() {
    let backend = NullBackend::new();
    let mut storage = KvStorage::new(&backend, [plane(4, 8, KvFormat::F32); 2]).unwrap();
    storage.allocate(&backend, 0).unwrap();
    let shape = ChunkShape { blocks: 2, header_bytes: 0 };
    let mut pool = backend.host_pool(storage.view(), shape, 2).unwrap();
    let (first, second) = (pool.take().unwrap(), pool.take().unwrap());
    assert!(pool.take().is_none());
    let at = first.as_ref().as_ptr();
    assert_eq!((first.as_ref().len(), at.align_offset(ChunkLayout::ALIGN)), (4096, 0));
    drop(first);
    assert_eq!(pool.take().unwrap().as_ref().as_ptr(), at);
    drop((pool, second));
}
