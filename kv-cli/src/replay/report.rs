//! The output of `kv replay`, as JSON and as text.
use serde::Serialize;

use super::policy::Policy;
use super::run::Outcome;
use super::trace::{Format, Trace};
use crate::num::{to_f64, to_u64};
use crate::output;

/// One element of the list that `--json` prints.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Line {
    pub(super) policy: String,
    /// The requested capacity; without a limit, the blocks that were used.
    pub(super) capacity_blocks: u32,
    pub(super) hit_tokens: u64,
    /// Input tokens of all requests.
    pub(super) total_tokens: u64,
    pub(super) token_hit_ratio: f64,
    pub(super) evictions: u64,
    pub(super) ns_per_request: u64,
    /// Most cached blocks at once.
    pub(super) peak_blocks: u32,
    pub(super) requests: u64,
    /// Whether the policy has no capacity.
    #[serde(skip)]
    pub(super) is_unlimited: bool,
}

impl Line {
    pub(super) fn new(
        policy: Policy,
        capacity: Option<u32>,
        trace: &Trace,
        outcome: &Outcome,
    ) -> Self {
        let Outcome { hit_tokens, evictions, peak_blocks, elapsed } = *outcome;
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
            is_unlimited: capacity.is_none(),
        }
    }
}

/// The whole report.
pub(super) struct Report<'r> {
    pub(super) name: String,
    pub(super) trace: &'r Trace,
    pub(super) lines: Vec<Line>,
}

impl Report<'_> {
    pub(super) fn show(&self) -> String {
        let Self { name, trace, .. } = self;
        let without_content = match trace.format {
            Format::Mooncake | Format::Qwen => "",
            Format::Azure | Format::BurstGpt => {
                "The trace has no content: every block is new, and there are no hits.\n"
            }
        };
        format!(
            "{name}: {} requests of {} input tokens, {} trace, blocks of {}\n\
             {without_content}{}",
            trace.requests().len(),
            trace.total_tokens,
            trace.format.name(),
            trace.block_size,
            output::table(&self.table())
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
            "ns/request",
        ];
        let mut rows = vec![heading.map(str::to_owned).to_vec()];
        rows.extend(self.lines.iter().map(|line| {
            vec![
                line.policy.clone(),
                line.capacity_blocks.to_string(),
                line.hit_tokens.to_string(),
                format!("{:.4}", line.token_hit_ratio),
                line.evictions.to_string(),
                line.peak_blocks.to_string(),
                line.ns_per_request.to_string(),
            ]
        }));
        rows
    }
}
