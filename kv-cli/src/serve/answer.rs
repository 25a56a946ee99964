//! Answers of both kinds: whole, or as a stream of events.
use std::collections::VecDeque;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Json, Response};
use futures_util::stream::{self, SelectAll, Stream, StreamExt as _};
use kv::engine::Sampler;
use serde_json::{Value, json};
use tokio::time::{Instant, timeout_at};

use super::Server;
use super::engine::{Place, Prompt, Refused};
use super::error::{ApiError, internal};
use super::request::Wanted;
use super::text::{Ended, Part, Text};
use super::time::unix_time;
use crate::num::to_usize;

/// The two kinds of answers: of `/v1/completions` and of `/v1/chat/completions`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Completion,
    Chat,
}

/// The answer to a request whose texts run, or wait to run.
pub(super) struct Answer {
    kind: Kind,
    /// Name of the model.
    model: String,
    include_usage: bool,
    texts: Vec<Text>,
    /// Texts of one prompt.
    n: usize,
    prompt_tokens: usize,
    deadline: Instant,
}

/// A request that was read, with the tokens of its prompts.
#[derive(Debug)]
pub(super) struct Prepared {
    pub(super) kind: Kind,
    pub(super) wanted: Wanted,
    pub(super) prompts: Vec<Tokens>,
    pub(super) place: Place,
}

/// A request that was read and does not run.
#[derive(Debug)]
pub(super) struct Rendered {
    pub(super) wanted: Wanted,
    pub(super) prompts: Vec<Tokens>,
}

/// The tokens of a prompt.
#[derive(Debug)]
pub(super) struct Tokens {
    pub(super) tokens: Vec<u32>,
    /// Lengths at which recurrent states are kept for other prompts, ascending.
    pub(super) stops: Vec<u32>,
}

impl Server {
    /// Hands prompts to the engine.
    pub(super) async fn start(
        &self,
        request: Prepared,
        deadline: Instant,
    ) -> Result<Answer, ApiError> {
        let Prepared { kind, wanted, prompts, place } = request;
        let seed = match wanted.seed {
            Some(seed) => seed,
            None => random().map_err(|error| internal(&error))?,
        };
        let longest = prompts.iter().map(|prompt| prompt.tokens.len()).max().unwrap_or(0);
        let prompt_tokens = prompts.iter().map(|prompt| prompt.tokens.len()).sum();
        let ends: Vec<_> =
            prompts.iter().map(|prompt| Text::end_of(&prompt.tokens).to_vec()).collect();
        let of_prompt = |(at, Tokens { tokens, stops }): (usize, Tokens)| {
            // A request may ask for any number of texts.
            let first = at.saturating_mul(wanted.n);
            let samplers = (first..first.saturating_add(wanted.n))
                .map(|text| Sampler::new(wanted.temperature, seed, text).with_top_p(wanted.top_p));
            let limit = wanted.max_tokens.map(|limit| limit.tokens);
            Prompt {
                max_new_tokens: limit.unwrap_or_else(|| self.room(kind, &tokens)),
                tokens,
                stops,
                samplers: samplers.collect(),
                salt: wanted.salt.clone(),
                hint: wanted.hint,
                ignore_eos: wanted.ignore_eos,
            }
        };
        let prompts = prompts.into_iter().enumerate().map(of_prompt).collect();
        let submitted = self.engine.submit(prompts, place);
        let submitted = timeout_at(deadline, submitted).await.map_err(|_| too_late())?;
        let updates = submitted.map_err(|refused| match refused {
            Refused::TooLong { .. } | Refused::Never(_) => {
                let field = self.too_large(kind, &wanted, longest);
                ApiError::from(refused).about(field)
            }
            refused => refused.into(),
        })?;
        let of_texts = ends.iter().flat_map(|end| std::iter::repeat_n(end, wanted.n));
        let texts = updates.into_iter().zip(of_texts).map(|(updates, end)| {
            let words = (Arc::clone(&wanted.stop), wanted.skip_special);
            Text::new(updates, Arc::clone(&self.tokenizer), end, words)
        });
        let texts = texts.collect();
        Ok(Answer {
            kind,
            model: self.model.clone(),
            include_usage: wanted.include_usage,
            texts,
            n: wanted.n,
            prompt_tokens,
            deadline,
        })
    }

    /// Returns the field that is too large: the limit of new tokens if the prompt alone fits.
    fn too_large(&self, kind: Kind, wanted: &Wanted, longest: usize) -> &'static str {
        let prompt_fits = longest < to_usize(self.config.context().min(self.capacity));
        match wanted.max_tokens {
            Some(limit) if prompt_fits => limit.field,
            _ if kind == Kind::Chat => "messages",
            _ => "prompt",
        }
    }

    /// Returns the new tokens of a request without a limit, as OpenAI has them: 16 for completions,
    /// and for a chat as many as there is room for. At least one, so that a prompt that is too long
    /// is refused.
    fn room(&self, kind: Kind, prompt: &[u32]) -> u32 {
        let tokens = u32::try_from(prompt.len()).unwrap_or(u32::MAX);
        let of_context = self.config.context().saturating_sub(tokens);
        // The last token is never cached.
        let of_pool = self.capacity.saturating_sub(tokens).saturating_add(1);
        let room = of_context.min(of_pool).max(1);
        if kind == Kind::Completion { room.min(COMPLETION_TOKENS) } else { room }
    }
}

