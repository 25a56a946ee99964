//! Handoffs: messages from a prefill engine to a decode engine, which then finds the blocks of a
//! prompt in a store that both share.
//!
//! A handoff has a few hundred bytes, whatever the prompt. For each group it has the root of names,
//! which stands for model, format and tenant, and the name of the last chunk, which stands for all
//! tokens up to the chunk's end. It omits the tokens after the last whole chunk, fewer than a chunk
//! has: the decode engine computes them in the step of the last token, and their rows would add
//! megabytes to a message that routers forward. In a cache with recurrent states it ends at a
//! state, whatever its length, and the store has the rows up to there.
// Reads bytes that may be anything.
#![warn(clippy::arithmetic_side_effects, clippy::indexing_slicing)]
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use kv_core::GroupId;

pub use crate::engine::{Export, ExportId, ExportState};

use crate::chunk::crc;
use crate::identity::UnknownAdapter;
use crate::name::ChunkName;

/// The data with which a decode engine waits for the blocks of a prompt, as bytes in the caller's
/// own message.
///
/// ```
/// use std::time::{Duration, SystemTime};
///
/// use kv::tier::handoff::{Handoff, HandoffGroup};
/// use kv::tier::ChunkName;
///
/// let group = |root| HandoffGroup {
///     root: ChunkName::new([root; 32]),
///     chunks: 3,
///     last: ChunkName::new([9; 32]),
/// };
/// let until = SystemTime::now() + Duration::from_secs(5);
/// let handoff = Handoff::new(768, until, vec![group(1), group(2)]);
/// assert_eq!(Handoff::from_bytes(&handoff.to_bytes())?, handoff);
/// # Ok::<(), kv::tier::handoff::HandoffError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Handoff {
    tokens: u32,
    /// Milliseconds since 1970.
    until: u64,
    groups: Vec<HandoffGroup>,
}

/// The chunks of one group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "a literal names each field")]
pub struct HandoffGroup {
    /// Root of the names.
    pub root: ChunkName,
    /// Whole chunks of the prompt; none of recurrent states.
    pub chunks: u32,
    /// Name of the last one; the root's without chunks. Of recurrent states, the name of that
    /// behind the last token.
    pub last: ChunkName,
}

impl Handoff {
    /// Creates a handoff of the first `tokens` tokens of a prompt. It is worth waiting until
    /// `until` for them, which is kept in milliseconds.
    pub fn new(tokens: u32, until: SystemTime, groups: Vec<HandoffGroup>) -> Self {
        let until = until.duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
        Self { tokens, until: u64::try_from(until).unwrap_or(u64::MAX), groups }
    }

    /// Returns the tokens whose blocks are brought.
    pub fn tokens(&self) -> u32 {
        self.tokens
    }
    /// Returns until when the decode engine waits, by the clock of the prefill engine's machine:
    /// clocks that differ shorten or lengthen the wait, and make no answer wrong.
    pub fn until(&self) -> SystemTime {
        // A time that this machine's clock does not reach is some centuries ahead.
        let until = Duration::from_millis(self.until.min(CENTURIES_MS));
        UNIX_EPOCH.checked_add(until).unwrap_or(UNIX_EPOCH)
    }
    /// Returns the groups of the cache, in order.
    pub fn groups(&self) -> &[HandoffGroup] {
        &self.groups
    }

    /// Returns the bytes: 32 and 68 for each group, little endian.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(HEAD_BYTES);
        out.extend(MAGIC);
        out.extend(VERSION.to_le_bytes());
        // A cache has at most 256 groups.
        out.extend(u16::try_from(self.groups.len()).unwrap_or(u16::MAX).to_le_bytes());
        out.extend(self.tokens.to_le_bytes());
        out.extend(self.until.to_le_bytes());
        for group in &self.groups {
            out.extend(group.root.as_bytes());
            out.extend(group.last.as_bytes());
            out.extend(group.chunks.to_le_bytes());
        }
        out.extend(crc(&out).to_le_bytes());
        out
    }

    /// Reads the bytes of [`Self::to_bytes`]. Allocates no more than it is given.
    ///
    /// # Errors
    /// [`HandoffError::NotAHandoff`], [`HandoffError::Version`], [`HandoffError::Damaged`].
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, HandoffError> {
        let rest = bytes.strip_prefix(&MAGIC).ok_or(HandoffError::NotAHandoff)?;
        let (version, rest) = rest.split_first_chunk().ok_or(HandoffError::Damaged)?;
        let version = u16::from_le_bytes(*version);
        if version != VERSION {
            return Err(HandoffError::Version { newest: VERSION, got: version });
        }
        let (covered, stored) = bytes.split_last_chunk().ok_or(HandoffError::Damaged)?;
        if crc(covered) != u64::from_le_bytes(*stored) {
            return Err(HandoffError::Damaged);
        }
        Self::fields(rest).ok_or(HandoffError::Damaged)
    }

    /// Reads the fields after the version.
    fn fields(rest: &[u8]) -> Option<Self> {
        let (count, rest) = rest.split_first_chunk()?;
        let (tokens, rest) = rest.split_first_chunk()?;
        let (until, rest) = rest.split_first_chunk()?;
        let (groups, _) = rest.split_last_chunk::<{ size_of::<u64>() }>()?;
        let (groups, more) = groups.as_chunks::<GROUP_BYTES>();
        if !more.is_empty() || groups.len() != usize::from(u16::from_le_bytes(*count)) {
            return None;
        }
        let groups = groups.iter().map(|group| {
            let (root, rest) = group.split_first_chunk()?;
            let (last, rest) = rest.split_first_chunk()?;
            let chunks = u32::from_le_bytes(*rest.first_chunk()?);
            Some(HandoffGroup { root: ChunkName::new(*root), chunks, last: ChunkName::new(*last) })
        });
        let groups = groups.collect::<Option<Vec<_>>>()?;
        let (tokens, until) = (u32::from_le_bytes(*tokens), u64::from_le_bytes(*until));
        Some(Self { tokens, until, groups })
    }
}

