//! Correctness first: a case of each kernel family at the measured shapes.
//!
//! `kv-testkit` compares with its f64 oracle: outputs within twice the error of the plain
//! computation in the inputs' precision, stored rows bit for bit as `kv-quant` encodes them.
use kv_core::{CacheSpec, DType, KvFormat, Scaling};
use kv_cuda::CudaBackend;
use kv_testkit::Shared;
use kv_testkit::device::Place;
use kv_testkit::fixture::{CacheFixture, StepConfig, StepKind};

use crate::bench::{Bench, Result};
use crate::input::{self, FORMATS};

/// Formats whose prefill is also checked where its contexts are split: copied and decoded rows.
const SUFFIXES: [KvFormat; 2] = [KvFormat::Bf16, KvFormat::Int8(Scaling::Tensor)];

/// Lengths and geometry.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    kv_heads: u32,
    head_dim: u32,
    /// Tokens of a long and of a short sequence.
    lens: [u32; 2],
    /// New tokens of a prompt chunk.
    chunk: u32,
}

/// Runs all checks, each a record, and returns whether all passed.
pub(crate) fn run(bench: &mut Bench) -> Result<bool> {
    let sizes = if bench.is_tiny {
        Sizes { kv_heads: 1, head_dim: 64, lens: [35, 3], chunk: 5 }
    } else {
        Sizes { kv_heads: 8, head_dim: 128, lens: [3000, 33], chunk: 200 }
    };
    let mut is_right = true;
    for format in FORMATS {
        if !bench.wants_format(format) {
            continue;
        }
        for group in [1, 8] {
            let result = one(bench, sizes, format, group);
            is_right &= result.is_ok();
            let what = "write, decode, prefill, gather, copy_blocks";
            bench.check(&format!("oracle/{format}/gqa{group}: {what}"), &result)?;
        }
        if SUFFIXES.contains(&format) {
            let sizes = if bench.is_tiny {
                Sizes { kv_heads: 1, head_dim: 64, lens: [1300, 3], chunk: 12 }
            } else {
                Sizes { kv_heads: 1, head_dim: 128, lens: [8100, 33], chunk: 64 }
            };
            let result = suffix(bench, sizes, format);
            is_right &= result.is_ok();
            let what = format!("{} queries after {} tokens", sizes.chunk, sizes.lens[0]);
            bench.check(&format!("oracle/{format}/suffix: {what}"), &result)?;
        }
    }
    Ok(is_right)
}

/// Makes a cache for both sequences.
fn fixture(
    bench: &Bench,
    sizes: Sizes,
    format: KvFormat,
) -> Result<CacheFixture<Shared<CudaBackend>>, String> {
    let tokens = sizes.lens[0].saturating_add(sizes.chunk).saturating_add(64);
    let spec = CacheSpec::builder()
        .layers(1)
        .kv_heads(sizes.kv_heads)
        .head_dim(sizes.head_dim)
        .format(format)
        .max_sequences(4)
        .max_seq_len(tokens)
        .paged(16, tokens.div_ceil(16).saturating_add(16))
        .build()
        .map_err(|error| say("geometry", &error))?;
    if input::is_calibrated(format) {
        CacheFixture::calibrated(&bench.device, spec, input::scales(1), 1)
    } else {
        CacheFixture::new(&bench.device, spec, 1)
    }
    .map_err(|error| say("cache", &error))
}

fn say(what: &str, error: &dyn std::fmt::Display) -> String {
    format!("{what}: {error}")
}

/// Returns the settings of every step.
fn config(group: usize) -> StepConfig {
    StepConfig {
        kv_dtype: DType::Bf16,
        q_dtype: DType::Bf16,
        inputs: Place::Device,
        group,
        lse: false,
        ..StepConfig::default()
    }
}

fn one(bench: &Bench, sizes: Sizes, format: KvFormat, group: usize) -> Result<(), String> {
    let [long, short] = sizes.lens;
    let (mut fixture, decode) = (fixture(bench, sizes, format)?, config(group));
    let mut all = || {
        fixture.fill(1, long)?;
        fixture.fill(2, short)?;
        fixture.step(&[(1, StepKind::Tokens(1)), (2, StepKind::Tokens(1))], &decode)?;
        fixture.step(&[(2, StepKind::Tokens(sizes.chunk))], &decode)?;
        // The child writes into a copy of the block that both have.
        fixture.fork(2, 3)?;
        fixture.step(&[(3, StepKind::Tokens(1)), (1, StepKind::Tokens(1))], &decode)?;
        fixture.check()
    };
    all().map_err(|error| say("wrong", &error))
}

/// Runs few queries after a long context, alone and beside a short one: prefill that is split.
fn suffix(bench: &Bench, sizes: Sizes, format: KvFormat) -> Result<(), String> {
    let [long, short] = sizes.lens;
    let (mut fixture, config) = (fixture(bench, sizes, format)?, config(4));
    let mut all = || {
        fixture.fill(1, long)?;
        fixture.fill(2, short)?;
        fixture.step(&[(1, StepKind::Tokens(sizes.chunk))], &config)?;
        fixture.step(&[(2, StepKind::Tokens(9)), (1, StepKind::Tokens(11))], &config)
    };
    all().map(drop).map_err(|error| say("wrong", &error))
}
