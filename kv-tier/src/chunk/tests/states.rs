//! Chunks of recurrent states: version 2, with a table of planes.
use std::fs;
use std::path::Path;

use kv_core::DType;
use kv_core::backend::PlaneRole;
use kv_core::spec::{CacheSpecBuilder, StateFormat, StatesBuilder};

use super::header::{FIELDS_END, PAGE};
use super::*;

fn hybrid(states: impl FnOnce(StatesBuilder) -> StatesBuilder) -> ChunkSpec {
    let spec = CacheSpec::builder().layers(3).kv_heads(1).head_dim(8).paged(4, 16);
    let spec = spec.states([1, 2], |of| states(of.slots(4))).build().unwrap();
    let group = spec.snapshot_groups().next().unwrap();
    assert_eq!(group, GroupId(2));
    ChunkSpec::new(&spec, group).unwrap()
}

/// Adds parts to states.
type Parts = fn(StatesBuilder) -> StatesBuilder;

/// A window of a convolution in bf16, and a matrix that is kept in f16.
fn small() -> ChunkSpec {
    hybrid(|of| {
        let of = of.part([6, 3], DType::Bf16).part([2, 4, 5], DType::F32);
        of.snapshots(8, StateFormat::F16)
    })
}

fn fixture() -> Fixture {
    Fixture::new(&small(), 3, 9)
}

#[test]
fn a_state_is_one_chunk_named_by_the_tokens_of_a_block() {
    let spec = small();
    assert!(spec.is_of_states());
    assert_eq!((spec.blocks(), spec.num_layers(), spec.span(3)), (1, 2, 12..16));
    // 18 values, kept as 32, then 40 as 48, of 2 bytes.
    let [window, matrix] = [0, 1].map(|part| spec.piece(0, 1, PlaneRole::State(part)).len());
    assert_eq!((window, matrix, spec.payload_bytes()), (64, 96, 4096));
    let refused = spec.with_blocks(2).unwrap_err();
    assert_eq!(refused.to_string(), "a chunk of recurrent states has one snapshot, not 2");
    let (fixture, tokens) = (fixture(), [1, 2, 3, 4]);
    let name = fixture.root.link(&fixture.parent, &tokens, [].into_iter());
    assert_eq!(fixture.root.chunk_name(3, &fixture.parent, &tokens, &[]), name);
}

#[test]
fn a_state_is_read_as_it_was_written() {
    let fixture = fixture();
    let chunk = fixture.chunk();
    verify(&chunk, &fixture.expectation()).unwrap();
    let header = read_header(&chunk).unwrap();
    header.check_payload(&chunk).unwrap();
    assert_eq!((header.version(), header.num_layers(), header.block_size()), (2, 2, 4));
    assert!(header.tokens().eq(fixture.tokens.iter().copied()));
    let planes: Vec<_> =
        header.planes().map(|of| (of.role, of.extents, of.format, of.block_bytes)).collect();
    let expected =
        [(PlaneRole::State(0), [6, 3, 0], "bf16", 64), (PlaneRole::State(1), [2, 4, 5], "f16", 96)];
    assert_eq!(planes, expected);
}

#[test]
fn a_quantised_state_is_read_as_it_was_written() {
    let spec = hybrid(|of| {
        let of = of.part([6, 3], DType::Bf16).part([2, 4, 5], DType::F32);
        let of = of.part([3, 128, 5], DType::F32).part([5, 300], DType::F32);
        of.snapshots(8, StateFormat::Int8)
    });
    let fixture = Fixture::new(&spec, 3, 9);
    let chunk = fixture.chunk();
    verify(&chunk, &fixture.expectation()).unwrap();
    let header = read_header(&chunk).unwrap();
    header.check_payload(&chunk).unwrap();
    let planes: Vec<_> =
        header.planes().map(|of| (of.role, of.extents, of.format, of.block_bytes)).collect();
    // 1,920 and 1,500 values, kept as 2,048 and 1,536, in blocks of 34 bytes for 32.
    let expected = [
        (PlaneRole::State(0), [6, 3, 0], "bf16", 64),
        (PlaneRole::State(1), [2, 4, 5], "f16", 96),
        (PlaneRole::State(2), [3, 128, 5], "q8_0", 2176),
        (PlaneRole::State(3), [5, 300, 0], "q8_0", 1632),
    ];
    assert_eq!(planes, expected);
}

