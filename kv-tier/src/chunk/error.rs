//! The reasons for which a chunk is refused.
use kv_core::reuse::BlockKey;

use crate::identity::ModelDigest;
use crate::name::ChunkName;

/// A chunk that differs from the expected one, with both values.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ChunkError {
    /// Truncated, empty, too long, or of another size of chunks.
    #[error("{got} bytes, expected {expected}")]
    Length {
        /// Bytes that were expected.
        expected: u64,
        /// Bytes that came.
        got: u64,
    },
    /// No chunk.
    #[error("begins with \"{}\", which is no chunk", got.escape_ascii())]
    Magic {
        /// The first bytes.
        got: [u8; 8],
    },
    /// A version that this crate cannot read: the chunk of a newer program.
    #[error("version {got}, versions up to {newest} are read here")]
    Version {
        /// The newest version that is read.
        newest: u16,
        /// The chunk's version.
        got: u16,
    },
    /// The header was damaged.
    #[error("header with CRC {got:016x}, stored is {expected:016x}")]
    HeaderCrc {
        /// CRC that the header has.
        expected: u64,
        /// CRC of the bytes.
        got: u64,
    },
    /// The chunk is encrypted: a `SealedStore` with its key reads it.
    #[error("sealed (flags {flags:#x}): only who has its key reads it")]
    Sealed {
        /// The header's flags.
        flags: u32,
    },
    /// Flags that this crate does not know.
    #[error("unknown flags {flags:#x}")]
    Flags {
        /// The header's flags.
        flags: u32,
    },
    /// Another chunk: the answer to another question, or a file under another's name.
    #[error("chunk {got}, expected {expected}")]
    Name {
        /// The name that was expected.
        expected: ChunkName,
        /// The name in the header.
        got: ChunkName,
    },
    /// Another root.
    #[error("root {got}, expected {expected}")]
    Root {
        /// The root that was expected.
        expected: ChunkName,
        /// The root in the header.
        got: ChunkName,
    },
    /// Another model.
    #[error("model {got}, expected {expected}")]
    Model {
        /// The model that was expected.
        expected: ModelDigest,
        /// The model in the header.
        got: ModelDigest,
    },
    /// Another encoding: format, transform or constants.
    #[error("encoding {got:032x}, expected {expected:032x}")]
    Encoding {
        /// The encoding key that was expected.
        expected: u128,
        /// The encoding key in the header.
        got: u128,
    },
    /// Some of the kv heads, which is not supported.
    #[error("kv heads {begin}..{end} of {of}: shards are not supported")]
    Shard {
        /// First head.
        begin: u32,
        /// End of the heads.
        end: u32,
        /// All heads.
        of: u32,
    },
    /// Another geometry, or another place in the prompt.
    #[error("{field}: {got}, expected {expected}")]
    Geometry {
        /// The field of the header.
        field: &'static str,
        /// The value that was expected.
        expected: String,
        /// The value in the header.
        got: String,
    },
    /// Another chunk before it.
    #[error("after chunk {got}, expected {expected}")]
    Parent {
        /// The name that was expected.
        expected: ChunkName,
        /// The name in the header.
        got: ChunkName,
    },
    /// Another key of the last block.
    #[error("last block {got}, expected {expected}")]
    LastKey {
        /// The key that was expected.
        expected: BlockKey,
        /// The key in the header.
        got: BlockKey,
    },
    /// Other tokens.
    #[error("{got} tokens, expected {expected}; they differ from token {first} on")]
    Tokens {
        /// Index of the first token that differs.
        first: u64,
        /// Number of tokens that was expected.
        expected: u64,
        /// Number of tokens in the header.
        got: u64,
    },
    /// Other contents of placeholder tokens.
    #[error("other contents of placeholder tokens: {got} parts, expected {expected}")]
    Contents {
        /// Number of parts that was expected.
        expected: u64,
        /// Number of parts in the header.
        got: u64,
    },
    /// The payload was damaged.
    #[error("payload with CRC {got:016x}, stored is {expected:016x}")]
    PayloadCrc {
        /// CRC that the header has.
        expected: u64,
        /// CRC of the bytes.
        got: u64,
    },
}

impl ChunkError {
    /// Returns the check that failed.
    pub const fn kind(&self) -> ChunkErrorKind {
        match self {
            Self::Length { .. } => ChunkErrorKind::Length,
            Self::Magic { .. } => ChunkErrorKind::Magic,
            Self::Version { .. } => ChunkErrorKind::Version,
            Self::HeaderCrc { .. } => ChunkErrorKind::HeaderCrc,
            Self::Sealed { .. } | Self::Flags { .. } => ChunkErrorKind::Flags,
            Self::Name { .. } => ChunkErrorKind::Name,
            Self::Root { .. } => ChunkErrorKind::Root,
            Self::Model { .. } => ChunkErrorKind::Model,
            Self::Encoding { .. } => ChunkErrorKind::Encoding,
            Self::Shard { .. } => ChunkErrorKind::Shard,
            Self::Geometry { .. } => ChunkErrorKind::Geometry,
            Self::Parent { .. } => ChunkErrorKind::Parent,
            Self::LastKey { .. } => ChunkErrorKind::LastKey,
            Self::Tokens { .. } => ChunkErrorKind::Tokens,
            Self::Contents { .. } => ChunkErrorKind::Contents,
            Self::PayloadCrc { .. } => ChunkErrorKind::PayloadCrc,
        }
    }
}

/// The checks of a chunk, in their order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum ChunkErrorKind {
    /// Number of bytes.
    Length,
    /// First bytes.
    Magic,
    /// Version of the format.
    Version,
    /// Checksum of the header.
    HeaderCrc,
    /// Flags: sealing, and flags of later versions.
    Flags,
    /// Name of the chunk.
    Name,
    /// Root of the chain of names.
    Root,
    /// Digest of the model.
    Model,
    /// Encoding key of the cache.
    Encoding,
    /// The kv heads.
    Shard,
    /// Geometry of the blocks and their place in the prompt.
    Geometry,
    /// Name of the chunk before.
    Parent,
    /// Key of the last block.
    LastKey,
    /// Tokens.
    Tokens,
    /// Contents of placeholder tokens.
    Contents,
    /// Checksum of the payload.
    PayloadCrc,
}

impl ChunkErrorKind {
    /// All checks, in the order in which they are made.
    pub const ALL: [Self; 16] = [
        Self::Length,
        Self::Magic,
        Self::Version,
        Self::HeaderCrc,
        Self::Flags,
        Self::Name,
        Self::Root,
        Self::Model,
        Self::Encoding,
        Self::Shard,
        Self::Geometry,
        Self::Parent,
        Self::LastKey,
        Self::Tokens,
        Self::Contents,
        Self::PayloadCrc,
    ];

    /// Returns the index of the check in [`Self::ALL`], for counters.
    pub const fn index(self) -> usize {
        #[expect(clippy::as_conversions, reason = "the order of the declaration")]
        {
            self as usize
        }
    }

    /// Returns whether the chunk may be right for another program: a newer version, flags or shards
    /// that are not supported here, another model. It is not ours, and not ours to remove.
    pub const fn is_foreign(self) -> bool {
        matches!(self, Self::Version | Self::Flags | Self::Model | Self::Shard)
    }
}
