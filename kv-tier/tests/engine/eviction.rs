//! The order in which host memory gives up chunks: that of the cache's policy.
use std::time::Duration;

use kv_core::StartOptions;
use kv_core::eviction::{Eviction, Return};
use kv_tier::TierOptions;

use crate::support::{Engine, builder, identity, text};

fn engine(eviction: Eviction) -> Engine {
    let spec = builder().paged(4, 32).changes(256).eviction(eviction).build().unwrap();
    let options = TierOptions::new().with_chunk_blocks(1).with_host(400 << 10);
    Engine::new(spec, identity(), options)
}

/// Runs a prompt of 17 tokens with nothing on the device before and after it; returns the tokens
/// that host memory has brought.
fn ask(engine: &mut Engine, number: u32, hint: Option<Return>) -> u32 {
    let prompt = text(number, 25).split_off(8);
    let options = StartOptions::default();
    let options = hint.map_or(options, |hint| options.with_hint(hint));
    let (_, reused) = engine.run(&prompt, options);
    engine.forget();
    reused
}

/// Asks for prompts in turn, more than host memory has room for, with nothing left on the device in
/// between. Returns the tokens that come back in the second half.
fn cycle(eviction: Eviction) -> u32 {
    let mut engine = engine(eviction);
    let mut again = 0;
    for turn in 0..600 {
        let reused = ask(&mut engine, turn % 20 + 1, None);
        again += if turn < 300 { 0 } else { reused };
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

/// Asks for texts twice and for others once, more of them in between than host memory has room for;
/// returns the tokens that come back in the second half.
fn second_times(says: bool) -> u32 {
    let mut engine = engine(Eviction::ReuseRate);
    let said = |hint| says.then_some(hint);
    let mut again = 0;
    for turn in 0..300 {
        ask(&mut engine, 2 * turn + 1, said(Return::Within(Duration::from_secs(8))));
        ask(&mut engine, 2 * turn + 2, said(Return::Ended));
        if turn >= AFTER {
            let reused = ask(&mut engine, 2 * (turn - AFTER) + 1, said(Return::Ended));
            again += if turn < 150 { 0 } else { reused };
        }
    }
    again
}

/// Turns until a text is asked for again.
const AFTER: u32 = 14;

#[test]
fn hints_tell_host_memory_what_comes_back() {
    let [silent, hinted] = [false, true].map(second_times);
    // Half of what lies in between would fit, and is not known to be the right half.
    assert!(hinted > 150 * 16 * 2 / 3, "{hinted} of {} tokens came back", 150 * 16);
    assert!(silent < hinted * 2 / 3, "{silent} came back without hints, {hinted} with them");
}
