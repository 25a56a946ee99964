//! The output of `kv replay`, as JSON and as text.
use kv::tier::Bytes;
use serde::Serialize;

use super::policy::Case;
use super::run::Outcome;
use super::states::StateLine;
use super::tiers::{TierLine, TierReport};
use super::trace::{Format, Trace};
use crate::chart::{Axis, Chart, Mark, Series};
use crate::num::{to_f64, to_u64};
use crate::output;

/// One element of the list that `--json` prints.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Line {
    pub(super) policy: String,
    /// The requested capacity; without a limit, the blocks that were used.
    pub(super) capacity_blocks: u32,
    /// Input tokens that the device had cached.
    pub(super) hit_tokens: u64,
    /// Input tokens of all requests, refused ones too.
    pub(super) total_tokens: u64,
    pub(super) token_hit_ratio: f64,
    pub(super) evictions: u64,
    pub(super) ns_per_request: u64,
    /// Most cached blocks at once.
    pub(super) peak_blocks: u32,
    pub(super) requests: u64,
    /// Requests that the engine refused: larger than the cache, or without a token.
    pub(super) refused_requests: u64,
    /// Where the hints of a return come from.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) hints: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) tiers: Option<TierReport>,
    /// Pools of a cache with states; `None` for rows alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) states: Option<StateLine>,
    /// Whether the policy has no capacity.
    #[serde(skip)]
    pub(super) is_unlimited: bool,
}

impl Line {
    pub(super) fn new(
        (policy, capacity): Case,
        trace: &Trace,
        hints: Option<&str>,
        outcome: Outcome,
    ) -> Self {
        let Outcome { hit_tokens, evictions, peak_blocks, refused_requests, .. } = outcome;
        let Outcome { elapsed, tiers, states, .. } = outcome;
        let (requests, total_tokens) = (to_u64(trace.requests().len()), trace.total_tokens);
        let ns = elapsed.as_nanos().checked_div(requests.into()).unwrap_or(0);
        Self {
            policy: policy.to_string(),
            capacity_blocks: capacity.unwrap_or(peak_blocks),
            hit_tokens,
            total_tokens,
            // Without tokens there are no hits.
            token_hit_ratio: to_f64(hit_tokens) / to_f64(total_tokens.max(1)),
            evictions,
            ns_per_request: u64::try_from(ns).unwrap_or(u64::MAX),
            peak_blocks,
            requests,
            refused_requests,
            hints: hints.map(str::to_owned),
            tiers,
            states,
            is_unlimited: capacity.is_none(),
        }
    }
}

/// The whole report.
pub(super) struct Report<'r> {
    pub(super) name: String,
    pub(super) trace: &'r Trace,
    /// Where the hints of a return come from.
    pub(super) hints: Option<&'r str>,
    pub(super) lines: Vec<Line>,
}

impl Report<'_> {
    pub(super) fn show(&self) -> String {
        let Self { name, trace, hints, .. } = self;
        let hints = hints.map(|source| format!("Hints of a return: {source}\n"));
        format!(
            "{}{}{}{}",
            heading(name, trace),
            hints.unwrap_or_default(),
            output::table(&self.table()),
            self.lines.iter().map(show_tiers).collect::<String>(),
        )
    }

    fn table(&self) -> Vec<Vec<String>> {
        let heading = [
            "policy",
            "blocks",
            "hit tokens",
            "hit ratio",
            "evictions",
            "peak blocks",
            "refused",
            "ns/request",
        ];
        let has_states = self.lines.iter().any(|line| line.states.is_some());
        let of_states = ["share", "row blocks", "snapshots", "peak snapshots", "evicted"];
        let of_states = of_states.into_iter().filter(|_| has_states);
        let mut rows = vec![heading.into_iter().chain(of_states).map(str::to_owned).collect()];
        rows.extend(self.lines.iter().map(|line| {
            let cells = [
                line.policy.clone(),
                line.capacity_blocks.to_string(),
                line.hit_tokens.to_string(),
                format!("{:.4}", line.token_hit_ratio),
                line.evictions.to_string(),
                line.peak_blocks.to_string(),
                line.refused_requests.to_string(),
                line.ns_per_request.to_string(),
            ];
            let of_states = state_cells(line.states.as_ref()).into_iter().filter(|_| has_states);
            cells.into_iter().chain(of_states).collect()
        }));
        rows
    }
}

