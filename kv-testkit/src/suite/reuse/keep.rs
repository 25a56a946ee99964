//! Eviction, pins, priorities and forgetting: which content stays cached, and in which order it
//! goes.
use std::sync::Arc;
use std::time::Duration;

use kv_core::backend::AnyBackend;
use kv_core::error::BlocksExhausted;
use kv_core::eviction::{Clock, Eviction, ManualClock, Priority, Retention, RetentionRange};
use kv_core::scheduling::Admission;
use kv_core::spec::{CacheSpecBuilder, PrefixReuse};
use kv_core::{CacheError, GroupId};

use super::super::{case, small};
use super::prompts::Prompts;
use super::{plain, tokens, with};
use crate::case::{At, Case, CaseError, CaseResult, Outcome, ensure, same};
use crate::fixture::seq;

pub(super) fn cases() -> Vec<Case> {
    vec![
        case("reuse/evicted_and_recomputed", evicted),
        case("reuse/tails_are_evicted_before_heads", tails),
        case("reuse/pinned_prefixes_stay", pinned),
        case("reuse/forgetting_stops_at_shared_blocks", forgotten),
        case("reuse/priorities_hold_and_run_out", priorities),
        case("reuse/reused_blocks_are_not_free", reused_not_free),
    ]
}

fn full_blocks(num_blocks: u32) -> CacheSpecBuilder {
    small().paged(4, num_blocks).prefix_reuse(PrefixReuse::FullBlocks)
}

/// Computes a prompt and releases it.
fn compute_and_release(prompts: &mut Prompts, prompt: &[u32]) -> Result<(), CaseError> {
    prompts.begin(90, prompt, plain())?;
    Ok(prompts.cache.release(seq(90))?)
}

fn evicted(backend: &AnyBackend) -> CaseResult {
    let mut prompts = Prompts::new(backend, small().paged(4, 6))?;
    for round in 0..3 {
        for other in [0, 100, 200] {
            prompts.begin(1, &tokens(other..other + 18), plain()).at(format!("round {round}"))?;
            prompts.append(1, &[7, 8])?;
            prompts.cache.release(seq(1))?;
        }
    }
    ensure(prompts.cache.state().stats().evictions > 0, || "nothing was evicted".to_owned())?;
    Ok(Outcome::Holds)
}

/// The last block is evicted first when a sequence ends, a pin is dropped or a window moves, so
/// that the rest can still be found.
fn tails(backend: &AnyBackend) -> CaseResult {
    for eviction in Eviction::ALL {
        for is_pinned in [false, true] {
            let place = format!("{eviction}, pinned: {is_pinned}");
            let mut prompts = Prompts::new(backend, full_blocks(8).eviction(eviction))?;
            prompts.begin(1, &tokens(0..16), plain())?;
            let pin = is_pinned.then(|| prompts.cache.pin_prefix(&tokens(0..16), plain()));
            prompts.cache.release(seq(1))?;
            if let Some(pin) = pin {
                prompts.cache.unpin(pin.id)?;
            }
            prompts.begin(2, &tokens(100..116), plain())?;
            for (left, more) in [12, 8, 4, 0].into_iter().zip(0..) {
                prompts.append(2, &tokens(200 + 4 * more..204 + 4 * more))?;
                let found = prompts.cache.state().probe(&tokens(0..17), plain());
                same("tokens left", found, left).at(&place)?;
            }
        }
        // Four blocks leave a window at once.
        let mut prompts = Prompts::new(backend, full_blocks(7).window_left(3).eviction(eviction))?;
        prompts.cache.start(seq(1), &tokens(0..24), plain())?;
        prompts.hashes.insert(1, Vec::new());
        prompts.append(1, &tokens(0..20))?;
        prompts.append(1, &tokens(20..24))?;
        same("free blocks", prompts.cache.state().free_blocks(GroupId(0)), 5)?;
        for (left, id) in [16, 12, 8, 4, 0].into_iter().zip(2..) {
            prompts.begin(id, &[100 * id as u32], plain())?;
            let found = prompts.cache.state().probe(&tokens(0..17), plain());
            same("tokens left after a window moved", found, left).at(eviction)?;
        }
    }
    Ok(Outcome::Holds)
}

