//! The header of a session file: everything but the blocks.
// Reads bytes that may be anything.
#![warn(clippy::arithmetic_side_effects, clippy::indexing_slicing)]
use std::ops::Range;

use kv_core::num::{to_u64, to_usize};
use kv_core::reuse::ContentSpan;

use super::{SessionError, VERSION};
use crate::chunk::crc;
use crate::identity::ModelDigest;
use crate::name::ChunkName;

/// The header of a session file: everything but the blocks.
///
/// ```
/// use kv::tier::ModelDigest;
/// use kv::tier::session::SessionHeader;
///
/// let header = SessionHeader {
///     model: ModelDigest::of_bytes(b"weights"),
///     adapter: None,
///     encoding_key: 7,
///     salt: [1; 32],
///     written_at: 1_700_000_000,
///     groups: Vec::new(),
///     tokens: vec![5, 6, 7],
///     contents: Vec::new(),
///     note: b"temperature 0.7".to_vec(),
/// };
/// let bytes = header.to_bytes()?;
/// assert_eq!((bytes.len(), SessionHeader::from_bytes(&bytes)?), (4096, header));
/// # Ok::<(), kv::tier::session::SessionError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "a literal names each field")]
pub struct SessionHeader {
    /// Digest of the model.
    pub model: ModelDigest,
    /// Digest of the adapter; `None` for the model itself.
    pub adapter: Option<ModelDigest>,
    /// Encoding key of the cache.
    pub encoding_key: u128,
    /// Digest of the salt.
    pub salt: [u8; 32],
    /// Time at which the file was written, in seconds since 1970, for listings only.
    pub written_at: u64,
    /// The groups of the cache, in order.
    pub groups: Vec<SessionGroup>,
    /// The text.
    pub tokens: Vec<u32>,
    /// Contents of the placeholder tokens of the text.
    pub contents: Vec<ContentSpan>,
    /// The caller's own.
    pub note: Vec<u8>,
}

/// The blocks of one group in a session file.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "a literal names each field")]
pub struct SessionGroup {
    /// Root of the names of chunks of one block.
    pub root: ChunkName,
    /// Bytes of a chunk, a multiple of 4,096.
    pub chunk_bytes: u64,
    /// Whether the chunks are snapshots of recurrent states.
    pub is_of_states: bool,
    /// Indices in the text of the blocks that the file has, of states the numbers of tokens behind
    /// which they are: ascending, with gaps in between.
    pub blocks: Vec<Range<u32>>,
}

impl SessionGroup {
    /// Returns the number of blocks.
    pub fn num_blocks(&self) -> u64 {
        let blocks =
            self.blocks.iter().map(|range| u64::from(range.end.saturating_sub(range.start)));
        blocks.sum()
    }

    /// Returns the place of a block among the group's blocks in the file; `None` if it is not
    /// there.
    pub fn place(&self, block: u32) -> Option<u64> {
        let mut before = 0_u64;
        for range in &self.blocks {
            if range.contains(&block) {
                return Some(before.saturating_add(u64::from(block.saturating_sub(range.start))));
            }
            before = before.saturating_add(u64::from(range.end.saturating_sub(range.start)));
        }
        None
    }
}

impl SessionHeader {
    /// Returns the bytes of the header: whole pages, so that chunks begin at a page.
    ///
    /// # Errors
    /// [`SessionError::TooMany`] for a list of more items than the header counts.
    pub fn to_bytes(&self) -> Result<Vec<u8>, SessionError> {
        let ranges: Vec<_> = self.groups.iter().flat_map(|group| group.blocks.iter()).collect();
        let mut out = Vec::new();
        out.extend(MAGIC);
        let version = if self.has_states() { OF_STATES } else { OF_ROWS };
        out.extend(version.to_le_bytes());
        out.extend([0; 2]);
        out.extend(u32::from(self.adapter.is_some()).to_le_bytes());
        // The bytes of header and file, below.
        out.extend([0; 16]);
        out.extend(self.model.as_bytes());
        out.extend(self.salt);
        out.extend(self.adapter.as_ref().map_or([0; 32], |digest| *digest.as_bytes()));
        out.extend(self.encoding_key.to_le_bytes());
        out.extend(self.written_at.to_le_bytes());
        for (what, len) in [
            ("groups", self.groups.len()),
            ("ranges of blocks", ranges.len()),
            ("tokens", self.tokens.len()),
            ("contents", self.contents.len()),
            ("bytes of the note", self.note.len()),
        ] {
            let max = u64::from(u32::MAX);
            let fits = u32::try_from(len);
            let fits = fits.map_err(|_| SessionError::TooMany { what, max, got: to_u64(len) })?;
            out.extend(fits.to_le_bytes());
        }
        out.resize(FIELDS_BYTES, 0);
        for group in &self.groups {
            out.extend(group.root.as_bytes());
            out.extend(group.chunk_bytes.to_le_bytes());
            out.extend(to_u64(group.blocks.len()).to_le_bytes());
            if version == OF_STATES {
                out.extend(u64::from(group.is_of_states).to_le_bytes());
            }
        }
        for range in ranges {
            out.extend(range.start.to_le_bytes());
            out.extend(range.end.to_le_bytes());
        }
        out.extend(self.tokens.iter().flat_map(|token| token.to_le_bytes()));
        for content in &self.contents {
            out.extend(content.begin.to_le_bytes());
            out.extend(content.len.to_le_bytes());
            out.extend(content.id.to_le_bytes());
        }
        out.extend(&self.note);
        let bytes = out.len().saturating_add(CRC_BYTES).next_multiple_of(PAGE);
        out.resize(bytes.saturating_sub(CRC_BYTES), 0);
        let file = self.chunk_bytes().and_then(|chunks| chunks.checked_add(to_u64(bytes)));
        let file = file.ok_or(SessionError::Malformed { field: "bytes of the chunks" })?;
        for (place, number) in out
            .iter_mut()
            .skip(HEADER_BYTES_AT)
            .zip([to_u64(bytes), file].into_iter().flat_map(u64::to_le_bytes))
        {
            *place = number;
        }
        out.extend(crc(&out).to_le_bytes());
        Ok(out)
    }

