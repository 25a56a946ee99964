//! `kv generate --session FILE`: a text that goes on in later runs.
use std::path::{Path, PathBuf};

use anyhow::Context;
use kv::engine::{Engine, Generated, Sampler, SavedText};
use kv::tier::{Bytes, Identity};
use serde::Serialize;

use crate::loaded::Loaded;
use crate::num::to_u64;

/// A file with one text, and its content before the run.
#[derive(Debug)]
pub(crate) struct SessionFile {
    path: PathBuf,
    identity: Identity,
    /// `None` without a file.
    before: Option<SavedText>,
}

impl SessionFile {
    /// Reads the text of a file, if there is one.
    pub(crate) fn open(path: &Path, identity: Identity) -> anyhow::Result<Self> {
        let is_there = path.try_exists().with_context(|| path.display().to_string())?;
        let before = if is_there { Some(SavedText::read(path)?) } else { None };
        Ok(Self { path: path.to_owned(), identity, before })
    }

    /// Returns the texts to continue: of a file that is there, with or without more text after it.
    pub(crate) fn prompts(&self, given: &[String]) -> Option<Vec<String>> {
        let is_alone = self.before.is_some() && given.is_empty();
        is_alone.then(|| vec![String::new()])
    }

    /// Returns the tokens of a prompt after the text of the file.
    pub(crate) fn encode(&self, prompt: &str, loaded: &Loaded) -> anyhow::Result<Vec<u32>> {
        let Some(before) = &self.before else { return loaded.encode(prompt) };
        let config = loaded.model.config();
        let checked = kv_runner::check_vocabulary(&before.tokens, config);
        checked.with_context(|| self.path.display().to_string())?;
        let more = loaded.tokenizer.encode_more(&before.tokens, prompt, config)?;
        Ok([before.tokens.as_slice(), &more].concat())
    }

    /// Moves a sampler to where it was when the file was written.
    pub(crate) fn go_on(&self, sampler: Sampler) -> Sampler {
        sampler.after(self.before.as_ref().map_or(0, |before| before.drawn))
    }

    /// Brings the blocks of the file to the cache; returns how many tokens can be reused.
    pub(crate) fn load(&self, engine: &mut Engine) -> anyhow::Result<u32> {
        if self.before.is_none() {
            return Ok(0);
        }
        Ok(engine.load_session(&self.identity, &self.path)?)
    }

    /// Replaces the file by the prompt and the text that was generated after it.
    pub(crate) fn save(
        &self,
        engine: &mut Engine,
        (mut tokens, loaded_tokens): (Vec<u32>, u32),
        generated: &Generated,
    ) -> anyhow::Result<Report> {
        tokens.extend(&generated.tokens);
        let drawn = self.before.as_ref().map_or(0, |before| before.drawn);
        let drawn = drawn + to_u64(generated.tokens.len());
        let text = SavedText { tokens, drawn };
        let info = engine.save_session(&self.identity, &text, &self.path)?;
        Ok(Report {
            file: self.path.display().to_string(),
            tokens_before: self.before.as_ref().map_or(0, |before| before.tokens.len()),
            loaded_tokens,
            tokens: text.tokens.len(),
            saved_tokens: info.tokens,
            bytes: info.bytes,
        })
    }
}

/// The content of a session file before and after the run.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Report {
    file: String,
    /// Tokens of its text before the run; 0 for a new file.
    tokens_before: usize,
    /// Tokens whose rows came from the file.
    loaded_tokens: u32,
    /// Tokens of its text now.
    tokens: usize,
    /// Tokens whose rows are in the file now.
    saved_tokens: u32,
    bytes: u64,
}

impl Report {
    pub(crate) fn show(&self) -> String {
        format!(
            "{}: {} of {} tokens came back, {} of {} saved ({})\n",
            self.file,
            self.loaded_tokens,
            self.tokens_before,
            self.saved_tokens,
            self.tokens,
            Bytes(self.bytes),
        )
    }
}
