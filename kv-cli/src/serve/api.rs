//! The routes, who may use them, and what an answer looks like that is an error.
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use axum::extract::rejection::PathRejection;
use axum::extract::{Path, Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, Version, header};
use axum::middleware::{self, Next};
use axum::response::{Html, IntoResponse, Json, Response};
use axum::routing::{get, post};
use axum::{Extension, Router};
use kv_runner::ScheduleError;
use serde_json::{Value, json};
use tokio::time::Instant;
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

use super::body::BODY_MAX;
use super::engine::Refused;
use super::fields::shown;
use super::http::Options;
use super::prepare::Read;
use super::{Server, chat, completions};
use crate::num::to_u64;

/// When a request must have been answered; a part of every request.
#[derive(Debug, Clone, Copy)]
pub(super) struct Deadline(pub(super) Instant);

/// Makes the routes.
pub(super) fn router(server: Arc<Server>, options: &Options) -> Router {
    let key: Option<Arc<str>> = options.api_key.as_deref().map(Arc::from);
    let guarded = Router::new()
        .route("/v1/models", get(models))
        .route("/v1/models/{model}", get(model))
        .route("/v1/completions", post(answer).layer(Extension::<Read>(completions::read)))
        .route("/v1/chat/completions", post(answer).layer(Extension::<Read>(chat::read)))
        .route("/metrics", get(metrics))
        .layer(middleware::from_fn_with_state(key, check_key));
    let router = Router::new()
        .route("/", get(page))
        .route("/health", get(health))
        .merge(guarded)
        .fallback(async || ApiError::new(StatusCode::NOT_FOUND, "no such route"))
        .method_not_allowed_fallback(async || {
            ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "another method is needed")
        })
        .layer(middleware::from_fn(check_head))
        .with_state(server);
    match &options.origins {
        None => router,
        // Outermost: a browser shows a refusal to a page only with the same headers.
        Some(origins) => router.layer(allow(origins.clone())),
    }
}

/// Lets pages of other origins send requests and read the answers.
fn allow(origins: AllowOrigin) -> CorsLayer {
    CorsLayer::new()
        .allow_origin(origins)
        .allow_methods([Method::GET, Method::POST])
        // Clients add headers of their own.
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers([header::RETRY_AFTER])
        .max_age(PREFLIGHT)
}

/// How long a browser remembers what it may send.
const PREFLIGHT: Duration = Duration::from_mins(10);

/// Answers a request for texts.
async fn answer(
    State(server): State<Arc<Server>>,
    Extension(read): Extension<Read>,
    Extension(Deadline(deadline)): Extension<Deadline>,
    request: Request,
) -> Result<Response, ApiError> {
    let body = server.bodies.read(request.into_body(), deadline).await?;
    let prepared = server.prepare(read, body, deadline).await?;
    let is_stream = prepared.wanted.stream;
    let answer = server.start(prepared, deadline).await?;
    Ok(answer.respond(is_stream).await)
}

/// Refuses what the head of a request already tells: before the client is told to send a body.
async fn check_head(request: Request, next: Next) -> Response {
    let headers = request.headers();
    let wrong = if request.version() == Version::HTTP_11
        && headers.get_all(header::HOST).iter().count() != 1
    {
        Some(ApiError::bad("a request of HTTP/1.1 has one header Host"))
    } else {
        check_encoding(headers).or_else(|| check_length(headers))
    };
    match wrong {
        None => next.run(request).await,
        Some(error) => error.into_response(),
    }
}

fn check_encoding(headers: &HeaderMap) -> Option<ApiError> {
    let encodings = headers.get_all(header::CONTENT_ENCODING);
    let is_plain = |value: &HeaderValue| value.as_bytes().eq_ignore_ascii_case(b"identity");
    encodings.iter().find(|value| !is_plain(value)).map(|value| {
        let value = shown(&String::from_utf8_lossy(value.as_bytes()));
        let error = format!("a body of Content-Encoding {value} is not read: send it as it is");
        ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, error)
    })
}

fn check_length(headers: &HeaderMap) -> Option<ApiError> {
    let length = headers.get(header::CONTENT_LENGTH)?.to_str().ok()?.parse::<u64>().ok()?;
    (length > to_u64(BODY_MAX)).then(|| {
        let error = format!("the body has {length} bytes, at most {BODY_MAX} are possible");
        ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, error)
    })
}