#[test]
fn golden_states_are_written_and_read() {
    let (fixture, path) = (fixture(), "testdata/v2-state.kvchunk");
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(path);
    if !path.exists() {
        fs::write(&path, fixture.chunk()).unwrap();
        panic!("{} was written: check it in", path.display());
    }
    let file = fs::read(&path).unwrap();
    assert!(file == fixture.chunk(), "a change of the format needs a new version");
    verify(&file, &fixture.expectation()).unwrap();
}

#[test]
fn states_of_other_parts_are_refused_with_their_numbers() {
    let fixture = fixture();
    let chunk = fixture.chunk();
    let others: [(Parts, &str); 5] = [
        (
            |of| of.part([3, 6], DType::Bf16).part([2, 4, 5], DType::F32),
            "part of a state: part 0 of [6, 3] in \"bf16\", role 2, expected part 0 of [3, 6] in \
             \"bf16\", role 2",
        ),
        (
            |of| of.part([6, 3], DType::Bf16).part([40], DType::F32),
            "part of a state: part 1 of [2, 4, 5] in \"f16\", role 2, expected part 1 of [40] in \
             \"f16\", role 2",
        ),
        (|of| of.part([6, 3], DType::Bf16), "parts of a state: 2, expected 1"),
        (
            |of| of.part([6, 3], DType::Bf16).part([2, 4, 5], DType::F32).part([1], DType::F32),
            "parts of a state: 2, expected 3",
        ),
        (
            |of| of.part([60, 30], DType::Bf16).part([2, 4, 5], DType::F32),
            "8192 bytes, expected 12288",
        ),
    ];
    for (parts, words) in others {
        let spec = hybrid(|of| parts(of).snapshots(8, StateFormat::F16));
        let other = Fixture::new(&spec, 3, 9);
        assert_eq!(other.root.name(), fixture.root.name(), "shapes are not in the name");
        let refused = verify(&chunk, &other.expectation()).unwrap_err();
        assert_eq!(refused.to_string(), words);
    }
    for format in [StateFormat::Same, StateFormat::Int8] {
        let of = hybrid(|of| {
            let of = of.part([6, 3], DType::Bf16).part([2, 4, 5], DType::F32);
            of.snapshots(8, format)
        });
        let refused = verify(&chunk, &Fixture::new(&of, 3, 9).expectation()).unwrap_err();
        let words = "part of a state: part 1 of [2, 4, 5] in \"f16\", role 2, expected part 1 of ";
        assert!(refused.to_string().starts_with(words), "{refused}");
    }
    // Rows under the name of states, and the other way round.
    let rows = super::fixture();
    let expected = Expectation { root: &fixture.root, ..rows.expectation() };
    assert!(verify(&rows.chunk(), &expected).is_err());
}

#[test]
fn a_state_with_any_bit_of_its_fields_changed_is_refused() {
    let fixture = fixture();
    let right = fixture.chunk();
    // From the version to the end of the table, with right checksums; not the time.
    let fields = (8..320).chain(328..FIELDS_END + 8 + 2 * 64);
    for at in fields.filter(|at| !(312..320).contains(at)) {
        for bit in 0..8 {
            let mut chunk = right.clone();
            chunk[at] ^= 1 << bit;
            fix(&mut chunk, PAGE);
            let refused = verify(&chunk, &fixture.expectation());
            assert!(refused.is_err(), "bit {bit} of byte {at}");
            if let Ok(header) = read_header(&chunk) {
                assert!(header.planes().count() <= 6 && header.tokens().len() <= chunk.len());
            }
        }
    }
}

#[test]
fn caches_without_snapshots_have_no_chunks_of_states() {
    let none = |set: fn(CacheSpecBuilder) -> CacheSpecBuilder| {
        let spec = CacheSpec::builder().layers(2).kv_heads(1).head_dim(8).paged(4, 16);
        set(spec).build().unwrap()
    };
    let without = none(|spec| spec.states([1], |of| of.part([4], DType::F32).slots(2)));
    for group in [1, 2] {
        let refused = ChunkSpec::new(&without, GroupId(group)).unwrap_err();
        assert_eq!(refused, ChunkSpecError::UnknownGroup { group: GroupId(group) });
    }
}
