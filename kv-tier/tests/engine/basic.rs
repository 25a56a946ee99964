//! Blocks go down and come back.
use std::sync::Arc;
use std::time::{Duration, Instant};

use kv_core::StartOptions;
use kv_core::events::{EventKind, Tier};
use kv_tier::policy::{WritePolicy, WriteRule};
use kv_tier::{MemoryStore, StoreOptions, TierError, TierOptions, Wait};

use crate::support::{Engine, identity, patient, spec, text};

fn plain() -> StartOptions<'static> {
    StartOptions::default()
}

#[test]
fn what_left_the_device_comes_back_from_host_memory() {
    let mut engine = Engine::new(spec(2048), identity(), TierOptions::new().with_host(4 << 20));
    let prompt = text(1, 600);
    assert_eq!(engine.run(&prompt, plain()).1, 0);
    engine.flush();
    engine.forget();
    let (_, reused) = engine.run(&prompt, plain());
    // Two whole chunks of 256 tokens.
    assert_eq!(reused, 512);
    assert_eq!(engine.cache.state().stats().host_hit_tokens, 512);
    assert_eq!(engine.cache.stats().loaded_tokens, 512);
    engine.forget();
    engine.assert_nothing_held();
}

#[test]
fn a_store_outlives_the_process() {
    let store = Arc::new(MemoryStore::new(64 << 20));
    let options =
        || TierOptions::new().with_store_options(Box::new(Arc::clone(&store)), patient(&*store));
    let prompt = text(1, 1000);
    let mut first = Engine::new(spec(2048), identity(), options());
    first.run(&prompt, plain());
    first.flush();
    drop(first);
    assert!(store.held_bytes() > 0);
    let mut second = Engine::new(spec(2048), identity(), options());
    assert_eq!(second.run(&prompt, plain()).1, 768);
    let stats = second.cache.stats();
    assert_eq!((stats.stores[0].reads, stats.stores[0].found, stats.late), (3, 3, 0));
    // Another prompt shares only its beginning, which no whole chunk holds.
    assert_eq!(second.run(&text(2, 1000), plain()).1, 8);
}

#[cfg(feature = "seal")]
#[test]
fn a_sealed_store_serves_only_who_has_the_key() {
    use kv_tier::SealedStore;

    let store = Arc::new(MemoryStore::new(64 << 20));
    let prompt = text(1, 1000);
    for (key, reused, reads) in [([1; 32], 0, 0), ([1; 32], 768, 3), ([2; 32], 0, 0)] {
        let sealed = SealedStore::new(Arc::clone(&store), &key);
        let options = patient(&sealed);
        let options = TierOptions::new().with_store_options(Box::new(sealed), options);
        let mut engine = Engine::new(spec(2048), identity(), options);
        assert_eq!(engine.run(&prompt, plain()).1, reused);
        engine.flush();
        let stats = engine.cache.stats();
        assert_eq!((stats.stores[0].reads, stats.stores[0].failures), (reads, 0));
        assert_eq!(stats.stores[0].refused.len(), 0);
    }
}

#[test]
fn a_store_with_every_second_chunk_gives_the_first_alone() {
    let store = Arc::new(MemoryStore::new(64 << 20));
    let options =
        || TierOptions::new().with_store_options(Box::new(Arc::clone(&store)), patient(&*store));
    let prompt = text(1, 1025);
    let mut first = Engine::new(spec(2048), identity(), options());
    first.run(&prompt, plain());
    first.flush();
    drop(first);
    let names = crate::support::names(&prompt, &identity());
    assert_eq!(names.len(), 4);
    let soon = Instant::now() + Duration::from_secs(5);
    kv_tier::BlockStore::remove(&store, &names[1..2], soon).unwrap();
    let mut second = Engine::new(spec(2048), identity(), options());
    assert_eq!(second.run(&prompt, plain()).1, 256);
    assert_eq!(second.cache.stats().stores[0].reads, 1, "nothing after the gap is read");
}

