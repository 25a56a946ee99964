//! The header of a chunk: places of its fields, and a reader that expects nothing.
// Reads bytes that may be anything.
#![warn(clippy::arithmetic_side_effects, clippy::indexing_slicing)]
use kv_core::backend::PlaneLayout;
use kv_core::invariant::Invariant;
use kv_core::num::{to_u64, to_usize};
use kv_core::reuse::BlockKey;
use kv_core::{BlockOrder, GroupId};

use super::error::ChunkError;
use super::field::{OF_ROWS, VERSION, crc, crc_at};
use super::plane;
pub use super::plane::HeaderPlane;
use super::spec::ChunkSpec;
use crate::identity::ModelDigest;
use crate::name::ChunkName;

/// Describes a chunk by its header alone, for listings and repairs. `bytes` begin with all pages of
/// the header; [`Header::check_payload`] needs the whole chunk.
///
/// The result has the fields of the header, which need not be true of any prompt:
/// [`verify`](super::verify()) decides whether the chunk may be used.
///
/// # Errors
/// Those of the checks of length, magic, version, header CRC and flags, and
/// [`ChunkError::Geometry`] where the header cannot hold what it counts.
pub fn read_header(bytes: &[u8]) -> Result<Header<'_>, ChunkError> {
    let short = |expected: usize| ChunkError::Length {
        expected: to_u64(expected),
        got: to_u64(bytes.len()),
    };
    let page = Header::view(bytes.get(..PAGE).ok_or_else(|| short(PAGE))?);
    page.check_magic()?;
    page.check_version()?;
    let header_bytes = usize::from(page.pages()).saturating_mul(PAGE);
    if header_bytes == 0 {
        let (expected, got) = ("at least 1".to_owned(), "0".to_owned());
        return Err(ChunkError::Geometry { field: "header pages", expected, got });
    }
    let header = Header::view(bytes.get(..header_bytes).ok_or_else(|| short(header_bytes))?);
    header.check_crc()?;
    header.check_flags()?;
    header.check_shard()?;
    let room = u64::from(header.num_tokens())
        .saturating_mul(to_u64(size_of::<u32>()))
        .saturating_add(u64::from(header.num_contents()).saturating_mul(to_u64(CONTENT_BYTES)));
    let planes = plane::check(&header)?;
    let max = to_u64(crc_at(header_bytes).saturating_sub(plane::tokens_at(planes)));
    if room > max {
        let (expected, got) = (format!("at most {max}"), room.to_string());
        return Err(ChunkError::Geometry { field: "bytes of tokens", expected, got });
    }
    for at in plane::format_places(planes) {
        if header.format_name(at).is_none() {
            let (expected, got) = ("a name".to_owned(), header.text(at));
            return Err(ChunkError::Geometry { field: "format", expected, got });
        }
    }
    Ok(header)
}

/// The header of a chunk, as it is.
#[derive(Debug, Clone, Copy)]
pub struct Header<'a> {
    /// At least one page.
    bytes: &'a [u8],
}

impl<'a> Header<'a> {
    /// Wraps whole pages, at least one.
    pub(super) fn view(bytes: &'a [u8]) -> Self {
        assert!(bytes.len() >= PAGE, "a header has at least a page");
        Self { bytes }
    }

