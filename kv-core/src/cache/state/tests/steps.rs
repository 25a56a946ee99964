//! Steps: allocation, commit, rollback, refusals.
use super::*;

#[test]
fn a_step_advances_lengths_only_at_commit() {
    let mut state = state(4, 8);
    start(&mut state, SEQ[0]);
    append(&mut state, &[(SEQ[0], 5)]).unwrap();
    begin(&mut state, &[StepInput::count(SEQ[0], 3)]).unwrap();
    assert_eq!((state.positions(), state.seq_len(SEQ[0])), (&[5, 6, 7][..], Some(5)));
    state.roll_back();
    assert_eq!(state.seq_len(SEQ[0]), Some(5));
    append(&mut state, &[(SEQ[0], 4)]).unwrap();
    assert_eq!((state.seq_len(SEQ[0]), table(&state, SEQ[0]).len()), (Some(9), 3));
}

#[test]
fn a_fork_copies_the_partial_block_once() {
    let mut state = state(4, 8);
    start(&mut state, SEQ[0]);
    append(&mut state, &[(SEQ[0], 6)]).unwrap();
    state.fork(SEQ[0], SEQ[1]).unwrap();
    assert_eq!(state.usage().blocks_used, 2);
    let shared = table(&state, SEQ[0]);
    begin(&mut state, &[StepInput::count(SEQ[0], 1), StepInput::count(SEQ[1], 1)]).unwrap();
    // The second writer is the only holder then.
    let [parent, child] = [SEQ[0], SEQ[1]].map(|s| table(&state, s));
    let copies = state.copies(GroupId(0));
    assert_eq!((copies.len(), copies[0].from, copies[0].to), (1, shared[1], parent[1]));
    assert_eq!((copies[0].slots, child), (2, shared));
    state.commit().unwrap();
    assert!(state.copies(GroupId(0)).is_empty());
    check_invariants(&state);
}

#[test]
fn tokens_that_are_not_accepted_are_removed() {
    let mut state = state(4, 8);
    start(&mut state, SEQ[0]);
    start(&mut state, SEQ[1]);
    let inputs = [SEQ[0], SEQ[1]].map(|s| StepInput::count(s, 5).with_drafts(4));
    begin(&mut state, &inputs).unwrap();
    state.commit_accepted(&[2, 5]).unwrap();
    assert_eq!([SEQ[0], SEQ[1]].map(|s| state.seq_len(s)), [Some(2), Some(5)]);
    for (accepted, text) in [
        (&[1][..], "numbers of accepted tokens: expected 2 entries, got 1"),
        (&[1, 6], "accepted tokens: 6 given, at most 5 are possible"),
    ] {
        let before = books(&state);
        begin(&mut state, &inputs).unwrap();
        assert_eq!(state.commit_accepted(accepted).unwrap_err().to_string(), text);
        assert!(!state.is_step_open());
        assert_eq!(books(&state), before);
    }
    check_invariants(&state);
}

/// Contexts are split for the whole batch, however it came together.
#[test]
fn a_batch_that_was_added_to_is_planned_like_one_that_began_whole() {
    let made = || {
        let mut state = state(16, 400);
        for (sequence, tokens) in SEQ.into_iter().zip([3000, 5, 900]) {
            start(&mut state, sequence);
            append(&mut state, &[(sequence, tokens)]).unwrap();
        }
        // Both write to one block: the first one gets a copy.
        state.fork(SEQ[1], SEQ[3]).unwrap();
        state
    };
    let inputs = [(SEQ[0], 1), (SEQ[1], 2), (SEQ[2], 40), (SEQ[3], 1)];
    let inputs = inputs.map(|(sequence, tokens)| StepInput::count(sequence, tokens));
    let (mut whole, mut added) = (made(), made());
    whole.begin(&inputs, |_| 8).unwrap();
    added.begin(&inputs[..1], |_| 8).unwrap();
    let id = |state: &CacheState| state.plans(GroupId(0)).unwrap().0.batch().id();
    for (input, sequence) in inputs.into_iter().zip(SEQ).skip(1) {
        let before = id(&added);
        assert!(added.add(StepInput::count(sequence, 6000), |_| 8).is_err());
        added.add(input, |_| 8).unwrap();
        assert_ne!(id(&added), before, "a device has to see that the plan is another");
    }
    let lists = |state: &CacheState| {
        let (write, _) = state.plans(GroupId(0)).unwrap();
        let batch = write.batch();
        let numbers = [batch.total_q(), batch.total_new(), batch.q_len_max(), batch.new_len_max()];
        let (sequences, splits) = (batch.sequences().to_vec(), batch.splits().to_vec());
        (sequences, splits, batch.slots().to_vec(), numbers)
    };
    assert_eq!(lists(&added), lists(&whole));
    assert!(lists(&whole).1.len() > 4, "the longest context is split");
}

