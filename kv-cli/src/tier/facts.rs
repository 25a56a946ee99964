//! The fields of a chunk's header, and the age of the chunk.
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use kv::tier::chunk::read_header;
use kv::tier::{ChunkError, Header, ListChunks, ListedChunk, StoreError, StoreErrorKind};
use serde::Serialize;

use super::{Age, soon};
use crate::failure;
use crate::num::{to_u32, to_u64};

/// The fields of a header.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct Facts {
    pub(super) model: String,
    pub(super) format_k: String,
    pub(super) format_v: String,
    pub(super) group: Option<u8>,
    pub(super) layers: u32,
    pub(super) kv_heads: u32,
    pub(super) head_dim_k: u32,
    pub(super) head_dim_v: u32,
    pub(super) block_size: u32,
    pub(super) first_block: u32,
    pub(super) blocks: u32,
    pub(super) tokens: u32,
    /// Seconds since 1970, by the writer's clock.
    pub(super) written_at: u64,
    /// Seconds since then.
    pub(super) age_s: u64,
}

impl Facts {
    fn of(header: &Header<'_>) -> Self {
        let [format_k, format_v] = header.formats().map(str::to_owned);
        let [head_dim_k, head_dim_v] = header.head_dims();
        Self {
            model: header.model().to_string(),
            format_k,
            format_v,
            group: header.group().map(|group| group.0),
            layers: header.num_layers(),
            kv_heads: header.num_kv_heads(),
            head_dim_k,
            head_dim_v,
            block_size: header.block_size(),
            first_block: header.first_block(),
            blocks: header.blocks(),
            tokens: to_u32(header.tokens().len()),
            written_at: header.written_at(),
            age_s: now().saturating_sub(header.written_at()),
        }
    }

    /// Returns the formats as `K` or `K/V`.
    pub(super) fn formats(&self) -> String {
        let Self { format_k, format_v, .. } = self;
        if format_k == format_v { format_k.clone() } else { format!("{format_k}/{format_v}") }
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
