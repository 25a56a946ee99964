//! Fleets against the engine, and against figures worked out by hand.
use std::sync::Arc;
use std::time::Duration;

use kv::eviction::Eviction;

use super::*;
use crate::replay::hints::Hints;
use crate::replay::policy::Policy;
use crate::replay::source::tests::lines;
use crate::replay::tests::{Random, small, trace_of};
use crate::replay::trace::Sizes;

fn options(instances: u32, route: Route) -> FleetOptions {
    FleetOptions {
        instances,
        routes: vec![route],
        copies: 1,
        event_lag: Duration::ZERO,
        restart: None,
        prefill_tokens_per_second: 512,
    }
}

fn outcome(trace: &Trace, options: &FleetOptions, capacity: u32) -> Outcome {
    let workload = Workload::new(trace, options.copies).expect("a workload");
    replay(&workload, options, (options.routes[0], capacity), |_| {})
}

/// Makes a trace of requests of whole blocks, each at its second.
fn timed(requests: &[(u32, &[u64])]) -> Trace {
    let line = |(at, ids): &(u32, &[u64])| {
        let (at, tokens) = (at * 1000, 512 * ids.len());
        let lengths = format!(r#""input_length": {tokens}, "output_length": 1"#);
        format!(r#"{{"timestamp": {at}, {lengths}, "hash_ids": {ids:?}}}"#)
    };
    let text: Vec<_> = requests.iter().map(line).collect();
    Trace::from_lines(lines(text.join("\n")), None, Sizes::default()).expect("a trace")
}

fn milliseconds(outcome: &Outcome) -> Vec<u128> {
    outcome.first_tokens.iter().map(Duration::as_millis).collect()
}

/// Compares one instance with the engine, its cache and its policy.
fn agrees(trace: &Arc<Trace>, capacity: u32) {
    let case = (Policy::Real(Eviction::Lru), Some(capacity));
    let engine = crate::replay::run::replay(trace, case, (None, &Hints::default()), |_| {})
        .expect("a replay");
    for route in Route::ALL {
        let fleet = outcome(trace, &options(1, route), capacity);
        assert_eq!(
            (fleet.hit_tokens, fleet.evictions, fleet.refused_requests),
            (engine.hit_tokens, engine.evictions, engine.refused_requests),
            "{route} with {capacity} blocks",
        );
    }
}

#[test]
fn one_instance_is_the_cache_of_the_engine() {
    let mut random = Random(17);
    for round in 0..100_u64 {
        let requests = if round % 2 == 0 { random.prefixes(12, 6) } else { random.any(12, 6) };
        let capacity = u32::try_from(1 + random.below(8)).expect("small");
        agrees(&trace_of(&requests), capacity);
    }
    for (block_size, capacity) in [(512, 2), (512, 4), (512, 7), (256, 9), (1024, 3)] {
        agrees(&small(block_size), capacity);
    }
}

#[test]
fn a_prompt_waits_for_those_before_it_on_its_instance() {
    // A block takes a second. The second prompt waits for the first, and hits one block of two.
    let trace = timed(&[(0, &[1, 2]), (1, &[1, 3]), (9, &[4])]);
    let one = outcome(&trace, &options(1, Route::RoundRobin), 8);
    assert_eq!((milliseconds(&one), one.computed), (vec![2000, 2000, 1000], vec![2048]));
    let two = outcome(&trace, &options(2, Route::RoundRobin), 8);
    assert_eq!((milliseconds(&two), two.computed), (vec![2000, 2000, 1000], vec![1536, 1024]));
    assert_eq!((one.hit_tokens, two.hit_tokens), (512, 0));
}

#[test]
fn routes_differ_by_what_they_know() {
    // Two users, a and b, in turns but for one more of b, all after a common block.
    let a: &[u64] = &[1, 2];
    let b: &[u64] = &[1, 3];
    let trace = timed(&[(0, a), (10, b), (20, b), (30, a), (40, b), (50, a)]);
    let of = |route| outcome(&trace, &options(2, route), 8);
    // a b b a b a on 0 1 0 1 0 1: the third and the fourth prompt hit the common block, the fifth
    // and the sixth all.
    let turns = of(Route::RoundRobin);
    assert_eq!(turns.hit_tokens, 512 + 512 + 1023 + 1023);
    assert_eq!((turns.events, turns.event_bytes), (0, 0));
    // Nobody waits: in turn, too.
    assert_eq!(of(Route::Least).hit_tokens, turns.hit_tokens);
    // b goes to where the common block is: everything is on one instance.
    let kv = of(Route::Kv);
    assert_eq!(kv.hit_tokens, 512 + 4 * 1023);
    assert_eq!(kv.computed.iter().filter(|tokens| **tokens > 0).count(), 1);
    // a stores two blocks and b one.
    assert_eq!((kv.events, kv.event_bytes), (2, 2 * 150 + 3 * (9 + 4 * 512)));
    // Each user has one instance: the common block is computed once more if they differ.
    let hash = of(Route::Hash);
    let common = if hash.computed.contains(&0) { 512 } else { 0 };
    assert_eq!(hash.hit_tokens, common + 4 * 1023);
}

#[test]
fn a_router_knows_what_has_reached_it() {
    // The first prompt is computed after a second. Without a lag, the second finds it; one that
    // learns of it later takes the next instance, and the third prompt finds the first of them.
    let trace = timed(&[(0, &[1]), (2, &[1]), (4, &[1])]);
    let of = |lag| {
        let options = options(3, Route::Kv);
        outcome(&trace, &FleetOptions { event_lag: Duration::from_secs(lag), ..options }, 8)
    };
    assert_eq!((of(0).hit_tokens, of(0).events), (2 * 511, 1));
    assert_eq!(of(1).hit_tokens, 2 * 511, "in time");
    assert_eq!((of(2).hit_tokens, of(2).events), (511, 2));
    assert_eq!((of(9).hit_tokens, of(9).events), (0, 3));
}

#[test]
fn a_router_learns_what_was_evicted() {
    // Two blocks each. 3 4 evicts 1 2 on the first instance when the second one is busy; without
    // an event the router would send 1 2 there again.
    let trace = timed(&[(0, &[1, 2]), (10, &[5, 6]), (20, &[3, 4]), (30, &[1, 2]), (40, &[1, 2])]);
    let got = outcome(&trace, &options(2, Route::Kv), 2);
    // In turns: 12 on 0, 56 on 1, 34 on 0, 12 on 1, and there it is hit.
    assert_eq!((got.hit_tokens, got.evictions), (1023, 4));
    assert_eq!(got.computed, [2048, 2049]);
}

#[test]
fn a_restart_loses_the_cache_of_one_instance() {
    // Both users hit their instance from the second prompt on. After 15 s the first instance
    // restarts, and a computes two blocks again; after 30 s the second one, and so b.
    let (a, b): (&[u64], &[u64]) = (&[1, 2], &[3, 4]);
    let trace = timed(&[(0, a), (1, b), (10, a), (11, b), (20, a), (21, b), (40, a), (41, b)]);
    let with = |route, restart: Option<u64>| {
        let restart = restart.map(Duration::from_secs);
        outcome(&trace, &FleetOptions { restart, ..options(2, route) }, 8)
    };
    for route in [Route::RoundRobin, Route::Kv] {
        let (calm, restarted) = (with(route, None), with(route, Some(15)));
        assert_eq!((calm.hit_tokens, calm.restarts), (6 * 1023, 0), "{route}");
        assert_eq!((restarted.hit_tokens, restarted.restarts), (4 * 1023, 2), "{route}");
    }
    // Two prompts stored, and again after two messages of restarts.
    assert_eq!(with(Route::Kv, Some(15)).events, 2 + 2 + 2);
}

#[test]
fn a_router_that_has_not_learnt_of_a_restart_goes_astray() {
    // The first instance has 1 2 and restarts after 5 s. With a lag of 2 s the router sends the
    // prompt of 6 s there although the second one has a part of it.
    let prompts: [(u32, &[u64]); 3] = [(0, &[1, 2]), (1, &[1, 3]), (6, &[1, 2])];
    let trace = timed(&prompts);
    let of = |lag| {
        let options = FleetOptions {
            event_lag: Duration::from_millis(lag),
            restart: Some(Duration::from_secs(5)),
            ..options(2, Route::Kv)
        };
        outcome(&trace, &options, 8)
    };
    assert_eq!((of(0).hit_tokens, of(0).computed), (512, vec![1024, 1536]));
    assert_eq!((of(2000).hit_tokens, of(2000).computed), (0, vec![2048, 1024]));
}

#[test]
fn an_instance_without_the_common_block_gets_nothing_while_others_are_idle() {
    // Both have block 1 until the first one restarts after 5 s; the second one has time for all.
    let trace = timed(&[(0, &[1, 2]), (0, &[1, 3]), (6, &[1, 4]), (8, &[1, 5])]);
    let with = |route, seconds| {
        let restart = Some(Duration::from_secs(seconds));
        outcome(&trace, &FleetOptions { restart, ..options(2, route) }, 8).computed
    };
    assert_eq!(with(Route::Kv, 9), [1024 + 512, 1024 + 512], "in turn, without a restart");
    assert_eq!(with(Route::Kv, 5), [1024, 1024 + 2 * 512]);
    assert_eq!(with(Route::Least, 5), [2048, 1024 + 512]);
}

#[test]
fn copies_share_nothing() {
    let trace = timed(&[(0, &[1, 2]), (10, &[1, 2])]);
    let copies = |copies| {
        let options = FleetOptions { copies, ..options(1, Route::Kv) };
        outcome(&trace, &options, 100)
    };
    assert_eq!(copies(1).hit_tokens, 1023);
    let three = copies(3);
    assert_eq!((three.hit_tokens, three.first_tokens.len()), (3 * 1023, 6));
    assert_eq!(three.computed, [3 * (1024 + 1)]);
}

#[test]
fn requests_that_fit_no_cache_take_no_turn() {
    let trace = timed(&[(0, &[1]), (1, &[1, 2, 3]), (2, &[]), (3, &[4]), (4, &[1])]);
    let got = outcome(&trace, &options(2, Route::RoundRobin), 2);
    assert_eq!((got.refused_requests, got.hit_tokens), (2, 511));
    assert_eq!(got.computed, [513, 512]);
}

#[test]
fn limits_are_refused_by_name() {
    let trace = timed(&[(0, &[1]), (100, &[1])]);
    let refusal = |options: &FleetOptions| {
        let workload = Workload::new(&trace, options.copies).expect("a workload");
        check(options, &workload).map_err(|error| error.to_string())
    };
    let options = options(1, Route::Kv);
    assert_eq!(refusal(&options), Ok(()));
    let copies = FleetOptions { copies: 100_000_000, ..options.clone() };
    let error = refusal(&copies).expect_err("too many");
    assert!(error.starts_with("--copies 100000000: 200000000 requests in all"), "{error}");
    let restart = FleetOptions { restart: Some(Duration::from_micros(1)), ..options };
    let error = refusal(&restart).expect_err("too many");
    assert!(error.starts_with("--restart 0.000001: 200000000 restarts"), "{error}");
}
