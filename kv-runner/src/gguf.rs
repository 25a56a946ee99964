//! Reads a model from GGUF files: metadata as a configuration, tensors dequantised to f32 under
//! their Hugging Face names.
//!
//! Files of some architectures have the rows of Q and K interleaved, so that pairs `(2i, 2i + 1)`
//! rotate together. The tokenizer of a file is not read, except the tokens that end a text, the
//! template of chats and the tokens that it names; a `tokenizer.json` is needed.
// Reads files that may be anything.
#![warn(clippy::arithmetic_side_effects, clippy::indexing_slicing)]
mod config;
mod experts;
mod forms;
mod joins;
mod metadata;
mod names;
mod parts;
mod recurrence;
mod rope;
#[cfg(test)]
mod tests;

use std::path::Path;

use candle_core::Device;
use candle_core::quantized::gguf_file::TensorInfo;

use crate::config::ModelConfig;
pub use crate::error::GgufError;
use crate::error::{Error, InFile};
use crate::num::to_u64;
use crate::weights::Weights;
pub use metadata::Metadata;
use parts::Part;
pub use parts::is_further_part;

/// Name of the tensor with frequency factors of a model with an extended context.
pub(crate) const ROPE_FACTORS: &str = "rope_freqs.weight";

/// Name of the tensor with frequency factors up to the original context.
const SHORT_FACTORS: &str = "rope_factors_short.weight";

/// Upper limit of the values of [`SHORT_FACTORS`], larger than any head.
const SHORT_FACTORS_MAX: usize = 1 << 16;

/// The head of a GGUF file: its metadata, without the tensors.
#[derive(Debug)]
pub struct Head(Part);

impl Head {
    /// Reads the head of a model's file; of a split model, the head of the first part, which
    /// describes all of it.
    ///
    /// # Errors
    /// [`Error::File`] with the cause: [`Error::Io`], [`GgufError::NotReadable`],
    /// [`GgufError::NotFirst`].
    pub fn read(path: &Path) -> Result<Self, Error> {
        parts::first(path).map(Self)
    }

    /// Returns the metadata.
    pub fn metadata(&self) -> Metadata<'_> {
        Metadata::new(&self.0.content)
    }
}

impl GgufError {
    fn tensor(name: &str, error: candle_core::Error) -> Self {
        Self::Tensor { name: name.to_owned(), source: error.into() }
    }

    fn too_large(name: &str, info: &TensorInfo) -> Self {
        Self::TooLarge { name: name.to_owned(), shape: info.shape.dims().to_vec() }
    }
}

/// Reads the file, and the further parts of a split model, completely.
pub(crate) fn read(path: &Path) -> Result<(ModelConfig, Weights), Error> {
    let mut parts = parts::all(path)?;
    let short = short_factors(&mut parts)?;
    let contents: Vec<_> = parts.iter().map(|part| &part.content).collect();
    let config = config::config(&contents, short).in_file(path)?;
    let mut weights = Weights::default();
    for part in &mut parts {
        read_tensors(part, &config, &mut weights)?;
    }
    joins::restore(&config, &mut weights).in_file(path)?;
    Ok((config, weights))
}

fn read_tensors(part: &mut Part, config: &ModelConfig, weights: &mut Weights) -> Result<(), Error> {
    let Part { path, file, content } = part;
    for (name, info) in &content.tensor_infos {
        let (architecture, layers) = (config.architecture, config.layers());
        let Some(known) = names::hugging_face(architecture, layers, name) else {
            continue;
        };
        check_size(name, info).in_file(path)?;
        let tensor = content
            .tensor(file, name, &Device::Cpu)
            .and_then(|tensor| known.restore(&tensor.dequantize(&Device::Cpu)?, config))
            .map_err(|error| GgufError::tensor(name, error))
            .in_file(path)?;
        if weights.contains(&known.name) {
            return Err(GgufError::Repeated { name: name.clone() }).in_file(path);
        }
        weights.insert(known.name, tensor);
    }
    Ok(())
}

/// Returns the frequency factors per pair, if a part has them.
fn short_factors(parts: &mut [Part]) -> Result<Option<Vec<f64>>, Error> {
    for Part { path, file, content } in parts {
        let Some(info) = content.tensor_infos.get(SHORT_FACTORS) else {
            continue;
        };
        let count = info.shape.dims().iter().try_fold(1_usize, |n, dim| n.checked_mul(*dim));
        if count.is_none_or(|count| count > SHORT_FACTORS_MAX) {
            return Err(GgufError::too_large(SHORT_FACTORS, info)).in_file(path);
        }
        let values = content
            .tensor(file, SHORT_FACTORS, &Device::Cpu)
            .and_then(|tensor| tensor.dequantize(&Device::Cpu)?.flatten_all()?.to_vec1::<f32>())
            .map_err(|error| GgufError::tensor(SHORT_FACTORS, error))
            .in_file(path)?;
        return Ok(Some(values.into_iter().map(f64::from).collect()));
    }
    Ok(None)
}

/// Checks the size, because the reader below multiplies extents without a check.
fn check_size(name: &str, info: &TensorInfo) -> Result<(), GgufError> {
    let elements = info.shape.dims().iter().try_fold(1_u64, |n, dim| n.checked_mul(to_u64(*dim)));
    match elements.and_then(|n| n.checked_mul(4)) {
        Some(bytes) if isize::try_from(bytes).is_ok() => Ok(()),
        _ => Err(GgufError::too_large(name, info)),
    }
}