#[test]
fn other_models_salts_and_adapters_never_match() {
    let store = Arc::new(MemoryStore::new(64 << 20));
    let options =
        || TierOptions::new().with_store_options(Box::new(Arc::clone(&store)), patient(&*store));
    let prompt = text(1, 600);
    let mut first = Engine::new(spec(2048), identity(), options());
    first.run(&prompt, plain().with_salt(b"one"));
    first.flush();
    let other = kv_tier::Identity::new(kv_tier::ModelDigest::of_bytes(b"others"));
    let mut engine = Engine::new(spec(2048), other, options());
    assert_eq!(engine.run(&prompt, plain().with_salt(b"one")).1, 0);
    let mut engine = Engine::new(spec(2048), identity(), options());
    assert_eq!(engine.run(&prompt, plain().with_salt(b"two")).1, 0);
    assert_eq!(engine.run(&prompt, plain()).1, 0);
    assert_eq!(engine.run(&prompt, plain().with_adapter(1)).1, 0);
    assert_eq!(engine.run(&prompt, plain().with_salt(b"one")).1, 512);
}

#[test]
fn an_adapter_without_a_digest_takes_no_part() {
    let mut engine = Engine::new(spec(2048), identity(), TierOptions::new().with_host(4 << 20));
    let prompt = text(1, 600);
    engine.run(&prompt, plain().with_adapter(1));
    engine.flush();
    engine.forget();
    assert_eq!(engine.run(&prompt, plain().with_adapter(1)).1, 0);
    let stats = engine.cache.stats();
    assert_eq!((stats.offloaded, stats.unnamed_blocks), (0, 300));
}

#[test]
fn a_small_host_passes_everything_on() {
    let store = Arc::new(MemoryStore::new(64 << 20));
    // Room for two chunks.
    let options = TierOptions::new().with_host(200 << 10);
    let rule = WriteRule::new(WritePolicy::OnLeave);
    let lane = patient(&*store).with_write(rule);
    let options = options.with_store_options(Box::new(Arc::clone(&store)), lane);
    let mut engine = Engine::new(spec(2048), identity(), options);
    let prompt = text(1, 1500);
    engine.run(&prompt, plain());
    engine.flush();
    assert_eq!(engine.cache.stats().stores[0].writes, 5);
    assert!(engine.cache.stats().host_evictions >= 3);
    engine.forget();
    // Two chunks fit, and only what fits is read.
    let (_, reused) = engine.run(&prompt, plain());
    assert_eq!(reused, 512);
    engine.forget();
    engine.assert_nothing_held();
}

#[test]
fn refusals() {
    let with = |spec| Engine::try_new(spec, TierOptions::new()).unwrap_err();
    let bare = || kv_core::CacheSpec::builder().layers(1_u16).kv_heads(1).head_dim(8).paged(4, 8);
    assert!(matches!(with(bare().build().unwrap()), TierError::NoChanges));
    let off = bare().changes(8).prefix_reuse(kv_core::spec::PrefixReuse::Off);
    assert!(matches!(with(off.build().unwrap()), TierError::NoReuse));
    let small = Engine::try_new(spec(8), TierOptions::new().with_host(100 << 10)).unwrap_err();
    let TierError::HostTooSmall { bytes, min, .. } = small else { panic!("{small}") };
    assert_eq!(bytes, 100 << 10);
    assert!(Engine::try_new(spec(8), TierOptions::new().with_host(min)).is_ok());

    let mut engine = Engine::new(spec(64), identity(), TierOptions::new());
    let prompt = text(1, 40);
    let prefetch = engine.cache.prefetch(&prompt, &plain());
    let salted = plain().with_salt(b"x");
    let sequence = kv_core::SequenceId(7);
    let other = engine.cache.start(prefetch, sequence, salted).unwrap_err();
    assert!(matches!(other, TierError::OtherOptions), "{other}");
    let ended = engine.cache.start(prefetch, sequence, plain()).unwrap_err();
    assert!(matches!(ended, TierError::UnknownPrefetch), "{ended}");
    assert!(engine.cache.is_ready(prefetch) && !engine.cache.cancel(prefetch));
    assert_eq!(engine.cache.state().num_sequences(), 0);
}