    /// Returns the name of the chunk.
    pub fn name(&self) -> ChunkName {
        ChunkName::new(self.array(NAME))
    }
    /// Returns the name of the chunk before.
    pub fn parent(&self) -> ChunkName {
        ChunkName::new(self.array(PARENT))
    }
    /// Returns the digest of the model.
    pub fn model(&self) -> ModelDigest {
        ModelDigest::new(self.array(MODEL))
    }
    /// Returns the name of the root.
    pub fn root(&self) -> ChunkName {
        ChunkName::new(self.array(ROOT))
    }
    /// Returns the encoding key of the cache that wrote the chunk.
    pub fn encoding_key(&self) -> u128 {
        u128::from_le_bytes(self.array(ENCODING_KEY))
    }
    /// Returns the key of the last block.
    pub fn last_key(&self) -> BlockKey {
        BlockKey(u128::from_le_bytes(self.array(LAST_KEY)))
    }
    /// Returns the group; `None` for a number that no cache has.
    pub fn group(&self) -> Option<GroupId> {
        u8::try_from(self.u32_at(GROUP)).ok().map(GroupId)
    }
    /// Returns the number of layers.
    pub fn num_layers(&self) -> u32 {
        self.u32_at(NUM_LAYERS)
    }
    /// Returns the number of kv heads.
    pub fn num_kv_heads(&self) -> u32 {
        self.u32_at(HEADS_OF)
    }
    /// Returns the version: 1 for rows, 2 for recurrent states.
    pub fn version(&self) -> u16 {
        u16::from_le_bytes(self.array(VERSION_AT))
    }
    /// Iterates over the planes of a layer: K and V of rows, or the parts of a recurrent state.
    pub fn planes(&self) -> impl Iterator<Item = HeaderPlane<'a>> + use<'a> {
        plane::planes(*self)
    }
    /// Returns the slots of a block.
    pub fn block_size(&self) -> u32 {
        self.u32_at(BLOCK_SIZE)
    }
    /// Returns the number of blocks.
    pub fn blocks(&self) -> u32 {
        self.u32_at(BLOCKS)
    }
    /// Returns the index of the first block in its prompt.
    pub fn first_block(&self) -> u32 {
        self.u32_at(FIRST_BLOCK)
    }
    /// Iterates over the tokens.
    pub fn tokens(&self) -> impl ExactSizeIterator<Item = u32> + 'a {
        let words = self.token_bytes().unwrap_or_default().as_chunks::<4>().0;
        words.iter().map(|word| u32::from_le_bytes(*word))
    }
    /// Returns the number of contents of placeholder tokens.
    pub fn num_contents(&self) -> u32 {
        self.u32_at(NUM_CONTENTS)
    }
    /// Returns when the chunk was written, in seconds since 1970, by the writer's clock.
    pub fn written_at(&self) -> u64 {
        self.u64_at(WRITTEN_AT)
    }
    /// Returns the bytes of header and payload; `u64::MAX` if more.
    pub fn chunk_bytes(&self) -> u64 {
        to_u64(self.bytes.len()).saturating_add(self.payload_bytes())
    }

    /// Checks length and payload of the chunk that the header was read from.
    ///
    /// # Errors
    /// [`ChunkError::Length`] for other than [`Self::chunk_bytes`], and [`ChunkError::PayloadCrc`].
    pub fn check_payload(&self, chunk: &[u8]) -> Result<(), ChunkError> {
        let (expected, got) = (self.chunk_bytes(), to_u64(chunk.len()));
        let payload = chunk.get(self.bytes.len()..).filter(|_| expected == got);
        self.check_payload_crc(payload.ok_or(ChunkError::Length { expected, got })?)
    }

    pub(super) fn check_magic(&self) -> Result<(), ChunkError> {
        let got = self.array(0);
        if got == MAGIC { Ok(()) } else { Err(ChunkError::Magic { got }) }
    }

    pub(super) fn check_version(&self) -> Result<(), ChunkError> {
        let got = self.version();
        let is_known = (OF_ROWS..=VERSION).contains(&got);
        if is_known { Ok(()) } else { Err(ChunkError::Version { newest: VERSION, got }) }
    }

    pub(super) fn check_crc(&self) -> Result<(), ChunkError> {
        let at = crc_at(self.bytes.len());
        let expected = self.u64_at(at);
        let got = crc(self.bytes.get(..at).unwrap_or_default());
        if expected == got { Ok(()) } else { Err(ChunkError::HeaderCrc { expected, got }) }
    }

    pub(super) fn check_flags(&self) -> Result<(), ChunkError> {
        match self.u32_at(FLAGS) {
            0 => Ok(()),
            flags if flags & SEALED != 0 => Err(ChunkError::Sealed { flags }),
            flags => Err(ChunkError::Flags { flags }),
        }
    }

    pub(super) fn check_shard(&self) -> Result<(), ChunkError> {
        let [begin, end, of] = [HEADS_BEGIN, HEADS_END, HEADS_OF].map(|at| self.u32_at(at));
        if begin == 0 && end == of { Ok(()) } else { Err(ChunkError::Shard { begin, end, of }) }
    }

    pub(super) fn check_payload_crc(&self, payload: &[u8]) -> Result<(), ChunkError> {
        let (expected, got) = (self.u64_at(PAYLOAD_CRC), crc(payload));
        if expected == got { Ok(()) } else { Err(ChunkError::PayloadCrc { expected, got }) }
    }

    pub(super) fn pages(&self) -> u16 {
        u16::from_le_bytes(self.array(PAGES))
    }
    pub(super) fn num_tokens(&self) -> u32 {
        self.u32_at(NUM_TOKENS)
    }
    fn payload_bytes(&self) -> u64 {
        self.u64_at(PAYLOAD_BYTES)
    }

    /// The bytes of the tokens; `None` where the header has no room for them.
    pub(super) fn token_bytes(&self) -> Option<&'a [u8]> {
        let bytes = to_usize(self.num_tokens()).checked_mul(size_of::<u32>())?;
        self.list(plane::tokens_at(plane::count(self)), bytes)
    }

    /// The bytes of the contents; `None` where the header has no room for them.
    pub(super) fn content_bytes(&self) -> Option<&'a [u8]> {
        let tokens = plane::tokens_at(plane::count(self));
        let begin = tokens.checked_add(self.token_bytes()?.len())?;
        self.list(begin, to_usize(self.num_contents()).checked_mul(CONTENT_BYTES)?)
    }

    fn list(&self, begin: usize, bytes: usize) -> Option<&'a [u8]> {
        self.bytes.get(begin..begin.checked_add(bytes)?)
    }

    pub(super) fn u32_at(&self, at: usize) -> u32 {
        u32::from_le_bytes(self.array(at))
    }
    pub(super) fn u64_at(&self, at: usize) -> u64 {
        u64::from_le_bytes(self.array(at))
    }
    pub(super) fn array<const N: usize>(&self, at: usize) -> [u8; N] {
        let field = self.bytes.get(at..).and_then(<[u8]>::first_chunk);
        *field.invariant("a field lies in the first page, or in front of its end")
    }

    /// Reads a name of printable characters.
    pub(super) fn format_name(&self, at: usize) -> Option<&'a str> {
        let field = self.bytes.get(at..at.checked_add(FORMAT_BYTES)?)?;
        let end = field.iter().position(|byte| *byte == 0).unwrap_or(field.len());
        let (name, rest) = field.split_at_checked(end)?;
        let is_name = !name.is_empty() && name.iter().all(u8::is_ascii_graphic);
        let name = std::str::from_utf8(name).ok().filter(|_| is_name)?;
        rest.iter().all(|byte| *byte == 0).then_some(name)
    }

    /// A format's name for an error, whatever its bytes.
    pub(super) fn text(&self, at: usize) -> String {
        let field = self.array::<FORMAT_BYTES>(at);
        let end =
            field.iter().rposition(|byte| *byte != 0).map_or(0, |last| last.saturating_add(1));
        field.get(..end).unwrap_or_default().escape_ascii().to_string()
    }
}

