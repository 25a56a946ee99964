//! Random lives: each operation applies whole or changes nothing, and the books are right after it.
use proptest::prelude::*;

use super::*;

#[derive(Debug, Clone)]
pub(super) enum Operation {
    Start(SequenceId, u32),
    Fork(SequenceId, SequenceId),
    Truncate(SequenceId, u32),
    Release(SequenceId),
    Step(Vec<(SequenceId, u32)>, bool),
    FailNext(u64),
    Reset,
}

pub(super) fn operation() -> impl Strategy<Value = Operation> {
    let sequence = || (0..SEQ.len()).prop_map(|i| SEQ[i]);
    let inputs = prop::collection::vec((sequence(), 1..9_u32), 1..4);
    prop_oneof![
        3 => (sequence(), 0..6_u32).prop_map(|(s, n)| Operation::Start(s, n)),
        2 => (sequence(), sequence()).prop_map(|(a, b)| Operation::Fork(a, b)),
        2 => (sequence(), 0..20_u32).prop_map(|(s, n)| Operation::Truncate(s, n)),
        2 => sequence().prop_map(Operation::Release),
        8 => (inputs, any::<bool>()).prop_map(|(i, commit)| Operation::Step(i, commit)),
        1 => (0..4_u64).prop_map(Operation::FailNext),
        1 => Just(Operation::Reset),
    ]
}

fn apply(cache: &mut KvCache<NullBackend>, operation: &Operation) -> Result<(), CacheError> {
    match operation {
        Operation::Start(s, n) => {
            cache.start(*s, &[], StartOptions::default().reserve(*n)).map(|_| ())
        }
        Operation::Fork(a, b) => cache.fork(*a, *b),
        Operation::Truncate(s, n) => cache.truncate(*s, *n),
        Operation::Release(s) => cache.release(*s),
        Operation::Step(inputs, true) => append(cache, inputs),
        Operation::Step(inputs, false) => {
            let inputs: Vec<_> = inputs.iter().map(|&(s, n)| StepInput::count(s, n)).collect();
            let before = snapshot(cache);
            cache.begin_step(&inputs)?.roll_back();
            assert_eq!(snapshot(cache), before, "rolled back");
            Ok(())
        }
        Operation::FailNext(more) => {
            cache.backend().control().fail_after(*more);
            Ok(())
        }
        Operation::Reset => cache.reset(),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    #[test]
    fn random_lives_keep_the_books(
        operations in prop::collection::vec(operation(), 1..60),
        wipe in any::<bool>(),
    ) {
        live(&mut two_groups(wipe), &operations);
    }
}

/// Runs operations; each applies whole or changes nothing.
pub(super) fn live(cache: &mut KvCache<NullBackend>, operations: &[Operation]) {
    use Operation::{Release, Reset, Truncate};
    for operation in operations {
        let before = snapshot(cache);
        let result = apply(cache, operation);
        // A release stands even where the wipe after it failed; all else applies whole or not.
        match (result, operation) {
            (Err(CacheError::Device(_)), Release(_) | Truncate(..) | Reset) | (Ok(()), _) => {}
            (Err(_), _) => assert_eq!(snapshot(cache), before, "{operation:?}"),
        }
        check_invariants(cache);
    }
}