/// A comment of a stream, which clients skip, and the time without an event after which it is sent.
const COMMENT: &str = ": waiting\n\n";
const COMMENT_AFTER: Duration = Duration::from_secs(5);

/// New tokens of a completion that gives no limit.
const COMPLETION_TOKENS: u32 = 16;

impl Answer {
    /// Responds as the request wants it.
    pub(super) async fn respond(self, stream: bool) -> Response {
        if stream { self.stream() } else { self.whole().await.into_response() }
    }

    async fn whole(self) -> Result<Json<Value>, ApiError> {
        let head = Head::new(self.kind, self.model.clone());
        let mut usage = Usage::new(self.prompt_tokens, self.n);
        let mut done = vec![(String::new(), None); self.texts.len()];
        let mut parts = parts_of(self.texts);
        loop {
            let next = timeout_at(self.deadline, parts.next()).await;
            let Some((at, part)) = next.map_err(|_| too_late())? else { break };
            let (text, reason) = &mut done[at];
            match part {
                Part::Text(more) => text.push_str(&more),
                Part::End(ended) => {
                    usage.add(at, ended);
                    *reason = Some(ended.reason);
                }
                Part::Failed(why) => return Err(internal(&why)),
            }
        }
        let choices = done.iter().enumerate().map(|(at, (text, reason))| {
            let content = match self.kind {
                Kind::Completion => ("text", json!(text)),
                Kind::Chat => {
                    let message = json!({"role": "assistant", "content": text, "refusal": null});
                    ("message", message)
                }
            };
            choice(at, content, *reason)
        });
        let choices = choices.collect::<Vec<_>>();
        Ok(Json(head.with(self.kind.whole(), &choices, Some(&usage.json()))))
    }

    fn stream(self) -> Response {
        let events = Events {
            head: Head::new(self.kind, self.model.clone()),
            kind: self.kind,
            usage: Usage::new(self.prompt_tokens, self.n),
            include_usage: self.include_usage,
            ready: VecDeque::new(),
            num_texts: self.texts.len(),
            parts: Some(parts_of(self.texts)),
            deadline: self.deadline,
            pause: COMMENT_AFTER,
        };
        let body = stream::unfold(events.begun(), async |mut events| {
            events.next().await.map(|event| (Ok::<_, Infallible>(event), events))
        });
        let headers = [
            (header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream")),
            (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
        ];
        (headers, Body::from_stream(body)).into_response()
    }
}

/// The parts of several texts as they come, each with the number of its text.
type Parts = SelectAll<Pin<Box<dyn Stream<Item = (usize, Part)> + Send>>>;

fn parts_of(texts: Vec<Text>) -> Parts {
    let streams = texts.into_iter().enumerate().map(|(at, text)| {
        let parts =
            stream::unfold(text, async |mut text| text.next().await.map(|part| (part, text)));
        let parts: Pin<Box<dyn Stream<Item = (usize, Part)> + Send>> =
            Box::pin(parts.map(move |part| (at, part)));
        parts
    });
    stream::select_all(streams)
}

/// The events of a streamed answer.
struct Events {
    head: Head,
    kind: Kind,
    usage: Usage,
    include_usage: bool,
    /// Events that are next.
    ready: VecDeque<String>,
    num_texts: usize,
    /// `None` once all texts have ended.
    parts: Option<Parts>,
    deadline: Instant,
    /// Longest time without an event before a comment is sent.
    pause: Duration,
}

impl Events {
    /// Adds the first chunks of a chat.
    fn begun(mut self) -> Self {
        if self.kind == Kind::Chat {
            for at in 0..self.num_texts {
                let role = json!({"role": "assistant", "content": ""});
                self.push(choice(at, ("delta", role), None));
            }
        }
        self
    }

    /// Returns the next event; `None` after the last.
    async fn next(&mut self) -> Option<String> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Some(event);
            }
            let parts = self.parts.as_mut()?;
            let paused = Instant::now().checked_add(self.pause).unwrap_or(self.deadline);
            match timeout_at(self.deadline.min(paused), parts.next()).await {
                Ok(Some((at, part))) => self.take(at, part),
                Ok(None) => self.end(),
                // Proxies and clients give up on a connection that says nothing.
                Err(_) if paused < self.deadline => return Some(COMMENT.to_owned()),
                Err(_) => self.fail(&too_late()),
            }
        }
    }

    fn take(&mut self, at: usize, part: Part) {
        match part {
            Part::Text(text) => {
                let content = match self.kind {
                    Kind::Completion => ("text", json!(text)),
                    Kind::Chat => ("delta", json!({"content": text})),
                };
                self.push(choice(at, content, None));
            }
            Part::End(ended) => {
                self.usage.add(at, ended);
                let content = match self.kind {
                    Kind::Completion => ("text", json!("")),
                    Kind::Chat => ("delta", json!({})),
                };
                self.push(choice(at, content, Some(ended.reason)));
            }
            Part::Failed(why) => self.fail(&internal(&why)),
        }
    }

    /// Adds a chunk with one choice.
    fn push(&mut self, choice: Value) {
        // Chunks say that their usage is not known, if the last one will.
        let usage = self.include_usage.then_some(Value::Null);
        let chunk = self.head.with(self.kind.chunk(), &[choice], usage.as_ref());
        self.ready.push_back(event(&chunk));
    }

    /// Adds the chunks after the last choice.
    fn end(&mut self) {
        if self.include_usage {
            let chunk = self.head.with(self.kind.chunk(), &[], Some(&self.usage.json()));
            self.ready.push_back(event(&chunk));
        }
        self.ready.push_back("data: [DONE]\n\n".to_owned());
        self.parts = None;
    }

    /// Ends with an error; the texts that still run are cancelled.
    fn fail(&mut self, error: &ApiError) {
        self.ready.push_back(event(&error.body()));
        self.parts = None;
    }
}

