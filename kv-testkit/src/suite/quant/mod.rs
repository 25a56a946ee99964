//! Quantised storage: every format, its constants, the full-precision prefix, and refused settings.
mod attend;
mod prefill;
mod recalibrate;
mod refusals;
mod sharing;
mod tail;
mod values;

use kv_core::backend::{AnyBackend, PlaneLayout};
use kv_core::calibration::{Calibration, LayerCalibration, PlaneCalibration};
use kv_core::spec::CacheSpecBuilder;
use kv_core::{CacheSpec, KvFormat};

use crate::amount;
use crate::case::{At, Case, CaseError};
use crate::fixture::{CacheFixture, StepConfig, StepKind};
use crate::rng::Rng;

pub(super) fn cases() -> Vec<Case> {
    let attends = [attend::cases(), prefill::cases()].concat();
    let stored = [values::cases(), sharing::cases(), recalibrate::cases(), tail::cases()].concat();
    [attends, stored, refusals::cases()].concat()
}

/// Returns the formats whose rows are codes; a short run takes every third of them from `first` on,
/// 0 to 2, so that cases with different ones reach all formats.
pub(super) fn quantised(first: usize) -> impl Iterator<Item = KvFormat> + Clone {
    let (first, step) = if amount::is_short() { (first, 3) } else { (0, 1) };
    KvFormat::all().filter(|format| format.is_quantised()).skip(first).step_by(step)
}

/// Ranges of the random constants of a case.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ConstantRanges {
    /// Largest magnitude of the means of K.
    pub(crate) mean: f32,
    /// Largest binary logarithm of a balance; its negative is the smallest.
    pub(crate) balance: f32,
}

/// No mean and no balance.
pub(super) const NEUTRAL: ConstantRanges = ConstantRanges { mean: 0.0, balance: 0.0 };
/// As in a model: means far larger than the variation, unequal channels.
pub(super) const LARGE_MEANS: ConstantRanges = ConstantRanges { mean: 20.0, balance: 2.0 };

/// Makes constants for `spec` that fit the rows which a fixture makes.
pub(crate) fn constants(spec: &CacheSpec, ranges: ConstantRanges, seed: u64) -> Calibration {
    let mut rng = Rng::new(seed);
    let mut layer = |layer: u16| {
        let group = spec.locate(kv_core::LayerId(layer)).map_or(0, |(group, _)| group.0);
        let [k, v] = *spec.groups()[usize::from(group)].layouts();
        let mut scales = |layout: &PlaneLayout| {
            // Of a thousand normal values, a few exceed the smallest of these.
            let mut list = || (0..layout.num_kv_heads()).map(|_| 3.0 + rng.unit() as f32).collect();
            PlaneCalibration { amax: list(), amax_transformed: list(), ..Default::default() }
        };
        let (mut k_given, v_given) = (scales(&k), scales(&v));
        let channels = (k.num_kv_heads() * k.head_dim()) as usize;
        let mut list = |most: f32| -> Vec<f32> {
            (0..channels).map(|_| (2.0 * rng.unit() as f32 - 1.0) * most).collect()
        };
        if ranges.mean > 0.0 {
            k_given.mean = list(ranges.mean);
        }
        if ranges.balance > 0.0 {
            k_given.balance = list(ranges.balance).into_iter().map(f32::exp2).collect();
        }
        LayerCalibration { k: k_given, v: v_given }
    };
    Calibration::new((0..spec.num_layers()).map(&mut layer).collect())
}

/// Makes a fixture with constants.
pub(super) fn calibrated(
    backend: &AnyBackend,
    spec: CacheSpecBuilder,
    ranges: ConstantRanges,
    seed: u64,
) -> Result<CacheFixture, CaseError> {
    let spec = spec.build()?;
    let given = constants(&spec, ranges, seed);
    CacheFixture::calibrated(backend, spec, given, seed)
}

/// Runs two sequences: prefill, then one step that decodes the first and continues the second, then
/// a comparison of all rows.
pub(super) fn two_sequences(
    fixture: &mut CacheFixture,
    config: &StepConfig,
) -> Result<(), CaseError> {
    fixture.start(1)?;
    fixture.start(2)?;
    fixture.step(&[(1, StepKind::Tokens(9)), (2, StepKind::Tokens(3))], config)?;
    fixture.step(&[(2, StepKind::Tokens(2)), (1, StepKind::Tokens(1))], config)?;
    fixture.check().at("after both steps")?;
    fixture.release(1)?;
    fixture.release(2)
}
