//! `POST /v1/chat/completions`.
use axum::http::StatusCode;
use serde_json::value::RawValue;
use tokio::time::Instant;

use super::Server;
use super::answer::{Kind, Prepared, Rendered, Tokens};
use super::error::ApiError;
use super::fields::{Fields, TooMany, entries, is_text, shown, text};
use super::request::{CHAT, Wanted};
use super::template::{ChatTemplate, Message, Template, TemplateError};

/// Roles that a template may be asked about.
const ROLES: [&str; 4] = ["system", "developer", "user", "assistant"];

/// Fields of a message that matter: others, such as a name, are ignored.
const MESSAGE: &[&str] =
    &["role", "content", "tool_calls", "function_call", "audio", "prefix", "partial"];
/// The same of a part of its content.
const PART: &[&str] = &["type", "text"];

/// Most messages, and most parts of a message.
const MESSAGES_MAX: usize = 2048;

/// Reads a request and makes the tokens of its prompt.
pub(super) fn read(server: &Server, body: &[u8], deadline: Instant) -> Result<Prepared, ApiError> {
    let fields = Fields::parse(body, CHAT)?;
    let wanted = Wanted::read(&fields, Kind::Chat)?;
    server.check_model(wanted.model.as_deref())?;
    let messages = read_messages(&fields)?;
    let place = server.reserve(1, &wanted)?;
    let prompts = vec![tokens(server, &messages, deadline)?];
    Ok(Prepared { kind: Kind::Chat, wanted, prompts, place })
}

/// Does what [`read`] does for a request that does not run.
pub(super) fn render(
    server: &Server,
    body: &[u8],
    deadline: Instant,
) -> Result<Rendered, ApiError> {
    let fields = Fields::parse(body, CHAT)?;
    let wanted = Wanted::read_prompt(&fields, Kind::Chat)?;
    server.check_model(wanted.model.as_deref())?;
    let prompts = vec![tokens(server, &read_messages(&fields)?, deadline)?];
    Ok(Rendered { wanted, prompts })
}

/// Makes the tokens of the prompt.
pub(super) fn tokens(
    server: &Server,
    messages: &[Message],
    deadline: Instant,
) -> Result<Tokens, ApiError> {
    let template = template(&server.template)?;
    let prompt = prompt(template, messages)?;
    let tokens = server.encode(&prompt, "messages", deadline)?;
    let stops = server.stops(template, messages, (&prompt, &tokens));
    Ok(Tokens { tokens, stops })
}

/// Returns the template. Without one that works, only chats are lost.
fn template(template: &ChatTemplate) -> Result<&Template, ApiError> {
    match template {
        ChatTemplate::Missing => {
            let error = "this model has no chat template: use /v1/completions, or --chat-template";
            Err(ApiError::bad(error).about("messages"))
        }
        ChatTemplate::Broken(why) => Err(not_served(why)),
        ChatTemplate::Ready(template) => Ok(template),
    }
}

/// Makes the prompt.
fn prompt(template: &Template, messages: &[Message]) -> Result<String, ApiError> {
    template.prompt(messages).map_err(|error| match error {
        TemplateError::Messages(_) => ApiError::bad(format!("messages: {error}")).about("messages"),
        TemplateError::Unsupported(_) => not_served(&error.to_string()),
    })
}

fn not_served(why: &str) -> ApiError {
    let error = format!("chats are not served: {why}; /v1/completions is");
    ApiError::new(StatusCode::NOT_IMPLEMENTED, error).with_code("chat_template")
}

pub(super) fn read_messages(fields: &Fields<'_>) -> Result<Vec<Message>, ApiError> {
    let wrong = |why: &str| fields.wrong("messages", why);
    let value = fields.raw("messages").ok_or_else(|| wrong("missing"))?;
    let given = match entries(value, MESSAGES_MAX) {
        Some(Ok(given)) => given,
        Some(Err(TooMany)) => return Err(wrong(&format!("at most {MESSAGES_MAX} are possible"))),
        None => return Err(wrong("expected a list of messages")),
    };
    if given.is_empty() {
        return Err(wrong("the list is empty"));
    }
    let read = |(at, value)| read_message(&format!("messages[{at}]"), value);
    given.into_iter().enumerate().map(read).collect()
}

