//! Arguments of `kv serve`.
use std::fmt;
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use anyhow::{Context, ensure};
use clap::Args;
use hyper::header::HeaderValue;
use tower_http::cors::AllowOrigin;

use super::engine::EngineArgs;
use super::events::EventsArgs;
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
  kv serve --events tcp://127.0.0.1:5557 --events-replay tcp://127.0.0.1:5558

  curl -N http://127.0.0.1:8080/v1/completions -H 'Content-Type: application/json' \\
    -d '{\"prompt\": \"Once upon a time\", \"max_tokens\": 100, \"stream\": true}'")]
pub(crate) struct ServeArgs {
    #[command(flatten)]
    pub(crate) engine: EngineArgs,

    #[command(flatten)]
    pub(crate) events: EventsArgs,

    /// Template that makes the prompt of a chat; default: `chat_template.jinja`, then the one in
    /// `tokenizer_config.json`, both beside the tokenizer, then the model, then the one in the
    /// .gguf file. One that does not work costs the chats alone
    #[arg(long, value_name = "FILE")]
    pub(crate) chat_template: Option<PathBuf>,

    /// Address to listen on; port 0 takes a free one. Others than this machine reach it only if it
    /// says so, such as 0.0.0.0:8080
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:8080")]
    pub(crate) addr: ListenAddress,

    /// Key that requests must carry: `Authorization: Bearer KEY`, or `x-api-key: KEY`. Without one,
    /// everybody who reaches the address is served
    #[arg(long, value_name = "KEY", env = "KV_API_KEY", hide_env_values = true)]
    #[arg(value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub(crate) api_key: Option<String>,

    /// File with the key, which other users of this machine would see on the command line; blanks
    /// and line breaks around it do not count
    #[arg(long, value_name = "FILE", conflicts_with = "api_key")]
    pub(crate) api_key_file: Option<PathBuf>,

    /// Origin whose pages may send requests from a browser, such as `http://localhost:3000`, or `*`
    /// for all; may be repeated. Without one no page of another origin can
    #[arg(long, value_name = "ORIGIN", value_parser = origin)]
    pub(crate) allow_origin: Vec<HeaderValue>,

    /// Texts that wait, each prompt times `n`; a request with more than there is room for is
    /// refused with 429, or with 400 if it has more than N itself
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = at_least_1)]
    pub(crate) max_queue: u32,

    /// Connections at once; one more waits
    #[arg(long, value_name = "N", default_value_t = 4096, value_parser = at_least_1)]
    pub(crate) max_connections: u32,

    /// Longest a request may take, in seconds: from its first byte until its answer is made
    #[arg(long, value_name = "SECONDS", default_value = "600", value_parser = seconds)]
    pub(crate) request_timeout: Duration,

    /// Longest that running requests may take after SIGTERM, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = seconds)]
    pub(crate) drain: Duration,
}

/// An address to listen on: every one that its name has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ListenAddress(pub(crate) Vec<SocketAddr>);

impl FromStr for ListenAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let example = "expected HOST:PORT, such as 127.0.0.1:8080, localhost:8080 or [::1]:8080";
        let is_whole = text.rsplit_once(':').is_some_and(|(host, port)| {
            let is_name = !host.contains(':') || host.starts_with('[') && host.ends_with(']');
            !host.is_empty() && is_name && port.parse::<u16>().is_ok()
        });
        if !is_whole {
            return Err(example.to_owned());
        }
        match text.to_socket_addrs().map(Vec::from_iter) {
            Ok(all) if !all.is_empty() => Ok(Self(all)),
            Ok(_) => Err(format!("the name has no address; {example}")),
            Err(error) => Err(format!("{error}; {example}")),
        }
    }
}

impl fmt::Display for ListenAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, address) in self.0.iter().enumerate() {
            let separator = if at > 0 { " or " } else { "" };
            write!(f, "{separator}{address}")?;
        }
        Ok(())
    }
}

