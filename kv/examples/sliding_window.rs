//! A model whose second layer attends within a sliding window: its group of layers frees blocks as
//! they leave the window, and keeps the first tokens (sink tokens).
//!
//! `cargo run --release -p kv --example sliding_window -- cpu`
#![expect(clippy::print_stdout, clippy::as_conversions, reason = "an example")]
#![expect(clippy::cast_precision_loss, reason = "few tokens")]

use kv::{AttentionOptions, Axes, CacheSpec, Device, GroupId, KvCache, SequenceId};
use kv::{StartOptions, StepInput, TensorView, TensorViewMut};

const WINDOW_LEFT: u32 = 7; // a query sees itself and 7 tokens before
const SINK_TOKENS: u32 = 4;
const TOKENS: u32 = 40;

fn main() -> Result<(), kv::Error> {
    let device = std::env::args().nth(1).unwrap_or_else(|| "cpu".to_owned());
    // Layers in one group share geometry, blocks and tables. Layer 0 stays in the first group.
    let spec = CacheSpec::builder()
        .layers(2)
        .kv_heads(1)
        .head_dim(4)
        .paged(4, 16)
        .group([1], |group| group.window_left(WINDOW_LEFT).sink_tokens(SINK_TOKENS))
        .build()?;
    let (full, windowed) = (GroupId(0), GroupId(1));
    let mut cache = KvCache::new(Device::open(&device)?, spec)?;
    let full_options = AttentionOptions::causal(0.5);
    let window_options = full_options.with_window_left(WINDOW_LEFT).with_sink_tokens(SINK_TOKENS);

    let seq = SequenceId(0);
    cache.start(seq, &[0], StartOptions::default())?;
    let dims = [1, 1, 4];
    let zeros = [0.0_f32; 4];
    let zeros = TensorView::host(&zeros, &dims);
    let (mut out, mut out_windowed) = ([0.0_f32; 4], [0.0_f32; 4]);
    let mut least_free = u32::MAX;
    for token in 0..TOKENS {
        let mut step = cache.begin_step(&[StepInput::tokens(seq, &[token])])?;
        let v = [token as f32; 4]; // also its position
        let v = TensorView::host(&v, &dims);
        step.write(0, zeros, v, Axes::Thd)?;
        step.attend(0, zeros, TensorViewMut::host(&mut out, &dims), &full_options)?;
        step.write(1, zeros, v, Axes::Thd)?;
        let to = TensorViewMut::host(&mut out_windowed, &dims);
        step.attend(1, zeros, to, &window_options)?;
        step.commit()?;
        least_free = least_free.min(cache.state().free_blocks(windowed));
    }

    // Zero queries: means of the keys that the last token sees, 0..40 and 0..4 with 32..40.
    let mean = (0..TOKENS).sum::<u32>() as f32 / TOKENS as f32;
    assert!((out[0] - mean).abs() < 1e-3, "{out:?}");
    let mean = (0..SINK_TOKENS).chain(32..TOKENS).sum::<u32>() as f32 / 12.0;
    assert!((out_windowed[0] - mean).abs() < 1e-3, "{out_windowed:?}");

    // The first group holds 10 blocks for 40 tokens. The other holds the block of the sink tokens
    // and at most 3 blocks of the window, however long the sequence gets.
    assert_eq!(cache.state().free_blocks(full), 16 - 10);
    assert_eq!(cache.state().free_blocks(windowed), 16 - 3);
    assert_eq!(least_free, 16 - 4);
    println!("{device}: {TOKENS} tokens hold 10 blocks in full, at most 4 with a window");
    Ok(())
}
