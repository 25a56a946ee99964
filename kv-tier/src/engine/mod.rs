//! The engine: moves chunks between the device, host memory and stores.
//!
//! [`TieredCache`] is called between steps. Nothing in it waits: stores are called on threads of
//! their own ([`lane`]), through breakers and with deadlines ([`guarded`]).
//!
//! | module | owns |
//! |---|---|
//! | [`links`] | names of the blocks on the device; which chunks are complete |
//! | [`announce`] | what readers of events know of the tiers |
//! | [`follow`] | changes of blocks on the device |
//! | [`waiting`] | chunks that wait for their copy |
//! | [`offload`] | device to host memory |
//! | [`snapshots`], [`search`] | recurrent states: which to copy, and which to look for |
//! | [`write`] | host memory to stores |
//! | [`owed`] | what a store has yet to get |
//! | [`prefetch`] | prompts that are looked for, and their start |
//! | [`lookup`], [`read`] | questions to stores, and chunks from them |
//! | [`import`] | host memory to blocks of the device |
//! | [`group`] | the chunks of one group |
//! | [`host`] | the chunks in host memory |
//! | [`forget`], [`removal`] | forgetting everywhere; its part in stores |
//! | [`handoff`] | exports to other engines, and prompts that wait for theirs |
mod announce;
mod breaker;
mod done;
mod error;
mod follow;
mod forget;
mod group;
mod guarded;
mod handoff;
mod host;
mod import;
mod lane;
mod links;
mod lookup;
mod offload;
mod options;
mod owed;
mod prefetch;
mod prompted;
mod rates;
mod read;
mod removal;
mod search;
mod snapshots;
mod stats;
mod waiting;
mod write;

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use kv_core::backend::{Backend, HostPool, Queue};
use kv_core::block::BlockChange;
use kv_core::events::Tier;
use kv_core::num::to_u64;
use kv_core::reuse::Import;
use kv_core::spec::PrefixReuse;
use kv_core::{GroupId, KvCache};

pub use breaker::BreakerState;
pub use error::TierError;
pub use forget::{ForgetFailure, Forgotten};
pub use handoff::{Export, ExportId, ExportState};
pub use options::{StoreOptions, TierOptions, Wait, WaitError};
pub use prefetch::PrefetchId;
pub use stats::{Failures, StoreStats, TiersStats};
pub use write::Unwritten;

use crate::identity::{ChunkRoot, Identity};
use crate::record::Record;
use announce::Announcements;
use done::Done;
use follow::Pinned;
use group::GroupTier;
use guarded::GuardedStore;
use handoff::Exports;
use lane::Lane;
use owed::Owed;
use prefetch::Prefetch;
use prompted::Prompted;
use rates::Average;
use removal::Removals;
use snapshots::Snapshots;

const GROUP: &str = "groups are those of the cache that the tiers were made for";
const STORE: &str = "stores are numbered as in the options";

/// The fence of a backend.
type FenceOf<B> = <<B as Backend>::Queue as Queue>::Fence;
/// The chunk of a backend.
type ChunkOf<B> = <<B as Backend>::HostPool as HostPool>::Chunk;

/// Host memory and stores under the prefix cache of one [`KvCache`], which every call gets.
pub(crate) struct Tiers<B: Backend> {
    identity: Identity,
    roots: HashMap<RootKey, Option<Arc<ChunkRoot>>>,
    groups: Vec<GroupTier<B::HostPool>>,
    stores: Vec<StoreLane>,
    /// Completes chunks that were copied from the device.
    encoder: Lane,
    done: Receiver<Done<ChunkOf<B>>>,
    sender: Sender<Done<ChunkOf<B>>>,
    prefetches: HashMap<u64, Prefetch<ChunkOf<B>>>,
    /// Imports whose copies to the device failed.
    abandoned: Vec<Import>,
    /// Snapshots of states that wait for their copy.
    snapshots: Snapshots,
    exports: Exports,
    removals: Removals,
    /// Chunks of prompts, as opposed to generated text, by name: tokens of the longest prompt.
    prompted: Prompted,
    pinned: Pinned,
    changes: Vec<BlockChange>,
    announcements: Announcements,
    /// Seconds that computing one token takes.
    compute: Average,
    keeps_host: bool,
    is_flushing: bool,
    /// Writes that were given up since the last flush began.
    lost: u64,
    wait: Wait,
    stats: TiersStats,
}

/// Group, salt and adapter.
type RootKey = (GroupId, Box<[u8]>, Option<u64>);