impl ServeArgs {
    /// Returns the key, read from its file.
    pub(crate) fn api_key(&self) -> anyhow::Result<Option<String>> {
        let Some(path) = &self.api_key_file else { return Ok(self.api_key.clone()) };
        let place = || path.display().to_string();
        let text = std::fs::read_to_string(path).with_context(place)?;
        let key = text.trim();
        let is_key = !key.is_empty() && !key.contains(char::is_control);
        ensure!(is_key, "{}: expected a key on one line", place());
        Ok(Some(key.to_owned()))
    }

    /// Returns the origins whose pages may send requests; `None` without any.
    pub(crate) fn origins(&self) -> Option<AllowOrigin> {
        match &*self.allow_origin {
            [] => None,
            origins if origins.iter().any(|origin| origin == "*") => Some(AllowOrigin::any()),
            origins => Some(AllowOrigin::list(origins.iter().cloned())),
        }
    }
}

/// Parses `*`, or a scheme, a host and perhaps a port, as browsers write them.
fn origin(text: &str) -> Result<HeaderValue, String> {
    let is_origin = text.split_once("://").is_some_and(|(scheme, host)| {
        let is_plain = |c: char| c.is_ascii_graphic() && !matches!(c, '/' | '?' | '#' | '@' | '*');
        !scheme.is_empty()
            && !host.is_empty()
            && text.chars().all(|c| !c.is_ascii_uppercase())
            && scheme.chars().chain(host.chars()).all(is_plain)
    });
    match HeaderValue::from_str(text) {
        Ok(value) if is_origin || text == "*" => Ok(value),
        _ => {
            Err("expected an origin without a path, such as http://localhost:3000, or *".to_owned())
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::super::{Cli, Command};
    use super::*;

    fn parse(args: &[&str]) -> Result<ServeArgs, String> {
        let cli = Cli::try_parse_from([&["kv", "serve"], args].concat());
        match cli.map_err(|error| error.to_string())?.command {
            Command::Serve(args) => Ok(args),
            other => Err(format!("{other:?}")),
        }
    }

    #[test]
    fn an_address_is_a_name_or_a_number_with_a_port() {
        for (text, port) in [("127.0.0.1:0", 0), ("[::1]:81", 81), ("localhost:8080", 8080)] {
            let address = parse(&["--addr", text]).expect(text).addr;
            assert!(address.0.iter().all(|one| one.port() == port), "{text}: {address}");
            assert!(address.0.iter().all(|one| one.ip().is_loopback()), "{text}: {address}");
        }
        for text in
            ["8080", ":8080", "localhost", "localhost:", "::1:8080", "a:65536", "http://a:1"]
        {
            let error = parse(&["--addr", text]).expect_err(text);
            assert!(error.contains("such as 127.0.0.1:8080"), "{text}: {error}");
        }
    }

    #[test]
    fn a_key_comes_from_one_place() {
        let folder = tempfile::TempDir::new().expect("a folder");
        let path = folder.path().join("key");
        let name = path.to_str().expect("UTF-8");
        let read = |text: &str| {
            std::fs::write(&path, text).expect("a file");
            let key = parse(&["--api-key-file", name]).expect("a file").api_key();
            key.map_err(|error| error.to_string())
        };
        assert_eq!(read("correct horse\n"), Ok(Some("correct horse".to_owned())));
        for text in ["", "\n", "two\nlines", "a\0"] {
            assert!(read(text).expect_err("no key").contains("a key on one line"), "{text:?}");
        }
        assert!(parse(&["--api-key-file", name, "--api-key", "k"]).is_err());
        std::fs::remove_file(&path).expect("a file");
        let missing = parse(&["--api-key-file", name]).expect("a name").api_key();
        assert!(missing.expect_err("no file").to_string().contains(name));
    }

    #[test]
    fn origins_are_those_of_browsers() {
        assert!(parse(&[]).expect("none").origins().is_none());
        let two =
            ["--allow-origin", "http://localhost:3000", "--allow-origin", "https://a.example"];
        assert_eq!(parse(&two).expect("two").allow_origin.len(), 2);
        assert!(parse(&["--allow-origin", "*"]).expect("all").origins().is_some());
        for text in
            ["", "localhost", "http://", "http://a/", "http://A", "http://*.a", "null", "a b"]
        {
            let error = parse(&["--allow-origin", text]).expect_err(text);
            assert!(error.contains("http://localhost:3000"), "{text}: {error}");
        }
    }
}
