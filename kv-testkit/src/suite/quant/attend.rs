//! Attention over quantised rows.
use kv_core::backend::{AnyBackend, Plane};
use kv_core::spec::{CacheSpecBuilder, Transform};
use kv_core::{CacheSpec, DType, KvFormat, ScaleGroup, Scaling};

use super::{ConstantRanges, LARGE_MEANS, NEUTRAL, calibrated, quantised, two_sequences};
use crate::case::{At, Case, CaseError, CaseResult, Outcome, ensure};
use crate::device::{dim, limited_erased};
use crate::fixture::{StepConfig, StepKind, seq};
use crate::rng::Rng;
use crate::suite::{ORDERS, case};

pub(super) fn cases() -> Vec<Case> {
    vec![
        case("quant/head_dim_64", |b| matrix(b, 64)),
        case("quant/head_dim_80", |b| matrix(b, 80)),
        case("quant/head_dim_128", |b| matrix(b, 128)),
        case("quant/head_dim_256", |b| matrix(b, 256)),
        case("quant/odd_head_dims", odd_dims),
        case("quant/k_and_v_of_different_formats", pairs),
        case("quant/formats_by_layer", by_layer),
        case("quant/transform_on_and_off", transforms),
        case("quant/large_means_with_cap_and_sink_logits", large_means),
        case("quant/first_tokens_in_16_bits", full_precision_prefix),
        case("quant/small_weights_decide", small_weights),
        case("quant/long_context_is_split", long),
        case("quant/segments", segments),
    ]
}

const L4: KvFormat = KvFormat::L4(ScaleGroup::Row);

/// Every format, contiguous and paged, MHA, GQA and MQA.
fn matrix(backend: &AnyBackend, dim: u32) -> CaseResult {
    let mut rng = Rng::new(dim.into());
    for format in KvFormat::all() {
        for (heads, group) in [(2, 1), (2, 3), (1, 4)] {
            for paged in [false, true] {
                let spec = CacheSpec::builder().layers(1).kv_heads(heads).head_dim(dim);
                let spec = spec.format(format).block_order(rng.pick(&ORDERS));
                let spec = if paged {
                    spec.paged(8, 6).full_precision_prefix(1)
                } else {
                    spec.contiguous(2, 12)
                };
                let config = StepConfig { group, ..StepConfig::random(&mut rng) };
                let mut fixture = calibrated(backend, spec, NEUTRAL, 1)?;
                two_sequences(&mut fixture, &config)
                    .at(format!("{format}, {heads} kv heads, paged: {paged}"))?;
            }
        }
    }
    Ok(Outcome::Holds)
}

/// Rows that end inside a group of codes, a byte, or a block of the rotation.
fn odd_dims(backend: &AnyBackend) -> CaseResult {
    for format in quantised(0) {
        for (k, v) in [(1, 2), (5, 3), (31, 33), (96, 100), (17, 130)] {
            let (k, v) = (dim(backend, k), dim(backend, v));
            let spec = CacheSpec::builder().layers(1).kv_heads(2).head_dims(k, v).format(format);
            // In some formats, a short row in 16 bits is longer than a block of codes.
            let mut fixture =
                calibrated(backend, spec.paged(16, 4).full_precision_prefix(1), NEUTRAL, 2)?;
            two_sequences(&mut fixture, &StepConfig::default())
                .at(format!("{format}, dims {k} and {v}"))?;
        }
    }
    Ok(Outcome::Holds)
}

fn pairs(backend: &AnyBackend) -> CaseResult {
    let mut rng = Rng::new(3);
    for k in KvFormat::all() {
        for v in KvFormat::all().filter(|v| *v != k) {
            let spec = CacheSpec::builder().layers(1).kv_heads(1).head_dims(32, 48).formats(k, v);
            let spec =
                spec.block_order(rng.pick(&ORDERS)).full_precision_prefix(rng.below(3)).paged(9, 6);
            let mut fixture = calibrated(backend, spec, NEUTRAL, 3)?;
            two_sequences(&mut fixture, &StepConfig::random(&mut rng))
                .at(format!("K {k}, V {v}"))?;
        }
    }
    Ok(Outcome::Holds)
}

