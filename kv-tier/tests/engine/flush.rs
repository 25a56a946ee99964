//! The writes of a flush, and its report of what it has not written.
use std::sync::Arc;
use std::time::{Duration, Instant};

use kv_core::backend::NullBackend;
use kv_core::events::Tier;
use kv_core::{
    Axes, CacheSpec, KvCache, KvFormat, SequenceId, StartOptions, StepInput, TensorView,
};
use kv_testkit::store::{Fault, FaultSchedule, FaultStore};
use kv_tier::policy::{WritePolicy, WriteRule};
use kv_tier::{
    MemoryStore, StoreErrorKind, StoreOptions, TierOptions, TieredCache, Unwritten, Wait,
};

use crate::support::{Engine, identity, patient, spec, text};

fn plain() -> StartOptions<'static> {
    StartOptions::default()
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(30)
}

fn over(store: &Arc<MemoryStore>, lane: StoreOptions, host: Option<u64>) -> Engine {
    let options = TierOptions::new().with_chunk_blocks(2);
    let options =
        host.map_or(options, |bytes| TierOptions::new().with_chunk_blocks(2).with_host(bytes));
    let options = options.with_store_options(Box::new(Arc::clone(store)), lane);
    Engine::new(spec(512), identity(), options)
}

/// 100 chunks at once, and room for few writes: another process finds all of them.
#[test]
fn everything_is_written_though_few_writes_may_wait() {
    let policies = [WritePolicy::OnPublish, WritePolicy::OnLeave];
    for (policy, host) in policies.into_iter().flat_map(|policy| {
        // Host memory passes all of it on, has room for a part, or for all.
        [None, Some(64 << 10), Some(4 << 20)].map(|host| (policy, host))
    }) {
        let store = Arc::new(MemoryStore::new(64 << 20));
        let lane = || patient(&*store).with_write(WriteRule::new(policy)).with_waiting_writes(2);
        let prompt = text(1, 801);
        let mut engine = over(&store, lane(), host);
        engine.run(&prompt, plain());
        engine.flush();
        assert_eq!(engine.cache.stats().stores[0].writes, 100, "{policy} {host:?}");
        let mut other = over(&store, lane(), None);
        assert_eq!(other.run(&prompt, plain()).1, 800, "{policy} {host:?}");
    }
}

#[test]
fn what_a_store_refuses_for_a_moment_is_written_without_a_flush() {
    let store = Arc::new(MemoryStore::new(64 << 20));
    let faulty = FaultStore::new(
        Arc::clone(&store),
        FaultSchedule::listed(&[
            // The lookup of the prompt.
            None,
            Some(Fault::Fail(StoreErrorKind::Unavailable)),
            Some(Fault::Fail(StoreErrorKind::Full)),
        ]),
    );
    let lane = patient(&faulty).with_write(WriteRule::new(WritePolicy::OnPublish));
    let options =
        TierOptions::new().with_chunk_blocks(2).with_store_options(Box::new(faulty), lane);
    let mut engine = Engine::new(spec(512), identity(), options);
    engine.run(&text(1, 81), plain());
    let end = soon();
    while engine.cache.stats().stores[0].writes < 10 {
        engine.cache.poll().unwrap();
        assert!(Instant::now() < end, "{:?}", engine.cache.stats());
        std::thread::yield_now();
    }
    assert_eq!(engine.cache.stats().stores[0].failures, 2);
}

#[test]
fn a_flush_says_what_a_store_has_not_taken() {
    let store = MemoryStore::new(64 << 20);
    let refuses = FaultSchedule::seeded(1, 1, &[Fault::Fail(StoreErrorKind::Denied)]);
    let faulty = Arc::new(FaultStore::new(store, refuses));
    let lane = patient(&*faulty).with_write(WriteRule::new(WritePolicy::OnPublish));
    let options = TierOptions::new().with_chunk_blocks(2);
    let options = options.with_store_options(Box::new(Arc::clone(&faulty)), lane);
    let mut engine = Engine::new(spec(512), identity(), options);
    engine.run(&text(1, 81), plain());
    let left = engine.cache.flush(Instant::now() + Duration::from_millis(50));
    let left = left.unwrap();
    assert_eq!((left.copies, left.writes), (0, 10), "{left:?}");
    assert!(!left.is_empty());
    // The breaker has opened: the next flush waits for its trial.
    faulty.set_schedule(FaultSchedule::listed(&[]));
    assert_eq!(engine.cache.flush(soon()).unwrap(), Unwritten::default());
    assert_eq!(engine.cache.stats().stores[0].writes, 10);
}

