//! Errors of a refused calibration.
use kv_format::KvFormat;

use crate::ids::{LayerId, Plane};

/// A calibration that does not fit a cache; found when the cache is created, before anything is
/// allocated.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum CalibrationError {
    /// Another number of layers than the cache's.
    #[error("the calibration has {got} layers, the cache {expected}: it is another model's")]
    Layers {
        /// Layers of the cache.
        expected: usize,
        /// Layers of the calibration.
        got: usize,
    },
    /// A list of another length than the layer's heads and channels require.
    #[error(
        "layer {layer}, {plane}: {what} has {got} values, {expected} expected: \
         another model's, or another head count"
    )]
    Shape {
        /// The layer.
        layer: LayerId,
        /// Its K or its V.
        plane: Plane,
        /// The list.
        what: &'static str,
        /// Values it must have.
        expected: usize,
        /// Values it has.
        got: usize,
    },
    /// A number outside its range.
    #[error("layer {layer}, {plane}: {what}[{index}] is {value}, it must be {must}")]
    Value {
        /// The layer.
        layer: LayerId,
        /// Its K or its V.
        plane: Plane,
        /// The list.
        what: &'static str,
        /// Index in the list.
        index: usize,
        /// The number.
        value: f32,
        /// The requirement.
        must: &'static str,
    },
    /// A missing scale of a format that needs a given one.
    #[error("layer {layer}, {plane}: {format} needs a given scale, and the calibration has none")]
    MissingScale {
        /// The layer.
        layer: LayerId,
        /// Its K or its V.
        plane: Plane,
        /// The format.
        format: KvFormat,
    },
    /// A mean or a balance for V, which has neither: softmax sees a shift of V.
    #[error("layer {layer}: V has no {what}")]
    NotForValues {
        /// The layer.
        layer: LayerId,
        /// The list.
        what: &'static str,
    },
}
