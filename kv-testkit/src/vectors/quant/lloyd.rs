//! `quant-lloyd-max-gaussian/1`: the codebooks of least squared error for the normal distribution.
//!
//! A codebook can be verified by itself: a threshold is midway between its neighbours, and a level
//! is the mean of its cell. So every number of bits is checked, and the codebooks of stored formats
//! are compared with this library's too.
use kv_quant::lloyd;
use serde::Deserialize;
use serde_json::Value;

use super::{Content, Quant, Trial, members};
use crate::case::{CaseError, CaseResult, Outcome, ensure, same};

/// Levels for one number of bits.
#[derive(Debug)]
pub(in crate::vectors) struct Codebook {
    bits: u32,
    levels: Levels,
}

#[derive(Debug, Deserialize)]
struct Levels {
    centroids: Vec<f64>,
    thresholds: Vec<f64>,
    mse: f64,
}

/// Largest distance of a level from the exact one.
const LIMIT: f64 = 1e-6;

/// Makes a trial for each number of bits.
pub(super) fn read(value: &Value) -> Result<Vec<Trial>, String> {
    let codebook = |name: &str, value: &Value| -> Result<Quant, String> {
        let bits = name.parse().ok().filter(|bits| (1..=12_u32).contains(bits));
        let bits = bits.ok_or_else(|| format!("{name:?} is not a number of bits"))?;
        let levels = Levels::deserialize(value)
            .map_err(|error| format!("does not fit its schema: {error}"))?;
        let (got, expected) = (levels.centroids.len(), 1_usize << bits);
        if got != expected || levels.thresholds.len() + 1 != expected {
            let thresholds = levels.thresholds.len();
            return Err(format!("{got} levels and {thresholds} thresholds for {bits} bits"));
        }
        Ok(Quant::Lloyd(Codebook { bits, levels }))
    };
    let one = |(name, value): (&String, &Value)| {
        (Some(format!("{name}-bit")), Content::from(codebook(name, value)))
    };
    Ok(members(value, "codebooks")?.map(one).collect())
}

/// Checks one codebook.
pub(super) fn run(codebook: &Codebook) -> CaseResult {
    let Codebook { bits, levels } = codebook;
    levels.check_optimal()?;
    if let Some(ours) = lloyd::magnitudes(*bits) {
        levels.check_ours(ours)?;
    }
    Ok(Outcome::Holds)
}

impl Levels {
    fn check_optimal(&self) -> Result<(), CaseError> {
        let ascending = self.centroids.is_sorted_by(|a, b| a < b);
        let inside = self.centroids.iter().all(|level| level.abs() < TAIL);
        ensure(ascending && inside, || "the levels do not ascend or are out of range".to_owned())?;
        for (pair, threshold) in self.centroids.windows(2).zip(&self.thresholds) {
            near("threshold", *threshold, f64::midpoint(pair[0], pair[1]))?;
        }
        let (begin, end) = (vec![-TAIL], vec![TAIL]);
        let edges = [begin, self.thresholds.clone(), end].concat();
        let mut mse = 0.0;
        for (cell, level) in edges.windows(2).zip(&self.centroids) {
            let [mass, first, second] = moments(cell[0], cell[1]);
            near("level", *level, first / mass)?;
            mse += second - 2.0 * level * first + level * level * mass;
        }
        near("mean squared error", self.mse, mse)
    }

    /// Compares with this library's levels: the positive ones, which the others mirror.
    fn check_ours(&self, ours: &[f32]) -> Result<(), CaseError> {
        let ours: Vec<_> = ours.iter().map(|x| f64::from(*x)).collect();
        let mirrored: Vec<_> = ours.iter().rev().map(|x| -x).chain(ours.clone()).collect();
        same("levels", mirrored.len(), self.centroids.len())?;
        for (got, expected) in mirrored.iter().zip(&self.centroids) {
            near("our level", *got, *expected)?;
        }
        for (pair, expected) in mirrored.windows(2).zip(&self.thresholds) {
            near("our threshold", f64::midpoint(pair[0], pair[1]), *expected)?;
        }
        Ok(())
    }
}

fn near(what: &str, got: f64, expected: f64) -> Result<(), CaseError> {
    // Not `>`, which a NaN would pass.
    ensure((got - expected).abs() <= LIMIT, || format!("{what} {got:.9}, expected {expected:.9}"))
}

/// Beyond it, the normal distribution is zero in f64.
const TAIL: f64 = 12.0;

/// Integrals of 1, x and x squared under the normal density between two points, by Simpson's rule
/// with steps of at most 2^-9, whose error is far below [`LIMIT`].
fn moments(a: f64, b: f64) -> [f64; 3] {
    let steps = (((b - a) * 256.0).ceil().max(1.0)) as usize * 2;
    let width = (b - a) / steps as f64;
    let mut sums = [0.0; 3];
    for i in 0..=steps {
        let x = a + width * i as f64;
        let weight = match i {
            0 => 1.0,
            _ if i == steps => 1.0,
            _ if i % 2 == 1 => 4.0,
            _ => 2.0,
        };
        let density = (-x * x / 2.0).exp() / std::f64::consts::TAU.sqrt();
        let term = weight * density * width / 3.0;
        sums[0] += term;
        sums[1] += term * x;
        sums[2] += term * x * x;
    }
    sums
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_of_the_whole_line_and_of_half_of_it() {
        let [mass, first, second] = moments(-TAIL, TAIL);
        assert!((mass - 1.0).abs() < 1e-12 && first.abs() < 1e-12 && (second - 1.0).abs() < 1e-12);
        // One bit: the level is the mean of the half-normal distribution.
        let [mass, first, _] = moments(0.0, TAIL);
        assert!((first / mass - (2.0 / std::f64::consts::PI).sqrt()).abs() < 1e-12);
    }

    #[test]
    fn a_codebook_that_is_not_optimal_is_found() {
        let level = (2.0 / std::f64::consts::PI).sqrt();
        let mse = 1.0 - 2.0 / std::f64::consts::PI;
        let levels = |level: f64, threshold: f64, mse: f64| Levels {
            centroids: vec![-level, level],
            thresholds: vec![threshold],
            mse,
        };
        assert!(levels(level, 0.0, mse).check_optimal().is_ok());
        assert!(levels(level + 2e-6, 0.0, mse).check_optimal().is_err());
        assert!(levels(level, 2e-6, mse).check_optimal().is_err());
        assert!(levels(level, 0.0, mse + 2e-6).check_optimal().is_err());
        assert!(levels(-level, 0.0, mse).check_optimal().is_err());
        assert!(levels(f64::NAN, 0.0, mse).check_optimal().is_err());
    }
}
