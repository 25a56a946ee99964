//! The checks that a chunk passes before it may be used.
// Reads bytes that may be anything.
#![warn(clippy::arithmetic_side_effects, clippy::indexing_slicing)]
use std::ops::Deref;

use kv_core::num::to_u64;

use super::Expectation;
use super::error::{ChunkError, ChunkErrorKind};
use super::header::{self, Header, PAGE};
use super::plane;

/// Checks everything in a chunk against its expectation. The only constructor of [`Verified`].
///
/// `chunk` points to bytes: a slice, a `Vec`, an `Arc` of the host memory of a tier. There may be
/// any bytes of any length. It is dropped if it is refused.
///
/// # Errors
/// The first check that fails, in the order of [`ChunkErrorKind::ALL`].
pub fn verify<C: Deref<Target: AsRef<[u8]>>>(
    chunk: C,
    expected: &Expectation<'_>,
) -> Result<Verified<C>, ChunkError> {
    run(chunk, expected, CHECKS)
}

/// A chunk that met its expectation: the only chunk that may be copied to a device.
#[derive(Debug, Clone)]
pub struct Verified<C> {
    chunk: C,
}

impl<C: Deref<Target: AsRef<[u8]>>> Verified<C> {
    /// Checks the header against another expectation. The payload was checked when the chunk was
    /// verified, and has not changed since.
    ///
    /// # Errors
    /// The first check that fails, in the order of [`ChunkErrorKind::ALL`].
    pub fn check_header(&self, expected: &Expectation<'_>) -> Result<(), ChunkError> {
        let candidate = Candidate::new(self.bytes(), expected)?;
        let of_header = CHECKS.iter().filter(|(kind, _)| *kind != ChunkErrorKind::PayloadCrc);
        of_header.into_iter().try_for_each(|(_, check)| check(&candidate))
    }

    /// Returns the bytes of the chunk, in which [`ChunkSpec::piece`](super::ChunkSpec::piece) finds
    /// blocks.
    pub fn bytes(&self) -> &[u8] {
        (*self.chunk).as_ref()
    }
}

impl<C> Verified<C> {
    /// Returns the owner of the bytes.
    pub fn get_ref(&self) -> &C {
        &self.chunk
    }
    /// Gives back the owner of the bytes, to be verified before its next use.
    pub fn into_inner(self) -> C {
        self.chunk
    }
}

/// A chunk of the right size or more, and its expectation.
pub(super) struct Candidate<'a> {
    bytes: &'a [u8],
    header: Header<'a>,
    payload: &'a [u8],
    expected: &'a Expectation<'a>,
}

