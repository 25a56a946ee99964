//! Arguments of `kv serve` that publish events.
use std::time::Duration;

use clap::Args;
use kv::CacheSpec;
use kv::error::UnknownName;
use kv_events::{PublisherOptions, Wire};

use super::seconds;

/// What is published of the cache, and where.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Events for routers")]
pub(crate) struct EventsArgs {
    /// Publish what the cache has, as vLLM's KV events over ZeroMQ, such as `tcp://127.0.0.1:5557`;
    /// the host `*` is every address, port 0 takes a free one. Events have the tokens of prompts in
    /// clear: whoever reaches the address reads them
    #[arg(long, value_name = "ENDPOINT")]
    events: Option<String>,

    /// Answer routers that missed events, such as `tcp://127.0.0.1:5558`
    #[arg(long, value_name = "ENDPOINT", requires = "events")]
    events_replay: Option<String>,

    /// Topic of the events; llm-d wants `kv@POD@MODEL`
    #[arg(long, value_name = "TEXT", default_value = "", requires = "events")]
    events_topic: String,

    /// Form of an event: map (vLLM since June 2026, vllm-router, Dynamo, llm-d) or array (vLLM
    /// before, SGLang, AIBrix, kthena)
    #[arg(long, value_name = "NAME", default_value = "map", value_parser = wire)]
    #[arg(requires = "events")]
    events_wire: Wire,

    /// Publish everything that is cached every so many seconds, for routers that cannot ask
    #[arg(long, value_name = "SECONDS", value_parser = seconds, requires = "events")]
    events_resync: Option<Duration>,

    /// Publish what prompts with a `cache_salt` left too, with Dynamo's tag; other routers credit
    /// it to prompts without a salt
    #[arg(long, requires = "events")]
    events_salted: bool,
}

impl EventsArgs {
    /// Returns whether events are published.
    pub(crate) fn is_on(&self) -> bool {
        self.events.is_some()
    }

    pub(crate) fn topic(&self) -> &str {
        &self.events_topic
    }

    /// Returns the options for a cache; `None` if nothing is published.
    pub(crate) fn options(&self, spec: &CacheSpec) -> Option<PublisherOptions> {
        let endpoint = self.events.as_deref()?;
        let mut options = PublisherOptions::new(spec)
            .endpoint(endpoint)
            .topic(self.events_topic.as_bytes())
            .wire(self.events_wire)
            .salted(self.events_salted);
        if let Some(replay) = &self.events_replay {
            options = options.replay_endpoint(replay.as_str());
        }
        Some(options.resync(self.events_resync))
    }
}

fn wire(name: &str) -> Result<Wire, UnknownName> {
    match name {
        "map" => Ok(Wire::Map),
        "array" => Ok(Wire::Array),
        _ => Err(UnknownName::new("form of events", name, "map, array")),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::super::{Cli, Command};
    use super::*;

    fn parse(args: &[&str]) -> Result<EventsArgs, String> {
        let cli = Cli::try_parse_from([&["kv", "serve"], args].concat());
        match cli.map_err(|error| error.to_string())?.command {
            Command::Serve(args) => Ok(args.events),
            other => Err(format!("{other:?}")),
        }
    }

    #[test]
    fn further_options_need_the_address_of_events() {
        assert!(!parse(&[]).expect("none").is_on());
        for more in [
            &["--events-replay", "tcp://127.0.0.1:0"][..],
            &["--events-topic", "kv"],
            &["--events-wire", "map"],
            &["--events-resync", "5"],
            &["--events-salted"],
        ] {
            let error = parse(more).expect_err("alone");
            assert!(error.contains("--events <ENDPOINT>"), "{more:?}: {error}");
            let both = [&["--events", "tcp://127.0.0.1:0"], more].concat();
            assert!(parse(&both).expect("both").is_on(), "{more:?}");
        }
    }

    #[test]
    fn forms_and_intervals_are_checked() {
        let with = |more: &[&str]| parse(&[&["--events", "tcp://127.0.0.1:0"], more].concat());
        assert_eq!(with(&["--events-wire", "array"]).expect("array").events_wire, Wire::Array);
        assert!(with(&["--events-wire", "json"]).expect_err("json").contains("map, array"));
        for time in ["0", "-1", "x"] {
            assert!(with(&["--events-resync", time]).is_err(), "{time}");
        }
    }
}
