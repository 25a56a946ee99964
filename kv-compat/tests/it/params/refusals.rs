//! What is refused leaves the state as it was.
use kv_core::error::{LayerProblem, PlanError};
use kv_core::{CacheError, DType, SequenceId, TensorView};

use super::{Params, both, lens, paged, params, pre_step, refusal, run, state, write};

/// Whether `step` is refused without a trace; the refusal.
fn refused(params: &mut Params, step: &[(u64, u32)]) -> CacheError {
    let before = state(params);
    let error = pre_step(params, step).unwrap_err();
    assert_eq!(state(params), before, "{error}");
    error
}

#[test]
fn a_batch_larger_than_the_maximum() {
    for mut params in both() {
        run(&mut params, &[(9, 2)]);
        let error = refused(&mut params, &[(0, 1), (1, 1), (2, 1), (3, 1), (4, 1)]);
        let got = PlanError::TooMany { what: "sequences in a step", got: 5, max: 4 };
        assert!(matches!(error, CacheError::Plan(e) if e == got));
    }
}

#[test]
fn a_sequence_named_twice() {
    for mut params in both() {
        run(&mut params, &[(0, 3)]);
        let error = refused(&mut params, &[(0, 1), (1, 1), (0, 1)]);
        let sequence = SequenceId(0);
        assert!(matches!(error, CacheError::Plan(PlanError::DuplicateSequence { sequence: s })
                if s == sequence));
    }
}

#[test]
fn tokens_past_the_maximum_length() {
    for mut params in both() {
        // A prompt, first and second in the step.
        refused(&mut params, &[(0, 17)]);
        refused(&mut params, &[(0, 2), (1, 17)]);
        refused(&mut params, &[(0, u32::MAX)]);
        run(&mut params, &[(0, 16), (1, 2)]);
        let error = refused(&mut params, &[(0, 1), (1, 1)]);
        let too_long =
            PlanError::SequenceTooLong { sequence: SequenceId(0), len: 16, new: 1, max: 16 };
        assert!(matches!(error, CacheError::Plan(e) if e == too_long));
        refused(&mut params, &[(1, u32::MAX)]);
        run(&mut params, &[(0, 0), (1, 1)]);
        assert_eq!(lens(&params), [(0, 16), (1, 3)]);
    }
}

#[test]
fn more_pages_than_there_are() {
    // The recorded failure: 3 pages, 2 held, 2 more needed and 1 free.
    let mut params = params(paged(4, 3));
    params.allocate_memory(1).unwrap();
    run(&mut params, &[(0, 5)]);
    let error = refused(&mut params, &[(0, 1), (1, 8)]);
    assert!(matches!(error, CacheError::Exhausted(e) if (e.needed, e.free) == (2, 1)), "{error}");
    run(&mut params, &[(0, 1), (1, 4)]);
    assert_eq!(params.num_free_pages(), 0);
    assert!(!params.has_free_page());
}

#[test]
fn a_refused_step_leaves_the_step_before_open() {
    for mut params in both() {
        pre_step(&mut params, &[(0, 3)]).unwrap();
        refused(&mut params, &[(0, 99)]);
        write(&mut params, 1).unwrap();
        run(&mut params, &[(0, 1)]);
        assert_eq!(lens(&params), [(0, 4)]);
    }
}

#[test]
fn a_layer_that_was_not_written() {
    for mut params in both() {
        params.allocate_memory(70_000).unwrap();
        pre_step(&mut params, &[(0, 3)]).unwrap();
        let unwritten = |number, others| PlanError::LayerNumber {
            number,
            problem: LayerProblem::Unwritten { others },
        };
        let error = refused(&mut params, &[(0, 1)]);
        assert!(matches!(error, CacheError::Plan(e) if e == unwritten(1, 1)));
        write(&mut params, 1).unwrap();
        let error = refused(&mut params, &[(0, 1)]);
        assert!(matches!(error, CacheError::Plan(e) if e == unwritten(70_000, 0)));
        write(&mut params, 70_000).unwrap();
        pre_step(&mut params, &[(0, 1)]).unwrap();
        // A step without tokens needs no writes.
        write(&mut params, 1).unwrap();
        write(&mut params, 70_000).unwrap();
        pre_step(&mut params, &[(0, 0)]).unwrap();
        pre_step(&mut params, &[(0, 1)]).unwrap();
        assert_eq!(lens(&params), [(0, 5)]);
    }
}

