//! A client of OpenAI's completions: one streamed request, and its times.
use std::future::poll_fn;
use std::pin::Pin;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use hyper::body::{Body, Bytes, Incoming};
use hyper::header::{AUTHORIZATION, CONTENT_TYPE, HeaderValue};
use hyper::{Method, Request, Response, StatusCode, Uri};
use hyper_util::client::legacy::Client as HttpClient;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};

use super::address::Address;
use super::sse::{Event, Parser, SseError};
use super::wire::{self, Choice, Chunk, Completion, ErrorBody, Models, StreamOptions, Usage};
use crate::failure;

/// Idle connections are closed sooner than a server does it, or a request would be lost on one.
const IDLE: Duration = Duration::from_secs(4);
/// Longest answer that is not a stream.
const BODY_BYTES_MAX: usize = 1 << 20;

/// Options that all requests have in common.
#[derive(Debug, Clone)]
pub(super) struct ClientOptions {
    pub(super) api_key: Option<HeaderValue>,
    pub(super) cache_salt: Option<String>,
    /// Longest a request may take.
    pub(super) timeout: Duration,
}

/// Sends requests, each on a connection that has no other one at that time.
#[derive(Debug)]
pub(super) struct Client {
    http: HttpClient<HttpConnector, String>,
    models: Uri,
    completions: Uri,
    options: ClientOptions,
}

/// A request that did not succeed.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failure {
    #[error("{message}")]
    Status { status: u16, message: String },
    #[error("{0}")]
    Connection(String),
    #[error("no end after {0:?}")]
    Timeout(Duration),
    #[error("{message}")]
    Stream { message: String },
    #[error(transparent)]
    Sse(#[from] SseError),
    #[error("a chunk of the stream: {0}")]
    Json(#[from] serde_json::Error),
    #[error("the answer is of type {got:?}, expected text/event-stream")]
    ContentType { got: String },
    #[error("the stream has no text and no end")]
    Empty,
}

impl Failure {
    /// Returns the kind under which a report counts it: the status, or a word.
    pub(super) fn kind(&self) -> String {
        match self {
            Self::Status { status, .. } => return status.to_string(),
            Self::Connection(_) => "connection",
            Self::Timeout(_) => "timeout",
            Self::Stream { .. } => "stream",
            Self::Sse(_) | Self::Json(_) | Self::ContentType { .. } | Self::Empty => "protocol",
        }
        .to_owned()
    }

    fn connection(error: &dyn std::error::Error) -> Self {
        Self::Connection(failure::chain(error))
    }
}

/// The outcome of a request.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) sent: Instant,
    /// Until the first text came.
    pub(super) first: Option<Duration>,
    /// From one text to the next.
    pub(super) gaps: Vec<Duration>,
    /// Until the end, a failure included.
    pub(super) whole: Duration,
    pub(super) result: Result<Option<Usage>, Failure>,
}

impl Client {
    pub(super) fn new(address: &Address, options: ClientOptions) -> anyhow::Result<Self> {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        let http = HttpClient::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(IDLE)
            .build(connector);
        let (models, completions) = (address.route("/v1/models")?, "/v1/completions");
        Ok(Self { http, models, completions: address.route(completions)?, options })
    }

    /// Checks that a server answers, with any answer.
    pub(super) async fn check_reachable(&self) -> Result<(), Failure> {
        self.models().await.map(|_| ())
    }

    /// Asks which model runs; the first one if there are several.
    pub(super) async fn model(&self) -> anyhow::Result<String> {
        let (status, body) = self.models().await?;
        if !status.is_success() {
            bail!("GET {}: {status}: {}", self.models, wire::words(&body));
        }
        let parsed = serde_json::from_str::<Models>(&body);
        let models = parsed.with_context(|| format!("GET {}", self.models))?;
        let first = models.data.into_iter().next();
        first.map(|model| model.id).with_context(|| format!("GET {}: no model", self.models))
    }

    async fn models(&self) -> Result<(StatusCode, String), Failure> {
        let request = self.request(Method::GET, &self.models, String::new())?;
        let response = self.http.request(request).await;
        let response = response.map_err(|error| Failure::connection(&error))?;
        Ok((response.status(), text(response.into_body()).await?))
    }

    /// Makes the body of a request.
    pub(super) fn body(
        &self,
        model: &str,
        prompt: &[u32],
        max_tokens: u32,
    ) -> serde_json::Result<String> {
        serde_json::to_string(&Completion {
            model,
            prompt,
            max_tokens,
            temperature: 0,
            ignore_eos: true,
            stream: true,
            stream_options: StreamOptions { include_usage: true },
            cache_salt: self.options.cache_salt.as_deref(),
        })
    }

