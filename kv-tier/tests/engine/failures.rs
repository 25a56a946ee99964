//! Devices that fail, constants that change, adapters and contents, budgets.
use std::sync::Arc;
use std::time::{Duration, Instant};

use kv_core::backend::{NullBackend, Plane};
use kv_core::calibration::{Calibration, LayerCalibration, PlaneCalibration};
use kv_core::events::Tier;
use kv_core::reuse::ContentSpan;
use kv_core::{
    Axes, CacheError, CacheSpec, KvCache, KvFormat, Scaling, SequenceId, StartOptions, StepInput,
    TensorView, TensorViewMut,
};
use kv_testkit::{FaultInjector, FaultKind};
use kv_tier::policy::{WritePolicy, WriteRule};
use kv_tier::{
    BlockStore, MemoryStore, ModelDigest, Put, StoreOptions, TierError, TierOptions, TieredCache,
};

use crate::support::{Engine, Late, identity, late, patient, spec, text};

fn plain() -> StartOptions<'static> {
    StartOptions::default()
}

type Null = KvCache<NullBackend>;

fn null(format: KvFormat) -> Null {
    let spec = CacheSpec::builder().layers(1).kv_heads(1).head_dim(4).format(format);
    let spec = spec.paged(4, 32).changes(64).wipe_on_release(true).build().unwrap();
    KvCache::new(NullBackend::new(), spec).unwrap()
}

/// Computes the rest of a prompt; rows are of no interest here.
fn compute(cache: &mut Null, id: SequenceId, prompt: &[u32]) -> Result<(), CacheError> {
    let done = cache.state().seq_len(id).unwrap();
    let new = &prompt[done as usize..];
    let mut step = cache.begin_step(&[StepInput::tokens(id, new)])?;
    let values = vec![0.5_f32; new.len() * 4];
    let rows = TensorView::host(&values, &[new.len() as u32, 1, 4]);
    step.write(0, rows, rows, Axes::Thd)?;
    step.commit()
}

/// The device fails once, at each operation in a loop. Whatever happens, no hold, import or block
/// is leaked, and the next prompt is served.
#[test]
fn a_device_that_fails_at_any_operation_leaks_nothing() {
    let prompt = text(1, 33);
    let mut served = 0;
    for operation in 0..200 {
        let cache = null(KvFormat::F32);
        let options = TierOptions::new().with_host(1 << 20).with_chunk_blocks(2);
        let mut cache = TieredCache::new(cache, identity(), options).unwrap();
        let mut round = |fails: bool, id: u64| {
            let id = SequenceId(id);
            let never = u64::MAX;
            cache.cache().backend().control().fail_after(if fails { operation } else { never });
            let prefetch = cache.prefetch(&prompt, &plain());
            let mut reused = 0;
            match cache.start(prefetch, id, plain()) {
                Ok(tokens) => {
                    reused = tokens;
                    let _ = compute(cache.cache_mut(), id, &prompt);
                }
                Err(TierError::Cache(CacheError::Device(_))) => {}
                Err(error) => panic!("{error}"),
            }
            if cache.state().contains(id) {
                let _ = cache.cache_mut().release(id);
            }
            for _ in 0..3 {
                let _ = cache.poll();
            }
            let soon = Instant::now() + Duration::from_secs(20);
            let flushed = (0..3).any(|_| cache.flush(soon).is_ok_and(|left| left.is_empty()));
            assert!(flushed, "operation {operation}");
            let held = (cache.state().num_holds(), cache.state().num_imports());
            assert_eq!(held, (0, 0), "operation {operation}");
            assert_eq!(cache.state().usage().blocks_used, 0, "operation {operation}");
            cache.cache().backend().control().fail_after(u64::MAX);
            reused
        };
        round(false, 0);
        round(true, 1);
        assert!(cache.cache_mut().reset_prefixes().unwrap());
        let mut round = |fails: bool, id: u64| {
            let id = SequenceId(id);
            let never = u64::MAX;
            cache.cache().backend().control().fail_after(if fails { operation } else { never });
            let prefetch = cache.prefetch(&prompt, &plain());
            let started = cache.start(prefetch, id, plain());
            let has_started = started.is_ok();
            let is_live = cache.state().contains(id);
            assert_eq!(is_live, has_started, "operation {operation}: {started:?}");
            // What a failure has left is done as soon as the device works.
            for _ in 0..3 {
                let _ = cache.poll();
            }
            assert_eq!(cache.state().num_imports(), 0, "operation {operation}: {started:?}");
            if has_started {
                cache.cache_mut().release(id).unwrap_or_default();
            }
            let _ = cache.cache_mut().reset_prefixes();
            cache.cache().backend().control().fail_after(u64::MAX);
            started.ok()
        };
        let failed = round(true, 2);
        assert_eq!(round(false, 3), Some(32), "operation {operation}");
        served += u64::from(failed.is_some());
        if operation > 40 && failed == Some(32) {
            break;
        }
    }
    assert!(served > 0);
}

