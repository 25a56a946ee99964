//! Writes of new rows to their slots.
use kv_core::spec::CacheSpecBuilder;
use kv_core::{CacheSpec, KvFormat};

use super::{ORDERS, case, small};
use crate::amount::Rotation;
use crate::case::{At, Case, CaseError, CaseResult, Outcome};
use crate::device::{Device, Place, dim};
use crate::fixture::{AXES, CacheFixture, Finish, StepConfig, StepKind};
use crate::rng::Rng;
use crate::tokens::Padding;

pub(super) fn cases<B: Device>() -> Vec<Case<B>> {
    vec![
        case("write/every_dtype_into_every_format", dtypes),
        case("write/every_axis_order_with_padding_and_gaps", axes),
        case("write/block_sizes_and_orders", blocks),
        case("write/contiguous_equals_paged", contiguous),
        case("write/head_dims_differ", head_dims),
        case("write/special_values", special),
        case("write/repeated_write_wins", repeated),
        case("write/idle_rows_write_nothing", idle),
    ]
}

/// Writes three sequences in two ragged steps, both with `config`.
fn two_steps<B: Device>(
    backend: &B,
    spec: CacheSpec,
    config: &StepConfig,
) -> Result<(), CaseError> {
    let mut fixture = CacheFixture::new(backend, spec, 3)?;
    for id in 1..=3 {
        fixture.start(id)?;
    }
    let tokens = StepKind::Tokens;
    fixture.step(&[(1, tokens(3)), (2, tokens(9)), (3, tokens(1))], config)?;
    fixture.check().at(format!("first step as {config:?}"))?;
    fixture.step(&[(3, tokens(1)), (1, tokens(2)), (2, tokens(4))], config)?;
    fixture.check().at(format!("second step as {config:?}"))
}

fn dtypes<B: Device>(backend: &B) -> CaseResult {
    let mut rotation = Rotation::new();
    for k in KvFormat::PLAIN {
        for v in KvFormat::PLAIN {
            for kv_dtype in rotation.of(&crate::fixture::DTYPES) {
                let config = StepConfig { kv_dtype, ..StepConfig::default() };
                let spec = small().layers(1).formats(*k, *v).build()?;
                two_steps(backend, spec, &config).at(format!("{kv_dtype} into {k} and {v}"))?;
            }
        }
        rotation.turn();
    }
    Ok(Outcome::Holds)
}

fn axes<B: Device>(backend: &B) -> CaseResult {
    let paddings = [
        Padding::default(),
        Padding { batch: 2, tokens: 3, gap: 0 },
        Padding { batch: 1, tokens: 0, gap: 6 },
    ];
    for axes in AXES {
        for padding in paddings {
            for inputs in [Place::Host, Place::Device] {
                let outputs = inputs;
                let config = StepConfig {
                    kv_axes: axes,
                    q_axes: axes,
                    padding,
                    inputs,
                    outputs,
                    ..StepConfig::default()
                };
                two_steps(backend, small().build()?, &config)?;
            }
        }
    }
    Ok(Outcome::Holds)
}

fn geometries() -> Vec<CacheSpecBuilder> {
    let mut all = Vec::new();
    for order in ORDERS {
        for (block_size, num_blocks) in [(1, 24), (2, 14), (3, 11), (16, 4), (64, 3)] {
            all.push(small().block_order(order).paged(block_size, num_blocks));
        }
    }
    all
}

fn blocks<B: Device>(backend: &B) -> CaseResult {
    let mut rng = Rng::new(5);
    for geometry in geometries() {
        let config = StepConfig::random(&mut rng);
        let spec = geometry.format(rng.pick(KvFormat::PLAIN)).build()?;
        two_steps(backend, spec, &config)?;
    }
    Ok(Outcome::Holds)
}

fn contiguous<B: Device>(backend: &B) -> CaseResult {
    for order in ORDERS {
        for config in
            [StepConfig::default(), StepConfig { shuffled: true, ..StepConfig::default() }]
        {
            let spec = small().block_order(order).contiguous(3, 20);
            two_steps(backend, spec.build()?, &config)?;
        }
    }
    Ok(Outcome::Holds)
}

fn head_dims<B: Device>(backend: &B) -> CaseResult {
    let shapes = [(8, 4), (4, 8), (1, 1), (2, 16), (12, 10), (64, 32), (192, 128), (40, 7)];
    for (heads, (k, v)) in [1, 2, 3, 1, 2, 1, 1, 3].into_iter().zip(shapes) {
        let (k, v) = (dim(backend, k), dim(backend, v));
        let spec = small().layers(1).kv_heads(heads).head_dims(k, v).build()?;
        two_steps(backend, spec, &StepConfig::default()).at(format!("dims {k} and {v}"))?;
    }
    Ok(Outcome::Holds)
}

/// Values at the limits of the formats: subnormal, halfway, largest, beyond the largest of f16.
fn special<B: Device>(backend: &B) -> CaseResult {
    let edges = [
        0.0,
        -0.0,
        1.0,
        -1.5,
        65504.0,
        65519.0,
        65520.0,
        -1e30,
        6e-8,
        2.9e-8,
        1e-40,
        3.0e38,
        1.000_976_6,
        1.000_488_3,
        1.003_906_2,
        1.001_953_1,
    ];
    for format in KvFormat::PLAIN {
        for kv_dtype in crate::fixture::DTYPES {
            let spec = small().layers(1).format(*format).build()?;
            let mut fixture = CacheFixture::new(backend, spec, 1)?;
            fixture.start(1)?;
            let rows: Vec<f32> =
                edges.iter().map(|x| crate::oracle::round::round_f32(kv_dtype, *x)).collect();
            let rows = vec![vec![[rows.clone(), rows]]];
            // Such rows overflow a score; only stored values are checked here.
            fixture.write_only(&[(1, 1)], &rows, kv_dtype)?;
            fixture.check().at(format!("{kv_dtype} into {format}"))?;
        }
    }
    Ok(Outcome::Holds)
}

fn repeated<B: Device>(backend: &B) -> CaseResult {
    let config = StepConfig { shuffled: true, ..StepConfig::default() };
    two_steps(backend, small().layers(3).build()?, &config)?;
    // A rolled back write leaves no row that a later write does not overwrite.
    let mut fixture = CacheFixture::new(backend, small().build()?, 8)?;
    fixture.start(1)?;
    let dropped = StepConfig { finish: Finish::Drop, ..StepConfig::default() };
    fixture.step(&[(1, StepKind::Tokens(7))], &dropped)?;
    fixture.step(&[(1, StepKind::Tokens(5))], &StepConfig::default())?;
    fixture.check()?;
    Ok(Outcome::Holds)
}

fn idle<B: Device>(backend: &B) -> CaseResult {
    let mut fixture = CacheFixture::new(backend, small().build()?, 4)?;
    for id in 1..=3 {
        fixture.start(id)?;
    }
    let all = [(1, StepKind::Tokens(5)), (2, StepKind::Tokens(2)), (3, StepKind::Tokens(4))];
    fixture.step(&all, &StepConfig::default())?;
    for axes in AXES {
        let config = StepConfig { kv_axes: axes, q_axes: axes, ..StepConfig::default() };
        fixture.step(
            &[(2, StepKind::Idle), (1, StepKind::Tokens(1)), (3, StepKind::Query(2))],
            &config,
        )?;
        fixture.check()?;
    }
    Ok(Outcome::Holds)
}