/// A handoff that cannot be made or used. Nothing has changed then, and the prompt can be computed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HandoffError {
    /// The bytes begin as no handoff does.
    #[error("not a handoff")]
    NotAHandoff,
    /// The handoff is of a newer version.
    #[error("handoff of version {got}, {newest} is the newest that is known")]
    Version {
        /// The newest known version.
        newest: u16,
        /// The version of the handoff.
        got: u16,
    },
    /// The bytes are cut, changed, or too many.
    #[error("the handoff is damaged")]
    Damaged,
    /// The cache has another number of groups.
    #[error("handoff of {got} groups, the cache has {expected}")]
    Groups {
        /// Groups of the cache.
        expected: usize,
        /// Groups of the handoff.
        got: usize,
    },
    /// The handoff is of another model, format, salt, adapter or size of chunks.
    #[error("group {}: handoff of root {got}, not {expected}", group.0)]
    Root {
        /// The group.
        group: GroupId,
        /// The root by the identity of the tiers and the options of the prompt.
        expected: ChunkName,
        /// The root of the handoff.
        got: ChunkName,
    },
    /// The prompt begins with other tokens or contents, or is shorter.
    #[error("the handoff is of another prompt")]
    Prompt,
    /// No such sequence is live, or it offers no blocks to others.
    #[error("no sequence whose blocks can be exported")]
    NoSequence,
    /// The adapter has no digest.
    #[error(transparent)]
    UnknownAdapter(#[from] UnknownAdapter),
    /// The tiers have no such store, or only read it.
    #[error("store {store} of {stores} cannot be written")]
    NoStore {
        /// The requested store.
        store: usize,
        /// Stores of the tiers.
        stores: usize,
    },
}

const MAGIC: [u8; 8] = *b"KVHANDO1";
const VERSION: u16 = 1;
/// Without groups: magic, version, number of groups, tokens, time, CRC.
const HEAD_BYTES: usize = 32;
const GROUP_BYTES: usize = 68;
/// The year 2770.
const CENTURIES_MS: u64 = 800 * 365 * 24 * 3_600 * 1_000;

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn handoff() -> Handoff {
        let group = |number| HandoffGroup {
            root: ChunkName::new([number; 32]),
            chunks: number.into(),
            last: ChunkName::new([number.wrapping_mul(3); 32]),
        };
        let until = UNIX_EPOCH.checked_add(Duration::from_millis(1_700_000_000_123)).unwrap();
        Handoff::new(768, until, vec![group(1), group(2)])
    }

    #[test]
    fn what_is_changed_cut_or_longer_is_refused() {
        let (handoff, bytes) = (handoff(), handoff().to_bytes());
        assert_eq!(bytes.len(), HEAD_BYTES + 2 * GROUP_BYTES);
        assert_eq!(Handoff::from_bytes(&bytes), Ok(handoff.clone()));
        assert_eq!(handoff.to_bytes(), bytes);
        for at in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[at] ^= 1 << (at % 8);
            let refused = Handoff::from_bytes(&changed).unwrap_err();
            match at {
                0..8 => assert_eq!(refused, HandoffError::NotAHandoff),
                8..10 => assert!(matches!(refused, HandoffError::Version { .. })),
                _ => assert_eq!(refused, HandoffError::Damaged),
            }
            assert!(Handoff::from_bytes(&bytes[..at]).is_err());
        }
        assert!(Handoff::from_bytes(&[&bytes[..], &[0]].concat()).is_err());
    }

    #[test]
    fn bytes_of_version_1_never_change() {
        let bytes = handoff().to_bytes();
        assert_eq!(bytes[..16], *b"KVHANDO1\x01\0\x02\0\0\x03\0\0");
        assert_eq!(bytes[16..24], 1_700_000_000_123_u64.to_le_bytes());
        assert_eq!((bytes[24], bytes[56], bytes[88], bytes[92]), (1, 3, 1, 2));
        assert_eq!(bytes[160..], crc(&bytes[..160]).to_le_bytes());
    }

    proptest! {
        #[test]
        fn hostile_bytes_are_refused_or_have_one_form(
            mut bytes in prop::collection::vec(any::<u8>(), 14..300),
            head in any::<bool>(),
        ) {
            if head {
                bytes[..10].copy_from_slice(b"KVHANDO1\x01\0");
            }
            let (covered, sum) = bytes.split_last_chunk_mut().unwrap();
            *sum = crc(covered).to_le_bytes();
            if let Ok(read) = Handoff::from_bytes(&bytes) {
                prop_assert_eq!(read.to_bytes(), bytes);
            }
        }
    }
}
