//! Keys of block contents.
use std::fmt;

use xxhash_rust::xxh3::{Xxh3Default, xxh3_128, xxh3_128_with_seed};

use crate::invariant::Invariant;
use crate::num::to_u64;

/// Changes whenever the same tokens get other keys than before.
const KEY_VERSION: u64 = 1;

/// Tokens that one hash takes together with the previous key: 240 bytes, up to which XXH3 is
/// fastest.
const CHUNK: usize = 56;

/// Separates the hash of contents from that of tokens.
const CONTENTS_SEED: u64 = 1;

/// The key of one block's content: a hash of everything that its K and V depend on.
///
/// `key(i) = XXH3-128(key(i-1), tokens of block i)`, repeated for every 56 tokens of a longer
/// block, and once more with the block's [contents](ContentSpan) if it has any. The root, which
/// precedes the first block, hashes the version of this scheme, the cache's [encoding
/// key](crate::scheduling::CacheState::encoding_key), the salt and the adapter. All numbers are
/// little endian and no seed is random, so every machine and every release computes the same keys.
///
/// XXH3 does not withstand attackers, so a key alone never decides: a hit is confirmed with the
/// block's own tokens, contents and parent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
#[repr(transparent)]
pub struct BlockKey(pub u128);

impl fmt::Display for BlockKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// Content of a prompt that its token ids do not identify: an image at placeholder tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[expect(clippy::exhaustive_structs, reason = "a literal names each field")]
pub struct ContentSpan {
    /// First position.
    pub begin: u32,
    /// Number of tokens.
    pub len: u32,
    /// Identifies the content: a hash of its bytes, of 128 bits or truncated to them.
    pub id: u128,
}

/// The part of a [`ContentSpan`] that lies in one block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BlockContent {
    id: u128,
    /// First token in the block, and in the content; number of tokens.
    inside: u32,
    offset: u32,
    len: u32,
}

impl BlockContent {
    /// Bytes of [`Self::to_bytes`].
    pub const BYTES: usize = 28;

    /// Adds the parts of a block whose first token is at position `begin` to the spans of the
    /// blocks before, of which [`Self::cut`] makes the same parts.
    pub(crate) fn join(parts: &[Self], begin: u32, spans: &mut Vec<ContentSpan>) {
        for part in parts {
            let first = (begin + part.inside).checked_sub(part.offset);
            let first = first.invariant("a part is not further into its content than its position");
            let same = |span: &&mut ContentSpan| {
                span.id == part.id && span.begin == first && span.len == part.offset
            };
            match spans.iter_mut().find(same) {
                Some(span) => span.len += part.len,
                None => spans.push(ContentSpan {
                    begin: first,
                    len: part.offset + part.len,
                    id: part.id,
                }),
            }
        }
    }

    /// Writes the parts of `spans` at positions `begin..end` to `out`, in order.
    pub fn cut(spans: &[ContentSpan], (begin, end): (u32, u32), out: &mut Vec<Self>) {
        out.clear();
        for span in spans {
            let first = span.begin.max(begin);
            // The span is the caller's: it may go on past every block.
            let last = span.begin.saturating_add(span.len).min(end);
            if let Some(len) = last.checked_sub(first).filter(|len| *len > 0) {
                let inside = first - begin;
                let offset = first - span.begin;
                out.push(Self { id: span.id, inside, offset, len });
            }
        }
    }

    /// Returns the fixed form that is hashed and stored: the content's ID (16 bytes), the first
    /// token in the block, the first token in the content, and the number of tokens (4 bytes each),
    /// all little endian.
    ///
    /// ```
    /// use kv::reuse::{BlockContent, ContentSpan};
    ///
    /// let mut parts = Vec::new();
    /// let span = ContentSpan { begin: 20, len: 40, id: 7 };
    /// BlockContent::cut(&[span], (16, 32), &mut parts);
    /// let bytes = parts[0].to_bytes();
    /// assert_eq!((bytes[0], bytes[16], bytes[20], bytes[24]), (7, 4, 0, 12));
    /// assert_eq!(BlockContent::from_bytes(&bytes), parts[0]);
    /// ```
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        let (id, rest) = bytes.split_at_mut(16);
        id.copy_from_slice(&self.id.to_le_bytes());
        let numbers = [self.inside, self.offset, self.len].map(u32::to_le_bytes);
        rest.copy_from_slice(numbers.as_flattened());
        bytes
    }

    /// Reads [`Self::to_bytes`]. Any bytes are a content: compare it with the content of the
    /// prompt.
    pub fn from_bytes(bytes: &[u8; Self::BYTES]) -> Self {
        let number = |at: usize| {
            let bytes = bytes.get(at..).and_then(|rest| rest.first_chunk());
            u32::from_le_bytes(*bytes.invariant("a content has three numbers after its ID"))
        };
        let id = bytes.first_chunk().invariant("a content begins with its ID");
        let (inside, offset, len) = (number(16), number(20), number(24));
        Self { id: u128::from_le_bytes(*id), inside, offset, len }
    }

    /// Returns the first token of a block at which the contents of two blocks differ; `u32::MAX` if
    /// none does. Lists that describe the same contents differently count as different.
    pub(crate) fn first_difference(a: &[Self], b: &[Self]) -> u32 {
        let same = a.iter().zip(b).take_while(|(a, b)| a == b).count();
        let [a, b] = [a, b].map(|all| &all[same..]);
        let begin = |rest: &[Self]| rest.iter().map(|part| part.inside).min().unwrap_or(u32::MAX);
        if let ([x, a @ ..], [y, b @ ..]) = (a, b)
            && (x.id, x.inside, x.offset) == (y.id, y.inside, y.offset)
        {
            // The same content, of different lengths.
            // Saturating, because stored bytes may be any.
            let end = x.inside.saturating_add(x.len.min(y.len));
            return end.min(begin(a)).min(begin(b));
        }
        begin(a).min(begin(b))
    }
}

