//! One cache for two tenants: salts and adapters separate their prompts, an image is part of a
//! prompt, kept prefixes survive pressure, and a prompt is forgotten.
//!
//! `cargo run --release -p kv --example tenants -- cpu`
#![expect(clippy::print_stdout, reason = "an example")]
#![expect(clippy::as_conversions, clippy::cast_precision_loss, reason = "few tokens")]
#![expect(clippy::cast_possible_truncation, reason = "few tokens")]

use kv::eviction::{Priority, Retention, RetentionRange};
use kv::reuse::ContentSpan;
use kv::{AttentionOptions, Axes, CacheSpec, Device, KvCache, SequenceId};
use kv::{StartOptions, StepInput, TensorView, TensorViewMut};

/// Returns the V of a token. It depends on adapter and image, as in a model, so that the reuse of a
/// wrong block shows in the outputs.
fn value(position: u32, token: u32, options: &StartOptions<'_>) -> f32 {
    let inside = |span: &&ContentSpan| (span.begin..span.begin + span.len).contains(&position);
    let image = options.contents().iter().find(inside).map_or(0, |span| span.id as u32);
    (token % 7 + 3 * (options.adapter().unwrap_or(0) as u32) + 5 * image) as f32
}

/// Runs a prompt, checks its outputs and ends it. Returns the number of reused tokens.
fn run(cache: &mut KvCache, prompt: &[u32], options: StartOptions<'_>) -> Result<u32, kv::Error> {
    let seq = SequenceId(0);
    let reused = cache.start(seq, prompt, options)?;
    let mut step = cache.begin_step(&[StepInput::prompt(seq, prompt)])?;
    let values = (0..).zip(prompt).map(|(position, token)| value(position, *token, &options));
    let v: Vec<f32> = values.clone().skip(reused as usize).flat_map(|value| [value; 4]).collect();
    let (zeros, mut out) = (vec![0.0_f32; v.len()], vec![0.0_f32; v.len()]);
    let dims = [step.positions().len() as u32, 1, 4];
    let zeros = TensorView::host(&zeros, &dims);
    step.write(0, zeros, TensorView::host(&v, &dims), Axes::Thd)?;
    let to = TensorViewMut::host(&mut out, &dims);
    step.attend(0, zeros, to, &AttentionOptions::causal(0.5))?;
    step.commit()?;
    cache.release(seq)?;
    // Zero queries: every output is the mean of all V so far, reused ones among them.
    let sums = values.scan(0.0, |sum, value| {
        *sum += value;
        Some(*sum)
    });
    let means = sums.zip(1_u8..).map(|(sum, count)| sum / f32::from(count));
    let got = out.iter().step_by(4);
    assert!(got.zip(means.skip(reused as usize)).all(|(out, mean)| (out - mean).abs() < 1e-3));
    Ok(reused)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let device = std::env::args().nth(1).unwrap_or_else(|| "cpu".to_owned());
    let spec = CacheSpec::builder().layers(1).kv_heads(1).head_dim(4).paged(4, 20).build()?;
    let mut cache = KvCache::new(Device::open(&device)?, spec)?;
    // A system prompt of 8 tokens, two blocks, and what follows it.
    let system = [1, 2, 3, 4, 5, 6, 7, 8];
    let after = |rest: [u32; 5]| [&system[..], &rest].concat();
    let (first, second) = (after([21, 22, 23, 24, 25]), after([31, 32, 33, 34, 35]));

    // Tenants do not share blocks, although their tokens are equal; nor do adapters. The blocks of
    // tenant a's system prompt are evicted last.
    let last = Priority { level: 90, duration: None };
    let range = RetentionRange { begin: 0, end: Some(8), priority: last };
    let retention = Retention::new(vec![range])?;
    let a = StartOptions::default().with_salt(b"tenant a").with_retention(&retention);
    let b = StartOptions::default().with_salt(b"tenant b");
    let adapted = b.with_adapter(3);
    assert_eq!(run(&mut cache, &first, a)?, 0);
    assert_eq!(run(&mut cache, &second, a)?, 8);
    for options in [b, adapted] {
        assert_eq!(run(&mut cache, &first, options)?, 0);
        assert_eq!(run(&mut cache, &first, options)?, 12); // the last token is always computed
    }

    // Two images at the same placeholder tokens: what is before them is reused by both.
    let image = after([9, 9, 9, 9, 41]);
    let [cat, dog] = [1, 2].map(|id| [ContentSpan { begin: 8, len: 4, id }]); // hashes of the bytes
    assert_eq!(run(&mut cache, &image, a.with_contents(&cat))?, 8);
    assert_eq!(run(&mut cache, &image, a.with_contents(&dog))?, 8);
    assert_eq!(run(&mut cache, &image, a.with_contents(&cat))?, 12);

    // A tenant's prompt is forgotten after its system prompt: the full block and the unfull one.
    assert_eq!(cache.forget_prefix(&image, a.with_contents(&cat), 8)?, 2);
    assert_eq!(cache.state().probe(&image, a.with_contents(&cat)), 8);
    assert_eq!(cache.state().probe(&image, a.with_contents(&dog)), 12);

    // Priorities may also be set later, here for the adapter's system prompt. Then more prompts
    // come than the cache has blocks for.
    assert_eq!(cache.prioritise_prefix(&system, adapted, last), 8);
    for start in (100..200).step_by(10) {
        let prompt: Vec<u32> = (start..start + 9).collect();
        assert_eq!(run(&mut cache, &prompt, StartOptions::default())?, 0);
    }
    assert!(cache.state().stats().evictions > 0);
    let found = [a, adapted, b].map(|options| cache.state().probe(&first, options));
    assert_eq!(found, [8, 8, 0]); // the kept prefixes, without what followed them
    assert_eq!(run(&mut cache, &first, a)?, 8);

    let stats = cache.state().stats();
    println!("{device}: {} of {} tokens reused", stats.hit_tokens, stats.query_tokens);
    Ok(())
}