#[test]
fn host_memory_announces_what_it_has() {
    let mut engine = Engine::new(spec(2048), identity(), TierOptions::new().with_host(4 << 20));
    engine.run(&text(1, 256), plain().with_salt(b"tenant"));
    engine.flush();
    let events = engine.cache.cache_mut().take_events();
    let stored = events.iter().filter_map(|event| match &event.kind {
        EventKind::Stored(stored) if stored.tier == Tier::Host => Some(stored),
        _ => None,
    });
    let stored: Vec<_> = stored.collect();
    assert_eq!(stored.len(), 64);
    assert_eq!((stored[63].index, &stored[63].tokens[..]), (63, &text(1, 256)[252..]));
    assert_eq!(stored[63].parent, stored[62].key);
    assert!(stored.iter().all(|block| (&block.salt[..], block.adapter) == (b"tenant", None)));
}

#[test]
fn a_prompt_that_does_not_wait_takes_what_host_memory_has() {
    let store = Arc::new(MemoryStore::new(64 << 20));
    let options = TierOptions::new()
        .with_store_options(Box::new(Arc::clone(&store)), patient(&*store))
        .with_wait(Wait::None);
    let prompt = text(1, 600);
    let mut engine = Engine::new(spec(2048), identity(), options);
    engine.run(&prompt, plain());
    engine.flush();
    engine.forget();
    let prefetch = engine.cache.prefetch(&prompt, &plain());
    assert!(engine.cache.is_ready(prefetch));
    assert_eq!(engine.start(prefetch, &prompt, plain()).1, 512);
    assert_eq!(engine.cache.stats().stores[0].lookups, 0);
}

#[test]
fn a_drain_ends_what_is_due_and_makes_nothing_due() {
    for (policy, writes) in [(WritePolicy::OnPublish, 2), (WritePolicy::OnLeave, 0)] {
        let store = Arc::new(MemoryStore::new(64 << 20));
        let lane = patient(&*store).with_write(WriteRule::new(policy));
        let options = TierOptions::new().with_host(4 << 20);
        let options = options.with_store_options(Box::new(Arc::clone(&store)), lane);
        let mut engine = Engine::new(spec(2048), identity(), options);
        engine.run(&text(1, 600), plain());
        assert!(engine.cache.drain(Instant::now() + Duration::from_secs(30)).unwrap());
        let stats = engine.cache.stats();
        assert_eq!((stats.offloaded, stats.host_chunks), (2, 2));
        assert_eq!(stats.stores[0].writes, writes, "{policy}");
        engine.flush();
        assert_eq!(engine.cache.stats().stores[0].writes, 2);
    }
}

#[test]
fn given_rates_decide_whether_a_prompt_is_read() {
    let store = Arc::new(MemoryStore::new(64 << 20));
    let over = |lane: StoreOptions| {
        let options = TierOptions::new().with_wait(Wait::IfFaster);
        let options = options.with_store_options(Box::new(Arc::clone(&store)), lane);
        Engine::new(spec(2048), identity(), options)
    };
    let prompt = text(1, 600);
    let mut first = over(patient(&*store));
    first.run(&prompt, plain());
    first.flush();
    let bytes = store.held_bytes() as f64;
    // Two chunks are 512 of the 599 tokens that a prompt can reuse; computing them takes 0.512 s.
    for (latency, seconds, reused) in
        [(0, 0.511, 512), (0, 0.513, 0), (2, 0.509, 512), (2, 0.511, 0), (513, 0.0001, 0)]
    {
        let lane = patient(&*store).with_rates(Duration::from_millis(latency), bytes / seconds);
        let mut second = over(lane);
        second.cache.note_compute(1000, Duration::from_secs(1));
        assert_eq!(second.run(&prompt, plain()).1, reused, "{latency} ms, {seconds} s");
        let computed = second.cache.stats().cheaper_to_compute;
        assert_eq!(computed, u64::from(512 - reused));
    }
}

#[test]
fn chunks_pass_through_as_much_memory_as_is_given() {
    let store = Arc::new(MemoryStore::new(64 << 20));
    // Room for two chunks, which is no tier.
    let options = TierOptions::new().with_passage(200 << 10);
    let lane = patient(&*store).with_write(WriteRule::new(WritePolicy::OnLeave));
    let options = options.with_store_options(Box::new(Arc::clone(&store)), lane);
    let mut engine = Engine::new(spec(2048), identity(), options);
    engine.run(&text(1, 1500), plain());
    assert!(engine.cache.drain(Instant::now() + Duration::from_secs(30)).unwrap());
    let stats = engine.cache.stats();
    assert_eq!((stats.host_chunks, stats.stores[0].writes), (2, 5));
}
