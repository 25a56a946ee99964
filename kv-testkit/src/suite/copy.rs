//! Copy-on-write: forks that diverge.
use kv_core::KvFormat;

use super::{ORDERS, case, small};
use crate::case::{At, Case, CaseError, CaseResult, Outcome};
use crate::device::{Device, dim};
use crate::fixture::{CacheFixture, Finish, StepConfig, StepKind};

pub(super) fn cases<B: Device>() -> Vec<Case<B>> {
    vec![
        case("copy/fork_then_child_writes", child_writes),
        case("copy/fork_then_parent_writes", parent_writes),
        case("copy/both_write_in_one_step", both_write),
        case("copy/every_format_order_and_block_size", forms),
        case("copy/forks_of_forks", forks_of_forks),
        case("copy/rolled_back", rolled_back),
        case("copy/truncated_child_writes", truncated),
    ]
}

fn step<B: Device>(fixture: &mut CacheFixture<B>, ids: &[(u64, u32)]) -> Result<(), CaseError> {
    let inputs: Vec<_> = ids.iter().map(|(id, n)| (*id, StepKind::Tokens(*n))).collect();
    fixture.step(&inputs, &StepConfig::default())?;
    fixture.check().at(format!("after step {ids:?}"))
}

/// Lengths that end before, at and after the end of a block of 4.
const LENGTHS: [u32; 5] = [1, 3, 4, 5, 8];

fn child_writes<B: Device>(backend: &B) -> CaseResult {
    for len in LENGTHS {
        let mut fixture = CacheFixture::new(backend, small().build()?, 1)?;
        fixture.fill(1, len)?;
        fixture.fork(1, 2)?;
        step(&mut fixture, &[(2, 1)]).at(format!("fork at {len}"))?;
        step(&mut fixture, &[(2, 3), (1, 1)])?;
    }
    Ok(Outcome::Holds)
}

fn parent_writes<B: Device>(backend: &B) -> CaseResult {
    for len in LENGTHS {
        let mut fixture = CacheFixture::new(backend, small().build()?, 2)?;
        fixture.fill(1, len)?;
        fixture.fork(1, 2)?;
        step(&mut fixture, &[(1, 2)]).at(format!("fork at {len}"))?;
        fixture.release(1)?;
        step(&mut fixture, &[(2, 6)])?;
    }
    Ok(Outcome::Holds)
}

fn both_write<B: Device>(backend: &B) -> CaseResult {
    for len in LENGTHS {
        for order in [[1, 2, 3], [3, 2, 1]] {
            let mut fixture = CacheFixture::new(backend, small().build()?, 3)?;
            fixture.fill(1, len)?;
            fixture.fork(1, 2)?;
            fixture.fork(1, 3)?;
            let inputs: Vec<_> = order.iter().map(|id| (*id, 2)).collect();
            step(&mut fixture, &inputs).at(format!("fork at {len}"))?;
            step(&mut fixture, &inputs)?;
        }
    }
    Ok(Outcome::Holds)
}

fn forms<B: Device>(backend: &B) -> CaseResult {
    for order in ORDERS {
        for format in KvFormat::PLAIN {
            for (block_size, num_blocks) in [(1, 40), (3, 16), (16, 6), (64, 4)] {
                let spec = small()
                    .head_dims(dim(backend, 6), dim(backend, 10))
                    .block_order(order)
                    .formats(*format, KvFormat::F16)
                    .paged(block_size, num_blocks);
                let mut fixture = CacheFixture::new(backend, spec.build()?, 4)?;
                fixture.fill(1, 7)?;
                fixture.fork(1, 2)?;
                step(&mut fixture, &[(1, 2), (2, 3)])
                    .at(format!("{order:?}, {format}, blocks of {block_size}"))?;
            }
            let spec = small().block_order(order).format(*format).contiguous(3, 12).build()?;
            let mut fixture = CacheFixture::new(backend, spec, 4)?;
            fixture.fill(1, 7)?;
            fixture.fork(1, 2)?;
            step(&mut fixture, &[(1, 2), (2, 3)]).at(format!("{order:?}, {format}, contiguous"))?;
        }
    }
    Ok(Outcome::Holds)
}

fn forks_of_forks<B: Device>(backend: &B) -> CaseResult {
    let mut fixture = CacheFixture::new(backend, small().paged(4, 40).build()?, 5)?;
    fixture.fill(1, 6)?;
    for id in 2..=6 {
        fixture.fork(id - 1, id)?;
        step(&mut fixture, &[(id, 1)])?;
    }
    fixture.release(3)?;
    fixture.release(1)?;
    step(&mut fixture, &[(6, 1), (2, 1), (5, 4), (4, 1)])?;
    Ok(Outcome::Holds)
}

fn rolled_back<B: Device>(backend: &B) -> CaseResult {
    let mut fixture = CacheFixture::new(backend, small().build()?, 6)?;
    fixture.fill(1, 6)?;
    fixture.fork(1, 2)?;
    let before = fixture.state();
    let dropped = StepConfig { finish: Finish::Drop, ..StepConfig::default() };
    fixture.step(&[(1, StepKind::Tokens(3)), (2, StepKind::Tokens(1))], &dropped)?;
    crate::fixture::unchanged(&mut fixture, &before, "a dropped step over a fork")?;
    step(&mut fixture, &[(2, 2), (1, 1)])?;
    Ok(Outcome::Holds)
}

fn truncated<B: Device>(backend: &B) -> CaseResult {
    for len in 0..=9 {
        let mut fixture = CacheFixture::new(backend, small().build()?, 7)?;
        fixture.fill(1, 9)?;
        fixture.fork(1, 2)?;
        fixture.truncate(2, len)?;
        fixture.check().at(format!("truncated to {len}"))?;
        step(&mut fixture, &[(2, 2)]).at(format!("truncated to {len}"))?;
        step(&mut fixture, &[(1, 1), (2, 1)])?;
    }
    Ok(Outcome::Holds)
}
