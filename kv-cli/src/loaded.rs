//! What every command that runs a model opens first: the model, its tokenizer and the device.
use std::path::Path;

use anyhow::Context;
use kv::{AnyBackend, Device};

use crate::bundled;
use crate::model::Decoder;
use crate::text::{Text, read_text, tokenizer_path};

#[derive(Debug)]
pub(crate) struct Loaded {
    /// The last part of the model's path.
    pub(crate) name: String,
    pub(crate) model: Decoder,
    pub(crate) text: Text,
    pub(crate) backend: AnyBackend,
}

impl Loaded {
    pub(crate) fn open(
        model: Option<&Path>,
        tokenizer: Option<&Path>,
        device: &Device,
    ) -> anyhow::Result<Self> {
        let path = bundled::model_or_bundled(model)?;
        let backend = device.connect()?;
        let text = Text::read(&tokenizer_path(&path, tokenizer)?)?;
        let model = Decoder::read(&path)?;
        let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
        Ok(Self { name, model, text, backend })
    }

    /// All tokens of a text file, with the special tokens the tokenizer itself adds.
    pub(crate) fn read_tokens(&self, path: &Path) -> anyhow::Result<Vec<u32>> {
        let describe = || path.display().to_string();
        let text = read_text(path)?;
        let config = self.model.config();
        self.text.encode(&text, config.vocab, config.bos).with_context(describe)
    }
}
