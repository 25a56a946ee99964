//! Bytes that no writer of this crate made: decayed, cut, random, and wrong with right checksums.
use proptest::prelude::*;

use super::header::{NUM_CONTENTS, NUM_TOKENS, PAGE, PAGES, PAYLOAD_BYTES};
use super::*;

/// Reads all that a header says; whatever it is, nothing may panic.
fn read_all(bytes: &[u8]) {
    if let Ok(header) = read_header(bytes) {
        assert!(header.tokens().len() <= bytes.len());
        let is_name = |name: &str| name.bytes().all(|b| b.is_ascii_graphic());
        assert!(header.planes().all(|plane| is_name(plane.format)));
        assert!(!format!("{:?}", (header.planes().count(), header.group())).is_empty());
        if header.check_payload(bytes).is_ok() {
            assert_eq!(header.chunk_bytes(), u64::try_from(bytes.len()).unwrap());
        }
    }
}

#[test]
fn a_chunk_cut_anywhere_is_refused() {
    let fixture = fixture();
    let chunk = fixture.chunk();
    let cuts = (0..PAGE).chain((PAGE..chunk.len()).step_by(64)).chain([chunk.len() - 1]);
    for len in cuts {
        let error = verify(&chunk[..len], &fixture.expectation()).unwrap_err();
        let got = u64::try_from(len).unwrap();
        assert_eq!(error, ChunkError::Length { expected: 12288, got });
        match read_header(&chunk[..len]) {
            Err(error) => assert_eq!((error.kind(), len < PAGE), (ChunkErrorKind::Length, true)),
            Ok(header) => {
                let error = header.check_payload(&chunk[..len]).unwrap_err();
                assert_eq!(error, ChunkError::Length { expected: 12288, got });
            }
        }
    }
}

#[test]
fn a_flipped_bit_anywhere_is_refused() {
    let fixture = fixture();
    let mut chunk = fixture.chunk();
    let mut numbers = Numbers(3);
    let header = (0..PAGE).flat_map(|at| (0..8).map(move |bit| (at, bit)));
    let payload: Vec<_> =
        (0..1000).map(|_| (PAGE + numbers.below(8192), numbers.below(8))).collect();
    for (at, bit) in header.chain(payload) {
        chunk[at] ^= 1 << bit;
        let error = verify(&chunk, &fixture.expectation()).unwrap_err();
        let expected = match at {
            0..8 => ChunkErrorKind::Magic,
            8..10 => ChunkErrorKind::Version,
            10..PAGE => ChunkErrorKind::HeaderCrc,
            _ => ChunkErrorKind::PayloadCrc,
        };
        assert_eq!(error.kind(), expected, "bit {bit} of byte {at}");
        let described = read_header(&chunk).and_then(|header| header.check_payload(&chunk));
        assert!(described.is_err(), "bit {bit} of byte {at}");
        chunk[at] ^= 1 << bit;
    }
    verify(&chunk, &fixture.expectation()).unwrap();
}

#[test]
fn numbers_of_the_file_are_checked_before_they_are_used() {
    let right = fixture().chunk();
    let refused = |at: usize, bytes: &[u8]| {
        let mut chunk = right.clone();
        chunk[at..at + bytes.len()].copy_from_slice(bytes);
        fix(&mut chunk, PAGE);
        let header = read_header(&chunk);
        header.and_then(|header| header.check_payload(&chunk)).unwrap_err()
    };
    for count in [NUM_TOKENS, NUM_CONTENTS] {
        for bytes in [u32::MAX, 1 << 30, 1 << 12] {
            let error = refused(count, &bytes.to_le_bytes());
            assert_eq!(error.kind(), ChunkErrorKind::Geometry, "{error}");
        }
    }
    assert_eq!(refused(PAGES, &[0, 0]).kind(), ChunkErrorKind::Geometry);
    // Longer than the file, and with a checksum elsewhere.
    assert_eq!(refused(PAGES, &[255, 255]).kind(), ChunkErrorKind::Length);
    assert_eq!(refused(PAGES, &[2, 0]).kind(), ChunkErrorKind::HeaderCrc);
    let error = refused(PAYLOAD_BYTES, &u64::MAX.to_le_bytes());
    assert_eq!(error, ChunkError::Length { expected: u64::MAX, got: 12288 });
}

/// A terminal shows what `kv tier ls` prints.
#[test]
fn a_format_that_is_no_name_is_not_listed() {
    for name in [&b""[..], b"\x1b[2J", b"bf 16", b"bf16\0x", b"\xff"] {
        let mut chunk = fixture().chunk();
        let field = &mut chunk[header::FORMAT_V..][..32];
        field.fill(0);
        field[..name.len()].copy_from_slice(name);
        fix(&mut chunk, PAGE);
        let error = read_header(&chunk).unwrap_err();
        assert_eq!(error.kind(), ChunkErrorKind::Geometry);
        assert!(error.to_string().bytes().all(|byte| (0x20..0x7f).contains(&byte)), "{error}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn random_bytes_are_refused(bytes in prop::collection::vec(any::<u8>(), 0..3 * PAGE)) {
        let fixture = fixture();
        prop_assert!(verify(&bytes, &fixture.expectation()).is_err());
        read_all(&bytes);
        let mut whole = fixture.chunk();
        let len = bytes.len().min(whole.len());
        whole[16..len.max(16)].copy_from_slice(&bytes[16.min(len)..len]);
        fix(&mut whole, PAGE);
        read_all(&whole);
        prop_assert!(verify(&whole, &fixture.expectation()).is_err() || len < 48, "a name is hit");
    }

    #[test]
    fn other_headers_with_right_checksums_are_refused(
        at in 16..PAGE - 8,
        bytes in prop::collection::vec(any::<u8>(), 1..16),
    ) {
        let fixture = fixture();
        let right = fixture.chunk();
        let mut chunk = right.clone();
        let end = (at + bytes.len()).min(PAGE - 8);
        chunk[at..end].copy_from_slice(&bytes[..end - at]);
        fix(&mut chunk, PAGE);
        read_all(&chunk);
        let is_same = |chunk: &[u8]| {
            let fields = [&chunk[..320], &chunk[328..1424]].concat();
            fields == [&right[..320], &right[328..1424]].concat()
        };
        // The time of writing and what follows the lists say nothing about the blocks.
        prop_assert_eq!(verify(&chunk, &fixture.expectation()).is_ok(), is_same(&chunk));
    }
}
