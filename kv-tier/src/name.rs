//! Names of chunks.
use std::fmt;
use std::str::FromStr;

use kv_core::UnknownName;

use crate::hex;

/// The name of a chunk: a 256-bit cryptographic hash of everything that its bytes depend on.
///
/// Names form a chain. Its first link is the name of a [`ChunkRoot`](crate::ChunkRoot), and each
/// block of a prompt adds one; a chunk has the name of its last block's link.
///
/// Two chunks of the same name hold the same rows, so a stored chunk is never replaced.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ChunkName([u8; 32]);

impl ChunkName {
    /// Creates a name from its bytes.
    pub const fn new(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }

    /// Returns the bytes.
    pub const fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

/// Writes 64 lower-case hexadecimal digits.
impl fmt::Display for ChunkName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        hex::write(&self.0, f)
    }
}

impl fmt::Debug for ChunkName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Reads the form that `Display` writes, and no other.
impl FromStr for ChunkName {
    type Err = UnknownName;
    fn from_str(text: &str) -> Result<Self, UnknownName> {
        hex::read("name of a chunk", text).map(Self)
    }
}
