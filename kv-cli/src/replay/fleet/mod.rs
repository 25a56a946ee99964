//! A fleet: a trace through several instances with a cache each, behind a router.
//!
//! An instance is a queue of prompts that are computed one after another, and a list of blocks that
//! evicts the least recently used one, as the cache under `lru` does (the tests compare both). The
//! cache itself keeps the tokens of every block: a thousand of them would not fit memory.
mod events;
mod index;
mod instance;
mod report;
mod route;
mod workload;

use std::time::Duration;

pub(super) use self::report::charts;
pub(crate) use self::route::Route;
use super::run::REPORT_EVERY;
use super::trace::Trace;
use crate::num::{to_u64, to_usize};
use crate::progress;
use events::EventQueue;
use instance::Instance;
use report::{Line, Report};
use route::{Prompt, Router};
use workload::{Block, Workload};

/// Upper limit of `--instances`.
pub(crate) const INSTANCES_MAX: u32 = 100_000;
/// Upper limit of the requests of all copies, which bounds the memory of their times.
const REQUESTS_MAX: u64 = 1 << 27;
/// Upper limit of the restarts of a replay.
const RESTARTS_MAX: u128 = 1 << 20;

/// The fleet of the command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct FleetOptions {
    pub(crate) instances: u32,
    /// Each is a run of its own.
    pub(crate) routes: Vec<Route>,
    /// Copies of the trace that run beside each other.
    pub(crate) copies: u32,
    /// How much later the router learns what an instance stored or evicted.
    pub(crate) event_lag: Duration,
    /// Time between two restarts of an instance.
    pub(crate) restart: Option<Duration>,
    /// Tokens per second that an instance computes.
    pub(crate) prefill_tokens_per_second: u32,
}

/// A fleet that takes too much memory or time.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub(super) enum FleetError {
    #[error("--copies {copies}: {requests} requests in all, at most {REQUESTS_MAX} are replayed")]
    Requests { copies: u32, requests: u64 },
    #[error(
        "--restart {}: {restarts} restarts in the time of the trace, at most {RESTARTS_MAX}",
        .every.as_secs_f64()
    )]
    Restarts { every: Duration, restarts: u128 },
}

/// Replays a trace of this name through a fleet, once for every route and capacity.
pub(super) fn run<'r>(
    name: String,
    trace: &'r Trace,
    options: &'r FleetOptions,
    capacities: &[u32],
) -> anyhow::Result<Report<'r>> {
    let workload = Workload::new(trace, options.copies)?;
    check(options, &workload)?;
    let runs = to_u64(capacities.len() * options.routes.len());
    let bar = progress::requests(workload.num_requests().saturating_mul(runs));
    let mut lines = Vec::new();
    for route in &options.routes {
        for capacity in capacities {
            let advance = |requests| bar.inc(requests);
            let outcome = replay(&workload, options, (*route, *capacity), advance);
            lines.push(Line::new((*route, *capacity), options, &workload, outcome));
        }
    }
    bar.finish_and_clear();
    Ok(Report { name, trace, options, lines })
}

/// Refuses what would take too much memory or time.
fn check(options: &FleetOptions, workload: &Workload<'_>) -> Result<(), FleetError> {
    let requests = workload.num_requests();
    if requests > REQUESTS_MAX {
        return Err(FleetError::Requests { copies: options.copies, requests });
    }
    if let Some(every) = options.restart {
        let (period, each) = (workload.period().as_nanos(), every.as_nanos());
        let restarts = period.checked_div(each).unwrap_or(u128::MAX);
        if restarts > RESTARTS_MAX {
            return Err(FleetError::Restarts { every, restarts });
        }
    }
    Ok(())
}

/// The result of one replay.
#[derive(Debug, Clone, Default, PartialEq)]
struct Outcome {
    /// Tokens of prompts that their instances had cached.
    hit_tokens: u64,
    evictions: u64,
    /// Requests larger than a cache, or without a token: no instance gets them.
    refused_requests: u64,
    restarts: u64,
    /// From the arrival of every other request to its first token.
    first_tokens: Vec<Duration>,
    /// Tokens that each instance computed.
    computed: Vec<u64>,
    /// Messages that the router read.
    events: u64,
    event_bytes: u64,
}

