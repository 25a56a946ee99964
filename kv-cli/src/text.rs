//! Text to tokens and back, whole or as a stream.
use std::path::Path;

use anyhow::{Context, anyhow, bail};
use tokenizers::Tokenizer;

/// The tokenizer of one model.
#[derive(Debug)]
pub(crate) struct Text {
    tokenizer: Tokenizer,
}

impl Text {
    pub(crate) fn read(path: &Path) -> anyhow::Result<Self> {
        let describe = || path.display().to_string();
        let bytes = std::fs::read(path).with_context(describe)?;
        let mut tokenizer = Tokenizer::from_bytes(&bytes)
            .map_err(|error| anyhow!("not a tokenizer.json: {error}"))
            .with_context(describe)?;
        // A file may ask to cut or pad its inputs, which is for training.
        tokenizer.with_truncation(None).map_err(|error| anyhow!(error)).with_context(describe)?;
        tokenizer.with_padding(None);
        Ok(Self { tokenizer })
    }

    /// Tokens of a prompt, with the special tokens the tokenizer itself adds. A prompt that has none
    /// becomes `bos` alone.
    pub(crate) fn encode(
        &self,
        prompt: &str,
        vocab: u32,
        bos: Option<u32>,
    ) -> anyhow::Result<Vec<u32>> {
        let encoding = self.tokenizer.encode(prompt, true).map_err(|error| anyhow!(error))?;
        let mut ids = encoding.get_ids().to_vec();
        if ids.is_empty() {
            ids.push(bos.context("the prompt is empty and the model has no bos_token_id")?);
        }
        if let Some(id) = ids.iter().find(|id| **id >= vocab) {
            bail!(
                "the tokenizer gives token {id}, the model knows {vocab}: do they belong together?"
            );
        }
        Ok(ids)
    }

    /// Text of these tokens, special ones included.
    pub(crate) fn decode(&self, ids: &[u32]) -> anyhow::Result<String> {
        self.tokenizer.decode(ids, false).map_err(|error| anyhow!(error))
    }
}

/// Text that grows token by token.
///
/// A token may be part of a character, and a decoder may treat the first token of a text in a way of
/// its own. So each piece is the difference of two decodings that begin a few tokens back, and one that
/// ends inside a character waits for the rest.
#[derive(Debug)]
pub(crate) struct TextStream {
    ids: Vec<u32>,
    /// Where decoding begins.
    begin: usize,
    /// Tokens whose text is out already.
    shown: usize,
}

/// Tokens before the first new one that its text may depend on.
const LOOK_BACK: usize = 6;
/// A character has at most four bytes: what is still no character after that never will be.
const WAIT_MAX: usize = 4;

impl TextStream {
    /// Goes on behind a prompt.
    pub(crate) fn after(prompt: &[u32]) -> Self {
        let shown = prompt.len();
        Self { ids: prompt.to_vec(), begin: shown.saturating_sub(LOOK_BACK), shown }
    }

    /// Adds a token; the text that is certain now.
    pub(crate) fn push(&mut self, text: &Text, id: u32) -> anyhow::Result<String> {
        self.ids.push(id);
        let waiting = self.ids.len().saturating_sub(self.shown);
        self.advance(text, waiting >= WAIT_MAX)
    }

    /// The text that was still waiting.
    pub(crate) fn finish(&mut self, text: &Text) -> anyhow::Result<String> {
        self.advance(text, true)
    }

    fn advance(&mut self, text: &Text, even_broken: bool) -> anyhow::Result<String> {
        let decode = |end| text.decode(self.ids.get(self.begin..end).unwrap_or_default());
        let (old, new) = (decode(self.shown)?, decode(self.ids.len())?);
        if !even_broken && new.ends_with(char::REPLACEMENT_CHARACTER) {
            return Ok(String::new());
        }
        // The old text may end in a broken character that the new token repairs.
        let repaired = || new.strip_prefix(old.trim_end_matches(char::REPLACEMENT_CHARACTER));
        let piece = new.strip_prefix(&old).or_else(repaired).unwrap_or_default().to_owned();
        self.begin = self.shown;
        self.shown = self.ids.len();
        Ok(piece)
    }
}

/// Where the tokenizer of a model lies.
pub(crate) fn tokenizer_path(
    model: &Path,
    given: Option<&Path>,
) -> anyhow::Result<std::path::PathBuf> {
    if let Some(path) = given {
        return Ok(path.to_owned());
    }
    let dir = if model.is_file() { model.parent().unwrap_or(Path::new(".")) } else { model };
    let path = dir.join("tokenizer.json");
    if model.is_file() && !path.is_file() {
        bail!("{}: no tokenizer.json beside it, give --tokenizer FILE", model.display());
    }
    Ok(path)
}
