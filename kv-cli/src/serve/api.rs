//! The routes, and the clients that may use them.
use std::sync::Arc;
use std::time::Duration;

use axum::extract::rejection::PathRejection;
use axum::extract::{Path, Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, Version, header};
use axum::middleware::{self, Next};
use axum::response::{Html, IntoResponse, Json, Response};
use axum::routing::{get, post};
use axum::{Extension, Router};
use serde_json::{Value, json};
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

use super::answer::Prepared;
use super::body::BODY_MAX;
use super::engine::Refused;
use super::error::ApiError;
use super::fields::shown;
use super::http::Options;
use super::prepare::Read;
use super::time::Deadline;
use super::{Server, chat, completions, fleet};
use crate::num::to_u64;

/// Makes the routes.
pub(super) fn router(server: Arc<Server>, options: &Options) -> Router {
    let key: Option<Arc<str>> = options.api_key.as_deref().map(Arc::from);
    let guarded = Router::new()
        .route("/v1/models", get(models))
        .route("/v1/models/{model}", get(model))
        .route("/v1/completions", post(answer).layer(Extension::<Read<_>>(completions::read)))
        .route("/v1/chat/completions", post(answer).layer(Extension::<Read<_>>(chat::read)))
        .merge(fleet::guarded())
        .route("/metrics", get(metrics))
        .layer(middleware::from_fn_with_state(key, check_key));
    let router = Router::new()
        .route("/", get(page))
        .route("/health", get(health))
        .merge(fleet::open())
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

/// Time that a browser remembers the answer to a preflight request.
const PREFLIGHT: Duration = Duration::from_mins(10);

/// Answers a request for texts.
async fn answer(
    State(server): State<Arc<Server>>,
    Extension(read): Extension<Read<Prepared>>,
    Extension(Deadline(deadline)): Extension<Deadline>,
    request: Request,
) -> Result<Response, ApiError> {
    let body = server.bodies.read(request.into_body(), deadline).await?;
    let prepared = server.prepare(read, body, deadline).await?;
    let is_stream = prepared.wanted.stream;
    let answer = server.start(prepared, deadline).await?;
    Ok(answer.respond(is_stream).await)
}

/// Refuses requests whose head is wrong already, before the client is told to send a body.
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
}