/// Returns the lines about a trace above a table.
pub(super) fn heading(name: &str, trace: &Trace) -> String {
    let without_content = match trace.format {
        Format::Mooncake | Format::Qwen => "",
        Format::Azure | Format::BurstGpt => {
            "The trace has no content: every block is new, and there are no hits.\n"
        }
    };
    format!(
        "{name}: {} requests of {} input tokens, {} trace, blocks of {}\n{without_content}",
        trace.requests().len(),
        trace.total_tokens,
        trace.format.name(),
        trace.block_size,
    )
}

/// Returns the cells of a line's pools, dashes for rows alone.
fn state_cells(states: Option<&StateLine>) -> [String; 5] {
    let Some(states) = states else {
        return [(); 5].map(|()| "-".to_owned());
    };
    let StateLine { share, row_blocks, snapshots, peak_snapshots, snapshot_evictions } = states;
    let counts = [row_blocks, snapshots, peak_snapshots].map(u32::to_string);
    let [blocks, snapshots, peak] = counts;
    [share.clone(), blocks, snapshots, peak, snapshot_evictions.to_string()]
}

/// Shows the tiers below one line of the table.
fn show_tiers(line: &Line) -> String {
    let Some(report) = &line.tiers else {
        return String::new();
    };
    let has_bytes = report.tiers.iter().any(|tier| tier.written_bytes.is_some());
    let has_times = report.times.is_some();
    let heading = ["tier", "write", "blocks", "hit tokens", "hit ratio", "written", "a day"];
    let bytes = ["bytes", "a day"].into_iter().filter(|_| has_bytes);
    let times = ["load s", "break-even"].into_iter();
    let heading = heading.into_iter().chain(bytes).chain(["evictions"]);
    let heading: Vec<_> = heading.chain(times.filter(|_| has_times)).map(str::to_owned).collect();
    let row = |name: &str, write: &str, blocks: &str, tokens: u64, ratio: f64| {
        let cells = [name, write, blocks].map(str::to_owned);
        let hits = [tokens.to_string(), format!("{ratio:.4}")];
        cells.into_iter().chain(hits).collect::<Vec<_>>()
    };
    let capacity = line.capacity_blocks.to_string();
    let (tokens, ratio) = (report.device_hit_tokens, report.device_token_hit_ratio);
    let mut rows = vec![heading, row("device", "", &capacity, tokens, ratio)];
    rows.extend(report.tiers.iter().map(|tier| {
        let blocks = tier.capacity_blocks.to_string();
        let cells = row(tier.tier, &tier.write, &blocks, tier.hit_tokens, tier.token_hit_ratio);
        cells.into_iter().chain(tier_cells(tier)).collect()
    }));
    rows.push(row("all", "", "", report.hit_tokens, report.token_hit_ratio));
    let saved = report.times.map(|times| {
        let mean = times.first_token_seconds_saved * 1000.0 / to_f64(line.requests.max(1));
        format!(
            "{:.1} s of prefill saved for {:.1} s of loading: first tokens come {:.1} s sooner, \
             {mean:.1} ms a request; {} tokens computed because loading is slower\n",
            times.prefill_seconds_saved,
            times.load_seconds,
            times.first_token_seconds_saved,
            times.slower_tokens,
        )
    });
    let (policy, table) = (&line.policy, output::table(&rows));
    format!("\nbelow {policy} with {capacity} blocks:\n{table}{}", saved.unwrap_or_default())
}

