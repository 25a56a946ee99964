//! Handoffs between two engines that share a store.
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use kv_core::events::Tier;
use kv_core::{CacheSpec, SequenceId, StartOptions};
use kv_tier::handoff::HandoffGroup;
use kv_tier::policy::{WritePolicy, WriteRule};
use kv_tier::{
    BlockStore, ExportId, ExportState, Handoff, HandoffError, Identity, MemoryStore, ModelDigest,
    StoreOptions, TierOptions,
};

use crate::support::{Engine, builder, identity, spec, text};

const LONG: Duration = Duration::from_secs(30);

fn plain() -> StartOptions<'static> {
    StartOptions::default()
}

/// Returns settings with chunks of 16 tokens.
fn options(store: impl BlockStore) -> TierOptions {
    let lane = StoreOptions::new(Tier::Store);
    TierOptions::new().with_store_options(Box::new(store), lane).with_chunk_blocks(4)
}

fn engines(spec: fn() -> CacheSpec) -> (Arc<MemoryStore>, [Engine; 2]) {
    let store = Arc::new(MemoryStore::new(16 << 20));
    let engines = [(); 2].map(|()| Engine::new(spec(), identity(), options(Arc::clone(&store))));
    (store, engines)
}

/// Polls an engine until its export has ended.
fn finish(engine: &mut Engine, export: ExportId) -> Option<ExportState> {
    loop {
        engine.cache.poll().unwrap();
        match engine.cache.export_state(export) {
            Some(ExportState::OnTheWay { .. }) => std::thread::sleep(Duration::from_micros(100)),
            ended => return ended,
        }
    }
}

#[test]
fn a_decode_engine_reuses_all_whole_chunks() {
    let (_, [mut prefill, mut decode]) = engines(|| spec(256));
    // Too short for the rule of the store, in both engines.
    for (prompt, whole) in [(text(1, 100), 96), (text(2, 64), 64), (text(3, 7), 0)] {
        let (sequence, _) = prefill.start_alone(&prompt, plain());
        let export = prefill.cache.export_prefill(sequence, 0, LONG).unwrap();
        assert_eq!(export.handoff.tokens(), whole);
        assert_eq!(finish(&mut prefill, export.id), Some(ExportState::Written));
        let handoff = Handoff::from_bytes(&export.handoff.to_bytes()).unwrap();
        let next = [&prompt[..], &[5]].concat();
        let prefetch = decode.cache.import_prefill(&handoff, &next, &plain());
        let prefetch = prefetch.unwrap();
        decode.wait(prefetch);
        assert_eq!(decode.start(prefetch, &next, plain()).1, whole);
        // All but the last token of the prompt itself.
        decode.forget();
        let prefetch = decode.cache.import_prefill(&handoff, &prompt, &plain());
        let prefetch = prefetch.unwrap();
        decode.wait(prefetch);
        let chunk = if whole == 64 { 48 } else { whole };
        assert_eq!(decode.start(prefetch, &prompt, plain()).1, chunk);
        decode.forget();
    }
    for mut engine in [prefill, decode] {
        engine.forget();
        engine.assert_nothing_held();
    }
}

#[test]
fn a_decode_engine_waits_for_chunks_that_are_on_their_way() {
    let (_, [mut prefill, mut decode]) = engines(|| spec(256));
    let prompt = text(1, 100);
    let (sequence, _) = prefill.start_alone(&prompt, plain());
    let export = prefill.cache.export_prefill(sequence, 0, LONG).unwrap();
    let state = prefill.cache.export_state(export.id);
    assert_eq!(state, Some(ExportState::OnTheWay { chunks: 6 }));
    let options = plain();
    let prefetch = decode.cache.import_prefill(&export.handoff, &prompt, &options).unwrap();
    for _ in 0..20 {
        decode.cache.poll().unwrap();
        assert!(!decode.cache.is_ready(prefetch));
        std::thread::sleep(Duration::from_millis(1));
    }
    // The sequence may end before it is written.
    prefill.cache.cache_mut().release(sequence).unwrap();
    assert_eq!(finish(&mut prefill, export.id), Some(ExportState::Written));
    let start = Instant::now();
    decode.wait(prefetch);
    assert!(start.elapsed() < LONG / 2, "it is found when it has come");
    assert_eq!(decode.start(prefetch, &prompt, options).1, 96);
}

#[test]
fn what_has_not_come_in_time_is_computed() {
    let (store, [mut prefill, _]) = engines(|| spec(256));
    let prompt = text(1, 100);
    let (sequence, _) = prefill.start_alone(&prompt, plain());
    let (time, start) = (Duration::from_millis(60), Instant::now());
    let export = prefill.cache.export_prefill(sequence, 0, time).unwrap();
    // Before the time has passed, and after it.
    for _ in 0..2 {
        let mut decode = Engine::new(spec(256), identity(), options(Arc::clone(&store)));
        let prefetch = decode.cache.import_prefill(&export.handoff, &prompt, &plain()).unwrap();
        decode.wait(prefetch);
        assert!(start.elapsed() >= Duration::from_millis(58), "{:?}", start.elapsed());
        assert_eq!(decode.start(prefetch, &prompt, plain()).1, 0);
        assert_eq!(decode.cache.stats().stores[0].reads, 0);
    }
    std::thread::sleep(time.saturating_sub(start.elapsed()));
    assert_eq!(finish(&mut prefill, export.id), None);
}

