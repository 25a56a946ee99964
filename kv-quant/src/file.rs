//! Calibrations as safetensors files.
//!
//! The tensors of layer `l`, all `F32`. A list that the [`Calibration`] lacks has no tensor:
//!
//! | tensor | shape |
//! |---|---|
//! | `layers.{l}.k.mean`, `layers.{l}.k.balance` | `[num_kv_heads, head_dim_k]` |
//! | `layers.{l}.k.amax`, `layers.{l}.k.amax_transformed`, the same of `v` | `[num_kv_heads]` |
//! | `layers.{l}.k.scales`, the same of `v` | `[1]` or `[num_kv_heads]` |
//!
//! The metadata, all strings as the container requires:
//!
//! | key | content |
//! |---|---|
//! | `kv_calibration` | version of this format: `1` |
//! | `model` | identifies the model; chosen by the writer of the file |
//! | `tokens` | tokens that the constants were computed from |
//! | `num_layers` | layers, each with at least one tensor |
//! | `num_kv_heads`, `head_dim_k`, `head_dim_v` | one number, or one for every layer: `8,8,4` |
//!
//! Other keys are ignored, other tensors are refused. A cache of the same shape accepts whatever
//! [`read`] accepts. Equal calibrations give equal bytes.
mod container;
mod error;
mod list;
mod strings;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use kv_core::LayerId;
use kv_core::backend::Plane;
use kv_core::calibration::{Calibration, LayerCalibration};

pub use error::{FileError, HeaderError};

use crate::calibrate::{Calibrator, LayerShape};
use container::Container;
use list::Place;
use strings::Strings;

/// Describes the model of a calibration and the tokens it was computed from.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "a literal names all that a file needs")]
pub struct Metadata {
    /// Identifies the model: any text that no other model has, such as its name and a hash of its
    /// weights. It is compared, never parsed.
    pub model: String,
    /// Tokens that the constants were computed from.
    pub tokens: u32,
    /// Heads and channels of every layer.
    pub layers: Vec<LayerShape>,
}

impl Metadata {
    /// Describes the calibration of `model` by a calibrator.
    pub fn of(calibrator: &Calibrator, model: impl Into<String>) -> Self {
        let layers = calibrator.shapes().collect();
        Self { model: model.into(), tokens: calibrator.num_tokens(), layers }
    }

    /// Refuses a file of another model.
    ///
    /// # Errors
    /// [`FileError::OtherModel`], which names both.
    pub fn check_model(&self, expected: &str) -> Result<(), FileError> {
        if self.model == expected {
            return Ok(());
        }
        Err(FileError::OtherModel { expected: expected.to_owned(), got: self.model.clone() })
    }
}

/// Writes a calibration as the bytes of a file.
///
/// # Errors
/// Everything that [`read`] would refuse: [`FileError::NumLayers`] if the two disagree about the
/// number of layers, [`FileError::MissingLayer`] for a layer without any list or for zero layers,
/// [`FileError::LayerShape`], [`FileError::Calibration`] for a list of another length or an
/// impossible number.
///
/// # Examples
/// ```
/// use kv::quant::Calibration;
/// use kv::quant::{LayerCalibration, PlaneCalibration};
/// use kv::quant::calibrate::LayerShape;
/// use kv::quant::file::{self, Metadata};
///
/// let mut layer = LayerCalibration::default();
/// layer.k.mean = vec![0.5, -0.5];
/// let calibration = Calibration::new(vec![layer]);
/// let shape = LayerShape { num_kv_heads: 1, head_dim_k: 2, head_dim_v: 2 };
/// let metadata = Metadata { model: "tiny".to_owned(), tokens: 256, layers: vec![shape] };
/// let bytes = file::write(&calibration, &metadata)?;
/// assert_eq!(file::read(&bytes)?, (calibration, metadata));
/// # Ok::<(), file::FileError>(())
/// ```
pub fn write(calibration: &Calibration, metadata: &Metadata) -> Result<Vec<u8>, FileError> {
    let (expected, got) = (metadata.layers.len(), calibration.layers().len());
    if expected != got {
        return Err(FileError::NumLayers { expected, got });
    }
    if got == 0 {
        return Err(FileError::MissingLayer { layer: LayerId(0) });
    }
    let mut ids = 0..=u16::MAX;
    let mut tensors = Vec::new();
    for (layer, shape) in calibration.layers().iter().zip(&metadata.layers) {
        let id = ids.next().map(LayerId).ok_or(FileError::NumLayers { expected: 65536, got })?;
        check(id, *shape, layer)?;
        let before = tensors.len();
        for place in Place::all(id) {
            let values = place.list(layer);
            if !values.is_empty() {
                tensors.push((place.to_string(), place.shape(*shape, values.len()), values));
            }
        }
        if tensors.len() == before {
            return Err(FileError::MissingLayer { layer: id });
        }
    }
    Ok(container::write(strings::write(metadata), &tensors))
}

/// Reads a file.
///
/// # Guarantees
/// No input makes it panic or allocate more than a small multiple of the input's size.
///
/// # Errors
/// [`FileError`]; each variant says its cause. A file with any error gives no result.
pub fn read(bytes: &[u8]) -> Result<(Calibration, Metadata), FileError> {
    let container = Container::read(bytes)?;
    let strings = Strings::read(container.strings())?;
    let mut found = BTreeMap::<LayerId, LayerCalibration>::new();
    for (name, tensor) in container.tensors() {
        let unknown = || FileError::UnknownTensor { name: name.clone() };
        let place = Place::parse(name).ok_or_else(unknown)?;
        let shape = strings.layer(place.layer()).ok_or_else(unknown)?;
        let values = place.values(name, shape, tensor)?;
        *place.list_mut(found.entry(place.layer()).or_default()) = values;
    }
    let (mut layers, mut shapes) = (Vec::new(), Vec::new());
    // Ends at the first layer without tensors, so a large count alone allocates nothing.
    for (id, shape) in strings.layers() {
        let layer = found.remove(&id).ok_or(FileError::MissingLayer { layer: id })?;
        check(id, shape, &layer)?;
        layers.push(layer);
        shapes.push(shape);
    }
    let metadata = Metadata { model: strings.model, tokens: strings.tokens, layers: shapes };
    Ok((Calibration::new(layers), metadata))
}

/// Checks one layer as a cache of that shape would do.
fn check(id: LayerId, shape: LayerShape, layer: &LayerCalibration) -> Result<(), FileError> {
    let [k, v] = shape.layouts().ok_or(FileError::LayerShape { layer: id, shape })?;
    layer.k.check(id, Plane::Key, &k)?;
    layer.v.check(id, Plane::Value, &v)?;
    Ok(())
}
