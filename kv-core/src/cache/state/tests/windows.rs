//! Windows: when steps release blocks.
use super::*;

/// Creates groups with a window of six tokens and one of three, each with its own pool.
fn windowed(num_blocks: u32) -> CacheState {
    state_with((4, num_blocks), |spec| {
        spec.max_seq_len(100)
            .window_left(6)
            .group([1], |group| group.paged(4, num_blocks).window_left(3))
    })
}

/// Creates a sequence whose next step leaves blocks in both groups.
fn grown(num_blocks: u32) -> CacheState {
    let mut state = windowed(num_blocks);
    start(&mut state, SEQ[0]);
    append(&mut state, &[(SEQ[0], 15)]).unwrap();
    state
}

#[test]
fn a_refused_step_releases_no_block_of_a_window() {
    let mut state = grown(6);
    start(&mut state, SEQ[1]);
    let before = books(&state);
    let one = StepInput::count(SEQ[0], 1);
    for (inputs, text) in [
        (
            vec![one, StepInput::count(SEQ[1], 24)],
            "group 0 is out of blocks: 6 needed, 4 free, 0 of them evictable",
        ),
        (vec![one, StepInput::count(SEQ[2], 1)], "sequence 2 is unknown"),
        (vec![one, one], "sequence 0 appears twice in one step"),
    ] {
        assert_eq!(begin(&mut state, &inputs).unwrap_err().to_string(), text);
        assert_eq!(books(&state), before, "{text}");
        check_invariants(&state);
    }
    // The sequence can be truncated as far as before.
    state.truncate(SEQ[0], 2).unwrap();
}

#[test]
fn a_refused_entry_releases_no_block_of_a_window() {
    let mut state = grown(6);
    start(&mut state, SEQ[1]);
    begin(&mut state, &[StepInput::count(SEQ[1], 8)]).unwrap();
    let before = books(&state);
    let refused = state.add(StepInput::count(SEQ[0], 20), |_| 1).unwrap_err();
    assert!(matches!(refused, CacheError::Exhausted(_)), "{refused}");
    assert_eq!(books(&state), before);
    state.add(StepInput::count(SEQ[0], 1), |_| 1).unwrap();
    assert_ne!(books(&state).2, before.2, "the entry that fits leaves them");
    state.commit().unwrap();
    check_invariants(&state);
}

/// Blocks that leave a window when a step begins are free for that step, and counted so.
#[test]
fn blocks_that_leave_a_window_count_as_free() {
    let mut state = grown(4);
    assert_eq!(state.free_blocks(GroupId(0)), 0);
    let inputs = [StepInput::count(SEQ[0], 9)];
    let demand = state.blocks_for_step(GroupId(0), &inputs).unwrap();
    assert_eq!((demand.needed, demand.free), (2, 2));
    begin(&mut state, &inputs).unwrap();
    state.commit().unwrap();
    let demand = state.blocks_for_step(GroupId(0), &[StepInput::count(SEQ[0], 13)]).unwrap();
    let refused = append(&mut state, &[(SEQ[0], 13)]).unwrap_err();
    let CacheError::Exhausted(refused) = refused else { panic!("{refused}") };
    assert_eq!((refused.needed, refused.free), (demand.needed, demand.free));
    check_invariants(&state);
}

#[test]
fn blocks_that_left_a_window_stay_free_after_a_rollback() {
    let mut state = grown(6);
    let free = state.free_blocks(GroupId(0));
    begin(&mut state, &[StepInput::count(SEQ[0], 1)]).unwrap();
    state.roll_back();
    assert_eq!(state.seq_len(SEQ[0]), Some(15));
    assert_eq!(state.free_blocks(GroupId(0)), free + 2);
    assert_eq!(state.vacant_entries(SEQ[0], GroupId(0)), Some(0..2));
    let refused = state.truncate(SEQ[0], 2).unwrap_err();
    assert!(matches!(refused, PlanError::OutOfWindow { .. }), "{refused}");
    append(&mut state, &[(SEQ[0], 1)]).unwrap();
    check_invariants(&state);
}
