//! The same tokens in caches of f32, int8 and l4 (4 bits): bytes per token, and the error of
//! attention over decoded codes.
//!
//! `cargo run --release -p kv --example quantised -- cpu`
#![expect(clippy::print_stdout, reason = "an example")]

use kv::quant::{ScaleGroup, Scaling};
use kv::{AttentionOptions, Axes, CacheSpec, Device, KvCache, KvFormat};
use kv::{SequenceId, StartOptions, StepInput, TensorView, TensorViewMut};

const TOKENS: u32 = 64;
const HEAD_DIM: u32 = 64;
const DIMS: [u32; 3] = [TOKENS, 1, HEAD_DIM];

/// Returns the bytes per token and the outputs of a prompt, in a cache of this format.
fn attend(device: &str, format: KvFormat) -> Result<(u64, Vec<f32>), kv::Error> {
    let builder = CacheSpec::builder().layers(1).kv_heads(1).head_dim(HEAD_DIM).format(format);
    let spec = builder.paged(16, 8).build()?;
    let bytes = spec.memory().bytes_per_token;
    let mut cache = KvCache::new(Device::open(device)?, spec)?;
    let seq = SequenceId(0);
    cache.start(seq, &[], StartOptions::default())?;
    let mut step = cache.begin_step(&[StepInput::count(seq, TOKENS)])?; // without token ids
    // Tensors are f32, f16 or bf16 whatever the stored format is.
    let [q, k, v] = [1, 2, 3].map(noise);
    let mut out = vec![0.0_f32; v.len()];
    step.write(0, TensorView::host(&k, &DIMS), TensorView::host(&v, &DIMS), Axes::Thd)?;
    let to = TensorViewMut::host(&mut out, &DIMS);
    step.attend(0, TensorView::host(&q, &DIMS), to, &AttentionOptions::causal(0.125))?;
    step.commit()?;
    Ok((bytes, out))
}

/// Makes a tensor of values from -1 to 1, by a linear congruential generator.
fn noise(seed: u32) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let [.., low, high] = state.to_le_bytes();
        f32::from(i16::from_le_bytes([low, high])) / 32768.0
    };
    (0..TOKENS * HEAD_DIM).map(|_| next()).collect()
}

/// Returns the root mean square of the differences, relative to that of `exact`.
fn error(got: &[f32], exact: &[f32]) -> f32 {
    let squares: f32 = got.iter().zip(exact).map(|(got, exact)| (got - exact).powi(2)).sum();
    (squares / exact.iter().map(|exact| exact.powi(2)).sum::<f32>()).sqrt()
}

fn main() -> Result<(), kv::Error> {
    let device = std::env::args().nth(1).unwrap_or_else(|| "cpu".to_owned());
    let (f32_bytes, exact) = attend(&device, KvFormat::F32)?;
    assert_eq!(f32_bytes, 2 * 64 * 4); // K and V
    // A row has 64 codes of 8 or 4 bits and a scale of 2 bytes. The last number bounds the error.
    for (format, token_bytes, bound) in [
        (KvFormat::Int8(Scaling::Row), 2 * (64 + 2), 0.01),
        (KvFormat::L4(ScaleGroup::Row), 2 * (32 + 2), 0.12),
    ] {
        let (bytes, out) = attend(&device, format)?;
        assert_eq!(bytes, token_bytes);
        let error = error(&out, &exact);
        assert!(error > 0.0 && error < bound, "{format}: {error}");
        println!("{device}: {format}: {bytes} bytes for {f32_bytes}, error {error:.4}");
    }
    Ok(())
}
