//! Counts of a publisher.
use std::sync::atomic::{AtomicU64, Ordering};

/// What a publisher did since it began, and what it has now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Stats {
    /// Batches published, heartbeats and those of snapshots included.
    pub batches: u64,
    /// Events in them; a run of blocks is one.
    pub events: u64,
    /// Bytes of their payloads.
    pub bytes: u64,
    /// Blocks that consumers know of now.
    pub blocks: u64,
    /// Peers with a subscription now.
    pub subscribers: u64,
    /// Connections that were closed at once, because there were 16 already.
    pub refused_peers: u64,
    /// Peers that were dropped for what they sent, or for a handshake that took too long.
    pub faulty_peers: u64,
    /// Batches that a subscriber did not get because too many bytes waited for it, over all
    /// subscribers.
    pub dropped_messages: u64,
    /// Events of the cache that were dropped because the publisher's thread was behind.
    pub dropped_events: u64,
    /// Live snapshots.
    pub snapshots: u64,
    /// Answered requests for batches of the past.
    pub replays: u64,
}

/// The same, counted by all threads.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub(crate) batches: Counter,
    pub(crate) events: Counter,
    pub(crate) bytes: Counter,
    pub(crate) blocks: Counter,
    pub(crate) refused_peers: Counter,
    pub(crate) faulty_peers: Counter,
    pub(crate) dropped_messages: Counter,
    pub(crate) snapshots: Counter,
    pub(crate) replays: Counter,
}

/// One count.
#[derive(Debug, Default)]
pub(crate) struct Counter(AtomicU64);

impl Counter {
    pub(crate) fn add(&self, more: usize) {
        self.0.fetch_add(u64::try_from(more).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    pub(crate) fn set(&self, value: usize) {
        self.0.store(u64::try_from(value).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}