    /// Sends a request and reads its stream to the end.
    pub(super) async fn complete(&self, body: String) -> Answer {
        let sent = Instant::now();
        let mut texts = Texts { sent, first: None, last: None, gaps: Vec::new() };
        let limit = self.options.timeout;
        let result = tokio::time::timeout(limit, self.stream(body, &mut texts)).await;
        let result = result.unwrap_or(Err(Failure::Timeout(limit)));
        let Texts { first, gaps, .. } = texts;
        Answer { sent, first, gaps, whole: sent.elapsed(), result }
    }

    fn request(&self, method: Method, uri: &Uri, body: String) -> Result<Request<String>, Failure> {
        let mut request = Request::builder().method(method).uri(uri.clone());
        if !body.is_empty() {
            request = request.header(CONTENT_TYPE, "application/json");
        }
        if let Some(key) = &self.options.api_key {
            request = request.header(AUTHORIZATION, key.clone());
        }
        request.body(body).map_err(|error| Failure::connection(&error))
    }

    /// Returns the usage, if the server says it.
    async fn stream(&self, body: String, texts: &mut Texts) -> Result<Option<Usage>, Failure> {
        let request = self.request(Method::POST, &self.completions, body)?;
        let response = self.http.request(request).await;
        let response = response.map_err(|error| Failure::connection(&error))?;
        let mut body = check(response).await?;
        let (mut parser, mut usage) = (Parser::default(), None);
        while let Some(bytes) = next(&mut body).await? {
            parser.push(&bytes)?;
            let now = Instant::now();
            while let Some(event) = parser.next() {
                let Event::Data(data) = event else { continue };
                let chunk: Chunk = serde_json::from_str(&data)?;
                if let Some(ErrorBody { message }) = chunk.error {
                    return Err(Failure::Stream { message });
                }
                usage = chunk.usage.or(usage);
                // An answer without any text has its end for one.
                if chunk.choices.iter().any(Choice::has_text)
                    || texts.first.is_none() && chunk.choices.iter().any(Choice::is_end)
                {
                    texts.note(now);
                }
            }
        }
        parser.finish()?;
        if usage.is_none() && texts.first.is_none() {
            return Err(Failure::Empty);
        }
        Ok(usage.map(Usage::from))
    }
}

/// The times of the texts of an answer.
#[derive(Debug)]
struct Texts {
    sent: Instant,
    first: Option<Duration>,
    last: Option<Instant>,
    gaps: Vec<Duration>,
}

impl Texts {
    fn note(&mut self, now: Instant) {
        match self.last {
            None => self.first = Some(now.saturating_duration_since(self.sent)),
            Some(last) => self.gaps.push(now.saturating_duration_since(last)),
        }
        self.last = Some(now);
    }
}

/// Refuses an answer that is no stream.
async fn check(response: Response<Incoming>) -> Result<Incoming, Failure> {
    let status = response.status();
    if !status.is_success() {
        let body = text(response.into_body()).await?;
        return Err(Failure::Status { status: status.as_u16(), message: wire::words(&body) });
    }
    let got = response.headers().get(CONTENT_TYPE).map(HeaderValue::as_bytes).unwrap_or_default();
    if !got.starts_with(b"text/event-stream") {
        let got = String::from_utf8_lossy(got).into_owned();
        return Err(Failure::ContentType { got });
    }
    Ok(response.into_body())
}

/// Returns the next bytes of a body; `None` at its end.
async fn next(body: &mut Incoming) -> Result<Option<Bytes>, Failure> {
    loop {
        let frame = poll_fn(|context| Pin::new(&mut *body).poll_frame(context)).await;
        match frame {
            None => return Ok(None),
            Some(Err(error)) => return Err(Failure::connection(&error)),
            Some(Ok(frame)) => {
                if let Ok(bytes) = frame.into_data() {
                    return Ok(Some(bytes));
                }
            }
        }
    }
}

/// Reads a short body; a long one is cut.
async fn text(mut body: Incoming) -> Result<String, Failure> {
    let mut all = Vec::new();
    while let Some(bytes) = next(&mut body).await? {
        all.extend_from_slice(&bytes);
        if all.len() > BODY_BYTES_MAX {
            break;
        }
    }
    Ok(String::from_utf8_lossy(&all).into_owned())
}
