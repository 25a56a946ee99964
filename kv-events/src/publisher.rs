//! The publisher: the handle that the thread of the cache has, and the thread behind it.
use std::net::SocketAddr;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime};

use kv_core::GroupId;
use kv_core::events::{Event, Snapshot};

use crate::mirror::Mirror;
use crate::options::{BindError, PublisherOptions};
use crate::peer::Role;
use crate::server::{Server, listen};
use crate::stats::Stats;
use crate::wire::{Batches, Format, WireEvent, first_number};

/// The time after which a thread with nothing to do looks at the clock again.
const IDLE: Duration = Duration::from_hours(1);

/// Publishes the events of one cache until it is dropped.
///
/// Its threads are its own: no call waits for a consumer, and none but [`Self::bind`] and the drop
/// for a thread.
#[derive(Debug)]
pub struct Publisher {
    server: Arc<Server>,
    group: Option<GroupId>,
    addresses: Addresses,
    threads: Vec<JoinHandle<()>>,
}

/// Where a publisher listens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Addresses {
    /// The socket PUB of the batches.
    pub events: SocketAddr,
    /// The socket ROUTER of batches of the past, if there is one.
    pub replay: Option<SocketAddr>,
}

impl Publisher {
    /// Opens the sockets and starts the threads.
    ///
    /// # Errors
    /// [`BindError`] for an endpoint that is malformed or cannot be opened, and if the system has
    /// no more threads. Nothing stays open.
    pub fn bind(options: &PublisherOptions) -> Result<Self, BindError> {
        let (listener, events) = listen(&options.endpoint)?;
        let mut listeners = vec![(Role::Events, listener)];
        let mut addresses = Addresses { events, replay: None };
        if let Some(endpoint) = &options.replay_endpoint {
            let (listener, replay) = listen(endpoint)?;
            listeners.push((Role::Replay, listener));
            addresses.replay = Some(replay);
        }
        let server = Arc::new(Server::new(options, first_number(since_1970())));
        let group = options.published().group;
        let mut publisher = Self { server, group, addresses, threads: Vec::new() };
        let server = Arc::clone(&publisher.server);
        publisher.start("kv-events-accept", move || server.accept(&listeners))?;
        let worker = Worker::new(Arc::clone(&publisher.server), options);
        publisher.start("kv-events", move || worker.run())?;
        Ok(publisher)
    }

    /// Publishes what [`KvCache::take_events`](kv_core::KvCache::take_events) returned, in its
    /// order. Copies what matters and does not wait; look at [`Self::needs_snapshot`] afterwards.
    pub fn publish(&self, events: &[Event]) {
        if let Some(group) = self.group {
            self.server.inbox.publish(events, group);
        }
    }

    /// Returns whether events were lost, by the cache
    /// ([`EventKind::Lost`](kv_core::events::EventKind::Lost)) or because the publisher's thread
    /// was behind: what consumers know may be wrong until [`Self::reset`].
    pub fn needs_snapshot(&self) -> bool {
        self.server.inbox.needs_snapshot()
    }

    /// Begins anew with everything that the cache has now, and publishes it as a live snapshot as
    /// soon as the spacing of snapshots allows. The cache may be another one than before.
    ///
    /// The snapshot is taken after the events that were published before: those that still wait are
    /// dropped, and of later ones those before [`Snapshot::next_id`]. It contains what lower tiers
    /// have.
    pub fn reset(&self, snapshot: &Snapshot) {
        if let Some(group) = self.group {
            self.server.inbox.reset(snapshot, group);
        }
    }

    /// Returns the addresses of the sockets, with the ports that port 0 became.
    pub fn addresses(&self) -> Addresses {
        self.addresses
    }

    /// Returns what was done so far.
    pub fn stats(&self) -> Stats {
        let counters = &self.server.counters;
        Stats {
            batches: counters.batches.get(),
            events: counters.events.get(),
            bytes: counters.bytes.get(),
            blocks: counters.blocks.get(),
            subscribers: u64::try_from(self.server.subscribers()).unwrap_or(u64::MAX),
            refused_peers: counters.refused_peers.get(),
            faulty_peers: counters.faulty_peers.get(),
            dropped_messages: counters.dropped_messages.get(),
            dropped_events: self.server.inbox.dropped(),
            snapshots: counters.snapshots.get(),
            replays: counters.replays.get(),
        }
    }

