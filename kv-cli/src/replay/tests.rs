//! Replays against figures worked out by hand, and against simple models.
use std::collections::{BTreeMap, BTreeSet};
use std::num::NonZeroU32;
use std::sync::Arc;

use kv::backend::NullBackend;
use kv::eviction::Eviction;
use kv::{CacheSpec, GroupId, KvCache, SequenceId, StartOptions, StepInput};

use super::policy::Policy;
use super::run::{Outcome, replay};
use super::source::tests::lines;
use super::trace::{Sizes, Trace};
use super::{cases, default_capacities};
use crate::num::{to_u32, to_u64, to_usize};

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
    replay(trace, capacity, policy.build(trace, capacity), &mut (), |_| {})
}

fn hits_and_evictions(trace: &Arc<Trace>, policy: Policy, capacity: u32) -> (u64, u64) {
    let Outcome { hit_tokens, evictions, .. } = outcome(trace, policy, capacity);
    (hit_tokens, evictions)
}

/// Makes a trace of whole blocks with these ids.
pub(super) fn trace_of(requests: &[Vec<u64>]) -> Arc<Trace> {
    split_trace_of(requests, 512)
}

fn split_trace_of(requests: &[Vec<u64>], block_size: u32) -> Arc<Trace> {
    let line = |ids: &Vec<u64>| {
        let lengths = format!(r#""input_length": {}, "output_length": 0"#, 512 * ids.len());
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
    fn prefixes(&mut self, requests: u64, blocks_max: u64) -> Vec<Vec<u64>> {
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
    fn any(&mut self, requests: u64, blocks_max: u64) -> Vec<Vec<u64>> {
        let request = |_| (0..=self.below(blocks_max)).map(|_| self.below(9)).collect();
        (0..requests).map(request).collect()
    }
}

#[test]
fn a_small_trace_gives_the_figures_worked_out_by_hand() {
    let trace = small(512);
    // acd hits a, ab hits both (1000 of its 1024), acdg hits a, ab hits a; d and c are evicted for
    // ef, b, f and e for acdg, g for ab.
    assert_eq!(hits_and_evictions(&trace, LRU, 4), (512 + 1000 + 512 + 512, 6));
    // ef evicts b, which is needed last, and d: acdg hits a and c.
    assert_eq!(hits_and_evictions(&trace, Policy::Min, 4), (512 + 1000 + 1024 + 512, 5));
    // Each request hits a; nothing but a fits.
    assert_eq!(hits_and_evictions(&trace, LRU, 1).0, 3 * 512);
    assert_eq!(hits_and_evictions(&trace, LRU, 7), (512 + 1000 + 1536 + 1000, 0));
    let infinite = outcome(&trace, Policy::Infinite, trace.num_blocks());
    assert_eq!((infinite.hit_tokens, infinite.peak_blocks), (4048, 7));
}

#[test]
fn split_and_joined_ids_hit() {
    // ab has 4 blocks, acd 6, ef 3, acdg 8; 13 are different.
    let infinite = |trace: Arc<Trace>| outcome(&trace, Policy::Infinite, trace.num_blocks());
    let split = infinite(small(256));
    assert_eq!((split.hit_tokens, split.peak_blocks), (4048, 13));
    // ab, ac d, ab, ef, ac dg, ab: ac is hit, and ab twice.
    let joined = infinite(small(1024));
    assert_eq!((joined.hit_tokens, joined.peak_blocks), (1000 + 1024 + 1000, 5));
}

#[test]
fn a_request_larger_than_the_cache_keeps_its_start() {
    let trace = trace_of(&[vec![1, 2, 3, 4], vec![1, 2, 3, 4], vec![9], vec![1, 2, 3, 4]]);
    for policy in [LRU, Policy::Min] {
        // The second request finds 1 and 2; 9 evicts 2.
        assert_eq!(hits_and_evictions(&trace, policy, 2), (3 * 512, 2), "{policy:?}");
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
        let found = 2 * 500 + (3 * 50 * 20 - 1);
        assert_eq!(hit_tokens, found * 512, "{eviction}");
    }
}

#[test]
fn without_a_limit_everything_stays_cached() {
    let mut random = Random(7);
    for round in 0..200_u64 {
        let requests = if round % 2 == 0 { random.prefixes(12, 6) } else { random.any(12, 6) };
        let (mut seen, mut hits) = (BTreeSet::<u64>::new(), 0);
        for ids in &requests {
            hits += to_u64(ids.iter().take_while(|id| seen.contains(*id)).count());
            seen.extend(ids);
        }
        let trace = trace_of(&requests);
        let got = outcome(&trace, Policy::Infinite, trace.num_blocks());
        assert_eq!((got.hit_tokens, got.evictions), (512 * hits, 0), "{requests:?}");
        assert_eq!(got.peak_blocks, to_u32(seen.len()), "{requests:?}");
        assert_eq!(hits_and_evictions(&trace, LRU, 54).0, got.hit_tokens);
    }
}

/// Returns hits and evictions of a list with the least recently used id first.
fn listed(requests: &[Vec<u64>], capacity: usize) -> (u64, u64) {
    let (mut list, mut hits, mut evictions) = (Vec::<u64>::new(), 0, 0);
    for ids in requests {
        hits += to_u64(ids.iter().take_while(|id| list.contains(id)).count());
        let mut held: Vec<_> = ids.iter().copied().filter(|id| list.contains(id)).collect();
        list.retain(|id| !held.contains(id));
        for id in ids {
            if held.contains(id) {
                continue;
            }
            let kept: BTreeSet<_> = held.iter().collect();
            if list.len() + kept.len() == capacity {
                if list.is_empty() {
                    break;
                }
                list.remove(0);
                evictions += 1;
            }
            held.push(*id);
        }
        // The last release counts, and that is of the id's first place.
        let mut order = Vec::new();
        for id in ids.iter().filter(|id| held.contains(id)) {
            if !order.contains(id) {
                order.push(*id);
            }
        }
        list.extend(order.iter().rev());
    }
    (512 * hits, evictions)
}

#[test]
fn lru_does_what_a_list_does() {
    let mut random = Random(11);
    for round in 0..400_u64 {
        let requests = if round % 2 == 0 { random.prefixes(12, 6) } else { random.any(12, 6) };
        let capacity = 1 + random.below(8);
        let trace = trace_of(&requests);
        let capacity = usize::try_from(capacity).expect("small");
        let got = hits_and_evictions(&trace, LRU, to_u32(capacity));
        assert_eq!(got, listed(&requests, capacity), "{capacity}: {requests:?}");
    }
}

/// Returns hits and evictions of the bookkeeping of a cache, in blocks of `BLOCK` tokens.
fn cached(requests: &[Vec<u64>], capacity: u32, eviction: Eviction) -> (u64, u64) {
    const BLOCK: u32 = 4;
    let spec = CacheSpec::builder().layers(1).kv_heads(1).head_dim(4).paged(BLOCK, capacity);
    let spec = spec.eviction(eviction).build().expect("a spec");
    let mut cache = KvCache::new(NullBackend::new(), spec).expect("no memory is needed");
    let (seq, mut hits) = (SequenceId(0), 0);
    for ids in requests {
        let mut prompt: Vec<_> =
            ids.iter().flat_map(|id| [u32::try_from(*id).expect("small"); 4]).collect();
        // The last token of a prompt is never reused.
        prompt.push(u32::MAX);
        let reused = cache.start(seq, &prompt, StartOptions::default()).expect("starts");
        hits += u64::from(reused / BLOCK);
        let rest = &prompt[to_usize(reused)..prompt.len() - 1];
        if !rest.is_empty() {
            let mut step = cache.begin_step(&[StepInput::tokens(seq, rest)]).expect("fits");
            step.mark_written();
            step.commit().expect("an open step");
        }
        cache.release(seq).expect("known");
    }
    (512 * hits, cache.state().pool(GroupId(0)).expect("a group").stats().evictions)
}

#[test]
fn a_cache_has_the_same_hits_and_evictions() {
    let mut random = Random(13);
    for _ in 0..200 {
        let requests = random.prefixes(30, 6);
        let capacity = 7 + u32::try_from(random.below(12)).expect("small");
        let trace = trace_of(&requests);
        for eviction in [Eviction::Lru, Eviction::Lfu, Eviction::Priority] {
            let got = hits_and_evictions(&trace, Policy::Real(eviction), capacity);
            let expected = cached(&requests, capacity, eviction);
            assert_eq!(got, expected, "{eviction}, {capacity}: {requests:?}");
        }
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

#[test]
fn no_choice_of_victims_is_better_than_min() {
    let mut random = Random(3);
    let mut gains = 0;
    for _ in 0..300 {
        let requests = random.prefixes(7, 4);
        let capacity = usize::try_from(2 + random.below(4)).expect("small");
        let trace = trace_of(&requests);
        let (got, _) = hits_and_evictions(&trace, Policy::Min, to_u32(capacity));
        for eviction in Eviction::ALL {
            let (real, _) = hits_and_evictions(&trace, Policy::Real(eviction), to_u32(capacity));
            assert!(real <= got, "{eviction}: {requests:?}");
        }
        assert_eq!(got, 512 * best(&requests, &BTreeSet::new(), capacity), "{requests:?}");
        let (lru, _) = hits_and_evictions(&trace, LRU, to_u32(capacity));
        gains += u32::from(got > lru);
    }
    assert!(gains > 30, "these traces hardly need a choice: {gains}");
}

#[test]
fn min_of_split_ids_is_no_worse_than_of_whole_ids() {
    let mut random = Random(5);
    for _ in 0..100 {
        let requests = random.prefixes(12, 5);
        let (whole, split) = (trace_of(&requests), split_trace_of(&requests, 128));
        let (coarse, _) = hits_and_evictions(&whole, Policy::Min, 4);
        let (fine, _) = hits_and_evictions(&split, Policy::Min, 16);
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
    }
    assert_eq!(outcome(&trace, Policy::Infinite, 10).peak_blocks, 10);
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
