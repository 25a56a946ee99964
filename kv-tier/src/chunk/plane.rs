//! The planes in a chunk's header: two sets of fields for K and V, or a table for the parts of a
//! recurrent state.
// Reads bytes that may be anything.
#![warn(clippy::arithmetic_side_effects, clippy::indexing_slicing)]
use kv_core::backend::{BlockPlanes, Plane, PlaneRole};
use kv_core::invariant::Invariant;
use kv_core::num::{to_u32, to_u64, to_usize};

use super::error::ChunkError;
use super::field::OF_STATES;
use super::header::{
    BLOCK_BYTES_K, BLOCK_BYTES_V, FIELDS_END, FORMAT_BYTES, FORMAT_K, FORMAT_V, HEAD_DIM_K,
    HEAD_DIM_V, Header, format_field,
};
use super::spec::ChunkSpec;

/// One plane of a layer, by the header of a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct HeaderPlane<'a> {
    /// The role.
    pub role: PlaneRole,
    /// The extents of a part of a state, 0 for axes that it lacks; the values of a row first.
    pub extents: [u32; 3],
    /// The name of the stored format, which this version may not know.
    pub format: &'a str,
    /// The bytes of a block.
    pub block_bytes: u64,
}

/// Returns the number of planes in the table, `None` for rows, which have no table.
pub(super) fn count(header: &Header<'_>) -> Option<usize> {
    let count = || usize::try_from(header.u64_at(FIELDS_END)).unwrap_or(usize::MAX);
    (header.version() == OF_STATES).then(count)
}

/// Checks the table of planes, and returns the number of them.
pub(super) fn check(header: &Header<'_>) -> Result<Option<usize>, ChunkError> {
    let differs = |field, expected: String, got: u64| {
        Err(ChunkError::Geometry { field, expected, got: got.to_string() })
    };
    let Some(count) = count(header) else {
        return Ok(None);
    };
    if !(1..=BlockPlanes::MAX).contains(&count) {
        let expected = format!("from 1 to {}", BlockPlanes::MAX);
        return differs("planes", expected, header.u64_at(FIELDS_END));
    }
    for index in 0..to_u32(count) {
        let at = entry(index);
        let [role, part, reserved] =
            [ROLE, PART, RESERVED].map(|field| header.u32_at(add(at, field)));
        if role != STATE {
            return differs("role of a plane", STATE.to_string(), role.into());
        }
        if (part, reserved) != (index, 0) {
            return differs("part of a plane", index.to_string(), part.max(reserved).into());
        }
    }
    Ok(Some(count))
}

/// Returns the place of the first token after the table of `planes` planes, `None` without one.
pub(super) fn tokens_at(planes: Option<usize>) -> usize {
    // A header may count any planes.
    let table = planes.map(|planes| planes.saturating_mul(ENTRY_BYTES).saturating_add(HEAD_BYTES));
    FIELDS_END.saturating_add(table.unwrap_or(0))
}

/// Returns the places of the names of formats.
pub(super) fn format_places(planes: Option<usize>) -> Vec<usize> {
    match planes {
        None => vec![FORMAT_K, FORMAT_V],
        Some(planes) => (0..to_u32(planes)).map(|index| add(entry(index), FORMAT)).collect(),
    }
}

/// Iterates over the planes of a header that was checked.
pub(super) fn planes(header: Header<'_>) -> impl Iterator<Item = HeaderPlane<'_>> + use<'_> {
    let of_rows = [
        (Plane::Key, HEAD_DIM_K, FORMAT_K, BLOCK_BYTES_K),
        (Plane::Value, HEAD_DIM_V, FORMAT_V, BLOCK_BYTES_V),
    ];
    let of_rows = of_rows.map(|(plane, dim, format, bytes)| {
        (PlaneRole::from(plane), [header.u32_at(dim), 0, 0], format, bytes)
    });
    let count = count(&header);
    let of_states = (0..to_u32(count.unwrap_or(0))).map(move |index| {
        let at = |field| add(entry(index), field);
        let role = PlaneRole::State(u8::try_from(index).invariant("planes were counted"));
        let extents = [0, 4, 8].map(|axis| header.u32_at(at(add(EXTENTS, axis))));
        (role, extents, at(FORMAT), at(BLOCK_BYTES))
    });
    let of_rows = of_rows.into_iter().filter(move |_| count.is_none());
    of_rows.chain(of_states).map(move |(role, extents, format, bytes)| HeaderPlane {
        role,
        extents,
        format: header.format_name(format).invariant("names were checked"),
        block_bytes: header.u64_at(bytes),
    })
}

