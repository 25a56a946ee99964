//! Errors of session files.
use std::io;
use std::path::PathBuf;

use kv_core::error::{BlocksExhausted, DeviceError};
use kv_core::{CacheError, GroupId, SequenceId};

use crate::chunk::{ChunkError, ChunkSpecError, EncodeError};
use crate::identity::{ModelDigest, UnknownAdapter};
use crate::name::ChunkName;

/// A session that cannot be written or read. The cache is as it was before the call.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SessionError {
    /// The file system failed: without the folder, without room, without permission.
    #[error("cannot {operation} {path}")]
    Io {
        /// The operation.
        operation: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The file begins as no session does.
    #[error("not a session: it begins with {:?}", got.escape_ascii().to_string())]
    NotASession {
        /// The first bytes.
        got: Vec<u8>,
    },
    /// The file is of a newer version.
    #[error("session of version {got}, {newest} is the newest that is known")]
    Version {
        /// The newest known version.
        newest: u16,
        /// The version of the file.
        got: u16,
    },
    /// The file is shorter or longer than its header says: it is torn.
    #[error("{got} bytes, the header says {expected}")]
    Length {
        /// Bytes by the header.
        expected: u64,
        /// Bytes of the file.
        got: u64,
    },
    /// The header is damaged.
    #[error("the checksum of the header is {got:016x}, {expected:016x} is stored")]
    HeaderCrc {
        /// The stored checksum.
        expected: u64,
        /// The checksum of the bytes.
        got: u64,
    },
    /// A field of the header has a value that no writer gives it.
    #[error("the header's {field} cannot be")]
    Malformed {
        /// The field.
        field: &'static str,
    },
    /// The session is of another model.
    #[error("session of model {got}, not {expected}")]
    Model {
        /// The model of the identity.
        expected: ModelDigest,
        /// The model of the file.
        got: ModelDigest,
    },
    /// The cache stores rows in another way.
    #[error(
        "session of another stored format, shape or calibration: encoding {got:032x}, not \
         {expected:032x}"
    )]
    Encoding {
        /// The encoding key of the cache.
        expected: u128,
        /// The encoding key of the file.
        got: u128,
    },
    /// The session has another salt, or its writer another tenant key.
    #[error("session of another salt or tenant key")]
    Salt,
    /// The session is of another adapter.
    #[error("session of adapter {got:?}, not {expected:?}")]
    Adapter {
        /// The requested adapter.
        expected: Option<ModelDigest>,
        /// The adapter of the file.
        got: Option<ModelDigest>,
    },
    /// The cache has another number of groups.
    #[error("session of {got} groups, the cache has {expected}")]
    Groups {
        /// Groups of the cache.
        expected: usize,
        /// Groups of the file.
        got: usize,
    },
    /// The blocks of a group have another geometry, or the names another
    /// [`numerics`](crate::Identity::with_numerics).
    #[error("group {}: session of root {got}, not {expected}", group.0)]
    Root {
        /// The group.
        group: GroupId,
        /// The root by the identity.
        expected: ChunkName,
        /// The root of the file.
        got: ChunkName,
    },
    /// The blocks of a group have other sizes: with recurrent states, of parts of other shapes.
    #[error("group {}: blocks of {got} bytes with their headers, not {expected}", group.0)]
    ChunkBytes {
        /// The group.
        group: GroupId,
        /// Bytes by the cache.
        expected: u64,
        /// Bytes by the file.
        got: u64,
    },
    /// A block is damaged, or another one is in its place.
    #[error("block {block} of group {}", group.0)]
    Block {
        /// The group.
        group: GroupId,
        /// Index of the block in the text.
        block: u32,
        /// The check that failed.
        source: ChunkError,
    },
    /// The text is longer than a sequence may be.
    #[error("{tokens} tokens, a sequence may have {max}")]
    TooLong {
        /// Tokens of the text.
        tokens: u32,
        /// Most tokens of a sequence of this cache.
        max: u32,
    },
    /// Too few blocks are free. The cache may have to give up sequences first.
    #[error("no room for the session")]
    NoRoom(#[source] BlocksExhausted),
    /// No such sequence is live.
    #[error("no sequence {}", sequence.0)]
    UnknownSequence {
        /// The sequence.
        sequence: SequenceId,
    },
    /// The sequence was started without reuse, or before everything cached became invalid.
    #[error("sequence {} offers no blocks to others", sequence.0)]
    NotReusable {
        /// The sequence.
        sequence: SequenceId,
    },
    /// Lists of the header that are too long for it: the text, its contents, or the note.
    #[error("{what}: {got} items, {max} are the most")]
    TooMany {
        /// The list.
        what: &'static str,
        /// Most items.
        max: u64,
        /// Items given.
        got: u64,
    },
    /// The adapter has no digest.
    #[error(transparent)]
    UnknownAdapter(#[from] UnknownAdapter),
    /// A block has more contents of placeholder tokens than a chunk describes.
    #[error(transparent)]
    Encode(#[from] EncodeError),
    /// The blocks of the cache cannot be chunked.
    #[error(transparent)]
    Chunk(#[from] ChunkSpecError),
    /// The cache refused a call, or its device failed.
    #[error(transparent)]
    Cache(#[from] CacheError),
    /// A step is open.
    #[error("a step is open")]
    StepOpen,
}

impl From<DeviceError> for SessionError {
    fn from(error: DeviceError) -> Self {
        Self::Cache(error.into())
    }
}