#[test]
fn a_rollback_removes_sequences_started_in_the_step() {
    let mut state = state_with((4, 8), |spec| spec.publish_at(crate::spec::PublishAt::Begin));
    let prompt = tokens(0..9);
    state.start(SEQ[0], &prompt, StartOptions::default()).unwrap();
    let before = books(&state);
    begin(&mut state, &[StepInput::tokens(SEQ[0], &prompt)]).unwrap();
    let found = state.start_in_step(SEQ[1], &prompt, StartOptions::default()).unwrap();
    assert_eq!(found, 8);
    state.add(StepInput::prompt(SEQ[1], &prompt), |_| 1).unwrap();
    state.roll_back();
    assert_eq!(books(&state), before);
    assert_eq!(state.probe(&prompt, StartOptions::default()), 0);
    check_invariants(&state);
}

/// Forks that part in the step share again after a rollback, which also removes sequences begun in
/// it.
#[test]
fn a_rollback_removes_sequences_started_beside_forks() {
    let mut state = state(4, 8);
    let prompt = tokens(0..6);
    run(&mut state, SEQ[0], &prompt);
    state.fork(SEQ[0], SEQ[1]).unwrap();
    let before = books(&state);
    begin(&mut state, &[SEQ[0], SEQ[1]].map(|s| StepInput::count(s, 1))).unwrap();
    state.start_in_step(SEQ[2], &prompt, StartOptions::default()).unwrap();
    state.add(StepInput::prompt(SEQ[2], &prompt), |_| 1).unwrap();
    state.roll_back();
    assert_eq!(books(&state), before);
    check_invariants(&state);
}

#[test]
fn an_entry_that_does_not_fit_leaves_the_step_as_it_was() {
    let mut state = state(4, 4);
    start(&mut state, SEQ[0]);
    start(&mut state, SEQ[1]);
    begin(&mut state, &[StepInput::count(SEQ[0], 9)]).unwrap();
    let before = (books(&state), state.planned_sequences().to_vec());
    let refused = state.add(StepInput::count(SEQ[1], 5), |_| 1).unwrap_err();
    assert!(matches!(refused, CacheError::Exhausted(e) if (e.needed, e.free) == (2, 1)));
    assert_eq!((books(&state), state.planned_sequences().to_vec()), before);
    state.add(StepInput::count(SEQ[1], 4), |_| 1).unwrap();
    state.commit().unwrap();
    assert_eq!([SEQ[0], SEQ[1]].map(|s| state.seq_len(s)), [Some(9), Some(4)]);
    check_invariants(&state);
}

