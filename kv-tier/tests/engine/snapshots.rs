//! Recurrent states in the tiers: host memory, stores and handoffs.
use std::sync::Arc;
use std::time::{Duration, Instant};

use kv_core::events::Tier;
use kv_core::{CacheSpec, StartOptions};
use kv_tier::policy::{WritePolicy, WriteRule};
use kv_tier::{
    BlockStore, DiskOptions, DiskStore, ExportState, Handoff, MemoryStore, StoreOptions,
    TierOptions, Wait,
};

use crate::recurrence::with_states;
use crate::support::{Engine, builder, identity, patient, text};

fn plain() -> StartOptions<'static> {
    StartOptions::default()
}

/// Of three layers two have states alone.
fn hybrid(snapshots: u32) -> CacheSpec {
    let spec = builder().layers(3).paged(4, 256).changes(256).events(1 << 12);
    with_states(spec, &[1, 2], (snapshots, 1)).build().unwrap()
}

fn specs() -> [CacheSpec; 4] {
    let spec = || builder().layers(3).paged(4, 256).changes(256).events(1 << 12);
    let alone = CacheSpec::builder().layers(2).paged(4, 256).changes(256);
    [
        hybrid(40),
        // No layer has rows.
        with_states(alone, &[0, 1], (40, 1)).build().unwrap(),
        with_states(spec().window_left(9), &[1], (40, 1)).build().unwrap(),
        with_states(spec(), &[2], (40, 1)).group([1], |of| of.window_left(5)).build().unwrap(),
    ]
}

/// Returns settings with chunks of 16 tokens.
fn options() -> TierOptions {
    TierOptions::new().with_chunk_blocks(4).with_wait(Wait::All)
}

fn lane(store: &impl BlockStore) -> StoreOptions {
    patient(store).with_write(WriteRule::new(WritePolicy::OnPublish))
}

#[test]
fn a_prompt_computes_its_new_tokens_alone_whatever_its_length() {
    for (number, spec) in specs().into_iter().enumerate() {
        for len in (2..40).chain([64, 65, 150]) {
            let host = options().with_host(4 << 20);
            let mut engine = Engine::new(spec.clone(), identity(), host);
            let prompt = text(1, len);
            engine.run(&prompt, plain());
            engine.forget();
            // The same prompt again computes one token.
            assert_eq!(engine.run(&prompt, plain()).1, len - 1, "spec {number}, {len} tokens");
            engine.forget();
            // The next one of a chat begins with the text.
            let (sequence, reused) = engine.run(&text(1, len + 7), plain());
            assert_eq!(reused, len, "spec {number}, {len} tokens");
            engine.cache.cache_mut().release(sequence).unwrap();
            engine.forget();
            let other = [&prompt[..], &[9, 9, 9]].concat();
            assert_eq!(engine.run(&other, plain()).1, len, "spec {number}, {len} tokens");
            engine.forget();
            engine.assert_nothing_held();
            let stats = engine.cache.stats();
            // With a window, a prompt brings no rows before it: some chunks are not whole again.
            let missed = if number < 2 { stats.offload_missed } else { 0 };
            assert_eq!((missed, stats.unnamed_blocks), (0, 0), "spec {number}, {len}: {stats:?}");
        }
    }
}

#[test]
fn another_process_goes_on_from_a_store() {
    let folder = tempfile::tempdir().unwrap();
    let disk = DiskStore::open(folder.path(), DiskOptions::new(64 << 20).with_floor(0)).unwrap();
    let stores: [Arc<dyn BlockStore>; 2] = [Arc::new(MemoryStore::new(64 << 20)), Arc::new(disk)];
    for (number, spec) in specs().into_iter().enumerate() {
        for store in &stores {
            let engine = || {
                let options =
                    options().with_store_options(Box::new(Arc::clone(store)), lane(store));
                Engine::new(spec.clone(), identity(), options)
            };
            for len in [2, 3, 4, 5, 15, 16, 17, 31, 33, 70, 131] {
                let prompt = text(number as u32 * 100 + len, len);
                let mut one = engine();
                one.run(&prompt, plain());
                one.forget();
                let mut other = engine();
                assert_eq!(other.run(&prompt, plain()).1, len - 1, "spec {number}, {len}");
                let mut third = engine();
                let next = [&prompt[..], &[7; 9]].concat();
                assert_eq!(third.run(&next, plain()).1, len, "spec {number}, {len}");
                let stats = third.cache.stats();
                assert!(stats.loaded_tokens >= u64::from(len), "{stats:?}");
            }
        }
    }
}

