//! The report of one `kv generate`, as JSON and as text.
use kv::engine::{self, Finish, Stats};
use kv::tier::Bytes;
use serde::Serialize;

use crate::args::GenerateArgs;
use crate::job::{Job, Run, Variant};
use crate::loaded::Loaded;
use crate::{session, tiers};

/// The object that `--json` prints.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    model: String,
    backend: String,
    format: String,
    layout: String,
    /// False if every token was recomputed for each new one.
    cached: bool,
    sequences: Vec<Sequence>,
    stats: Figures,
    /// Absent without `--session`.
    #[serde(skip_serializing_if = "Option::is_none")]
    session: Option<session::Report>,
}

#[derive(Debug, Serialize)]
struct Sequence {
    prompt: String,
    prompt_tokens: Vec<u32>,
    /// Generated tokens, including an end-of-text token.
    tokens: Vec<u32>,
    /// The text that they add to the prompt, without an end-of-text token that ended the sequence.
    text: String,
    /// `length`, `eos` or `context`.
    finish: &'static str,
    reused_tokens: usize,
    /// Milliseconds from submission to the first token.
    ttft_ms: f64,
    /// Texts of a beam search, best first; empty without it.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    hypotheses: Vec<Hypothesis>,
}

/// One text of a beam search.
#[derive(Debug, Serialize)]
struct Hypothesis {
    tokens: Vec<u32>,
    text: String,
    finish: &'static str,
    log_prob: f64,
    score: f64,
}

#[derive(Debug, Serialize)]
struct Figures {
    tokens_per_s: f64,
    prefill_tokens_per_s: f64,
    decode_tokens_per_s: f64,
    seconds: f64,
    steps: usize,
    prompt_tokens: usize,
    generated_tokens: usize,
    /// Prompt tokens that were cached when their prompt arrived.
    reused_tokens: u64,
    /// Reused tokens over all prompt tokens.
    hit_ratio: f64,
    /// Tokens reused in full blocks and in parts of blocks, including those after preemptions.
    reused_full_tokens: u64,
    reused_partial_tokens: u64,
    bytes_per_token: u64,
    cache_bytes: u64,
    peak_bytes: u64,
    blocks_total: u32,
    blocks_peak: u32,
    waste_ratio: f64,
    /// Full blocks that sequences reused.
    blocks_shared: u64,
    /// Blocks with reusable content at the end.
    blocks_cached: u32,
    evictions: u64,
    cow_copies: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    states: Option<StateFigures>,
    preemptions: usize,
    beams: u32,
    drafted_tokens: u64,
    accepted_tokens: u64,
    acceptance_ratio: f64,
    tokens_per_step: f64,
    /// Absent without tiers.
    #[serde(skip_serializing_if = "Option::is_none")]
    tiers: Option<tiers::Report>,
}

impl Report {
    pub(crate) fn new(
        args: &GenerateArgs,
        job: &Job,
        variant: &Variant,
        run: &Run,
    ) -> anyhow::Result<Self> {
        let Run { generated, stats, tiers, session } = run;
        let Loaded { name: model, tokenizer, .. } = &job.loaded;
        let mut sequences = Vec::with_capacity(generated.len());
        for (prompt, generated) in job.prompts.iter().zip(generated) {
            let text_of =
                |tokens: &[u32], finish| tokenizer.decode_after(&prompt.ids, shown(tokens, finish));
            let show = |hypothesis: &engine::Hypothesis| {
                Ok(Hypothesis {
                    tokens: hypothesis.tokens.clone(),
                    text: text_of(&hypothesis.tokens, hypothesis.finish)?,
                    finish: finish_name(hypothesis.finish),
                    log_prob: hypothesis.log_prob,
                    score: hypothesis.score,
                })
            };
            let hypotheses = generated.hypotheses.iter().map(show);
            sequences.push(Sequence {
                prompt: prompt.text.clone(),
                prompt_tokens: prompt.ids.clone(),
                tokens: generated.tokens.clone(),
                text: text_of(&generated.tokens, generated.finish)?,
                finish: finish_name(generated.finish),
                reused_tokens: generated.reused,
                ttft_ms: generated.first_token_ms,
                hypotheses: hypotheses.collect::<anyhow::Result<_>>()?,
            });
        }
        Ok(Self {
            model: model.clone(),
            backend: args.engine.model.backend.to_string(),
            format: args.engine.format.to_string(),
            layout: variant.layout.to_string(),
            cached: !variant.forget,
            stats: Figures {
                tiers: tiers.as_ref().map(|tiers| tiers::Report::new(&args.engine, stats, tiers)),
                ..Figures::new(variant, stats)
            },
            sequences,
            session: session.clone(),
        })
    }
    /// Formats the report as text, without the generated texts.
    pub(crate) fn show(&self) -> String {
        let s = &self.stats;
        let first = self.sequences.iter().map(|sequence| sequence.ttft_ms);
        let (first, last) =
            (first.clone().fold(f64::INFINITY, f64::min), first.fold(0.0, f64::max));
        let first = if self.sequences.len() > 1 {
            format!("{first:.1} to {last:.1} ms")
        } else {
            format!("{first:.1} ms")
        };
        let mode = if self.cached { "" } else { ", every token recomputed" };
        let mut text = format!(
            "{} tokens in {:.2} s: {:.1} tokens/s (prefill {:.0}, decode {:.1})\n\
             time to first token {first}\n\
             cache {} of {} on {}, {} bytes per token, {}{mode}\n\
             {} of {} blocks used at the peak ({}), {:.1} % of held slots wasted\n",
            s.generated_tokens,
            s.seconds,
            s.tokens_per_s,
            s.prefill_tokens_per_s,
            s.decode_tokens_per_s,
            Bytes(s.cache_bytes),
            self.format,
            self.backend,
            s.bytes_per_token,
            self.layout,
            s.blocks_peak,
            s.blocks_total,
            Bytes(s.peak_bytes),
            s.waste_ratio * 100.0,
        );
        text.push_str(&self.show_reuse());
        if let Some(StateFigures { kept, evicted, stateless_tokens }) = s.states {
            let line = format!(
                "{kept} recurrent states kept, {evicted} evicted; \
                 {stateless_tokens} tokens had rows and no state\n"
            );
            text.push_str(&line);
        }
        if let Some(tiers) = &s.tiers {
            text.push_str(&tiers.show());
        }
        if let Some(session) = &self.session {
            text.push_str(&session.show());
        }
        if s.drafted_tokens > 0 {
            text.push_str(&self.show_drafts());
        }
        text
    }

