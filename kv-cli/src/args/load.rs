//! Arguments of `kv load`.
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use hyper::header::HeaderValue;

use super::{at_least_1, finite, seconds};
use crate::load::{Address, Arrivals, Synthetic, TraceOptions, Vocabulary};

/// Most requests of a made workload, which bounds the memory of their times.
const REQUESTS_MAX: i64 = 10_000_000;

/// Send requests to a server with OpenAI's API at their times, and measure how long it takes to
/// answer them.
///
/// The load is open: a request is sent at its time, whatever became of the earlier ones. Requests
/// are made, with --rate, or come from a trace, with --trace: arrival times, lengths of prompts and
/// answers, and which prompts share a prefix. A trace is in one of the formats that `kv replay`
/// reads; those without ids share nothing.
///
/// Prompts are token ids between --first-token and --vocab: equal ids of a trace are equal tokens,
/// so prefixes are reused as they were. Requests are POST /v1/completions, streamed, at temperature
/// 0, and go on after an end of text (`ignore_eos`).
///
/// Time to first token counts from when a request was sent until the first chunk with text,
/// connecting included; time between tokens from one such chunk to the next. Lateness is how long
/// after its time a request was sent. Percentiles are of requests that succeeded. A server with no
/// success at all is exit code 1. Ctrl-C reports what has ended until then.
#[derive(Debug, Args)]
#[command(
    allow_negative_numbers = true,
    after_help = "Examples:
  kv load http://127.0.0.1:8080 --rate 20 --requests 200
  kv load http://127.0.0.1:8080 --rate 50 --requests 3000 --prompt-tokens 400 \\
    --shared-prefix-tokens 300 --turns 2 --plot load.svg
  kv load http://127.0.0.1:8080 --trace conversation.jsonl.zst --limit 1000 --scale 10 \\
    --scale-tokens 0.01 --max-prompt-tokens 440 --max-new-tokens 64
  kv load http://127.0.0.1:8000/v1 --trace azure.csv --scale 2 --vocab 32000 --json"
)]
pub(crate) struct LoadArgs {
    /// The server, with or without /v1
    #[arg(value_name = "URL")]
    pub(crate) url: Address,

    /// Take requests from this trace
    #[arg(long, value_name = "FILE", required_unless_present = "rate", conflicts_with = "rate")]
    pub(crate) trace: Option<PathBuf>,

    /// With --trace: factor of the rate at which requests come
    #[arg(long, value_name = "X", default_value = "1", value_parser = above_0)]
    #[arg(conflicts_with = "rate")]
    pub(crate) scale: f64,

    /// With --trace: factor of the lengths of prompts and answers, and of what prompts share
    #[arg(long, value_name = "F", default_value = "1", value_parser = above_0)]
    #[arg(conflicts_with = "rate")]
    pub(crate) scale_tokens: f64,

    /// With --trace: send only the first N requests of the file
    #[arg(long, value_name = "N", value_parser = at_least_1, conflicts_with = "rate")]
    pub(crate) limit: Option<u32>,

    /// With --trace: cut longer prompts at their end
    #[arg(long, value_name = "N", value_parser = at_least_1, conflicts_with = "rate")]
    pub(crate) max_prompt_tokens: Option<u32>,

    /// With --trace: tokens per entry of `hash_ids`; default: 512 in a Mooncake trace and 16 in one
    /// of Qwen
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(NonZeroU32))]
    #[arg(conflicts_with = "rate")]
    pub(crate) tokens_per_id: Option<NonZeroU32>,

    /// Make requests, at this number per second
    #[arg(long, value_name = "R", value_parser = above_0)]
    pub(crate) rate: Option<f64>,

    /// With --rate: the distances of requests
    #[arg(long, value_enum, default_value_t, conflicts_with = "trace")]
    pub(crate) arrivals: Arrivals,

    /// With --rate: requests to send
    #[arg(long, value_name = "N", default_value_t = 100, conflicts_with = "trace")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=REQUESTS_MAX))]
    pub(crate) requests: u32,

    /// With --rate: tokens of a prompt, of the first turn
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = at_least_1)]
    #[arg(conflicts_with = "trace")]
    pub(crate) prompt_tokens: u32,

    /// With --rate: first tokens that all prompts have in common
    #[arg(long, value_name = "N", default_value_t = 0, conflicts_with = "trace")]
    pub(crate) shared_prefix_tokens: u32,

    /// With --rate: turns of a conversation. Each has the prompt before it, made tokens in place of
    /// the answer, and a new question. All conversations have their first turn, then all
    /// their second
    #[arg(long, value_name = "N", default_value = "1", conflicts_with = "trace")]
    pub(crate) turns: NonZeroU32,

    /// Tokens to generate per request; default: 32, or with --trace what the trace says, which this
    /// limits
    #[arg(long, value_name = "N", value_parser = at_least_1)]
    pub(crate) max_new_tokens: Option<u32>,

    /// Tokens of the model's vocabulary
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = at_least_1)]
    pub(crate) vocab: u32,

    /// First token that is no special one
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub(crate) first_token: u32,

    /// Seed of arrival times and tokens; another one finds nothing of an earlier load in the cache
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub(crate) seed: u64,

    /// Model that requests name; default: the first one of GET /v1/models
    #[arg(long, value_name = "NAME")]
    pub(crate) model: Option<String>,

    /// Key of the server
    #[arg(long, value_name = "KEY", env = "KV_API_KEY", hide_env_values = true)]
    #[arg(value_parser = bearer)]
    pub(crate) api_key: Option<HeaderValue>,

    /// Salt of the cache: prompts share blocks only with those of the same one
    #[arg(long, value_name = "TEXT")]
    pub(crate) cache_salt: Option<String>,

    /// Requests at once, each on a connection of its own; one more waits, and is late. Default: as
    /// many as there are
    #[arg(long, value_name = "N", value_parser = at_least_1)]
    pub(crate) connections: Option<u32>,

    /// Longest a request may take, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "600", value_parser = seconds)]
    pub(crate) timeout: Duration,

    /// Draw the time to first token of every request, and the distributions of all times
    #[arg(long, value_name = "FILE.svg")]
    pub(crate) plot: Option<PathBuf>,

    /// Print one JSON object instead of text
    #[arg(long)]
    pub(crate) json: bool,
}

