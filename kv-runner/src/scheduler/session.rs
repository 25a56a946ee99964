//! One text in a file, which goes on in another process.
use std::path::Path;

use kv::StartOptions;
use kv::backend::Backend;
use kv::tier::session::{self, SessionHeader};
use kv::tier::{Identity, SessionError, SessionInfo};
use serde::{Deserialize, Serialize};

use super::Scheduler;
use crate::error::{Error, ForeignError, InFile};
use crate::model::Model;
use crate::num::to_usize;

/// A text that a session file keeps, prompt and generated tokens together.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "a literal names each field")]
pub struct SavedText {
    /// All tokens, at least one.
    pub tokens: Vec<u32>,
    /// Tokens that a sampler has drawn for the text: [`Sampler::after`](crate::Sampler::after) goes
    /// on behind them.
    pub drawn: u64,
}

/// The note of a session file.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Note {
    /// Tokens at the end of the text whose rows are not in the file.
    rest: Vec<u32>,
    drawn: u64,
}

impl SavedText {
    /// Reads the text of a file that [`Scheduler::save_session`] has written. Its blocks are left
    /// alone: [`Scheduler::load_session`] verifies them.
    ///
    /// # Errors
    /// [`Error::File`] with the cause: [`Error::Session`] for a file that is no session or has a
    /// damaged header, [`Error::SessionNote`] for a session of another program.
    pub fn read(from: &Path) -> Result<Self, Error> {
        let header = SessionHeader::read(from).map_err(|error| named(error, from))?;
        let note: Note = serde_json::from_slice(&header.note)
            .map_err(|error| Error::SessionNote(ForeignError::new(error)))
            .in_file(from)?;
        let mut tokens = header.tokens;
        tokens.extend(note.rest);
        Ok(Self { tokens, drawn: note.drawn })
    }
}

impl<B: Backend, M: Model<B>> Scheduler<'_, B, M> {
    /// Brings the blocks of a session file to the cache, where prompts that begin with its text
    /// find them, and returns how many of its tokens can be reused. All of the file is verified
    /// first.
    ///
    /// # Errors
    /// [`Error::File`] with the cause, an [`Error::Session`]; nothing has changed then.
    pub fn load_session(&mut self, identity: &Identity, from: &Path) -> Result<u32, Error> {
        let options = StartOptions::default();
        let loaded = session::load(&mut self.cache, identity, from, &options);
        Ok(loaded.map_err(|error| named(error, from))?.cached)
    }

    /// Writes a text to a session file, with those of its blocks that are in the cache. Call it
    /// when the text has been generated: its blocks stay until others need the room.
    ///
    /// # Errors
    /// [`Error::File`] with the cause, an [`Error::Session`]: a file that was there before stays.
    /// [`Error::Cache`] if no sequence can start.
    pub fn save_session(
        &mut self,
        identity: &Identity,
        text: &SavedText,
        to: &Path,
    ) -> Result<SessionInfo, Error> {
        let id = self.new_id();
        // All but the last token can be reused, and its rows do not exist yet.
        let cached = self.cache.start(id, &text.tokens, StartOptions::default())?;
        let rest = text.tokens.get(to_usize(cached)..).unwrap_or_default().to_vec();
        let note = serde_json::to_vec(&Note { rest, drawn: text.drawn })?;
        let saved = session::dump(&mut self.cache, identity, id, &note, to);
        self.cache.release(id)?;
        saved.map_err(|error| named(error, to))
    }
}

/// Adds the file, which only errors of the system name.
fn named(error: SessionError, file: &Path) -> Error {
    if matches!(error, SessionError::Io { .. }) {
        return error.into();
    }
    Error::File { path: file.to_owned(), source: Box::new(error.into()) }
}