/// Numbers of the header that follow from geometry and place: name, place in the header, value.
pub(super) fn numbers(spec: &ChunkSpec, index: u32) -> [(&'static str, usize, u32); 10] {
    let [k, v] = spec.rows().map_or([0; 2], |planes| planes.map(PlaneLayout::head_dim));
    let is_hnd = spec.order() == BlockOrder::Hnd;
    [
        ("group", GROUP, spec.group().0.into()),
        ("layers", NUM_LAYERS, spec.num_layers()),
        ("kv heads", HEADS_OF, spec.num_kv_heads()),
        ("head_dim of K", HEAD_DIM_K, k),
        ("head_dim of V", HEAD_DIM_V, v),
        ("block size", BLOCK_SIZE, spec.block_size()),
        ("blocks", BLOCKS, spec.blocks()),
        ("first block", FIRST_BLOCK, spec.first_block(index)),
        ("block order", BLOCK_ORDER, u32::from(is_hnd)),
        ("reserved", RESERVED, 0),
    ]
}

/// Lengths of the header that follow from the geometry: name, place in the header, value.
pub(super) fn lengths(spec: &ChunkSpec) -> [(&'static str, usize, u64); 3] {
    let [k, v] = spec.rows().map_or([0; 2], |planes| planes.map(PlaneLayout::block_bytes));
    [
        ("bytes of a block of K", BLOCK_BYTES_K, k),
        ("bytes of a block of V", BLOCK_BYTES_V, v),
        ("bytes of the payload", PAYLOAD_BYTES, to_u64(spec.payload_bytes())),
    ]
}

/// Names of formats in the header: name of the field, place in the header, value.
pub(super) fn formats(spec: &ChunkSpec) -> [(&'static str, usize, String); 2] {
    let [k, v] = spec
        .rows()
        .map_or_else(Default::default, |planes| planes.map(|plane| plane.format().to_string()));
    [("format of K", FORMAT_K, k), ("format of V", FORMAT_V, v)]
}

/// Returns the field of a format's name.
pub(super) fn format_field(name: &str) -> [u8; FORMAT_BYTES] {
    let mut field = [0; FORMAT_BYTES];
    let place = field.get_mut(..name.len()).invariant("names of formats are short");
    place.copy_from_slice(name.as_bytes());
    field
}

/// Bytes of a page: the unit of direct I/O.
pub(super) const PAGE: usize = 4096;
pub(super) const MAGIC: [u8; 8] = *b"KVCHUNK1";
/// A flag: tokens and payload are encrypted. Reserved.
pub(super) const SEALED: u32 = 1;
/// Bytes of a stored content: its block, then those of `BlockContent`.
pub(super) const CONTENT_BYTES: usize = 32;
pub(super) const FORMAT_BYTES: usize = 32;

// Places of fields, in the order of the header.
pub(super) const VERSION_AT: usize = 8;
pub(super) const PAGES: usize = 10;
pub(super) const FLAGS: usize = 12;
pub(super) const NAME: usize = 16;
pub(super) const PARENT: usize = 48;
pub(super) const MODEL: usize = 80;
pub(super) const ROOT: usize = 112;
pub(super) const ENCODING_KEY: usize = 144;
pub(super) const LAST_KEY: usize = 160;
pub(super) const GROUP: usize = 176;
pub(super) const NUM_LAYERS: usize = 180;
pub(super) const HEADS_BEGIN: usize = 184;
pub(super) const HEADS_END: usize = 188;
pub(super) const HEADS_OF: usize = 192;
pub(super) const HEAD_DIM_K: usize = 196;
pub(super) const HEAD_DIM_V: usize = 200;
pub(super) const BLOCK_SIZE: usize = 204;
pub(super) const BLOCKS: usize = 208;
pub(super) const FIRST_BLOCK: usize = 212;
pub(super) const FORMAT_K: usize = 216;
pub(super) const FORMAT_V: usize = 248;
pub(super) const BLOCK_BYTES_K: usize = 280;
pub(super) const BLOCK_BYTES_V: usize = 288;
pub(super) const BLOCK_ORDER: usize = 296;
pub(super) const RESERVED: usize = 300;
pub(super) const PAYLOAD_BYTES: usize = 304;
pub(super) const PAYLOAD_CRC: usize = 312;
pub(super) const WRITTEN_AT: usize = 320;
pub(super) const NUM_TOKENS: usize = 328;
pub(super) const NUM_CONTENTS: usize = 332;
/// End of the fields: the first token of rows, or the table of planes of a state.
pub(super) const FIELDS_END: usize = 336;
