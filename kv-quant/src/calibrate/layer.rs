//! The observed rows of one layer, and its constants.
use kv_core::backend::{Plane, PlaneLayout, PlaneShape};
use kv_core::calibration::{LayerCalibration, PlaneCalibration, PlaneConstants};
use kv_core::num::{to_u64, to_usize};
use kv_core::{BlockOrder, KvFormat, LayerId, Scaling};

use crate::calibrate::{CalibrateError, LayerShape, MIN_TOKENS, Tensor};
use crate::transform;

/// Bound of the ratio between a channel's balance and the geometric mean of its head, which is 1.
///
/// Without it, a channel that looked dead would be divided by almost nothing, and the first row
/// that uses it would consist of that channel alone. Within the bound such a channel counts 16
/// times in a row. Ordinary channels keep their optimum: the bound acts only if K and Q differ by
/// more than a factor of 256 from what is usual in their head, and biases are subtracted before the
/// balance is computed.
pub const BALANCE_MAX: f32 = 16.0;

/// A sum of squares below this fraction of the largest in its head is taken for rounding noise of
/// the rows: 2^-20 of the largest rms.
const DEAD: f64 = 1.0 / 1_099_511_627_776.0;

/// What was observed of one layer.
#[derive(Debug, Clone)]
pub(super) struct Layer {
    shape: LayerShape,
    /// Planes of one transformed row, for which the constants are folded.
    layouts: [PlaneLayout; 2],
    tokens: u32,
    /// K as it was given: `[tokens, num_kv_heads, head_dim_k]`.
    k: Vec<f32>,
    /// Sums of squares of Q: `[num_kv_heads, head_dim_k]`, empty before the first row.
    q_squares: Vec<f64>,
    v: Magnitudes,
}

/// The rows of one call.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rows<'a> {
    pub(super) k: &'a [f32],
    pub(super) v: &'a [f32],
    pub(super) q: &'a [f32],
    pub(super) q_heads: u32,
}

/// Largest magnitudes of every kv head; empty before the first row.
#[derive(Debug, Clone, Default)]
struct Magnitudes {
    raw: Vec<f32>,
    transformed: Vec<f32>,
}

impl LayerShape {
    /// Returns planes of one transformed row, to fold constants for and to check them; `None` for a
    /// shape that no plane can have.
    pub(crate) fn layouts(self) -> Option<[PlaneLayout; 2]> {
        let Self { num_kv_heads, head_dim_k, head_dim_v } = self;
        let layout = |head_dim: u32| {
            num_kv_heads.checked_mul(head_dim)?;
            let shape = PlaneShape {
                num_blocks: 1,
                block_size: 1,
                num_kv_heads,
                head_dim,
                order: BlockOrder::Nhd,
                // Any format whose rows have their own scales.
                format: KvFormat::Int8(Scaling::Row),
            };
            Some(PlaneLayout::new(shape).ok()?.with_transform(true))
        };
        Some([layout(head_dim_k)?, layout(head_dim_v)?])
    }
}

impl Layer {
    pub(super) fn new(layer: LayerId, shape: LayerShape) -> Result<Self, CalibrateError> {
        let layouts = shape.layouts().ok_or(CalibrateError::Shape { layer, shape })?;
        Ok(Self {
            shape,
            layouts,
            tokens: 0,
            k: Vec::new(),
            q_squares: Vec::new(),
            v: Magnitudes::default(),
        })
    }

    pub(super) fn shape(&self) -> LayerShape {
        self.shape
    }
    pub(super) fn tokens(&self) -> u32 {
        self.tokens
    }

    /// Checks rows and observes those after the first `skipped` tokens.
    pub(super) fn observe(
        &mut self,
        layer: LayerId,
        first_position: u32,
        skipped: u32,
        rows: Rows<'_>,
    ) -> Result<(), CalibrateError> {
        let (tokens, group) = self.check(layer, first_position, rows)?;
        if tokens == 0 {
            // Nothing is allocated for a shape before a row has confirmed it.
            return Ok(());
        }
        let skipped = skipped.min(tokens);
        let total = self.tokens.checked_add(tokens - skipped);
        let total = total.ok_or(CalibrateError::TooManyTokens { layer })?;
        let [dim_k, dim_v] = self.head_dims();
        let heads = to_usize(self.shape.num_kv_heads);
        let Rows { k, v, q, q_heads } = rows;
        self.k.extend(counted(k, skipped, heads * dim_k));

        let token = to_usize(q_heads) * dim_k;
        self.q_squares.resize(heads * dim_k, 0.0);
        for token in counted(q, skipped, token).chunks_exact(token) {
            let shares = token.chunks_exact(to_usize(group) * dim_k);
            for (sums, share) in self.q_squares.chunks_exact_mut(dim_k).zip(shares) {
                share.chunks_exact(dim_k).for_each(|row| add_squares(sums, row, None));
            }
        }

        let mut v = counted(v, skipped, heads * dim_v).to_vec();
        let constants = constants(layer, Plane::Value, &self.layouts, &PlaneCalibration::default());
        self.v.observe(&mut v, heads, dim_v, &constants);
        self.tokens = total;
        Ok(())
    }

