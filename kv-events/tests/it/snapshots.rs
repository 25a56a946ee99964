//! Heartbeats, live snapshots and lost events.
use std::time::Duration;

use kv_core::events::{Event, EventKind, Snapshot, StoredBlock, Tier};

use crate::client::Client;
use crate::consumer::Consumer;
use crate::support::{
    assert_contiguous, bind, has, hash, on, options, prompt, removed, stored, subscribe, until,
    wait_until,
};

#[test]
fn heartbeats_clear_while_nothing_can_be_reused() {
    let publisher = bind(&options());
    let mut client = subscribe(&publisher);
    let batches: Vec<_> = (0..3).map(|_| client.batch()).collect();
    assert_contiguous(&batches);
    assert!(batches.iter().all(|batch| has(batch, "AllBlocksCleared")));
    let blocks = prompt(1, 2);
    publisher.publish(&stored(&blocks));
    until(&mut client, |batch| has(batch, "BlockStored"));
    assert!((0..3).all(|_| client.batch().events().is_empty()));
    publisher.publish(&removed(&blocks));
    until(&mut client, |batch| has(batch, "BlockRemoved"));
    assert!((0..3).all(|_| has(&client.batch(), "AllBlocksCleared")));
}

#[test]
fn snapshots_have_parents_first_in_batches_of_a_mebibyte() {
    let publisher = bind(&options());
    // Blocks of tokens of five bytes each, in prompts that share a beginning, on two tiers.
    let mut all = Vec::new();
    for seed in 0..40 {
        let tokens = |block: StoredBlock| {
            let tokens: Vec<u32> = block.tokens.iter().map(|token| token + (1 << 30)).collect();
            StoredBlock { tokens: tokens.into(), ..block }
        };
        let mut parent = kv_core::reuse::BlockKey::root(7, b"", None);
        for block in prompt(seed, 1500) {
            let mut block = StoredBlock { parent, ..tokens(block) };
            block.key = parent.child(&block.tokens, &[]);
            parent = block.key;
            all.push(block);
        }
    }
    let lower: Vec<_> = on(Tier::Host, &all).into_iter().step_by(2).collect();
    // Children before parents: the mirror waits for these.
    all.reverse();
    for part in all.chunks(5000).chain(lower.chunks(5000)) {
        publisher.publish(&stored(part));
    }
    wait_until(|| publisher.stats().blocks == 60_000);
    assert!(!publisher.needs_snapshot());
    let mut client = subscribe(&publisher);
    let mut asker = Client::new(publisher.addresses().replay.unwrap(), "DEALER", 1);
    assert_eq!(asker.replay(&[b""], 0), []);
    let mut consumer = Consumer::default();
    let before = until(&mut client, |batch| has(batch, "AllBlocksCleared"));
    consumer.apply(before.last().unwrap());
    let mut batches = vec![before.last().unwrap().clone()];
    while consumer.blocks.len() < 60_000
        || consumer.blocks.values().map(|known| known.media.len()).sum::<usize>() < 90_000
    {
        let batch = client.batch();
        consumer.apply(&batch);
        batches.push(batch);
    }
    assert_contiguous(&batches);
    assert_eq!(consumer.skipped, 0);
    assert!(batches.len() > 2, "{}", batches.len());
    for batch in &batches {
        assert!(batch.payload.len() <= 1 << 20 && batch.events().len() <= 4096);
    }
}

#[test]
fn lost_events_ask_for_a_snapshot_which_replaces_everything() {
    let publisher = bind(&options());
    let mut client = subscribe(&publisher);
    let (old, new) = (prompt(1, 3), prompt(2, 3));
    publisher.publish(&stored(&old));
    until(&mut client, |batch| has(batch, "BlockStored"));
    assert!(!publisher.needs_snapshot());
    publisher.publish(&[Event { id: 3, kind: EventKind::Lost { from: 3, to: 90 } }]);
    assert!(publisher.needs_snapshot());
    // Children before parents, and one block that a lower tier has too.
    let mut blocks: Vec<_> = new.iter().rev().cloned().collect();
    blocks.extend(on(Tier::Store, &new[..1]));
    publisher.reset(&Snapshot { next_id: 95, blocks });
    assert!(!publisher.needs_snapshot());
    // In the snapshot already, and not again.
    let stale = EventKind::Removed { group: new[0].group, key: new[0].key, tier: Tier::Device };
    publisher.publish(&[Event { id: 94, kind: stale }]);
    let mut consumer = Consumer::default();
    let batches = until(&mut client, |batch| has(batch, "AllBlocksCleared"));
    consumer.apply(batches.last().unwrap());
    for _ in 0..3 {
        consumer.apply(&client.batch());
    }
    let mut hashes: Vec<_> = new.iter().map(hash).collect();
    let first = &consumer.blocks[&hashes[0]].media;
    assert!(first.iter().eq(["GPU", "STORAGE"]));
    hashes.sort_unstable();
    assert!(consumer.blocks.keys().eq(&hashes));
    assert_eq!(consumer.skipped, 0);
}

#[test]
fn events_beyond_the_queue_are_counted_and_ask_for_a_snapshot() {
    let publisher = bind(&options().queued_events(10));
    publisher.publish(&stored(&prompt(1, 11)));
    assert!(publisher.needs_snapshot());
    assert_eq!(publisher.stats().dropped_events, 11);
    publisher.reset(&Snapshot { next_id: 11, blocks: prompt(1, 11) });
    wait_until(|| publisher.stats().blocks == 11);
    assert!(!publisher.needs_snapshot());
}

#[test]
fn a_snapshot_comes_again_and_again_where_it_is_wanted() {
    let interval = Duration::from_millis(30);
    let publisher = bind(&options().resync(Some(interval)).snapshot_spacing(Duration::ZERO));
    publisher.publish(&stored(&prompt(1, 2)));
    wait_until(|| publisher.stats().blocks == 2);
    let mut client = subscribe(&publisher);
    for _ in 0..3 {
        let batches = until(&mut client, |batch| has(batch, "AllBlocksCleared"));
        assert!(has(batches.last().unwrap(), "BlockStored"));
    }
    assert!(publisher.stats().snapshots >= 3);
}
