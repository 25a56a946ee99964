//! Runs a trace through an engine: the scheduler, the cache and the tiers that `kv generate` has,
//! over a device that neither stores nor computes.
//!
//! Requests run one at a time, in the file's order, each at its arrival by the trace's clock or
//! when the one before has ended, so that the outcome is always the same.
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use kv::backend::NullBackend;
use kv::engine::{Chosen, Engine, Limits, Request as Prompt, RequestError};
use kv::eviction::{Clock, EvictionPolicy, ManualClock};
use kv::{CacheSpec, GroupId, KvCache, Stats};

use super::hints::Hints;
use super::min::Min;
use super::policy::{Case, Policy};
use super::states::StateLine;
use super::tiers::{TierOptions, TierReplay, TierReport};
use super::trace::{INPUT_TOKENS_MAX, Request, Trace};
use crate::num::{to_u32, to_usize};

/// Requests between two progress reports.
pub(super) const REPORT_EVERY: usize = 256;

/// The result of a replay.
#[derive(Debug, Clone)]
pub(super) struct Outcome {
    /// Input tokens that the device had cached.
    pub(super) hit_tokens: u64,
    /// Evicted blocks.
    pub(super) evictions: u64,
    /// Most cached blocks at once.
    pub(super) peak_blocks: u32,
    /// Requests that the engine refused: larger than the cache, or without a token.
    pub(super) refused_requests: u64,
    /// Time of the whole replay.
    pub(super) elapsed: Duration,
    pub(super) tiers: Option<TierReport>,
    pub(super) states: Option<StateLine>,
}

/// Tiers of the command line, and the blocks of each.
pub(super) type Tiers<'o> = (&'o TierOptions, &'o [u32]);

/// The index of the request that runs, for a policy that knows the trace.
#[derive(Debug, Clone, Default)]
pub(super) struct Position(Arc<AtomicUsize>);

impl Position {
    pub(super) fn get(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }
    fn set(&self, index: usize) {
        self.0.store(index, Ordering::Relaxed);
    }
}

/// An engine, and the time of the trace.
struct Replay<'t> {
    trace: &'t Trace,
    engine: Engine<NullBackend>,
    clock: Arc<ManualClock>,
    position: Position,
    tiers: Option<TierReplay<'t>>,
    hints: &'t Hints,
    /// Numbers of the blocks of the current request.
    numbers: Vec<u32>,
    refused_requests: u64,
    peak_blocks: u32,
}

