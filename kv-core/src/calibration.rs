//! Calibration: constants of a model that quantised storage needs, by layer: given scales, and the
//! transform.
//!
//! The transform is orthogonal to the stored format. Per kv head of a layer:
//!
//! | tensor | stored or used as | why |
//! |---|---|---|
//! | K | `R(sign * (k - mean) / balance)` | channel means and unequal channels cost precision |
//! | Q | `R(sign * q * balance)` | so that scores stay the same, up to `q . mean` per query |
//! | V | `R(sign * v)` | outliers are spread over all channels |
//! | output | `sign * R(out)` | once per query |
//!
//! `R` is the orthonormal Walsh-Hadamard transform over the largest power-of-two blocks of
//! `head_dim` (`kv_quant::rotate`); it is its own inverse. `sign` is [`sign`], the same for every
//! model. `q . mean` is added to every score of its query, so that soft caps, sink logits and the
//! log-sum-exp are unchanged.
//!
//! Removing the mean: `SageAttention` (Zhang et al. 2024), "smooth K". The balance `sqrt(rms k /
//! rms q)` minimises the expected error of a score under white noise in K. Signs with a Hadamard
//! transform: `QuaRot` (Ashkboos et al. 2024).
mod check;
mod constants;
#[cfg(test)]
mod tests;

pub use crate::error::CalibrationError;
pub use constants::{HeadConstants, PlaneConstants, sign};

use crate::ids::LayerId;

/// Constants of every layer of a model. Absent constants are the identity, except scales: a format
/// that needs a given scale is refused without one.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Calibration {
    layers: Vec<LayerCalibration>,
}

/// Constants of one layer.
#[derive(Debug, Clone, PartialEq, Default)]
#[expect(clippy::exhaustive_structs, reason = "a literal names both planes")]
pub struct LayerCalibration {
    /// Constants of its keys.
    pub k: PlaneCalibration,
    /// Constants of its values; `mean` and `balance` must be empty.
    pub v: PlaneCalibration,
}

/// Constants of the K or the V of one layer. An empty list is absent.
#[derive(Debug, Clone, PartialEq, Default)]
#[expect(clippy::exhaustive_structs, reason = "a literal names the lists it has")]
pub struct PlaneCalibration {
    /// Given scales (TensorRT-LLM's `kv_quant_orig_scale`): one for the tensor or one per kv head,
    /// as the format requires. They override those computed from `amax`.
    pub scales: Vec<f32>,
    /// Largest magnitude of every kv head. Scales are computed from it; for floating-point codes
    /// they leave a factor of 2 as headroom.
    pub amax: Vec<f32>,
    /// The same after the transform.
    pub amax_transformed: Vec<f32>,
    /// Mean of every channel: `[num_kv_heads, head_dim]`.
    pub mean: Vec<f32>,
    /// Divisor of K and factor of Q: `[num_kv_heads, head_dim]`.
    pub balance: Vec<f32>,
}

impl Calibration {
    /// Collects constants layer by layer. They are checked when a cache is created.
    pub fn new(layers: Vec<LayerCalibration>) -> Self {
        Self { layers }
    }
    /// Returns the constants of one layer, `None` past the last.
    pub fn layer(&self, layer: LayerId) -> Option<&LayerCalibration> {
        self.layers.get(usize::from(layer.0))
    }
    /// Returns the constants of all layers.
    pub fn layers(&self) -> &[LayerCalibration] {
        &self.layers
    }
}
