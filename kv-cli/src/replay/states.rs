//! Replays of a model with recurrent states: the cache's rows are worth something only up to a
//! length at which it has a snapshot of the states.
//!
//! The cache is driven directly: every prompt is computed in steps that end where the cache wants a
//! snapshot. Memory is divided between blocks of rows and snapshots.
use std::num::NonZeroU32;
use std::sync::Arc;
use std::time::Instant;

use anyhow::Context;
use kv::backend::NullBackend;
use kv::block::BlockPool;
use kv::eviction::Return;
use kv::spec::StateFormat;
use kv::{CacheError, CacheSpec, DType, GroupId, KvCache, SequenceId, StartOptions, StepInput};
use serde::Serialize;

use super::hints::Hints;
use super::policy::Policy;
use super::run::{Outcome, REPORT_EVERY, prompt};
use super::trace::{Request, Trace};
use crate::num::{to_u32, to_usize};
use crate::snapshot_pool::SnapshotPool;

/// States of the command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct StateOptions {
    pub(crate) bytes_per_token: u32,
    /// Bytes of a snapshot.
    pub(crate) snapshot_bytes: u32,
    /// Sizes of the pool of snapshots, each a run of its own.
    pub(crate) pools: Vec<SnapshotPool>,
    /// Tokens of which the length of every snapshot is a multiple; `None` for those that the trace
    /// names at once.
    pub(crate) grid: Option<u32>,
}

impl StateOptions {
    /// The shares of the memory that are tried unless given.
    pub(crate) const SHARES: [SnapshotPool; 4] = [
        SnapshotPool::Percent(10),
        SnapshotPool::Percent(15),
        SnapshotPool::Percent(20),
        SnapshotPool::Percent(30),
    ];
}

/// A memory that holds no block beside its snapshots.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "--snapshots {pool}: {snapshots} snapshots of {snapshot_bytes} bytes leave no block of \
     {block_bytes} in the {memory} bytes of {capacity} blocks"
)]
pub(super) struct NoBlockLeft {
    pool: SnapshotPool,
    snapshots: u64,
    snapshot_bytes: u32,
    block_bytes: u64,
    memory: u128,
    capacity: u32,
}

/// The sizes of the two pools of a cache; `None` without limits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Split {
    Unlimited,
    Of { pool: SnapshotPool, blocks: u32, snapshots: u32 },
}

impl Split {
    /// Divides the memory of `capacity` blocks.
    pub(super) fn new(
        options: &StateOptions,
        pool: SnapshotPool,
        capacity: u32,
        block_size: NonZeroU32,
    ) -> Result<Self, NoBlockLeft> {
        let snapshot_bytes = options.snapshot_bytes;
        let block_bytes = u64::from(options.bytes_per_token) * u64::from(block_size.get());
        let (of_block, of_one) = (u128::from(block_bytes), u128::from(snapshot_bytes));
        let memory = u128::from(capacity) * of_block;
        let snapshots = match pool {
            SnapshotPool::Percent(share) => {
                let bytes = memory * u128::from(share) / 100;
                // More count as that many.
                let count = bytes.checked_div(of_one).unwrap_or(0);
                u32::try_from(count).unwrap_or(u32::MAX)
            }
            SnapshotPool::Count(count) => count,
        };
        let rest = memory.checked_sub(u128::from(snapshots) * of_one);
        let blocks = rest.and_then(|rest| rest.checked_div(of_block));
        let blocks = blocks.and_then(|blocks| u32::try_from(blocks).ok());
        let blocks = blocks.filter(|blocks| *blocks > 0);
        let snapshots_asked = snapshots.into();
        let blocks = blocks.ok_or(NoBlockLeft {
            pool,
            snapshots: snapshots_asked,
            snapshot_bytes,
            block_bytes,
            memory,
            capacity,
        })?;
        Ok(Self::Of { pool, blocks, snapshots })
    }
}

/// The pools of a replay, and what became of the snapshots.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(super) struct StateLine {
    /// The requested size of the pool of snapshots: "15%", a number, or "unlimited".
    pub(super) share: String,
    /// Blocks of rows; without a limit those that were used.
    pub(super) row_blocks: u32,
    /// The most snapshots at once that the pool holds; without a limit those that were taken.
    pub(super) snapshots: u32,
    /// Most snapshots at once.
    pub(super) peak_snapshots: u32,
    pub(super) snapshot_evictions: u64,
}

/// The layer with a state; the one before has rows.
const STATES: u16 = 1;
/// The pools of both, and of the snapshots.
const BLOCKS: GroupId = GroupId(0);
const SNAPSHOTS: GroupId = GroupId(2);
/// The sequence of the request that runs.
const SEQUENCE: SequenceId = SequenceId(0);

/// A cache with states, and what its requests came to.
struct Replay<'t> {
    trace: &'t Trace,
    cache: KvCache<NullBackend>,
    numbers: Vec<u32>,
    hit_tokens: u64,
    refused_requests: u64,
    peak_blocks: u32,
    peak_snapshots: u32,
}

