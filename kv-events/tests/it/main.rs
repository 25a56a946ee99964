//! Guarantees for consumers of events, over sockets.
#![expect(clippy::panic, clippy::unwrap_used, reason = "tests")]
mod client;
mod consumer;
mod content;
mod peers;
mod replay;
mod snapshots;
mod support;
mod value;
