//! Holds: blocks whose bytes are read.
use super::*;
use crate::error::StateProblem;
use crate::eviction::Eviction;
use crate::reuse::BlockKey;

fn state_of(eviction: Eviction, num_blocks: u32) -> CacheState {
    state_with((4, num_blocks), |spec| spec.eviction(eviction))
}

/// Computes prompts of one block one after another and returns the block and key of each.
fn cached(state: &mut CacheState, prompts: u32) -> Vec<(BlockId, BlockKey)> {
    let each = |number: u32| {
        run(state, SEQ[0], &tokens(100 * number..100 * number + 4));
        let block = table(state, SEQ[0])[0];
        state.release(SEQ[0]).unwrap();
        (block, state.pool(GroupId(0)).unwrap().content(block).unwrap().key)
    };
    (0..prompts).map(each).collect()
}

fn hold(state: &mut CacheState, (block, key): (BlockId, BlockKey)) -> BlockHold {
    state.hold_block(GroupId(0), block, key).unwrap().expect("it is cached")
}

#[test]
fn a_held_block_is_not_evicted_and_keeps_its_place() {
    for eviction in Eviction::ALL {
        let mut state = state_of(eviction, 4);
        let blocks = cached(&mut state, 3);
        let before = state.stats();
        let hold = hold(&mut state, blocks[0]);
        assert_eq!(state.free_blocks(GroupId(0)), 3, "{eviction}");
        check_invariants(&state);
        start(&mut state, SEQ[1]);
        assert!(append(&mut state, &[(SEQ[1], 16)]).is_err(), "one block is held");
        // The block of another prompt goes first, although it was used later.
        append(&mut state, &[(SEQ[1], 8)]).unwrap();
        let left = |state: &CacheState| -> Vec<_> {
            let pool = state.pool(GroupId(0)).unwrap();
            let is_left = |(block, key)| pool.content(block).is_some_and(|c| c.key == key);
            blocks.iter().map(|block| is_left(*block)).collect()
        };
        assert_eq!(left(&state), [true, false, true], "{eviction}");
        state.release_hold(hold).unwrap();
        append(&mut state, &[(SEQ[1], 4)]).unwrap();
        assert_eq!(left(&state), [false, false, true], "{eviction}: it is the oldest again");
        assert_eq!((state.num_holds(), before.hit_blocks), (0, state.stats().hit_blocks));
        check_invariants(&state);
    }
}

#[test]
fn only_a_block_with_this_content_is_held() {
    let mut state = state_of(Eviction::Lru, 8);
    let (block, key) = cached(&mut state, 1)[0];
    run(&mut state, SEQ[0], &tokens(0..5));
    state.release(SEQ[0]).unwrap();
    let pool = state.pool(GroupId(0)).unwrap();
    let partial = pool.index().iter().find(|block| block.is_partial).expect("the fifth token");
    let partial = (partial.block, partial.key);
    for (group, block, key) in [
        (GroupId(0), block, BlockKey(1)),
        (GroupId(0), BlockId(7), key),
        (GroupId(0), BlockId(99), key),
        (GroupId(1), block, key),
    ] {
        assert_eq!(state.hold_block(group, block, key).unwrap(), None, "{block} of {group}");
    }
    assert_eq!(state.num_holds(), 0);
    let hold = state.hold_block(GroupId(0), partial.0, partial.1).unwrap().expect("it is cached");
    // A sequence that goes on from a part copies it.
    assert_eq!(run(&mut state, SEQ[1], &tokens(0..6)), 5);
    assert_ne!(table(&state, SEQ[1])[1], partial.0);
    state.release_hold(hold).unwrap();
}

#[test]
fn a_step_copies_a_block_that_is_held() {
    let mut state = state_of(Eviction::Lru, 8);
    run(&mut state, SEQ[0], &tokens(0..9));
    let block = table(&state, SEQ[0])[1];
    let key = state.pool(GroupId(0)).unwrap().content(block).unwrap().key;
    let hold = hold(&mut state, (block, key));
    state.truncate(SEQ[0], 6).unwrap();
    begin(&mut state, &[StepInput::tokens(SEQ[0], &[50, 51])]).unwrap();
    assert_eq!(state.copies(GroupId(0)).len(), 1);
    let refused = [
        state.hold_block(GroupId(0), block, key).map(|_| ()),
        state.release_holds().map(|_| ()),
        state.release_hold(hold),
    ];
    for refused in refused {
        let Err(PlanError::State { problem: StateProblem::StepOpen, .. }) = refused else {
            panic!("{refused:?}")
        };
    }
    state.commit().unwrap();
    assert_ne!(table(&state, SEQ[0])[1], block);
    check_invariants(&state);
    assert_eq!(state.num_holds(), 1, "a refused release leaves the hold");
    assert_eq!(state.release_holds().unwrap(), 1);
    state.release(SEQ[0]).unwrap();
    assert_eq!(state.free_blocks(GroupId(0)), 8);
    check_invariants(&state);
}

#[test]
fn a_hold_outlives_a_clear_and_ends_once() {
    let mut state = state_of(Eviction::Lru, 8);
    let blocks = cached(&mut state, 2);
    let [first, second] = [0, 1].map(|at| hold(&mut state, blocks[at]));
    assert!(!state.reset_prefixes().unwrap(), "blocks are held");
    state.change_encoding(5);
    assert_eq!(state.free_blocks(GroupId(0)), 6);
    let mut other = state_of(Eviction::Lru, 8);
    let foreign = other.release_hold(first).unwrap_err();
    assert_eq!(foreign.to_string(), "release hold: it has ended, or is of another cache");
    state.release_hold(second).unwrap();
    assert_eq!(state.release_holds().unwrap(), 1);
    assert_eq!(state.pool(GroupId(0)).unwrap().num_empty(), 8);
    check_invariants(&state);
}
