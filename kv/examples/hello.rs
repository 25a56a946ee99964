//! A prompt and one decode step through a cache of one layer. K, V and Q are written by hand here;
//! a model would compute them.
//!
//! `cargo run --release -p kv --example hello -- cpu`
#![expect(clippy::print_stdout, reason = "an example")]

use kv::{AttentionOptions, Axes, CacheSpec, Device, KvCache, SequenceId, StartOptions};
use kv::{StepInput, TensorView, TensorViewMut};

fn main() -> Result<(), kv::Error> {
    let device = std::env::args().nth(1).unwrap_or_else(|| "cpu".to_owned());
    // One layer, one kv head of 4 values; 64 blocks of 16 tokens, reserved once.
    let spec = CacheSpec::builder().layers(1).kv_heads(1).head_dim(4).paged(16, 64).build()?;
    let mut cache = KvCache::new(Device::open(&device)?, spec)?;
    let (seq, prompt) = (SequenceId(0), [11, 22]);

    // Prefill. `start` finds the leading tokens that are cached already: none yet.
    cache.start(seq, &prompt, StartOptions::default())?;
    let mut step = cache.begin_step(&[StepInput::prompt(seq, &prompt)])?;
    assert_eq!(step.positions(), [0, 1]); // what RoPE needs
    let dims = [2, 1, 4]; // tokens, heads, head_dim
    let k = [1.0_f32, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0];
    let v = [1.0_f32, 2.0, 3.0, 4.0, 3.0, 4.0, 5.0, 6.0];
    let (q, mut out) = ([0.0_f32; 8], [0.0_f32; 8]);
    // For every layer: store the K and V of the new tokens, then attend to all tokens so far.
    step.write(0, TensorView::host(&k, &dims), TensorView::host(&v, &dims), Axes::Thd)?;
    let options = AttentionOptions::causal(0.5); // 1 / sqrt(head_dim)
    step.attend(0, TensorView::host(&q, &dims), TensorViewMut::host(&mut out, &dims), &options)?;
    step.commit()?; // lengths advance; a dropped step is rolled back instead
    // Zero queries give all keys the same weight: token 0 sees itself, token 1 the mean of both.
    assert!(near(&out, &[1.0, 2.0, 3.0, 4.0, 2.0, 3.0, 4.0, 5.0]), "{out:?}");
    println!("{device}: prefill  {out:?}");

    // Decode: one token, whose query is nearly parallel to the key of token 1.
    let mut step = cache.begin_step(&[StepInput::tokens(seq, &[33])])?;
    assert_eq!(step.positions(), [2]);
    let dims = [1, 1, 4];
    let (kv, q, mut out) = ([0.0_f32; 4], [0.0_f32, 64.0, 0.0, 0.0], [0.0_f32; 4]);
    step.write(0, TensorView::host(&kv, &dims), TensorView::host(&kv, &dims), Axes::Thd)?;
    step.attend(0, TensorView::host(&q, &dims), TensorViewMut::host(&mut out, &dims), &options)?;
    step.commit()?;
    assert!(near(&out, &[3.0, 4.0, 5.0, 6.0]), "{out:?}");
    assert_eq!(cache.state().seq_len(seq), Some(3));
    println!("{device}: decode   {out:?}");

    cache.release(seq)?; // its blocks are free, but an equal prompt can still reuse them
    Ok(())
}

fn near(out: &[f32], expected: &[f32]) -> bool {
    out.iter().zip(expected).all(|(out, expected)| (out - expected).abs() < 1e-5)
}
