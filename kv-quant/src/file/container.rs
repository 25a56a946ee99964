//! The safetensors container: a length, a JSON header, the bytes of the tensors.
//!
//! The `safetensors` crate parses the header and checks that the tensors follow each other without
//! gaps. The rest is done here for two reasons: that crate (0.8.0) adds the sizes of a hostile
//! header without a check and then panics, and it writes metadata in random order.
// Reads files that may be anything.
#![warn(clippy::arithmetic_side_effects, clippy::indexing_slicing)]
use std::collections::{BTreeMap, HashMap};

use kv_core::num::to_u64;
use safetensors::tensor;
use serde_json::{Map, Value, json};

use crate::file::FileError;

/// Bytes that hold the length of the header.
const PREFIX: usize = 8;

/// A file whose header and length agree.
#[derive(Debug)]
pub(super) struct Container<'a> {
    strings: HashMap<String, String>,
    tensors: BTreeMap<String, Tensor<'a>>,
}

/// One tensor of a file; `data` has as many bytes as dtype and shape require.
#[derive(Debug)]
pub(super) struct Tensor<'a> {
    pub(super) dtype: tensor::Dtype,
    pub(super) shape: Vec<usize>,
    pub(super) data: &'a [u8],
}

impl<'a> Container<'a> {
    pub(super) fn read(bytes: &'a [u8]) -> Result<Self, FileError> {
        let got = bytes.len();
        let truncated = |expected| FileError::Truncated { expected, got };
        let (prefix, rest) = bytes.split_first_chunk::<PREFIX>().ok_or(truncated(8))?;
        let length = u64::from_le_bytes(*prefix);
        let header = usize::try_from(length).ok().and_then(|length| rest.split_at_checked(length));
        let (header, data) = header.ok_or(truncated(length.saturating_add(8)))?;
        let header: tensor::Metadata = serde_json::from_slice(header)?;
        let (expected, got) = (header.data_len(), data.len());
        if expected != got {
            return Err(FileError::DataLength { expected, got });
        }
        let tensors = header.tensors().into_iter().map(|(name, info)| {
            let (begin, end) = info.data_offsets;
            // Offsets ascend from tensor to tensor, and the last tensor ends where the data end.
            let data = data.get(begin..end).unwrap_or_default();
            (name, Tensor { dtype: info.dtype, shape: info.shape.clone(), data })
        });
        let tensors = tensors.collect();
        Ok(Self { strings: header.metadata().clone().unwrap_or_default(), tensors })
    }

    pub(super) fn strings(&self) -> &HashMap<String, String> {
        &self.strings
    }
    pub(super) fn tensors(&self) -> &BTreeMap<String, Tensor<'a>> {
        &self.tensors
    }
}

/// Writes a file of `F32` tensors: name, shape, values.
pub(super) fn write(
    strings: Map<String, Value>,
    tensors: &[(String, Vec<usize>, &[f32])],
) -> Vec<u8> {
    let mut header = Map::from_iter([("__metadata__".to_owned(), Value::Object(strings))]);
    let mut data = Vec::new();
    for (name, shape, values) in tensors {
        let begin = data.len();
        data.extend(values.iter().flat_map(|value| value.to_le_bytes()));
        let offsets = [begin, data.len()];
        let info = json!({ "dtype": "F32", "shape": shape, "data_offsets": offsets });
        header.insert(name.clone(), info);
    }
    let mut header = Value::Object(header).to_string().into_bytes();
    // The data begin at a multiple of 8.
    header.resize(header.len().next_multiple_of(PREFIX), b' ');
    let length = to_u64(header.len());
    [length.to_le_bytes().as_slice(), &header, &data].concat()
}