#[test]
fn an_open_step_refuses_what_it_could_not_undo() {
    let mut state = state(4, 8);
    let prompt = tokens(0..5);
    run(&mut state, SEQ[0], &prompt);
    let pin = state.pin_prefix(&prompt, StartOptions::default());
    begin(&mut state, &[StepInput::count(SEQ[0], 3)]).unwrap();
    let before = books(&state);
    let options = StartOptions::default;
    let refusals = [
        state.start(SEQ[1], &prompt, options()).unwrap_err().to_string(),
        state.fork(SEQ[0], SEQ[1]).unwrap_err().to_string(),
        state.truncate(SEQ[0], 1).unwrap_err().to_string(),
        state.release(SEQ[0]).unwrap_err().to_string(),
        state.preempt(SEQ[0]).unwrap_err().to_string(),
        state.reset().unwrap_err().to_string(),
        state.unpin(pin.id).unwrap_err().to_string(),
        state.forget_sequence(SEQ[0]).unwrap_err().to_string(),
        state.forget_prefix(&prompt, options(), 0).unwrap_err().to_string(),
        state.reset_prefixes().unwrap_err().to_string(),
        begin(&mut state, &[]).unwrap_err().to_string(),
    ];
    for refusal in refusals {
        assert!(refusal.contains("a step is open"), "{refusal}");
    }
    assert_eq!(books(&state), before);
    assert_eq!(state.stats().preemptions, 0);
    state.commit().unwrap();
    let closed = "commit: no step is open";
    assert_eq!(state.commit().unwrap_err().to_string(), closed);
    assert_eq!(state.commit_accepted(&[]).unwrap_err().to_string(), closed);
    let input = StepInput::count(SEQ[0], 1);
    assert_eq!(state.add(input, |_| 1).unwrap_err().to_string(), "add: no step is open");
    check_invariants(&state);
}

#[test]
fn refused_inputs_change_nothing() {
    let mut state = state(4, 4);
    start(&mut state, SEQ[0]);
    start(&mut state, SEQ[1]);
    append(&mut state, &[(SEQ[0], 3)]).unwrap();
    let before = books(&state);
    let one = |sequence| StepInput::count(sequence, 1);
    for (inputs, text) in [
        (vec![one(SEQ[0]), one(SEQ[0])], "sequence 0 appears twice in one step"),
        (vec![one(SEQ[0]), one(SEQ[2])], "sequence 2 is unknown"),
        (vec![StepInput::tokens(SEQ[0], &[])], "sequence 0: 0 tokens given, at least 1 is needed"),
        (vec![StepInput::query(SEQ[0], 0)], "sequence 0: 0 tokens given, at least 1 is needed"),
        (
            vec![one(SEQ[1]), StepInput::count(SEQ[0], 14)],
            "sequence 0: 3 cached + 14 new tokens exceed the maximum of 16",
        ),
        (
            vec![StepInput::count(SEQ[0], 10), StepInput::count(SEQ[1], 4)],
            "group 0 is out of blocks: 4 needed, 3 free, 0 of them evictable",
        ),
    ] {
        assert_eq!(begin(&mut state, &inputs).unwrap_err().to_string(), text);
        assert_eq!(books(&state), before);
        check_invariants(&state);
    }
    append(&mut state, &[(SEQ[0], 13)]).unwrap();
}

#[test]
fn a_second_mention_is_refused_again_and_again() {
    let mut state = state(4, 8);
    start(&mut state, SEQ[0]);
    begin(&mut state, &[StepInput::count(SEQ[0], 1)]).unwrap();
    for _ in 0..2 {
        let refused = state.add(StepInput::count(SEQ[0], 1), |_| 1).unwrap_err();
        assert_eq!(refused.to_string(), "sequence 0 appears twice in one step");
    }
    assert_eq!(state.planned_sequences().len(), 1);
}

/// A block whose other holder took a copy in a step is shared again after a rollback.
#[test]
fn a_rollback_shares_blocks_again() {
    let mut state = state(4, 8);
    start(&mut state, SEQ[0]);
    append(&mut state, &[(SEQ[0], 6)]).unwrap();
    state.fork(SEQ[0], SEQ[1]).unwrap();
    let before = books(&state);
    for _ in 0..2 {
        let inputs = [StepInput::count(SEQ[0], 1), StepInput::count(SEQ[1], 1)];
        begin(&mut state, &inputs).unwrap();
        let blocks = [SEQ[0], SEQ[1]].map(|s| state.block_table(s, GroupId(0)).unwrap()[1]);
        assert_ne!(blocks[0], blocks[1]);
        state.roll_back();
        assert_eq!(books(&state), before);
        check_invariants(&state);
    }
}

