//! `POST /v1/chat/completions`.
use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::State;
use axum::extract::rejection::BytesRejection;
use axum::http::StatusCode;
use axum::response::Response;
use serde::Deserialize;

use super::Server;
use super::answer::Kind;
use super::api::{ApiError, body_of};
use super::request::{Fields, Wanted};
use super::template::{ChatTemplate, Message, TemplateError};

/// An entry of `messages`.
#[derive(Debug, Deserialize)]
struct Given {
    role: String,
    content: Option<Content>,
    tool_calls: Option<serde_json::Value>,
}

/// Text, or a list of parts of which only texts are supported.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Content {
    Text(String),
    Parts(Vec<PartOfContent>),
}

#[derive(Debug, Deserialize)]
struct PartOfContent {
    #[serde(rename = "type")]
    kind: String,
    text: Option<String>,
}

/// Roles that a template may be asked about.
const ROLES: [&str; 4] = ["system", "developer", "user", "assistant"];

pub(super) async fn answer(
    State(server): State<Arc<Server>>,
    body: Result<Bytes, BytesRejection>,
) -> Result<Response, ApiError> {
    let fields = Fields::parse(&body_of(body)?)?;
    let wanted = Wanted::read(&fields, &["max_completion_tokens", "max_tokens"])?;
    let messages = read_messages(&fields)?;
    let prompt = prompt(&server.template, &messages)?;
    let prompt = server.encode_text(prompt, "messages").await?;
    let answer = server.start(Kind::Chat, &wanted, vec![prompt]).await?;
    Ok(answer.respond(wanted.stream).await)
}

/// Makes the prompt. Without a template that works, only chats are lost.
fn prompt(template: &ChatTemplate, messages: &[Message]) -> Result<String, ApiError> {
    match template {
        ChatTemplate::Missing => {
            let error = "this model has no chat template: use /v1/completions, or --chat-template";
            Err(ApiError::bad(error).about("messages"))
        }
        ChatTemplate::Broken(why) => Err(not_served(why)),
        ChatTemplate::Ready(template) => template.prompt(messages).map_err(|error| match error {
            TemplateError::Messages(_) => {
                ApiError::bad(format!("messages: {error}")).about("messages")
            }
            TemplateError::Unsupported(_) => not_served(&error.to_string()),
        }),
    }
}

fn not_served(why: &str) -> ApiError {
    let error = format!("chats are not served: {why}; /v1/completions is");
    ApiError::new(StatusCode::NOT_IMPLEMENTED, error).with_code("chat_template")
}

fn read_messages(fields: &Fields) -> Result<Vec<Message>, ApiError> {
    let given = fields.get::<Vec<Given>>("messages")?.unwrap_or_default();
    if given.is_empty() {
        return Err(ApiError::bad("messages are missing").about("messages"));
    }
    given.into_iter().enumerate().map(|(at, given)| read_message(at, given)).collect()
}

fn read_message(at: usize, given: Given) -> Result<Message, ApiError> {
    let wrong = |field: &str, what: String| {
        let field = format!("messages[{at}].{field}");
        ApiError::bad(format!("{field}: {what}")).about(field)
    };
    if !ROLES.contains(&given.role.as_str()) {
        return Err(wrong("role", format!("{:?} is not supported", given.role)));
    }
    if given.tool_calls.is_some_and(|calls| !calls.is_null()) {
        return Err(wrong("tool_calls", "not supported".to_owned()));
    }
    // What newer clients call the system's message.
    let role = if given.role == "developer" { "system".to_owned() } else { given.role };
    let content = match given.content {
        None => return Err(wrong("content", "missing".to_owned())),
        Some(Content::Text(text)) => text,
        Some(Content::Parts(parts)) => {
            let mut texts = Vec::new();
            for part in parts {
                match (part.kind.as_str(), part.text) {
                    ("text", Some(text)) => texts.push(text),
                    ("text", None) => return Err(wrong("content", "a text is missing".to_owned())),
                    (kind, _) => return Err(wrong("content", format!("{kind} is not supported"))),
                }
            }
            texts.concat()
        }
    };
    Ok(Message { role, content })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn read(messages: &Value) -> Result<Vec<Message>, ApiError> {
        let body = json!({"messages": messages}).to_string();
        read_messages(&Fields::parse(body.as_bytes())?)
    }

    #[test]
    fn contents_are_texts_or_lists_of_them() {
        let parts = json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]);
        let messages = json!([
            {"role": "developer", "content": "brief"},
            {"role": "user", "content": parts, "name": "ignored"},
        ]);
        let read = read(&messages).expect("supported");
        let pairs = read.iter().map(|message| (&*message.role, &*message.content));
        assert_eq!(pairs.collect::<Vec<_>>(), [("system", "brief"), ("user", "ab")]);
    }

    #[test]
    fn what_is_not_supported_is_named() {
        for (messages, field) in [
            (json!([]), "messages"),
            (json!(null), "messages"),
            (json!("hi"), "messages"),
            (json!([{"content": "x"}]), "messages"),
            (json!([{"role": "tool", "content": "x"}]), "messages[0].role"),
            (json!([{"role": "user"}]), "messages[0].content"),
            (
                json!([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
                "messages[0].content",
            ),
            (
                json!([{"role": "user", "content": "x"}, {
                    "role": "assistant", "content": "", "tool_calls": [{}],
                }]),
                "messages[1].tool_calls",
            ),
        ] {
            let error = read(&messages).expect_err("refused").body();
            assert_eq!(error["error"]["param"], field, "{messages}");
        }
    }
}