#[test]
fn windows_and_groups_are_handed_over() {
    let (_, [mut prefill, mut decode]) = engines(|| {
        let spec = builder().paged(4, 256).changes(999).window_left(20).sink_tokens(2);
        spec.group([1], |group| group.paged(8, 128)).build().unwrap()
    });
    let prompt = text(1, 150);
    let (sequence, _) = prefill.start_alone(&prompt, plain());
    let export = prefill.cache.export_prefill(sequence, 0, LONG).unwrap();
    // Ends of chunks of 16 and of 32 tokens.
    assert_eq!(export.handoff.tokens(), 128);
    assert_eq!(finish(&mut prefill, export.id), Some(ExportState::Written));
    let prefetch = decode.cache.import_prefill(&export.handoff, &prompt, &plain()).unwrap();
    decode.wait(prefetch);
    assert_eq!(decode.start(prefetch, &prompt, plain()).1, 128);
}

#[test]
fn handoffs_of_others_are_refused() {
    let (store, [mut prefill, mut decode]) = engines(|| spec(256));
    let prompt = text(1, 100);
    let (sequence, _) = prefill.start_alone(&prompt, plain());
    let export = prefill.cache.export_prefill(sequence, 0, LONG).unwrap();
    let handoff = export.handoff;
    let import = |engine: &mut Engine, prompt: &[u32], options: StartOptions<'_>| {
        engine.cache.import_prefill(&handoff, prompt, &options).unwrap_err()
    };
    let root = import(&mut decode, &prompt, plain().with_salt(b"x"));
    assert!(matches!(root, HandoffError::Root { .. }), "{root}");
    let adapter = import(&mut decode, &prompt, plain().with_adapter(1));
    assert!(matches!(adapter, HandoffError::UnknownAdapter(_)), "{adapter}");
    for other in [text(2, 100), prompt[..95].to_vec(), Vec::new()] {
        assert_eq!(import(&mut decode, &other, plain()), HandoffError::Prompt);
    }
    let others = Identity::new(ModelDigest::of_bytes(b"others"));
    let mut other = Engine::new(spec(256), others, options(Arc::clone(&store)));
    assert!(matches!(import(&mut other, &prompt, plain()), HandoffError::Root { .. }));
    let sizes = options(Arc::clone(&store)).with_chunk_blocks(8);
    let mut other = Engine::new(spec(256), identity(), sizes);
    assert!(matches!(import(&mut other, &prompt, plain()), HandoffError::Root { .. }));
    let two = [handoff.groups(), handoff.groups()].concat();
    let two: Vec<HandoffGroup> = two;
    let two = Handoff::new(96, SystemTime::now() + LONG, two);
    let groups = decode.cache.import_prefill(&two, &prompt, &plain());
    assert_eq!(groups, Err(HandoffError::Groups { expected: 1, got: 2 }));
    assert_eq!(decode.cache.stats().prefetches, 0);

    let mut export =
        |sequence, store| prefill.cache.export_prefill(sequence, store, LONG).unwrap_err();
    assert_eq!(export(SequenceId(9), 0), HandoffError::NoSequence);
    assert_eq!(export(sequence, 1), HandoffError::NoStore { store: 1, stores: 1 });
    let never = StoreOptions::new(Tier::Store).with_write(WriteRule::new(WritePolicy::Never));
    let never = TierOptions::new().with_store_options(Box::new(store), never);
    let mut reader = Engine::new(spec(256), identity(), never);
    let (sequence, _) = reader.start_alone(&prompt, plain());
    let refused = reader.cache.export_prefill(sequence, 0, LONG);
    assert_eq!(refused, Err(HandoffError::NoStore { store: 0, stores: 1 }));
}

#[test]
fn a_store_without_room_fails_the_export() {
    let store = options(MemoryStore::new(1000));
    let mut prefill = Engine::new(spec(256), identity(), store);
    let (sequence, _) = prefill.start_alone(&text(1, 100), plain());
    let export = prefill.cache.export_prefill(sequence, 0, LONG).unwrap();
    assert_eq!(finish(&mut prefill, export.id), Some(ExportState::Failed));
    prefill.forget();
    prefill.assert_nothing_held();
}

#[test]
fn what_the_store_has_is_not_written_again() {
    let (_, [mut one, mut other]) = engines(|| spec(256));
    for (engine, writes) in [(&mut one, 6), (&mut other, 0)] {
        let (sequence, _) = engine.start_alone(&text(1, 100), plain());
        let export = engine.cache.export_prefill(sequence, 0, LONG).unwrap();
        assert_eq!(finish(engine, export.id), Some(ExportState::Written));
        assert_eq!(engine.cache.stats().stores[0].writes, writes);
    }
}
