//! The chunks of one group: in host memory, and on their way.
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Instant;

use kv_core::backend::{Backend, ChunkShape, HostPool};
use kv_core::eviction::{Clock, SystemClock};
use kv_core::invariant::Invariant;
use kv_core::num::{to_u32, to_u64, to_usize};
use kv_core::spec::GroupSpec;
use kv_core::{CacheSpec, GroupId, KvCache};

use super::host::HostIndex;
use super::links::Links;
use super::waiting::Waiting;
use super::{GROUP, TierError, TierOptions};
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

/// Returns the place of a group in the list of those with chunks; `None` for one whose blocks have
/// no bytes.
pub(super) fn place_of<P: HostPool>(groups: &[GroupTier<P>], group: GroupId) -> Option<usize> {
    groups.iter().position(|of| of.spec.group() == group)
}

/// Returns the group of a chunk.
pub(super) fn of<P: HostPool>(groups: &[GroupTier<P>], group: GroupId) -> &GroupTier<P> {
    groups.iter().find(|of| of.spec.group() == group).invariant(GROUP)
}

/// Returns the group of a chunk.
pub(super) fn of_mut<P: HostPool>(
    groups: &mut [GroupTier<P>],
    group: GroupId,
) -> &mut GroupTier<P> {
    groups.iter_mut().find(|of| of.spec.group() == group).invariant(GROUP)
}

/// Chunks of each group that host memory holds at least.
const CHUNKS_MIN: u32 = 2;

/// Divides host memory so that all groups have chunks for the same tokens.
pub(super) fn groups<B: Backend>(
    cache: &KvCache<B>,
    options: &TierOptions,
) -> Result<Vec<GroupTier<B::HostPool>>, TierError> {
    let specs = ChunkSpec::groups_of(cache.state().spec()).into_iter().map(|id| {
        let spec = ChunkSpec::new(cache.state().spec(), id)?;
        // A chunk of states has one snapshot.
        let blocks = options.chunk_blocks.filter(|_| !spec.is_of_states());
        blocks.map_or(Ok(spec), |blocks| spec.with_blocks(blocks))
    });
    let specs = specs.collect::<Result<Vec<_>, _>>()?;
    let chunks = divide(&specs, (options.host_bytes, cache.state().spec()))?;
    let clock: Arc<dyn Clock> = Arc::new(SystemClock::new());
    let make = |(spec, chunks): (ChunkSpec, u32)| {
        let storage = cache.storage(spec.group()).ok_or(TierError::NoReuse)?;
        let shape = ChunkShape { blocks: spec.blocks(), header_bytes: to_u32(spec.header_bytes()) };
        let pool = cache.backend().host_pool(storage.view(), shape, chunks)?;
        let of = cache.state().spec().groups().get(usize::from(spec.group().0));
        // Snapshots have no links.
        let num_blocks = of.map_or(0, GroupSpec::num_blocks);
        let copying_max = options.in_flight_bytes.checked_div(to_u64(spec.chunk_bytes()));
        let copying_max = copying_max.and_then(|max| usize::try_from(max).ok()).unwrap_or(1);
        // As on the device.
        let eviction = cache.state().spec().eviction();
        let eviction = if spec.is_of_states() { eviction.of_snapshots() } else { eviction };
        Ok(GroupTier {
            spec,
            pool,
            capacity: to_usize(chunks),
            links: Links::new(num_blocks),
            host: HostIndex::new(chunks, eviction.policy(chunks, &clock)),
            waiting: Waiting::default(),
            copying: Vec::new(),
            copying_max: copying_max.max(1),
            encoding: HashMap::new(),
            reading: HashMap::new(),
            late: Vec::new(),
            leaving: HashMap::new(),
        })
    };
    specs.into_iter().zip(chunks).map(make).collect()
}

/// Returns the chunks of each group in host memory of some bytes: for the same tokens in all groups
/// of rows, and snapshots in the proportion to tokens that they have on the device, up to half of
/// the bytes.
fn divide(specs: &[ChunkSpec], (bytes, spec): (u64, &CacheSpec)) -> Result<Vec<u32>, TierError> {
    let chunk_tokens = |spec: &ChunkSpec| u64::from(spec.span(0).end.max(1));
    let rows = || specs.iter().filter(|spec| !spec.is_of_states());
    let longest = rows().map(chunk_tokens).max().unwrap_or(1);
    let tokens = |of: &GroupSpec| u64::from(of.num_blocks()) * u64::from(of.block_size());
    let on_device = spec.groups().iter().map(tokens).min().unwrap_or(0);
    let of_group = |group: GroupId| {
        let mut states = spec.snapshot_groups().zip(spec.states());
        let (_, of) = states.find(|(id, _)| *id == group)?;
        of.snapshots().map(|of| u64::from(of.count()))
    };
    let least = u64::from(CHUNKS_MIN);
    let rows_min = rows().fold(0_u64, |sum, spec| {
        let chunks = least * longest.div_ceil(chunk_tokens(spec));
        sum.saturating_add(chunks.saturating_mul(to_u64(spec.chunk_bytes())))
    });
    let state_groups = to_u64(specs.len() - rows().count()).max(1);
    let for_states = bytes.div_euclid(2).min(bytes.saturating_sub(rows_min));
    // Chunks of a group in some rounds of as many tokens as the longest chunk has.
    let chunks_of = |spec: &ChunkSpec, rounds: u64| {
        if !spec.is_of_states() {
            return rounds.saturating_mul(longest.div_ceil(chunk_tokens(spec)));
        }
        let tokens = rounds.saturating_mul(longest);
        let count = of_group(spec.group()).unwrap_or(1);
        let chunks = tokens.saturating_mul(count).div_euclid(on_device.max(1));
        let most = for_states.div_euclid(state_groups).div_euclid(to_u64(spec.chunk_bytes()));
        chunks.min(most).max(CHUNKS_MIN.into())
    };
    // Past `u64` they do not fit.
    let bytes_of = |rounds: u64| {
        specs.iter().fold(0_u64, |sum, spec| {
            let chunks = chunks_of(spec, rounds);
            sum.saturating_add(chunks.saturating_mul(to_u64(spec.chunk_bytes())))
        })
    };
    if bytes_of(least) > bytes {
        return Err(TierError::HostTooSmall { bytes, chunks: CHUNKS_MIN, min: bytes_of(least) });
    }
    let (mut fits, mut too_many) = (least, bytes.saturating_add(1));
    while too_many - fits > 1 {
        let rounds = fits.midpoint(too_many);
        if bytes_of(rounds) > bytes { too_many = rounds } else { fits = rounds }
    }
    // A pool numbers its chunks in 32 bits: no more are used.
    let chunks = specs.iter().map(|spec| chunks_of(spec, fits));
    Ok(chunks.map(|chunks| u32::try_from(chunks).unwrap_or(u32::MAX)).collect())
}