/// Several groups of layers, each with its own formats.
fn by_layer(backend: &AnyBackend) -> CaseResult {
    let spec = CacheSpec::builder()
        .layers(6)
        .kv_heads(2)
        .head_dim(40)
        .format(KvFormat::Int8(Scaling::Row))
        .full_precision_prefix(2)
        .paged(4, 8)
        .group([0, 5], |group| group.format(KvFormat::Bf16).paged(3, 8))
        .group([2], |group| group.formats(L4, KvFormat::Q8_0).paged(8, 5))
        .group([4], |group| {
            group
                .format(KvFormat::Fp8E4m3(Scaling::Head))
                .transform(Transform::On)
                .contiguous(2, 12)
        });
    let mut fixture = calibrated(backend, spec, LARGE_MEANS, 4)?;
    for shuffled in [false, true] {
        two_sequences(&mut fixture, &StepConfig { shuffled, ..StepConfig::default() })?;
    }
    Ok(Outcome::Holds)
}

fn transforms(backend: &AnyBackend) -> CaseResult {
    let mut rng = Rng::new(5);
    for format in quantised(1) {
        for transform in [Transform::Auto, Transform::Off, Transform::On] {
            for ranges in [NEUTRAL, ConstantRanges { mean: 3.0, balance: 1.0 }] {
                let spec = CacheSpec::builder().layers(2).kv_heads(2).head_dims(48, 32);
                let spec = spec.formats(format, format).transform(transform).paged(8, 6);
                let mut fixture = calibrated(backend, spec, ranges, 5)?;
                two_sequences(&mut fixture, &StepConfig::random(&mut rng))
                    .at(format!("{format}, {transform:?}, {ranges:?}"))?;
            }
        }
    }
    Ok(Outcome::Holds)
}

/// The mean that was subtracted from K must be added to scores again before the soft cap, beside a
/// sink logit, and in the log-sum-exp.
fn large_means(backend: &AnyBackend) -> CaseResult {
    let base = StepConfig { lse: true, ..StepConfig::default() };
    let hows = [
        base.clone(),
        StepConfig { soft_cap: Some(3.0), ..base.clone() },
        StepConfig { sink_logits: true, ..base.clone() },
        StepConfig { sink_logits: true, soft_cap: Some(20.0), spread: 0.25, ..base.clone() },
        StepConfig { window_left: Some(2), sink_logits: true, group: 3, ..base.clone() },
        StepConfig { window_left: Some(2), sink_tokens: 3, sink_logits: true, ..base.clone() },
        StepConfig { causal: false, soft_cap: Some(0.5), ..base },
    ];
    for format in
        [L4, KvFormat::Int8(Scaling::Row), KvFormat::Fp8E5m2(Scaling::Tensor), KvFormat::Q4_0]
    {
        for config in &hows {
            let spec = CacheSpec::builder().layers(1).kv_heads(2).head_dim(64).format(format);
            let spec = spec.transform(Transform::On).full_precision_prefix(2).paged(8, 6);
            let mut fixture = calibrated(backend, spec, LARGE_MEANS, 6)?;
            two_sequences(&mut fixture, config).at(format!("{format}"))?;
        }
    }
    Ok(Outcome::Holds)
}

/// Full-precision prefixes of several slots per row, in blocks that end after, at and inside it.
fn full_precision_prefix(backend: &AnyBackend) -> CaseResult {
    let mut rng = Rng::new(7);
    for format in quantised(2) {
        let spec = CacheSpec::builder().layers(1).kv_heads(2).head_dims(64, 24);
        let spec = spec.formats(format, rng.pick(&[L4, format, KvFormat::F32, KvFormat::Q8_0]));
        let wide = slots(&spec.clone().full_precision_prefix(1).paged(64, 1))?;
        let sizes = [wide, wide + 1, 2 * wide, 3 * wide - 1, 5 * wide];
        for (size, prefix) in sizes.into_iter().zip([1, 4, 3, 4, 20]) {
            let spec = spec.clone().block_order(rng.pick(&ORDERS)).full_precision_prefix(prefix);
            let blocks = 16 * wide.div_ceil(size) + 40_u32.div_ceil(size) + 6;
            let mut fixture =
                calibrated(backend, spec.clone().paged(size, blocks), LARGE_MEANS, 7)?;
            two_sequences(&mut fixture, &StepConfig::random(&mut rng))
                .at(format!("{format}, {prefix} wide rows of {wide} slots, blocks of {size}"))?;
            let mut fixture = calibrated(backend, spec.contiguous(2, 12), NEUTRAL, 7)?;
            two_sequences(&mut fixture, &StepConfig::random(&mut rng))
                .at(format!("{format}, {prefix} wide rows, contiguous"))?;
        }
    }
    Ok(Outcome::Holds)
}