fn null(layers: u16, block: u32, blocks: u32) -> CacheSpec {
    let spec = CacheSpec::builder().layers(layers).kv_heads(1).head_dim(4);
    let spec = spec.format(KvFormat::F32).paged(block, blocks).changes(64);
    let spec = (1..layers).fold(spec, |spec, layer| spec.group([layer], |group| group));
    spec.build().unwrap()
}

/// Computes a prompt with rows of no interest, and flushes; returns what a process reuses that
/// comes after it, with the same options.
fn reused_later(
    spec: &CacheSpec,
    prompt: &[u32],
    options: impl Fn() -> TierOptions,
    is_same: bool,
) -> u32 {
    let open = || {
        let cache = KvCache::new(NullBackend::new(), spec.clone()).unwrap();
        TieredCache::new(cache, identity(), options()).unwrap()
    };
    let mut cache = open();
    let prefetch = cache.prefetch_within(prompt, &plain(), Wait::None);
    cache.start(prefetch, SequenceId(0), plain()).unwrap();
    let mut step = cache.begin_step(&[StepInput::tokens(SequenceId(0), prompt)]).unwrap();
    let values = vec![0.5_f32; prompt.len() * 4];
    for layer in 0..spec.num_layers() {
        let rows = TensorView::host(&values, &[prompt.len() as u32, 1, 4]);
        step.write(layer, rows, rows, Axes::Thd).unwrap();
    }
    step.commit().unwrap();
    cache.cache_mut().release(SequenceId(0)).unwrap();
    assert_eq!(cache.flush(soon()).unwrap(), Unwritten::default());
    if is_same {
        assert!(cache.cache_mut().reset_prefixes().unwrap());
    } else {
        cache = open();
    }
    let prefetch = cache.prefetch(prompt, &plain());
    cache.wait(prefetch).unwrap();
    cache.start(prefetch, SequenceId(1), plain()).unwrap()
}

/// Ten chunks of each group are more writes than may wait.
#[test]
fn sixty_groups_are_written_whole() {
    let store = Arc::new(MemoryStore::new(64 << 20));
    let lane = || patient(&*store).with_write(WriteRule::new(WritePolicy::OnPublish));
    let options = || {
        let options = TierOptions::new().with_chunk_blocks(1);
        options.with_store_options(Box::new(Arc::clone(&store)), lane())
    };
    assert_eq!(reused_later(&null(60, 4, 16), &text(1, 41), options, false), 40);
}

/// More chunks complete in one step than there once was room for.
#[test]
fn a_prompt_of_thousands_of_chunks_comes_back_whole() {
    let options = || TierOptions::new().with_chunk_blocks(1).with_host(48 << 20);
    assert_eq!(reused_later(&null(1, 1, 4_400), &text(1, 4_301), options, true), 4_300);
}

/// Far beyond any clock is late, not now.
#[test]
fn limits_that_no_clock_reaches_are_waited_for() {
    let store = Arc::new(MemoryStore::new(64 << 20));
    let engine = || {
        let lane = StoreOptions::new(Tier::Store)
            .with_lookup_deadline(Duration::MAX)
            .with_read_deadline(Duration::MAX)
            .with_write_deadline(Duration::MAX);
        let options = TierOptions::new().with_wait(Wait::For(Duration::MAX));
        let options = options.with_store_options(Box::new(Arc::clone(&store)), lane);
        Engine::new(spec(512), identity(), options)
    };
    let prompt = text(1, 513);
    let mut prefill = engine();
    let (sequence, _) = prefill.run(&prompt, plain());
    let export = prefill.cache.export_prefill(sequence, 0, Duration::MAX).unwrap();
    assert!(prefill.cache.export_state(export.id).is_some(), "its time is over at once");
    let mut decode = engine();
    let options = plain();
    let prefetch = decode.cache.import_prefill(&export.handoff, &prompt, &options).unwrap();
    decode.cache.poll().unwrap();
    prefill.flush();
    let end = soon();
    while !decode.cache.is_ready(prefetch) {
        decode.cache.poll().unwrap();
        assert!(Instant::now() < end, "the handoff is never ready");
    }
    assert_eq!(decode.start(prefetch, &prompt, plain()).1, 512);
}