fn pinned(backend: &AnyBackend) -> CaseResult {
    for eviction in Eviction::ALL {
        let mut prompts = Prompts::new(backend, full_blocks(6).eviction(eviction))?;
        let system = tokens(0..9);
        compute_and_release(&mut prompts, &system)?;
        let pins = [(); 2].map(|()| prompts.cache.pin_prefix(&system, plain()));
        same("tokens pinned", pins.map(|pin| pin.tokens), [8; 2])?;
        for other in [100, 200, 300] {
            compute_and_release(&mut prompts, &tokens(other..other + 16))?;
            let found = prompts.cache.state().probe(&system, plain());
            same("tokens of a pinned prefix", found, 8).at(eviction)?;
        }
        same("free blocks", prompts.cache.state().free_blocks(GroupId(0)), 4)?;
        ensure(!prompts.cache.reset_prefixes()?, || "a reset took pinned blocks".to_owned())?;
        // Two pins hold the prefix: dropping one changes nothing.
        for (pin, left) in pins.into_iter().zip([8, 0]) {
            ensure(prompts.cache.unpin(pin.id)?, || "a pin is unknown".to_owned())?;
            same("tokens", prompts.begin(1, &tokens(0..9), plain())?, 8)?;
            prompts.cache.release(seq(1))?;
            let fits = if left == 0 { 24 } else { 16 };
            compute_and_release(&mut prompts, &tokens(400 + fits..400 + 2 * fits))?;
            let found = prompts.cache.state().probe(&system, plain());
            same("tokens after the pin", found, left).at(eviction)?;
        }
    }
    Ok(Outcome::Holds)
}

fn forgotten(backend: &AnyBackend) -> CaseResult {
    let mut prompts = Prompts::new(backend, full_blocks(12))?;
    let [one, other] = [50, 60].map(|next| with(tokens(0..8), &tokens(next..next + 5)));
    prompts.begin(1, &one, plain())?;
    prompts.begin(2, &other, plain())?;
    let forget = |prompts: &mut Prompts, prompt: &[u32], keep| {
        prompts.cache.forget_prefix(prompt, plain(), keep)
    };
    let found = |prompts: &Prompts| {
        [&one, &other].map(|prompt| prompts.cache.state().probe(prompt, plain()))
    };
    same("blocks that are held", forget(&mut prompts, &one, 0)?, 0)?;
    prompts.cache.release(seq(1))?;
    same("a block after the shared ones", forget(&mut prompts, &one, 0)?, 1)?;
    same("tokens left", found(&prompts), [8, 12])?;
    prompts.begin(1, &one, plain())?;
    prompts.cache.release(seq(1))?;
    prompts.cache.release(seq(2))?;
    same("a block that nothing follows", forget(&mut prompts, &one, 0)?, 1)?;
    same("tokens left", found(&prompts), [8, 12])?;
    same("blocks after 4 tokens", forget(&mut prompts, &other, 4)?, 2)?;
    same("tokens left", found(&prompts), [4, 4])?;
    prompts.begin(1, &other, plain())?;
    Ok(Outcome::Holds)
}

fn retention(level: u8, seconds: Option<u64>) -> Result<Retention, CaseError> {
    let priority = Priority { level, duration: seconds.map(Duration::from_secs) };
    let range = RetentionRange { begin: 0, end: None, priority };
    Ok(Retention::new(vec![range]).map_err(|error| error.to_string())?)
}

