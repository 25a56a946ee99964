//! Prompts whose blocks come from tiers.
use std::sync::Arc;
use std::time::{Duration, Instant};

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
