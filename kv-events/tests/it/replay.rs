//! Batches of the past, and lives of a process.
use std::time::Duration;

use crate::client::Client;
use crate::consumer::Consumer;
use crate::support::{
    assert_contiguous, bind, has, hash, options, prompt, stored, subscribe, until, wait_until,
};

#[test]
fn a_replay_is_contiguous_and_the_same_bytes() {
    let publisher = bind(&options());
    let mut client = subscribe(&publisher);
    for seed in 1..20 {
        publisher.publish(&stored(&prompt(seed, 2)));
    }
    let live: Vec<_> = (0..12).map(|_| client.batch()).collect();
    assert_contiguous(&live);
    for (socket_type, envelope) in
        [("DEALER", &[&b""[..]][..]), ("REQ", &[b""]), ("DEALER", &[]), ("ROUTER", &[b"id", b""])]
    {
        let mut asker = Client::new(publisher.addresses().replay.unwrap(), socket_type, 1);
        let start = live[3].number;
        let batches = asker.replay(envelope, start);
        assert_contiguous(&batches);
        assert_eq!(batches[..9], live[3..], "{socket_type} {envelope:?}");
        let next = batches.last().unwrap().number + 1;
        let later = asker.replay(envelope, next);
        assert!(later.first().is_none_or(|batch| batch.number == next));
    }
    let stats = publisher.stats();
    assert_eq!((stats.replays, stats.snapshots, stats.faulty_peers), (8, 0, 0));
}

#[test]
fn what_is_gone_is_answered_by_the_end_and_a_live_snapshot() {
    // No heartbeat helps here.
    let publisher = bind(&options().heartbeat(Duration::from_mins(1)).kept(2, 1 << 20));
    let blocks = prompt(1, 3);
    for (count, block) in (1..).zip(&blocks) {
        publisher.publish(&stored(std::slice::from_ref(block)));
        wait_until(|| publisher.stats().batches == count);
    }
    wait_until(|| publisher.stats().blocks == 3);
    let mut client = subscribe(&publisher);
    let mut asker = Client::new(publisher.addresses().replay.unwrap(), "DEALER", 1);
    for start in [0, 5, u64::MAX] {
        assert_eq!(asker.replay(&[b""], start), [], "{start}");
        let batch = client.batch();
        assert!(has(&batch, "AllBlocksCleared") && has(&batch, "BlockStored"));
        let mut consumer = Consumer::default();
        consumer.apply(&batch);
        assert!(
            consumer.blocks.keys().eq({
                let mut hashes: Vec<_> = blocks.iter().map(hash).collect();
                hashes.sort_unstable();
                hashes
            }
            .iter())
        );
        // A snapshot waits until the last one is old enough.
        let numbers = asker.replay(&[b""], batch.number);
        assert_eq!(numbers, [batch]);
    }
    assert_eq!(publisher.stats().snapshots, 3);
}

#[test]
fn many_joiners_get_one_snapshot() {
    let publisher = bind(&options().snapshot_spacing(Duration::from_mins(10)));
    let mut asker = Client::new(publisher.addresses().replay.unwrap(), "DEALER", 1);
    for _ in 0..20 {
        assert_eq!(asker.replay(&[b""], 0), []);
    }
    wait_until(|| publisher.stats().snapshots == 1);
    std::thread::sleep(Duration::from_millis(60));
    assert_eq!(publisher.stats().snapshots, 1);
}

#[test]
fn malformed_requests_end_the_connection() {
    let publisher = bind(&options());
    for (request, faults) in [(&b"\0\x03abc"[..], 1), (b"\x01\x00\x00\x00", 2)] {
        let mut asker = Client::new(publisher.addresses().replay.unwrap(), "DEALER", 1);
        asker.send(request);
        Client::wait_for_end(&mut asker.stream);
        wait_until(|| publisher.stats().faulty_peers == faults);
    }
    assert_eq!(publisher.stats().replays, 0);
}

#[test]
fn numbers_of_a_later_life_are_larger() {
    let publisher = bind(&options());
    let mut client = subscribe(&publisher);
    publisher.publish(&stored(&prompt(1, 2)));
    let last = until(&mut client, |batch| has(batch, "BlockStored")).pop().unwrap();
    let former = publisher.addresses();
    drop(publisher);
    let options = options().endpoint(format!("tcp://{}", former.events));
    let publisher = bind(&options);
    let mut client = subscribe(&publisher);
    let first = client.batch();
    assert!(first.number > last.number && first.number - last.number > 1 << 20);
    assert!(has(&first, "AllBlocksCleared"), "the heartbeat of an empty cache clears the old life");
    let mut asker = Client::new(publisher.addresses().replay.unwrap(), "DEALER", 1);
    assert_eq!(asker.replay(&[b""], last.number), []);
    let batches = until(&mut client, |_| publisher.stats().snapshots == 1);
    assert_contiguous(&batches);
}

#[test]
fn without_a_replay_socket_a_subscriber_gets_a_snapshot() {
    let options = options().heartbeat(Duration::from_mins(1));
    let silent = bind(&options);
    let spec = kv_core::CacheSpec::builder().layers(1).kv_heads(1).head_dim(1).paged(4, 8);
    let options = kv_events::PublisherOptions::new(&spec.build().unwrap());
    let publisher = bind(&options.endpoint("tcp://127.0.0.1:0"));
    publisher.publish(&stored(&prompt(1, 2)));
    wait_until(|| publisher.stats().blocks == 2);
    let mut client = subscribe(&publisher);
    let batch = until(&mut client, |batch| has(batch, "AllBlocksCleared")).pop().unwrap();
    assert!(has(&batch, "BlockStored"));
    assert_eq!(publisher.addresses().replay, None);
    drop(subscribe(&silent));
    assert_eq!(silent.stats().snapshots, 0);
}
