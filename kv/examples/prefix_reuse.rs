//! Two prompts with a common beginning compute it once: `start` finds cached blocks by content and
//! says how many tokens need no step.
//!
//! `cargo run --release -p kv --example prefix_reuse -- cpu`
#![expect(clippy::print_stdout, reason = "an example")]
#![expect(clippy::as_conversions, clippy::cast_precision_loss, reason = "few tokens")]
#![expect(clippy::cast_possible_truncation, reason = "few tokens")]

use kv::{AttentionOptions, Axes, CacheSpec, Device, GroupId, KvCache, SequenceId};
use kv::{StartOptions, StepInput, TensorView, TensorViewMut};

/// Computes the tokens of a prompt that are not cached. Returns the number of cached ones.
fn prefill(
    cache: &mut KvCache,
    seq: SequenceId,
    prompt: &[u32],
    options: StartOptions<'_>,
) -> Result<u32, kv::Error> {
    let reused = cache.start(seq, prompt, options)?;
    let mut step = cache.begin_step(&[StepInput::prompt(seq, prompt)])?;
    // The V of a token is its position; zero queries make the output the mean of all V before.
    let v: Vec<f32> = step.positions().iter().flat_map(|position| [*position as f32; 4]).collect();
    let (zeros, mut out) = (vec![0.0_f32; v.len()], vec![0.0_f32; v.len()]);
    let dims = [step.positions().len() as u32, 1, 4];
    let zeros = TensorView::host(&zeros, &dims);
    step.write(0, zeros, TensorView::host(&v, &dims), Axes::Thd)?;
    let to = TensorViewMut::host(&mut out, &dims);
    step.attend(0, zeros, to, &AttentionOptions::causal(0.5))?;
    step.commit()?;
    // Cached rows count like computed ones: position p sees the mean of 0..=p.
    let same = |(out, v): (&f32, &f32)| (out - v / 2.0).abs() < 1e-4;
    assert!(out.iter().zip(&v).all(same), "{out:?}");
    Ok(reused)
}

fn main() -> Result<(), kv::Error> {
    let device = std::env::args().nth(1).unwrap_or_else(|| "cpu".to_owned());
    let spec = CacheSpec::builder().layers(1).kv_heads(1).head_dim(4).paged(4, 32).build()?;
    let mut cache = KvCache::new(Device::open(&device)?, spec)?;
    let (a, b, c, d) = (SequenceId(0), SequenceId(1), SequenceId(2), SequenceId(3));
    let plain = StartOptions::default();
    // A system prompt of 8 tokens, two blocks, and questions of 3 tokens.
    let first = [1, 2, 3, 4, 5, 6, 7, 8, 21, 22, 23];
    let second = [1, 2, 3, 4, 5, 6, 7, 8, 31, 32, 33];

    assert_eq!(prefill(&mut cache, a, &first, plain)?, 0);
    assert_eq!(prefill(&mut cache, b, &second, plain)?, 8); // while the first still runs
    let tables = [a, b].map(|seq| cache.state().block_table(seq, GroupId(0)).unwrap_or_default());
    assert_eq!(tables[0][..2], tables[1][..2]); // the same blocks, not copies
    assert_ne!(tables[0][2], tables[1][2]);
    assert_eq!(cache.state().usage().blocks_used, 4); // not 6

    // Blocks of ended requests can be found until their memory is needed. The last token of a
    // prompt is always computed, because its logits are needed.
    cache.release(a)?;
    assert_eq!(prefill(&mut cache, c, &first, plain)?, 10);
    // Tenants with different salts do not share blocks.
    assert_eq!(prefill(&mut cache, d, &first, plain.with_salt(b"tenant 7"))?, 0);

    let stats = cache.state().stats();
    assert_eq!((stats.requests, stats.query_tokens, stats.hit_tokens), (4, 44, 18));
    assert_eq!(stats.hit_blocks, 4); // full blocks; 2 further tokens came from an unfull one
    assert_eq!(stats.partial_hit_tokens, 2);
    println!("{device}: {} of {} prompt tokens reused", stats.hit_tokens, stats.query_tokens);
    Ok(())
}