fn event(value: &Value) -> String {
    format!("data: {value}\n\n")
}

/// Refuses a request that was not done by its deadline.
pub(super) fn too_late() -> ApiError {
    let error = "the request took longer than the server allows";
    ApiError::new(StatusCode::GATEWAY_TIMEOUT, error).with_code("timeout")
}

/// Returns the entry of one text.
fn choice(at: usize, (name, content): (&str, Value), reason: Option<&str>) -> Value {
    json!({"index": at, name: content, "logprobs": null, "finish_reason": reason})
}

/// The fields that every chunk of an answer begins with.
struct Head {
    id: String,
    created: u64,
    model: String,
}

impl Head {
    fn new(kind: Kind, model: String) -> Self {
        let prefix = if kind == Kind::Chat { "chatcmpl" } else { "cmpl" };
        let id = new_id(prefix);
        Self { id, created: unix_time(), model }
    }

    fn with(&self, object: &str, choices: &[Value], usage: Option<&Value>) -> Value {
        let mut answer = json!({
            "id": self.id, "object": object, "created": self.created, "model": self.model,
            "choices": choices,
        });
        if let (Some(fields), Some(usage)) = (answer.as_object_mut(), usage) {
            fields.insert("usage".to_owned(), usage.clone());
        }
        answer
    }
}

impl Kind {
    fn whole(self) -> &'static str {
        match self {
            Self::Completion => "text_completion",
            Self::Chat => "chat.completion",
        }
    }

    fn chunk(self) -> &'static str {
        match self {
            Self::Completion => "text_completion",
            Self::Chat => "chat.completion.chunk",
        }
    }
}

/// Tokens of a request: a prompt counts once, whatever the number of its texts.
struct Usage {
    prompt: usize,
    cached: usize,
    generated: usize,
    /// Texts of one prompt.
    n: usize,
}

impl Usage {
    fn new(prompt: usize, n: usize) -> Self {
        Self { prompt, cached: 0, generated: 0, n }
    }

    fn add(&mut self, at: usize, ended: Ended) {
        self.generated += ended.tokens;
        if at.checked_rem(self.n) == Some(0) {
            self.cached += ended.cached;
        }
    }

    fn json(&self) -> Value {
        json!({
            "prompt_tokens": self.prompt,
            "completion_tokens": self.generated,
            "total_tokens": self.prompt + self.generated,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        })
    }
}

/// Returns a random number.
/// Returns an id of an answer, only to tell it apart: without random numbers ids are alike.
pub(super) fn new_id(prefix: &str) -> String {
    format!("{prefix}-{:016x}", random().unwrap_or_default())
}

fn random() -> Result<u64, String> {
    getrandom::u64().map_err(|error| format!("random numbers: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns texts that never come.
    fn waiting(deadline: Instant) -> Events {
        let forever: Pin<Box<dyn Stream<Item = (usize, Part)> + Send>> =
            Box::pin(stream::pending());
        Events {
            head: Head::new(Kind::Completion, "m".to_owned()),
            kind: Kind::Completion,
            usage: Usage::new(1, 1),
            include_usage: false,
            ready: VecDeque::new(),
            num_texts: 1,
            parts: Some(stream::select_all([forever])),
            deadline,
            pause: Duration::from_millis(1),
        }
    }

    #[test]
    fn a_stream_says_something_while_its_text_waits() {
        let builder = &mut tokio::runtime::Builder::new_current_thread();
        let runtime = builder.enable_time().build().expect("a runtime");
        runtime.block_on(async {
            let mut events = waiting(Instant::now() + Duration::from_hours(1));
            for _ in 0..3 {
                assert_eq!(events.next().await.as_deref(), Some(COMMENT));
            }
            let mut events = waiting(Instant::now());
            let event = events.next().await.expect("an event");
            assert!(event.contains("\"timeout\""), "{event}");
            assert_eq!(events.next().await, None);
        });
    }
}
