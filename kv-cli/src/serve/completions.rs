//! `POST /v1/completions`.
use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::response::Response;
use kv_runner::check_vocabulary;
use serde::Deserialize;

use super::Server;
use super::answer::Kind;
use super::api::{ApiError, body_of, internal};
use super::request::{Fields, Wanted};

/// The field `prompt`: a text, tokens, or a list of either.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Prompts {
    Text(String),
    Tokens(Vec<u32>),
    Texts(Vec<String>),
    TokenLists(Vec<Vec<u32>>),
}

/// Most prompts of one request.
const PROMPTS_MAX: usize = 64;

pub(super) async fn answer(
    State(server): State<Arc<Server>>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    let fields = Fields::parse(&body_of(body)?)?;
    let wanted = Wanted::read(&fields, &["max_tokens"])?;
    let prompt = fields.get("prompt")?;
    let prompt = prompt.ok_or_else(|| ApiError::bad("prompt is missing").about("prompt"))?;
    let prompts = server.encode(prompt).await?;
    let answer = server.start(Kind::Completion, &wanted, prompts).await?;
    Ok(answer.respond(wanted.stream).await)
}

impl Server {
    async fn encode(self: &Arc<Self>, prompts: Prompts) -> Result<Vec<Vec<u32>>, ApiError> {
        let prompts = match prompts {
            Prompts::Text(text) => vec![self.encode_text(text, "prompt").await?],
            Prompts::Texts(texts) => {
                let mut all = Vec::new();
                for text in texts {
                    all.push(self.encode_text(text, "prompt").await?);
                }
                all
            }
            Prompts::Tokens(tokens) => vec![self.check_tokens(tokens)?],
            Prompts::TokenLists(lists) => {
                lists.into_iter().map(|list| self.check_tokens(list)).collect::<Result<_, _>>()?
            }
        };
        match prompts.len() {
            1..=PROMPTS_MAX => Ok(prompts),
            0 => Err(ApiError::bad("prompt is an empty list").about("prompt")),
            given => {
                let error =
                    format!("prompt has {given} prompts, at most {PROMPTS_MAX} are possible");
                Err(ApiError::bad(error).about("prompt"))
            }
        }
    }

    fn check_tokens(&self, tokens: Vec<u32>) -> Result<Vec<u32>, ApiError> {
        if tokens.is_empty() {
            return Err(ApiError::bad("prompt has no tokens").about("prompt"));
        }
        match check_vocabulary(&tokens, &self.config) {
            Ok(()) => Ok(tokens),
            Err(error) => Err(ApiError::bad(format!("prompt: {error}")).about("prompt")),
        }
    }

    /// Returns the tokens of a text. Long ones take time, in which others are answered.
    pub(super) async fn encode_text(
        self: &Arc<Self>,
        text: String,
        field: &'static str,
    ) -> Result<Vec<u32>, ApiError> {
        let server = Arc::clone(self);
        let encode = move || server.tokenizer.encode(&text, &server.config);
        let encoded = tokio::task::spawn_blocking(encode).await;
        match encoded.map_err(|error| internal(&error.to_string()))? {
            Ok(encoded) => Ok(encoded.tokens),
            Err(error) => Err(ApiError::bad(format!("{field}: {error}")).about(field)),
        }
    }
}