    /// Reads the bytes of [`Self::to_bytes`], and refuses any others. Allocates a few times as many
    /// bytes as it is given.
    ///
    /// # Errors
    /// [`SessionError::NotASession`], [`SessionError::Version`], [`SessionError::Length`],
    /// [`SessionError::HeaderCrc`], [`SessionError::Malformed`].
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, SessionError> {
        let prefix = Prefix::read(bytes)?;
        if prefix.header_bytes != to_u64(bytes.len()) {
            let (expected, got) = (prefix.header_bytes, to_u64(bytes.len()));
            return Err(SessionError::Length { expected, got });
        }
        let (covered, stored) = bytes.split_last_chunk::<CRC_BYTES>().ok_or(malformed("length"))?;
        let (expected, got) = (u64::from_le_bytes(*stored), crc(covered));
        if expected != got {
            return Err(SessionError::HeaderCrc { expected, got });
        }
        let mut rest = Reader(covered.get(PREFIX_BYTES..).ok_or(malformed("length"))?);
        let mut digest = || rest.array::<32>();
        let (model, salt, adapter) = (ModelDigest::new(digest()?), digest()?, digest()?);
        let adapter = match prefix.flags {
            0 if adapter == [0; 32] => None,
            ADAPTER => Some(ModelDigest::new(adapter)),
            _ => return Err(malformed("flags")),
        };
        let encoding_key = u128::from_le_bytes(rest.array()?);
        let written_at = rest.u64()?;
        let [groups, ranges, tokens, contents, note] = rest.u32s::<5>()?;
        if rest.array()? != [0; RESERVED_BYTES] {
            return Err(malformed("reserved bytes"));
        }
        let is_of_states = prefix.version == OF_STATES;
        let group_bytes = if is_of_states { GROUP_BYTES_2 } else { GROUP_BYTES };
        let mut group_fields = Reader(rest.list(groups, group_bytes)?);
        let mut range_fields = Reader(rest.list(ranges, RANGE_BYTES)?);
        let (tokens, _) = rest.list(tokens, 4)?.as_chunks::<4>();
        let tokens = tokens.iter().map(|token| u32::from_le_bytes(*token)).collect();
        let mut content_fields = Reader(rest.list(contents, CONTENT_BYTES)?);
        let note = rest.list(note, 1)?.to_vec();
        // One header has one form.
        if rest.0.len() >= PAGE || rest.0.iter().any(|byte| *byte != 0) {
            return Err(malformed("padding"));
        }
        let groups = read_groups((&mut group_fields, is_of_states), &mut range_fields)?;
        if groups.iter().any(|group| group.is_of_states) != is_of_states {
            return Err(malformed("version"));
        }
        let contents = read_contents(&mut content_fields)?;
        let header =
            Self { model, adapter, encoding_key, salt, written_at, groups, tokens, contents, note };
        let file = header.chunk_bytes().and_then(|n| n.checked_add(prefix.header_bytes));
        if file == Some(prefix.file_bytes) {
            Ok(header)
        } else {
            Err(malformed("bytes of the file"))
        }
    }

    fn has_states(&self) -> bool {
        self.groups.iter().any(|group| group.is_of_states)
    }

    /// Returns the bytes of all chunks; `None` if too many.
    pub(crate) fn chunk_bytes(&self) -> Option<u64> {
        let bytes = |group: &SessionGroup| group.num_blocks().checked_mul(group.chunk_bytes);
        self.groups.iter().try_fold(0_u64, |sum, group| sum.checked_add(bytes(group)?))
    }
}

/// The beginning of a file: how long header and file are.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Prefix {
    version: u16,
    flags: u32,
    pub(crate) header_bytes: u64,
    pub(crate) file_bytes: u64,
}