/// Replays all requests. `advance` is called after every few requests.
fn replay(
    workload: &Workload<'_>,
    options: &FleetOptions,
    (route, capacity): (Route, u32),
    advance: impl Fn(u64),
) -> Outcome {
    let mut fleet = Fleet::new(workload, options, (route, capacity));
    let mut since = 0;
    for arrival in workload.arrivals() {
        fleet.restart_until(arrival.at);
        fleet.read_events(arrival.at);
        fleet.request(arrival);
        since += 1;
        if since == REPORT_EVERY {
            advance(to_u64(std::mem::take(&mut since)));
        }
    }
    advance(to_u64(since));
    fleet.outcome()
}

/// The instances, and the router in front of them.
struct Fleet<'w> {
    workload: &'w Workload<'w>,
    instances: Vec<Instance>,
    /// When each instance has computed all of its prompts.
    free_at: Vec<Duration>,
    router: Router,
    /// Events that the router has not read yet; `None` for a route that reads none.
    events: Option<EventQueue>,
    capacity: u32,
    prefill_tokens_per_second: u32,
    restart: Option<Duration>,
    /// Blocks of the request that runs.
    blocks: Vec<Block>,
    outcome: Outcome,
}

impl<'w> Fleet<'w> {
    fn new(
        workload: &'w Workload<'w>,
        options: &FleetOptions,
        (route, capacity): (Route, u32),
    ) -> Self {
        let count = to_usize(options.instances);
        let block_size = workload.block_size();
        let events = || EventQueue::new(count, options.event_lag, block_size);
        Self {
            workload,
            instances: (0..count).map(|_| Instance::new(to_usize(capacity))).collect(),
            free_at: vec![Duration::ZERO; count],
            router: Router::new(route, count),
            events: route.reads_events().then(events),
            capacity,
            prefill_tokens_per_second: options.prefill_tokens_per_second,
            restart: options.restart,
            blocks: Vec::new(),
            outcome: Outcome { computed: vec![0; count], ..Outcome::default() },
        }
    }

    /// Empties the caches of the instances that restart until then. A restart takes no time, and
    /// prompts in the queue go on with what they have found.
    fn restart_until(&mut self, now: Duration) {
        let Some(every) = self.restart else { return };
        loop {
            let number = u32::try_from(self.outcome.restarts).unwrap_or(u32::MAX);
            let at = every * number.saturating_add(1);
            if at > now {
                return;
            }
            let instance = to_usize(number) % self.instances.len();
            let lost = self.instances[instance].restart();
            if let Some(events) = &mut self.events {
                events.clear(instance, at, lost);
            }
            self.outcome.restarts += 1;
        }
    }

    /// Lets the router read what has reached it.
    fn read_events(&mut self, now: Duration) {
        let Some(events) = &mut self.events else { return };
        while let Some((instance, event)) = events.next_until(now) {
            self.router.read(instance, &event);
        }
    }

    /// Sends a request to an instance, which computes it after those before it.
    fn request(&mut self, arrival: workload::Arrival) {
        let (tokens, num_blocks) = self.workload.size(arrival);
        if tokens == 0 || num_blocks > self.capacity {
            self.outcome.refused_requests += 1;
            return;
        }
        self.workload.blocks(arrival, &mut self.blocks);
        let prompt = Prompt {
            at: arrival.at,
            tokens,
            blocks: &self.blocks,
            block_size: self.workload.block_size(),
            tokens_per_second: self.prefill_tokens_per_second,
        };
        let chosen = self.router.choose(&prompt, &self.free_at);
        let mut evicted = Vec::new();
        let cached = self.instances[chosen].serve(&self.blocks, &mut evicted);
        let hit = prompt.hit_tokens(cached);
        let begin = self.free_at[chosen].max(arrival.at);
        let end = begin + prompt.prefill_time(hit);
        self.free_at[chosen] = end;
        self.outcome.hit_tokens += u64::from(hit);
        self.outcome.evictions += to_u64(evicted.len());
        self.outcome.computed[chosen] += u64::from(tokens - hit);
        let took = end.checked_sub(arrival.at);
        assert!(took.is_some(), "a prompt is computed after its arrival");
        self.outcome.first_tokens.extend(took);
        if let Some(events) = &mut self.events {
            let stored = self.blocks.get(cached..).unwrap_or_default().to_vec();
            events.publish(chosen, end, stored, evicted);
        }
    }

    fn outcome(mut self) -> Outcome {
        if let Some(events) = self.events {
            (self.outcome.events, self.outcome.event_bytes) = events.into_totals();
        }
        self.outcome
    }
}

#[cfg(test)]
mod tests;
