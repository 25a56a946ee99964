//! Errors of calibration files.
use kv_core::LayerId;
use kv_core::calibration::CalibrationError;

use crate::calibrate::LayerShape;

/// A file that cannot be read, or a calibration that cannot be written.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum FileError {
    /// Fewer bytes than the header's stated length, or too few for that length itself.
    #[error("the file ends inside its header: {got} bytes, {expected} expected")]
    Truncated {
        /// Bytes up to the end of the header.
        expected: u64,
        /// Bytes of the file.
        got: usize,
    },
    /// A header that is not a safetensors header.
    #[error("not a safetensors file: {0}")]
    Header(#[from] HeaderError),
    /// More or fewer bytes after the header than its tensors have.
    #[error("the tensors have {expected} bytes, the file {got} after its header")]
    DataLength {
        /// Bytes of all tensors.
        expected: usize,
        /// Bytes after the header.
        got: usize,
    },
    /// A required key that is missing. Without `kv_calibration` it is another kind of safetensors
    /// file.
    #[error("the file has no {key:?} in its metadata: is it a calibration?")]
    MissingKey {
        /// The key.
        key: &'static str,
    },
    /// A version of the format that this code cannot read.
    #[error("calibration files of version {got:?} are unknown, only {known:?} is known")]
    Version {
        /// Version of the file.
        got: String,
        /// The version that is known.
        known: &'static str,
    },
    /// A key with invalid text.
    #[error("metadata {key:?} is {value:?}, it must be {must}")]
    Value {
        /// The key.
        key: &'static str,
        /// Its text.
        value: String,
        /// The requirement.
        must: &'static str,
    },
    /// A tensor that no calibration has, or of a layer that the model does not have.
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
    /// A tensor whose axes do not fit its layer.
    #[error("tensor {name:?} has shape {got:?}, {expected:?} expected")]
    Shape {
        /// Its name.
        name: String,
        /// The shape that its layer requires.
        expected: Vec<usize>,
        /// Its shape.
        got: Vec<usize>,
    },
    /// A layer without any tensor.
    #[error("no constants of layer {layer}")]
    MissingLayer {
        /// The layer.
        layer: LayerId,
    },
    /// A calibration and metadata with different numbers of layers, or more than 65536.
    #[error("constants of {got} layers, {expected} expected")]
    NumLayers {
        /// Layers of the metadata.
        expected: usize,
        /// Layers of the calibration.
        got: usize,
    },
    /// A shape that no plane can have.
    #[error("layer {layer}: no plane has {shape}")]
    LayerShape {
        /// The layer.
        layer: LayerId,
        /// The shape in the metadata.
        shape: LayerShape,
    },
    /// Constants that a cache refuses.
    #[error(transparent)]
    Calibration(#[from] CalibrationError),
    /// A file of another model.
    #[error("the calibration was made for the model {got:?}, this is {expected:?}")]
    OtherModel {
        /// The caller's model.
        expected: String,
        /// The model of the file.
        got: String,
    },
}

/// Why a header could not be read; a text for people.
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