/// Replays all requests over a cache with states. `advance` is called after every few requests.
pub(super) fn replay(
    trace: &Arc<Trace>,
    policy: Policy,
    (split, grid, hints): (Split, u32, &Hints),
    advance: impl Fn(usize),
) -> anyhow::Result<Outcome> {
    let mut replay = Replay::new(trace, policy, (split, grid)).context("the replayed cache")?;
    let start = Instant::now();
    for (number, requests) in trace.requests().chunks(REPORT_EVERY).enumerate() {
        for (index, request) in requests.iter().enumerate() {
            replay.request(request, hints.of(number * REPORT_EVERY + index))?;
        }
        advance(requests.len());
    }
    let elapsed = start.elapsed();
    Ok(Outcome { elapsed, ..replay.outcome(split) })
}

impl<'t> Replay<'t> {
    fn new(trace: &'t Trace, policy: Policy, (split, grid): (Split, u32)) -> anyhow::Result<Self> {
        let all = trace.contents_max().saturating_add(trace.longest_blocks()).max(1);
        // A request has stops behind its last token but one and where its rows were cached, and
        // keeps the state at its end.
        let all_snapshots = to_u32(trace.requests().len()).saturating_mul(3);
        let (blocks, snapshots) = match split {
            Split::Unlimited => (all, all_snapshots),
            Split::Of { blocks, snapshots, .. } => (blocks.min(all), snapshots.min(all_snapshots)),
        };
        let spec = CacheSpec::builder().layers(STATES + 1).kv_heads(1).head_dim(1);
        let spec = spec.paged(trace.block_size.get(), blocks).eviction(policy.eviction());
        // A sequence reads one slot, writes another, and may begin with a copy of a snapshot.
        let spec = spec.states([STATES], |states| {
            let states = states.part([1], DType::F32).slots(3).grid(grid);
            states.snapshots(snapshots, StateFormat::F16)
        });
        let cache = KvCache::new(NullBackend::new(), spec.build()?)?;
        Ok(Self {
            trace,
            cache,
            numbers: Vec::new(),
            hit_tokens: 0,
            refused_requests: 0,
            peak_blocks: 0,
            peak_snapshots: 0,
        })
    }

    /// Runs one request to its end.
    fn request(&mut self, request: &Request, hint: Option<Return>) -> anyhow::Result<()> {
        let tokens = request.tokens;
        if tokens == 0 || tokens > self.cache.state().spec().max_seq_len() {
            self.refused_requests += 1;
            return Ok(());
        }
        let prompt = prompt(self.trace, request, &mut self.numbers);
        let mut len = self.start(&prompt, request.num_blocks)?;
        self.hit_tokens += u64::from(len);
        while len < tokens {
            let end = self.cache.state().next_stop(SEQUENCE).unwrap_or(tokens).min(tokens);
            let new = prompt.get(to_usize(len)..to_usize(end)).unwrap_or_default();
            let mut step = self.cache.begin_step(&[StepInput::tokens(SEQUENCE, new)])?;
            step.mark_written();
            step.mark_state_written(STATES)?;
            step.commit()?;
            len = end;
        }
        self.cache.hint(SEQUENCE, hint)?;
        self.cache.release(SEQUENCE)?;
        let cached = |group| self.cache.state().pool(group).map_or(0, BlockPool::num_idle);
        self.peak_blocks = self.peak_blocks.max(cached(BLOCKS));
        self.peak_snapshots = self.peak_snapshots.max(cached(SNAPSHOTS));
        Ok(())
    }

    /// Starts a sequence with all blocks of its prompt, and returns the tokens that it reuses. A
    /// copy of a shared block may be one too many: then it reuses fewer.
    fn start(&mut self, prompt: &[u32], num_blocks: u32) -> Result<u32, CacheError> {
        let reserve = to_u32(prompt.len());
        let mut backoff = 0;
        loop {
            let options = StartOptions::default().with_reserve(reserve);
            match self.cache.start(SEQUENCE, prompt, options.with_backoff_blocks(backoff)) {
                Err(CacheError::Exhausted(_)) if backoff < num_blocks => backoff += 1,
                reused => return reused,
            }
        }
    }

    fn outcome(self, split: Split) -> Outcome {
        let state = self.cache.state();
        let pool = state.pool(SNAPSHOTS);
        let snapshot_evictions = pool.map_or(0, |pool| pool.stats().evictions);
        let (peak_blocks, peak_snapshots) = (self.peak_blocks, self.peak_snapshots);
        let (share, row_blocks, snapshots) = match split {
            Split::Unlimited => ("unlimited".to_owned(), peak_blocks, peak_snapshots),
            Split::Of { pool, blocks, snapshots } => (pool.to_string(), blocks, snapshots),
        };
        Outcome {
            hit_tokens: self.hit_tokens,
            evictions: state.stats().evictions,
            peak_blocks,
            refused_requests: self.refused_requests,
            elapsed: std::time::Duration::ZERO,
            tiers: None,
            states: Some(StateLine {
                share,
                row_blocks,
                snapshots,
                peak_snapshots,
                snapshot_evictions,
            }),
        }
    }
}