/// A store and its threads.
#[derive(Debug)]
struct StoreLane {
    store: Arc<GuardedStore>,
    lane: Lane,
    /// Writes that wait or run, by number; with the written chunk, if it is in host memory.
    writing: HashMap<u64, Option<Arc<Record>>>,
    next_write: u64,
    owed: Owed,
}

impl<B: Backend> Tiers<B> {
    /// Does what [`TieredCache::new`](crate::TieredCache::new) does.
    pub(crate) fn new(
        cache: &KvCache<B>,
        identity: Identity,
        options: TierOptions,
    ) -> Result<Self, TierError> {
        let spec = cache.state().spec();
        if spec.changes() == 0 {
            return Err(TierError::NoChanges);
        }
        if spec.prefix_reuse() == PrefixReuse::Off {
            return Err(TierError::NoReuse);
        }
        // One bit for each.
        if options.stores.len() > 64 {
            return Err(TierError::TooManyStores { stores: options.stores.len() });
        }
        let groups = group::groups(cache, &options)?;
        let start = |(store, options): (_, StoreOptions)| {
            let lane = Lane::new("kv-tier store", options.threads).map_err(TierError::Thread)?;
            let store = Arc::new(GuardedStore::new(store, options));
            let (writing, next_write, owed) = (HashMap::new(), 0, Owed::default());
            Ok(StoreLane { store, lane, writing, next_write, owed })
        };
        let (keeps_host, wait) = (options.keeps_host, options.wait);
        let stores =
            options.stores.into_iter().map(start).collect::<Result<Vec<_>, TierError>>()?;
        let tiers = stores.iter().map(|lane| lane.store.tier()).chain([Tier::Host]);
        let tiers = tiers.collect::<Vec<_>>().into_iter();
        let (sender, done) = channel();
        Ok(Self {
            identity,
            roots: HashMap::new(),
            groups,
            stores,
            encoder: Lane::new("kv-tier encoder", 1).map_err(TierError::Thread)?,
            done,
            sender,
            prefetches: HashMap::new(),
            abandoned: Vec::new(),
            snapshots: Snapshots::default(),
            exports: Exports::default(),
            removals: Removals::default(),
            prompted: Prompted::default(),
            pinned: Pinned::default(),
            changes: Vec::new(),
            announcements: Announcements::new(
                spec.events() > 0,
                cache.state().encoding_key(),
                tiers,
            ),
            compute: Average::default(),
            keeps_host,
            is_flushing: false,
            lost: 0,
            wait,
            stats: TiersStats::default(),
        })
    }

    /// Does what [`TieredCache::poll`](crate::TieredCache::poll) does.
    pub(crate) fn poll(&mut self, cache: &mut KvCache<B>) -> Result<(), TierError> {
        self.note_encoding(cache.state().encoding_key());
        self.sweep();
        self.take_results();
        self.write_owed();
        self.advance_prefetches();
        self.advance_exports();
        if cache.state().is_step_open() {
            return Ok(());
        }
        self.finish_abandoned(cache)?;
        self.follow_changes(cache);
        self.follow_pins(cache);
        self.finish_copies()?;
        self.follow_snapshots(cache);
        self.copy_exported_states(cache);
        self.begin_copies(cache)?;
        self.announce(cache);
        Ok(())
    }

    /// Does what [`TieredCache::flush`](crate::TieredCache::flush) does.
    pub(crate) fn flush(
        &mut self,
        cache: &mut KvCache<B>,
        deadline: Instant,
    ) -> Result<Unwritten, TierError> {
        if cache.state().is_step_open() {
            return Err(TierError::StepOpen);
        }
        self.lost = 0;
        self.is_flushing = true;
        self.owe_rest();
        let is_done = |tiers: &Self| tiers.is_copied() && !tiers.can_write(Instant::now());
        let flushed = self.poll_until(cache, deadline, is_done);
        self.is_flushing = false;
        flushed.map(|_| self.unwritten())
    }

    /// Does what [`TieredCache::drain`](crate::TieredCache::drain) does.
    pub(crate) fn drain(
        &mut self,
        cache: &mut KvCache<B>,
        deadline: Instant,
    ) -> Result<bool, TierError> {
        if cache.state().is_step_open() {
            return Err(TierError::StepOpen);
        }
        self.poll_until(cache, deadline, |tiers| {
            let writes = tiers.stores.iter().any(|lane| !lane.writing.is_empty());
            let reads = tiers.groups.iter().any(|group| !group.reading.is_empty());
            tiers.is_copied() && !writes && !reads
        })
    }

