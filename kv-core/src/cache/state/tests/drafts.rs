//! Drafts: which of them are text.
use super::*;
use crate::spec::{PrefixReuse, PublishAt};

const TEXT: [u32; 13] = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13];

fn state_of(reuse: PrefixReuse, publish_at: PublishAt) -> CacheState {
    state_with((4, 16), |spec| spec.prefix_reuse(reuse).publish_at(publish_at))
}

/// Runs a step of the next `tokens` tokens of the text, the last `drafts` of which are drafts, and
/// keeps the first `accepted`; all without a word about them if `None`.
fn draft(state: &mut CacheState, (tokens, drafts): (usize, u32), accepted: Option<u32>) {
    let len = usize::try_from(state.seq_len(SEQ[0]).unwrap()).unwrap();
    let ids = &TEXT[len..len + tokens];
    begin(state, &[StepInput::tokens(SEQ[0], ids).with_drafts(drafts)]).unwrap();
    match accepted {
        Some(accepted) => state.commit_accepted(&[accepted]).unwrap(),
        None => state.commit().unwrap(),
    }
    check_invariants(state);
}

fn text(state: &CacheState) -> Vec<u32> {
    state.sequence_text(SEQ[0]).unwrap().tokens
}

/// For every number of drafts and of accepted ones, the text is as long as the sequence: as
/// returned, for a fork, and for prompts that begin with it after the sequence has ended.
#[test]
fn accepted_drafts_are_text() {
    let settings = [PrefixReuse::Partial, PrefixReuse::FullBlocks]
        .into_iter()
        .flat_map(|reuse| [PublishAt::Commit, PublishAt::Begin].map(|at| (reuse, at)));
    for (reuse, publish_at) in settings {
        for (tokens, drafts, accepted) in
            [(4, 3, 4), (4, 3, 2), (4, 4, 4), (4, 4, 0), (7, 6, 7), (7, 6, 4), (3, 0, 3), (1, 1, 1)]
        {
            for is_preempted in [false, true] {
                let case = format!("{reuse:?}, {publish_at:?}, {accepted} of {tokens}, {drafts}");
                let mut state = state_of(reuse, publish_at);
                run(&mut state, SEQ[0], &TEXT[..5]);
                draft(&mut state, (tokens, drafts), Some(accepted));
                let len = 5 + accepted;
                assert_eq!(state.seq_len(SEQ[0]), Some(len), "{case}");
                let known = usize::try_from(len).unwrap();
                assert_eq!(text(&state), TEXT[..known], "{case}");
                state.fork(SEQ[0], SEQ[1]).unwrap();
                let of_fork = state.sequence_text(SEQ[1]).unwrap().tokens;
                assert_eq!(of_fork, TEXT[..known], "{case}");
                if is_preempted {
                    state.release(SEQ[1]).unwrap();
                    state.preempt(SEQ[0]).unwrap();
                } else {
                    state.reset().unwrap();
                }
                check_invariants(&state);
                let prompt = [&TEXT[..known], &[77]].concat();
                let found = state.start(SEQ[0], &prompt, StartOptions::default()).unwrap();
                let expected = match (reuse, publish_at) {
                    (PrefixReuse::Partial, _) => len,
                    (_, PublishAt::Commit) => len / 4 * 4,
                    // No step has begun after the drafts were accepted.
                    _ => (5 + u32::try_from(tokens).unwrap() - drafts).min(len) / 4 * 4,
                };
                assert_eq!(found, expected, "{case}");
            }
        }
    }
}

/// Drafts are not text until the next step accepts them.
#[test]
fn drafts_become_text_with_the_next_step() {
    for publish_at in [PublishAt::Commit, PublishAt::Begin] {
        let mut state = state_of(PrefixReuse::Partial, publish_at);
        run(&mut state, SEQ[0], &TEXT[..5]);
        draft(&mut state, (4, 3), None);
        assert_eq!((state.seq_len(SEQ[0]), text(&state).len()), (Some(9), 6));
        draft(&mut state, (1, 0), None);
        assert_eq!(text(&state), TEXT[..10]);
        // A truncation takes text away, and drafts after it do not bring it back.
        state.truncate(SEQ[0], 7).unwrap();
        draft(&mut state, (3, 3), None);
        assert_eq!((state.seq_len(SEQ[0]), text(&state).len()), (Some(10), 7));
        draft(&mut state, (2, 2), Some(1));
        assert_eq!(text(&state), TEXT[..11]);
    }
}