/// Formats bytes per second in the powers of 1000 that bandwidths are given in.
fn rate(bytes: f64) -> String {
    let units = [("GB/s", 1e9), ("MB/s", 1e6), ("KB/s", 1e3)];
    match units.into_iter().find(|(_, unit)| bytes >= *unit) {
        Some((name, unit)) => format!("{:.1} {name}", bytes / unit),
        None => format!("{bytes:.0} B/s"),
    }
}

/// Returns the cells of a tier after its hits.
fn tier_cells(tier: &TierLine) -> Vec<String> {
    let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    let mut cells = vec![
        tier.written_blocks.to_string(),
        or_dash(tier.written_blocks_per_day.map(|n| n.to_string())),
    ];
    if let Some(bytes) = tier.written_bytes {
        let per_day = tier.written_bytes_per_day.map(|n| Bytes(n).to_string());
        cells.extend([Bytes(bytes).to_string(), or_dash(per_day)]);
    }
    cells.push(tier.evictions.to_string());
    if let Some(loading) = tier.loading {
        let even = loading.break_even_bytes_per_second;
        cells.extend([format!("{:.1}", loading.load_seconds), or_dash(even.map(rate))]);
    }
    cells
}

/// Charts hit ratio against capacity: a line for the device alone under every policy, and one for
/// it and its tiers. A policy without a capacity is level.
pub(super) fn chart(lines: &[Line]) -> Chart {
    let own = |line: &Line| to_f64(line.capacity_blocks.into());
    let limited: Vec<_> = lines.iter().filter(|line| !line.is_unlimited).map(own).collect();
    let points = lines.iter().flat_map(|line| {
        let with_tiers = line.tiers.as_ref().map(|tiers| {
            let given = tiers.tiers.iter().filter(|tier| !tier.is_passage());
            let names = given.map(|tier| format!(" + {}", tier.tier));
            (format!("{}{}", line.policy, names.collect::<String>()), tiers.token_hit_ratio)
        });
        let of_states = line.states.as_ref().map(|of| format!(", {} snapshots", of.share));
        let name = format!("{}{}", line.policy, of_states.unwrap_or_default());
        let alone = (name, line.token_hit_ratio);
        let is_level = line.is_unlimited && !limited.is_empty();
        let capacities = if is_level { limited.clone() } else { vec![own(line)] };
        [alone].into_iter().chain(with_tiers).flat_map(move |(name, ratio)| {
            capacities.clone().into_iter().map(move |blocks| (name.clone(), (blocks, ratio)))
        })
    });
    Chart {
        title: "Token hit ratio by capacity",
        x: Axis::Log("capacity, blocks"),
        y: Axis::Linear("hit tokens of all input tokens"),
        series: Series::by_name(Mark::Joined, points),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(policy: &str, capacity_blocks: u32, token_hit_ratio: f64) -> Line {
        Line {
            policy: policy.to_owned(),
            capacity_blocks,
            token_hit_ratio,
            is_unlimited: policy == "infinite",
            hit_tokens: 0,
            total_tokens: 0,
            evictions: 0,
            ns_per_request: 0,
            peak_blocks: 0,
            requests: 0,
            refused_requests: 0,
            hints: None,
            tiers: None,
            states: None,
        }
    }

    #[test]
    fn every_policy_is_a_line_and_every_capacity_a_point() {
        let lines = [("lru", 1000, 0.2), ("lru", 10, 0.1), ("infinite", 90_000, 0.5)]
            .map(|(policy, blocks, ratio)| line(policy, blocks, ratio));
        let series = chart(&lines).series;
        assert_eq!((series[0].name.as_str(), series[1].name.as_str()), ("lru", "infinite"));
        assert_eq!(series[0].points, [(10.0, 0.1), (1000.0, 0.2)], "ascending");
        assert_eq!(series[1].points, [(10.0, 0.5), (1000.0, 0.5)], "level");
        assert_eq!(chart(&lines[2..]).series[0].points, [(90_000.0, 0.5)]);
    }
}