/// Replays all requests. `advance` is called after every few requests.
pub(super) fn replay(
    trace: &Arc<Trace>,
    case: Case,
    with: (Option<Tiers<'_>>, &Hints),
    advance: impl Fn(usize),
) -> anyhow::Result<Outcome> {
    let own = |num_blocks, position: &Position| -> Option<Box<dyn EvictionPolicy>> {
        if case.0 != Policy::Min {
            return None;
        }
        Some(Box::new(Min::new(Arc::clone(trace), num_blocks, position.clone())))
    };
    replay_by(trace, case, with, own, advance)
}

/// Does what [`replay`] does with the policy that `own` makes, if any, in place of the cache's.
pub(super) fn replay_by(
    trace: &Arc<Trace>,
    case: Case,
    with: (Option<Tiers<'_>>, &Hints),
    own: impl FnOnce(u32, &Position) -> Option<Box<dyn EvictionPolicy>>,
    advance: impl Fn(usize),
) -> anyhow::Result<Outcome> {
    let mut replay = Replay::new(trace, case, with, own).context("the replayed cache")?;
    let start = Instant::now();
    for (number, requests) in trace.requests().chunks(REPORT_EVERY).enumerate() {
        for (index, request) in requests.iter().enumerate() {
            replay.request(number * REPORT_EVERY + index, request)?;
        }
        advance(requests.len());
    }
    Ok(replay.outcome(start.elapsed()))
}

impl<'t> Replay<'t> {
    fn new(
        trace: &'t Arc<Trace>,
        (policy, capacity): Case,
        (tiers, hints): (Option<Tiers<'t>>, &'t Hints),
        own: impl FnOnce(u32, &Position) -> Option<Box<dyn EvictionPolicy>>,
    ) -> anyhow::Result<Self> {
        // Everything that is ever cached, and what one request takes before its blocks turn out to
        // be known: more blocks would stay empty.
        // A trace may have any.
        let all = trace.contents_max().saturating_add(trace.longest_blocks()).max(1);
        let num_blocks = capacity.unwrap_or(all).min(all);
        let spec = CacheSpec::builder().layers(1).kv_heads(1).head_dim(1);
        let spec = spec.paged(trace.block_size.get(), num_blocks).eviction(policy.eviction());
        let changes = if tiers.is_some() { 2 * to_usize(num_blocks) } else { 0 };
        let mut cache = KvCache::new(NullBackend::new(), spec.changes(changes).build()?)?;
        let position = Position::default();
        if let Some(own) = own(num_blocks, &position) {
            assert!(cache.set_policy(GroupId(0), own), "nothing is cached yet");
        }
        let limits = Limits { max_step_tokens: INPUT_TOKENS_MAX, ..Limits::new(u32::MAX) };
        let (engine, tiers) = match tiers {
            None => (Engine::new(cache, limits), None),
            Some((options, capacities)) => {
                let (tiers, cache) = TierReplay::open(options, capacities, trace, cache)?;
                (Engine::tiered(cache, limits), Some(tiers))
            }
        };
        let clock = Arc::new(ManualClock::new());
        Ok(Self {
            trace,
            engine: engine.with_clock(Arc::<ManualClock>::clone(&clock)),
            clock,
            position,
            tiers,
            hints,
            numbers: Vec::new(),
            refused_requests: 0,
            peak_blocks: 0,
        })
    }

    /// Runs one request to its end, and lets the tiers end what they have to do after it.
    fn request(&mut self, index: usize, request: &Request) -> anyhow::Result<()> {
        self.position.set(index);
        let late = self.trace.arrives(index).saturating_sub(self.clock.now());
        self.clock.advance(late);
        let prompt = prompt(self.trace, request, &mut self.numbers);
        let hint = self.hints.of(index);
        match self.engine.submit(Prompt { hint, ..Prompt::new(prompt, 1) }) {
            Ok(_) => {}
            Err(RequestError::DoesNotFit { .. } | RequestError::EmptyPrompt { .. }) => {
                self.refused_requests += 1;
                return Ok(());
            }
            Err(error) => return Err(error.into()),
        }
        let before = self.stats();
        while self.engine.has_work() {
            self.step()?;
        }
        if self.tiers.is_some() {
            let deadline = Instant::now() + DRAIN_MAX;
            ensure!(self.engine.drain_tiers(deadline)?, "the tiers still work after an hour");
        }
        let after = self.stats();
        if let Some(tiers) = &mut self.tiers {
            tiers.note_request(&before, &after);
        }
        let cached = self.engine.cache().state().usage().blocks_cached;
        self.peak_blocks = self.peak_blocks.max(cached);
        Ok(())
    }

    /// Runs a step, which takes the time of its prefill.
    fn step(&mut self) -> anyhow::Result<()> {
        let Some(batch) = self.engine.begin_step()? else { return Ok(()) };
        let tokens = to_u32(batch.tokens.len());
        let ends = batch.chunks.iter().filter(|chunk| chunk.logits > 0);
        let chosen = ends.map(|chunk| Chosen { sequence: chunk.sequence, tokens: vec![0] });
        let chosen: Vec<_> = chosen.collect();
        let time = self.tiers.as_ref().map_or(Duration::ZERO, |tiers| tiers.prefill_time(tokens));
        self.clock.advance(time);
        self.engine.with_step(|step, _| step.mark_written())?;
        self.engine.end_step(chosen)?;
        Ok(())
    }

    fn stats(&self) -> Stats {
        self.engine.cache().state().stats()
    }

    fn outcome(self, elapsed: Duration) -> Outcome {
        let stats = self.stats();
        let from_tiers = stats.host_hit_tokens + stats.disk_hit_tokens + stats.store_hit_tokens;
        let hit_tokens = stats.hit_tokens - from_tiers;
        let of_tiers = self.engine.tiers();
        let tiers = self.tiers.zip(of_tiers);
        Outcome {
            hit_tokens,
            evictions: stats.evictions,
            peak_blocks: self.peak_blocks,
            refused_requests: self.refused_requests,
            elapsed,
            tiers: tiers.map(|(tiers, stats)| tiers.report(self.trace, hit_tokens, &stats)),
            states: None,
        }
    }
}

/// How long stores in memory may take for the chunks of one request: far too long.
const DRAIN_MAX: Duration = Duration::from_hours(1);

/// Returns the input of a request. Every token is the number of its block, so that inputs share the
/// tokens of equal blocks and no others. `numbers` is for the numbers of its blocks.
pub(super) fn prompt(trace: &Trace, request: &Request, numbers: &mut Vec<u32>) -> Vec<u32> {
    trace.blocks(request, numbers);
    let (tokens, block_size) = (to_usize(request.tokens), to_usize(trace.block_size.get()));
    let mut prompt = Vec::with_capacity(tokens);
    for number in numbers.iter() {
        prompt.resize((prompt.len() + block_size).min(tokens), *number);
    }
    prompt
}