/// Returns the bytes of the table of planes and their places; none for rows.
pub(super) fn table(spec: &ChunkSpec) -> Vec<(usize, Vec<u8>)> {
    if !spec.is_of_states() {
        return Vec::new();
    }
    let count = to_u64(spec.layout().planes().len());
    let mut table = vec![(FIELDS_END, count.to_le_bytes().to_vec())];
    for (index, shape, layout) in spec.parts() {
        let mut bytes = Vec::with_capacity(ENTRY_BYTES);
        bytes.extend(STATE.to_le_bytes());
        bytes.extend(index.to_le_bytes());
        let extents = shape.as_slice().iter().copied().chain(std::iter::repeat(0)).take(3);
        bytes.extend(extents.flat_map(u32::to_le_bytes));
        bytes.extend([0; 4]);
        bytes.extend(format_field(&layout.format().to_string()));
        bytes.extend(layout.block_bytes().to_le_bytes());
        table.push((entry(index), bytes));
    }
    table
}

/// Compares the table of planes with that of a specification.
pub(super) fn compare(spec: &ChunkSpec, header: &Header<'_>) -> Result<(), ChunkError> {
    if !spec.is_of_states() {
        return Ok(());
    }
    let (expected, got) = (to_u64(spec.layout().planes().len()), header.u64_at(FIELDS_END));
    if expected != got {
        let (expected, got) = (expected.to_string(), got.to_string());
        return Err(ChunkError::Geometry { field: "parts of a state", expected, got });
    }
    for (at, bytes) in table(spec).into_iter().skip(1) {
        let own: [u8; ENTRY_BYTES] = bytes.try_into().invariant("an entry has its bytes");
        let stored: [u8; ENTRY_BYTES] = header.array(at);
        if own != stored {
            let (expected, got) = (describe(&own), describe(&stored));
            return Err(ChunkError::Geometry { field: "part of a state", expected, got });
        }
    }
    Ok(())
}

/// Describes an entry of the table, whatever its bytes.
fn describe(entry: &[u8; ENTRY_BYTES]) -> String {
    let word = |at: usize| {
        let bytes = entry.get(at..).and_then(<[u8]>::first_chunk).copied();
        u32::from_le_bytes(bytes.invariant("a field of an entry"))
    };
    let extents: Vec<_> =
        [0, 4, 8].map(|axis| word(add(EXTENTS, axis))).into_iter().filter(|n| *n > 0).collect();
    let name = entry.get(FORMAT..add(FORMAT, FORMAT_BYTES)).unwrap_or_default();
    let end = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
    let name = name.get(..end).unwrap_or_default().escape_ascii().to_string();
    format!("part {} of {extents:?} in {name:?}, role {}", word(PART), word(ROLE))
}

/// Returns the place of an entry of the table.
fn entry(index: u32) -> usize {
    add(FIELDS_END, to_usize(index).saturating_mul(ENTRY_BYTES).saturating_add(HEAD_BYTES))
}

/// Adds an offset of a field. Places are counted before they are read.
fn add(at: usize, field: usize) -> usize {
    at.saturating_add(field)
}

/// The role of a part of a recurrent state.
const STATE: u32 = 2;
/// Bytes before the first entry: the number of entries.
const HEAD_BYTES: usize = 8;
const ENTRY_BYTES: usize = 64;

// Places of fields in an entry.
const ROLE: usize = 0;
const PART: usize = 4;
const EXTENTS: usize = 8;
const RESERVED: usize = 20;
const FORMAT: usize = 24;
const BLOCK_BYTES: usize = 56;
