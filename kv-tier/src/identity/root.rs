//! Roots of names, and the chain of names that begins at one.
use std::fmt;

use blake3::Hasher;
use kv_core::invariant::Invariant;
use kv_core::num::{to_u64, to_usize};
use kv_core::reuse::{BlockContent, BlockKey};

use super::{Identity, ModelDigest};
use crate::chunk::{ChunkContent, ChunkSpec};
use crate::name::ChunkName;

/// The root of the names of one group's chunks: everything that their bytes depend on besides
/// tokens and contents. One for each combination of group, salt and adapter.
#[derive(Clone)]
pub struct ChunkRoot {
    name: ChunkName,
    /// Keys the links of the chain. As secret as the tenant's key, if there is one.
    link_key: [u8; 32],
    model: ModelDigest,
    encoding_key: u128,
    spec: ChunkSpec,
    salt: Box<[u8]>,
    /// Its number in this process.
    adapter: Option<u64>,
}

impl ChunkRoot {
    /// Hashes each field after its length, so that no two different inputs are hashed as the same
    /// bytes.
    pub(super) fn new(
        identity: &Identity,
        spec: &ChunkSpec,
        encoding_key: u128,
        (salt, adapter): (&[u8], Option<(u64, ModelDigest)>),
    ) -> Self {
        let mut hash = match &identity.tenant_key {
            Some(key) => Hasher::new_keyed(key),
            None => Hasher::new(),
        };
        let digest = adapter.as_ref().map(|(_, digest)| digest.as_bytes().as_slice());
        let numerics = identity.numerics.as_ref().map(|name| name.as_bytes());
        let fields: [&[u8]; 10] = [
            DOMAIN,
            &spec.version().to_le_bytes(),
            identity.model.as_bytes(),
            &encoding_key.to_le_bytes(),
            &[spec.group().0],
            &spec.blocks().to_le_bytes(),
            WHOLE,
            digest.unwrap_or_default(),
            salt,
            &[u8::from(numerics.is_some())],
        ];
        for field in fields.into_iter().chain([numerics.unwrap_or_default()]) {
            hash.update(&to_u64(field.len()).to_le_bytes());
            hash.update(field);
        }
        let (mut name, mut link_key) = ([0; 32], [0; 32]);
        let mut output = hash.finalize_xof();
        output.fill(&mut name);
        output.fill(&mut link_key);
        let name = ChunkName::new(name);
        Self {
            name,
            link_key,
            model: identity.model,
            encoding_key,
            spec: *spec,
            salt: salt.into(),
            adapter: adapter.map(|(number, _)| number),
        }
    }

    /// Returns the name of the root: the parent of a prompt's first chunk, and the first half of
    /// the [address](crate::ChunkAddress) of each chunk.
    pub fn name(&self) -> ChunkName {
        self.name
    }
    /// Returns the digest of the model.
    pub fn model(&self) -> ModelDigest {
        self.model
    }
    /// Returns the encoding key of the cache.
    pub fn encoding_key(&self) -> u128 {
        self.encoding_key
    }
    /// Returns the geometry of the chunks.
    pub fn spec(&self) -> &ChunkSpec {
        &self.spec
    }
    /// Returns the salt of the prompts; empty without one.
    pub fn salt(&self) -> &[u8] {
        &self.salt
    }
    /// Returns the number of the prompts' adapter in this process.
    pub fn adapter(&self) -> Option<u64> {
        self.adapter
    }

    /// Returns the key of a chunk's last block for the chunk's header; `key` is that block's key in
    /// the prefix index. Keys depend on the adapter's number, which may differ between processes:
    /// with an adapter the returned key is the beginning of the chunk's name.
    pub fn last_key(&self, name: &ChunkName, key: BlockKey) -> BlockKey {
        if self.adapter.is_none() {
            return key;
        }
        let first = name.as_bytes().first_chunk();
        BlockKey(u128::from_le_bytes(*first.invariant("a name has 32 bytes")))
    }

    /// Returns the link of a block after the link of the block before: the root's name for a
    /// prompt's first block. The link of a chunk's last block is the chunk's name, so that the
    /// state between two blocks is 32 bytes, also inside a chunk.
    pub fn link(
        &self,
        before: &ChunkName,
        tokens: &[u32],
        contents: impl ExactSizeIterator<Item = BlockContent>,
    ) -> ChunkName {
        let mut hash = Hasher::new_keyed(&self.link_key);
        // Two numbers determine where each part of the input ends.
        let mut head = [[0; 8]; 2];
        for (place, n) in head.iter_mut().zip([tokens.len(), contents.len()]) {
            *place = to_u64(n).to_le_bytes();
        }
        hash.update(before.as_bytes());
        hash.update(head.as_flattened());
        let mut words = [[0; 4]; WORDS];
        for tokens in tokens.chunks(WORDS) {
            for (word, token) in words.iter_mut().zip(tokens) {
                *word = token.to_le_bytes();
            }
            hash.update(words[..tokens.len()].as_flattened());
        }
        for content in contents {
            hash.update(&content.to_bytes());
        }
        ChunkName::new(*hash.finalize().as_bytes())
    }

    /// Returns the name of chunk `index` of a prompt, from the name of the chunk before, its own
    /// tokens, and its contents in ascending order of blocks.
    ///
    /// # Panics
    /// If `tokens` are not as many as [`ChunkSpec::span`] says.
    pub fn chunk_name(
        &self,
        index: u32,
        parent: &ChunkName,
        mut tokens: &[u32],
        mut contents: &[ChunkContent],
    ) -> ChunkName {
        let mut link = *parent;
        for block in 0..self.spec.blocks() {
            let span = self.spec.block_span(index, block);
            let len = to_usize(span.end - span.start);
            let own = contents.iter().take_while(|content| content.block <= block).count();
            let (parts, later) = contents.split_at_checked(own).unwrap_or((contents, &[]));
            let split = tokens.split_at_checked(len);
            assert!(split.is_some(), "a chunk has the tokens of all its blocks");
            let (row, rest) = split.unwrap_or_default();
            link = self.link(&link, row, parts.iter().map(|part| part.content));
            (tokens, contents) = (rest, later);
        }
        assert!(tokens.is_empty(), "a chunk has no more tokens than its blocks");
        link
    }
}

/// Leaves out the key and the salt.
impl fmt::Debug for ChunkRoot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ChunkRoot")
            .field("name", &self.name)
            .field("model", &self.model)
            .field("encoding_key", &format_args!("{:032x}", self.encoding_key))
            .field("spec", &self.spec)
            .finish_non_exhaustive()
    }
}

const DOMAIN: &[u8] = b"kv-tier root of chunk names";
/// The shard: all kv heads. Reserved for parts of them.
const WHOLE: &[u8] = b"whole";
/// Tokens that are hashed at a time.
const WORDS: usize = 64;
