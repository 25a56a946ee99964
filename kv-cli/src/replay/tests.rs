//! Replays against figures worked out by hand, and against simple models.
//!
//! The last token of a prompt is always computed: a prompt that is cached whole hits one less. It
//! hits a part of its last block, which it copies to write the last token, so that it takes a block
//! until the copy turns out to be known.
use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;
use std::sync::Arc;

use kv::eviction::Eviction;

use super::hints::Hints;
use super::policy::Policy;
use super::run::{Outcome, replay};
use super::source::tests::lines;
use super::trace::{Sizes, Trace};
use super::{cases, default_capacities};
use crate::num::{to_u32, to_u64};

const LRU: Policy = Policy::Real(Eviction::Lru);

/// Six requests, by letters: ab, acd, ab, ef, acdg, ab; the last block of ab has 488 tokens, that
/// of ef 188.
const SMALL: &str = include_str!("../../tests/data/replay.jsonl");

fn blocks_of(block_size: u32) -> Sizes {
    Sizes { block: NonZeroU32::new(block_size), id: None }
}

pub(super) fn small(block_size: u32) -> Arc<Trace> {
    let trace = Trace::from_lines(lines(SMALL), None, blocks_of(block_size));
    Arc::new(trace.expect("a trace"))
}

fn outcome(trace: &Arc<Trace>, policy: Policy, capacity: u32) -> Outcome {
    let with = (None, &Hints::default());
    replay(trace, (policy, Some(capacity)), with, |_| {}).expect("a replay")
}

fn infinite(trace: &Arc<Trace>) -> Outcome {
    let with = (None, &Hints::default());
    replay(trace, (Policy::Infinite, None), with, |_| {}).expect("a replay")
}

fn hits_and_evictions(trace: &Arc<Trace>, policy: Policy, capacity: u32) -> (u64, u64) {
    let Outcome { hit_tokens, evictions, .. } = outcome(trace, policy, capacity);
    (hit_tokens, evictions)
}

/// Makes a trace of whole blocks with these ids.
pub(super) fn trace_of(requests: &[Vec<u64>]) -> Arc<Trace> {
    trace_with(requests, 512, 0)
}

/// Makes a trace of these ids, of which the last one of each request stands for `last` tokens, or
/// for a whole block if that is 0.
fn trace_with(requests: &[Vec<u64>], block_size: u32, last: usize) -> Arc<Trace> {
    let line = |ids: &Vec<u64>| {
        let missing = if last == 0 { 0 } else { 512 - last };
        let tokens = 512 * ids.len() - missing;
        let lengths = format!(r#""input_length": {tokens}, "output_length": 0"#);
        format!(r#"{{"timestamp": 0, {lengths}, "hash_ids": {ids:?}}}"#)
    };
    let text: Vec<_> = requests.iter().map(line).collect();
    let trace = Trace::from_lines(lines(text.join("\n")), None, blocks_of(block_size));
    Arc::new(trace.expect("a trace"))
}

/// Numbers below `n`, by xorshift.
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }

    /// Makes requests whose ids name their whole prefix.
    pub(super) fn prefixes(&mut self, requests: u64, blocks_max: u64) -> Vec<Vec<u64>> {
        let mut ids = BTreeMap::new();
        let request = |_| {
            let mut parent = 0;
            let blocks = 1 + self.below(blocks_max);
            let block = |_| {
                let next = to_u64(ids.len()) + 1;
                parent = *ids.entry((parent, self.below(2))).or_insert(next);
                parent
            };
            (0..blocks).map(block).collect()
        };
        (0..requests).map(request).collect()
    }

    /// Makes requests of any ids, in any order and even repeated.
    pub(super) fn any(&mut self, requests: u64, blocks_max: u64) -> Vec<Vec<u64>> {
        let request = |_| (0..=self.below(blocks_max)).map(|_| self.below(9)).collect();
        (0..requests).map(request).collect()
    }
}

