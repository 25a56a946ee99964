//! FP8 with given scales: they are measured on a text, kept in a file, given to a cache, and
//! replaced while a sequence is live.
//!
//! `cargo run --release -p kv --example calibration -- cpu`
#![expect(clippy::print_stdout, reason = "an example")]
#![expect(clippy::as_conversions, reason = "few channels")]

use std::error::Error;

use kv::error::CacheError;
use kv::quant::calibrate::Calibrator;
use kv::quant::file::{self, Metadata};
use kv::quant::{Calibration, Scaling};
use kv::{AttentionOptions, Axes, CacheSpec, Device, KvCache, KvFormat};
use kv::{SequenceId, StartOptions, StepInput, TensorView, TensorViewMut};

const SEQ: SequenceId = SequenceId(0);
/// Largest V of the second head: FP8 without a scale ends at 448.
const LARGE: f32 = 2000.0;
const HEAD_DIM: u32 = 64; // of each of the two heads

/// Makes Q, K and V of some tokens by a linear congruential generator. The second head of V has
/// values of up to `large`.
fn noise(tokens: u32, mut state: u32, large: f32) -> [Vec<f32>; 3] {
    let mut rows = |factors: [f32; 2]| -> Vec<f32> {
        let of = |at: usize| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let [.., low, high] = state.to_le_bytes();
            f32::from(i16::from_le_bytes([low, high])) / 32768.0
                * factors[at / HEAD_DIM as usize % 2]
        };
        (0..(tokens * 2 * HEAD_DIM) as usize).map(of).collect()
    };
    [rows([1.0, 1.0]), rows([1.0, 1.0]), rows([1.0, large])]
}

/// Opens a cache with constants and starts the sequence in it.
fn open(name: &str, format: KvFormat, given: Option<Calibration>) -> Result<KvCache, kv::Error> {
    let spec = CacheSpec::builder().layers(1).kv_heads(2).head_dim(HEAD_DIM).format(format);
    let spec = spec.paged(16, 8).build()?;
    let mut cache = KvCache::builder(Device::open(name)?, spec).calibration(given).build()?;
    cache.start(SEQ, &[], StartOptions::default())?;
    Ok(cache)
}

/// Appends tokens to the sequence and attends. Returns the outputs.
fn append(cache: &mut KvCache, tokens: &[u32], seed: u32) -> Result<Vec<f32>, Box<dyn Error>> {
    let count = u32::try_from(tokens.len())?;
    let [q, k, v] = noise(count, seed, LARGE);
    let mut out = vec![0.0_f32; v.len()];
    let dims = [count, 2, HEAD_DIM];
    let mut step = cache.begin_step(&[StepInput::tokens(SEQ, tokens)])?;
    step.write(0, TensorView::host(&k, &dims), TensorView::host(&v, &dims), Axes::Thd)?;
    let to = TensorViewMut::host(&mut out, &dims);
    step.attend(0, TensorView::host(&q, &dims), to, &AttentionOptions::causal(0.125))?;
    step.commit()?;
    Ok(out)
}

/// Returns the root mean square of the differences of each head, relative to that of `exact`.
fn errors(got: &[f32], exact: &[f32]) -> [f32; 2] {
    let mut sums = [[0.0; 2]; 2];
    for (at, (got, exact)) in got.iter().zip(exact).enumerate() {
        let [error, all] = &mut sums[at / HEAD_DIM as usize % 2];
        *error += (got - exact).powi(2);
        *all += exact.powi(2);
    }
    sums.map(|[error, all]: [f32; 2]| (error / all).sqrt())
}

fn main() -> Result<(), Box<dyn Error>> {
    let device = std::env::args().nth(1).unwrap_or_else(|| "cpu".to_owned());
    let fp8 = KvFormat::Fp8E4m3(Scaling::Head);
    let without = open(&device, fp8, None);
    assert!(matches!(without, Err(kv::Error::Cache(CacheError::Calibration(_)))));

    // Measure a text, as a program does once for a model, and keep the constants.
    let mut calibrator = Calibrator::new(1, 2, [HEAD_DIM, HEAD_DIM])?.skip_first(0);
    let [q, k, v] = noise(256, 1, LARGE);
    calibrator.observe(0, 0, &k, &v, &q, 2)?;
    let written = file::write(&calibrator.finish()?, &Metadata::of(&calibrator, "noise 1"))?;
    let path = std::env::temp_dir().join(format!("calibration-{}.safetensors", std::process::id()));
    std::fs::write(&path, written)?;

    // Every later run reads them, and refuses those of another model.
    let (calibration, metadata) = file::read(&std::fs::read(&path)?)?;
    std::fs::remove_file(&path)?;
    metadata.check_model("noise 1")?;
    assert_eq!((&calibration, metadata.tokens), (&calibrator.finish()?, 256));
    let mut exact = open(&device, KvFormat::F32, None)?;
    let mut coded = open(&device, fp8, Some(calibration))?;
    let prompt: Vec<u32> = (0..64).collect();
    let [got, expected] = [&mut coded, &mut exact].map(|cache| append(cache, &prompt, 2));
    let before = errors(&got?, &expected?);
    assert!(before.iter().all(|error| (1e-4..0.05).contains(error)), "{before:?}");

    // Constants of more text replace them. The cached rows are encoded again, not computed again;
    // other prompts no longer find them, because their bytes depend on what was there before.
    let [q, k, v] = noise(256, 3, 3.0 * LARGE);
    calibrator.observe(0, 0, &k, &v, &q, 2)?;
    assert_eq!(coded.state().probe(&prompt, StartOptions::default()), 63);
    coded.recalibrate(calibrator.finish()?)?;
    assert_eq!(coded.state().probe(&prompt, StartOptions::default()), 0);
    assert_eq!(coded.state().seq_len(SEQ), Some(64));
    let [got, expected] = [&mut coded, &mut exact].map(|cache| append(cache, &[64], 4));
    let after = errors(&got?, &expected?);
    assert!(after.iter().all(|error| (1e-4..0.08).contains(error)), "{after:?}");
    println!("{device}: {fp8}: errors of both heads {before:.3?}, recalibrated {after:.3?}");
    Ok(())
}