impl Prefix {
    /// Reads the first [`PREFIX_BYTES`] bytes.
    pub(crate) fn read(bytes: &[u8]) -> Result<Self, SessionError> {
        let magic = bytes.get(..MAGIC.len()).unwrap_or(bytes);
        if magic != MAGIC {
            return Err(SessionError::NotASession { got: magic.to_vec() });
        }
        let (expected, got) = (to_u64(PREFIX_BYTES), to_u64(bytes.len()));
        let prefix = bytes.get(MAGIC.len()..PREFIX_BYTES);
        let mut prefix = Reader(prefix.ok_or(SessionError::Length { expected, got })?);
        let version = u16::from_le_bytes(prefix.array()?);
        if !(OF_ROWS..=VERSION).contains(&version) {
            return Err(SessionError::Version { newest: VERSION, got: version });
        }
        let reserved = u16::from_le_bytes(prefix.array()?);
        let [flags] = prefix.u32s()?;
        let [header_bytes, file_bytes] = [prefix.u64()?, prefix.u64()?];
        let is_paged = header_bytes > 0 && header_bytes.is_multiple_of(to_u64(PAGE));
        if reserved != 0 || !is_paged || header_bytes > file_bytes {
            return Err(malformed("bytes of the header"));
        }
        Ok(Self { version, flags, header_bytes, file_bytes })
    }
}

/// The unread rest of the bytes.
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, bytes: usize) -> Result<&'a [u8], SessionError> {
        let (taken, rest) = self.0.split_at_checked(bytes).ok_or(malformed("list"))?;
        self.0 = rest;
        Ok(taken)
    }
    fn array<const N: usize>(&mut self) -> Result<[u8; N], SessionError> {
        let taken = self.take(N)?;
        taken.try_into().map_err(|_| malformed("list"))
    }
    fn u64(&mut self) -> Result<u64, SessionError> {
        Ok(u64::from_le_bytes(self.array()?))
    }
    fn u32s<const N: usize>(&mut self) -> Result<[u32; N], SessionError> {
        let mut numbers = [0; N];
        for number in &mut numbers {
            *number = u32::from_le_bytes(self.array()?);
        }
        Ok(numbers)
    }
    fn list(&mut self, items: u32, bytes: usize) -> Result<&'a [u8], SessionError> {
        self.take(to_usize(items).saturating_mul(bytes))
    }
}

/// Reads the groups, and the ranges of all of them.
fn read_groups(
    (fields, has_kinds): (&mut Reader<'_>, bool),
    ranges: &mut Reader<'_>,
) -> Result<Vec<SessionGroup>, SessionError> {
    let mut groups = Vec::new();
    while !fields.0.is_empty() {
        let root = ChunkName::new(fields.array()?);
        let [chunk_bytes, count] = [fields.u64()?, fields.u64()?];
        let is_of_states = match if has_kinds { fields.u64()? } else { 0 } {
            0 => false,
            1 => true,
            _ => return Err(malformed("kind of a group")),
        };
        let mut blocks: Vec<Range<u32>> = Vec::new();
        for _ in 0..count {
            let [start, end] = ranges.u32s()?;
            if start >= end || blocks.last().is_some_and(|before| before.end >= start) {
                return Err(malformed("ranges of blocks"));
            }
            blocks.push(start..end);
        }
        groups.push(SessionGroup { root, chunk_bytes, is_of_states, blocks });
    }
    if ranges.0.is_empty() { Ok(groups) } else { Err(malformed("ranges of blocks")) }
}

fn read_contents(fields: &mut Reader<'_>) -> Result<Vec<ContentSpan>, SessionError> {
    let mut contents = Vec::new();
    while !fields.0.is_empty() {
        let [begin, len] = fields.u32s()?;
        contents.push(ContentSpan { begin, len, id: u128::from_le_bytes(fields.array()?) });
    }
    Ok(contents)
}

const fn malformed(field: &'static str) -> SessionError {
    SessionError::Malformed { field }
}

const MAGIC: [u8; 8] = *b"KVSESSN1";
const PAGE: usize = 4096;
/// A flag: there is an adapter.
const ADAPTER: u32 = 1;
/// Magic, version, flags, and the bytes of header and file.
pub(crate) const PREFIX_BYTES: usize = 32;
const HEADER_BYTES_AT: usize = 16;
/// Everything before the lists.
const FIELDS_BYTES: usize = 192;
/// Zeroes at their end.
const RESERVED_BYTES: usize = 20;
const GROUP_BYTES: usize = 48;
/// The same of version 2, with the kind of the group.
const GROUP_BYTES_2: usize = 56;
/// The versions of files without and with recurrent states.
const OF_ROWS: u16 = 1;
const OF_STATES: u16 = VERSION;
const RANGE_BYTES: usize = 8;
const CONTENT_BYTES: usize = 24;
const CRC_BYTES: usize = 8;