#[test]
fn a_small_trace_gives_the_figures_worked_out_by_hand() {
    let trace = small(512);
    // acd hits a, ab hits 999 of its 1000 tokens, acdg hits a, ab hits a. The copy of b evicts d,
    // ef takes the block of that copy and evicts c, acdg evicts b, f and e, ab evicts g.
    assert_eq!(hits_and_evictions(&trace, LRU, 4), (512 + 999 + 512 + 512, 6));
    // The copy of b evicts d, ef evicts b, which is needed last: acdg hits a and c, and evicts e
    // and f, ab hits a and evicts one.
    assert_eq!(hits_and_evictions(&trace, Policy::Min, 4), (512 + 999 + 1024 + 512, 5));
    // All seven fit, until the last copy of b evicts one.
    assert_eq!(hits_and_evictions(&trace, LRU, 7), (512 + 999 + 1536 + 999, 1));
    assert_eq!(hits_and_evictions(&trace, LRU, 8), (512 + 999 + 1536 + 999, 0));
    let infinite = infinite(&trace);
    assert_eq!((infinite.hit_tokens, infinite.evictions, infinite.peak_blocks), (4046, 0, 7));
    assert_eq!(infinite.refused_requests, 0);
}

#[test]
fn split_and_joined_ids_hit() {
    // ab has 4 blocks, acd 6, ef 3, acdg 8; 13 are different.
    let split = infinite(&small(256));
    assert_eq!((split.hit_tokens, split.peak_blocks), (4046, 13));
    // ab, ac d, ab, ef, ac dg, ab: ac is hit, and ab twice.
    let joined = infinite(&small(1024));
    assert_eq!((joined.hit_tokens, joined.peak_blocks), (999 + 1024 + 999, 5));
}

#[test]
fn requests_larger_than_the_cache_are_refused_and_change_nothing() {
    let trace = trace_of(&[vec![1], vec![1, 2, 3], vec![2], vec![1, 2, 3], vec![1]]);
    for policy in [LRU, Policy::Min] {
        let got = outcome(&trace, policy, 2);
        // The last request finds 1, and evicts 2 for its copy.
        assert_eq!((got.hit_tokens, got.evictions), (511, 1), "{policy:?}");
        assert_eq!((got.refused_requests, got.peak_blocks), (2, 2), "{policy:?}");
    }
    assert_eq!(outcome(&trace, LRU, 3).refused_requests, 0);
}

#[test]
fn min_counts_no_use_of_a_refused_request() {
    let trace = trace_of(&[vec![1], vec![2], vec![1, 3, 4], vec![5], vec![2]]);
    // 5 evicts 1, which only the refused request names again; 2 is hit, and its copy evicts 5.
    let got = outcome(&trace, Policy::Min, 2);
    assert_eq!((got.hit_tokens, got.evictions, got.refused_requests), (511, 2, 1));
}

#[test]
fn a_prompt_that_fills_the_cache_is_hit_without_a_copy() {
    // No block is left for a copy of the last one, which is written in place.
    let trace = trace_of(&[vec![1, 2], vec![1, 2], vec![1, 2]]);
    for policy in [LRU, Policy::Real(Eviction::ReuseRate), Policy::Min] {
        let got = outcome(&trace, policy, 2);
        assert_eq!((got.hit_tokens, got.evictions), (2 * 1023, 0), "{policy:?}");
        assert_eq!(got.refused_requests, 0, "{policy:?}");
    }
}