impl BlockKey {
    /// Returns the key before the first block of a prompt.
    pub fn root(encoding: u128, salt: &[u8], adapter: Option<u64>) -> Self {
        let mut hash = Xxh3Default::new();
        hash.update(&KEY_VERSION.to_le_bytes());
        hash.update(&encoding.to_le_bytes());
        // Lengths separate neighbouring fields.
        hash.update(&to_u64(salt.len()).to_le_bytes());
        hash.update(salt);
        hash.update(&[u8::from(adapter.is_some())]);
        hash.update(&adapter.unwrap_or(0).to_le_bytes());
        Self(hash.digest128())
    }

    /// Returns the key of the block of `tokens` after the block of this key.
    #[must_use]
    pub fn child(self, tokens: &[u32], contents: &[BlockContent]) -> Self {
        let key = tokens.chunks(CHUNK).fold(self, Self::chunk);
        if contents.is_empty() { key } else { key.contents(contents) }
    }

    #[inline]
    fn chunk(self, tokens: &[u32]) -> Self {
        // Buffers of the usual block sizes need no clearing.
        match tokens.len() {
            16 => self.hashed::<20>(tokens),
            32 => self.hashed::<36>(tokens),
            _ => self.hashed::<{ CHUNK + 4 }>(tokens),
        }
    }

    /// Hashes at most `WORDS - 4` tokens.
    #[inline]
    fn hashed<const WORDS: usize>(self, tokens: &[u32]) -> Self {
        let mut bytes = [[0_u8; 4]; WORDS];
        let (head, rows) = bytes.split_at_mut(4);
        head.as_flattened_mut().copy_from_slice(&self.0.to_le_bytes());
        for (row, token) in rows.iter_mut().zip(tokens) {
            *row = token.to_le_bytes();
        }
        let len = tokens.len() + 4;
        Self(xxh3_128(bytes[..len].as_flattened()))
    }

    fn contents(self, contents: &[BlockContent]) -> Self {
        let mut bytes = self.0.to_le_bytes().to_vec();
        for content in contents {
            bytes.extend(content.to_bytes());
        }
        Self(xxh3_128_with_seed(&bytes, CONTENTS_SEED))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Keys may be stored and sent between machines: a change needs a new `KEY_VERSION`.
    #[test]
    fn keys_never_change() {
        let root = BlockKey::root(0, b"", None);
        let tokens: Vec<u32> = (0..100).collect();
        assert_eq!(root.to_string(), "3ec4796f2b69ff0f4d20ea442aa7c9d8");
        assert_eq!(root.child(&tokens[..16], &[]).to_string(), "36912c122595c479cfa146ae07ac9ef0");
        assert_eq!(root.child(&tokens, &[]).to_string(), "b458debe8103b3f00a12b6dd270d0320");
    }

    #[test]
    fn everything_that_matters_changes_the_key() {
        let span = |begin, id| ContentSpan { begin, len: 6, id };
        let mut parts = Vec::new();
        let mut keys = vec![
            BlockKey::root(0, b"", None),
            BlockKey::root(1, b"", None),
            BlockKey::root(0, b"a", None),
            BlockKey::root(0, b"", Some(0)),
            BlockKey::root(0, b"", Some(1)),
        ];
        let root = keys[0];
        keys.push(root.child(&[1, 2, 3, 4], &[]));
        keys.push(keys[1].child(&[1, 2, 3, 4], &[]));
        keys.push(root.child(&[1, 2, 3, 5], &[]));
        keys.push(root.child(&[1, 2, 3], &[]));
        for spans in [[span(0, 1)], [span(0, 2)], [span(2, 1)]] {
            BlockContent::cut(&spans, (4, 8), &mut parts);
            keys.push(root.child(&[1, 2, 3, 4], &parts));
        }
        keys.sort_unstable();
        assert!(keys.iter().zip(keys.iter().skip(1)).all(|(a, b)| a != b), "{keys:?}");
    }

    #[test]
    fn a_span_is_cut_to_the_block() {
        let spans = [ContentSpan { begin: 2, len: 7, id: 9 }];
        let mut parts = Vec::new();
        BlockContent::cut(&spans, (4, 8), &mut parts);
        assert_eq!(parts, [BlockContent { id: 9, inside: 0, offset: 2, len: 4 }]);
        BlockContent::cut(&spans, (8, 12), &mut parts);
        assert_eq!(parts, [BlockContent { id: 9, inside: 0, offset: 6, len: 1 }]);
        BlockContent::cut(&spans, (12, 16), &mut parts);
        assert_eq!(parts, []);
    }

    /// Chunks store these bytes: a change needs a new version of them, and a new `KEY_VERSION`.
    #[test]
    fn the_bytes_of_a_content_never_change() {
        let id = 0x1_0000_0000_0000_0002;
        let bytes = BlockContent { id, inside: 3, offset: 4, len: 0x0506 }.to_bytes();
        let mut expected = [0; 28];
        (expected[0], expected[8]) = (2, 1);
        (expected[16], expected[20], expected[24], expected[25]) = (3, 4, 6, 5);
        assert_eq!(bytes, expected);
    }
}
