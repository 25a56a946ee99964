//! The routes, who may use them, and what an answer looks like that is an error.
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use axum::Router;
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{Html, IntoResponse, Json, Response};
use axum::routing::{get, post};
use kv_runner::ScheduleError;
use serde_json::{Value, json};
use tower_http::timeout::RequestBodyTimeoutLayer;

use super::engine::Refused;
use super::http::{BODY_PAUSE, Options};
use super::{Server, chat, completions};

/// Longest body of a request, in bytes.
const BODY_MAX: usize = 8 << 20;

/// Makes the routes.
pub(super) fn router(server: Arc<Server>, options: &Options) -> Router {
    let key: Option<Arc<str>> = options.api_key.as_deref().map(Arc::from);
    let guarded = Router::new()
        .route("/v1/models", get(models))
        .route("/v1/models/{model}", get(model))
        .route("/v1/completions", post(completions::answer))
        .route("/v1/chat/completions", post(chat::answer))
        .route("/metrics", get(metrics))
        .layer(middleware::from_fn_with_state(key, check_key));
    Router::new()
        .route("/", get(page))
        .route("/health", get(health))
        .merge(guarded)
        .fallback(async || ApiError::new(StatusCode::NOT_FOUND, "no such route"))
        .method_not_allowed_fallback(async || {
            ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "another method is needed")
        })
        .layer(RequestBodyTimeoutLayer::new(BODY_PAUSE))
        .layer(DefaultBodyLimit::max(BODY_MAX))
        .layer(middleware::from_fn(check_length))
        .with_state(server)
}

/// Refuses a body that says it is too long, before the client is told to send it.
async fn check_length(request: Request, next: Next) -> Response {
    let length = request.headers().get(header::CONTENT_LENGTH);
    let length = length.and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
    match length.filter(|length| usize::try_from(*length).is_ok_and(|bytes| bytes > BODY_MAX)) {
        None => next.run(request).await,
        Some(length) => {
            let error = format!("the body has {length} bytes, at most {BODY_MAX} are possible");
            ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, error).into_response()
        }
    }
}

/// Refuses requests without the key, if there is one.
async fn check_key(State(key): State<Option<Arc<str>>>, request: Request, next: Next) -> Response {
    let given = request.headers().get(header::AUTHORIZATION).map(HeaderValue::as_bytes);
    let given = given.and_then(|given| given.strip_prefix(b"Bearer "));
    if key.is_none_or(|key| given.is_some_and(|given| is_equal(given, key.as_bytes()))) {
        return next.run(request).await;
    }
    let error = ApiError::new(StatusCode::UNAUTHORIZED, "the API key is missing or wrong");
    error.with_code("invalid_api_key").into_response()
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
    axum::extract::Path(name): axum::extract::Path<String>,
) -> Result<Json<Value>, ApiError> {
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
                let message = format!("no model {name:?} here: it is {:?}", self.model);
                let error = ApiError::new(StatusCode::NOT_FOUND, message);
                Err(error.with_code("model_not_found").about("model"))
            }
            _ => Ok(()),
        }
    }
}

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
        Self { status, message: message.into(), param: None, code: None }
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

/// Returns the body of a request, or why there is none.
pub(super) fn body_of(body: Result<Bytes, BytesRejection>) -> Result<Bytes, ApiError> {
    body.map_err(|rejection| ApiError::new(rejection.status(), rejection.body_text()))
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
            Refused::TooLong { .. } | Refused::Never(_) => {
                (StatusCode::BAD_REQUEST, "context_length_exceeded")
            }
        };
        Self::new(status, describe_refusal(&refused)).with_code(code)
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
        let busy = [StatusCode::TOO_MANY_REQUESTS, StatusCode::SERVICE_UNAVAILABLE];
        if busy.contains(&self.status) {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
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
    fn an_error_says_what_kind_it_is() {
        let full = ApiError::from(Refused::QueueFull { waiting: 4, max: 4 });
        assert_eq!(full.body()["error"]["type"], "rate_limit_error");
        let response = full.into_response();
        assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(response.headers()[header::RETRY_AFTER], "1");
        let bad = ApiError::bad("no").about("n");
        assert_eq!(bad.body()["error"]["param"], "n");
        assert_eq!(bad.body()["error"]["code"], Value::Null);
    }
}
