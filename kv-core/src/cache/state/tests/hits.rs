//! Hits of groups that differ in block size and window: all blocks of a start are released.
use super::*;
use crate::spec::PrefixReuse;

/// The settings of one group.
#[derive(Debug, Clone, Copy)]
struct Shape {
    block_size: u32,
    window_left: Option<u32>,
    sink_tokens: u32,
    slack: u32,
}

const NUM_BLOCKS: u32 = 32;

/// Creates a state whose two groups have these shapes.
fn state_of([first, second]: [Shape; 2], reuse: PrefixReuse) -> CacheState {
    let set = |shape: Shape| {
        move |group: crate::spec::GroupBuilder| {
            let group = group.paged(shape.block_size, NUM_BLOCKS).window_slack(shape.slack);
            let group = group.sink_tokens(shape.sink_tokens);
            match shape.window_left {
                Some(left) => group.window_left(left),
                None => group,
            }
        }
    };
    state_with((1, NUM_BLOCKS), |spec| {
        let spec = spec.group([0], set(first)).group([1], set(second));
        spec.prefix_reuse(reuse).max_seq_len(24)
    })
}

/// Every pair of a group without a window, or with a long one, and a group with a window.
fn shapes() -> impl Iterator<Item = [Shape; 2]> {
    let shape = |block_size, window_left, (sink_tokens, slack)| Shape {
        block_size,
        window_left,
        sink_tokens,
        slack,
    };
    let windows = [Some(0), Some(1), Some(4)];
    let of_first = [1, 2, 8]
        .into_iter()
        .flat_map(move |size| [None, Some(5)].map(|window| shape(size, window, (0, 0))));
    of_first.flat_map(move |first| {
        let sizes = [1, 2, 3, 4].into_iter().flat_map(move |size| windows.map(|w| (size, w)));
        let second = sizes.flat_map(move |(size, window)| {
            [(0, 0), (1, 0), (3, 2)].map(|rest| shape(size, window, rest))
        });
        second.map(move |second| [first, second])
    })
}

/// Computes the missing tokens of a prompt, decodes, and ends the sequence.
fn serve(state: &mut CacheState, prompt: &[u32], decoded: u32) {
    run(state, SEQ[0], prompt);
    for token in 0..decoded {
        begin(state, &[StepInput::tokens(SEQ[0], &[token])]).unwrap();
        state.commit().unwrap();
    }
    check_invariants(state);
    state.release(SEQ[0]).unwrap();
    check_invariants(state);
    assert_eq!(state.usage().blocks_used, 0, "nothing runs");
}

/// A block of a group may end inside the block of another, and the window of a hit may begin after
/// the last block that was found: that block is not held then.
#[test]
fn a_repeated_prompt_leaves_no_block_held() {
    let prompt = tokens(100..109);
    for reuse in [PrefixReuse::Partial, PrefixReuse::FullBlocks] {
        for shapes in shapes() {
            let mut state = state_of(shapes, reuse);
            for len in [2, 5, 9, 4, 1, 6] {
                let prompt = &prompt[..len];
                // As it is, and so that it goes on differently after what is found.
                let other = [&prompt[..len - 1], &[7, 8]].concat();
                for prompt in [prompt, &other] {
                    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                        serve(&mut state, prompt, u32::from(len == 5));
                    }));
                    assert!(result.is_ok(), "{shapes:?}, {reuse:?}, prompt {prompt:?}");
                }
            }
            assert!(state.reset_prefixes().unwrap(), "{shapes:?}, {reuse:?}");
        }
    }
}

/// Admission counts the blocks that a sequence holds of a hit with a vacant donor. A fork and a
/// truncation of the sequence release theirs.
#[test]
fn a_hit_that_ends_before_the_window_is_shared_and_cut() {
    let shape =
        |block_size, window_left| Shape { block_size, window_left, sink_tokens: 0, slack: 0 };
    for (large, small) in [(2, 1), (16, 8), (8, 2)] {
        let mut state = state_of([shape(large, None), shape(small, Some(0))], PrefixReuse::Partial);
        let prompt = tokens(0..small + 1);
        run(&mut state, SEQ[0], &prompt);
        state.release(SEQ[0]).unwrap();
        let options = StartOptions::default();
        let admitted = state.check_admission(&prompt, options, &Admission::default()).unwrap();
        assert_eq!(state.start(SEQ[0], &prompt, options).unwrap(), admitted);
        assert_eq!(admitted, small, "all but the last token");
        check_invariants(&state);
        state.fork(SEQ[0], SEQ[1]).unwrap();
        check_invariants(&state);
        begin(&mut state, &[SEQ[0], SEQ[1]].map(|id| StepInput::prompt(id, &prompt))).unwrap();
        state.commit().unwrap();
        check_invariants(&state);
        state.truncate(SEQ[0], small).unwrap();
        check_invariants(&state);
        state.reset().unwrap();
        assert_eq!(state.usage().blocks_used, 0);
        assert!(state.reset_prefixes().unwrap());
    }
}