/// A short request between all others, as a health check sends it.
#[test]
fn a_repeated_request_is_stored_once_and_evicts_nothing() {
    let ping = vec![1_000_000_u64];
    let mut requests = Vec::new();
    for _ in 0..3 {
        for prompt in 0..50_u64 {
            requests.push((0..10).map(|at| 1 + prompt * 10 + at).collect::<Vec<_>>());
            requests.extend(std::iter::repeat_n(ping.clone(), 20));
        }
    }
    let trace = trace_of(&requests);
    for eviction in Eviction::ALL {
        let Outcome { hit_tokens, evictions, peak_blocks, .. } =
            outcome(&trace, Policy::Real(eviction), 1000);
        assert_eq!((evictions, peak_blocks), (0, 501), "{eviction}");
        // A third of the prompts and one ping are new.
        let found = 2 * 50 * (10 * 512 - 1) + (3 * 50 * 20 - 1) * 511;
        assert_eq!(hit_tokens, found, "{eviction}");
    }
}

/// Returns the beginnings of a request, of one block, of two and so on: a block is what it has and
/// everything before it.
fn chain(ids: &[u64]) -> Vec<Vec<u64>> {
    (1..=ids.len()).map(|len| ids[..len].to_vec()).collect()
}

/// Returns the tokens that a request of `blocks` blocks hits if `cached` of them are.
fn hit_tokens(cached: usize, blocks: usize) -> u64 {
    512 * to_u64(cached) - u64::from(cached == blocks)
}

#[test]
fn without_a_limit_everything_stays_cached() {
    let mut random = Random(7);
    for round in 0..200_u64 {
        let requests = if round % 2 == 0 { random.prefixes(12, 6) } else { random.any(12, 6) };
        let (mut seen, mut hits) = (BTreeSet::new(), 0);
        for ids in &requests {
            let cached = chain(ids).iter().take_while(|block| seen.contains(*block)).count();
            hits += hit_tokens(cached, ids.len());
            seen.extend(chain(ids));
        }
        let trace = trace_of(&requests);
        let got = infinite(&trace);
        assert_eq!((got.hit_tokens, got.evictions), (hits, 0), "{requests:?}");
        assert_eq!(got.peak_blocks, to_u32(seen.len()), "{requests:?}");
        assert_eq!(hits_and_evictions(&trace, LRU, 100), (hits, 0));
    }
}

/// Returns hits and evictions of a list with the least recently used block first.
fn listed(requests: &[Vec<u64>], capacity: usize) -> (u64, u64) {
    let (mut list, mut hits, mut evictions) = (Vec::<Vec<u64>>::new(), 0, 0);
    for ids in requests.iter().filter(|ids| ids.len() <= capacity) {
        let chain = chain(ids);
        let cached = chain.iter().take_while(|block| list.contains(block)).count();
        hits += hit_tokens(cached, ids.len());
        let held = &chain[..cached];
        list.retain(|block| !held.contains(block));
        // If there is no block for a copy of the last one, it is written in place.
        let taken = (ids.len() - cached).max(usize::from(cached < capacity));
        while list.len() + cached + taken > capacity {
            list.remove(0);
            evictions += 1;
        }
        list.retain(|block| !chain.contains(block));
        list.extend(chain.into_iter().rev());
    }
    (hits, evictions)
}

#[test]
fn lru_does_what_a_list_does() {
    let mut random = Random(11);
    for round in 0..400_u64 {
        let requests = if round % 2 == 0 { random.prefixes(12, 6) } else { random.any(12, 6) };
        let capacity = usize::try_from(1 + random.below(8)).expect("small");
        let got = hits_and_evictions(&trace_of(&requests), LRU, to_u32(capacity));
        assert_eq!(got, listed(&requests, capacity), "{capacity}: {requests:?}");
    }
}

/// Returns the most hits that any choice of victims gives.
fn best(requests: &[Vec<u64>], cached: &BTreeSet<u64>, capacity: usize) -> u64 {
    let Some((ids, rest)) = requests.split_first() else {
        return 0;
    };
    let hits = to_u64(ids.iter().take_while(|id| cached.contains(*id)).count());
    let missing: Vec<_> = ids.iter().copied().filter(|id| !cached.contains(id)).collect();
    let idle: Vec<_> = cached.iter().copied().filter(|id| !ids.contains(id)).collect();
    let room = capacity - cached.len();
    let victims = missing.len().saturating_sub(room).min(idle.len());
    let choices = (0_u32..1 << idle.len()).filter(|choice| choice.count_ones() == to_u32(victims));
    let after = choices.map(|choice| {
        let chosen = |(bit, id): (u32, &u64)| (choice >> bit & 1 == 1).then_some(*id);
        let gone: BTreeSet<_> = (0..).zip(&idle).filter_map(chosen).collect();
        let mut next = cached - &gone;
        next.extend(missing.iter().take(room + victims));
        best(rest, &next, capacity)
    });
    hits + after.max().expect("one choice at least")
}

