//! Slots that hold no token: zero in every chunk, whatever the memory held before.
use kv_core::BlockOrder;

use super::*;

/// Rows in int8 take a slot of 18 bytes: 16 codes and the scale. Rows in 16 bits take two.
fn spec(order: BlockOrder, prefix: u32, blocks: u32) -> ChunkSpec {
    let spec = CacheSpec::builder().layers(2).kv_heads(3).head_dim(16).block_order(order);
    let spec = spec.format(KvFormat::Int8(kv_core::Scaling::Row)).full_precision_prefix(prefix);
    // Odd, so that the last slot of a block of wide rows is unused.
    let spec = spec.paged(9, 64).build().unwrap();
    ChunkSpec::new(&spec, GroupId(0)).unwrap().with_blocks(blocks).unwrap()
}

/// Checks that the first slots of each block are unchanged and the others zero.
#[track_caller]
fn check(spec: &ChunkSpec, chunk: &[u8], used: impl Fn(u32) -> usize) {
    let layout = spec.layout().planes().first();
    let row = usize::try_from(layout.row_bytes()).unwrap();
    for block in 0..spec.blocks() {
        for (layer, plane) in
            [(0, Plane::Key), (0, Plane::Value), (1, Plane::Key), (1, Plane::Value)]
        {
            for (number, bytes) in chunk[spec.piece(block, layer, plane)].chunks(row).enumerate() {
                let slot = if spec.order() == BlockOrder::Hnd { number % 9 } else { number / 3 };
                let expected = if slot < used(block) { 0xaa } else { 0 };
                assert!(bytes.iter().all(|byte| *byte == expected), "block {block}, row {number}");
            }
        }
    }
}

const CASES: [(BlockOrder, u32); 4] =
    [(BlockOrder::Hnd, 0), (BlockOrder::Nhd, 0), (BlockOrder::Hnd, 2), (BlockOrder::Nhd, 2)];

#[test]
fn slots_after_the_last_token_are_zeroed_and_no_others() {
    for (order, prefix) in CASES {
        let spec = spec(order, prefix, 2);
        let used = if prefix == 0 { 5 } else { 2 * 2 + 3 };
        let mut chunk = vec![0xaa; spec.chunk_bytes()];
        zero_unused(&spec, &mut chunk, 0, 5);
        check(&spec, &chunk, |block| if block == 0 { used } else { 9 });
        assert!(chunk[..spec.header_bytes()].iter().all(|byte| *byte == 0xaa));
    }
}

/// Blocks whose tokens are wide rows end with slots that are too few for one more.
#[test]
fn no_bytes_of_an_earlier_holder_are_in_a_chunk() {
    for (order, prefix) in CASES {
        // 6 wide rows: 4 in the first block, whose last slot stays unused, 2 in the second.
        let spec = spec(order, prefix * 3, 3);
        let fixture = Fixture::new(&spec, 0, 1);
        let mut chunk = vec![0xaa; spec.chunk_bytes()];
        encode_header(&mut chunk, &fixture.expectation(), 0).unwrap();
        check(&spec, &chunk, |block| if prefix > 0 && block == 0 { 8 } else { 9 });
    }
}
