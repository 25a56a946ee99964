//! Forgotten content does not come back.
use std::sync::Arc;
use std::time::{Duration, Instant};

use kv_core::StartOptions;
use kv_tier::policy::{WritePolicy, WriteRule};
use kv_tier::{
    BlockStore, DiskOptions, DiskStore, Identity, MemoryStore, ModelDigest, StoreErrorKind,
    TierError, TierOptions,
};

use crate::store::{HangStore, Operation};
use crate::support::{Engine, identity, patient, spec, text};

fn plain() -> StartOptions<'static> {
    StartOptions::default()
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(30)
}

/// Returns options of chunks of 8 tokens in host memory and in a store, which gets everything at
/// once.
fn options(store: impl BlockStore) -> TierOptions {
    let lane = patient(&store).with_write(WriteRule::new(WritePolicy::OnPublish));
    let options = TierOptions::new().with_host(4 << 20).with_chunk_blocks(2);
    options.with_store_options(Box::new(store), lane)
}

fn engine(store: impl BlockStore) -> Engine {
    Engine::new(spec(512), identity(), options(store))
}

/// Returns what a process that writes nothing reuses.
fn found(store: impl BlockStore, prompt: &[u32], options: StartOptions<'_>) -> u32 {
    let lane = patient(&store).with_write(WriteRule::new(WritePolicy::Never));
    let tiers = TierOptions::new().with_chunk_blocks(2).with_store_options(Box::new(store), lane);
    Engine::new(spec(512), identity(), tiers).run(prompt, options).1
}

fn run(engine: &mut Engine, prompt: &[u32], options: StartOptions<'_>) -> u32 {
    let (sequence, reused) = engine.run(prompt, options);
    engine.cache.cache_mut().release(sequence).unwrap();
    reused
}

/// Checks every way to forget a prompt, over one kind of store.
fn check<S: BlockStore>(open: impl Fn() -> S) {
    let (forgotten, other) = (text(1, 81), text(2, 81));
    let salted = plain().with_salt(b"a");
    let fill = |engine: &mut Engine| {
        for prompt in [&forgotten, &other] {
            run(engine, prompt, plain());
            run(engine, prompt, salted);
        }
    };
    let of_other = |prompt: &[u32], options: StartOptions<'_>| found(open(), prompt, options);
    // Before anything is copied, after all is written, and after the device has lost it.
    for when in 0..3 {
        let mut first = engine(open());
        fill(&mut first);
        if when > 0 {
            first.flush();
        }
        if when > 1 {
            first.forget();
        }
        let Engine { cache, .. } = &mut first;
        let done = cache.forget_prefix(&forgotten, plain(), 0, soon()).unwrap();
        assert!(done.is_complete(), "{done:?}");
        first.flush();
        // The 8 tokens that both share stay for the other.
        assert_eq!(run(&mut first, &other, plain()), 80, "{when}");
        assert_eq!(of_other(&forgotten, plain()), 8, "{when}");
        assert_eq!(of_other(&other, plain()), 80, "{when}");
        assert_eq!(of_other(&forgotten, salted), 80, "{when}");
        first.forget();
        assert_eq!(run(&mut first, &forgotten, plain()), 8, "{when}");
        first.flush();
        assert_eq!(of_other(&forgotten, plain()), 80, "what is computed anew is kept");

        let Engine { cache, .. } = &mut first;
        let done = cache.forget_salt(b"a", soon()).unwrap();
        assert!(done.is_complete(), "{done:?}");
        first.flush();
        for prompt in [&forgotten, &other] {
            assert_eq!(of_other(prompt, salted), 0, "{when}");
            assert_eq!(of_other(prompt, plain()), 80, "{when}");
        }
    }
}

#[test]
fn a_store_in_memory_forgets() {
    let store = Arc::new(MemoryStore::new(64 << 20));
    check(|| Arc::clone(&store));
}

#[test]
fn a_folder_forgets() {
    let folder = tempfile::tempdir().unwrap();
    check(|| DiskStore::open(folder.path(), DiskOptions::new(64 << 20).with_floor(0)).unwrap());
}

#[cfg(feature = "seal")]
#[test]
fn sealed_stores_forget() {
    let store = Arc::new(MemoryStore::new(64 << 20));
    let open = || kv_tier::SealedStore::new(Arc::clone(&store), &[7; 32]);
    check(open);
    let mut engine = engine(open());
    let done = engine.cache.forget_all(soon()).unwrap();
    assert_eq!(done.failures[0].error.kind(), StoreErrorKind::Unsupported, "{done:?}");
}