/// Refuses requests without the key, if there is one.
async fn check_key(State(key): State<Option<Arc<str>>>, request: Request, next: Next) -> Response {
    let given = given_key(request.headers());
    if key.is_none_or(|key| given.is_some_and(|given| is_equal(given, key.as_bytes()))) {
        return next.run(request).await;
    }
    let error = ApiError::new(StatusCode::UNAUTHORIZED, "the API key is missing or wrong");
    error.with_code("invalid_api_key").into_response()
}

/// Returns the key of a request: `Authorization: Bearer KEY`, whose scheme may be in capitals or
/// not, or `x-api-key: KEY`.
fn given_key(headers: &HeaderMap) -> Option<&[u8]> {
    let bearer = headers.get(header::AUTHORIZATION).and_then(|value| {
        let (scheme, key) = value.as_bytes().split_at_checked("Bearer ".len())?;
        scheme.eq_ignore_ascii_case(b"Bearer ").then(|| key.trim_ascii_start())
    });
    bearer.or_else(|| headers.get("x-api-key").map(HeaderValue::as_bytes))
}

/// Compares in a time that does not tell how much is equal.
fn is_equal(given: &[u8], key: &[u8]) -> bool {
    let differences = given.iter().zip(key).fold(0, |all, (one, other)| all | (one ^ other));
    given.len() == key.len() && differences == 0
}

/// Answers with the page, which reads the metrics and nothing else.
async fn page() -> impl IntoResponse {
    let policy = "default-src 'none'; connect-src 'self'; img-src data:; \
        script-src 'unsafe-inline'; style-src 'unsafe-inline'; frame-ancestors 'none'";
    let headers = [(header::CONTENT_SECURITY_POLICY, policy), (header::CACHE_CONTROL, "no-cache")];
    (headers, Html(include_str!("page.html")))
}

async fn health(State(server): State<Arc<Server>>) -> Result<Json<Value>, ApiError> {
    if server.engine.is_stopping() {
        return Err(Refused::Stopping.into());
    }
    Ok(Json(json!({"status": "ok"})))
}

async fn models(State(server): State<Arc<Server>>) -> Json<Value> {
    Json(json!({"object": "list", "data": [describe(&server)]}))
}

async fn model(
    State(server): State<Arc<Server>>,
    name: Result<Path<String>, PathRejection>,
) -> Result<Json<Value>, ApiError> {
    let Path(name) = name.map_err(|_| ApiError::bad("the name of the model is not UTF-8"))?;
    server.check_model(Some(&name))?;
    Ok(Json(describe(&server)))
}

fn describe(server: &Server) -> Value {
    json!({
        "id": server.model, "object": "model", "created": server.created, "owned_by": "kv",
    })
}

async fn metrics(State(server): State<Arc<Server>>) -> impl IntoResponse {
    server.metrics.run_upkeep();
    let text = "text/plain; version=0.0.4; charset=utf-8";
    ([(header::CONTENT_TYPE, text)], server.metrics.render())
}

impl Server {
    /// Refuses a model that is not the one that runs.
    pub(super) fn check_model(&self, name: Option<&str>) -> Result<(), ApiError> {
        match name {
            Some(name) if name != self.model => {
                let message = format!("no model {} here: it is {:?}", shown(name), self.model);
                let error = ApiError::new(StatusCode::NOT_FOUND, message);
                Err(error.with_code("model_not_found").about("model"))
            }
            _ => Ok(()),
        }
    }
}

/// Longest message of an error, in bytes: what a template says may repeat a long message.
const MESSAGE_MAX: usize = 2000;

/// An error in the shape of OpenAI's.
#[derive(Debug)]
pub(super) struct ApiError {
    status: StatusCode,
    message: String,
    param: Option<String>,
    code: Option<&'static str>,
}

impl ApiError {
    pub(super) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        let mut message = message.into();
        if message.len() > MESSAGE_MAX {
            message.truncate(message.floor_char_boundary(MESSAGE_MAX));
            message.push_str("..");
        }
        Self { status, message, param: None, code: None }
    }

    /// A request that is wrong.
    pub(super) fn bad(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    /// Names the field that is wrong.
    pub(super) fn about(self, param: impl Into<String>) -> Self {
        Self { param: Some(param.into()), ..self }
    }

    pub(super) fn with_code(self, code: &'static str) -> Self {
        Self { code: Some(code), ..self }
    }

    /// Returns the object that an answer, or a chunk of a stream, carries.
    pub(super) fn body(&self) -> Value {
        let kind = match self.status {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            status if status.is_server_error() => "server_error",
            _ => "invalid_request_error",
        };
        json!({"error": {
            "message": self.message, "type": kind, "param": self.param, "code": self.code,
        }})
    }
}

