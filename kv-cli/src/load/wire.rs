//! The objects of OpenAI's API that a load sends and reads.
use serde::{Deserialize, Serialize};

/// The body of a request.
#[derive(Debug, Serialize)]
pub(super) struct Completion<'a> {
    pub(super) model: &'a str,
    pub(super) prompt: &'a [u32],
    pub(super) max_tokens: u32,
    pub(super) temperature: u8,
    pub(super) ignore_eos: bool,
    pub(super) stream: bool,
    pub(super) stream_options: StreamOptions,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) cache_salt: Option<&'a str>,
}

#[derive(Debug, Serialize)]
pub(super) struct StreamOptions {
    pub(super) include_usage: bool,
}

/// A chunk of the stream; one of its fields is there.
#[derive(Debug, Deserialize)]
pub(super) struct Chunk {
    #[serde(default)]
    pub(super) choices: Vec<Choice>,
    pub(super) usage: Option<RawUsage>,
    pub(super) error: Option<ErrorBody>,
}

#[derive(Debug, Deserialize)]
pub(super) struct Choice {
    pub(super) text: Option<String>,
    pub(super) finish_reason: Option<String>,
}

#[derive(Debug, Deserialize)]
pub(super) struct RawUsage {
    prompt_tokens: u64,
    completion_tokens: u64,
    prompt_tokens_details: Option<Details>,
}

#[derive(Debug, Deserialize)]
struct Details {
    cached_tokens: Option<u64>,
}

#[derive(Debug, Deserialize)]
pub(super) struct ErrorBody {
    pub(super) message: String,
}

#[derive(Debug, Deserialize)]
struct Refusal {
    error: ErrorBody,
}

#[derive(Debug, Deserialize)]
pub(super) struct Models {
    pub(super) data: Vec<Model>,
}

#[derive(Debug, Deserialize)]
pub(super) struct Model {
    pub(super) id: String,
}

/// Tokens as the server counts them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Usage {
    pub(super) prompt: u64,
    pub(super) cached: u64,
    pub(super) completion: u64,
}

impl From<RawUsage> for Usage {
    fn from(raw: RawUsage) -> Self {
        let RawUsage { prompt_tokens, completion_tokens, prompt_tokens_details } = raw;
        let cached = prompt_tokens_details.and_then(|details| details.cached_tokens);
        Self { prompt: prompt_tokens, cached: cached.unwrap_or(0), completion: completion_tokens }
    }
}

impl Choice {
    pub(super) fn has_text(&self) -> bool {
        self.text.as_ref().is_some_and(|text| !text.is_empty())
    }

    pub(super) fn is_end(&self) -> bool {
        self.finish_reason.is_some()
    }
}

/// Returns the message of an error's body, or its start.
pub(super) fn words(body: &str) -> String {
    match serde_json::from_str::<Refusal>(body) {
        Ok(Refusal { error }) => error.message,
        Err(_) => body.chars().take(200).collect(),
    }
}