/// Adds an end of its own to each request, so that no request is cached whole.
fn with_ends(mut requests: Vec<Vec<u64>>) -> Vec<Vec<u64>> {
    for (ids, end) in requests.iter_mut().zip(1_000_000..) {
        ids.push(end);
    }
    requests
}

#[test]
fn no_choice_of_victims_is_better_than_min() {
    let mut random = Random(3);
    let mut gains = 0;
    for _ in 0..150 {
        let requests = with_ends(random.prefixes(6, 3));
        let capacity = usize::try_from(4 + random.below(2)).expect("small");
        let trace = trace_with(&requests, 512, 1);
        let (got, _) = hits_and_evictions(&trace, Policy::Min, to_u32(capacity));
        for eviction in Eviction::ALL {
            let (real, _) = hits_and_evictions(&trace, Policy::Real(eviction), to_u32(capacity));
            assert!(real <= got, "{eviction}: {requests:?}");
        }
        assert_eq!(got, 512 * best(&requests, &BTreeSet::new(), capacity), "{requests:?}");
        let (lru, _) = hits_and_evictions(&trace, LRU, to_u32(capacity));
        gains += u32::from(got > lru);
    }
    assert!(gains > 15, "these traces hardly need a choice: {gains}");
}

#[test]
fn min_of_split_ids_is_no_worse_than_of_whole_ids() {
    let mut random = Random(5);
    for _ in 0..100 {
        let requests = with_ends(random.prefixes(12, 4));
        let [whole, split] = [512, 128].map(|size| trace_with(&requests, size, 1));
        let (coarse, _) = hits_and_evictions(&whole, Policy::Min, 5);
        let (fine, _) = hits_and_evictions(&split, Policy::Min, 20);
        assert!(fine >= coarse, "{fine} < {coarse}: {requests:?}");
    }
}

#[test]
fn a_trace_without_content_hits_nothing() {
    let text = "TIMESTAMP,ContextTokens,GeneratedTokens\n\
                2023-11-16 18:15:46.6805900,33,44\n2023-11-16 18:15:47,0,1\n\
                2023-11-16 18:15:48,100,1\n";
    let trace = Arc::new(Trace::from_lines(lines(text), None, Sizes::default()).expect("a trace"));
    for policy in [LRU, Policy::Min] {
        // 3 and 7 blocks of 16.
        let got = outcome(&trace, policy, 8);
        assert_eq!((got.hit_tokens, got.evictions, got.peak_blocks), (0, 2, 8), "{policy:?}");
        assert_eq!(got.refused_requests, 1, "no token is no prompt");
    }
    assert_eq!(infinite(&trace).peak_blocks, 10);
}

#[test]
fn capacities_are_round_and_different() {
    assert_eq!(default_capacities(182_790), [1400, 5700, 22_000, 91_000]);
    assert_eq!(default_capacities(1), [1]);
    assert_eq!(default_capacities(40), [1, 5, 20]);
    assert_eq!(default_capacities(u32::MAX).len(), 4);
}

#[test]
fn every_case_is_measured_once() {
    let policies = [LRU, Policy::Infinite, LRU];
    let (lru, infinite) = (LRU, Policy::Infinite);
    let expected = [(lru, Some(3)), (lru, Some(1)), (infinite, None)];
    assert_eq!(cases(&policies, &[3, 1, 3], 100), expected);
}
