//! One text in a file, which goes on in another process.
use std::path::Path;

use kv_core::backend::Backend;
use kv_core::{KvCache, SequenceId, StartOptions};
use kv_tier::session::{self, SessionHeader};
use kv_tier::{Identity, SessionError, SessionInfo};
use serde_json::Value;

use crate::error::SessionFileError;
use crate::num::to_usize;

/// A text that a session file keeps, prompt and generated tokens together.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "a literal names each field")]
pub struct SavedText {
    /// All tokens, at least one.
    pub tokens: Vec<u32>,
    /// Tokens that a sampler has drawn for the text: [`Sampler::after`](crate::Sampler::after) goes
    /// on after them.
    pub drawn: u64,
}

impl SavedText {
    /// Reads the text of a file that [`Engine::save_session`](crate::Engine::save_session) has
    /// written. Its blocks are left alone:
    /// [`Engine::load_session`](crate::Engine::load_session) verifies them.
    ///
    /// # Errors
    /// [`SessionFileError::Io`]; [`SessionFileError::Refused`] for a file that is no session or has
    /// a damaged header; [`SessionFileError::Note`] for a session of another program.
    pub fn read(from: &Path) -> Result<Self, SessionFileError> {
        let header = SessionHeader::read(from).map_err(|error| named(error, from))?;
        let note = read_note(&header.note);
        let (rest, drawn) = note.ok_or_else(|| SessionFileError::Note { path: from.to_owned() })?;
        Ok(Self { tokens: [header.tokens, rest].concat(), drawn })
    }
}

/// Brings the blocks of a session file to the cache, and returns how many of its tokens can be
/// reused.
pub(crate) fn load<B: Backend>(
    cache: &mut KvCache<B>,
    identity: &Identity,
    from: &Path,
) -> Result<u32, SessionFileError> {
    let loaded = session::load(cache, identity, from, &StartOptions::default());
    Ok(loaded.map_err(|error| named(error, from))?.cached)
}

/// Writes a text to a session file, with those of its blocks that are in the cache, by a sequence
/// with a new id.
pub(crate) fn save<B: Backend>(
    cache: &mut KvCache<B>,
    id: SequenceId,
    identity: &Identity,
    text: &SavedText,
    to: &Path,
) -> Result<SessionInfo, SessionFileError> {
    // All but the last token can be reused, and its rows do not exist yet.
    let started = cache.start(id, &text.tokens, StartOptions::default());
    let cached = started.map_err(|error| named(error.into(), to))?;
    let note = write_note(&text.tokens[to_usize(cached)..], text.drawn);
    let saved = session::dump(cache, identity, id, note.as_bytes(), to);
    let released = cache.release(id);
    let saved = saved.map_err(|error| named(error, to))?;
    released.map_err(|error| named(error.into(), to))?;
    Ok(saved)
}

/// Writes the note of a session file: the tokens at the end of the text whose rows are not in the
/// file, and the tokens that its sampler has drawn.
fn write_note(rest: &[u32], drawn: u64) -> String {
    let rest: Vec<_> = rest.iter().map(u32::to_string).collect();
    format!("{{\"rest\":[{}],\"drawn\":{drawn}}}", rest.join(","))
}

/// Reads the note of a session file; `None` for that of another program.
fn read_note(note: &[u8]) -> Option<(Vec<u32>, u64)> {
    let note: Value = serde_json::from_slice(note).ok()?;
    let fields = note.as_object().filter(|fields| fields.len() == 2)?;
    let token = |value: &Value| u32::try_from(value.as_u64()?).ok();
    let rest = fields.get("rest")?.as_array()?.iter().map(token).collect::<Option<_>>()?;
    Some((rest, fields.get("drawn")?.as_u64()?))
}

/// Adds the file, which only errors of the system name.
fn named(error: SessionError, file: &Path) -> SessionFileError {
    match error {
        error @ SessionError::Io { .. } => SessionFileError::Io(Box::new(error)),
        source => SessionFileError::Refused { path: file.to_owned(), source: Box::new(source) },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_reads_as_it_was_written() {
        assert_eq!(write_note(&[], 0), r#"{"rest":[],"drawn":0}"#);
        for (rest, drawn) in [(vec![], 0), (vec![7], 1), (vec![u32::MAX, 0, 5], u64::MAX)] {
            assert_eq!(read_note(write_note(&rest, drawn).as_bytes()), Some((rest, drawn)));
        }
    }

    #[test]
    fn notes_of_other_programs_are_refused() {
        for note in [
            "",
            "temperature 0.7",
            "[1]",
            r#"{"rest":[1]}"#,
            r#"{"rest":[-1],"drawn":0}"#,
            r#"{"rest":[4294967296],"drawn":0}"#,
            r#"{"rest":[1],"drawn":0,"more":1}"#,
        ] {
            assert_eq!(read_note(note.as_bytes()), None, "{note}");
        }
    }
}
