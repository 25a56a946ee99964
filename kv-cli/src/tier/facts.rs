//! The fields of a chunk's header, and the age of the chunk.
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use kv::backend::PlaneRole;
use kv::tier::chunk::{HeaderPlane, read_header};
use kv::tier::{ChunkError, Header, ListChunks, ListedChunk, StoreError, StoreErrorKind};
use serde::Serialize;

use super::{Age, soon};
use crate::failure;
use crate::num::{to_u32, to_u64};

/// The fields of a header.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Facts {
    pub(super) model: String,
    /// K and V of rows, or the parts of a recurrent state.
    pub(super) planes: Vec<PlaneFacts>,
    pub(super) group: Option<u8>,
    pub(super) layers: u32,
    pub(super) kv_heads: u32,
    pub(super) block_size: u32,
    pub(super) first_block: u32,
    pub(super) blocks: u32,
    pub(super) tokens: u32,
    /// Seconds since 1970, by the writer's clock.
    pub(super) written_at: u64,
    /// Seconds since then.
    pub(super) age_s: u64,
}

/// The fields of one plane.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct PlaneFacts {
    role: String,
    format: String,
    /// The values of a row, or the extents of a part of a state.
    shape: Vec<u32>,
    block_bytes: u64,
}

impl PlaneFacts {
    fn of(plane: HeaderPlane<'_>) -> Self {
        let role = match plane.role {
            PlaneRole::Key => "key".to_owned(),
            PlaneRole::Value => "value".to_owned(),
            PlaneRole::State(part) => format!("state {part}"),
            _ => "unknown".to_owned(),
        };
        let shape = plane.extents.into_iter().filter(|extent| *extent > 0).collect();
        let (format, block_bytes) = (plane.format.to_owned(), plane.block_bytes);
        Self { role, format, shape, block_bytes }
    }
}

impl Facts {
    fn of(header: &Header<'_>) -> Self {
        Self {
            model: header.model().to_string(),
            planes: header.planes().map(PlaneFacts::of).collect(),
            group: header.group().map(|group| group.0),
            layers: header.num_layers(),
            kv_heads: header.num_kv_heads(),
            block_size: header.block_size(),
            first_block: header.first_block(),
            blocks: header.blocks(),
            tokens: to_u32(header.tokens().len()),
            written_at: header.written_at(),
            age_s: now().saturating_sub(header.written_at()),
        }
    }

    /// Returns the formats of the planes, `K/V` for rows, and one name for equal ones.
    pub(super) fn formats(&self) -> String {
        let mut formats: Vec<_> = self.planes.iter().map(|plane| plane.format.as_str()).collect();
        formats.dedup();
        formats.join("/")
    }

    /// Returns the group's number.
    pub(super) fn group(&self) -> String {
        self.group.map_or_else(|| "?".to_owned(), |group| group.to_string())
    }

    pub(super) fn age(&self) -> Age {
        Age(Duration::from_secs(self.age_s))
    }
}

/// The header of a chunk.
#[derive(Debug)]
pub(super) enum Front {
    /// It can be read: the whole root, and the facts of its header.
    Read { root: String, facts: Box<Facts> },
    /// It cannot.
    Refused(String),
    /// The chunk is gone.
    Gone,
}

/// Reads the header of a chunk.
pub(super) fn read_front(store: &dyn ListChunks, chunk: &ListedChunk) -> anyhow::Result<Front> {
    let mut length = PAGE;
    loop {
        let mut bytes = vec![0; length];
        let read = match store.get_front(&chunk.address, &mut bytes, soon()) {
            Ok(Some(read)) => read,
            Ok(None) => return Ok(Front::Gone),
            Err(error) if error.kind() == StoreErrorKind::Corrupt => {
                return Ok(Front::Refused(unusable(chunk, &error)));
            }
            Err(error) => return Err(error.into()),
        };
        bytes.truncate(read);
        match read_header(&bytes) {
            Ok(header) => {
                let root = header.root().to_string();
                return Ok(Front::Read { root, facts: Box::new(Facts::of(&header)) });
            }
            // A header of several pages.
            Err(ChunkError::Length { expected, got })
                if got == to_u64(length) && expected <= chunk.bytes =>
            {
                let Ok(expected) = usize::try_from(expected) else {
                    return Ok(Front::Refused("a header larger than memory".to_owned()));
                };
                length = expected;
            }
            Err(error) => return Ok(Front::Refused(error.to_string())),
        }
    }
}

/// Says why a store refuses to return a chunk.
pub(super) fn unusable(chunk: &ListedChunk, error: &StoreError) -> String {
    if chunk.bytes == 0 { "empty".to_owned() } else { failure::chain(error) }
}

/// Returns the seconds since 1970.
fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Bytes of the shortest header.
const PAGE: usize = 4_096;
