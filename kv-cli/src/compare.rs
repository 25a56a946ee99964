//! `kv generate --compare`: the same prompts with and without a cache, and a second request after a
//! long system prompt with and without reuse, measured in one run.
mod reuse;
mod tiers;

use kv::engine::Generated;
use kv::tier::Bytes;
use serde::Serialize;

use crate::args::GenerateArgs;
use crate::job::{Job, Run, Silent, Variant};
use crate::output;

/// The object that `--compare --json` prints.
#[derive(Debug, Serialize)]
struct Report {
    model: String,
    backend: String,
    format: String,
    sequences: usize,
    compare: Vec<Line>,
    /// Absent if the model's context is too short for a shared prompt.
    #[serde(skip_serializing_if = "Option::is_none")]
    reuse: Option<reuse::Comparison>,
    /// Absent without tiers.
    #[serde(skip_serializing_if = "Option::is_none")]
    tiers: Option<tiers::Comparison>,
}

#[derive(Debug, Serialize)]
struct Line {
    variant: &'static str,
    layout: String,
    /// Requested new tokens per sequence.
    new_tokens: u32,
    seconds: f64,
    tokens_per_s: f64,
    /// Milliseconds to the first token of the slowest sequence.
    ttft_ms: f64,
    /// The time of the uncached run of the same length over this time.
    speedup: f64,
    cache_bytes: u64,
    peak_bytes: u64,
    waste_ratio: f64,
    /// Whether all tokens are those of the first variant.
    same_tokens: bool,
}

pub(crate) fn run(args: &GenerateArgs, job: &Job) -> anyhow::Result<()> {
    let (paged, contiguous) = (job.paged(args)?, job.contiguous(args));
    let variants =
        [("paged", paged, false), ("contiguous", contiguous, false), ("no cache", paged, true)];
    let mut compare = Vec::new();
    for max_new_tokens in lengths(args.max_new_tokens) {
        let mut tokens: Option<Vec<Generated>> = None;
        let first_of_length = compare.len();
        for (variant, layout, forget) in variants {
            let base = Variant::new(args, layout);
            let runs = Variant { max_new_tokens, forget, ignore_eos: true, ..base };
            let runs = Variant { reuse: !forget, tiers: false, ..runs };
            let Run { generated, stats, .. } =
                job.run(args, &runs, job.prompt_ids(), &mut Silent)?;
            let first = tokens.get_or_insert_with(|| generated.clone());
            let pairs = first.iter().zip(&generated);
            let first_ms = generated.iter().map(|generated| generated.first_token_ms);
            compare.push(Line {
                variant,
                layout: layout.to_string(),
                new_tokens: max_new_tokens,
                seconds: stats.seconds,
                tokens_per_s: stats.tokens_per_s(),
                ttft_ms: first_ms.fold(0.0, f64::max),
                speedup: 1.0,
                cache_bytes: stats.cache_bytes,
                peak_bytes: stats.peak_bytes(),
                waste_ratio: stats.waste_ratio(),
                same_tokens: pairs.into_iter().all(|(a, b)| a.tokens == b.tokens),
            });
        }
        let uncached = compare.last().map_or(0.0, |line| line.seconds);
        for line in compare.iter_mut().skip(first_of_length) {
            line.speedup = uncached / line.seconds.max(f64::MIN_POSITIVE);
        }
    }
    let report = Report {
        model: job.loaded.name.clone(),
        backend: args.engine.model.backend.to_string(),
        format: args.engine.format.to_string(),
        sequences: job.prompts.len(),
        compare,
        reuse: reuse::measure(args, job)?,
        tiers: tiers::measure(args, job)?,
    };
    if args.json { output::json(&report) } else { output::text(&show(&report)) }
}

/// Returns a quarter, a half and all of the requested tokens.
fn lengths(max: u32) -> Vec<u32> {
    let mut lengths: Vec<_> =
        [4, 2, 1].into_iter().filter_map(|part| max.checked_div(part)).map(|n| n.max(1)).collect();
    lengths.dedup();
    lengths
}

fn show(report: &Report) -> String {
    let heading = [
        "variant",
        "new",
        "seconds",
        "tokens/s",
        "first ms",
        "speed-up",
        "cache",
        "used",
        "wasted",
        "same tokens",
    ];
    let mut rows = vec![heading.map(str::to_owned).to_vec()];
    rows.extend(report.compare.iter().map(|line| {
        vec![
            line.variant.to_owned(),
            line.new_tokens.to_string(),
            format!("{:.3}", line.seconds),
            format!("{:.1}", line.tokens_per_s),
            format!("{:.1}", line.ttft_ms),
            format!("{:.1}x", line.speedup),
            Bytes(line.cache_bytes).to_string(),
            Bytes(line.peak_bytes).to_string(),
            format!("{:.0} %", line.waste_ratio * 100.0),
            if line.same_tokens { "yes" } else { "NO" }.to_owned(),
        ]
    }));
    let plural = if report.sequences == 1 { "" } else { "s" };
    let reuse = report.reuse.as_ref().map(reuse::Comparison::show).unwrap_or_default();
    let tiers = report.tiers.as_ref().map(tiers::Comparison::show).unwrap_or_default();
    format!(
        "{} on {}, {} stored, {} sequence{plural}; speed-up is against no cache at that length\n\
         {}{reuse}{tiers}",
        report.model,
        report.backend,
        report.format,
        report.sequences,
        output::table(&rows)
    )
}