    /// Returns the number of tokens in `rows`, and of query heads per kv head.
    fn check(
        &self,
        layer: LayerId,
        first_position: u32,
        rows: Rows<'_>,
    ) -> Result<(u32, u32), CalibrateError> {
        let Rows { k, v, q, q_heads } = rows;
        let [dim_k, dim_v] = self.head_dims();
        let num_kv_heads = self.shape.num_kv_heads;
        let group = q_heads
            .checked_div(num_kv_heads)
            .filter(|group| *group > 0 && q_heads.checked_rem(num_kv_heads) == Some(0));
        let group = group.ok_or(CalibrateError::QueryHeads { layer, q_heads, num_kv_heads })?;
        let heads = to_usize(num_kv_heads);
        let token = heads * dim_k;
        let whole = k.len().checked_div(token).filter(|n| n.checked_mul(token) == Some(k.len()));
        let tokens = whole.ok_or(CalibrateError::PartOfToken { layer, token, got: k.len() })?;
        for (tensor, rows, heads, dim) in
            [(Tensor::V, v, heads, dim_v), (Tensor::Q, q, to_usize(q_heads), dim_k)]
        {
            // No list is as long as a product that overflows.
            let expected = tokens.saturating_mul(heads).saturating_mul(dim);
            if rows.len() != expected {
                return Err(CalibrateError::Length { layer, tensor, expected, got: rows.len() });
            }
        }
        for (tensor, rows, heads, dim) in [
            (Tensor::K, k, heads, dim_k),
            (Tensor::V, v, heads, dim_v),
            (Tensor::Q, q, to_usize(q_heads), dim_k),
        ] {
            if let Some((index, &value)) = rows.iter().enumerate().find(|(_, x)| !x.is_finite()) {
                let (row, channel) = split(index, dim);
                let (token, head) = split(row, heads);
                let position = u64::from(first_position) + to_u64(token);
                let place =
                    CalibrateError::NotFinite { layer, tensor, position, head, channel, value };
                return Err(place);
            }
        }
        let tokens = u32::try_from(tokens).map_err(|_| CalibrateError::TooManyTokens { layer })?;
        Ok((tokens, group))
    }

    /// Computes the constants of the rows so far.
    pub(super) fn finish(&self, layer: LayerId) -> Result<LayerCalibration, CalibrateError> {
        let tokens = self.tokens;
        if tokens < MIN_TOKENS {
            return Err(CalibrateError::TooFewTokens { layer, tokens });
        }
        let [dim_k, _] = self.head_dims();
        let token = to_usize(self.shape.num_kv_heads) * dim_k;
        let mean = mean(&self.k, token, f64::from(tokens));
        let mut k_squares = vec![0.0; token];
        self.k.chunks_exact(token).for_each(|k| add_squares(&mut k_squares, k, Some(&mean)));
        let heads = k_squares.chunks_exact(dim_k).zip(self.q_squares.chunks_exact(dim_k));
        let balance = heads.flat_map(|(k, q)| balance(k, q)).collect();
        let mut k = PlaneCalibration { mean, balance, ..PlaneCalibration::default() };

        let mut magnitudes = Magnitudes::default();
        let constants = constants(layer, Plane::Key, &self.layouts, &k);
        let heads = to_usize(self.shape.num_kv_heads);
        magnitudes.observe(&mut self.k.clone(), heads, dim_k, &constants);
        magnitudes.give(layer, Plane::Key, &mut k)?;
        let mut v = PlaneCalibration::default();
        self.v.clone().give(layer, Plane::Value, &mut v)?;
        Ok(LayerCalibration { k, v })
    }

    fn head_dims(&self) -> [usize; 2] {
        [to_usize(self.shape.head_dim_k), to_usize(self.shape.head_dim_v)]
    }
}

impl Magnitudes {
    /// Observes rows of `heads` heads; they are transformed in place.
    fn observe(&mut self, rows: &mut [f32], heads: usize, dim: usize, constants: &PlaneConstants) {
        self.raw.resize(heads, 0.0);
        self.transformed.resize(heads, 0.0);
        for token in rows.chunks_exact_mut(heads * dim) {
            let amax = self.raw.iter_mut().zip(&mut self.transformed);
            for ((index, row), (raw, transformed)) in
                token.chunks_exact_mut(dim).enumerate().zip(amax)
            {
                *raw = raw.max(amax_of(row));
                if let Some(head) = constants.head(index) {
                    transform::store_unbounded(row, &head);
                }
                *transformed = transformed.max(amax_of(row));
            }
        }
    }

