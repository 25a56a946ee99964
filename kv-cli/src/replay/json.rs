//! Traces of JSON lines, an object with ids per request: Mooncake's, and those of Qwen's service
//! (Bailian).
// Reads files that may be anything.
#![warn(clippy::arithmetic_side_effects, clippy::indexing_slicing)]
use std::num::NonZeroU32;

use kv::eviction::Return;
use serde::Deserialize;
use serde::de::IgnoredAny;

use super::trace::{Format, TraceError};

/// Default tokens per id; the last one of a request may stand for fewer.
pub(super) const MOONCAKE_ID_TOKENS: NonZeroU32 = NonZeroU32::MIN.saturating_add(511);
pub(super) const QWEN_ID_TOKENS: NonZeroU32 = NonZeroU32::MIN.saturating_add(15);

/// One request.
#[derive(Debug, Deserialize)]
pub(super) struct Line {
    timestamp: f64,
    pub(super) input_length: u64,
    pub(super) output_length: u64,
    /// Each stands for everything up to the end of its tokens.
    pub(super) hash_ids: Vec<u64>,
    /// What the caller said of the return of the conversation.
    #[serde(rename = "return")]
    hint: Option<String>,
}

/// Fields that only lines of Qwen's traces have.
#[derive(Debug, Deserialize)]
struct Chat {
    chat_id: Option<IgnoredAny>,
    parent_chat_id: Option<IgnoredAny>,
}

/// Returns the format of a file with this first line.
pub(super) fn format_of(line: &[u8]) -> Format {
    match serde_json::from_slice(line) {
        Ok(Chat { chat_id: Some(_), parent_chat_id: Some(_) }) => Format::Qwen,
        _ => Format::Mooncake,
    }
}

impl Line {
    /// Returns what the caller said of the return of the conversation, `None` for nothing.
    pub(super) fn hint(&self) -> Result<Option<Return>, TraceError> {
        self.hint.as_deref().map(str::parse).transpose().map_err(TraceError::Hint)
    }

    /// Returns the request's time: Mooncake's traces count milliseconds, Qwen's seconds.
    pub(super) fn seconds(&self, format: Format) -> f64 {
        if format == Format::Mooncake { self.timestamp / 1000.0 } else { self.timestamp }
    }
}

pub(super) fn parse(format: Format, line: &[u8]) -> Result<Line, TraceError> {
    let line: Line =
        serde_json::from_slice(line).map_err(|error| TraceError::Json { format, error })?;
    if line.timestamp < 0.0 {
        return Err(TraceError::Negative { field: "timestamp", got: line.timestamp });
    }
    Ok(line)
}
