//! Continuous batching: one step decodes a running sequence, appends to another and prefills a
//! third, as one ragged `thd` tensor without padding.
//!
//! `cargo run --release -p kv --example ragged_batch -- cpu`
#![expect(clippy::print_stdout, clippy::as_conversions, reason = "an example")]
#![expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, reason = "few tokens")]

use kv::{AttentionOptions, Axes, CacheSpec, Device, KvCache, SequenceId, StartOptions};
use kv::{Step, StepInput, TensorView, TensorViewMut};

const LAYERS: u16 = 2;

/// Runs all layers of a step: `offsets` has a value for every row of the batch, and the V of a row
/// is this value plus the row's position. Returns the output of every row in the last layer.
fn forward(mut step: Step<'_>, offsets: &[f32]) -> Result<Vec<f32>, kv::Error> {
    let rows = step.positions().iter().zip(offsets);
    let v: Vec<f32> = rows.flat_map(|(position, offset)| [*position as f32 + offset; 4]).collect();
    let (zeros, mut out) = (vec![0.0_f32; v.len()], vec![0.0_f32; v.len()]);
    let dims = [step.positions().len() as u32, 1, 4]; // rows of the whole batch, heads, head_dim
    let (zeros, v) = (TensorView::host(&zeros, &dims), TensorView::host(&v, &dims));
    for layer in 0..LAYERS {
        step.write(layer, zeros, v, Axes::Thd)?;
        let out = TensorViewMut::host(&mut out, &dims);
        step.attend(layer, zeros, out, &AttentionOptions::causal(0.5))?;
    }
    step.commit()?;
    Ok(out.into_iter().step_by(4).collect())
}

fn main() -> Result<(), kv::Error> {
    let device = std::env::args().nth(1).unwrap_or_else(|| "cpu".to_owned());
    let spec = CacheSpec::builder().layers(LAYERS).kv_heads(1).head_dim(4).paged(16, 64).build()?;
    let mut cache = KvCache::new(Device::open(&device)?, spec)?;
    let (a, b, c) = (SequenceId(0), SequenceId(1), SequenceId(2));

    // Two requests at first: 5 tokens, and the first 2 of a prompt of 5.
    cache.start(a, &[1, 2, 3, 4, 5], StartOptions::default())?;
    cache.start(b, &[6, 7, 8, 9, 10], StartOptions::default())?;
    let inputs = [StepInput::tokens(a, &[1, 2, 3, 4, 5]), StepInput::tokens(b, &[6, 7])];
    let step = cache.begin_step(&inputs)?;
    forward(step, &[0.0, 0.0, 0.0, 0.0, 0.0, 10.0, 10.0])?;

    // A third arrives: 1 + 3 + 4 rows, one sequence after another.
    cache.start(c, &[11, 12, 13, 14], StartOptions::default())?;
    let step = cache.begin_step(&[
        StepInput::tokens(a, &[99]),
        StepInput::tokens(b, &[8, 9, 10]),
        StepInput::tokens(c, &[11, 12, 13, 14]),
    ])?;
    assert_eq!(step.positions(), [5, 2, 3, 4, 0, 1, 2, 3]);
    let out = forward(step, &[0.0, 10.0, 10.0, 10.0, 20.0, 20.0, 20.0, 20.0])?;

    // Zero queries make the output of position p the mean of its own sequence's V at 0..=p.
    let expected = [2.5, 11.0, 11.5, 12.0, 20.0, 20.5, 21.0, 21.5];
    assert!(out.iter().zip(expected).all(|(out, mean)| (out - mean).abs() < 1e-4), "{out:?}");
    assert_eq!([a, b, c].map(|seq| cache.state().seq_len(seq)), [Some(6), Some(5), Some(4)]);
    println!("{device}: decode, append and prefill in one step: {out:?}");
    Ok(())
}
