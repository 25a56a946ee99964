//! Events by tier: what a reader knows is what can be reused.
use std::sync::Arc;
use std::time::Duration;

use kv_core::calibration::{Calibration, LayerCalibration, PlaneCalibration};
use kv_core::events::{EventKind, Tier};
use kv_core::spec::Transform;
use kv_core::{CacheSpec, KvFormat, Scaling, StartOptions};
use kv_testkit::consumer::Consumer;
use kv_tier::policy::{WritePolicy, WriteRule};
use kv_tier::{BlockStore, MemoryStore, StoreOptions, TierOptions, TieredCache};

use crate::store::{HangStore, soon};
use crate::support::{Engine, LAYERS, builder, identity, names, patient, text};

fn plain() -> StartOptions<'static> {
    StartOptions::default()
}

fn with_events() -> CacheSpec {
    builder().paged(4, 512).changes(256).events(1 << 14).build().unwrap()
}

/// Lets a reader follow, and checks him against what the cache and its tiers say.
fn follow(engine: &mut Engine, reader: &mut Consumer) -> Vec<EventKind> {
    let snapshot = engine.cache.snapshot();
    let events = engine.cache.cache_mut().take_events();
    reader.apply(&events).unwrap();
    reader.check(&snapshot).unwrap();
    let mut late = Consumer::default();
    late.resync(&snapshot);
    late.check(&snapshot).unwrap();
    events.into_iter().map(|event| event.kind).collect()
}

/// The device forgets, host memory does not: what comes back from there was known all the time, and
/// what it gives up later was too.
#[test]
fn a_device_that_is_cleared_leaves_what_host_memory_has() {
    // Room for three chunks of 64 blocks.
    let options = TierOptions::new().with_host(210 << 10);
    let (mut engine, mut reader) =
        (Engine::new(with_events(), identity(), options), Consumer::default());
    let prompt = text(1, 260);
    engine.run(&prompt, plain());
    engine.flush();
    follow(&mut engine, &mut reader);
    assert_eq!([Tier::Device, Tier::Host].map(|tier| reader.len_of(tier)), [65, 64]);
    engine.forget();
    let events = follow(&mut engine, &mut reader);
    assert!(events.contains(&EventKind::Cleared { tier: Tier::Device }), "{events:?}");
    assert_eq!([Tier::Device, Tier::Host].map(|tier| reader.len_of(tier)), [0, 64]);
    assert_eq!(engine.run(&prompt, plain()).1, 256);
    engine.flush();
    follow(&mut engine, &mut reader);
    assert_eq!([Tier::Device, Tier::Host].map(|tier| reader.len_of(tier)), [65, 64]);
    // Others take its place.
    for number in 2..6 {
        engine.run(&text(number, 260), plain());
        engine.flush();
        follow(&mut engine, &mut reader);
    }
    // Of three chunks, which share the two blocks that all texts begin with.
    assert_eq!(reader.len_of(Tier::Host), 3 * 62 + 2);
}

/// With other constants, nothing of the tiers can be reused; with the constants of before, it can.
#[test]
fn other_constants_clear_all_tiers() {
    let store = Arc::new(HangStore::new());
    let lane = StoreOptions::new(Tier::Disk).with_write(WriteRule::new(WritePolicy::OnPublish));
    let options = TierOptions::new().with_store_options(Box::new(Arc::clone(&store)), lane);
    let spec = CacheSpec::builder().layers(LAYERS).kv_heads(2).head_dim(8);
    let spec = spec.format(KvFormat::Int8(Scaling::Row)).transform(Transform::On).paged(4, 256);
    let spec = spec.changes(256).events(1 << 14).build().unwrap();
    let (mut engine, mut reader) = (Engine::new(spec, identity(), options), Consumer::default());
    let calibrated = |mean: f32| {
        let of = |mean: f32| PlaneCalibration { mean: vec![mean; 16], ..Default::default() };
        let layer = || LayerCalibration { k: of(mean), v: PlaneCalibration::default() };
        Calibration::new((0..LAYERS).map(|_| layer()).collect())
    };
    engine.cache.cache_mut().recalibrate(calibrated(1.0)).unwrap();
    let prompt = text(1, 260);
    let compute = |engine: &mut Engine| {
        let prefetch = engine.cache.prefetch(&prompt, &plain());
        engine.wait(prefetch);
        let id = kv_core::SequenceId(9);
        let reused = engine.cache.start(prefetch, id, plain()).unwrap();
        engine.compute(id, &prompt, reused);
        engine.cache.cache_mut().release(id).unwrap();
        engine.flush();
        reused
    };
    assert_eq!(compute(&mut engine), 0);
    follow(&mut engine, &mut reader);
    let known =
        |reader: &Consumer| [Tier::Device, Tier::Host, Tier::Disk].map(|tier| reader.len_of(tier));
    assert_eq!(known(&reader), [65, 64, 64]);
    engine.cache.cache_mut().recalibrate(calibrated(2.0)).unwrap();
    follow(&mut engine, &mut reader);
    assert_eq!(known(&reader), [0, 0, 0]);
    assert_eq!(compute(&mut engine), 0);
    follow(&mut engine, &mut reader);
    assert_eq!(known(&reader), [65, 64, 64]);
    engine.cache.cache_mut().recalibrate(calibrated(1.0)).unwrap();
    engine.cache.poll().unwrap();
    follow(&mut engine, &mut reader);
    assert_eq!(known(&reader)[..2], [0, 64], "host memory has what it had before");
    assert_eq!(compute(&mut engine), 256);
    follow(&mut engine, &mut reader);
}

