//! The benefit of tiers to a new process: the same prompts without tiers, and twice with tiers,
//! each run with an empty cache.
use kv::engine::Generated;
use serde::Serialize;

use crate::args::GenerateArgs;
use crate::job::{Job, Run, Silent, Variant};
use crate::output;

/// The figures of the three runs.
#[derive(Debug, Serialize)]
pub(super) struct Comparison {
    lines: Vec<Line>,
}

#[derive(Debug, Serialize)]
struct Line {
    variant: &'static str,
    prompt_tokens: usize,
    /// Prompt tokens that were reused, and those among them that came from tiers.
    reused_tokens: u64,
    host_tokens: u64,
    disk_tokens: u64,
    store_tokens: u64,
    /// Milliseconds to the first token of the slowest sequence.
    ttft_ms: f64,
    /// The time of the run without tiers over this time.
    speedup: f64,
    /// Whether all tokens are those of the run without tiers.
    same_tokens: bool,
}

/// Runs the prompts; `None` without tiers.
pub(super) fn measure(args: &GenerateArgs, job: &Job) -> anyhow::Result<Option<Comparison>> {
    if args.engine.tier.is_empty() {
        return Ok(None);
    }
    let base = Variant { ignore_eos: true, ..Variant::new(args, job.paged(args)?) };
    let mut lines: Vec<Line> = Vec::new();
    let mut first: Option<Vec<Generated>> = None;
    for (variant, tiers) in [("without tiers", false), ("with tiers", true), ("again", true)] {
        let variant_of = Variant { tiers, ..base };
        let Run { generated, stats, .. } =
            job.run(args, &variant_of, job.prompt_ids(), &mut Silent)?;
        let expected = first.get_or_insert_with(|| generated.clone());
        let times = generated.iter().map(|generated| generated.first_token_ms);
        let ttft_ms = times.fold(0.0, f64::max);
        let without = lines.first().map_or(ttft_ms, |line| line.ttft_ms);
        lines.push(Line {
            variant,
            prompt_tokens: stats.prompt_tokens,
            reused_tokens: stats.cache.hit_tokens,
            host_tokens: stats.cache.host_hit_tokens,
            disk_tokens: stats.cache.disk_hit_tokens,
            store_tokens: stats.cache.store_hit_tokens,
            ttft_ms,
            speedup: without / ttft_ms.max(f64::MIN_POSITIVE),
            same_tokens: expected.iter().zip(&generated).all(|(a, b)| a.tokens == b.tokens),
        });
    }
    Ok(Some(Comparison { lines }))
}

impl Comparison {
    pub(super) fn show(&self) -> String {
        let heading = [
            "variant",
            "prompt",
            "reused",
            "host",
            "disk",
            "store",
            "first ms",
            "speed-up",
            "same tokens",
        ];
        let mut rows = vec![heading.map(str::to_owned).to_vec()];
        rows.extend(self.lines.iter().map(|line| {
            vec![
                line.variant.to_owned(),
                line.prompt_tokens.to_string(),
                line.reused_tokens.to_string(),
                line.host_tokens.to_string(),
                line.disk_tokens.to_string(),
                line.store_tokens.to_string(),
                format!("{:.1}", line.ttft_ms),
                format!("{:.1}x", line.speedup),
                if line.same_tokens { "yes" } else { "NO" }.to_owned(),
            ]
        }));
        format!("\nthe same prompts in new caches, over the tiers\n{}", output::table(&rows))
    }
}
