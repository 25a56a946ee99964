//! Beam search: forks share every block of their parent, and copy one only when they write to it.
//!
//! `cargo run --release -p kv --example fork_beams -- cpu`
#![expect(clippy::print_stdout, clippy::as_conversions, reason = "an example")]
#![expect(clippy::cast_possible_truncation, reason = "few tokens")]

use kv::{AttentionOptions, Axes, CacheSpec, Device, GroupId, KvCache, SequenceId};
use kv::{StartOptions, Step, StepInput, TensorView, TensorViewMut};

/// Runs the only layer of a step with a value of V for every row. Returns an output for every row.
fn forward(mut step: Step<'_>, values: &[f32]) -> Result<Vec<f32>, kv::Error> {
    let v: Vec<f32> = values.iter().flat_map(|value| [*value; 4]).collect();
    let (zeros, mut out) = (vec![0.0_f32; v.len()], vec![0.0_f32; v.len()]);
    let dims = [values.len() as u32, 1, 4];
    let zeros = TensorView::host(&zeros, &dims);
    step.write(0, zeros, TensorView::host(&v, &dims), Axes::Thd)?;
    let to = TensorViewMut::host(&mut out, &dims);
    step.attend(0, zeros, to, &AttentionOptions::causal(0.5))?;
    step.commit()?;
    Ok(out.into_iter().step_by(4).collect())
}

fn main() -> Result<(), kv::Error> {
    let device = std::env::args().nth(1).unwrap_or_else(|| "cpu".to_owned());
    let spec = CacheSpec::builder().layers(1).kv_heads(1).head_dim(4).paged(4, 32).build()?;
    let mut cache = KvCache::new(Device::open(&device)?, spec)?;
    let group = GroupId(0);
    let beams = [SequenceId(0), SequenceId(1), SequenceId(2)];
    let [parent, second, third] = beams;

    // A prompt of 6 tokens: one full block and a half.
    let prompt = [1, 2, 3, 4, 5, 6];
    cache.start(parent, &prompt, StartOptions::default())?;
    let step = cache.begin_step(&[StepInput::tokens(parent, &prompt)])?;
    forward(step, &[6.0; 6])?;

    // Forks cost no block and copy nothing.
    cache.fork(parent, second)?;
    cache.fork(parent, third)?;
    let table = cache.state().block_table(parent, group).unwrap_or_default().to_vec();
    assert!(
        beams.iter().all(|beam| cache.state().block_table(*beam, group) == Some(table.as_slice()))
    );
    let holders =
        |cache: &KvCache, block| cache.state().pool(group).map_or(0, |pool| pool.holders(block));
    assert!(table.iter().all(|block| holders(&cache, *block) == 3));
    assert_eq!((cache.state().usage().blocks_used, cache.state().stats().cow_copies), (2, 0));

    // Each beam continues with its own token. The half block is copied for two of them, the third
    // writes it in place; the full block stays shared.
    let step = cache.begin_step(&[
        StepInput::tokens(parent, &[70]),
        StepInput::tokens(second, &[71]),
        StepInput::tokens(third, &[72]),
    ])?;
    let out = forward(step, &[13.0, 20.0, 27.0])?;
    // Zero queries: the mean of six times 6 and of the beam's own value.
    let same = |(out, mean): (&f32, f32)| (out - mean).abs() < 1e-4;
    assert!(out.iter().zip([7.0, 8.0, 9.0]).all(same), "{out:?}");
    assert_eq!((cache.state().usage().blocks_used, cache.state().stats().cow_copies), (4, 2));
    assert_eq!(table.first().map(|block| holders(&cache, *block)), Some(3));

    // The worst beam ends, and a fork of the best one replaces it.
    cache.release(second)?;
    cache.fork(third, second)?;
    assert_eq!(cache.state().usage().blocks_used, 3);
    println!(
        "{device}: 3 beams of 7 tokens in {} blocks, not 6",
        cache.state().usage().blocks_used
    );
    Ok(())
}