    fn show_drafts(&self) -> String {
        let s = &self.stats;
        format!(
            "{} draft tokens, {} accepted ({:.1} %), {} steps of {:.2} tokens\n",
            s.drafted_tokens,
            s.accepted_tokens,
            s.acceptance_ratio * 100.0,
            s.steps,
            s.tokens_per_step,
        )
    }

    fn show_reuse(&self) -> String {
        let s = &self.stats;
        format!(
            "{} of {} prompt tokens reused ({:.1} %); {} in {} full blocks, {} in parts of blocks\n\
             {} blocks cached at the end, {} evictions, {} copies on write, {} preemptions\n",
            s.reused_tokens,
            s.prompt_tokens,
            s.hit_ratio * 100.0,
            s.reused_full_tokens,
            s.blocks_shared,
            s.reused_partial_tokens,
            s.blocks_cached,
            s.evictions,
            s.cow_copies,
            s.preemptions,
        )
    }
}

/// The recurrent states of a model that has some.
#[derive(Debug, Clone, Copy, Serialize)]
struct StateFigures {
    /// Snapshots taken for other prompts.
    kept: u64,
    /// Those of them that were evicted.
    evicted: u64,
    /// Tokens whose rows were cached and which were computed again for lack of a state.
    stateless_tokens: u64,
}

impl Figures {
    fn new(variant: &Variant, stats: &Stats) -> Self {
        let (full, partial) = stats.reused();
        Self {
            tokens_per_s: stats.tokens_per_s(),
            prefill_tokens_per_s: stats.prefill_tokens_per_s(),
            decode_tokens_per_s: stats.decode_tokens_per_s(),
            seconds: stats.seconds,
            steps: stats.steps,
            prompt_tokens: stats.prompt_tokens,
            generated_tokens: stats.generated_tokens,
            reused_tokens: stats.cache.hit_tokens,
            hit_ratio: stats.hit_ratio(),
            reused_full_tokens: full,
            reused_partial_tokens: partial,
            bytes_per_token: stats.bytes_per_token,
            cache_bytes: stats.cache_bytes,
            peak_bytes: stats.peak_bytes(),
            blocks_total: stats.blocks_total,
            blocks_peak: stats.blocks_peak,
            waste_ratio: stats.waste_ratio(),
            blocks_shared: stats.cache.hit_blocks,
            blocks_cached: stats.blocks_cached,
            evictions: stats.cache.evictions,
            cow_copies: stats.cache.cow_copies,
            states: (stats.cache.stored_snapshots > 0).then_some(StateFigures {
                kept: stats.cache.stored_snapshots,
                evicted: stats.cache.evicted_snapshots,
                stateless_tokens: stats.cache.stateless_tokens,
            }),
            preemptions: stats.preemptions,
            beams: variant.beams.map_or(1, |beams| beams.width),
            drafted_tokens: stats.drafted_tokens,
            accepted_tokens: stats.accepted_tokens,
            acceptance_ratio: stats.acceptance_ratio(),
            tokens_per_step: stats.tokens_per_step(),
            tiers: None,
        }
    }
}

/// Returns tokens whose text is shown: without the one that ended it.
fn shown(tokens: &[u32], finish: Finish) -> &[u32] {
    match tokens.split_last() {
        Some((_, shown)) if finish == Finish::Stop => shown,
        _ => tokens,
    }
}

fn finish_name(finish: Finish) -> &'static str {
    match finish {
        Finish::Length => "length",
        Finish::Stop => "eos",
        Finish::Context => "context",
        Finish::Cancelled => "cancelled",
    }
}
