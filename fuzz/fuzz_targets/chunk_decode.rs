//! Chunks from hostile bytes: nothing panics, and only the expected chunk is verified.
//!
//! The first byte chooses what the fuzzer need not find: right checksums, so that the checks after
//! them are reached.
#![no_main]

use std::sync::OnceLock;

use crc_fast::{CrcAlgorithm, checksum};
use kv_core::reuse::BlockKey;
use kv_core::{CacheSpec, GroupId};
use kv_tier::chunk::{encode_header, read_header, verify};
use kv_tier::{ChunkRoot, ChunkSpec, Expectation, Identity, ModelDigest};
use libfuzzer_sys::fuzz_target;

static ROOT: OnceLock<ChunkRoot> = OnceLock::new();
const TOKENS: [u32; 8] = [1, 2, 3, 4, 5, 6, 7, 8];
const PAGE: usize = 4096;

fn root() -> ChunkRoot {
    let spec = CacheSpec::builder().layers(1).kv_heads(1).head_dim(2).paged(4, 8).build();
    let chunks = ChunkSpec::new(&spec.expect("a geometry"), GroupId(0)).expect("a paged group");
    let chunks = chunks.with_blocks(2).expect("two blocks");
    let identity = Identity::new(ModelDigest::of_bytes(b"weights"));
    identity.root(&chunks, 1, b"", None).expect("no adapter")
}

fuzz_target!(|bytes: &[u8]| {
    let root = ROOT.get_or_init(root);
    let parent = root.name();
    let expected = Expectation {
        root,
        index: 0,
        parent,
        name: root.chunk_name(0, &parent, &TOKENS, &[]),
        last_key: BlockKey(3),
        tokens: &TOKENS,
        contents: &[],
    };
    let Some((mode, bytes)) = bytes.split_first() else { return };
    let mut chunk = bytes.to_vec();
    if mode & 1 != 0 {
        // Changes of a right chunk: pairs of a place and a byte.
        chunk = vec![0; root.spec().chunk_bytes()];
        encode_header(&mut chunk, &expected, 0).expect("a chunk of the right size");
        for change in bytes.chunks_exact(3) {
            let at = usize::from(u16::from_le_bytes([change[0], change[1]])) % chunk.len();
            chunk[at] ^= change[2];
        }
    }
    if mode & 2 != 0 && chunk.len() >= PAGE {
        let header = checksum(CrcAlgorithm::Crc64Nvme, &chunk[..PAGE - 8]);
        chunk[PAGE - 8..PAGE].copy_from_slice(&header.to_le_bytes());
    }
    if let Ok(header) = read_header(&chunk) {
        assert!(header.tokens().len() * 4 < chunk.len());
        assert!(header.formats().iter().all(|name| !name.is_empty()));
        if header.check_payload(&chunk).is_ok() {
            assert_eq!(header.chunk_bytes(), chunk.len() as u64);
        }
    }
    if verify(&chunk, &expected).is_ok() {
        let header = read_header(&chunk).expect("a verified chunk has a header");
        assert!(header.tokens().eq(TOKENS) && header.name() == expected.name);
        header.check_payload(&chunk).expect("a verified chunk is whole");
    }
});
