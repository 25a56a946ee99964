//! Runs requests in continuous batches over a model of a few lines, and compares their texts with
//! a recomputation without a cache.
//!
//! `cargo run -p kv --features engine --example engine -- [DEVICE]`, `cpu` unless given.
#![forbid(unsafe_code)]
#![expect(clippy::print_stdout, reason = "an example prints its result")]
use std::error::Error;

use kv::engine::{Batch, Engine, Event, Limits, Logits, Model, ModelError, Request};
use kv::{AttentionOptions, Axes, CacheSpec, Device, KvCache, KvFormat, Step};
use kv::{TensorView, TensorViewMut, backend::Backend};

const VOCAB: u16 = 32;

/// A model whose next token depends on all tokens before it: keys are zero, so attention returns
/// the mean of their values.
struct Mean;

/// The value of a token: 16 small whole numbers, whose sums are exact on every device.
fn value(token: u32) -> [u8; 16] {
    let digit = |at| u8::try_from(token.wrapping_mul(at) % 7).unwrap_or(0);
    std::array::from_fn(|at| digit(u32::try_from(at).unwrap_or(0).wrapping_add(3)))
}

/// The token that follows values with these sums.
fn next(sums: impl Iterator<Item = f32>) -> u16 {
    let weighted: f32 = sums.zip(1_u8..).map(|(sum, weight)| sum * f32::from(weight)).sum();
    (0..VOCAB).find(|token| f32::from(*token) >= weighted % f32::from(VOCAB)).unwrap_or(0)
}

impl<B: Backend> Model<B> for Mean {
    fn forward(&mut self, step: &mut Step<'_, B>, batch: &Batch) -> Result<Logits, ModelError> {
        let values: Vec<f32> =
            batch.tokens.iter().flat_map(|token| value(*token).map(f32::from)).collect();
        let (zeros, mut out) = (vec![0.0; values.len()], vec![0.0; values.len()]);
        let dims = [u32::try_from(batch.tokens.len())?, 1, 16]; // tokens, heads, head_dim
        let view = |rows| TensorView::host::<f32>(rows, &dims);
        step.write(0, view(&zeros), view(&values), Axes::Thd)?;
        let means = TensorViewMut::host(&mut out, &dims);
        step.attend(0, view(&zeros), means, &AttentionOptions::causal(0.25))?;
        let means: Vec<_> = out.chunks_exact(16).zip(step.positions()).collect();
        let mut logits = Vec::new();
        for row in batch.logit_rows() {
            let (mean, position) = means.get(usize::try_from(row)?).ok_or("a row of the batch")?;
            let tokens = f32::from(u16::try_from(**position)?) + 1.0;
            let best = next(mean.iter().map(|mean| (mean * tokens).round()));
            logits.extend((0..VOCAB).map(|token| f32::from(u8::from(token == best))));
        }
        Ok(Logits::new(logits, VOCAB.into()))
    }
}

/// Continues a prompt without a cache.
fn recomputed(prompt: &[u32], new: usize) -> Vec<u32> {
    let mut text = prompt.to_vec();
    for _ in 0..new {
        let mut sums = [0.0_f32; 16];
        for token in &text {
            sums.iter_mut().zip(value(*token)).for_each(|(sum, x)| *sum += f32::from(x));
        }
        text.push(next(sums.into_iter()).into());
    }
    text.split_off(prompt.len())
}

fn main() -> Result<(), Box<dyn Error>> {
    let device = std::env::args().nth(1).unwrap_or_else(|| "cpu".to_owned());
    let spec = CacheSpec::builder().layers(1).kv_heads(1).head_dim(16).format(KvFormat::F32);
    let cache = KvCache::new(Device::open(&device)?, spec.paged(16, 40).build()?)?;
    // 4 sequences at once and 48 tokens per step: the long prompt takes several steps, in which the
    // short ones are answered.
    let limits = Limits { max_batch: 4, max_step_tokens: 48, ..Limits::new(512) };
    let mut engine = Engine::new(cache, Limits { vocab: Some(VOCAB.into()), ..limits });
    let prompts: Vec<Vec<u32>> = [300, 5, 9, 4, 40, 7]
        .iter()
        .map(|len| {
            (0..*len).map(|at: u32| (at.wrapping_mul(at) ^ len) % u32::from(VOCAB)).collect()
        })
        .collect();
    for prompt in &prompts {
        engine.submit(Request::new(prompt.clone(), 20))?;
    }
    let mut order = Vec::new();
    while engine.has_work() {
        for event in engine.step(&mut Mean)? {
            if let Event::Finished { index, generated } = event {
                assert_eq!(Some(generated.tokens), prompts.get(index).map(|p| recomputed(p, 20)));
                order.push(index);
            }
        }
    }
    let (stats, usage) = (engine.stats(), engine.cache().state().usage());
    assert_eq!((order.len(), stats.generated_tokens, usage.blocks_used), (6, 120, 0));
    println!("{device}: 6 texts in {} steps, they end in the order {order:?}", stats.steps);
    Ok(())
}