#[test]
fn a_store_is_asked_for_stops_first_and_for_no_more_lengths_than_it_may() {
    let store = Arc::new(MemoryStore::new(64 << 20));
    let with = |lookups| {
        let lane = lane(&store).with_state_lookups(lookups);
        let options = options().with_store_options(Box::new(Arc::clone(&store)), lane);
        Engine::new(hybrid(40), identity(), options)
    };
    let prompt = text(1, 40);
    let mut one = with(4096);
    one.run(&prompt, plain());
    one.forget();
    let next = [&prompt[..], &[7; 200]].concat();
    for (lookups, stops, expected) in [
        (4096, &[][..], 40),
        (160, &[], 0),
        (200, &[], 40),
        (0, &[], 0),
        (40, &[40], 40),
        // The text ended a few tokens before the end of its message.
        (40, &[43], 40),
        (18, &[40], 40),
        (17, &[40], 0),
    ] {
        let mut other = with(lookups);
        let (_, reused) = other.run(&next, plain().with_stops(stops));
        assert_eq!(reused, expected, "{lookups} lookups, stops {stops:?}");
    }
}

#[test]
fn a_handoff_brings_the_state_and_every_row_before_it() {
    const LONG: Duration = Duration::from_secs(30);
    for (number, spec) in specs().into_iter().enumerate() {
        let store = Arc::new(MemoryStore::new(16 << 20));
        let lane = StoreOptions::new(Tier::Store);
        let engine = || {
            let lane = lane.clone();
            let options = options().with_store_options(Box::new(Arc::clone(&store)), lane);
            Engine::new(spec.clone(), identity(), options)
        };
        let (mut prefill, mut decode) = (engine(), engine());
        for len in [2, 3, 17, 32, 33, 100] {
            let prompt = text(len, len);
            // The sequence goes on, and writes to the block in which the state ends.
            let (sequence, _) = prefill.start_alone(&prompt, plain());
            let export = prefill.cache.export_prefill(sequence, 0, LONG).unwrap();
            assert_eq!(export.handoff.tokens(), len - 1);
            let more = [&prompt[..], &[5, 6]].concat();
            prefill.cache.poll().unwrap();
            prefill.compute(sequence, &more, len);
            prefill.check(sequence, &more);
            let end = Instant::now() + LONG;
            while prefill.cache.export_state(export.id) != Some(ExportState::Written) {
                assert!(Instant::now() < end, "spec {number}, {len}");
                prefill.cache.poll().unwrap();
            }
            let handoff = Handoff::from_bytes(&export.handoff.to_bytes()).unwrap();
            for prompt in [&prompt, &more] {
                let prefetch = decode.cache.import_prefill(&handoff, prompt, &plain()).unwrap();
                decode.wait(prefetch);
                let (sequence, reused) = decode.start(prefetch, prompt, plain());
                assert_eq!(reused, len - 1, "spec {number}, {len}");
                decode.cache.cache_mut().release(sequence).unwrap();
                assert!(decode.cache.cache_mut().reset_prefixes().unwrap());
            }
            let other = text(len + 1, len);
            let refused = decode.cache.import_prefill(&handoff, &other, &plain());
            assert!(len < 10 || refused.is_err(), "{refused:?}");
        }
    }
}

#[test]
fn what_is_forgotten_is_gone_with_its_states() {
    for spec in specs() {
        let store = Arc::new(MemoryStore::new(16 << 20));
        let with = options().with_host(4 << 20);
        let with = with.with_store_options(Box::new(Arc::clone(&store)), lane(&store));
        let mut engine = Engine::new(spec.clone(), identity(), with);
        let prompt = text(1, 45);
        engine.run(&prompt, plain());
        engine.forget();
        assert_eq!(engine.run(&prompt, plain()).1, 44);
        engine.forget();
        let end = Instant::now() + Duration::from_secs(30);
        let forgotten = engine.cache.forget_prefix(&prompt, plain(), 0, end).unwrap();
        assert!(forgotten.is_complete() && forgotten.host_chunks > 0, "{forgotten:?}");
        assert_eq!(engine.run(&prompt, plain()).1, 0);
        engine.forget();
        let left = engine.cache.forget_all(end).unwrap();
        assert!(left.is_complete() && store.held_bytes() == 0, "{left:?}");
    }
}

#[test]
fn with_little_memory_other_lengths_are_found_or_none() {
    // Room for two states, and for a few chunks of rows.
    for bytes in [64 << 10, 128 << 10, 1 << 20] {
        let mut engine = Engine::new(hybrid(2), identity(), options().with_host(bytes));
        for round in 0..30 {
            let prompt = text(round % 3, 20 + 13 * (round % 5));
            let (sequence, _) = engine.run(&prompt, plain());
            engine.cache.cache_mut().release(sequence).unwrap();
            engine.forget();
        }
        engine.assert_nothing_held();
        assert!(engine.cache.stats().host_chunks > 0);
    }
}
