//! Many queries over quantised rows, in 16 bits: what a device has kernels of its own for.
use kv_core::{CacheSpec, DType, KvFormat, Transform};

use super::{LARGE_MEANS, Likeness, NEUTRAL, lab, quantised};
use crate::case::{At, Case, CaseError, CaseResult, Outcome};
use crate::device::Device;
use crate::lab::{Brings, How, Lab};
use crate::rng::Rng;
use crate::suite::{ORDERS, case};

pub(super) fn cases<B: Device>() -> Vec<Case<B>> {
    vec![
        case("quant/prefill_over_every_format", formats),
        case("quant/prefill_of_every_head_dim", head_dims),
        case("quant/prefill_with_any_option", options),
        case("quant/prefill_over_a_tail", tails),
        case("quant/prefill_over_magnitudes", magnitudes),
    ]
}

/// Types of queries.
const NARROW: [DType; 2] = [DType::F16, DType::Bf16];
const BALANCED: Likeness = Likeness { mean: 3.0, balance: 1.0 };

/// A prompt, then a chunk behind it beside a step of decoding, over tiles of tokens of any size.
fn prompts<B: Device>(lab: &mut Lab<B>, how: &How) -> Result<(), CaseError> {
    lab.start(1)?;
    lab.start(2)?;
    lab.step(&[(1, Brings::Tokens(70)), (2, Brings::Tokens(10))], how).at("prompts")?;
    lab.step(&[(2, Brings::Tokens(1)), (1, Brings::Tokens(13))], how).at("a chunk")?;
    lab.release(1)?;
    lab.release(2)
}

fn formats<B: Device>(backend: &B) -> CaseResult {
    let mut rng = Rng::new(31);
    for format in KvFormat::all() {
        for q_dtype in NARROW {
            for transform in [Transform::Off, Transform::On] {
                let spec = CacheSpec::builder().layers(1).kv_heads(2).head_dim(64).format(format);
                let spec = spec.block_order(rng.pick(&ORDERS)).transform(transform);
                for lse in [false, true] {
                    let how = How { q_dtype, lse, ..How::default() };
                    let mut lab = lab(backend, spec.clone().paged(16, 8), BALANCED, 1)?;
                    prompts(&mut lab, &how)
                        .at(format!("{format}, q {q_dtype}, {transform:?}, lse: {lse}"))?;
                }
            }
        }
    }
    Ok(Outcome::Holds)
}

/// Rows that end behind whole groups of codes, and inside one.
fn head_dims<B: Device>(backend: &B) -> CaseResult {
    let mut rng = Rng::new(32);
    for format in quantised() {
        for dim in [80, rng.pick(&[96, 128, 192, 256])] {
            let spec = CacheSpec::builder().layers(1).kv_heads(1).head_dim(dim).format(format);
            let spec = spec.block_order(rng.pick(&ORDERS)).paged(rng.pick(&[7, 32]), 15);
            let how = How { q_dtype: rng.pick(&NARROW), group: 3, lse: false, ..How::default() };
            let mut lab = lab(backend, spec, NEUTRAL, 2)?;
            lab.fill(1, 40)?;
            lab.step(&[(1, Brings::Tokens(11))], &how).at(format!("{format}, head_dim {dim}"))?;
        }
    }
    Ok(Outcome::Holds)
}

/// K and V of different formats, and every option by chance.
fn options<B: Device>(backend: &B) -> CaseResult {
    let mut rng = Rng::new(33);
    let all: Vec<_> = KvFormat::all().collect();
    for k in KvFormat::all() {
        let v = rng.pick(&all);
        let spec = CacheSpec::builder().layers(1).kv_heads(rng.pick(&[1, 2])).head_dim(64);
        let spec =
            spec.formats(k, v).block_order(rng.pick(&ORDERS)).full_precision_prefix(rng.below(6));
        let spec = spec.transform(rng.pick(&[Transform::Off, Transform::On]));
        let how = How { q_dtype: rng.pick(&NARROW), ..How::random(&mut rng) };
        let mut lab = lab(backend, spec.paged(rng.pick(&[9, 16]), 40), LARGE_MEANS, 3)?;
        prompts(&mut lab, &how).at(format!("K {k}, V {v}"))?;
        // Fewer keys than queries.
        lab.fill(3, 7)?;
        lab.step(&[(3, Brings::Query(20))], &how).at(format!("K {k}, V {v}, queries"))?;
    }
    Ok(Outcome::Holds)
}

fn tails<B: Device>(backend: &B) -> CaseResult {
    let mut rng = Rng::new(34);
    for format in quantised() {
        let spec = CacheSpec::builder().layers(1).kv_heads(2).head_dim(64).format(format);
        let spec =
            spec.tail(true).full_precision_prefix(rng.pick(&[0, 3])).block_order(rng.pick(&ORDERS));
        let how = How { q_dtype: rng.pick(&NARROW), lse: false, ..How::default() };
        let mut lab = lab(backend, spec.paged(16, 40), LARGE_MEANS, 4)?;
        prompts(&mut lab, &how).at(format!("{format}"))?;
    }
    Ok(Outcome::Holds)
}

/// Rows of very different size side by side.
fn magnitudes<B: Device>(backend: &B) -> CaseResult {
    let scaled = |format: &KvFormat| format.given_scales().is_none();
    for format in quantised().filter(scaled) {
        for q_dtype in NARROW {
            for factors in [[1e-3, 1.0, 30.0], [1.0, 1e-4, 1e-2], [300.0, 1e-3, 1.0]] {
                let how = How { q_dtype, spread: 1e-2, lse: false, ..How::default() };
                let spec = CacheSpec::builder().layers(1).kv_heads(1).head_dim(64).format(format);
                let spec = spec.full_precision_prefix(2).transform(Transform::Off).paged(16, 16);
                let mut lab = lab(backend, spec, NEUTRAL, 5)?;
                lab.start(1)?;
                let mut rows = lab.random_rows(&[90], &how).remove(0);
                for plane in &mut rows[0] {
                    for (token, row) in plane.chunks_mut(64).enumerate() {
                        for x in row {
                            *x *= factors[token / 7 % 3];
                        }
                    }
                }
                lab.write_only(&[(1, 90)], std::slice::from_ref(&rows), DType::F32)?;
                for queries in [30, 90] {
                    lab.step(&[(1, Brings::Query(queries))], &how)
                        .at(format!("{format}, q {q_dtype}, {factors:?}"))?;
                }
            }
        }
    }
    Ok(Outcome::Holds)
}
