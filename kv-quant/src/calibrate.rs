//! Calibration: a model's quantisation constants, from rows that it computed.
//!
//! A [`Calibrator`] observes K, V and Q of some tokens, layer by layer, and computes the
//! [`Calibration`] that quantised storage needs. A few hundred tokens of ordinary text suffice; a
//! cache may also observe the first blocks of its first sequence and freeze the result.
//!
//! | constant | per | from |
//! |---|---|---|
//! | `k.mean` | channel | the mean of K |
//! | `k.balance` | channel | `sqrt(rms(k - mean) / rms q)`, q of all heads that read the kv head |
//! | `amax` | kv head | the largest magnitude of K and of V |
//! | `amax_transformed` | kv head | the same of rows after [`store`] |
//!
//! It chooses no formats and runs no model: its caller does.
//!
//! [`store`]: crate::transform::store
mod error;
mod layer;
#[cfg(test)]
mod tests;

use kv_core::LayerId;
use kv_core::calibration::Calibration;

pub use error::{CalibrateError, Tensor};
pub use layer::BALANCE_MAX;

use layer::{Layer, Rows};

/// Tokens that [`Calibrator::finish`] requires, skipped ones not counted.
///
/// The mean of `n` independent tokens misses the true one by `1 / n` of the centred energy, so 16
/// cost at most 6 % where centring gains a factor. Neighbouring tokens are not independent: a few
/// hundred are better.
pub const MIN_TOKENS: u32 = 16;

/// Positions at the start of a sequence that do not count by default: the usual length of a cache's
/// full-precision prefix.
pub const SKIPPED_BY_DEFAULT: u32 = 4;

/// Heads and channels of one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[expect(clippy::exhaustive_structs, reason = "a literal names each of the three numbers")]
pub struct LayerShape {
    /// Heads of K and V.
    pub num_kv_heads: u32,
    /// Channels of K and Q.
    pub head_dim_k: u32,
    /// Channels of V.
    pub head_dim_v: u32,
}

/// Collects rows and computes a [`Calibration`] from them.
///
/// # Units
/// Keeps every counted row of K, `tokens * num_kv_heads * head_dim_k` values of four bytes per
/// layer, because `amax_transformed` needs the final mean and balance: 64 MiB for 512 tokens of a
/// model with 32 layers of 8 heads of 128. Of V and Q it keeps sums.
///
/// # Examples
/// ```
/// use kv::quant::calibrate::Calibrator;
///
/// let mut calibrator = Calibrator::new(1, 1, [2, 2])?.skip_first(0);
/// for position in 0..16 {
///     let x = if position % 2 == 0 { 1.0 } else { -1.0 };
///     calibrator.observe(0, position, &[8.0 + x, x], &[x, x], &[x, 4.0 * x], 1)?;
/// }
/// let calibration = calibrator.finish()?;
/// assert_eq!(calibration.layers()[0].k.mean, [8.0, 0.0]);
/// assert_eq!(calibration.layers()[0].k.balance, [2_f32.sqrt(), 0.5_f32.sqrt()]);
/// # Ok::<(), kv::quant::calibrate::CalibrateError>(())
/// ```
#[derive(Debug, Clone)]
pub struct Calibrator {
    skipped: u32,
    layers: Vec<Layer>,
}

impl Calibrator {
    /// Creates a calibrator for layers of one shape; `head_dims` are those of K and of V.
    ///
    /// # Errors
    /// [`CalibrateError::Shape`] for zero heads or channels, or more than a plane can have.
    pub fn new(
        num_layers: u16,
        num_kv_heads: u32,
        head_dims: [u32; 2],
    ) -> Result<Self, CalibrateError> {
        let [head_dim_k, head_dim_v] = head_dims;
        let shape = LayerShape { num_kv_heads, head_dim_k, head_dim_v };
        Self::with_layers((0..num_layers).map(|_| shape))
    }

