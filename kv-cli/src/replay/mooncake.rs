//! Traces of Mooncake: a JSON object a line, with an id for every 512 tokens of the input.
use std::num::NonZeroU32;

use serde::Deserialize;

use super::trace::TraceError;

/// Tokens of an id; the last one of a request may stand for fewer.
pub(super) const ID_TOKENS: NonZeroU32 = NonZeroU32::MIN.saturating_add(511);

/// One request.
#[derive(Debug, Deserialize)]
pub(super) struct Line {
    timestamp: f64,
    pub(super) input_length: u64,
    #[expect(dead_code, reason = "a line without it is none, and what is generated is not cached")]
    output_length: u64,
    /// Each names everything up to the end of its tokens.
    pub(super) hash_ids: Vec<u64>,
}

pub(super) fn parse(line: &[u8]) -> Result<Line, TraceError> {
    let line: Line = serde_json::from_slice(line).map_err(TraceError::Json)?;
    if line.timestamp < 0.0 {
        return Err(TraceError::Negative { field: "timestamp", got: line.timestamp });
    }
    Ok(line)
}
