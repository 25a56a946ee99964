//! The lists of a calibration and the names of their tensors.
use std::fmt;

use kv_core::LayerId;
use kv_core::backend::Plane;
use kv_core::calibration::{LayerCalibration, PlaneCalibration};
use kv_core::num::to_usize;
use safetensors::Dtype;

use crate::calibrate::LayerShape;
use crate::file::FileError;
use crate::file::container::Tensor;

/// One list of one plane of one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Place {
    layer: LayerId,
    plane: Plane,
    list: List,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum List {
    Mean,
    Balance,
    Amax,
    AmaxTransformed,
    Scales,
}

/// The lists that a layer may have.
const LISTS: [(Plane, List); 8] = [
    (Plane::Key, List::Mean),
    (Plane::Key, List::Balance),
    (Plane::Key, List::Amax),
    (Plane::Key, List::AmaxTransformed),
    (Plane::Key, List::Scales),
    (Plane::Value, List::Amax),
    (Plane::Value, List::AmaxTransformed),
    (Plane::Value, List::Scales),
];

impl Place {
    /// Iterates over every list of a layer.
    pub(super) fn all(layer: LayerId) -> impl Iterator<Item = Self> {
        LISTS.into_iter().map(move |(plane, list)| Self { layer, plane, list })
    }

    /// Parses the name of a tensor; each list has exactly one name.
    pub(super) fn parse(name: &str) -> Option<Self> {
        let (layer, _) = name.strip_prefix("layers.")?.split_once('.')?;
        let layer = LayerId(layer.parse().ok()?);
        Self::all(layer).find(|place| place.to_string() == name)
    }

    pub(super) fn layer(self) -> LayerId {
        self.layer
    }

    pub(super) fn list(self, layer: &LayerCalibration) -> &[f32] {
        let plane = match self.plane {
            Plane::Key => &layer.k,
            Plane::Value => &layer.v,
        };
        let PlaneCalibration { scales, amax, amax_transformed, mean, balance } = plane;
        match self.list {
            List::Mean => mean,
            List::Balance => balance,
            List::Amax => amax,
            List::AmaxTransformed => amax_transformed,
            List::Scales => scales,
        }
    }

    pub(super) fn list_mut(self, layer: &mut LayerCalibration) -> &mut Vec<f32> {
        let plane = match self.plane {
            Plane::Key => &mut layer.k,
            Plane::Value => &mut layer.v,
        };
        let PlaneCalibration { scales, amax, amax_transformed, mean, balance } = plane;
        match self.list {
            List::Mean => mean,
            List::Balance => balance,
            List::Amax => amax,
            List::AmaxTransformed => amax_transformed,
            List::Scales => scales,
        }
    }

    /// Returns the axes of a list of `len` values. `len` matters for scales only: one, or one per
    /// head.
    pub(super) fn shape(self, shape: LayerShape, len: usize) -> Vec<usize> {
        let (heads, head_dim) = (to_usize(shape.num_kv_heads), to_usize(shape.head_dim_k));
        match self.list {
            List::Mean | List::Balance => vec![heads, head_dim],
            List::Scales if len == 1 => vec![1],
            List::Amax | List::AmaxTransformed | List::Scales => vec![heads],
        }
    }

    /// Returns the values of a tensor, if its type and shape fit this list.
    pub(super) fn values(
        self,
        name: &str,
        shape: LayerShape,
        tensor: &Tensor<'_>,
    ) -> Result<Vec<f32>, FileError> {
        if tensor.dtype != Dtype::F32 {
            let got = tensor.dtype.to_string();
            return Err(FileError::Dtype { name: name.to_owned(), got });
        }
        let (values, _) = tensor.data.as_chunks();
        let expected = self.shape(shape, values.len());
        if tensor.shape != expected {
            let got = tensor.shape.clone();
            return Err(FileError::Shape { name: name.to_owned(), expected, got });
        }
        Ok(values.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect())
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plane = match self.plane {
            Plane::Key => "k",
            Plane::Value => "v",
        };
        let list = match self.list {
            List::Mean => "mean",
            List::Balance => "balance",
            List::Amax => "amax",
            List::AmaxTransformed => "amax_transformed",
            List::Scales => "scales",
        };
        write!(f, "layers.{}.{plane}.{list}", self.layer)
    }
}