fn calibration(mean: f32) -> Calibration {
    let k = PlaneCalibration { mean: vec![mean; 4], ..Default::default() };
    Calibration::new(vec![LayerCalibration { k, v: PlaneCalibration::default() }])
}

#[test]
fn a_prompt_that_was_prefetched_before_a_recalibration_starts_without_tiers() {
    let cache = null(KvFormat::Int8(Scaling::Row));
    let options = TierOptions::new().with_host(1 << 20).with_chunk_blocks(2);
    let mut cache = TieredCache::new(cache, identity(), options).unwrap();
    let prompt = text(1, 33);
    cache.cache_mut().start(SequenceId(0), &prompt, plain()).unwrap();
    compute(cache.cache_mut(), SequenceId(0), &prompt).unwrap();
    cache.cache_mut().release(SequenceId(0)).unwrap();
    let soon = || Instant::now() + Duration::from_secs(20);
    assert!(cache.flush(soon()).unwrap().is_empty());
    assert!(cache.cache_mut().reset_prefixes().unwrap());
    let [prefetch, other] = [(); 2].map(|()| cache.prefetch(&prompt, &plain()));
    cache.cache_mut().recalibrate(calibration(1.0)).unwrap();
    assert_eq!(cache.start(prefetch, SequenceId(1), plain()).unwrap(), 0);
    let salted = plain().with_salt(b"other");
    let refused = cache.start(other, SequenceId(2), salted).unwrap_err();
    assert!(matches!(refused, TierError::OtherOptions));
    // New chunks have new names.
    compute(cache.cache_mut(), SequenceId(1), &prompt).unwrap();
    cache.cache_mut().release(SequenceId(1)).unwrap();
    assert!(cache.flush(soon()).unwrap().is_empty());
    assert!(cache.cache_mut().reset_prefixes().unwrap());
    let prefetch = cache.prefetch(&prompt, &plain());
    assert_eq!(cache.start(prefetch, SequenceId(3), plain()).unwrap(), 32);
    assert_eq!(cache.stats().offloaded, 8);
}

/// Numbers of adapters differ between processes, and one adapter may have two.
#[test]
fn an_adapter_is_known_by_its_digest_under_any_number() {
    let store = Arc::new(MemoryStore::new(64 << 20));
    let identity = || {
        let digest = |name: &[u8]| ModelDigest::of_bytes(name);
        let identity = identity().with_adapter(1, digest(b"other"));
        identity.with_adapter(3, digest(b"three")).with_adapter(4, digest(b"three"))
    };
    let options =
        || TierOptions::new().with_store_options(Box::new(Arc::clone(&store)), patient(&*store));
    let prompt = text(1, 600);
    let mut engine = Engine::new(spec(2048), identity(), options());
    engine.run(&prompt, plain().with_adapter(3));
    engine.flush();
    // From host memory, and from a store.
    assert_eq!(engine.run(&prompt, plain().with_adapter(4)).1, 512);
    let mut engine = Engine::new(spec(2048), identity(), options());
    assert_eq!(engine.run(&prompt, plain().with_adapter(1)).1, 0);
    assert_eq!(engine.run(&prompt, plain().with_adapter(4)).1, 512);
    assert_eq!(engine.cache.stats().stores[0].refused.len(), 0);
}

/// The first group has fewer full blocks than the second one.
#[test]
fn contents_are_compared_up_to_the_last_block_of_any_group() {
    let spec = CacheSpec::builder().layers(2).kv_heads(2).head_dim(8).format(KvFormat::F32);
    let spec = spec.paged(32, 64).group([1], |group| group.paged(4, 512)).changes(256);
    let options = TierOptions::new().with_host(64 << 20).with_chunk_blocks(1);
    let mut engine = Engine::new(spec.build().unwrap(), identity(), options);
    let prompt = text(1, 60);
    let cat = [ContentSpan { begin: 40, len: 8, id: 1 }];
    let dog = [ContentSpan { begin: 40, len: 8, id: 2 }];
    let (cat, dog) = (plain().with_contents(&cat), plain().with_contents(&dog));
    engine.run(&prompt, cat);
    engine.flush();
    engine.forget();
    let prefetch = engine.cache.prefetch(&prompt, &cat);
    let refused = engine.cache.start(prefetch, SequenceId(77), dog);
    assert!(matches!(refused, Err(TierError::OtherOptions)), "{refused:?}");
    assert_eq!(engine.run(&prompt, cat).1, 32);
}

