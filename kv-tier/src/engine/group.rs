//! The chunks of one group: in host memory, and on their way.
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use kv_core::backend::{Backend, ChunkShape, HostPool};
use kv_core::num::{to_u32, to_u64, to_usize};
use kv_core::{GroupId, KvCache};

use super::host::HostIndex;
use super::links::Links;
use super::waiting::Waiting;
use super::{TierError, TierOptions};
use crate::chunk::ChunkSpec;
use crate::name::ChunkName;
use crate::record::Record;

/// The chunks of one group.
#[derive(Debug)]
pub(super) struct GroupTier<P: HostPool> {
    pub(super) spec: ChunkSpec,
    pub(super) pool: P,
    /// Chunks of the pool.
    pub(super) capacity: usize,
    pub(super) links: Links,
    pub(super) host: HostIndex<P::Chunk>,
    /// Chunks to copy from the device.
    pub(super) waiting: Waiting,
    pub(super) copying: Vec<Copying<P::Pending>>,
    pub(super) copying_max: usize,
    /// Chunks that are being copied, or completed after their copy.
    pub(super) encoding: HashMap<ChunkName, Arc<Record>>,
    pub(super) reading: HashMap<ChunkName, Reading>,
    /// Chunks that stores are not waited for any more, and may still give.
    pub(super) late: Vec<Arc<Record>>,
    /// Chunks that left and return to the pool when they are written.
    pub(super) leaving: HashMap<ChunkName, Leaving>,
}

/// The writes of a chunk that left host memory.
#[derive(Debug)]
pub(super) struct Leaving {
    pub(super) writes: usize,
    /// Time at which the first write is late; the chunk is not waited for after it.
    pub(super) until: Instant,
}

impl<P: HostPool> GroupTier<P> {
    /// Returns the number of chunks that are on their way from the device to host memory.
    pub(super) fn to_copy(&self) -> usize {
        self.waiting.len() + self.encoding.len()
    }

    /// Returns whether a chunk is in host memory, or on its way from the device.
    pub(super) fn has_or_copies(&self, name: &ChunkName) -> bool {
        self.host.contains(name) || self.encoding.contains_key(name)
    }

    /// Returns whether room in host memory comes without another chunk having to leave.
    pub(super) fn is_leaving(&self) -> bool {
        !self.leaving.is_empty() && {
            let now = Instant::now();
            self.leaving.values().any(|leaving| now < leaving.until)
        }
    }
}

/// A chunk that is being copied from the device.
#[derive(Debug)]
pub(super) struct Copying<P> {
    pub(super) pending: P,
    pub(super) record: Arc<Record>,
}

/// A chunk that is being read from a store.
#[derive(Debug)]
pub(super) struct Reading {
    pub(super) store: usize,
    pub(super) record: Arc<Record>,
    /// Time at which the read is late; the store is not waited for after it.
    pub(super) until: Instant,
    /// The prefetches that wait for it.
    pub(super) waiters: Vec<u64>,
}

/// Chunks of each group that host memory holds at least.
const CHUNKS_MIN: u32 = 2;

/// Divides host memory so that all groups have chunks for the same tokens.
pub(super) fn groups<B: Backend>(
    cache: &KvCache<B>,
    options: &TierOptions,
) -> Result<Vec<GroupTier<B::HostPool>>, TierError> {
    let ids = (0..=u8::MAX).map(GroupId).take(cache.state().spec().groups().len());
    let specs = ids.map(|id| {
        let spec = ChunkSpec::new(cache.state().spec(), id)?;
        options.chunk_blocks.map_or(Ok(spec), |blocks| spec.with_blocks(blocks))
    });
    let specs = specs.collect::<Result<Vec<_>, _>>()?;
    let chunk_tokens = |spec: &ChunkSpec| u64::from(spec.span(0).end.max(1));
    // Bytes of all groups for as many tokens as the longest chunk has; past `u64` they do not fit.
    let longest = specs.iter().map(chunk_tokens).max().unwrap_or(1);
    let per_round = specs.iter().fold(0_u64, |bytes, spec| {
        let chunks = longest.div_ceil(chunk_tokens(spec));
        bytes.saturating_add(chunks.saturating_mul(to_u64(spec.chunk_bytes())))
    });
    let rounds = options.host_bytes.checked_div(per_round).unwrap_or(0);
    if rounds < u64::from(CHUNKS_MIN) {
        let min = per_round.saturating_mul(CHUNKS_MIN.into());
        let bytes = options.host_bytes;
        return Err(TierError::HostTooSmall { bytes, chunks: CHUNKS_MIN, min });
    }
    let make = |spec: ChunkSpec| {
        let chunks = rounds * longest.div_ceil(chunk_tokens(&spec));
        // A pool numbers its chunks in 32 bits: no more are used.
        let chunks = u32::try_from(chunks).unwrap_or(u32::MAX);
        let storage = cache.storage(spec.group()).ok_or(TierError::NoReuse)?;
        let shape = ChunkShape { blocks: spec.blocks(), header_bytes: to_u32(spec.header_bytes()) };
        let pool = cache.backend().host_pool(storage.view(), shape, chunks)?;
        let of = cache.state().spec().groups().get(usize::from(spec.group().0));
        let num_blocks = of.map_or(0, kv_core::spec::GroupSpec::num_blocks);
        let copying_max = options.in_flight_bytes.checked_div(to_u64(spec.chunk_bytes()));
        let copying_max = copying_max.and_then(|max| usize::try_from(max).ok()).unwrap_or(1);
        Ok(GroupTier {
            spec,
            pool,
            capacity: to_usize(chunks),
            links: Links::new(num_blocks),
            host: HostIndex::default(),
            waiting: Waiting::default(),
            copying: Vec::new(),
            copying_max: copying_max.max(1),
            encoding: HashMap::new(),
            reading: HashMap::new(),
            late: Vec::new(),
            leaving: HashMap::new(),
        })
    };
    specs.into_iter().map(make).collect()
}
