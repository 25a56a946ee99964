//! Chunks of any geometry.
use kv_core::BlockOrder;
use kv_core::num::to_u32;
use proptest::prelude::*;

use super::*;

fn specs() -> impl Strategy<Value = ChunkSpec> {
    let formats: Vec<_> = KvFormat::all().collect();
    let formats = prop::sample::select(formats);
    let order = prop::sample::select(vec![BlockOrder::Nhd, BlockOrder::Hnd]);
    let shape = (1..4_u16, 1..4_u32, 1..80_u32, 1..80_u32, 1..20_u32, 1..6_u32);
    (shape, formats.clone(), formats, order).prop_map(|(shape, k, v, order)| {
        let (layers, heads, dim_k, dim_v, block_size, blocks) = shape;
        let spec = CacheSpec::builder().layers(layers).kv_heads(heads).head_dims(dim_k, dim_v);
        let spec = spec.formats(k, v).block_order(order).paged(block_size, 64);
        let chunks = ChunkSpec::new(&spec.build().unwrap(), GroupId(0)).unwrap();
        chunks.with_blocks(blocks).unwrap()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn what_is_written_is_read_back(spec in specs(), index in 0..9_u32, seed in any::<u64>()) {
        let fixture = Fixture::new(&spec, index, seed);
        let chunk = fixture.chunk();
        let verified = verify(&chunk, &fixture.expectation()).unwrap();
        let mut numbers = Numbers(seed ^ 0xff);
        let mut end = spec.header_bytes();
        for piece in pieces(&spec) {
            prop_assert!(chunk[end..piece.start].iter().all(|byte| *byte == 0), "a gap leaks");
            end = piece.end;
            let mut written = vec![0; piece.len()];
            numbers.fill(&mut written);
            prop_assert!(verified.bytes()[piece] == written, "the payload is as it was");
        }
        prop_assert!(chunk[end..].iter().all(|byte| *byte == 0), "the end leaks");

        let header = read_header(&chunk[..spec.header_bytes()]).unwrap();
        header.check_payload(&chunk).unwrap();
        prop_assert_eq!(header.name(), fixture.name);
        prop_assert_eq!(header.parent(), fixture.parent);
        prop_assert_eq!(header.root(), fixture.root.name());
        prop_assert_eq!(header.model(), fixture.root.model());
        prop_assert_eq!(header.encoding_key(), fixture.root.encoding_key());
        prop_assert_eq!(header.last_key(), fixture.last_key);
        prop_assert_eq!(header.group(), Some(GroupId(0)));
        prop_assert_eq!(header.num_layers(), spec.num_layers());
        prop_assert_eq!(header.blocks(), spec.blocks());
        prop_assert_eq!(header.first_block(), spec.blocks() * index);
        prop_assert_eq!(header.block_size() * spec.blocks(), to_u32(fixture.tokens.len()));
        prop_assert!(header.tokens().eq(fixture.tokens.iter().copied()));
        prop_assert_eq!(header.num_contents() as usize, fixture.contents.len());
        prop_assert_eq!(header.written_at(), 1_700_000_000);
        prop_assert_eq!(header.chunk_bytes(), chunk.len() as u64);
        prop_assert_eq!(header.version(), 1);
        let planes: Vec<_> = header.planes().collect();
        prop_assert_eq!(planes.len(), 2);
        for (plane, role) in planes.iter().zip([Plane::Key, Plane::Value]) {
            prop_assert_eq!(plane.role, role.into());
            prop_assert_eq!(plane.block_bytes, spec.piece(0, 0, role).len() as u64);
            let layout = spec.layout().planes().get(role.into()).unwrap();
            prop_assert_eq!(plane.extents, [layout.head_dim(), 0, 0]);
            prop_assert_eq!(plane.format, layout.format().to_string());
        }
    }

    #[test]
    fn a_chunk_of_another_geometry_is_refused(a in specs(), b in specs(), seed in any::<u64>()) {
        let (a, b) = (Fixture::new(&a, 0, seed), Fixture::new(&b, 0, seed));
        let chunk = a.chunk();
        // Even if every name were the same.
        let tokens = &a.tokens;
        let expected = Expectation { name: a.name, parent: a.parent, tokens, ..b.expectation() };
        let is_same = a.root.spec() == b.root.spec();
        prop_assert_eq!(verify(&chunk, &expected).is_ok(), is_same);
    }
}

#[test]
fn a_chunk_that_cannot_be_described_is_left_alone() {
    let fixture = fixture();
    let right = fixture.expectation();
    let mut chunk = vec![0xaa; 12288];
    let mut refused = |bytes: usize, says: &Expectation<'_>| {
        let error = encode_header(&mut chunk[..bytes], says, 0).unwrap_err();
        assert!(chunk.iter().all(|byte| *byte == 0xaa), "{error} left traces");
        error
    };
    let (expected, got) = (12288, 12287);
    assert_eq!(refused(12287, &right), EncodeError::Length { expected, got });
    let tokens = &fixture.tokens[1..];
    let says = Expectation { tokens, ..right };
    assert_eq!(refused(12288, &says), EncodeError::Tokens { expected: 256, got: 255 });
    let part = fixture.contents[0];
    let contents = |blocks: &[u32]| -> Vec<_> {
        blocks.iter().map(|block| ChunkContent { block: *block, ..part }).collect()
    };
    // 4,096 bytes less 336, 1,024 of tokens and 8 of a checksum.
    let says = Expectation { contents: &contents(&[0; 86]), ..right };
    assert_eq!(refused(12288, &says), EncodeError::Contents { max: 85, got: 86 });
    for blocks in [&[1, 0][..], &[64], &[0, u32::MAX]] {
        let says = Expectation { contents: &contents(blocks), ..right };
        assert_eq!(refused(12288, &says), EncodeError::ContentOrder { blocks: 64 });
    }
    let says = Expectation { contents: &contents(&[63; 85]), ..right };
    encode_header(&mut chunk, &says, 0).unwrap();
    verify(&chunk, &says).unwrap();
}

#[test]
fn a_verified_chunk_keeps_what_holds_it() {
    let fixture = fixture();
    let chunk = std::sync::Arc::new(fixture.chunk());
    let verified = verify(std::sync::Arc::clone(&chunk), &fixture.expectation());
    let verified = verified.unwrap();
    assert!(std::sync::Arc::ptr_eq(verified.get_ref(), &chunk));
    assert_eq!(verified.bytes(), &chunk[..]);
    assert_eq!(std::sync::Arc::strong_count(&verified.into_inner()), 2);
}
