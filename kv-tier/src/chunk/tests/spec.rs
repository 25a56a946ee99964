//! Sizes of chunks and places of blocks in them.
use kv_core::BlockOrder;

use super::*;

fn chunks(layers: u16, heads: u32, head_dim: u32, format: KvFormat, block_size: u32) -> ChunkSpec {
    let spec = CacheSpec::builder().layers(layers).kv_heads(heads).head_dim(head_dim);
    let spec = spec.format(format).paged(block_size, 64).build().unwrap();
    ChunkSpec::new(&spec, GroupId(0)).unwrap()
}

#[test]
fn chunks_of_known_models_have_the_documented_sizes() {
    let kib = 1 << 10;
    // Layers, heads, head_dim, format, block size; blocks, KiB of the payload.
    let cases = [
        // 8B: a block is 2 MiB in bf16 and 528 KiB in l4.
        ((32, 8, 128, KvFormat::Bf16, 16), (1, 2048)),
        ((32, 8, 128, L4, 16), (2, 1056)),
        // SmolLM2-135M: 360 KiB, and 95.6 KiB.
        ((30, 3, 64, KvFormat::Bf16, 16), (4, 1440)),
        ((30, 3, 64, L4, 16), (16, 1532)),
        // Exactly 1 MiB.
        ((32, 4, 128, KvFormat::Bf16, 16), (1, 1024)),
        // At most 256 tokens, in a power of two of blocks, and at least one block.
        ((1, 1, 8, KvFormat::Bf16, 16), (16, 8)),
        ((1, 1, 8, KvFormat::Bf16, 48), (4, 8)),
        ((1, 1, 8, KvFormat::Bf16, 256), (1, 8)),
        ((1, 1, 8, KvFormat::Bf16, 512), (1, 16)),
        // A piece of 18 bytes takes 32, and the payload ends on 4,096 bytes.
        ((1, 1, 32, L4, 1), (256, 16)),
    ];
    for ((layers, heads, dim, format, block_size), (blocks, payload)) in cases {
        let spec = chunks(layers, heads, dim, format, block_size);
        let got = (spec.blocks(), spec.payload_bytes(), spec.header_bytes());
        let header = if block_size == 512 { 8 } else { 4 };
        assert_eq!(got, (blocks, payload * kib, header * kib), "{layers} {heads} {dim} {format}");
    }
}

#[test]
fn pieces_follow_each_other_on_multiples_of_16() {
    for spec in [tiny(KvFormat::Bf16), tiny(L4), chunks(3, 2, 40, L4, 5)] {
        let mut end = spec.header_bytes();
        for piece in pieces(&spec) {
            assert!(piece.start >= end && piece.start < end + 16, "{piece:?} after {end}");
            assert_eq!(piece.start % 16, 0);
            end = piece.end;
        }
        assert!(end <= spec.chunk_bytes() && end + 4096 > spec.chunk_bytes());
        assert_eq!((spec.chunk_bytes() % 4096, spec.header_bytes() % 4096), (0, 0));
    }
    let spec = chunks(3, 2, 40, L4, 5);
    // 40 values are 20 bytes of codes and a scale: 22 bytes, 220 for 2 heads and 5 tokens.
    assert_eq!(spec.piece(0, 0, Plane::Value), 4096 + 224..4096 + 224 + 220);
    assert_eq!(spec.piece(1, 2, Plane::Key).start, 4096 + (3 + 2) * 448);
}

#[test]
fn a_full_precision_prefix_shortens_the_first_chunk() {
    let spec = CacheSpec::builder().layers(32).kv_heads(8).head_dim(128).format(L4);
    let group = spec.full_precision_prefix(4).paged(16, 64).build().unwrap();
    let spec = ChunkSpec::new(&group, GroupId(0)).unwrap();
    // 4 tokens of 4 slots fill the first block.
    assert_eq!((spec.span(0), spec.span(1)), (0..20, 20..52));
    assert_eq!((spec.block_span(0, 0), spec.block_span(0, 1)), (0..4, 4..20));
    let fixture = Fixture::new(&spec, 0, 1);
    assert_eq!(fixture.tokens.len(), 20);
    verify(fixture.chunk(), &fixture.expectation()).unwrap();
}

#[test]
fn geometries_without_chunks_are_refused() {
    let spec = CacheSpec::builder().layers(1).kv_heads(1).head_dim(8);
    let spec = spec.block_order(BlockOrder::Nhd).paged(4, 8).build().unwrap();
    let group = GroupId(1);
    assert_eq!(ChunkSpec::new(&spec, group), Err(ChunkSpecError::UnknownGroup { group }));
    let chunks = ChunkSpec::new(&spec, GroupId(0)).unwrap();
    assert_eq!(chunks.with_blocks(0), Err(ChunkSpecError::NoBlocks));
    let too_large = |blocks| Err(ChunkSpecError::TooLarge { blocks, block_size: 4 });
    // More tokens than 65,535 pages hold, and than can be counted.
    assert_eq!(chunks.with_blocks(1 << 24), too_large(1 << 24));
    assert_eq!(chunks.with_blocks(1 << 30), too_large(1 << 30));
    assert_eq!(chunks.with_blocks(3).unwrap().blocks(), 3);
    let on_demand = CacheSpec::builder().layers_on_demand().kv_heads(1).head_dim(8);
    let on_demand = on_demand.paged(4, 8).build().unwrap();
    assert_eq!(ChunkSpec::new(&on_demand, GroupId(0)), Err(ChunkSpecError::LayersOnDemand));
}
