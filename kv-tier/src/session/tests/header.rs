//! Headers of session files.
use std::ops::Range;

use proptest::prelude::*;

use crate::chunk::crc;
use crate::identity::ModelDigest;
use crate::name::ChunkName;
use crate::session::*;

fn header() -> SessionHeader {
    let group = |root, chunk_bytes, blocks| {
        let root = ChunkName::new([root; 32]);
        SessionGroup { root, chunk_bytes, is_of_states: false, blocks }
    };
    SessionHeader {
        model: ModelDigest::of_bytes(b"weights"),
        adapter: Some(ModelDigest::of_bytes(b"adapter")),
        encoding_key: 0x0123_4567_89ab_cdef,
        salt: [7; 32],
        written_at: 1_700_000_000,
        groups: vec![
            group(1, 8192, vec![Range { start: 0, end: 3 }]),
            group(2, 4096, vec![0..1, 2..3]),
        ],
        tokens: (0..1000).collect(),
        contents: vec![ContentSpan { begin: 3, len: 5, id: 1 << 100 }],
        note: b"temperature 0.7".to_vec(),
    }
}

#[test]
fn a_header_is_read_back() {
    let (header, bytes) = (header(), header().to_bytes().unwrap());
    assert_eq!(bytes.len(), 8192);
    assert_eq!(SessionHeader::from_bytes(&bytes).unwrap(), header);
    let prefix = Prefix::read(&bytes[..PREFIX_BYTES]).unwrap();
    assert_eq!((prefix.header_bytes, prefix.file_bytes), (8192, 8192 + 3 * 8192 + 2 * 4096));
    let [first, second] = &header.groups[..] else { panic!("two groups") };
    assert_eq!([0, 2, 3].map(|block| first.place(block)), [Some(0), Some(2), None]);
    assert_eq!([0, 1, 2, 3].map(|block| second.place(block)), [Some(0), None, Some(1), None]);
    let plain = SessionHeader { adapter: None, note: Vec::new(), groups: Vec::new(), ..header };
    assert_eq!(SessionHeader::from_bytes(&plain.to_bytes().unwrap()).unwrap(), plain);
}

/// Adds a group of states, whose only one is behind 17 tokens.
fn with_states(mut header: SessionHeader) -> SessionHeader {
    let root = ChunkName::new([3; 32]);
    let blocks = vec![Range { start: 17, end: 18 }];
    header.groups.push(SessionGroup { root, chunk_bytes: 4096, is_of_states: true, blocks });
    header
}

#[test]
fn states_need_version_2_and_rows_keep_version_1() {
    let (rows, states) = (header(), with_states(header()));
    for (header, version) in [(&rows, 1), (&states, 2)] {
        let bytes = header.to_bytes().unwrap();
        assert_eq!(bytes[8..10], [version, 0]);
        assert_eq!(SessionHeader::from_bytes(&bytes).unwrap(), *header);
        // A header has one form: the other version is refused.
        let mut other = bytes.clone();
        other[8] = 3 - version;
        let end = other.len() - 8;
        let sum = crc(&other[..end]);
        other[end..].copy_from_slice(&sum.to_le_bytes());
        assert!(SessionHeader::from_bytes(&other).is_err());
    }
    let bytes = states.to_bytes().unwrap();
    let next = {
        let mut next = bytes;
        next[8] = 3;
        next
    };
    let refused = SessionHeader::from_bytes(&next).unwrap_err();
    assert!(matches!(refused, SessionError::Version { newest: 2, got: 3 }), "{refused}");
}

#[test]
fn a_header_with_any_byte_changed_or_cut_is_refused() {
    let bytes = header().to_bytes().unwrap();
    for at in 0..bytes.len() {
        let mut changed = bytes.clone();
        changed[at] ^= 1 << (at % 8);
        let refused = SessionHeader::from_bytes(&changed).unwrap_err();
        match at {
            0..8 => assert!(matches!(refused, SessionError::NotASession { .. }), "{at}: {refused}"),
            8..10 => assert!(matches!(refused, SessionError::Version { .. }), "{at}: {refused}"),
            32.. => assert!(matches!(refused, SessionError::HeaderCrc { .. }), "{at}: {refused}"),
            _ => {}
        }
        assert!(SessionHeader::from_bytes(&bytes[..at]).is_err(), "{at} bytes");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]
    /// Changes with a right checksum: refused, or the one form of what they say.
    #[test]
    fn hostile_headers_are_refused_or_read_as_they_are(
        changes in prop::collection::vec((8..400_usize, any::<u8>()), 1..6),
        has_states in any::<bool>(),
    ) {
        let header = if has_states { with_states(header()) } else { header() };
        let mut bytes = header.to_bytes().unwrap();
        for (at, byte) in changes {
            bytes[at] = byte;
        }
        let end = bytes.len() - 8;
        let sum = crc(&bytes[..end]);
        bytes[end..].copy_from_slice(&sum.to_le_bytes());
        if let Ok(read) = SessionHeader::from_bytes(&bytes) {
            prop_assert_eq!(read.to_bytes().unwrap(), bytes);
        }
    }

    #[test]
    fn other_bytes_are_refused(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        prop_assert!(SessionHeader::from_bytes(&bytes).is_err());
    }
}