    fn start(&mut self, name: &str, run: impl FnOnce() + Send + 'static) -> Result<(), BindError> {
        let thread = thread::Builder::new().name(name.into()).spawn(run);
        self.threads.push(thread.map_err(BindError::Thread)?);
        Ok(())
    }
}

impl Drop for Publisher {
    fn drop(&mut self) {
        self.server.end();
        self.server.inbox.end();
        for thread in self.threads.drain(..) {
            // A panic was reported when it happened.
            let _ = thread.join();
        }
        self.server.disconnect();
    }
}

/// The thread that keeps the mirror and sends batches.
struct Worker {
    server: Arc<Server>,
    contents: Mirror,
    format: Format,
    heartbeat: Duration,
    spacing: Duration,
    resync: Option<Duration>,
    /// Events before this number are in the snapshot that was given.
    next_id: u64,
    wants_snapshot: bool,
    last_batch: Instant,
    /// The earliest time of the next live snapshot; `None` is beyond the clock.
    snapshot_at: Option<Instant>,
    last_resync: Instant,
}

impl Worker {
    fn new(server: Arc<Server>, options: &PublisherOptions) -> Self {
        let now = Instant::now();
        Self {
            server,
            contents: Mirror::new(options.published()),
            format: options.format(),
            heartbeat: options.heartbeat,
            spacing: options.snapshot_spacing,
            resync: options.resync,
            next_id: 0,
            wants_snapshot: false,
            last_batch: now,
            snapshot_at: Some(now),
            last_resync: now,
        }
    }

    fn run(mut self) {
        loop {
            let work = self.server.inbox.take(self.deadline());
            if work.is_over {
                return;
            }
            self.wants_snapshot |= work.wants_snapshot;
            if let Some(snapshot) = work.reset {
                self.next_id = snapshot.next_id;
                self.contents.reset(snapshot);
                self.wants_snapshot = true;
            }
            let mut out = Batches::default();
            for event in work.events.into_iter().filter(|event| event.id >= self.next_id) {
                self.contents.apply(event.kind, &mut out);
            }
            self.count_blocks();
            self.send(out);
            self.snapshot();
            self.beat();
        }
    }

    /// Returns when the thread has something to do of itself.
    fn deadline(&self) -> Instant {
        let beat = self.last_batch.checked_add(self.heartbeat);
        let snapshot = self.snapshot_at.filter(|_| self.wants_snapshot);
        let times = [beat, snapshot, self.resync_at()].into_iter().flatten();
        times.min().unwrap_or_else(|| Instant::now() + IDLE)
    }

    /// Returns when a live snapshot is due without a reason.
    fn resync_at(&self) -> Option<Instant> {
        self.resync.and_then(|interval| self.last_resync.checked_add(interval))
    }

    /// Sends a live snapshot if one is wanted or due, and the last one is old enough.
    fn snapshot(&mut self) {
        let now = Instant::now();
        if self.resync_at().is_some_and(|at| now >= at) {
            self.last_resync = now;
            self.wants_snapshot = true;
        }
        if !self.wants_snapshot || self.snapshot_at.is_none_or(|at| now < at) {
            return;
        }
        let mut out = Batches::default();
        self.contents.snapshot(&mut out);
        self.count_blocks();
        self.wants_snapshot = false;
        self.snapshot_at = now.checked_add(self.spacing);
        self.server.counters.snapshots.add(1);
        self.send(out);
    }

    /// Sends a batch without blocks if none was sent for some time.
    fn beat(&mut self) {
        if self.last_batch.elapsed() < self.heartbeat {
            return;
        }
        // Consumers may remember a life before this one.
        let knows_nothing = self.contents.told() == 0 && !self.wants_snapshot;
        let events = if knows_nothing { vec![WireEvent::Cleared] } else { Vec::new() };
        self.send_one(&events);
    }

    /// Counts before anything is sent: whoever has a batch finds its blocks counted.
    fn count_blocks(&self) {
        self.server.counters.blocks.set(self.contents.told());
    }

    fn send(&mut self, batches: Batches) {
        for events in batches.finish() {
            self.send_one(&events);
        }
    }

    fn send_one(&mut self, events: &[WireEvent]) {
        let payload = self.format.payload(since_1970().as_secs_f64(), events);
        let counters = &self.server.counters;
        counters.batches.add(1);
        counters.events.add(events.len());
        counters.bytes.add(payload.len());
        self.server.send(&payload);
        self.last_batch = Instant::now();
    }
}

/// Returns the time of the system's clock; zero if that is before 1970.
fn since_1970() -> Duration {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default()
}
