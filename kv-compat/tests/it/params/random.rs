//! Random operation sequences against a model that is a list of lengths.
use kv_core::CacheError;
use proptest::prelude::*;

use super::{Params, config, lens, paged, params, pre_step, state, write};

#[derive(Debug, Clone)]
enum Op {
    Step(Vec<(u64, u32)>),
    RollBack,
    Reset,
}

fn op() -> impl Strategy<Value = Op> {
    let step = prop::collection::vec((0_u64..6, 0_u32..9), 0..6);
    prop_oneof![12 => step.prop_map(Op::Step), 1 => Just(Op::RollBack), 1 => Just(Op::Reset)]
}

/// What the rules say about a step: the lengths after it, or none when it must be refused.
fn expected(before: &[(u64, u32)], step: &[(u64, u32)], pages: u32) -> Option<Vec<(u64, u32)>> {
    let len = |id| before.iter().find(|entry| entry.0 == id).map_or(0, |entry| entry.1);
    let after: Vec<_> = step.iter().map(|(id, n)| (*id, len(*id) + n)).collect();
    let twice = (0..step.len()).any(|i| step[..i].iter().any(|entry| entry.0 == step[i].0));
    let needed: u32 = after.iter().map(|(_, len)| len.div_ceil(4)).sum();
    let fits = after.iter().all(|(_, len)| *len <= 16) && needed <= pages;
    (step.len() <= 4 && !twice && fits).then_some(after)
}

fn run_all(mut params: Params, pages: u32, ops: &[Op]) {
    params.allocate_memory(1).unwrap();
    // Lengths after the step, and those to return to when it is given up.
    let (mut model, mut given_up) = (Vec::new(), Vec::new());
    for op in ops {
        match op {
            Op::Step(step) => {
                let before = state(&params);
                let after = expected(&model, step, pages);
                match pre_step(&mut params, step) {
                    Ok(()) => {
                        let after = after.expect("a step that breaks a rule was accepted");
                        let len = |id| model.iter().find(|(known, _)| *known == id);
                        given_up =
                            step.iter().map(|(id, _)| (*id, len(*id).map_or(0, |e| e.1))).collect();
                        model = after;
                        write(&mut params, 1).unwrap();
                    }
                    Err(CacheError::Plan(_) | CacheError::Exhausted(_)) => {
                        assert_eq!(after, None, "{step:?} was refused");
                        assert_eq!(state(&params), before);
                    }
                    Err(other) => panic!("{other}"),
                }
            }
            Op::RollBack => {
                params.roll_back();
                model.clone_from(&given_up);
            }
            Op::Reset => {
                params.reset().unwrap();
                (model, given_up) = (Vec::new(), Vec::new());
            }
        }
        assert_eq!(lens(&params), model);
        let held: u32 = model.iter().map(|(_, len): &(u64, u32)| len.div_ceil(4)).sum();
        if params.is_paged() {
            assert_eq!(params.num_free_pages(), pages - held);
        }
    }
}

proptest! {
    #[test]
    fn a_small_pool_follows_the_rules(ops in prop::collection::vec(op(), 1..60)) {
        run_all(params(paged(4, 7)), 7, &ops);
    }

    #[test]
    fn slots_follow_the_rules(ops in prop::collection::vec(op(), 1..60)) {
        run_all(params(config()), u32::MAX, &ops);
    }
}
