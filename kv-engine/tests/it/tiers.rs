//! Prompts whose blocks come from tiers.
use std::sync::Arc;
use std::time::{Duration, Instant};

use kv_testkit::{FaultInjector, FaultKind, LateDevice};
use kv_tier::{Identity, MemoryStore, ModelDigest, TierOptions, TieredCache, TiersStats, Wait};

use super::*;

/// Runs requests over a new cache, with tiers over a store that lasts.
fn run_over(
    store: &Arc<MemoryStore>,
    num_blocks: u32,
    requests: Vec<Request>,
    limits: Limits,
) -> (Vec<Generated>, Stats, TiersStats) {
    let cache = cache_with(4, num_blocks, |spec| spec.changes(1000));
    let identity = Identity::new(ModelDigest::of_bytes(b"echo"));
    let options = TierOptions::new().with_chunk_blocks(2).with_wait(Wait::All);
    let options = options.with_store(Box::new(Arc::clone(store)));
    let cache = TieredCache::new(cache, identity, options).expect("tiers");
    let mut model = Echo::certain();
    let mut engine = Engine::tiered(cache, limits);
    let count = requests.len();
    for request in requests {
        engine.submit(request).expect("fits");
    }
    let mut generated = Vec::new();
    while engine.has_work() {
        for event in engine.step(&mut model).expect("runs") {
            if let Event::Finished { index, generated: done } = event {
                generated.push((index, done));
            }
        }
        assert_eq!(engine.cache().state().num_imports(), 0, "imports end with their step");
    }
    let soon = Instant::now() + Duration::from_secs(30);
    assert!(engine.flush_tiers(soon).expect("flushes").is_empty());
    assert_eq!((engine.cache().state().num_holds(), generated.len()), (0, count));
    generated.sort_by_key(|(index, _)| *index);
    let stats = engine.tiers().expect("they are there");
    (generated.into_iter().map(|(_, done)| done).collect(), engine.stats(), stats)
}

#[test]
fn a_new_process_reuses_what_an_earlier_one_computed() {
    let prompts: Vec<Vec<u32>> = prompts(7);
    for (num_blocks, max_batch, max_step_tokens) in
        [(100, 8, 1000), (100, 3, 5), (14, 8, 1000), (12, 8, 7), (12, 1, 1000)]
    {
        let store = Arc::new(MemoryStore::new(16 << 20));
        let limits = || limits(max_batch, max_step_tokens);
        let run = || run_over(&store, num_blocks, requests(&prompts, 20), limits());
        let (first, ..) = run();
        let (second, stats, of_tiers) = run();
        for ((first, second), prompt) in first.iter().zip(&second).zip(&prompts) {
            assert_eq!(first.tokens, expected(prompt, 20));
            assert_eq!(second.tokens, expected(prompt, 20));
            // All whole chunks of 8 tokens, without the last token. In a small pool some are
            // evicted between the lookup and the start.
            let whole = if num_blocks < 100 { 0 } else { (prompt.len() - 1) / 8 * 8 };
            assert!(second.reused >= whole, "{} of {}", second.reused, prompt.len());
        }
        assert!(stats.cache.host_hit_tokens > 0 && of_tiers.loaded_tokens > 0);
    }
}

/// Blocks that come for a younger prompt must leave room for the rest of an older one, which comes
/// first.
#[test]
fn imports_for_the_next_prompt_leave_room_for_the_first() {
    let store = Arc::new(MemoryStore::new(16 << 20));
    let first: Vec<u32> = (0..100).map(|at| at % VOCAB).collect();
    let second: Vec<u32> = (0..48).map(|at| (at * 7 + 1) % VOCAB).collect();
    let seen = [first[..80].to_vec(), second.clone()];
    run_over(&store, 100, requests(&seen, 1), limits(2, 1000));
    // 20 blocks come for the first, which needs 5 more; 10 would come for the second.
    let both = [first, second];
    let (texts, _, tiers) = run_over(&store, 32, requests(&both, 4), limits(2, 1000));
    for (generated, prompt) in texts.iter().zip(&both) {
        assert_eq!(generated.tokens, expected(prompt, 4));
    }
    assert_eq!(tiers.loaded_tokens, 80 + 40);
}

/// A prefetch ends when its blocks are brought, also if the device fails then: the next step asks
/// the tiers again.
#[test]
fn a_device_that_fails_while_blocks_come_ends_no_request() {
    let store = Arc::new(MemoryStore::new(16 << 20));
    let prompt: Vec<u32> = (0..40).collect();
    let run = |after: Option<u64>| {
        let device = FaultInjector::new(LateDevice::new(cpu(), 2));
        let spec = CacheSpec::builder().layers(LAYERS).kv_heads(1).head_dim(CONTEXT);
        let spec = spec.max_seq_len(CONTEXT).paged(4, 40).changes(1000).build().expect("spec");
        let cache = KvCache::new(device, spec).expect("cache");
        let identity = Identity::new(ModelDigest::of_bytes(b"echo"));
        let options = TierOptions::new().with_chunk_blocks(2).with_wait(Wait::All);
        let options = options.with_store(Box::new(Arc::clone(&store)));
        let cache = TieredCache::new(cache, identity, options).expect("tiers");
        let mut engine = Engine::tiered(cache, limits(4, 100));
        engine.submit(Request::new(prompt.clone(), 3)).expect("fits");
        if let Some(after) = after {
            engine.cache().backend().fail(after, FaultKind::Early);
        }
        let (mut texts, mut failures) = (Vec::new(), 0);
        while engine.has_work() && failures < 5 {
            match engine.step(Echo::certain()) {
                Ok(events) => texts.extend(events),
                Err(_) => failures += 1,
            }
        }
        let text = texts.iter().find_map(|event| match event {
            Event::Finished { generated, .. } => Some(generated.tokens.clone()),
            _ => None,
        });
        assert_eq!(text, Some(expected(&prompt, 3)), "after {after:?}");
        let soon = Instant::now() + Duration::from_secs(30);
        assert!(engine.flush_tiers(soon).expect("flushes").is_empty());
        (failures, engine.tiers().expect("they are there").loaded_tokens)
    };
    assert_eq!(run(None).0, 0, "the first one fills the store");
    let runs: Vec<_> = (0..20).map(|after| run(Some(after))).collect();
    assert!(runs.iter().any(|(failures, loaded)| *failures > 0 && *loaded > 0), "{runs:?}");
}
