//! Chunks of small geometries: what is written is read back, and anything else is refused.
#![expect(clippy::as_conversions, reason = "tests may overflow, and fail then")]
mod golden;
mod hostile;
mod mutation;
mod round_trip;
mod spec;
mod states;
mod unused;

use kv_core::backend::Plane;
use kv_core::num::to_usize;
use kv_core::{CacheSpec, GroupId, KvFormat, ScaleGroup};

use super::field::crc_at;
use super::*;
use crate::identity::{Identity, ModelDigest};

/// A chunk of a prompt, and everything that is expected of it.
#[derive(Debug)]
struct Fixture {
    root: ChunkRoot,
    index: u32,
    parent: ChunkName,
    name: ChunkName,
    last_key: BlockKey,
    tokens: Vec<u32>,
    contents: Vec<ChunkContent>,
    seed: u64,
}

impl Fixture {
    fn new(spec: &ChunkSpec, index: u32, seed: u64) -> Self {
        let identity = Identity::new(ModelDigest::of_bytes(b"weights"));
        let root = identity.root(spec, 0x0123_4567_89ab_cdef, b"tenant", None).unwrap();
        let mut numbers = Numbers(seed);
        let span = spec.span(index);
        let tokens: Vec<_> = span.clone().map(|_| u32::from_le_bytes(numbers.take())).collect();
        let len = (span.end - span.start).min(6);
        let (begin, id) = (span.start.saturating_sub(2), u128::from_le_bytes(numbers.take()));
        let spans =
            [ContentSpan { begin, len, id }, ContentSpan { begin: begin + 7, len: 1, id: id ^ 1 }];
        let mut contents = Vec::new();
        ChunkContent::cut(spec, &spans, index, &mut contents);
        let parent = if index == 0 { root.name() } else { ChunkName::new(numbers.take()) };
        let name = root.chunk_name(index, &parent, &tokens, &contents);
        let last_key = BlockKey(u128::from_le_bytes(numbers.take()));
        Self { root, index, parent, name, last_key, tokens, contents, seed }
    }

    fn expectation(&self) -> Expectation<'_> {
        Expectation {
            root: &self.root,
            index: self.index,
            parent: self.parent,
            name: self.name,
            last_key: self.last_key,
            tokens: &self.tokens,
            contents: &self.contents,
        }
    }

    /// The chunk, its pieces filled with numbers that depend on the seed.
    fn chunk(&self) -> Vec<u8> {
        let mut numbers = Numbers(self.seed ^ 0xff);
        let spec = self.root.spec();
        // What earlier use of the memory left.
        let mut chunk = vec![0xaa; spec.chunk_bytes()];
        for piece in pieces(spec) {
            numbers.fill(&mut chunk[piece]);
        }
        encode_header(&mut chunk, &self.expectation(), 1_700_000_000).unwrap();
        chunk
    }
}

/// `SplitMix64`.
struct Numbers(u64);

impl Numbers {
    fn fill(&mut self, bytes: &mut [u8]) {
        for part in bytes.chunks_mut(8) {
            self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut n = self.0;
            n = (n ^ (n >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            n = (n ^ (n >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            let n = (n ^ (n >> 31)).to_le_bytes();
            part.copy_from_slice(&n[..part.len()]);
        }
    }
    fn take<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        self.fill(&mut bytes);
        bytes
    }
    fn below(&mut self, n: usize) -> usize {
        to_usize(u32::from_le_bytes(self.take())) % n
    }
}

/// 256 tokens in 64 blocks: 12 KiB in bf16, 16 KiB in `l4`, whose pieces have gaps.
fn tiny(format: KvFormat) -> ChunkSpec {
    let head_dim = if format.is_quantised() { 32 } else { 8 };
    let spec = CacheSpec::builder().layers(1).kv_heads(1).head_dim(head_dim).format(format);
    ChunkSpec::new(&spec.paged(4, 128).build().unwrap(), GroupId(0)).unwrap()
}

fn fixture() -> Fixture {
    Fixture::new(&tiny(KvFormat::Bf16), 1, 7)
}

const L4: KvFormat = KvFormat::L4(ScaleGroup::Row);

fn pieces(spec: &ChunkSpec) -> impl Iterator<Item = std::ops::Range<usize>> {
    let blocks = 0..spec.blocks();
    blocks.flat_map(move |block| {
        (0..spec.num_layers()).flat_map(move |layer| {
            let planes = spec.layout().planes().as_slice().to_vec();
            planes.into_iter().map(move |(role, _)| spec.piece(block, layer, role))
        })
    })
}

/// Recomputes both checksums of a chunk with a header of `header_bytes`.
fn fix(chunk: &mut [u8], header_bytes: usize) {
    let payload = crc(&chunk[header_bytes..]).to_le_bytes();
    chunk[header::PAYLOAD_CRC..][..8].copy_from_slice(&payload);
    let at = crc_at(header_bytes);
    let header = crc(&chunk[..at]).to_le_bytes();
    chunk[at..header_bytes].copy_from_slice(&header);
}

#[test]
fn the_checksum_is_crc_64_nvme() {
    assert_eq!(crc(b"123456789"), 0xae8b_1486_0a79_9888);
}
