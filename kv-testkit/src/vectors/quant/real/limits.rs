//! Error limits of attention outputs over stored rows.
use kv_core::backend::{Plane, PlaneLayout};
use kv_core::calibration::Calibration;
use kv_core::{KvFormat, LayerId, ScaleGroup};

use super::{FULL_PRECISION_PREFIX, Recording, Rows};
use crate::case::{CaseError, ensure};
use crate::oracle::Stored;

/// Returns the factor of the scores.
pub(super) fn scale(dim: usize) -> f32 {
    (1.0 / (dim as f64).sqrt()) as f32
}

/// The exact outputs, and their change for a relative squared error of 1.
#[derive(Debug)]
pub(super) struct Expected {
    /// Outputs by layer and query, last query first; the heads of a query one after another.
    outputs: Vec<Vec<f64>>,
    /// Sums by layer and head.
    heads: Vec<Sums>,
    layers: usize,
}

/// Sums over the queries of one head.
#[derive(Debug, Clone, Copy, Default)]
struct Sums {
    /// Sum of squares of the outputs.
    energy: f64,
    /// Sum of the expected squares of their change, to first order, for `D = 1`.
    change: f64,
    /// Sum of squares of these.
    change_squared: f64,
}

/// One query head and its keys.
pub(super) struct Head<'r> {
    pub(super) q: &'r [f32],
    pub(super) k: Vec<&'r [f32]>,
    pub(super) v: Vec<&'r [f32]>,
}

impl Head<'_> {
    /// Returns the weights of the keys, and the output.
    pub(super) fn attend(&self) -> (Vec<f64>, Vec<f64>) {
        let scale = f64::from(scale(self.q.len()));
        let dot = |k: &&[f32]| -> f64 {
            self.q.iter().zip(*k).map(|(q, k)| f64::from(*q) * f64::from(*k)).sum()
        };
        let scores: Vec<f64> = self.k.iter().map(|k| dot(k) * scale).collect();
        let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let exps: Vec<f64> = scores.iter().map(|score| (score - most).exp()).collect();
        let total: f64 = exps.iter().sum();
        let weights: Vec<f64> = exps.iter().map(|e| e / total).collect();
        let mut out = vec![0.0; self.v.first().map_or(0, |v| v.len())];
        for (weight, v) in weights.iter().zip(&self.v) {
            out.iter_mut().zip(*v).for_each(|(out, v)| *out += weight * f64::from(*v));
        }
        (weights, out)
    }
}

impl Recording {
    /// Calls `each` with every query's heads, last query first, by layer.
    pub(super) fn heads<'r>(&self, rows: &'r Rows, mut each: impl FnMut(usize, Vec<Head<'r>>)) {
        let Self { kv_heads, q_heads, dims: [dk, dv], .. } = *self;
        for (position, number) in self.queries().rev() {
            for layer in 0..self.layers {
                let head = |head: usize| {
                    let kv_head = head / (q_heads / kv_heads);
                    let q = &rows.q[layer][(number * q_heads + head) * dk..][..dk];
                    let part = |rows: &'r [f32], dim: usize| -> Vec<&'r [f32]> {
                        let row = |token| &rows[(token * kv_heads + kv_head) * dim..][..dim];
                        (0..=position).map(row).collect()
                    };
                    Head { q, k: part(&rows.k[layer], dk), v: part(&rows.v[layer], dv) }
                };
                each(layer, (0..q_heads).map(head).collect());
            }
        }
    }
}

