//! What makes a calibration file unreadable or unfit.
use kv_core::{CalibrationError, LayerId};

use crate::calibrate::LayerShape;

/// A file that cannot be read, or constants that cannot be written.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum FileError {
    /// Fewer bytes than the header is said to have, or too few to say it.
    #[error("the file ends inside its header: {got} bytes, {expected} expected")]
    Truncated {
        /// Bytes up to the end of the header.
        expected: u64,
        /// Bytes there are.
        got: usize,
    },
    /// A header that is no safetensors header.
    #[error("no safetensors file: {0}")]
    Header(#[from] HeaderError),
    /// More or fewer bytes behind the header than its tensors have.
    #[error("the tensors have {expected} bytes, the file {got} behind its header")]
    DataLength {
        /// Bytes of all tensors.
        expected: usize,
        /// Bytes there are.
        got: usize,
    },
    /// A key that must be there. Without `kv_calibration` it is some other safetensors file.
    #[error("the file has no {key:?} in its metadata: is it a calibration?")]
    MissingKey {
        /// The key.
        key: &'static str,
    },
    /// A version of the format that this code does not know.
    #[error("calibration files of version {got:?} are not known, only {known:?}")]
    Version {
        /// Version of the file.
        got: String,
        /// The version that is known.
        known: &'static str,
    },
    /// A key whose text is not what it must be.
    #[error("metadata {key:?} is {value:?}, it must be {must}")]
    Value {
        /// The key.
        key: &'static str,
        /// Its text.
        value: String,
        /// What would do.
        must: &'static str,
    },
    /// A tensor that is none of a calibration's, or of a layer that the model does not have.
    #[error("unknown tensor {name:?}")]
    UnknownTensor {
        /// Its name.
        name: String,
    },
    /// A tensor of another element type than `F32`.
    #[error("tensor {name:?} has elements {got}, F32 expected")]
    Dtype {
        /// Its name.
        name: String,
        /// Its element type, as the container names it.
        got: String,
    },
    /// A tensor whose axes are not those of its layer.
    #[error("tensor {name:?} has shape {got:?}, {expected:?} expected")]
    Shape {
        /// Its name.
        name: String,
        /// What its layer asks for.
        expected: Vec<usize>,
        /// What it has.
        got: Vec<usize>,
    },
    /// A layer without any tensor.
    #[error("no constants of layer {layer}")]
    MissingLayer {
        /// The layer.
        layer: LayerId,
    },
    /// Constants and a description with different numbers of layers, or more than 65536.
    #[error("constants of {got} layers, {expected} expected")]
    NumLayers {
        /// Layers of the description.
        expected: usize,
        /// Layers with constants.
        got: usize,
    },
    /// Heads and channels that no plane can have.
    #[error("layer {layer}: no plane has {shape}")]
    LayerShape {
        /// The layer.
        layer: LayerId,
        /// What is said of it.
        shape: LayerShape,
    },
    /// Constants that no cache takes.
    #[error(transparent)]
    Calibration(#[from] CalibrationError),
    /// A file that was made for another model.
    #[error("the calibration was made for the model {got:?}, this is {expected:?}")]
    OtherModel {
        /// The model at hand.
        expected: String,
        /// The model of the file.
        got: String,
    },
}

/// Why a header could not be read; its text is for people.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{text}")]
pub struct HeaderError {
    text: String,
}

impl From<serde_json::Error> for FileError {
    fn from(error: serde_json::Error) -> Self {
        Self::Header(HeaderError { text: error.to_string() })
    }
}
