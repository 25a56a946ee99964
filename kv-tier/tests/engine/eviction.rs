//! The order in which host memory gives up chunks: that of the cache's policy.
use kv_core::StartOptions;
use kv_core::eviction::Eviction;
use kv_tier::TierOptions;

use crate::support::{Engine, builder, identity, text};

/// Asks for prompts in turn, more than host memory has room for, with nothing left on the device in
/// between. Returns the tokens that come back in the second half.
fn cycle(eviction: Eviction) -> u32 {
    let spec = builder().paged(4, 32).changes(256).eviction(eviction).build().unwrap();
    let options = TierOptions::new().with_chunk_blocks(1).with_host(400 << 10);
    let mut engine = Engine::new(spec, identity(), options);
    let mut again = 0;
    for turn in 0..600 {
        let prompt = text(turn % 20 + 1, 25).split_off(8);
        let (sequence, reused) = engine.run(&prompt, StartOptions::default());
        again += if turn < 300 { 0 } else { reused };
        engine.cache.cache_mut().release(sequence).unwrap();
        engine.forget();
    }
    let stats = engine.cache.stats();
    assert!(stats.host_evictions > 0, "{stats:?}");
    engine.assert_nothing_held();
    again
}

#[test]
fn host_memory_keeps_a_part_of_a_cycle_that_is_too_long_for_it() {
    let [lru, rates] = [Eviction::Lru, Eviction::ReuseRate].map(cycle);
    assert_eq!(lru, 0, "what comes next is what was used the longest ago");
    assert!(rates > 300 * 16 / 3, "{rates} of {} tokens came back", 300 * 16);
}