#[test]
fn the_budget_of_a_day_holds_for_all_threads_together() {
    for _ in 0..10 {
        let store = Arc::new(MemoryStore::new(64 << 20));
        let budget = 2 * 70_000;
        let lane = StoreOptions::new(Tier::Disk)
            .with_write(WriteRule::new(WritePolicy::OnPublish))
            .with_threads(16)
            .with_bytes_per_day(budget);
        let options = TierOptions::new().with_store_options(Box::new(Arc::clone(&store)), lane);
        let mut engine = Engine::new(spec(2048), identity(), options);
        engine.run(&text(1, 3000), plain());
        let soon = Instant::now() + Duration::from_secs(20);
        let left = engine.cache.flush(soon).unwrap();
        let stats = engine.cache.stats();
        assert!(stats.stores[0].written_bytes <= budget, "{stats:?}");
        assert_eq!(left.writes, stats.stores[0].dropped_by_budget, "{stats:?}");
        assert_eq!(stats.stores[0].writes + stats.stores[0].dropped_by_budget, 11, "{stats:?}");
        assert_eq!(store.held_bytes() as u64, stats.stores[0].written_bytes);
    }
}

#[test]
fn host_memory_says_how_much_it_holds() {
    let options = TierOptions::new().with_host(4 << 20);
    let mut engine = Engine::new(spec(2048), identity(), options);
    engine.run(&text(1, 600), plain());
    engine.flush();
    let stats = engine.cache.stats();
    assert!(stats.host_capacity > 3 << 20 && stats.host_capacity <= 4 << 20, "{stats:?}");
    assert_eq!(stats.host_bytes, 2 * stats.host_bytes / stats.host_chunks);
}

/// Copies that were recorded before one of them failed must not reach blocks that other sequences
/// have got meanwhile.
#[test]
fn copies_that_fail_reach_no_block_of_others() {
    let prompts = [text(1, 300), text(2, 300)];
    let mut failures = 0;
    for kind in FaultKind::ALL {
        for operation in 0..24 {
            let backend = FaultInjector::new(late());
            let options = TierOptions::new().with_host(4 << 20).with_chunk_blocks(4);
            // Room for one prompt.
            let mut engine = Engine::over(backend, spec(80), identity(), options);
            engine.run(&prompts[0], plain());
            engine.flush();
            engine.forget();
            let prefetch = engine.cache.prefetch(&prompts[0], &plain());
            engine.cache.cache().backend().fail(operation, kind);
            let id = SequenceId(1000);
            let started = engine.cache.start(prefetch, id, plain());
            failures += u32::from(engine.cache.cache().backend().clear());
            if started.is_ok() {
                engine.cache.cache_mut().release(id).unwrap();
            } else {
                assert!(!engine.cache.state().contains(id), "{kind:?} {operation}: {started:?}");
            }
            // What the failure has left is done first.
            engine.cache.poll().unwrap();
            assert_eq!(engine.cache.state().num_imports(), 0);
            let (other, _) = engine.run(&prompts[1], plain());
            // Uses the queue of the copies.
            engine.flush();
            engine.check(other, &prompts[1]);
            engine.forget();
            assert_eq!(engine.run(&prompts[0], plain()).1, 288, "{kind:?} {operation}");
        }
    }
    assert!(failures > 40, "{failures}");
}

#[test]
fn a_chunk_that_one_store_has_broken_comes_from_another() {
    let stores = [(); 2].map(|()| Arc::new(MemoryStore::new(64 << 20)));
    let options = || {
        stores.iter().fold(TierOptions::new(), |options, store| {
            options.with_store_options(Box::new(Arc::clone(store)), patient(&**store))
        })
    };
    let prompt = text(1, 800);
    let mut engine = Engine::new(spec(2048), identity(), options());
    engine.run(&prompt, plain());
    engine.flush();
    let soon = Instant::now() + Duration::from_secs(20);
    let names = crate::support::names(&prompt, &identity());
    stores[0].remove(&names[1..2], soon).unwrap();
    assert_eq!(stores[0].put(&names[1], &vec![7; 69_632], soon).unwrap(), Put::New);
    let mut engine = Engine::new(spec(2048), identity(), options());
    assert_eq!(engine.run(&prompt, plain()).1, 768);
    let stats = engine.cache.stats();
    assert_eq!((stats.stores[0].reads, stats.stores[1].reads), (2, 1), "{stats:?}");
    assert_eq!(stats.stores[0].refused.values().sum::<u64>(), 1);
}