/// Tokens to generate for a made request.
const MAX_NEW_TOKENS: u32 = 32;

impl LoadArgs {
    /// Returns how a trace becomes requests.
    pub(crate) fn trace_options(&self) -> TraceOptions {
        TraceOptions {
            speed: self.scale,
            tokens: self.scale_tokens,
            limit: self.limit,
            max_prompt_tokens: self.max_prompt_tokens,
            max_new_tokens: self.max_new_tokens,
            tokens_per_id: self.tokens_per_id,
        }
    }

    /// Returns the made requests.
    pub(crate) fn synthetic(&self) -> Synthetic {
        Synthetic {
            // One of --rate and --trace is given.
            rate: self.rate.unwrap_or(1.0),
            arrivals: self.arrivals,
            requests: self.requests,
            prompt_tokens: self.prompt_tokens,
            shared_prefix_tokens: self.shared_prefix_tokens,
            max_new_tokens: self.max_new_tokens.unwrap_or(MAX_NEW_TOKENS),
            turns: self.turns,
        }
    }

    pub(crate) fn vocabulary(&self) -> Vocabulary {
        Vocabulary { first: self.first_token, tokens: self.vocab, seed: self.seed }
    }
}

fn above_0(text: &str) -> Result<f64, String> {
    match finite(text)? {
        number if number > 0.0 => Ok(number),
        _ => Err("a number above 0 is needed".to_owned()),
    }
}

fn bearer(key: &str) -> Result<HeaderValue, String> {
    let value = HeaderValue::try_from(format!("Bearer {key}"));
    let mut value = value.map_err(|_| "a key has no line breaks".to_owned())?;
    value.set_sensitive(true);
    Ok(value)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::super::{Cli, Command};
    use super::*;

    fn parse(args: &[&str]) -> Result<LoadArgs, String> {
        let args = [&["kv", "load", "http://127.0.0.1:1"], args].concat();
        let cli = Cli::try_parse_from(args).and_then(Cli::checked);
        match cli.map_err(|error| error.to_string())?.command {
            Command::Load(args) => Ok(args),
            other => Err(format!("{other:?}")),
        }
    }

    #[test]
    fn requests_are_made_or_of_a_trace() {
        let made = parse(&["--rate", "2.5"]).expect("made").synthetic();
        assert_eq!((made.requests, made.prompt_tokens, made.max_new_tokens), (100, 128, 32));
        let options = parse(&["--trace", "a.csv", "--scale", "4"]).expect("a trace");
        assert_eq!(options.trace_options().max_new_tokens, None);
        for args in [
            &[][..],
            &["--rate", "1", "--trace", "a.csv"],
            &["--rate", "1", "--scale", "2"],
            &["--rate", "1", "--limit", "2"],
            &["--trace", "a.csv", "--turns", "2"],
            &["--trace", "a.csv", "--requests", "2"],
            &["--rate", "0"],
            &["--rate", "NaN"],
            &["--rate", "1", "--requests", "10000001"],
            &["--rate", "1", "--api-key", "two\nlines"],
        ] {
            assert!(parse(args).is_err(), "{args:?}");
        }
    }

    #[test]
    fn a_key_is_not_printed() {
        let args = parse(&["--rate", "1", "--api-key", "secret"]).expect("a key");
        assert_eq!(args.api_key.as_ref().map(HeaderValue::as_bytes), Some(&b"Bearer secret"[..]));
        assert!(!format!("{args:?}").contains("secret"));
    }
}