/// Two prompts fill the pool, and a third evicts the one of lower priority.
fn priorities(backend: &AnyBackend) -> CaseResult {
    let (high, middle) = (retention(80, Some(10))?, retention(50, None)?);
    for eviction in [Eviction::Priority, Eviction::ReuseRate] {
        for (way, seconds) in [0, 1, 2].into_iter().flat_map(|way| [(way, 9), (way, 10)]) {
            let place = format!("{eviction}, way {way}, {seconds} seconds");
            let mut prompts = Prompts::new(backend, full_blocks(4))?;
            let time = Arc::new(ManualClock::new());
            let clock: Arc<dyn Clock> = Arc::<ManualClock>::clone(&time);
            let is_set = prompts.cache.set_policy(GroupId(0), eviction.policy(4, &clock));
            ensure(is_set, || "the policy was refused".to_owned())?;
            let first = tokens(0..9);
            match way {
                // The priority is given by the request that computes, by one that reuses, or by a
                // call for the prefix.
                0 => drop(prompts.begin(1, &first[..8], plain().with_retention(&high))?),
                1 => {
                    compute_and_release(&mut prompts, &first[..8])?;
                    let reused =
                        prompts.cache.start(seq(1), &first, plain().with_retention(&high))?;
                    same("tokens", reused, 8)?;
                }
                _ => {
                    prompts.begin(1, &first[..8], plain())?;
                    let priority = high.priority_at(0, 8);
                    let tokens = prompts.cache.prioritise_prefix(&first, plain(), priority);
                    same("tokens with another priority", tokens, 8)?;
                }
            }
            // The duration starts when no sequence holds the blocks.
            time.advance(Duration::from_mins(1));
            prompts.cache.release(seq(1))?;
            prompts.begin(2, &tokens(100..108), plain().with_retention(&middle))?;
            prompts.cache.release(seq(2))?;
            time.advance(Duration::from_secs(seconds));
            prompts.begin(3, &tokens(200..208), plain())?;
            let left = [first, tokens(100..109)].map(|p| prompts.cache.state().probe(&p, plain()));
            let expected = if seconds < 10 { [8, 0] } else { [0, 8] };
            same("tokens left of either", left, expected).at(place)?;
        }
    }
    Ok(Outcome::Holds)
}

/// A cached block that a prompt will reuse cannot be evicted to make room for the rest of the
/// prompt.
fn reused_not_free(backend: &AnyBackend) -> CaseResult {
    let mut prompts = Prompts::new(backend, full_blocks(4))?;
    compute_and_release(&mut prompts, &tokens(0..8))?;
    prompts.begin(1, &[90], plain())?;
    // One block is held, one is empty, two are cached; each of the cached ones begins the prompt.
    let group = GroupId(0);
    let full = |result: Result<u32, CacheError>| match result {
        Err(CacheError::Exhausted(exhausted)) => Ok(exhausted),
        other => Err(CaseError::from(format!("{other:?} where blocks are short"))),
    };
    let admit = |prompts: &Prompts, len, admission: Admission| {
        prompts.cache.state().check_admission(&tokens(0..len), plain(), &admission)
    };
    let all = Admission::default();
    let refused = full(admit(&prompts, 13, all))?;
    same("13 tokens", refused, BlocksExhausted { group, needed: 4, free: 3, evictable: 2 })?;
    same("9 tokens", admit(&prompts, 9, all).ok(), Some(8))?;
    same("a chunk of 13", admit(&prompts, 13, all.with_chunk(4)).ok(), Some(8))?;
    full(admit(&prompts, 13, all.with_chunk(4).with_must_fit(true)))?;
    let refused = full(admit(&prompts, 9, all.with_watermark(1)))?;
    same("a watermark", refused, BlocksExhausted { group, needed: 4, free: 3, evictable: 2 })?;
    let refused = full(prompts.cache.start(seq(2), &tokens(0..9), plain().with_reserve(16)))?;
    same("a reserve", refused, BlocksExhausted { group, needed: 2, free: 1, evictable: 0 })?;
    same("free blocks", prompts.cache.state().free_blocks(group), 3)?;
    same("tokens", prompts.cache.start(seq(2), &tokens(0..9), plain().with_reserve(12))?, 8)?;
    same("free blocks", prompts.cache.state().free_blocks(group), 0)?;
    prompts.check(1)?;
    Ok(Outcome::Holds)
}
