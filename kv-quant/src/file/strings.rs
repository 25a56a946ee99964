//! The metadata of a file, as strings and as numbers.
use std::collections::HashMap;

use kv_core::LayerId;
use serde_json::{Map, Value};

use crate::calibrate::LayerShape;
use crate::file::{FileError, Metadata};

const VERSION_KEY: &str = "kv_calibration";
const VERSION: &str = "1";
const MODEL: &str = "model";
const TOKENS: &str = "tokens";
const NUM_LAYERS: &str = "num_layers";
const NUM_KV_HEADS: &str = "num_kv_heads";
const HEAD_DIM_K: &str = "head_dim_k";
const HEAD_DIM_V: &str = "head_dim_v";

/// The metadata of a file, parsed but not yet compared with the tensors.
#[derive(Debug)]
pub(super) struct Strings {
    pub(super) model: String,
    pub(super) tokens: u32,
    /// At least 1.
    num_layers: u32,
    num_kv_heads: Column,
    head_dim_k: Column,
    head_dim_v: Column,
}

/// A number for each layer.
#[derive(Debug)]
enum Column {
    Same(u32),
    Each(Vec<u32>),
}

impl Strings {
    pub(super) fn read(strings: &HashMap<String, String>) -> Result<Self, FileError> {
        let get = |key| strings.get(key).ok_or(FileError::MissingKey { key });
        let version = get(VERSION_KEY)?;
        if version != VERSION {
            return Err(FileError::Version { got: version.clone(), known: VERSION });
        }
        let refused = |key, must| {
            let value = strings.get(key).cloned().unwrap_or_default();
            FileError::Value { key, value, must }
        };
        let num_layers = number(get(NUM_LAYERS)?).filter(|n| (1..=65536).contains(n));
        let num_layers = num_layers.ok_or_else(|| refused(NUM_LAYERS, "1 to 65536"))?;
        let column = |key| {
            let column = Column::read(get(key)?, num_layers);
            column.ok_or_else(|| refused(key, "a number above 0, or one for each layer"))
        };
        Ok(Self {
            model: get(MODEL)?.clone(),
            tokens: number(get(TOKENS)?).ok_or_else(|| refused(TOKENS, "a number below 2^32"))?,
            num_layers,
            num_kv_heads: column(NUM_KV_HEADS)?,
            head_dim_k: column(HEAD_DIM_K)?,
            head_dim_v: column(HEAD_DIM_V)?,
        })
    }

    /// Returns the shape of a layer; `None` past the last.
    pub(super) fn layer(&self, layer: LayerId) -> Option<LayerShape> {
        if u32::from(layer.0) >= self.num_layers {
            return None;
        }
        Some(LayerShape {
            num_kv_heads: self.num_kv_heads.get(layer)?,
            head_dim_k: self.head_dim_k.get(layer)?,
            head_dim_v: self.head_dim_v.get(layer)?,
        })
    }

    /// Iterates over the shapes of all layers.
    pub(super) fn layers(&self) -> impl Iterator<Item = (LayerId, LayerShape)> + '_ {
        (0..=u16::MAX).map(LayerId).map_while(|id| Some((id, self.layer(id)?)))
    }
}

impl Column {
    /// Parses one number above 0 or, separated by commas, one per layer.
    fn read(text: &str, num_layers: u32) -> Option<Self> {
        let numbers = text.split(',').map(|text| number(text).filter(|n| *n > 0));
        let numbers = numbers.collect::<Option<Vec<_>>>()?;
        match *numbers.as_slice() {
            [number] => Some(Self::Same(number)),
            _ if u32::try_from(numbers.len()) == Ok(num_layers) => Some(Self::Each(numbers)),
            _ => None,
        }
    }

    fn get(&self, layer: LayerId) -> Option<u32> {
        match self {
            Self::Same(number) => Some(*number),
            Self::Each(numbers) => numbers.get(usize::from(layer.0)).copied(),
        }
    }
}

/// Returns the metadata of a file to write; there is at least one layer.
pub(super) fn write(metadata: &Metadata) -> Map<String, Value> {
    let column = |of: fn(&LayerShape) -> u32| {
        let mut numbers: Vec<_> = metadata.layers.iter().map(|it| of(it).to_string()).collect();
        if numbers.iter().all(|number| numbers.first() == Some(number)) {
            numbers.truncate(1);
        }
        numbers.join(",")
    };
    let strings = [
        (VERSION_KEY, VERSION.to_owned()),
        (MODEL, metadata.model.clone()),
        (TOKENS, metadata.tokens.to_string()),
        (NUM_LAYERS, metadata.layers.len().to_string()),
        (NUM_KV_HEADS, column(|it| it.num_kv_heads)),
        (HEAD_DIM_K, column(|it| it.head_dim_k)),
        (HEAD_DIM_V, column(|it| it.head_dim_v)),
    ];
    strings.into_iter().map(|(key, text)| (key.to_owned(), Value::String(text))).collect()
}

/// Parses a number in plain decimal digits.
fn number(text: &str) -> Option<u32> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    digits.then(|| text.parse().ok())?
}