#[test]
fn a_beginning_can_be_kept() {
    let store = Arc::new(MemoryStore::new(64 << 20));
    let mut first = engine(Arc::clone(&store));
    let prompt = text(1, 81);
    run(&mut first, &prompt, plain());
    first.flush();
    first.forget();
    let Engine { cache, .. } = &mut first;
    // The fifth chunk has tokens that are forgotten.
    let done = cache.forget_prefix(&prompt, plain(), 36, soon()).unwrap();
    assert_eq!((done.host_chunks, done.is_complete()), (6, true), "{done:?}");
    assert_eq!(run(&mut first, &prompt, plain()), 32);
    assert_eq!(found(Arc::clone(&store), &prompt, plain()), 32);
}

#[test]
fn a_live_sequence_is_forgotten_and_goes_on() {
    let store = Arc::new(MemoryStore::new(64 << 20));
    let mut first = engine(Arc::clone(&store));
    let (prompt, more) = (text(1, 81), text(1, 200));
    let (sequence, _) = first.run(&prompt, plain());
    first.flush();
    let Engine { cache, .. } = &mut first;
    let done = cache.forget_sequence(sequence, soon()).unwrap();
    assert!(done.is_complete() && done.blocks == 20 && done.host_chunks == 10, "{done:?}");
    // It offers nothing any more.
    first.compute(sequence, &more, 81);
    first.check(sequence, &more);
    first.flush();
    assert_eq!(store.held_bytes(), 0);
    assert_eq!(run(&mut first, &prompt, plain()), 0);
    let Engine { cache, .. } = &mut first;
    assert_eq!(cache.forget_sequence(sequence, soon()).unwrap().blocks, 0);
    let unknown = cache.forget_sequence(kv_core::SequenceId(99), soon()).unwrap_err();
    assert!(matches!(unknown, TierError::Cache(_)), "{unknown}");
}

/// The device keeps what a sequence holds, and the tiers what it may need to come back.
#[test]
fn what_another_sequence_holds_or_a_tier_continues_is_kept() {
    let store = Arc::new(MemoryStore::new(64 << 20));
    let mut first = engine(Arc::clone(&store));
    let (short, long) = (text(1, 41), text(1, 81));
    let (held, _) = first.run(&long, plain());
    first.flush();
    for released in [false, true] {
        if released {
            first.cache.cache_mut().release(held).unwrap();
            assert!(first.cache.cache_mut().reset_prefixes().unwrap());
        }
        let Engine { cache, .. } = &mut first;
        let done = cache.forget_prefix(&short, plain(), 0, soon()).unwrap();
        assert_eq!((done.blocks, done.host_chunks), (0, 0), "{done:?}");
        assert_eq!(found(Arc::clone(&store), &long, plain()), 80);
    }
}

#[test]
fn everything_of_a_model_is_forgotten_and_nothing_of_another() {
    let store = Arc::new(MemoryStore::new(64 << 20));
    let prompt = text(1, 81);
    let stranger = || {
        let other = Identity::new(ModelDigest::of_bytes(b"others"));
        Engine::new(spec(512), other, options(Arc::clone(&store)))
    };
    let mut other = stranger();
    run(&mut other, &prompt, plain());
    other.flush();
    let mut first = engine(Arc::clone(&store));
    let (sequence, _) = first.run(&prompt, plain().with_salt(b"a"));
    let Engine { cache, .. } = &mut first;
    let held = cache.forget_all(soon()).unwrap_err();
    assert!(matches!(held, TierError::Held), "{held}");
    first.cache.cache_mut().release(sequence).unwrap();
    first.flush();
    let prefetch = first.cache.prefetch(&prompt, &plain().with_salt(b"a"));
    let Engine { cache, .. } = &mut first;
    let done = cache.forget_all(soon()).unwrap();
    assert!(done.is_complete() && done.blocks == 20 && done.host_chunks == 10, "{done:?}");
    // A prompt that had found all of it before computes it.
    assert_eq!(first.start(prefetch, &prompt, plain().with_salt(b"a")).1, 0);
    assert_eq!(found(Arc::clone(&store), &prompt, plain().with_salt(b"b")), 0);
    assert_eq!(run(&mut stranger(), &prompt, plain()), 80);
}