fn read_message(place: &str, value: &RawValue) -> Result<Message, ApiError> {
    let fields = Fields::parse_inner(place, value, MESSAGE)?;
    let role = fields.text("role")?.ok_or_else(|| fields.wrong("role", "missing"))?;
    let Some(role) = ROLES.into_iter().find(|known| *known == role) else {
        let why = format!("{} is not supported", shown(&role));
        return Err(fields.wrong("role", why));
    };
    // Calls, and an answer that goes on after its message. A client that repeats an answer repeats
    // its empty fields.
    for name in ["tool_calls", "function_call", "audio", "prefix", "partial"] {
        if fields.raw(name).is_some_and(|value| !matches!(value.get(), "[]" | "false")) {
            return Err(fields.wrong(name, "not supported"));
        }
    }
    // Newer clients' name of the system's message.
    let role = if role == "developer" { "system" } else { role };
    let content = fields.raw("content").ok_or_else(|| fields.wrong("content", "missing"))?;
    let content = if is_text(content) {
        text(content).map_err(|why| fields.wrong("content", why))?.into_owned()
    } else {
        read_parts(&fields, &format!("{place}.content"), content)?
    };
    Ok(Message { role: role.to_owned(), content })
}

/// Reads a list of parts, of which only texts are supported.
fn read_parts(fields: &Fields<'_>, place: &str, list: &RawValue) -> Result<String, ApiError> {
    let wrong = |why: String| fields.wrong("content", why);
    let parts = match entries(list, MESSAGES_MAX) {
        Some(Ok(parts)) => parts,
        Some(Err(TooMany)) => {
            return Err(wrong(format!("at most {MESSAGES_MAX} parts are possible")));
        }
        None => {
            let why = "expected a text or a list of parts, such as \
                {\"type\": \"text\", \"text\": \"Hello\"}";
            return Err(wrong(why.to_owned()));
        }
    };
    let mut all = String::new();
    for (at, part) in parts.into_iter().enumerate() {
        let part = Fields::parse_inner(&format!("{place}[{at}]"), part, PART)?;
        let kind = part.text("type")?.ok_or_else(|| part.wrong("type", "missing"))?;
        if kind != "text" {
            return Err(wrong(format!("{} is not supported", shown(&kind))));
        }
        let text = part.text("text")?.ok_or_else(|| wrong("a text is missing".to_owned()))?;
        all.push_str(&text);
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn read(messages: &Value) -> Result<Vec<Message>, ApiError> {
        let body = json!({"messages": messages}).to_string();
        read_messages(&Fields::parse(body.as_bytes(), CHAT)?)
    }

    #[test]
    fn contents_are_texts_or_lists_of_them() {
        let parts = json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]);
        let messages = json!([
            {"role": "developer", "content": "brief"},
            {"role": "user", "content": parts, "name": "ignored"},
            {"role": "assistant", "content": "c", "tool_calls": [], "audio": null},
        ]);
        let read = read(&messages).expect("supported");
        let pairs = read.iter().map(|message| (&*message.role, &*message.content));
        let expected = [("system", "brief"), ("user", "ab"), ("assistant", "c")];
        assert_eq!(pairs.collect::<Vec<_>>(), expected);
    }

    #[test]
    fn what_is_not_supported_is_named() {
        let message = json!({"role": "user", "content": "x"});
        for (messages, field) in [
            (json!([]), "messages"),
            (json!(null), "messages"),
            (json!("hi"), "messages"),
            (json!(vec![message.clone(); MESSAGES_MAX + 1]), "messages"),
            (json!([7]), "messages[0]"),
            (json!([message, [message]]), "messages[1]"),
            (json!([{"content": "x"}]), "messages[0].role"),
            (json!([{"role": 7, "content": "x"}]), "messages[0].role"),
            (json!([{"role": "tool", "content": "x"}]), "messages[0].role"),
            (json!([{"role": "user"}]), "messages[0].content"),
            (json!([{"role": "user", "content": 5}]), "messages[0].content"),
            (json!([{"role": "user", "content": {"type": "text"}}]), "messages[0].content"),
            (json!([{"role": "user", "content": ["x"]}]), "messages[0].content[0]"),
            (json!([{"role": "user", "content": [{"type": "text"}]}]), "messages[0].content"),
            (
                json!([{"role": "user", "content": [{"type": "text", "text": 5}]}]),
                "messages[0].content[0].text",
            ),
            (
                json!([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]),
                "messages[0].content",
            ),
            (
                json!([message, {"role": "assistant", "content": "", "tool_calls": [{}]}]),
                "messages[1].tool_calls",
            ),
            (
                json!([message, {"role": "assistant", "content": "It", "prefix": true}]),
                "messages[1].prefix",
            ),
        ] {
            let error = read(&messages).expect_err("refused").body();
            assert_eq!(error["error"]["param"], field, "{messages}");
        }
    }
}
