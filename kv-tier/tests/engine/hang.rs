//! A store that hangs costs time within the wait limit, then nothing.
use std::sync::Arc;
use std::time::{Duration, Instant};

use kv_core::StartOptions;
use kv_core::events::Tier;
use kv_tier::policy::{WritePolicy, WriteRule};
use kv_tier::{BreakerState, MemoryStore, StoreOptions, TierOptions, Wait};

use crate::store::{HangStore, Operation};
use crate::support::{Engine, identity, patient, spec, text};

const SLACK: Duration = Duration::from_millis(50);

fn plain() -> StartOptions<'static> {
    StartOptions::default()
}

/// Writes at once, with short deadlines.
fn lane() -> StoreOptions {
    StoreOptions::new(Tier::Disk)
        .with_write(WriteRule::new(WritePolicy::OnPublish))
        .with_lookup_deadline(Duration::from_millis(30))
        .with_read_deadline(Duration::from_millis(100))
        .with_write_deadline(Duration::from_millis(100))
}

fn options(store: &Arc<HangStore>) -> TierOptions {
    TierOptions::new().with_store_options(Box::new(Arc::clone(store)), lane())
}

/// Returns a store that has some prompts.
fn filled(prompts: &[Vec<u32>]) -> Arc<HangStore> {
    let store = Arc::new(HangStore::new());
    let lane = patient(&*store).with_write(WriteRule::new(WritePolicy::OnPublish));
    let options = TierOptions::new().with_store_options(Box::new(Arc::clone(&store)), lane);
    let mut engine = Engine::new(spec(2048), identity(), options);
    for prompt in prompts {
        engine.run(prompt, plain());
        engine.flush();
        engine.forget();
    }
    store
}

