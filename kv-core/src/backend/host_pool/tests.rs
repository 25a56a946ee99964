//! Layouts of chunks, and the memory of the pool over a queue.
use kv_format::KvFormat;

use super::*;
use crate::backend::{Backend, NullBackend};
use crate::error::DeviceErrorKind;
use crate::geometry::{BlockOrder, PlaneLayout, PlaneShape};
use crate::storage::KvStorage;

fn plane(block_size: u32, head_dim: u32, format: KvFormat) -> PlaneLayout {
    let order = BlockOrder::Nhd;
    let shape = PlaneShape { num_blocks: 8, block_size, num_kv_heads: 1, head_dim, order, format };
    PlaneLayout::new(shape).unwrap()
}

fn layout(planes: &[PlaneLayout], blocks: u32, header_bytes: u32) -> ChunkLayout {
    ChunkLayout::new(planes.iter().copied(), ChunkShape { blocks, header_bytes }).unwrap()
}

#[test]
fn pieces_follow_each_other_on_multiples_of_16() {
    // 3 * 7 * 2 = 42 bytes and 3 * 5 * 4 = 60 bytes.
    let layout = layout(&[plane(3, 7, KvFormat::F16), plane(3, 5, KvFormat::F32)], 2, 1);
    let pieces = [layout.piece(0, 0), layout.piece(0, 1), layout.piece(1, 0), layout.piece(1, 1)];
    let begin = [4096, 4096 + 48, 4096 + 112, 4096 + 160];
    assert_eq!(pieces.clone().map(|piece| piece.start), begin);
    assert_eq!(pieces.map(|piece| piece.len()), [42, 60, 42, 60]);
    assert_eq!((layout.block_bytes(), layout.bytes()), (112, 8192));
}

#[test]
fn a_chunk_of_fewer_blocks_ends_on_a_page() {
    let layout = layout(&[plane(16, 128, KvFormat::F16)], 4, 0);
    assert_eq!((layout.header_bytes(), layout.block_bytes()), (0, 4096));
    assert_eq!([0, 1, 4, 9].map(|blocks| layout.bytes_of(blocks)), [0, 4096, 16384, 16384]);
}

#[test]
#[should_panic(expected = "place 4, plane 0")]
fn a_place_past_the_last_is_a_bug() {
    layout(&[plane(16, 128, KvFormat::F16)], 4, 0).piece(4, 0);
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
    let refused = |planes: &[PlaneLayout], blocks| {
        let shape = ChunkShape { blocks, header_bytes: 0 };
        ChunkLayout::new(planes.iter().copied(), shape).unwrap_err().kind()
    };
    assert_eq!(refused(&[], 1), DeviceErrorKind::Unsupported);
    assert_eq!(refused(&[plane(1, 1, KvFormat::F32)], 0), DeviceErrorKind::Unsupported);
    assert_eq!(refused(&[large], u32::MAX), DeviceErrorKind::OutOfMemory);
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
    let at = first.bytes().as_ptr();
    assert_eq!((first.bytes().len(), at.align_offset(ChunkLayout::ALIGN)), (4096, 0));
    drop(first);
    assert_eq!(pool.take().unwrap().bytes().as_ptr(), at);
    drop((pool, second));
}
