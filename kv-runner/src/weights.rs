//! Weights by name, converted to f32, with their shapes checked against the configuration.
//!
//! A file is read whole, every offset in it is checked before a byte is used, and a name that
//! points out of the model's directory is refused.
// Reads files that may be anything.
#![warn(clippy::arithmetic_side_effects, clippy::indexing_slicing)]
use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::path::Path;

use candle_core::safetensors::{Load, SliceSafetensors};
use candle_core::{DType, Device, Tensor};
use safetensors::tensor::Metadata;
use serde::Deserialize;

use crate::error::{Error, ForeignError, InFile, WeightError};
use crate::num::to_usize;
use crate::text_file::read_text;

/// Tensors of a model under their Hugging Face names.
#[derive(Debug, Default)]
pub(crate) struct Weights {
    tensors: HashMap<String, Tensor>,
    /// Tensors with non-float element types, for messages only.
    refused: HashMap<String, String>,
}

/// `model.safetensors.index.json`: the file of each tensor.
#[derive(Debug, Deserialize)]
struct Index {
    weight_map: HashMap<String, String>,
}

impl Weights {
    /// Reads `model.safetensors`, or the files its index names.
    pub(crate) fn read(dir: &Path) -> Result<Self, Error> {
        let mut weights = Self::default();
        let single = dir.join("model.safetensors");
        let index = dir.join("model.safetensors.index.json");
        if single.is_file() || !index.is_file() {
            weights.read_file(&single)?;
            return Ok(weights);
        }
        let text = read_text(&index)?;
        let map: Index = serde_json::from_str(&text).in_file(&index)?;
        let files: BTreeSet<_> = map.weight_map.into_values().collect();
        for file in files {
            if Path::new(&file).file_name().is_none_or(|name| name != file.as_str()) {
                return Err(WeightError::FileName { file }).in_file(&index);
            }
            weights.read_file(&dir.join(file))?;
        }
        Ok(weights)
    }

    fn read_file(&mut self, path: &Path) -> Result<(), Error> {
        let bytes = fs::read(path).in_file(path)?;
        self.read_bytes(&bytes).in_file(path)
    }

    pub(crate) fn read_bytes(&mut self, bytes: &[u8]) -> Result<(), Error> {
        check_length(bytes)?;
        let file = SliceSafetensors::new(bytes)?;
        for (name, view) in file.tensors() {
            let Some(name) = text_name(&name) else {
                continue;
            };
            let is_float = DType::try_from(view.dtype())
                .is_ok_and(|dtype| matches!(dtype, DType::F32 | DType::F16 | DType::BF16));
            if is_float {
                let tensor = view.load(&Device::Cpu)?.to_dtype(DType::F32)?;
                self.insert(name, tensor);
            } else {
                self.refused.insert(name, format!("{:?}", view.dtype()));
            }
        }
        Ok(())
    }

    /// Adds an f32 tensor.
    pub(crate) fn insert(&mut self, name: String, tensor: Tensor) {
        self.tensors.insert(name, tensor);
    }

    /// Returns whether a tensor of this name exists.
    pub(crate) fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// Removes and returns a tensor of exactly this shape.
    pub(crate) fn take(&mut self, name: &str, shape: &[u32]) -> Result<Tensor, WeightError> {
        let name = name.to_owned();
        let Some(tensor) = self.tensors.remove(&name) else {
            return Err(match self.refused.remove(&name) {
                Some(got) => WeightError::ElementType { name, got },
                None => WeightError::Missing { name },
            });
        };
        let expected: Vec<_> = shape.iter().copied().map(to_usize).collect();
        if tensor.dims() != expected {
            return Err(WeightError::Shape { name, got: tensor.dims().to_vec(), expected });
        }
        Ok(tensor)
    }
}

/// Returns the name of a tensor in a text model, `None` for a tensor of another part.
///
/// Multimodal models put a prefix before the names of their text model.
fn text_name(name: &str) -> Option<String> {
    const PARTS: [&str; 5] = [
        "model.embed_tokens.",
        "model.layers.",
        "model.norm.",
        "model.embedding_norm.",
        "lm_head.",
    ];
    let name = match name.strip_prefix("model.language_model.") {
        Some(rest) => format!("model.{rest}"),
        None => name.strip_prefix("language_model.").unwrap_or(name).to_owned(),
    };
    PARTS.iter().any(|part| name.starts_with(part)).then_some(name)
}

/// Refuses a file whose length differs from its header.
///
/// safetensors 0.8.0 compares the two with an addition that overflows on a hostile header.
fn check_length(bytes: &[u8]) -> Result<(), WeightError> {
    let (prefix, rest) = bytes.split_first_chunk::<8>().ok_or(WeightError::NoHeader)?;
    let length = usize::try_from(u64::from_le_bytes(*prefix)).ok();
    let parts = length.and_then(|length| rest.split_at_checked(length));
    let (header, data) = parts.ok_or(WeightError::HeaderTooLong)?;
    let header: Metadata = serde_json::from_slice(header)
        .map_err(|error| WeightError::Header { source: ForeignError::new(error) })?;
    let (expected, got) = (header.data_len(), data.len());
    if expected != got {
        return Err(WeightError::Length { expected, got });
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_that_overflow_are_refused() {
        const MOST: u64 = (1 << 61) - 1;
        let tensor = |i: u64| {
            let (begin, end) = (MOST * i, MOST * (i + 1));
            format!(r#""t{i}":{{"dtype":"U8","shape":[{MOST}],"data_offsets":[{begin},{end}]}}"#)
        };
        let tensors: Vec<_> = (0..8).map(tensor).collect();
        let header = format!("{{{}}}", tensors.join(","));
        let mut file = u64::try_from(header.len()).unwrap().to_le_bytes().to_vec();
        file.extend(header.bytes());
        let refused = Weights::default().read_bytes(&file).unwrap_err();
        assert!(refused.to_string().contains("bytes of tensors, the file has 0"), "{refused}");
        for cut in 0..file.len() {
            assert!(Weights::default().read_bytes(file.get(..cut).unwrap()).is_err());
        }
    }
}
