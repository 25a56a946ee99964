//! Quantised storage: every format, its constants, its full-precision prefix, and what must be
//! refused.
mod attend;
mod life;
mod prefill;
mod recalibrate;
mod refusals;
mod tail;
mod values;

use kv_core::calibration::{LayerCalibration, PlaneCalibration};
use kv_core::{CacheSpec, CacheSpecBuilder, Calibration, KvFormat, PlaneLayout};

use crate::case::{At, Case, CaseError};
use crate::device::Device;
use crate::lab::{Brings, How, Lab};
use crate::rng::Rng;

pub(super) fn cases<B: Device>() -> Vec<Case<B>> {
    let attends = [attend::cases(), prefill::cases()].concat();
    let stored = [values::cases(), life::cases(), recalibrate::cases(), tail::cases()].concat();
    [attends, stored, refusals::cases()].concat()
}

/// Formats whose rows are codes.
pub(super) fn quantised() -> impl Iterator<Item = KvFormat> + Clone {
    KvFormat::all().filter(|format| format.is_quantised())
}

/// What the constants of a case are like.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Likeness {
    /// Means of K are up to so large.
    pub(crate) mean: f32,
    /// Balances are up to 2 to this power, and down to its reciprocal.
    pub(crate) balance: f32,
}

/// Neither mean nor balance.
pub(super) const NEUTRAL: Likeness = Likeness { mean: 0.0, balance: 0.0 };
/// As in a model: means far larger than what varies, unequal channels.
pub(super) const LARGE_MEANS: Likeness = Likeness { mean: 20.0, balance: 2.0 };

/// Constants that fit `spec` and the rows that a lab makes for them.
pub(crate) fn constants(spec: &CacheSpec, like: Likeness, seed: u64) -> Calibration {
    let mut rng = Rng::new(seed);
    let mut layer = |layer: u16| {
        let group = spec.locate(kv_core::LayerId(layer)).map_or(0, |(group, _)| group.0);
        let [k, v] = *spec.groups()[usize::from(group)].layouts();
        let mut scales = |layout: &PlaneLayout| {
            // A few values of a thousand normal ones are beyond the smallest of these.
            let mut list = || (0..layout.num_kv_heads()).map(|_| 3.0 + rng.unit() as f32).collect();
            PlaneCalibration { amax: list(), amax_transformed: list(), ..Default::default() }
        };
        let (mut k_given, v_given) = (scales(&k), scales(&v));
        let channels = (k.num_kv_heads() * k.head_dim()) as usize;
        let mut list = |most: f32| -> Vec<f32> {
            (0..channels).map(|_| (2.0 * rng.unit() as f32 - 1.0) * most).collect()
        };
        if like.mean > 0.0 {
            k_given.mean = list(like.mean);
        }
        if like.balance > 0.0 {
            k_given.balance = list(like.balance).into_iter().map(f32::exp2).collect();
        }
        LayerCalibration { k: k_given, v: v_given }
    };
    Calibration::new((0..spec.num_layers()).map(&mut layer).collect())
}

/// A lab with constants.
pub(super) fn lab<B: Device>(
    backend: &B,
    spec: CacheSpecBuilder,
    like: Likeness,
    seed: u64,
) -> Result<Lab<B>, CaseError> {
    let spec = spec.build()?;
    let given = constants(&spec, like, seed);
    Lab::calibrated(backend, spec, given, seed)
}

/// Two sequences: prefill, then a step that decodes one and goes on with the other, then everything
/// read back.
pub(super) fn talk<B: Device>(lab: &mut Lab<B>, how: &How) -> Result<(), CaseError> {
    lab.start(1)?;
    lab.start(2)?;
    lab.step(&[(1, Brings::Tokens(9)), (2, Brings::Tokens(3))], how)?;
    lab.step(&[(2, Brings::Tokens(2)), (1, Brings::Tokens(1))], how)?;
    lab.check().at("after both steps")?;
    lab.release(1)?;
    lab.release(2)
}