#[test]
fn a_shared_full_block_is_never_copied() {
    let mut state = state(4, 8);
    start(&mut state, SEQ[0]);
    append(&mut state, &[(SEQ[0], 8)]).unwrap();
    state.fork(SEQ[0], SEQ[1]).unwrap();
    let shared = table(&state, SEQ[0]);
    append(&mut state, &[(SEQ[1], 1)]).unwrap();
    assert_eq!(state.block_table(SEQ[1], GroupId(0)).unwrap()[..2], shared);
    assert_eq!(state.usage().blocks_used, 3);
}

#[test]
fn a_truncated_fork_does_not_write_into_its_parent() {
    let mut state = state(4, 8);
    start(&mut state, SEQ[0]);
    append(&mut state, &[(SEQ[0], 8)]).unwrap();
    state.fork(SEQ[0], SEQ[1]).unwrap();
    state.truncate(SEQ[1], 5).unwrap();
    append(&mut state, &[(SEQ[1], 1)]).unwrap();
    let parent = state.block_table(SEQ[0], GroupId(0)).unwrap();
    assert_ne!(state.block_table(SEQ[1], GroupId(0)).unwrap()[1], parent[1]);
    check_invariants(&state);
}

#[test]
fn reserved_blocks_outlive_truncation() {
    let mut state = state(4, 3);
    state.start(SEQ[0], &[], StartOptions::default().with_reserve(9)).unwrap();
    start(&mut state, SEQ[1]);
    let refused = append(&mut state, &[(SEQ[1], 1)]).unwrap_err();
    assert!(matches!(refused, CacheError::Exhausted(_)));
    append(&mut state, &[(SEQ[0], 9)]).unwrap();
    state.truncate(SEQ[0], 0).unwrap();
    assert_eq!(state.free_blocks(GroupId(0)), 0);
    state.release(SEQ[0]).unwrap();
    assert_eq!(state.free_blocks(GroupId(0)), 3);
}

#[test]
fn queries_and_idle_rows_write_nothing() {
    let mut state = state(4, 8);
    start(&mut state, SEQ[0]);
    start(&mut state, SEQ[1]);
    append(&mut state, &[(SEQ[0], 6)]).unwrap();
    let before = books(&state);
    begin(&mut state, &[StepInput::query(SEQ[0], 2), StepInput::idle(SEQ[1])]).unwrap();
    assert_eq!(state.positions(), [4, 5]);
    state.commit().unwrap();
    assert_eq!(books(&state), before);
}

#[test]
fn limits_of_the_spec_hold() {
    let spec = CacheSpec::builder().layers(1).kv_heads(1).head_dim(2).contiguous(2, 10);
    let mut state = CacheState::new(spec.build().unwrap(), 0);
    start(&mut state, SEQ[0]);
    start(&mut state, SEQ[1]);
    let third = state.start(SEQ[2], &[], StartOptions::default()).unwrap_err();
    assert_eq!(third.to_string(), "sequences: 3 given, at most 2 are possible");
    let again = state.start(SEQ[1], &[], StartOptions::default()).unwrap_err();
    assert_eq!(again.to_string(), "sequence 1 exists already");
    state.release(SEQ[1]).unwrap();
    let long = state.start(SEQ[2], &[0; 11], StartOptions::default()).unwrap_err();
    assert!(matches!(long, CacheError::Plan(PlanError::SequenceTooLong { max: 10, .. })));
    append(&mut state, &[(SEQ[0], 10)]).unwrap();
    assert_eq!(state.block_table(SEQ[0], GroupId(0)).unwrap().len(), 1);
}
