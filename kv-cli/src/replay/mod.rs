//! `kv replay`: runs a request trace through an engine, without a model.
//!
//! The scheduler, the cache, its policies and its tiers are those that run a model, over a device
//! without memory. A trace's ids stand for tokens: each names a block and everything before it.
mod csv;
mod fleet;
mod hints;
mod json;
mod min;
mod packed;
mod policy;
mod report;
mod run;
mod source;
mod states;
mod tiers;
mod trace;

use std::sync::Arc;

use indicatif::ProgressBar;
use kv::eviction::Eviction;

pub(crate) use self::fleet::{FleetOptions, INSTANCES_MAX, Route};
pub(crate) use self::hints::HintSource;
pub(crate) use self::policy::Policy;
pub(crate) use self::states::StateOptions;
pub(crate) use self::tiers::{TierOption, TierOptions, TierSize, name as tier_name};
pub(crate) use self::trace::{Sizes, Trace};
use crate::args::ReplayArgs;
use crate::num::to_u64;
use crate::{chart, output, progress};
use hints::Hints;
use policy::Case;
use report::{Line, Report};
use run::Tiers;
use states::{NoBlockLeft, Split};

pub(crate) fn run(args: &ReplayArgs) -> anyhow::Result<()> {
    if let Some(path) = &args.plot {
        output::check_writable(path)?;
    }
    let trace = Trace::read(&args.trace, args.sizes())?;
    if let Some(options) = args.fleet()? {
        return run_fleet(args, &options, &trace);
    }
    let trace = Arc::new(trace);
    let tiers = args.tiers()?;
    let tiers = match &tiers {
        Some(options) => Some((options, options.capacities(&trace)?)),
        None => None,
    };
    let tiers = tiers.as_ref().map(|(options, capacities)| (*options, capacities.as_slice()));
    // Tiers are sized below the policy that a cache has.
    let states = args.states.options(args.bytes_per_token, &args.policy)?;
    let policies: &[_] = match (tiers, &states) {
        _ if !args.policy.is_empty() => &args.policy,
        (Some(_), _) => &[Policy::Real(Eviction::ReuseRate)],
        (None, Some(_)) => &Policy::OF_STATES,
        (None, None) => &Policy::DEFAULT,
    };
    let cases = cases(policies, &args.capacity_blocks, trace.num_blocks());
    let grid = states.as_ref().and_then(|options| options.grid).unwrap_or(trace.named_tokens());
    let runs = match &states {
        Some(options) => with_splits(&cases, options, &trace)?,
        None => cases.into_iter().map(|case| (case, None)).collect(),
    };
    let total = to_u64(trace.requests().len() * runs.len());
    let bar = progress::requests(total);
    let hints = Hints::new(&trace, args.hints);
    let measured = runs.into_iter().map(|run| measure(&trace, run, grid, (tiers, &hints), &bar));
    let lines = measured.collect::<anyhow::Result<Vec<_>>>()?;
    bar.finish_and_clear();
    let name = args.trace.display().to_string();
    let report = Report { name, trace: &trace, hints: hints.source(), lines };
    if args.json {
        output::json(&report.lines)?;
    } else {
        output::text(&report.show())?;
    }
    if let Some(path) = &args.plot {
        chart::write(path, &[report::chart(&report.lines)])?;
    }
    Ok(())
}

/// Replays a trace through a fleet, and prints the report.
fn run_fleet(args: &ReplayArgs, options: &FleetOptions, trace: &Trace) -> anyhow::Result<()> {
    let default = default_capacities(trace.num_blocks());
    let capacities = if args.capacity_blocks.is_empty() { &default } else { &args.capacity_blocks };
    let report = fleet::run(args.trace.display().to_string(), trace, options, capacities)?;
    if args.json {
        output::json(&report.lines)?;
    } else {
        output::text(&report.show())?;
    }
    if let Some(path) = &args.plot {
        chart::write(path, &fleet::charts(&report.lines))?;
    }
    Ok(())
}

/// Combines every policy with every capacity, once each.
fn cases(policies: &[Policy], capacities: &[u32], num_blocks: u32) -> Vec<Case> {
    let default = default_capacities(num_blocks);
    let capacities = if capacities.is_empty() { &default } else { capacities };
    let mut cases = Vec::new();
    for policy in policies {
        let with = |capacity: &u32| (*policy, (*policy != Policy::Infinite).then_some(*capacity));
        for case in capacities.iter().map(with) {
            if !cases.contains(&case) {
                cases.push(case);
            }
        }
    }
    cases
}

/// Returns capacities from a small share of the blocks to half, in factors of four.
fn default_capacities(num_blocks: u32) -> Vec<u32> {
    let part = |divisor: u32| two_digits(num_blocks.checked_div(divisor).unwrap_or(0)).max(1);
    let mut capacities = [128, 32, 8, 2].map(part).to_vec();
    capacities.dedup();
    capacities
}

/// Rounds down to two digits.
fn two_digits(n: u32) -> u32 {
    let powers = std::iter::successors(Some(1_u32), |power| power.checked_mul(10));
    let unit = powers.take_while(|power| n.checked_div(*power).unwrap_or(0) >= 10).last();
    let unit = unit.unwrap_or(1);
    n.checked_div(unit).unwrap_or(0) * unit
}

/// One measurement, and the pools of a cache with states.
type Run = (Case, Option<Split>);

/// Runs every case with rows alone, and with states for every size of the pool of snapshots.
fn with_splits(
    cases: &[Case],
    options: &StateOptions,
    trace: &Trace,
) -> Result<Vec<Run>, NoBlockLeft> {
    let mut runs = Vec::new();
    for case in cases {
        runs.push((*case, None));
        match case.1 {
            None => runs.push((*case, Some(Split::Unlimited))),
            Some(capacity) => {
                for pool in &options.pools {
                    let split = Split::new(options, *pool, capacity, trace.block_size)?;
                    runs.push((*case, Some(split)));
                }
            }
        }
    }
    Ok(runs)
}

fn measure(
    trace: &Arc<Trace>,
    (case, split): Run,
    grid: u32,
    (tiers, hints): (Option<Tiers<'_>>, &Hints),
    bar: &ProgressBar,
) -> anyhow::Result<Line> {
    let advance = |requests| bar.inc(to_u64(requests));
    let outcome = match split {
        None => run::replay(trace, case, (tiers, hints), advance)?,
        Some(split) => states::replay(trace, case.0, (split, grid, hints), advance)?,
    };
    Ok(Line::new(case, trace, hints.source(), outcome))
}

#[cfg(test)]
mod tests;
