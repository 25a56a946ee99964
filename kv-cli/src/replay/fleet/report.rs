//! The output of `kv replay --instances`, as JSON, as text and as charts.
use kv::tier::Bytes;
use serde::Serialize;

use super::workload::Workload;
use super::{FleetOptions, Outcome, Route};
use crate::chart::{Axis, Chart, Mark, Series};
use crate::num::{to_f64, to_u64};
use crate::output;
use crate::percentile::percentile;
use crate::replay::report::heading;
use crate::replay::trace::Trace;

/// One element of the list that `--json` prints.
#[derive(Debug, Clone, Serialize)]
pub(in crate::replay) struct Line {
    pub(super) route: String,
    pub(super) instances: u32,
    pub(super) copies: u32,
    /// Of each instance.
    pub(super) capacity_blocks: u32,
    /// Tokens of prompts that their instances had cached.
    pub(super) hit_tokens: u64,
    /// Tokens of all prompts, refused ones too.
    pub(super) total_tokens: u64,
    pub(super) token_hit_ratio: f64,
    pub(super) evictions: u64,
    /// Waiting and computing; `None` if no request ran.
    pub(super) first_token_p50_seconds: Option<f64>,
    pub(super) first_token_p99_seconds: Option<f64>,
    /// Tokens computed by the instance that computed most, of the mean; `None` without tokens.
    pub(super) busiest_over_mean: Option<f64>,
    /// Messages that the router reads, none for a route without events.
    pub(super) events: u64,
    pub(super) event_bytes: u64,
    pub(super) restarts: u64,
    pub(super) requests: u64,
    /// Requests larger than a cache, or without a token.
    pub(super) refused_requests: u64,
}

impl Line {
    pub(super) fn new(
        (route, capacity_blocks): (Route, u32),
        options: &FleetOptions,
        workload: &Workload<'_>,
        outcome: Outcome,
    ) -> Self {
        let Outcome { hit_tokens, evictions, refused_requests, restarts, .. } = outcome;
        let Outcome { mut first_tokens, computed, events, event_bytes, .. } = outcome;
        first_tokens.sort_unstable();
        let at = |percent| percentile(&first_tokens, percent).map(|time| time.as_secs_f64());
        let (sum, most) = (computed.iter().sum::<u64>(), computed.iter().max());
        let mean = to_f64(sum) / to_f64(to_u64(computed.len()).max(1));
        let most = most.filter(|_| sum > 0);
        let total_tokens = workload.total_tokens();
        Self {
            route: route.to_string(),
            instances: options.instances,
            copies: options.copies,
            capacity_blocks,
            hit_tokens,
            total_tokens,
            token_hit_ratio: to_f64(hit_tokens) / to_f64(total_tokens.max(1)),
            evictions,
            first_token_p50_seconds: at(50),
            first_token_p99_seconds: at(99),
            busiest_over_mean: most.map(|most| to_f64(*most) / mean),
            events,
            event_bytes,
            restarts,
            requests: workload.num_requests(),
            refused_requests,
        }
    }

    fn cells(&self) -> Vec<String> {
        let or_dash = |figure: Option<f64>, digits: usize| match figure {
            Some(figure) => format!("{figure:.digits$}"),
            None => "-".to_owned(),
        };
        vec![
            self.route.clone(),
            self.capacity_blocks.to_string(),
            self.hit_tokens.to_string(),
            format!("{:.4}", self.token_hit_ratio),
            self.evictions.to_string(),
            or_dash(self.first_token_p50_seconds, 3),
            or_dash(self.first_token_p99_seconds, 3),
            or_dash(self.busiest_over_mean, 2),
            self.events.to_string(),
            Bytes(self.event_bytes).to_string(),
            self.refused_requests.to_string(),
        ]
    }
}

const HEADING: [&str; 11] = [
    "route",
    "blocks",
    "hit tokens",
    "hit ratio",
    "evictions",
    "p50 s",
    "p99 s",
    "busiest/mean",
    "events",
    "bytes",
    "refused",
];

/// The whole report.
pub(in crate::replay) struct Report<'r> {
    pub(super) name: String,
    pub(super) trace: &'r Trace,
    pub(super) options: &'r FleetOptions,
    pub(in crate::replay) lines: Vec<Line>,
}

impl Report<'_> {
    pub(in crate::replay) fn show(&self) -> String {
        let FleetOptions { instances, copies, event_lag, prefill_tokens_per_second, .. } =
            self.options;
        let restarts = match (self.options.restart, self.lines.first()) {
            (Some(every), Some(line)) => {
                format!(", restarts: {}, one every {} s", line.restarts, every.as_secs_f64())
            }
            _ => String::new(),
        };
        let rows = self.lines.iter().map(Line::cells);
        let table: Vec<_> =
            std::iter::once(HEADING.map(str::to_owned).to_vec()).chain(rows).collect();
        format!(
            "{}instances: {instances}, copies of the trace: {copies}, prefill: \
             {prefill_tokens_per_second} tokens/s, events after {} s{restarts}\n{}",
            heading(&self.name, self.trace),
            event_lag.as_secs_f64(),
            output::table(&table),
        )
    }
}

/// Charts against the capacity of an instance: the hit ratio, and the time to the first token.
pub(in crate::replay) fn charts(lines: &[Line]) -> [Chart; 2] {
    let capacity = |line: &Line| to_f64(line.capacity_blocks.into());
    let hits =
        lines.iter().map(|line| (line.route.clone(), (capacity(line), line.token_hit_ratio)));
    let times = lines.iter().flat_map(|line| {
        let percentiles =
            [("p50", line.first_token_p50_seconds), ("p99", line.first_token_p99_seconds)];
        percentiles.into_iter().filter_map(|(name, seconds)| {
            Some((format!("{} {name}", line.route), (capacity(line), seconds?)))
        })
    });
    [
        Chart {
            title: "Token hit ratio by capacity",
            x: Axis::Log("capacity of an instance, blocks"),
            y: Axis::Linear("hit tokens of all input tokens"),
            series: Series::by_name(Mark::Joined, hits),
        },
        Chart {
            title: "Time to the first token by capacity",
            x: Axis::Log("capacity of an instance, blocks"),
            y: Axis::Log("seconds"),
            series: Series::by_name(Mark::Joined, times),
        },
    ]
}
