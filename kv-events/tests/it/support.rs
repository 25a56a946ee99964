//! Caches without a device, and their events.
use std::time::{Duration, Instant};

use kv_core::events::{Event, EventKind, StoredBlock, Tier};
use kv_core::eviction::Priority;
use kv_core::reuse::BlockKey;
use kv_core::{CacheSpec, GroupId};
use kv_events::{Publisher, PublisherOptions};

use crate::client::{Batch, Client};

pub(crate) const BLOCK: u32 = 4;

/// Options for a cache of blocks of four tokens, on free ports, with quick heartbeats.
pub(crate) fn options() -> PublisherOptions {
    let spec = CacheSpec::builder().layers(1).kv_heads(1).head_dim(1).paged(BLOCK, 8);
    PublisherOptions::new(&spec.build().unwrap())
        .endpoint("tcp://127.0.0.1:0")
        .replay_endpoint("tcp://127.0.0.1:0")
        .heartbeat(Duration::from_millis(20))
        .snapshot_spacing(Duration::from_millis(50))
}

pub(crate) fn bind(options: &PublisherOptions) -> Publisher {
    Publisher::bind(options).unwrap()
}

/// Subscribes to everything, and waits until the publisher knows.
pub(crate) fn subscribe(publisher: &Publisher) -> Client {
    let before = publisher.stats().subscribers;
    let client = Client::subscriber(publisher.addresses().events, b"");
    wait_until(|| publisher.stats().subscribers > before);
    client
}

/// The blocks of a prompt.
pub(crate) fn prompt(seed: u32, blocks: u32) -> Vec<StoredBlock> {
    salted_prompt(seed, blocks, b"", None)
}

pub(crate) fn salted_prompt(
    seed: u32,
    blocks: u32,
    salt: &[u8],
    adapter: Option<u64>,
) -> Vec<StoredBlock> {
    let mut parent = BlockKey::root(7, salt, adapter);
    let block = |index: u32| {
        let tokens: Vec<u32> = (0..BLOCK).map(|i| seed * 1000 + index * BLOCK + i).collect();
        let key = parent.child(&tokens, &[]);
        let stored = StoredBlock {
            group: GroupId(0),
            key,
            parent,
            index,
            tokens: tokens.into(),
            tier: Tier::Device,
            priority: Priority::default(),
            salt: salt.into(),
            adapter,
        };
        parent = key;
        stored
    };
    (0..blocks).map(block).collect()
}

pub(crate) fn stored(blocks: &[StoredBlock]) -> Vec<Event> {
    events(blocks.iter().cloned().map(EventKind::Stored))
}

pub(crate) fn removed(blocks: &[StoredBlock]) -> Vec<Event> {
    events(blocks.iter().map(|block| EventKind::Removed {
        group: block.group,
        key: block.key,
        tier: block.tier,
    }))
}

pub(crate) fn on(tier: Tier, blocks: &[StoredBlock]) -> Vec<StoredBlock> {
    blocks.iter().cloned().map(|block| StoredBlock { tier, ..block }).collect()
}

pub(crate) fn events(kinds: impl IntoIterator<Item = EventKind>) -> Vec<Event> {
    (0..).zip(kinds).map(|(id, kind)| Event { id, kind }).collect()
}

pub(crate) fn hash(block: &StoredBlock) -> u64 {
    u64::try_from(block.key.0 & u128::from(u64::MAX)).unwrap()
}

pub(crate) fn wait_until(mut is_true: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !is_true() {
        assert!(begin.elapsed() < Duration::from_secs(10), "waited in vain");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Returns the batches that come until one fits, and that one.
pub(crate) fn until(client: &mut Client, fits: impl Fn(&Batch) -> bool) -> Vec<Batch> {
    let mut batches = Vec::new();
    loop {
        let batch = client.batch();
        let is_last = fits(&batch);
        batches.push(batch);
        if is_last {
            return batches;
        }
    }
}

/// Returns whether a batch has an event of a type.
pub(crate) fn has(batch: &Batch, kind: &str) -> bool {
    batch.events().iter().any(|event| event.get("type").str() == kind)
}

/// Asserts that numbers have no gap.
pub(crate) fn assert_contiguous(batches: &[Batch]) {
    for pair in batches.windows(2) {
        assert_eq!(pair[0].number + 1, pair[1].number);
    }
}