impl Expected {
    /// Computes the outputs and their limits in f64.
    pub(super) fn new(
        recording: &Recording,
        rows: &Rows,
        calibration: &Calibration,
        plane: Plane,
    ) -> Result<Self, CaseError> {
        let stored = |layer: usize| -> Result<Stored, CaseError> {
            let spec = recording.spec(Plane::Key, KvFormat::L4(ScaleGroup::Row))?;
            let layouts: &[PlaneLayout; 2] = spec.groups()[0].layouts();
            let layer = LayerId(layer as u16);
            Ok(Stored::new(layer, Plane::Key, layouts[0], Some(calibration))?)
        };
        let keys: Vec<_> = (0..recording.layers).map(stored).collect::<Result<_, _>>()?;
        let (q_heads, layers) = (recording.q_heads, recording.layers);
        let heads = vec![Sums::default(); layers * q_heads];
        let mut expected = Self { outputs: Vec::new(), heads, layers };
        let group = q_heads / recording.kv_heads;
        recording.heads(rows, |layer, heads| {
            let mut outputs = Vec::new();
            for (head, index) in heads.into_iter().zip(0..) {
                let (weights, out) = head.attend();
                let noise = |j: usize| score_noise(&keys[layer], index / group, head.q, head.k[j]);
                let of = |(j, p): (usize, &f64)| match plane {
                    Plane::Value => p * p * norm(head.v[j].iter().copied()),
                    Plane::Key => {
                        let away = head.v[j].iter().zip(&out);
                        let away: f64 = away.map(|(v, o)| (f64::from(*v) - o).powi(2)).sum();
                        p * p * away * noise(j)
                    }
                };
                let sums = &mut expected.heads[layer * q_heads + index];
                sums.energy += out.iter().map(|x| x * x).sum::<f64>();
                let change = weights
                    .iter()
                    .enumerate()
                    .skip(FULL_PRECISION_PREFIX as usize)
                    .map(of)
                    .sum::<f64>();
                sums.change += change;
                sums.change_squared += change * change;
                outputs.extend(out);
            }
            expected.outputs.push(outputs);
        });
        Ok(expected)
    }

    /// Returns the relative squared error of outputs, and the limit for a format of error
    /// `gaussian`: each the mean over all heads.
    pub(super) fn measure(&self, got: &[Vec<f32>], gaussian: f64) -> Result<[f64; 2], CaseError> {
        let same_len = |(got, exact): (&Vec<f32>, &Vec<f64>)| got.len() == exact.len();
        let fits = got.len() == self.outputs.len() && got.iter().zip(&self.outputs).all(same_len);
        ensure(fits, || "another number of outputs".to_owned())?;
        let q_heads = self.heads.len() / self.layers;
        let mut errors = vec![0.0; self.heads.len()];
        for ((got, exact), index) in got.iter().zip(&self.outputs).zip(0..) {
            let dim = exact.len() / q_heads;
            let heads = got.chunks(dim).zip(exact.chunks(dim)).zip(index % self.layers * q_heads..);
            for ((got, exact), head) in heads {
                let pairs = got.iter().zip(exact);
                errors[head] +=
                    pairs.map(|(got, exact)| (f64::from(*got) - exact).powi(2)).sum::<f64>();
            }
        }
        let count = self.heads.len() as f64;
        let share = |i: usize| 1.0 / (self.heads[i].energy * count);
        let error = errors.iter().zip(0..).map(|(error, i)| error * share(i)).sum();
        let sums = self.heads.iter().zip(0..);
        let expected: f64 = sums.clone().map(|(sums, i)| sums.change * share(i)).sum();
        let variance: f64 =
            sums.map(|(sums, i)| 2.0 * sums.change_squared * share(i) * share(i)).sum();
        Ok([error, gaussian * (2.0 * expected + 3.0 * variance.sqrt())])
    }

    /// Fails unless the error is within the limit.
    pub(super) fn check(&self, got: &[Vec<f32>], gaussian: f64) -> Result<(), CaseError> {
        let [error, limit] = self.measure(got, gaussian)?;
        // A NaN must not pass.
        ensure(error <= limit, || {
            format!("relative squared error of the outputs {error:.2e}, at most {limit:.2e}")
        })
    }
}

fn norm(row: impl Iterator<Item = f32>) -> f64 {
    row.map(|x| f64::from(x).powi(2)).sum()
}

/// Returns the variance of a score when the key's transformed row has a relative squared error of
/// 1.
fn score_noise(stored: &Stored, kv_head: usize, q: &[f32], k: &[f32]) -> f64 {
    let Some(head) = stored.head(kv_head) else { return 0.0 };
    // The rotation keeps lengths.
    let turned_q = norm(q.iter().zip(head.back).map(|(q, back)| q * back));
    let turned_k =
        k.iter().zip(head.mean).zip(head.into).map(|((k, mean), into)| (k - mean) * into);
    let scale = f64::from(scale(q.len()));
    scale * scale * turned_q * norm(turned_k) / q.len() as f64
}