/// Prompts that part inside a chunk share its first blocks, and two stores of a tier have the same
/// chunks: a reader is told once.
#[test]
fn a_block_of_several_chunks_and_stores_is_announced_once() {
    let stores = [(); 2].map(|()| Arc::new(HangStore::new()));
    let mut options = TierOptions::new().with_host(210 << 10);
    for store in &stores {
        let rule = WriteRule::new(WritePolicy::OnPublish);
        let long = Duration::from_secs(20);
        let lane = StoreOptions::new(Tier::Disk).with_write(rule);
        let lane = lane.with_lookup_deadline(long).with_read_deadline(long);
        options = options.with_store_options(Box::new(Arc::clone(store)), lane);
    }
    let (mut engine, mut reader) =
        (Engine::new(with_events(), identity(), options), Consumer::default());
    let first = text(1, 260);
    // Another prompt from the middle of the first chunk on.
    let second = [&first[..120], &text(2, 260)[120..]].concat();
    for prompt in [&first, &second] {
        engine.run(prompt, plain());
        engine.flush();
        follow(&mut engine, &mut reader);
    }
    assert_eq!([Tier::Host, Tier::Disk].map(|tier| reader.len_of(tier)), [98; 2]);
    // Host memory gives both up, one after the other.
    for number in 3..7 {
        engine.run(&text(number, 260), plain());
        engine.flush();
        follow(&mut engine, &mut reader);
    }
    // A store that lost a chunk reports it at the next lookup; the other store still has the chunk.
    let ask = |engine: &mut Engine, reader: &mut Consumer| {
        engine.forget();
        let (_, reused) = engine.run(&first, plain());
        engine.flush();
        follow(engine, reader);
        (reused, reader.len_of(Tier::Disk))
    };
    let all = reader.len_of(Tier::Disk);
    let chunk = names(&first, &identity());
    stores[0].within.remove(&chunk, soon()).unwrap();
    assert_eq!(ask(&mut engine, &mut reader), (256, all));
    for number in 3..7 {
        engine.run(&text(number, 260), plain());
        engine.flush();
    }
    stores[0].within.remove(&chunk, soon()).unwrap();
    stores[1].within.remove(&chunk, soon()).unwrap();
    // It is computed and written again.
    assert_eq!(ask(&mut engine, &mut reader), (0, all));
}

/// Readers of a cache whose tiers are replaced do not know what the old ones had.
#[test]
fn tiers_begin_with_nothing_known() {
    let store = Arc::new(MemoryStore::new(64 << 20));
    let options =
        || TierOptions::new().with_store_options(Box::new(Arc::clone(&store)), patient(&*store));
    let (mut engine, mut reader) =
        (Engine::new(with_events(), identity(), options()), Consumer::default());
    engine.run(&text(1, 260), plain());
    engine.flush();
    follow(&mut engine, &mut reader);
    assert_eq!(reader.len_of(Tier::Host), 64);
    let cache = engine.cache.into_cache();
    engine.cache = TieredCache::new(cache, identity(), options()).unwrap();
    engine.cache.poll().unwrap();
    let events = engine.cache.cache_mut().take_events();
    assert_eq!(events[0].kind, EventKind::Cleared { tier: Tier::Host }, "{events:?}");
    assert_eq!(events.len(), 1);
}