    fn give(
        self,
        layer: LayerId,
        plane: Plane,
        to: &mut PlaneCalibration,
    ) -> Result<(), CalibrateError> {
        if let Some(head) = self.transformed.iter().position(|amax| !amax.is_finite()) {
            return Err(CalibrateError::Overflow { layer, plane, head });
        }
        to.amax = self.raw;
        to.amax_transformed = self.transformed;
        Ok(())
    }
}

/// Returns the rows after the first `skipped` tokens of `token` values.
fn counted(rows: &[f32], skipped: u32, token: usize) -> &[f32] {
    rows.get(to_usize(skipped) * token..).unwrap_or_default()
}

/// Returns the largest magnitude of a row; infinity if a value is not finite.
fn amax_of(row: &[f32]) -> f32 {
    let magnitude = |x: &f32| if x.is_nan() { f32::INFINITY } else { x.abs() };
    row.iter().map(magnitude).fold(0.0, f32::max)
}

/// Folds constants as a cache does, so that magnitudes are those that it will store.
fn constants(
    layer: LayerId,
    plane: Plane,
    [k, v]: &[PlaneLayout; 2],
    given: &PlaneCalibration,
) -> PlaneConstants {
    let layout = if plane == Plane::Key { k } else { v };
    match PlaneConstants::new(layer, plane, layout, Some(given)) {
        Ok(Some(constants)) => constants,
        other => unreachable!("a calibrator computed constants that a cache refuses: {other:?}"),
    }
}

/// Computes the mean of every channel of all heads.
fn mean(rows: &[f32], token: usize, tokens: f64) -> Vec<f32> {
    let mut sums = vec![0.0; token];
    for row in rows.chunks_exact(token) {
        sums.iter_mut().zip(row).for_each(|(sum, x)| *sum += f64::from(*x));
    }
    sums.iter().map(|sum| narrow(sum / tokens)).collect()
}

/// Adds the squares of a row, minus a mean, to the sums of its channels.
fn add_squares(sums: &mut [f64], row: &[f32], mean: Option<&[f32]>) {
    match mean {
        None => sums.iter_mut().zip(row).for_each(|(sum, x)| *sum += f64::from(*x).powi(2)),
        Some(mean) => {
            for ((sum, x), mean) in sums.iter_mut().zip(row).zip(mean) {
                *sum += (f64::from(*x) - f64::from(*mean)).powi(2);
            }
        }
    }
}

/// Computes the balance of one head, from sums of squares of every channel of centred K and of Q.
///
/// The expected squared error of a score under white noise in the stored row is proportional to
/// `sum(q^2 s^2) * sum(k^2 / s^2)`, which `s = sqrt(rms k / rms q)` minimises (Cauchy-Schwarz). A
/// factor common to all channels of a head, such as the number of rows, does not change it; it is
/// chosen so that the geometric mean is 1. A channel without K or without Q gets 1.
fn balance(k: &[f64], q: &[f64]) -> Vec<f32> {
    let floor = |sums: &[f64]| sums.iter().copied().fold(0.0, f64::max) * DEAD;
    let (floor_k, floor_q) = (floor(k), floor(q));
    let logs: Vec<Option<f64>> = k
        .iter()
        .zip(q)
        .map(|(k, q)| (*k > floor_k && *q > floor_q).then(|| (k / q).ln() * 0.25))
        .collect();
    let (sum, live) = logs.iter().flatten().fold((0.0, 0.0), |(sum, n), log| (sum + log, n + 1.0));
    let middle = if live > 0.0 { sum / live } else { 0.0 };
    let bound = f64::from(BALANCE_MAX);
    let bounded = |log: f64| (log - middle).exp().clamp(bound.recip(), bound);
    logs.iter().map(|log| log.map_or(1.0, |log| narrow(bounded(log)))).collect()
}

/// Splits an index into row and column.
fn split(index: usize, columns: usize) -> (usize, usize) {
    (index.checked_div(columns).unwrap_or(0), index.checked_rem(columns).unwrap_or(0))
}

/// Rounds to nearest. The mean of finite `f32` and a bounded balance always fit.
fn narrow(x: f64) -> f32 {
    #[expect(clippy::as_conversions, clippy::cast_possible_truncation, reason = "as said above")]
    {
        x as f32
    }
}
