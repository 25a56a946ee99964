//! Arguments of `kv serve`.
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use super::engine::EngineArgs;
use super::{at_least_1, seconds};

/// Serve a model over HTTP, in the shape of OpenAI's API: a way to put load on the cache.
///
/// `POST /v1/completions`, `POST /v1/chat/completions`, `GET /v1/models`, `GET /health`, `GET
/// /metrics` for Prometheus, and a page with the state of the cache at `/`. All requests run in one
/// continuous batch; prompts reuse what others with the same salt left in the cache.
///
/// SIGTERM and Ctrl-C let running requests end, then write what tiers shall keep.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  kv serve
  kv serve --model smollm2.gguf --tokenizer tokenizer.json --max-batch 64 --paged 16,4096
  kv serve --tier disk=cache:20GiB --api-key \"$KEY\" --addr 0.0.0.0:8080

  curl -N http://127.0.0.1:8080/v1/completions -H 'Content-Type: application/json' \\
    -d '{\"prompt\": \"Once upon a time\", \"max_tokens\": 100, \"stream\": true}'")]
pub(crate) struct ServeArgs {
    #[command(flatten)]
    pub(crate) engine: EngineArgs,

    /// Template that makes the prompt of a chat; default: `chat_template.jinja`, then the one in
    /// `tokenizer_config.json`, both beside the tokenizer, then the model, then the one in the
    /// .gguf file. One that does not work costs the chats alone
    #[arg(long, value_name = "FILE")]
    pub(crate) chat_template: Option<PathBuf>,

    /// Address to listen on; port 0 takes a free one. Others than this machine reach it only if it
    /// says so, such as 0.0.0.0:8080
    #[arg(long, value_name = "IP:PORT", default_value = "127.0.0.1:8080")]
    pub(crate) addr: SocketAddr,

    /// Key that requests must carry: `Authorization: Bearer KEY`. Without one, everybody who
    /// reaches the address is served
    #[arg(long, value_name = "KEY", env = "KV_API_KEY", hide_env_values = true)]
    #[arg(value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub(crate) api_key: Option<String>,

    /// Requests that wait; one more is refused with 429
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = at_least_1)]
    pub(crate) max_queue: u32,

    /// Connections at once; one more waits
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = at_least_1)]
    pub(crate) max_connections: u32,

    /// Longest a request may take, in seconds, waiting included
    #[arg(long, value_name = "SECONDS", default_value = "600", value_parser = seconds)]
    pub(crate) request_timeout: Duration,

    /// Longest that running requests may take after SIGTERM, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = seconds)]
    pub(crate) drain: Duration,
}
