//! Prefixes: hits, evictions and pins.
use super::*;
use crate::eviction::Eviction;
use crate::spec::PrefixReuse;

fn lru(num_blocks: u32) -> CacheState {
    state_with((4, num_blocks), |spec| {
        spec.eviction(Eviction::Lru).prefix_reuse(PrefixReuse::FullBlocks)
    })
}

#[test]
fn a_repeated_prompt_is_found_and_its_blocks_are_shared() {
    let mut state = lru(8);
    let prompt = tokens(0..9);
    assert_eq!(run(&mut state, SEQ[0], &prompt), 0);
    assert_eq!(run(&mut state, SEQ[1], &prompt), 8);
    assert_eq!(table(&state, SEQ[0])[..2], table(&state, SEQ[1])[..2]);
    assert_eq!(state.usage().blocks_used, 4);
    let counted = state.stats();
    assert_eq!((counted.requests, counted.query_tokens, counted.hit_tokens), (2, 18, 8));
    check_invariants(&state);
}

#[test]
fn the_block_that_was_used_least_recently_is_evicted() {
    let mut state = lru(5);
    let prompts = [tokens(0..5), tokens(100..105), tokens(200..205)];
    // The first prompt is used again after the others.
    for (prompt, cached) in prompts.iter().chain(&prompts[..1]).zip([0, 0, 0, 4]) {
        assert_eq!(run(&mut state, SEQ[0], prompt), cached);
        state.release(SEQ[0]).unwrap();
    }
    assert_eq!((state.usage().blocks_cached, state.free_blocks(GroupId(0))), (3, 5));
    start(&mut state, SEQ[1]);
    append(&mut state, &[(SEQ[1], 8)]).unwrap();
    assert_eq!(state.stats().evictions, 0);
    append(&mut state, &[(SEQ[1], 4)]).unwrap();
    assert_eq!(state.stats().evictions, 1);
    let left = prompts.each_ref().map(|prompt| state.probe(prompt, StartOptions::default()));
    assert_eq!(left, [4, 0, 4]);
    check_invariants(&state);
}

#[test]
fn eviction_is_not_undone_and_the_block_is_free() {
    let mut state = lru(2);
    run(&mut state, SEQ[0], &tokens(0..5));
    state.release(SEQ[0]).unwrap();
    start(&mut state, SEQ[1]);
    begin(&mut state, &[StepInput::count(SEQ[1], 8)]).unwrap();
    state.roll_back();
    assert_eq!(state.free_blocks(GroupId(0)), 2);
    assert_eq!(state.pool(GroupId(0)).unwrap().num_empty(), 2);
    check_invariants(&state);
}

#[test]
fn free_blocks_of_a_refusal_are_idle_and_empty_ones() {
    let mut state = lru(4);
    run(&mut state, SEQ[0], &tokens(0..9));
    state.release(SEQ[0]).unwrap();
    start(&mut state, SEQ[1]);
    let before = books(&state);
    let refused = append(&mut state, &[(SEQ[1], 16), (SEQ[0], 1)]).unwrap_err();
    assert!(matches!(refused, CacheError::Plan(PlanError::UnknownSequence { .. })));
    start(&mut state, SEQ[0]);
    let refused = append(&mut state, &[(SEQ[1], 16), (SEQ[0], 1)]).unwrap_err();
    let CacheError::Exhausted(refused) = refused else { panic!("{refused}") };
    assert_eq!((refused.needed, refused.free, refused.evictable), (5, 4, 2));
    state.release(SEQ[0]).unwrap();
    assert_eq!(books(&state), before);
}

#[test]
fn a_pinned_prefix_outlives_its_sequence_and_eviction() {
    let mut state = lru(4);
    let prompt = tokens(0..9);
    run(&mut state, SEQ[0], &prompt);
    let pin = state.pin_prefix(&prompt, StartOptions::default());
    assert_eq!(pin.tokens, 8);
    state.release(SEQ[0]).unwrap();
    start(&mut state, SEQ[1]);
    assert!(append(&mut state, &[(SEQ[1], 9)]).is_err(), "two blocks are pinned");
    append(&mut state, &[(SEQ[1], 8)]).unwrap();
    assert_eq!(state.probe(&prompt, StartOptions::default()), 8);
    assert!(state.unpin(pin.id).unwrap());
    assert!(!state.unpin(pin.id).unwrap());
    append(&mut state, &[(SEQ[1], 8)]).unwrap();
    assert_eq!(state.probe(&prompt, StartOptions::default()), 0);
    check_invariants(&state);
}

#[test]
fn a_pin_excludes_blocks_that_the_open_step_has_not_written() {
    let mut state = state_with((4, 8), |spec| spec.publish_at(crate::spec::PublishAt::Begin));
    let prompt = tokens(0..13);
    run(&mut state, SEQ[0], &prompt[..5]);
    begin(&mut state, &[StepInput::tokens(SEQ[0], &prompt[5..])]).unwrap();
    assert_eq!(state.probe(&prompt, StartOptions::default()), 12);
    assert_eq!(state.pin_prefix(&prompt, StartOptions::default()).tokens, 4);
    state.roll_back();
    check_invariants(&state);
    begin(&mut state, &[StepInput::tokens(SEQ[0], &prompt[5..])]).unwrap();
    state.commit().unwrap();
    assert_eq!(state.pin_prefix(&prompt, StartOptions::default()).tokens, 12);
    check_invariants(&state);
}

#[test]
fn blocks_to_zero_are_listed_until_they_are_popped() {
    let mut state = state_with((4, 4), |spec| spec.wipe_on_release(true));
    start(&mut state, SEQ[0]);
    append(&mut state, &[(SEQ[0], 7)]).unwrap();
    let blocks = table(&state, SEQ[0]);
    state.truncate(SEQ[0], 3).unwrap();
    assert_eq!(state.unwiped(), [(GroupId(0), blocks[1])]);
    state.release(SEQ[0]).unwrap();
    assert_eq!(state.pop_unwiped(), Some((GroupId(0), blocks[0])));
    assert_eq!(state.pop_unwiped(), Some((GroupId(0), blocks[1])));
    assert_eq!(state.pop_unwiped(), None);
}
