//! What one run of `kv generate` says at its end, for programs and for people.
use serde::Serialize;

use crate::args::GenerateArgs;
use crate::memory::Bytes;
use crate::scheduler::{Finish, Generated, Stats};
use crate::session::{Session, Variant};

/// The object `--json` prints.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    model: String,
    backend: String,
    format: String,
    layout: String,
    /// False when every token was computed again for each new one.
    cached: bool,
    sequences: Vec<Sequence>,
    stats: Figures,
}

#[derive(Debug, Serialize)]
struct Sequence {
    prompt: String,
    prompt_tokens: Vec<u32>,
    /// Generated tokens, an end-of-text token included.
    tokens: Vec<u32>,
    /// Their text, without an end-of-text token that ended the sequence.
    text: String,
    /// `length`, `eos` or `context`.
    finish: &'static str,
    reused_tokens: usize,
    ttft_ms: f64,
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
    reused_tokens: usize,
    bytes_per_token: u64,
    cache_bytes: u64,
    peak_bytes: u64,
    blocks_total: u32,
    blocks_peak: u32,
    waste_ratio: f64,
    preemptions: usize,
}

impl Report {
    pub(crate) fn new(
        args: &GenerateArgs,
        session: &Session,
        variant: &Variant,
        generated: &[Generated],
        stats: &Stats,
    ) -> anyhow::Result<Self> {
        let mut sequences = Vec::with_capacity(generated.len());
        for (prompt, generated) in session.prompts.iter().zip(generated) {
            let shown = match generated.tokens.split_last() {
                Some((_, shown)) if generated.finish == Finish::Stop => shown,
                _ => &generated.tokens,
            };
            sequences.push(Sequence {
                prompt: prompt.text.clone(),
                prompt_tokens: prompt.ids.clone(),
                tokens: generated.tokens.clone(),
                text: session.text.decode(shown)?,
                finish: match generated.finish {
                    Finish::Length => "length",
                    Finish::Stop => "eos",
                    Finish::Context => "context",
                },
                reused_tokens: generated.reused,
                ttft_ms: generated.first_token_ms,
            });
        }
        Ok(Self {
            model: session.model_name.clone(),
            backend: args.backend.to_string(),
            format: args.format.to_string(),
            layout: variant.layout.to_string(),
            cached: !variant.forget,
            stats: Figures {
                tokens_per_s: stats.tokens_per_s(),
                prefill_tokens_per_s: stats.prefill_tokens_per_s(),
                decode_tokens_per_s: stats.decode_tokens_per_s(),
                seconds: stats.seconds,
                steps: stats.steps,
                prompt_tokens: stats.prompt_tokens,
                generated_tokens: stats.generated_tokens,
                reused_tokens: sequences.iter().map(|sequence| sequence.reused_tokens).sum(),
                bytes_per_token: stats.bytes_per_token,
                cache_bytes: stats.cache_bytes,
                peak_bytes: stats.peak_bytes(),
                blocks_total: stats.blocks_total,
                blocks_peak: stats.blocks_peak,
                waste_ratio: stats.waste_ratio(),
                preemptions: stats.preemptions,
            },
            sequences,
        })
    }

    /// The same for people, without the texts.
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
        let mode = if self.cached { "" } else { ", every token computed again" };
        format!(
            "{} tokens in {:.2} s: {:.1} tokens/s (prefill {:.0}, decode {:.1})\n\
             time to first token {first}\n\
             cache {} of {} on {}, {} bytes a token, {}{mode}\n\
             {} of {} blocks used at the peak ({}), {:.1} % of held slots wasted\n\
             {} tokens reused, {} preemptions\n",
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
            s.reused_tokens,
            s.preemptions,
        )
    }
}
