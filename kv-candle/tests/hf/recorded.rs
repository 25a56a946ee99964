//! Tiny models with logits recorded from transformers, see `record.py`.
use std::collections::HashMap;
use std::fs;
use std::path::Path;

use candle_core::{DType, Device, Result, Tensor};
use safetensors::SafeTensors;
use serde::de::DeserializeOwned;
use serde_json::Value;

/// The recording of one model.
pub(crate) struct Recorded {
    pub(crate) name: &'static str,
    pub(crate) config: Value,
    /// Weights in f32, and angles per position: `inv_freq`.
    pub(crate) weights: HashMap<String, Tensor>,
    pub(crate) sequences: Vec<Sequence>,
    /// How far a logit may be from the recorded one.
    pub(crate) tolerance: f64,
}

/// A prompt and its greedy continuation.
pub(crate) struct Sequence {
    pub(crate) tokens: Vec<u32>,
    /// Tokens of the prompt.
    pub(crate) prompt_len: usize,
    /// Logits of the vocabulary after every token.
    pub(crate) logits: Vec<Vec<f64>>,
}

impl Recorded {
    pub(crate) fn read(name: &'static str) -> Self {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/hf").join(name);
        let bytes = fs::read(path.with_extension("safetensors")).unwrap();
        let (_, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
        let recording = metadata.metadata().as_ref().unwrap().get("recording").unwrap();
        let recording: Value = serde_json::from_str(recording).unwrap();
        let new_tokens = usize::try_from(recording["new_tokens"].as_u64().unwrap()).unwrap();
        let mut tensors = candle_core::safetensors::load_buffer(&bytes, &Device::Cpu).unwrap();
        let sequences = [0, 1, 2].map(|at| {
            let mut take = |part: &str| tensors.remove(&format!("sequences.{at}.{part}")).unwrap();
            let tokens = take("tokens").to_dtype(DType::U32).unwrap().to_vec1().unwrap();
            let logits: Vec<Vec<f64>> = take("logits").to_vec2().unwrap();
            assert_eq!(logits.len(), tokens.len());
            Sequence { prompt_len: tokens.len() - new_tokens, tokens, logits }
        });
        let weights = tensors.into_iter().map(|(name, it)| Ok((name, it.to_dtype(DType::F32)?)));
        let weights = weights.collect::<Result<_>>().unwrap();
        let sequences = Vec::from(sequences);
        let logits = sequences.iter().flat_map(|sequence| sequence.logits.iter().flatten());
        let largest = logits.fold(0.0_f64, |largest, logit| largest.max(logit.abs()));
        let f32_error = recording["f32_error"].as_f64().unwrap();
        let tolerance = 2.0 * f32_error + largest * f64::from(f32::EPSILON);
        Self { name, config: recording["config"].clone(), weights, sequences, tolerance }
    }

    pub(crate) fn layers(&self) -> u16 {
        self.field("num_hidden_layers")
    }

    /// Reads a field of the configuration.
    pub(crate) fn field<T: DeserializeOwned>(&self, name: &str) -> T {
        serde_json::from_value(self.config[name].clone()).expect(name)
    }

    /// Returns how many keys before its own position a query of a layer sees, `None` for all.
    pub(crate) fn window_left(&self, layer: u16) -> Option<u32> {
        let kinds = self.config.get("layer_types");
        let has_window = kinds.is_none_or(|it| it[usize::from(layer)] == "sliding_attention");
        // transformers counts all keys that a query sees, its own included.
        has_window.then(|| self.field::<u32>("sliding_window") - 1)
    }
}