/// A failure that is not the client's fault.
pub(super) fn internal(why: &str) -> ApiError {
    ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, why)
}

impl From<Refused> for ApiError {
    fn from(refused: Refused) -> Self {
        let (status, code) = match &refused {
            Refused::QueueFull { .. } => (StatusCode::TOO_MANY_REQUESTS, "queue_full"),
            Refused::Stopping => (StatusCode::SERVICE_UNAVAILABLE, "stopping"),
            Refused::TooManyTexts { .. } => (StatusCode::BAD_REQUEST, "too_many_texts"),
            Refused::TooLong { .. } | Refused::TooManyBytes { .. } | Refused::Never(_) => {
                (StatusCode::BAD_REQUEST, "context_length_exceeded")
            }
        };
        let error = Self::new(status, describe_refusal(&refused)).with_code(code);
        if code == "too_many_texts" { error.about("n") } else { error }
    }
}

/// Says the numbers of a refusal, without the scheduler's number of the request.
fn describe_refusal(refused: &Refused) -> String {
    match refused {
        Refused::Never(ScheduleError::DoesNotFit { tokens, shortage, .. }) => format!(
            "prompt and max_tokens are {tokens} tokens, which need {} blocks of the cache's {}",
            shortage.needed, shortage.available
        ),
        Refused::Never(ScheduleError::PromptTooLong { tokens, context, .. }) => {
            format!("the prompt has {tokens} tokens, the model's context {context}")
        }
        Refused::Never(ScheduleError::TooLong { tokens, max, .. }) => {
            format!("prompt and max_tokens are {tokens} tokens, a sequence has at most {max}")
        }
        refused => refused.to_string(),
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.body())).into_response();
        let header = match self.status {
            StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => {
                (header::RETRY_AFTER, "1")
            }
            StatusCode::UNAUTHORIZED => (header::WWW_AUTHENTICATE, "Bearer realm=\"kv\""),
            // The rest of the request may come for ever.
            StatusCode::REQUEST_TIMEOUT => (header::CONNECTION, "close"),
            _ => return response,
        };
        response.headers_mut().insert(header.0, HeaderValue::from_static(header.1));
        response
    }
}

/// Returns the seconds since 1970.
pub(super) fn unix_time() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_whole_key_is_equal() {
        assert!(is_equal(b"key", b"key"));
        for given in [&b""[..], b"k", b"ke", b"keyy", b"kex", b"Key"] {
            assert!(!is_equal(given, b"key"), "{given:?}");
        }
    }

    #[test]
    fn a_key_comes_in_one_of_two_headers() {
        let key = |name: &'static str, value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(name, HeaderValue::from_str(value).expect("a value"));
            given_key(&headers).map(<[u8]>::to_vec)
        };
        let expected = Some(b"k y".to_vec());
        for scheme in ["Bearer ", "bearer ", "BEARER ", "bEaReR   "] {
            assert_eq!(key("authorization", &format!("{scheme}k y")), expected, "{scheme}");
        }
        assert_eq!(key("x-api-key", "k y"), expected);
        for other in ["Basic k", "Bearerk", "Bearer", "k", ""] {
            assert_eq!(key("authorization", other), None, "{other}");
        }
    }

    #[test]
    fn a_message_is_never_long() {
        let error = ApiError::bad("\u{e9}".repeat(MESSAGE_MAX));
        assert!(error.message.len() <= MESSAGE_MAX + 2 && error.message.ends_with("\u{e9}.."));
    }

    #[test]
    fn an_error_says_what_kind_it_is() {
        let full = ApiError::from(Refused::QueueFull { waiting: 4, texts: 1, max: 4 });
        assert_eq!(full.body()["error"]["type"], "rate_limit_error");
        let response = full.into_response();
        assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(response.headers()[header::RETRY_AFTER], "1");
        let bad = ApiError::bad("no").about("n");
        assert_eq!(bad.body()["error"]["param"], "n");
        assert_eq!(bad.body()["error"]["code"], Value::Null);
    }
}
