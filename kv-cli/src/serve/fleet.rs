//! What routers of a fleet ask an instance: which model it runs, where it announces what it has
//! cached, and the tokens of a prompt.
//!
//! The shapes are those of vLLM (`/kv_event_sources`, `/render`, `/tokenize`, `/version`) and of
//! `SGLang` (`/get_server_info`, `/model_info`).
// Reads requests that may be anything.
#![warn(clippy::arithmetic_side_effects, clippy::indexing_slicing)]
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::response::Json;
use axum::routing::{get, post};
use axum::{Extension, Router};
use kv_runner::check_vocabulary;
use serde_json::{Value, json};
use tokio::time::Instant;

use super::answer::{Rendered, Tokens, new_id};
use super::error::ApiError;
use super::fields::Fields;
use super::prepare::Read;
use super::time::Deadline;
use super::{Server, chat, completions};

/// Returns the routes that everybody may ask: routers do before they have a key.
pub(super) fn open() -> Router<Arc<Server>> {
    let router = Router::new()
        .route("/version", get(version))
        .route("/kv_event_sources", get(sources))
        .route("/model_info", get(model_info));
    let names = ["/get_server_info", "/server_info"];
    names.into_iter().fold(router, |router, name| router.route(name, get(server_info)))
}

/// Returns the routes that need the key, because they compute.
pub(super) fn guarded() -> Router<Arc<Server>> {
    let completion: Read<Rendered> = completions::render;
    let chat: Read<Rendered> = chat::render;
    Router::new()
        .route("/v1/completions/render", post(render_all).layer(Extension(completion)))
        .route("/v1/chat/completions/render", post(render_one).layer(Extension(chat)))
        .route("/tokenize", post(tokenize))
}

async fn version() -> Json<Value> {
    Json(json!({"version": env!("CARGO_PKG_VERSION")}))
}

async fn sources(State(server): State<Arc<Server>>) -> Json<Value> {
    Json(server.sources.clone())
}

async fn server_info(State(server): State<Arc<Server>>) -> Json<Value> {
    Json(json!({
        "model_id": server.model,
        "model_path": server.model,
        "kv_block_size": server.block_size,
        "max_model_len": server.config.context(),
        "version": env!("CARGO_PKG_VERSION"),
    }))
}

async fn model_info(State(server): State<Arc<Server>>) -> Json<Value> {
    Json(json!({
        "model_path": server.model, "tokenizer_path": server.model, "is_generation": true,
    }))
}

/// Answers with a list, an entry for each prompt.
async fn render_all(
    state: State<Arc<Server>>,
    read: Extension<Read<Rendered>>,
    deadline: Extension<Deadline>,
    request: Request,
) -> Result<Json<Value>, ApiError> {
    Ok(Json(Value::Array(render(state, read, deadline, "cmpl", request).await?)))
}

/// Answers with the one prompt of a chat.
async fn render_one(
    state: State<Arc<Server>>,
    read: Extension<Read<Rendered>>,
    deadline: Extension<Deadline>,
    request: Request,
) -> Result<Json<Value>, ApiError> {
    let rendered = render(state, read, deadline, "chatcmpl", request).await?;
    Ok(Json(rendered.into_iter().next().unwrap_or_default()))
}

async fn render(
    State(server): State<Arc<Server>>,
    Extension(read): Extension<Read<Rendered>>,
    Extension(Deadline(deadline)): Extension<Deadline>,
    prefix: &str,
    request: Request,
) -> Result<Vec<Value>, ApiError> {
    let body = server.bodies.read(request.into_body(), deadline).await?;
    let Rendered { wanted, prompts } = server.prepare(read, body, deadline).await?;
    let salt = (!wanted.salt.is_empty()).then(|| String::from_utf8_lossy(&wanted.salt));
    let sampling = json!({
        "n": wanted.n,
        "temperature": wanted.temperature,
        "top_p": wanted.top_p,
        "seed": wanted.seed,
        "stop": &*wanted.stop,
        "max_tokens": wanted.max_tokens.map(|limit| limit.tokens),
        "ignore_eos": wanted.ignore_eos,
    });
    let describe = |prompt: Tokens| {
        json!({
            "request_id": new_id(prefix),
            "model": server.model,
            "token_ids": prompt.tokens,
            "sampling_params": sampling,
            "cache_salt": salt,
            "stream": wanted.stream,
        })
    };
    Ok(prompts.into_iter().map(describe).collect())
}

/// Fields of a request for tokens: of a text, or of the prompt of a chat.
const TOKENIZE: &[&str] = &[
    "add_generation_prompt",
    "add_special_tokens",
    "messages",
    "model",
    "prompt",
    "return_token_strs",
];

async fn tokenize(
    State(server): State<Arc<Server>>,
    Extension(Deadline(deadline)): Extension<Deadline>,
    request: Request,
) -> Result<Json<Value>, ApiError> {
    let body = server.bodies.read(request.into_body(), deadline).await?;
    let tokens = server.prepare(read_text, body, deadline).await?;
    Ok(Json(json!({
        "tokens": tokens,
        "count": tokens.len(),
        "max_model_len": server.config.context(),
        "token_strs": null,
    })))
}

/// Makes the tokens of a text, as the prompt of a completion has them, or of a chat.
fn read_text(server: &Server, body: &[u8], deadline: Instant) -> Result<Vec<u32>, ApiError> {
    let fields = Fields::parse(body, TOKENIZE)?;
    fields.check_prompt_supported()?;
    server.check_model(fields.text("model")?.as_deref())?;
    let (always, never) = (["add_special_tokens", "add_generation_prompt"], "return_token_strs");
    for (name, possible) in always.map(|name| (name, true)).into_iter().chain([(never, false)]) {
        let given = fields.get::<bool>(name, "true or false")?;
        if given.is_some_and(|given| given != possible) {
            return Err(fields.wrong(name, format_args!("only {possible} is supported")));
        }
    }
    match fields.text("prompt")? {
        Some(_) if fields.raw("messages").is_some() => {
            Err(fields.wrong("messages", "a prompt is given too"))
        }
        Some(text) => {
            let tokens = server.encode(&text, "prompt", deadline)?;
            check_vocabulary(&tokens, &server.config).map_err(|e| fields.wrong("prompt", e))?;
            Ok(tokens)
        }
        None if fields.raw("messages").is_some() => {
            Ok(chat::tokens(server, &chat::read_messages(&fields)?, deadline)?.tokens)
        }
        None => Err(fields.wrong("prompt", "missing")),
    }
}