/// Polls until a time has come.
fn poll_until(engine: &mut Engine, end: Instant) {
    while Instant::now() < end {
        engine.cache.poll().unwrap();
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Runs a prompt until it reuses some number of tokens: on a busy machine a deadline may pass, and
/// breakers may have to close.
fn run_until(engine: &mut Engine, prompt: &[u32], expected: u32) {
    let end = Instant::now() + Duration::from_mins(1);
    while engine.run(prompt, plain()).1 != expected {
        assert!(Instant::now() < end, "{:?}", engine.cache.stats());
        empty_device(engine);
    }
}

/// Removes everything from the device, without waiting for stores.
fn empty_device(engine: &mut Engine) {
    engine.cache.cache_mut().reset().unwrap();
    let end = Instant::now() + Duration::from_secs(20);
    while engine.cache.state().num_holds() > 0
        || !engine.cache.cache_mut().reset_prefixes().unwrap()
    {
        poll_until(engine, Instant::now() + Duration::from_millis(20));
        assert!(Instant::now() < end, "something is held");
    }
}

/// Other work of the machine must not fail the test, so that the best of some attempts counts. A
/// call that waits for the store lasts longer each time.
#[test]
fn the_wait_limit_holds_whatever_hangs() {
    let limit = Duration::from_millis(120);
    for operation in Operation::ALL {
        let prompt = text(1, 600);
        let measure = || {
            let store = filled(std::slice::from_ref(&prompt));
            store.hang(operation, u64::MAX);
            let mut engine = Engine::new(spec(2048), identity(), options(&store));
            // Something to write.
            engine.run(&text(2, 300), plain());
            let mut longest = Duration::ZERO;
            let mut timed = |began: Instant| longest = longest.max(began.elapsed());
            let prompted = Instant::now();
            let wait = Wait::For(limit);
            let prefetch = engine.cache.prefetch_within(&prompt, &plain(), wait);
            timed(prompted);
            while !engine.cache.is_ready(prefetch) {
                let began = Instant::now();
                engine.cache.poll().unwrap();
                timed(began);
                std::thread::sleep(Duration::from_micros(200));
            }
            let waited = prompted.elapsed();
            let began = Instant::now();
            let sequence = kv_core::SequenceId(99);
            let reused = engine.cache.start(prefetch, sequence, plain()).unwrap();
            timed(began);
            engine.compute(sequence, &prompt, reused);
            engine.check(sequence, &prompt);
            store.release();
            (waited, longest, reused)
        };
        // What a hung write does not hold up may still be late on a busy machine.
        let expected = if operation == Operation::Put { 512 } else { 8 };
        let (mut waited, mut longest, mut most) = (Duration::MAX, Duration::MAX, 0);
        for _ in 0..40 {
            let one = measure();
            (waited, longest, most) = (waited.min(one.0), longest.min(one.1), most.max(one.2));
            assert!([8, expected].contains(&one.2), "{operation:?}: {} tokens", one.2);
            if waited <= limit + SLACK && longest <= SLACK && most == expected {
                break;
            }
        }
        assert_eq!(most, expected, "{operation:?}");
        assert!(waited <= limit + SLACK, "{operation:?}: waited for {waited:?}");
        assert!(longest <= SLACK, "{operation:?}: a call has lasted {longest:?}");
    }
}

#[test]
fn hung_lookups_open_the_breaker_and_no_more_pile_up() {
    let prompt = text(1, 600);
    let store = filled(std::slice::from_ref(&prompt));
    store.hang(Operation::Contains, u64::MAX);
    let mut engine = Engine::new(spec(2048), identity(), options(&store));
    let before = store.calls(Operation::Contains);
    let begin = Instant::now();
    let mut waits = 0;
    // Past the first periods of the breaker.
    while begin.elapsed() < Duration::from_millis(2500) {
        let prefetch = engine.cache.prefetch(&prompt, &plain());
        waits += u32::from(!engine.cache.is_ready(prefetch));
        engine.wait(prefetch);
        assert!(engine.cache.cancel(prefetch));
        std::thread::sleep(Duration::from_millis(5));
    }
    let stats = engine.cache.stats();
    assert_ne!(stats.stores[0].reads_breaker, BreakerState::Closed);
    // Four threads, and trials.
    assert!(waits <= 12, "{waits} prompts have waited");
    assert!(store.calls(Operation::Contains) - before <= 12);
    store.release();
    // It works again after a trial.
    run_until(&mut engine, &prompt, 512);
}

#[test]
fn a_read_that_hangs_is_asked_for_again_after_its_prompt_was_cancelled() {
    let prompt = text(1, 600);
    for ends_by_start in [false, true] {
        let store = filled(std::slice::from_ref(&prompt));
        let mut engine = Engine::new(spec(2048), identity(), options(&store));
        store.hang(Operation::Get, 1);
        let first = engine.cache.prefetch(&prompt, &plain());
        let end = Instant::now() + Duration::from_secs(10);
        while store.calls(Operation::Get) < 2 {
            engine.cache.poll().unwrap();
            assert!(Instant::now() < end, "both chunks are read");
        }
        // Shares the read that hangs.
        let second = engine.cache.prefetch(&prompt, &plain());
        if ends_by_start {
            engine.start(first, &prompt, plain());
            engine.forget();
        } else {
            assert!(engine.cache.cancel(first));
        }
        engine.wait(second);
        assert!(engine.cache.cancel(second));
        poll_until(&mut engine, Instant::now() + Duration::from_millis(150));
        run_until(&mut engine, &prompt, 512);
        store.release();
    }
}

#[test]
fn reads_that_hang_give_host_memory_back() {
    let prompt = text(1, 2049);
    let store = filled(std::slice::from_ref(&prompt));
    let lane = lane().with_threads(2);
    // Room for eight chunks.
    let options = TierOptions::new().with_host(600 << 10);
    let options = options.with_store_options(Box::new(Arc::clone(&store)), lane);
    let mut engine = Engine::new(spec(2048), identity(), options);
    store.hang(Operation::Get, u64::MAX);
    let prefetch = engine.cache.prefetch(&prompt, &plain());
    engine.wait(prefetch);
    assert_eq!(engine.start(prefetch, &prompt, plain()).1, 0);
    empty_device(&mut engine);
    poll_until(&mut engine, Instant::now() + Duration::from_millis(200));
    engine.run(&text(2, 1300), plain());
    // The two threads keep a chunk each.
    let end = Instant::now() + Duration::from_secs(20);
    while engine.cache.stats().host_chunks < 5 {
        poll_until(&mut engine, Instant::now() + Duration::from_millis(20));
        assert!(Instant::now() < end, "{:?}", engine.cache.stats());
    }
    store.release();
}

#[test]
fn a_store_whose_writes_hang_stops_neither_host_memory_nor_other_stores() {
    for policy in [WritePolicy::OnPublish, WritePolicy::OnLeave] {
        let (store, other) = (Arc::new(HangStore::new()), Arc::new(MemoryStore::new(64 << 20)));
        store.hang(Operation::Put, u64::MAX);
        let rule = WriteRule::new(policy);
        let options = TierOptions::new()
            .with_host(700 << 10)
            .with_store_options(Box::new(Arc::clone(&store)), lane().with_write(rule))
            .with_store_options(Box::new(Arc::clone(&other)), patient(&*other).with_write(rule));
        let mut engine = Engine::new(spec(2048), identity(), options);
        for number in 1..5 {
            engine.run(&text(number, 1300), plain());
            let end = Instant::now() + Duration::from_secs(20);
            while engine.cache.stats().offloaded < u64::from(number) * 5 {
                poll_until(&mut engine, Instant::now() + Duration::from_millis(20));
                assert!(Instant::now() < end, "{:?}", engine.cache.stats());
            }
        }
        let begin = Instant::now();
        let deadline = begin + Duration::from_secs(4);
        let left = engine.cache.flush(deadline).unwrap();
        assert!(left.writes >= 2, "two writes hang: {left:?}");
        assert!(begin.elapsed() < Duration::from_secs(20));
        let stats = engine.cache.stats();
        assert_eq!((stats.offloaded, stats.stores[1].writes), (20, 20), "{policy}: {stats:?}");
        assert_ne!(stats.stores[0].writes_breaker, BreakerState::Closed);
        empty_device(&mut engine);
        run_until(&mut engine, &text(1, 1300), 1280);
        store.release();
        empty_device(&mut engine);
        engine.assert_nothing_held();
    }
}

#[test]
fn tiers_with_hung_threads_are_dropped_in_bounded_time() {
    let prompt = text(1, 600);
    let store = filled(std::slice::from_ref(&prompt));
    let mut options = TierOptions::new();
    for _ in 0..8 {
        options = options.with_store_options(Box::new(Arc::clone(&store)), lane());
    }
    let mut engine = Engine::new(spec(2048), identity(), options);
    store.hang(Operation::Contains, u64::MAX);
    engine.cache.prefetch(&prompt, &plain());
    store.wait_hanging(8);
    let begin = Instant::now();
    drop(engine);
    assert!(begin.elapsed() < Duration::from_secs(1), "{:?}", begin.elapsed());
    store.release();
}