#[test]
fn a_step_with_wrong_tensors() {
    for mut params in both() {
        let rows = vec![0.0_f32; 5 * 3 * 2 * 4];
        let view = |dims: &[u32]| TensorView::host(&rows, dims);
        let good = view(&[1, 3, 2, 4]);
        let problem = refusal(params.step(1, good, good, "bshd").map(|_| ()));
        assert!(matches!(problem, PlanError::State { operation: "step", .. }), "{problem}");

        pre_step(&mut params, &[(0, 3)]).unwrap();
        let before = state(&params);
        for name in ["foo", "thd_2bshd", "bshd "] {
            assert!(matches!(refusal(params.step(1, good, good, name)), PlanError::Name(_)));
        }
        let unallocated = PlanError::LayerNumber { number: 7, problem: LayerProblem::Unallocated };
        assert_eq!(refusal(params.step(7, good, good, "bshd")), unallocated);
        let half = vec![0_u8; 3 * 8 * 2];
        let half = TensorView::host_bytes(DType::F16, &half, &[1, 3, 2, 4]);
        for (k, v, name) in [(half, good, "k"), (good, half, "v")] {
            let error = refusal(params.step(1, k, v, "bshd"));
            assert!(matches!(error, PlanError::ElementType { tensor, got: DType::F16, .. }
                    if tensor == name));
        }
        for dims in [&[1, 2, 2, 4][..], &[1, 3, 1, 4], &[1, 3, 2, 5], &[3, 2, 4], &[0, 3, 2, 4]] {
            let wrong = view(dims);
            for (k, v) in [(wrong, good), (good, wrong)] {
                let error = refusal(params.step(1, k, v, "bshd"));
                assert!(matches!(error, PlanError::Shape { .. }), "{dims:?}: {error}");
            }
        }
        let wide = view(&[5, 3, 2, 4]);
        assert!(matches!(refusal(params.step(1, wide, wide, "bshd")), PlanError::TooMany { .. }));
        let short = TensorView::host(&rows[..8], &[1, 3, 2, 4]);
        let error = refusal(params.step(1, short, short, "bshd"));
        assert!(matches!(error, PlanError::TensorBytes { .. }));
        assert_eq!(state(&params), before);
        assert_eq!(params.input_qkv_format().to_string(), "bshd");
        params.step(1, good, good, "bshd").unwrap();
    }
}

#[test]
fn reading_before_writing() {
    use kv_core::AttentionOptions;
    for mut params in both() {
        let rows = vec![0.0_f32; 3 * 8];
        let q = TensorView::host(&rows, &[3, 2, 4]);
        let options = AttentionOptions::causal(1.0);
        let mut values = vec![0.0_f32; 64 * 8];
        let error = refusal(params.attend(1, q, super::out(&mut values, 3), &options));
        assert!(matches!(error, PlanError::State { operation: "attend", .. }));

        pre_step(&mut params, &[(0, 3)]).unwrap();
        let unwritten =
            PlanError::LayerNumber { number: 1, problem: LayerProblem::ReadBeforeWrite };
        let error = refusal(params.attend(1, q, super::out(&mut values, 3), &options));
        assert_eq!(error, unwritten);
        let mut k = vec![0.0_f32; 64 * 8];
        let mut v = vec![0.0_f32; 64 * 8];
        let [k, v] = [&mut k, &mut v]
            .map(|values| kv_core::TensorViewMut::host(&mut values[..16 * 8], &[1, 16, 2, 4]));
        assert_eq!(refusal(params.convert_paged_to_nonpaged(1, k, v)), unwritten);
        write(&mut params, 1).unwrap();
        params.attend(1, q, super::out(&mut values, 3), &options).unwrap();
    }
}

#[test]
fn a_question_about_an_unknown_sequence_leaves_no_trace() {
    for mut params in both() {
        run(&mut params, &[(3, 5), (4, 2)]);
        let before = state(&params);
        assert_eq!((params.page_count(99), params.sequence_length(99)), (0, 0));
        assert_eq!(params.page_list(99), []);
        assert_eq!(state(&params), before);
        assert_eq!(params.batch_size(), 2);
    }
}

#[test]
fn tokens_are_bounded_by_the_longest_sequence() {
    for (n, is_refused) in [(0, false), (1, false), (16, false), (17, true), (u32::MAX, true)] {
        let mut params = params(paged(4, 8));
        assert_eq!(params.pre_step(&[(1_u64, n)]).is_err(), is_refused, "{n}");
    }
}