/// Restores what a failed recalibration has overwritten before blocks are copied.
#[test]
fn a_failed_recalibration_reaches_no_chunk() {
    let prompt = text(1, 520);
    let coded = CacheSpec::builder().layers(2).kv_heads(2).head_dim(8);
    let coded = coded.format(KvFormat::Int8(Scaling::Row)).paged(4, 512).changes(256);
    let coded = coded.build().unwrap();
    let k = PlaneCalibration { mean: vec![100.0; 16], ..Default::default() };
    let layer = || LayerCalibration { k: k.clone(), v: PlaneCalibration::default() };
    let mut unrestored = 0;
    for operation in (0..40).step_by(3).chain((40..1000).step_by(97)) {
        let backend = FaultInjector::new(late());
        let options = TierOptions::new().with_host(4 << 20);
        let mut engine = Engine::over(backend, coded.clone(), identity(), options);
        let id = SequenceId(1000);
        engine.cache.cache_mut().start(id, &prompt, plain()).unwrap();
        engine.compute(id, &prompt, 0);
        let rows = |engine: &mut Engine<FaultInjector<Late>>, id| {
            let mut rows = vec![0.0_f32; 512 * 16];
            let out = TensorViewMut::host(&mut rows, &[1, 512, 2, 8]);
            let range = [(id, 0, 512)];
            engine.cache.cache_mut().gather(0, Plane::Key, &range, out, Axes::Bshd).unwrap();
            rows
        };
        let before = rows(&mut engine, id);
        engine.cache.cache().backend().fail(operation, FaultKind::Persistent);
        let done = engine.cache.cache_mut().recalibrate(Calibration::new(vec![layer(), layer()]));
        engine.cache.cache().backend().clear();
        if done.is_ok() {
            break;
        }
        unrestored += 1;
        // The first call after the failure.
        engine.flush();
        engine.cache.cache_mut().release(id).unwrap();
        engine.forget();
        let prefetch = engine.cache.prefetch(&prompt, &plain());
        let id = SequenceId(1001);
        assert_eq!(engine.cache.start(prefetch, id, plain()).unwrap(), 512);
        assert!(before == rows(&mut engine, id), "operation {operation}");
    }
    assert!(unrestored > 5, "{unrestored}");
}

/// A prompt of more blocks than the list of changes has room for.
#[test]
fn lost_changes_copy_nothing_twice() {
    let spec = CacheSpec::builder().layers(2).kv_heads(2).head_dim(8).format(KvFormat::F32);
    let spec = spec.paged(4, 2048).changes(2).build().unwrap();
    // Room for two chunks.
    let options = TierOptions::new().with_host(200 << 10);
    let mut engine = Engine::new(spec, identity(), options);
    for number in 1..5 {
        engine.run(&text(number, 600), plain());
        engine.flush();
    }
    let stats = engine.cache.stats();
    assert_eq!((stats.offloaded, stats.offload_missed, stats.unnamed_blocks), (8, 0, 0));
}

/// With backoff, the last block that is found is computed anew: the import of that block must not
/// take the room of the sequence.
#[test]
fn an_import_takes_no_block_that_the_sequence_needs() {
    let options = TierOptions::new().with_host(4 << 20).with_chunk_blocks(1);
    let mut engine = Engine::new(spec(5), identity(), options);
    let prompt = text(1, 17);
    engine.run(&prompt, plain());
    engine.flush();
    engine.forget();
    let backoff = plain().with_backoff_blocks(1).with_reserve(17);
    let (sequence, reused) = engine.run(&prompt, backoff);
    assert_eq!(reused, 12);
    engine.cache.cache_mut().release(sequence).unwrap();
    engine.assert_nothing_held();
}

/// Host memory has no room while a prefetch holds all of it; the chunk that waits loses its blocks.
#[test]
fn a_chunk_whose_blocks_got_other_content_while_it_waited_is_not_copied() {
    // Room for two chunks.
    let options = TierOptions::new().with_host(200 << 10);
    let mut engine = Engine::new(spec(300), identity(), options);
    let [held, waiting, other] = [text(1, 520), text(2, 260), text(3, 1100)];
    engine.run(&held, plain());
    engine.flush();
    engine.forget();
    let prefetch = engine.cache.prefetch(&held, &plain());
    engine.run(&waiting, plain());
    engine.cache.cache_mut().reset().unwrap();
    assert!(engine.cache.cache_mut().reset_prefixes().unwrap(), "nothing is copied yet");
    engine.run(&other, plain());
    assert!(engine.cache.cancel(prefetch));
    engine.flush();
    assert_eq!(engine.cache.stats().offload_missed, 1);
    engine.forget();
    // Checks every row.
    assert_eq!(engine.run(&waiting, plain()).1, 0);
}