pub(super) type Check = (ChunkErrorKind, fn(&Candidate<'_>) -> Result<(), ChunkError>);

pub(super) const CHECKS: [Check; ChunkErrorKind::ALL.len()] = [
    (ChunkErrorKind::Length, length),
    (ChunkErrorKind::Magic, |chunk| chunk.header.check_magic()),
    (ChunkErrorKind::Version, version),
    (ChunkErrorKind::HeaderCrc, |chunk| chunk.header.check_crc()),
    (ChunkErrorKind::Flags, |chunk| chunk.header.check_flags()),
    (ChunkErrorKind::Name, name),
    (ChunkErrorKind::Root, root),
    (ChunkErrorKind::Model, model),
    (ChunkErrorKind::Encoding, encoding),
    (ChunkErrorKind::Shard, |chunk| chunk.header.check_shard()),
    (ChunkErrorKind::Geometry, geometry),
    (ChunkErrorKind::Parent, parent),
    (ChunkErrorKind::LastKey, last_key),
    (ChunkErrorKind::Tokens, tokens),
    (ChunkErrorKind::Contents, contents),
    (ChunkErrorKind::PayloadCrc, |chunk| chunk.header.check_payload_crc(chunk.payload)),
];

/// Runs some checks, in order; a test leaves one out to show that it is needed.
pub(super) fn run<C: Deref<Target: AsRef<[u8]>>>(
    chunk: C,
    expected: &Expectation<'_>,
    checks: impl IntoIterator<Item = Check>,
) -> Result<Verified<C>, ChunkError> {
    let candidate = Candidate::new((*chunk).as_ref(), expected)?;
    for (_, check) in checks {
        check(&candidate)?;
    }
    Ok(Verified { chunk })
}

impl<'a> Candidate<'a> {
    /// Refuses bytes that are too short for the expected header and payload; [`length`] refuses
    /// those that are too long.
    fn new(bytes: &'a [u8], expected: &'a Expectation<'a>) -> Result<Self, ChunkError> {
        let spec = expected.root.spec();
        let parts = bytes.split_at_checked(spec.header_bytes());
        let parts = parts.and_then(|(h, rest)| Some((h, rest.get(..spec.payload_bytes())?)));
        let (header, payload) = parts.ok_or_else(|| Self::wrong_length(bytes, expected))?;
        Ok(Self { bytes, header: Header::view(header), payload, expected })
    }

    fn wrong_length(bytes: &[u8], expected: &Expectation<'_>) -> ChunkError {
        let expected = to_u64(expected.root.spec().chunk_bytes());
        ChunkError::Length { expected, got: to_u64(bytes.len()) }
    }
}

fn length(chunk: &Candidate<'_>) -> Result<(), ChunkError> {
    if chunk.bytes.len() == chunk.expected.root.spec().chunk_bytes() {
        return Ok(());
    }
    Err(Candidate::wrong_length(chunk.bytes, chunk.expected))
}

fn name(chunk: &Candidate<'_>) -> Result<(), ChunkError> {
    let (expected, got) = (chunk.expected.name, chunk.header.name());
    if expected == got { Ok(()) } else { Err(ChunkError::Name { expected, got }) }
}

fn root(chunk: &Candidate<'_>) -> Result<(), ChunkError> {
    let (expected, got) = (chunk.expected.root.name(), chunk.header.root());
    if expected == got { Ok(()) } else { Err(ChunkError::Root { expected, got }) }
}

fn model(chunk: &Candidate<'_>) -> Result<(), ChunkError> {
    let (expected, got) = (chunk.expected.root.model(), chunk.header.model());
    if expected == got { Ok(()) } else { Err(ChunkError::Model { expected, got }) }
}

fn encoding(chunk: &Candidate<'_>) -> Result<(), ChunkError> {
    let (expected, got) = (chunk.expected.root.encoding_key(), chunk.header.encoding_key());
    if expected == got { Ok(()) } else { Err(ChunkError::Encoding { expected, got }) }
}

fn version(chunk: &Candidate<'_>) -> Result<(), ChunkError> {
    chunk.header.check_version()?;
    let (expected, got) = (chunk.expected.root.spec().version(), chunk.header.version());
    if expected == got {
        return Ok(());
    }
    // States in the place of rows, or the other way round.
    let (expected, got) = (expected.to_string(), got.to_string());
    Err(ChunkError::Geometry { field: "version", expected, got })
}

fn geometry(chunk: &Candidate<'_>) -> Result<(), ChunkError> {
    let spec = chunk.expected.root.spec();
    let differs = |field, expected: u64, got: u64| {
        let (expected, got) = (expected.to_string(), got.to_string());
        Err(ChunkError::Geometry { field, expected, got })
    };
    let pages = to_u64(spec.header_bytes().div_euclid(PAGE));
    if pages != u64::from(chunk.header.pages()) {
        return differs("header pages", pages, chunk.header.pages().into());
    }
    for (field, at, expected) in header::numbers(spec, chunk.expected.index) {
        let got = chunk.header.u32_at(at);
        if expected != got {
            return differs(field, expected.into(), got.into());
        }
    }
    for (field, at, expected) in header::lengths(spec) {
        let got = chunk.header.u64_at(at);
        if expected != got {
            return differs(field, expected, got);
        }
    }
    for (field, at, expected) in header::formats(spec) {
        if header::format_field(&expected) != chunk.header.array(at) {
            let got = chunk.header.text(at);
            return Err(ChunkError::Geometry { field, expected, got });
        }
    }
    plane::compare(spec, &chunk.header)
}

fn parent(chunk: &Candidate<'_>) -> Result<(), ChunkError> {
    let (expected, got) = (chunk.expected.parent, chunk.header.parent());
    if expected == got { Ok(()) } else { Err(ChunkError::Parent { expected, got }) }
}

fn last_key(chunk: &Candidate<'_>) -> Result<(), ChunkError> {
    let (expected, got) = (chunk.expected.last_key, chunk.header.last_key());
    if expected == got { Ok(()) } else { Err(ChunkError::LastKey { expected, got }) }
}

fn tokens(chunk: &Candidate<'_>) -> Result<(), ChunkError> {
    let expected = chunk.expected.tokens;
    // A number of tokens that the header has no room for is no list at all.
    let listed = chunk.header.token_bytes().map(|_| chunk.header.tokens());
    if listed.is_some_and(|tokens| tokens.eq(expected.iter().copied())) {
        return Ok(());
    }
    let same = chunk.header.tokens().zip(expected).take_while(|(a, b)| a == *b).count();
    Err(ChunkError::Tokens {
        first: to_u64(same),
        expected: to_u64(expected.len()),
        got: chunk.header.num_tokens().into(),
    })
}

fn contents(chunk: &Candidate<'_>) -> Result<(), ChunkError> {
    let expected = chunk.expected.contents;
    let stored = chunk.header.content_bytes();
    let stored = stored.map(|bytes| bytes.as_chunks::<{ header::CONTENT_BYTES }>().0.iter());
    let same = stored.is_some_and(|stored| {
        stored.copied().eq(expected.iter().map(|content| content.to_bytes()))
    });
    if same {
        return Ok(());
    }
    let got = chunk.header.num_contents().into();
    Err(ChunkError::Contents { expected: to_u64(expected.len()), got })
}