    /// Creates a calibrator for layers of different shapes, in order. Layers past number 65535 have
    /// no [`LayerId`] and are refused.
    ///
    /// # Errors
    /// As [`Self::new`], and [`CalibrateError::TooManyLayers`].
    pub fn with_layers(
        shapes: impl IntoIterator<Item = LayerShape>,
    ) -> Result<Self, CalibrateError> {
        let mut ids = 0..=u16::MAX;
        let layers = shapes.into_iter().map(|shape| {
            let id = ids.next().ok_or(CalibrateError::TooManyLayers)?;
            Layer::new(LayerId(id), shape)
        });
        let layers = layers.collect::<Result<_, _>>()?;
        Ok(Self { skipped: SKIPPED_BY_DEFAULT, layers })
    }

    /// Ignores the first `tokens` positions of every sequence, in rows observed from now on.
    ///
    /// Keys and values of the first tokens are outliers and would distort every constant. Give the
    /// length of the cache's full-precision prefix: those rows need no constants. Rows that the
    /// cache quantises must count, or their magnitudes may be clipped.
    #[must_use]
    pub fn skip_first(mut self, tokens: u32) -> Self {
        self.skipped = tokens;
        self
    }

    /// Observes rows of consecutive tokens of one sequence in one layer, as they are before
    /// attention: after `RoPE`, with Q not yet multiplied by the scale of attention.
    ///
    /// Sequences, chunks and layers may come in any order. Zero tokens are allowed.
    ///
    /// # Shapes
    /// | argument | axes |
    /// |---|---|
    /// | `k` | `[tokens, num_kv_heads, head_dim_k]` |
    /// | `v` | `[tokens, num_kv_heads, head_dim_v]` |
    /// | `q` | `[tokens, q_heads, head_dim_k]` |
    ///
    /// Query head `h` reads kv head `h * num_kv_heads / q_heads`, rounded down. `first_position` is
    /// the position of the first token in its sequence.
    ///
    /// # Errors
    /// Before any row is counted: [`CalibrateError::UnknownLayer`], [`CalibrateError::QueryHeads`]
    /// if their number is not a multiple of the kv heads, [`CalibrateError::Length`],
    /// [`CalibrateError::TooManyTokens`], and [`CalibrateError::NotFinite`] with the place of the
    /// first NaN or infinity, skipped positions included.
    pub fn observe(
        &mut self,
        layer: impl Into<LayerId>,
        first_position: u32,
        k: &[f32],
        v: &[f32],
        q: &[f32],
        q_heads: u32,
    ) -> Result<(), CalibrateError> {
        let id = layer.into();
        let num_layers = self.layers.len();
        let layer = self.layers.get_mut(usize::from(id.0));
        let layer = layer.ok_or(CalibrateError::UnknownLayer { layer: id, num_layers })?;
        let skipped = self.skipped.saturating_sub(first_position);
        layer.observe(id, first_position, skipped, Rows { k, v, q, q_heads })
    }

    /// Returns the heads and channels of every layer.
    pub fn shapes(&self) -> impl ExactSizeIterator<Item = LayerShape> + '_ {
        self.layers.iter().map(Layer::shape)
    }

    /// Returns the number of counted tokens of the layer that has fewest.
    pub fn num_tokens(&self) -> u32 {
        self.layers.iter().map(Layer::tokens).min().unwrap_or(0)
    }

    /// Computes the constants of the rows so far. More rows may be observed afterwards.
    ///
    /// # Errors
    /// [`CalibrateError::TooFewTokens`] with the first layer that counted fewer than
    /// [`MIN_TOKENS`]; [`CalibrateError::Overflow`] if rows are so large that the transform
    /// overflows `f32`.
    pub fn finish(&self) -> Result<Calibration, CalibrateError> {
        let layers = self.layers.iter().zip(0..).map(|(layer, id)| layer.finish(LayerId(id)));
        Ok(Calibration::new(layers.collect::<Result<_, _>>()?))
    }
}
