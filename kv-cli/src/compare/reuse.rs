//! The savings of prefix reuse: a second request with the system prompt of a first one.
use kv_runner::Layout;
use kv_runner::blocks_of;
use serde::Serialize;

use crate::args::GenerateArgs;
use crate::job::{Job, Run, Silent, Variant};
use crate::num::{to_u32, to_usize};
use crate::output;

/// Tokens of the system prompt, if the model's context allows.
const SYSTEM_TOKENS: usize = 500;
/// Fewest tokens for a useful measurement.
const SYSTEM_TOKENS_MIN: usize = 16;
/// Tokens of a question, without and with the generated one.
const QUESTION_TOKENS_MAX: usize = 11;
const TAIL_TOKENS_MAX: usize = QUESTION_TOKENS_MAX + 1;
/// Runs of each kind; medians are reported.
const REPETITIONS: usize = 5;

/// Repeated until the system prompt is long enough.
const SYSTEM: &str = "You are a friendly helper who tells short stories to little children. \
     Use simple words. Every story has a beginning, a middle and a happy end. Tell of animals, \
     toys, the sun and the rain, and of friends who share what they have. Never scare anyone. ";
const QUESTIONS: [&str; 2] = ["Tell me about a dog.", "What did the cat find?"];

/// The second request's figures with and without reuse.
#[derive(Debug, Serialize)]
pub(super) struct Comparison {
    /// Tokens that both requests share.
    system_tokens: usize,
    repetitions: usize,
    lines: Vec<Line>,
}

#[derive(Debug, Serialize)]
struct Line {
    variant: &'static str,
    prompt_tokens: usize,
    reused_tokens: usize,
    /// Prompt tokens that were computed.
    computed_tokens: usize,
    /// Median milliseconds from admission to the first token.
    ttft_ms: f64,
    /// The time without reuse over this time.
    speedup: f64,
    /// Whether its first token is that of the run without reuse.
    same_token: bool,
}

/// Runs two requests one after the other, with and without reuse; `None` if the context is too
/// short.
pub(super) fn measure(args: &GenerateArgs, job: &Job) -> anyhow::Result<Option<Comparison>> {
    let model = job.loaded.model.config();
    let system_tokens =
        to_usize(model.context()).saturating_sub(TAIL_TOKENS_MAX).min(SYSTEM_TOKENS);
    if system_tokens < SYSTEM_TOKENS_MIN {
        return Ok(None);
    }
    let mut text = String::new();
    let mut system = Vec::new();
    while system.len() < system_tokens {
        text.push_str(SYSTEM);
        system = job.loaded.encode(&text)?;
    }
    system.truncate(system_tokens);
    let mut prompts = Vec::with_capacity(QUESTIONS.len());
    for question in QUESTIONS {
        let mut question = job.loaded.encode(question)?;
        // The question does not begin a text.
        if question.first().copied() == model.bos() {
            question.remove(0);
        }
        question.truncate(QUESTION_TOKENS_MAX);
        prompts.push([system.as_slice(), &question].concat());
    }
    let block_size = args.engine.paged.map_or(16, |paged| paged.block_size);
    let few = model.few_blocks(&args.engine.format, block_size)?;
    let longest = prompts.iter().map(Vec::len).max().map_or(1, to_u32) + 1;
    let num_blocks = (blocks_of(&few, longest) * 2).max(2);
    let layout = Layout::Paged { block_size, num_blocks };
    let base = Variant::new(args, layout);
    let base = Variant { tiers: false, max_new_tokens: 1, max_batch: 1, ignore_eos: true, ..base };
    let mut lines = Vec::new();
    let mut tokens = None;
    for (variant, reuse) in [("without reuse", false), ("with reuse", true)] {
        let runs = Variant { reuse, ..base };
        let (mut times, mut last) = (Vec::new(), None);
        for _ in 0..REPETITIONS {
            let Run { generated, .. } = job.run(args, &runs, prompts.clone(), &mut Silent)?;
            let Some(second) = generated.into_iter().last() else {
                continue;
            };
            times.push(second.first_token_ms - second.admitted_ms);
            last = Some(second);
        }
        let Some((second, prompt)) = last.zip(prompts.last()) else {
            return Ok(None);
        };
        let first = tokens.get_or_insert_with(|| second.tokens.clone());
        lines.push(Line {
            variant,
            prompt_tokens: prompt.len(),
            reused_tokens: second.reused,
            computed_tokens: prompt.len() - second.reused,
            ttft_ms: median(&mut times),
            speedup: 1.0,
            same_token: *first == second.tokens,
        });
    }
    let without = lines.first().map_or(0.0, |line| line.ttft_ms);
    for line in &mut lines {
        line.speedup = without / line.ttft_ms.max(f64::MIN_POSITIVE);
    }
    Ok(Some(Comparison { system_tokens, repetitions: REPETITIONS, lines }))
}

/// Returns the median of an odd number of values, 0 without any.
fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() >> 1).copied().unwrap_or(0.0)
}

impl Comparison {
    pub(super) fn show(&self) -> String {
        let heading =
            ["variant", "prompt", "reused", "computed", "first ms", "speed-up", "same token"];
        let mut rows = vec![heading.map(str::to_owned).to_vec()];
        rows.extend(self.lines.iter().map(|line| {
            vec![
                line.variant.to_owned(),
                line.prompt_tokens.to_string(),
                line.reused_tokens.to_string(),
                line.computed_tokens.to_string(),
                format!("{:.2}", line.ttft_ms),
                format!("{:.1}x", line.speedup),
                if line.same_token { "yes" } else { "NO" }.to_owned(),
            ]
        }));
        let why = if self.system_tokens < SYSTEM_TOKENS {
            ", the longest that fits the model"
        } else {
            ""
        };
        format!(
            "\na second request after a shared system prompt of {} tokens{why}; medians of \
             {} runs\n{}",
            self.system_tokens,
            self.repetitions,
            output::table(&rows)
        )
    }
}
