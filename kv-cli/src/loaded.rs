//! Opens the parts of every command with a model: the model, its tokenizer and the device.
use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, bail};
use kv::backend::AnyBackend;
use kv_runner::{Decoder, Tokenizer, read_text};

use crate::args::ModelArgs;
use crate::{bundled, output};

#[derive(Debug)]
pub(crate) struct Loaded {
    /// The folder or file of the model.
    pub(crate) path: PathBuf,
    /// The last part of the path.
    pub(crate) name: String,
    pub(crate) model: Decoder,
    pub(crate) tokenizer: Arc<Tokenizer>,
    pub(crate) backend: AnyBackend,
    /// Whether the note about a prompt's own begin token was printed.
    noted_begin: Cell<bool>,
}

impl Loaded {
    pub(crate) fn open(args: &ModelArgs) -> anyhow::Result<Self> {
        let path = bundled::model_or_bundled(args.model.as_deref())?;
        let backend = args.backend.connect()?;
        let tokenizer = tokenizer_path(&path, args.tokenizer.as_deref())?;
        let tokenizer = Arc::new(Tokenizer::read(&tokenizer)?);
        let model = Decoder::read(&path)?;
        let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
        Ok(Self { path, name, model, tokenizer, backend, noted_begin: Cell::new(false) })
    }

    /// Returns the tokens of a prompt, with the special tokens that the tokenizer adds.
    pub(crate) fn encode(&self, prompt: &str) -> anyhow::Result<Vec<u32>> {
        let encoded = self.tokenizer.encode(prompt, self.model.config())?;
        if let Some(begin) = encoded.repeated_begin
            && !self.noted_begin.replace(true)
        {
            output::note(&format!("a prompt begins with {begin:?}, it is not added again"))?;
        }
        Ok(encoded.tokens)
    }

    /// Returns all tokens of a text file.
    pub(crate) fn read_tokens(&self, path: &Path) -> anyhow::Result<Vec<u32>> {
        let text = read_text(path)?;
        self.encode(&text).with_context(|| path.display().to_string())
    }
}

/// Returns the path of the tokenizer of a model.
fn tokenizer_path(model: &Path, given: Option<&Path>) -> anyhow::Result<PathBuf> {
    if let Some(path) = given {
        return Ok(path.to_owned());
    }
    let dir = if model.is_file() { model.parent().unwrap_or(Path::new(".")) } else { model };
    let path = dir.join("tokenizer.json");
    if model.is_file() && !path.is_file() {
        bail!("{}: no tokenizer.json in its folder, give --tokenizer FILE", model.display());
    }
    Ok(path)
}