    /// Polls until a condition holds; returns whether it did before the deadline.
    fn poll_until(
        &mut self,
        cache: &mut KvCache<B>,
        deadline: Instant,
        is_done: impl Fn(&Self) -> bool,
    ) -> Result<bool, TierError> {
        /// How long one wait for a thread lasts at most, beside which copies of the device go on.
        const PAUSE: Duration = Duration::from_millis(1);
        loop {
            self.poll(cache)?;
            if is_done(self) {
                return Ok(true);
            }
            let Some(left) = deadline.checked_duration_since(Instant::now()) else {
                return Ok(false);
            };
            if let Ok(done) = self.done.recv_timeout(left.min(PAUSE)) {
                self.take_result(done);
            }
        }
    }

    /// Does what [`TieredCache::note_compute`](crate::TieredCache::note_compute) does.
    pub(crate) fn note_compute(&mut self, tokens: u32, time: Duration) {
        if tokens > 0 {
            self.compute.note(time.as_secs_f64() / f64::from(tokens));
        }
    }

    /// Does what [`TieredCache::stats`](crate::TieredCache::stats) does.
    pub(crate) fn stats(&self) -> TiersStats {
        let mut stats = self.stats.clone();
        for group in &self.groups {
            let bytes = to_u64(group.spec.chunk_bytes());
            let chunks = to_u64(group.host.len());
            stats.host_chunks += chunks;
            stats.host_bytes += chunks * bytes;
            let capacity = to_u64(group.capacity) * bytes;
            stats.host_capacity += capacity;
        }
        stats.stores = self.stores.iter().map(|lane| lane.store.stats()).collect();
        stats
    }

    /// Looks for calls of stores that hang.
    fn sweep(&self) {
        for StoreLane { store, lane, .. } in &self.stores {
            store.note_hung(&lane.sweep());
        }
    }

    fn take_results(&mut self) {
        while let Ok(done) = self.done.try_recv() {
            self.take_result(done);
        }
    }

    fn take_result(&mut self, done: Done<ChunkOf<B>>) {
        match done {
            Done::Encoded { record, chunk } => self.note_encoded(&record, chunk),
            Done::Found { prefetch, store, group, chunks, found } => {
                self.note_found(prefetch, store, (group, &chunks), &found);
            }
            Done::Read { record, store, read } => self.note_read(&record, store, read),
            Done::Written { record, store, number, put, left } => {
                self.note_written(&record, (store, number), put, left);
            }
            Done::Exported { export, store, number, at, is_written } => {
                self.note_exported(export, (store, number), at, is_written);
            }
            Done::Removed { call, store, removed } => self.note_removed(call, store, removed),
        }
    }

    /// Returns whether no chunk is on its way from the device to host memory.
    fn is_copied(&self) -> bool {
        self.groups.iter().all(|group| group.to_copy() == 0) && !self.snapshots.is_behind()
    }

    /// Returns the root of the names of a group's chunks; `None` for an adapter without a digest.
    fn root(
        &mut self,
        encoding_key: u128,
        group: usize,
        (salt, adapter): (&[u8], Option<u64>),
    ) -> Option<Arc<ChunkRoot>> {
        /// Roots that nothing uses are dropped when there are more.
        const KEPT: usize = 1024;
        self.note_encoding(encoding_key);
        let spec = self.groups.get(group)?.spec;
        let key: RootKey = (spec.group(), salt.into(), adapter);
        if let Some(root) = self.roots.get(&key) {
            return root.clone();
        }
        if self.roots.len() >= KEPT {
            self.roots.retain(|_, root| root.as_ref().is_some_and(|r| Arc::strong_count(r) > 1));
        }
        let root = self.identity.root(&spec, encoding_key, salt, adapter).ok().map(Arc::new);
        self.roots.insert(key, root.clone());
        root
    }
}

impl<B: Backend> fmt::Debug for Tiers<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tiers")
            .field("identity", &self.identity)
            .field("stores", &self.stores)
            .field("prefetches", &self.prefetches.len())
            .field("stats", &self.stats)
            .finish_non_exhaustive()
    }
}

impl<B: Backend> Drop for Tiers<B> {
    /// Ends the threads. A thread that hangs in a store is abandoned after a quarter of a second,
    /// for all stores together. Copies from the device that have not ended are of no use; steps
    /// wait for them, on the device, before they overwrite the blocks.
    fn drop(&mut self) {
        self.stores.iter().for_each(|store| store.lane.close());
        self.encoder.close();
    }
}
