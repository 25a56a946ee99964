//! A model's folder, as Hugging Face lays it out.
use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, anyhow, bail};
use candle_core::{DType, Device, Tensor, safetensors};
use candle_nn::VarBuilder;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokenizers::Tokenizer;

use super::generate::Limits;

/// A folder with config.json, weights and tokenizer.json.
#[derive(Debug)]
pub(crate) struct Folder {
    path: PathBuf,
    config: Value,
    tokenizer: Tokenizer,
}

impl Folder {
    pub(crate) fn open(path: &Path) -> anyhow::Result<Self> {
        let config = json(&path.join("config.json"))?;
        let path_of_tokenizer = path.join("tokenizer.json");
        let bytes = read(&path_of_tokenizer)?;
        // The tokenizer's own reader panics on some files that are no JSON.
        serde_json::from_slice::<serde::de::IgnoredAny>(&bytes)
            .with_context(|| path_of_tokenizer.display().to_string())?;
        let mut tokenizer = Tokenizer::from_bytes(&bytes)
            .map_err(|error| anyhow!("{}: {error}", path_of_tokenizer.display()))?;
        // Both are settings of training.
        tokenizer.with_padding(None).with_truncation(None).map_err(|error| anyhow!(error))?;
        Ok(Self { path: path.to_owned(), config, tokenizer })
    }

    /// Returns the configuration of a model.
    pub(crate) fn config<T: DeserializeOwned>(&self) -> anyhow::Result<T> {
        let place = || self.path.join("config.json").display().to_string();
        T::deserialize(&self.config).with_context(place)
    }

    /// Reads all weights, as f32.
    pub(crate) fn weights(&self) -> anyhow::Result<VarBuilder<'static>> {
        let mut tensors: HashMap<String, Tensor> = HashMap::new();
        for file in self.weight_files()? {
            let path = self.path.join(file);
            let context = || path.display().to_string();
            tensors.extend(safetensors::load(&path, &Device::Cpu).with_context(context)?);
        }
        Ok(VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu))
    }

    fn weight_files(&self) -> anyhow::Result<BTreeSet<String>> {
        let single = "model.safetensors";
        let index = self.path.join("model.safetensors.index.json");
        if self.path.join(single).exists() || !index.exists() {
            return Ok(BTreeSet::from([single.to_owned()]));
        }
        let json = json(&index)?;
        let files = json.get("weight_map").and_then(Value::as_object);
        let files = files.with_context(|| format!("{}: no weight_map", index.display()))?;
        Ok(files.values().filter_map(Value::as_str).map(str::to_owned).collect())
    }

    /// Converts a prompt to tokens. Special tokens that the tokenizer adds at the begin are not
    /// added to a prompt that has them.
    pub(crate) fn encode(&self, prompt: &str) -> anyhow::Result<Vec<u32>> {
        let encode = |special: bool| {
            let encoding =
                self.tokenizer.encode(prompt, special).map_err(|error| anyhow!(error))?;
            anyhow::Ok(encoding.get_ids().to_vec())
        };
        let (all, own) = (encode(true)?, encode(false)?);
        let is_repeated = all.strip_suffix(&*own).is_some_and(|added| own.starts_with(added));
        let tokens = if is_repeated { own } else { all };
        if tokens.is_empty() {
            bail!("the prompt is empty, and the tokenizer adds no token before it");
        }
        Ok(tokens)
    }

    /// Returns the text of the tokens that a model generated after a prompt.
    pub(crate) fn text_after(&self, prompt: &[u32], new: &[u32]) -> anyhow::Result<String> {
        // A decoder may treat the first token of a text differently, so both begin alike.
        let decode =
            |tokens: &[u32]| self.tokenizer.decode(tokens, false).map_err(|error| anyhow!(error));
        let (before, all) = (decode(prompt)?, decode(&[prompt, new].concat())?);
        // The prompt may end inside a character.
        let before = before.trim_end_matches(char::REPLACEMENT_CHARACTER);
        Ok(all.strip_prefix(before).unwrap_or(&all).to_owned())
    }

    /// Returns where a text ends.
    pub(crate) fn limits(&self, max_new_tokens: u32) -> Limits {
        let number = |value: &Value| value.as_u64().and_then(|number| u32::try_from(number).ok());
        let context = self.config.get("max_position_embeddings").and_then(number);
        let stop = match self.config.get("eos_token_id") {
            Some(Value::Array(tokens)) => tokens.iter().filter_map(number).collect(),
            Some(token) => number(token).into_iter().collect(),
            None => Vec::new(),
        };
        Limits { max_new_tokens, context: context.unwrap_or(u32::MAX), stop }
    }
}

fn read(path: &Path) -> anyhow::Result<Vec<u8>> {
    fs::read(path).with_context(|| path.display().to_string())
}

fn json(path: &Path) -> anyhow::Result<Value> {
    serde_json::from_slice(&read(path)?).with_context(|| path.display().to_string())
}