/// A store of a caller that cannot list is named, and the others forget.
#[test]
fn a_store_that_cannot_list_is_named() {
    let stores = (Arc::new(MemoryStore::new(64 << 20)), Arc::new(HangStore::new()));
    let lane = patient(&*stores.1).with_write(WriteRule::new(WritePolicy::OnPublish));
    let options = options(Arc::clone(&stores.0));
    let options = options.with_store_options(Box::new(Arc::clone(&stores.1)), lane);
    let mut first = Engine::new(spec(512), identity(), options);
    let prompt = text(1, 81);
    run(&mut first, &prompt, plain());
    first.flush();
    let Engine { cache, .. } = &mut first;
    for done in [cache.forget_salt(b"", soon()), cache.forget_all(soon())] {
        let [failure] = &done.unwrap().failures[..] else { panic!("one store refuses") };
        assert_eq!((failure.store, failure.error.kind()), (1, StoreErrorKind::Unsupported));
        assert_eq!(failure.to_string(), "store 1 (disk)");
        assert!(failure.error.to_string().contains("cannot list"), "{}", failure.error);
    }
    assert_eq!(stores.0.held_bytes(), 0);
    assert_eq!(cache.stats().stores[1].failures, 0, "it works as it should");
    // By their names, it removes chunks.
    let done = cache.forget_prefix(&prompt, plain(), 0, soon()).unwrap();
    assert!(done.is_complete(), "{done:?}");
    assert_eq!(stores.1.within.held_bytes(), 0);
}

/// Writes that wait are given up, one that has begun is named, and is removed by the next call.
#[test]
fn a_write_on_its_way_does_not_bring_back_what_was_forgotten() {
    let store = Arc::new(HangStore::new());
    let mut first = engine(Arc::clone(&store));
    store.hang(Operation::Put, u64::MAX);
    let prompt = text(1, 81);
    let (sequence, _) = first.run(&prompt, plain());
    let end = soon();
    while store.calls(Operation::Put) < 2 || first.cache.stats().offloaded < 10 {
        first.cache.poll().unwrap();
        assert!(Instant::now() < end, "{:?}", first.cache.stats());
    }
    store.wait_hanging(2);
    first.cache.cache_mut().release(sequence).unwrap();
    let Engine { cache, .. } = &mut first;
    let late = Instant::now() + Duration::from_millis(20);
    let done = cache.forget_prefix(&prompt, plain(), 0, late).unwrap();
    assert_eq!(done.failures[0].error.kind(), StoreErrorKind::Timeout, "{done:?}");
    store.release();
    first.flush();
    assert_eq!(store.calls(Operation::Put), 2, "nothing begins any more");
    let Engine { cache, .. } = &mut first;
    assert!(cache.forget_prefix(&prompt, plain(), 0, soon()).unwrap().is_complete());
    assert_eq!(store.within.held_bytes(), 0);
    assert_eq!(run(&mut first, &prompt, plain()), 0);
}

/// The write ends while the call waits for it.
#[test]
fn a_write_that_ends_meanwhile_is_removed() {
    let store = Arc::new(HangStore::new());
    let mut first = engine(Arc::clone(&store));
    store.hang(Operation::Put, u64::MAX);
    let prompt = text(1, 81);
    let (sequence, _) = first.run(&prompt, plain());
    let end = soon();
    while store.calls(Operation::Put) < 1 {
        first.cache.poll().unwrap();
        assert!(Instant::now() < end, "{:?}", first.cache.stats());
    }
    first.cache.cache_mut().release(sequence).unwrap();
    let done = std::thread::scope(|scope| {
        let removed = Arc::clone(&store);
        scope.spawn(move || {
            removed.wait_removal();
            removed.release();
        });
        first.cache.forget_prefix(&prompt, plain(), 0, soon()).unwrap()
    });
    assert!(done.is_complete(), "{done:?}");
    first.flush();
    assert_eq!(store.within.held_bytes(), 0);
}

/// An export must not write what is forgotten while it waits.
#[test]
fn an_export_of_what_is_forgotten_fails() {
    let store = Arc::new(MemoryStore::new(64 << 20));
    let lane = patient(&*store).with_write(WriteRule::new(WritePolicy::OnLeave));
    let options = TierOptions::new().with_host(4 << 20).with_chunk_blocks(2);
    let options = options.with_store_options(Box::new(Arc::clone(&store)), lane);
    let mut first = Engine::new(spec(512), identity(), options);
    let prompt = text(1, 81);
    let (sequence, _) = first.run(&prompt, plain());
    let export = first.cache.export_prefill(sequence, 0, Duration::from_mins(1)).unwrap();
    first.cache.cache_mut().release(sequence).unwrap();
    let Engine { cache, .. } = &mut first;
    assert!(cache.forget_prefix(&prompt, plain(), 0, soon()).unwrap().is_complete());
    first.flush();
    let state = first.cache.export_state(export.id);
    assert_eq!(state, Some(kv_tier::ExportState::Failed));
    assert_eq!(store.held_bytes(), 0);
}
