//! The events of the cache, for routers.
use std::net::SocketAddr;

use anyhow::Context;
use kv::CacheSpec;
use kv::engine::Engine as Scheduler;
use kv_events::{Publisher, PublisherOptions};
use serde_json::{Value, json};

use crate::args::EventsArgs;
use crate::output;

/// Events that the cache keeps between two steps. More are lost, and a snapshot follows.
pub(super) const EVENTS: usize = 1 << 16;

/// Binds the sockets, and says on standard error what a reader of the log has to know.
pub(super) fn bind(args: &EventsArgs, spec: &CacheSpec) -> anyhow::Result<Option<Publisher>> {
    let Some(options) = args.options(spec) else { return Ok(None) };
    let publisher = Publisher::bind(&options).context("--events")?;
    let addresses = publisher.addresses();
    let all = [Some(addresses.events), addresses.replay].into_iter().flatten();
    notes(&options, all).iter().try_for_each(|note| output::note(note))?;
    Ok(Some(publisher))
}

fn notes(options: &PublisherOptions, addresses: impl Iterator<Item = SocketAddr>) -> Vec<String> {
    let mut notes = Vec::new();
    for address in addresses.filter(|address| !address.ip().is_loopback()) {
        notes.push(format!(
            "events at tcp://{address} have the tokens of all prompts in clear, and everybody who \
             reaches the address reads them"
        ));
    }
    if let Some(why) = options.unindexed() {
        notes.push(format!("routers find nothing in the events: {why}"));
    }
    notes
}

/// Returns what `/kv_event_sources` answers: the publisher of each rank, of which there is one.
pub(super) fn sources(args: &EventsArgs, publisher: Option<&Publisher>) -> Value {
    let Some(addresses) = publisher.map(Publisher::addresses) else { return json!({}) };
    json!({"0": {
        "enable_kv_cache_events": true,
        "publisher": "zmq",
        "endpoint": endpoint(addresses.events),
        "replay_endpoint": addresses.replay.map(endpoint),
        "topic": args.topic(),
    }})
}

/// Returns an endpoint in vLLM's words, in which `*` is every address.
fn endpoint(address: SocketAddr) -> String {
    if address.ip().is_unspecified() {
        format!("tcp://*:{}", address.port())
    } else {
        format!("tcp://{address}")
    }
}

/// Hands on the events since the last call.
pub(super) fn hand_on(publisher: Option<&Publisher>, scheduler: &mut Scheduler) {
    let Some(publisher) = publisher else { return };
    let events = scheduler.take_events();
    if !events.is_empty() {
        publisher.publish(&events);
    }
    if publisher.needs_snapshot() {
        publisher.reset(&scheduler.snapshot());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_leaves_the_machine_or_helps_nobody_is_said() {
        let spec = || CacheSpec::builder().layers(1).kv_heads(1).head_dim(2).paged(16, 8);
        let options = PublisherOptions::new(&spec().build().expect("a spec"));
        let notes = |options: &PublisherOptions, address: &str| {
            let address = address.parse().expect("an address");
            notes(options, std::iter::once(address)).join(" ")
        };
        assert_eq!(notes(&options, "127.0.0.1:5557"), "");
        assert_eq!(notes(&options, "[::1]:5557"), "");
        for address in ["0.0.0.0:5557", "192.0.2.1:5557", "[2001:db8::1]:1"] {
            assert!(notes(&options, address).contains("in clear"), "{address}");
        }
        let windows = spec().window_left(64).build().expect("a spec");
        let note = notes(&PublisherOptions::new(&windows), "127.0.0.1:1");
        assert!(note.contains("window"), "{note}");
    }

    #[test]
    fn every_address_is_a_star() {
        let text = |address: &str| endpoint(address.parse().expect("an address"));
        assert_eq!(text("0.0.0.0:5"), "tcp://*:5");
        assert_eq!(text("[::]:5"), "tcp://*:5");
        assert_eq!(text("[::1]:5"), "tcp://[::1]:5");
        assert_eq!(text("10.0.0.1:5"), "tcp://10.0.0.1:5");
    }
}
