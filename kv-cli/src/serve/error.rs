//! Answers that are errors.
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Json, Response};
use kv::engine::RequestError;
use serde_json::{Value, json};

use super::engine::Refused;

/// Longest message of an error, in bytes: the words of a template may repeat a long message.
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
        Refused::Never(RequestError::DoesNotFit { tokens, shortage, .. }) => format!(
            "prompt and max_tokens are {tokens} tokens, which need {} blocks of the cache's {}",
            shortage.needed, shortage.available
        ),
        Refused::Never(RequestError::PromptTooLong { tokens, context, .. }) => {
            format!("the prompt has {tokens} tokens, the model's context {context}")
        }
        Refused::Never(RequestError::TooLong { tokens, max, .. }) => {
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

#[cfg(test)]
mod tests {
    use super::*;

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
