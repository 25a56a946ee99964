//! Arguments of `kv replay` for a fleet, and their values.
use std::time::Duration;

use clap::Args;
use kv::eviction::Eviction;

use super::{at_least_1, finite};
use crate::replay::{FleetOptions, INSTANCES_MAX, Policy, Route};

/// How late events reach a router unless given.
const EVENT_LAG: Duration = Duration::from_millis(100);
/// Tokens per second that an instance computes unless given.
const PREFILL: u32 = 22_000;
/// Upper limit of times on the command line: 30 years.
const SECONDS_MAX: Duration = Duration::from_secs(1_000_000_000);

/// Arguments of `kv replay` for several instances.
#[derive(Debug, Clone, Args)]
pub(crate) struct ReplayFleetArgs {
    /// Simulate a fleet of N instances of --capacity-blocks each, at most 100,000
    #[arg(long, value_name = "N", value_parser = at_least_1, conflicts_with_all = [
        "hints", "tier", "write", "bandwidth", "latency", "bytes_per_token", "state_bytes",
        "snapshots", "state_grid",
    ])]
    pub(crate) instances: Option<u32>,

    /// How the router chooses an instance: round-robin, least (the least work queued), hash
    /// (consistent hashing of a prompt's second block) or kv (the fewest tokens to compute and
    /// waiting, by the events of the instances); may be repeated. Default: all four
    #[arg(long, value_name = "NAME", requires = "instances")]
    pub(crate) route: Vec<Route>,

    /// Copies of the trace that run at a time, with users of their own and shifted evenly; default:
    /// 1
    #[arg(long, value_name = "K", value_parser = at_least_1, requires = "instances")]
    pub(crate) copies: Option<u32>,

    /// How much later the router of kv learns what an instance stored or evicted; default: 0.1
    #[arg(long, value_name = "SECONDS", value_parser = seconds, requires = "instances")]
    pub(crate) event_lag: Option<Duration>,

    /// Restart an instance with an empty cache, each in its turn, whenever this much time of the
    /// trace has passed
    #[arg(long, value_name = "SECONDS", value_parser = interval, requires = "instances")]
    pub(crate) restart: Option<Duration>,
}

/// Options that a fleet does not have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum FleetArgsError {
    #[error("--policy {policy}: the caches of a fleet (--instances) evict by lru")]
    Policy { policy: Policy },
    #[error("--instances {instances}: a fleet has at most {INSTANCES_MAX}")]
    Instances { instances: u32 },
    #[error("--route {route} is given twice")]
    Twice { route: Route },
}

impl ReplayFleetArgs {
    /// Returns the fleet; `None` without one.
    pub(super) fn options(
        &self,
        prefill: Option<u32>,
        policies: &[Policy],
    ) -> Result<Option<FleetOptions>, FleetArgsError> {
        let Some(instances) = self.instances else { return Ok(None) };
        if instances > INSTANCES_MAX {
            return Err(FleetArgsError::Instances { instances });
        }
        let is_other = |policy: &&Policy| **policy != Policy::Real(Eviction::Lru);
        if let Some(policy) = policies.iter().find(is_other) {
            return Err(FleetArgsError::Policy { policy: *policy });
        }
        for (index, route) in self.route.iter().enumerate() {
            if self.route.iter().take(index).any(|other| other == route) {
                return Err(FleetArgsError::Twice { route: *route });
            }
        }
        let routes = if self.route.is_empty() { &Route::ALL[..] } else { &self.route };
        Ok(Some(FleetOptions {
            instances,
            routes: routes.to_vec(),
            copies: self.copies.unwrap_or(1),
            event_lag: self.event_lag.unwrap_or(EVENT_LAG),
            restart: self.restart,
            prefill_tokens_per_second: prefill.unwrap_or(PREFILL),
        }))
    }
}

/// Parses a time from 0.
fn seconds(text: &str) -> Result<Duration, String> {
    let time = Duration::try_from_secs_f64(finite(text)?).ok();
    let time = time.filter(|time| *time <= SECONDS_MAX);
    time.ok_or_else(|| format!("a number from 0 to {} is needed", SECONDS_MAX.as_secs()))
}

/// Parses a time above 0.
fn interval(text: &str) -> Result<Duration, String> {
    match seconds(text)? {
        Duration::ZERO => Err("a number above 0 is needed".to_owned()),
        time => Ok(time),
    }
}