/// Returns the number of slots of a row in 16 bits.
fn slots(spec: &CacheSpecBuilder) -> Result<u32, CaseError> {
    Ok(spec.clone().build()?.groups()[0].slot_map().wide_slots())
}

/// V is zero except for one token in eight, and softmax weights are sharp: the largest weights
/// usually multiply zeros, so the small ones decide. Outputs have 16 bits, for which a device may
/// use approximations.
///
/// Only formats whose decoded values need few bits: otherwise a device may round them, which would
/// decide here. Weights are not sharper, because some devices convert them to f16 before the
/// product with V.
fn small_weights(backend: &AnyBackend) -> CaseResult {
    const TOKENS: usize = 40;
    let is_short = |format: &KvFormat| {
        matches!(format, KvFormat::Int8(_) | KvFormat::Fp8E4m3(_) | KvFormat::Fp8E5m2(_))
    };
    let formats = KvFormat::all().filter(|format| !format.is_quantised() || is_short(format));
    let dtypes = [DType::Bf16, DType::F16];
    for (format, dtype) in formats.flat_map(|format| dtypes.map(|dtype| (format, dtype))) {
        for group in [1, 4, 8] {
            let dim = dim(backend, 64);
            let spec = CacheSpec::builder().layers(1).kv_heads(2).head_dim(dim).format(format);
            // A rotation would mix the rows of zeros with others.
            let spec = spec.transform(Transform::Off).paged(16, 8);
            let mut fixture = calibrated(backend, spec, NEUTRAL, 10)?;
            let config = StepConfig {
                q_dtype: dtype,
                group,
                spread: 2.0,
                lse: false,
                ..StepConfig::default()
            };
            fixture.start(1)?;
            for new in [TOKENS, 1, 1, 1] {
                let mut rows = fixture.random_rows(&[new], &config);
                let width = 2 * dim as usize;
                for (token, v) in rows[0][0][1].chunks_exact_mut(width).enumerate() {
                    if token % 8 != 5 {
                        v.fill(0.0);
                    }
                }
                fixture
                    .step_with(&[(1, StepKind::Tokens(new as u32))], &rows, &config)
                    .at(format!("{format} to {dtype}, {group} query heads"))?;
            }
        }
    }
    Ok(Outcome::Holds)
}

/// A context long enough to be split among workers and merged.
fn long(backend: &AnyBackend) -> CaseResult {
    for format in quantised(0) {
        let spec = CacheSpec::builder().layers(1).kv_heads(1).head_dim(32).format(format);
        let mut fixture =
            calibrated(backend, spec.full_precision_prefix(4).paged(16, 48), LARGE_MEANS, 8)?;
        fixture.fill(1, 600)?;
        for config in [
            StepConfig::default(),
            StepConfig { sink_logits: true, window_left: Some(300), ..StepConfig::default() },
        ] {
            fixture.step(&[(1, StepKind::Tokens(1))], &config).at(format!("{format}"))?;
        }
    }
    Ok(Outcome::Holds)
}

/// Planes that consist of several buffers.
fn segments(backend: &AnyBackend) -> CaseResult {
    for format in [L4, KvFormat::Nvfp4, KvFormat::Fp8E4m3(Scaling::Row)] {
        let spec = CacheSpec::builder().layers(2).kv_heads(2).head_dims(64, 32).format(format);
        let spec = spec.full_precision_prefix(2).paged(8, 12);
        let block = spec.clone().build()?.groups()[0].layouts()[0].block_bytes();
        let device = limited_erased(backend, |c| c.with_binding_bytes_max(5 * block));
        let mut fixture = calibrated(&device, spec, NEUTRAL, 9)?;
        let storage = fixture.cache.storage(kv_core::GroupId(0));
        let plane = storage.and_then(|storage| storage.plane(0, Plane::Key));
        ensure(plane.is_some_and(|plane| plane.num_segments() == 3), || {
            "the plane is not in 3 segments".to_owned()
        })?;
        two_sequences(&mut fixture, &StepConfig::default()).at(format!("{format}"))?;
        fixture.fill(3, 20)?;
        fixture.fork(3, 4)?;
        fixture
            .step(&[(4, StepKind::Tokens(3)), (3, StepKind::Tokens(1))], &StepConfig::default())?;
        fixture.check().at(format!("{format}, sequence {}", seq(4)))?;
    }
    Ok(Outcome::Holds)
}
