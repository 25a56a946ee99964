//! Sharing of prefixes between sequences, in one group and in several.
use kv_core::backend::AnyBackend;
use kv_core::spec::{PrefixReuse, PublishAt};
use kv_core::{GroupId, StepInput};

use super::super::{case, small};
use super::prompts::{Prompts, attend};
use super::{plain, tokens, with};
use crate::case::{At, Case, CaseResult, Outcome, ensure, same};
use crate::fixture::seq;
use crate::provenance::{self, PrefixHash};

pub(super) fn cases() -> Vec<Case> {
    vec![
        case("reuse/full_blocks_are_shared", full),
        case("reuse/a_part_of_a_block_is_copied", part),
        case("reuse/in_the_step_that_computes_it", early),
        case("reuse/a_dropped_step_offers_nothing", dropped),
        case("reuse/forks_truncations_and_drafts", diverge),
        case("reuse/windows", windows),
        case("reuse/drafts_that_left_the_window", unsure),
        case("reuse/groups_of_other_block_sizes", groups),
    ]
}

fn full(backend: &AnyBackend) -> CaseResult {
    for publish_at in [PublishAt::Begin, PublishAt::Commit] {
        let spec = small().prefix_reuse(PrefixReuse::FullBlocks).publish_at(publish_at);
        let mut prompts = Prompts::new(backend, spec)?;
        same("tokens of a new prompt", prompts.begin(1, &tokens(0..10), plain())?, 0)?;
        same("tokens", prompts.begin(2, &with(tokens(0..9), &[50, 51]), plain())?, 8)?;
        same("shared blocks", &prompts.table(1)[..2], &prompts.table(2)[..2])?;
        ensure(prompts.table(1)[2] != prompts.table(2)[2], || "the rest is shared".to_owned())?;
        prompts.append(1, &[60, 61, 62])?;
        prompts.check(2)?;
        prompts.cache.release(seq(1))?;
        same("tokens of one that ended", prompts.begin(3, &tokens(0..10), plain())?, 8)?;
        prompts.check(2)?;
    }
    Ok(Outcome::Holds)
}

fn part(backend: &AnyBackend) -> CaseResult {
    for ends in [false, true] {
        let mut prompts = Prompts::new(backend, small())?;
        prompts.begin(1, &tokens(0..8), plain())?;
        if ends {
            prompts.cache.release(seq(1))?;
        }
        same("tokens", prompts.begin(2, &with(tokens(0..6), &[90, 91]), plain())?, 6)?;
        same("tokens of the donor", prompts.cache.state().probe(&tokens(0..9), plain()), 8)?;
        if !ends {
            prompts.check(1).at("the donor")?;
        }
        prompts.append(2, &[92, 93])?;
        prompts.begin(3, &tokens(0..9), plain())?;
    }
    Ok(Outcome::Holds)
}

fn early(backend: &AnyBackend) -> CaseResult {
    let spec = small().prefix_reuse(PrefixReuse::FullBlocks).publish_at(PublishAt::Begin);
    let mut prompts = Prompts::new(backend, spec)?;
    let (first, second) = (tokens(0..11), with(tokens(0..9), &[70]));
    prompts.cache.start(seq(1), &first, plain())?;
    let mut pending = Vec::new();
    for layer in 0..prompts.spec.num_layers() {
        pending.push(prompts.stage(layer, &[11, 2])?);
    }
    let spec = prompts.spec.clone();
    let mut step = prompts.cache.begin_step(&[StepInput::tokens(seq(1), &first)])?;
    same("tokens of the same step", step.start(seq(2), &second, plain())?, 8)?;
    step.add(StepInput::tokens(seq(2), &second[8..]))?;
    let hashes =
        [provenance::prefix_hashes(&first, &plain()), provenance::prefix_hashes(&second, &plain())];
    let both = with_names(&hashes[0], &hashes[1][8..]);
    attend(&mut step, &spec, &both, &mut pending)?;
    step.commit()?;
    prompts.hashes = [1, 2].into_iter().zip(hashes).collect();
    prompts.check_attention(&[1, 2], &[11, 2], pending)?;
    same("shared blocks", &prompts.table(1)[..2], &prompts.table(2)[..2])?;
    Ok(Outcome::Holds)
}

/// Rows that a dropped step was about to write cannot be found.
fn dropped(backend: &AnyBackend) -> CaseResult {
    for reuse in [PrefixReuse::FullBlocks, PrefixReuse::Partial] {
        for publish_at in [PublishAt::Begin, PublishAt::Commit] {
            let spec = small().prefix_reuse(reuse).publish_at(publish_at);
            let mut prompts = Prompts::new(backend, spec)?;
            let prompt = tokens(0..14);
            prompts.cache.start(seq(1), &prompt, plain())?;
            prompts.hashes.insert(1, Vec::new());
            prompts.append(1, &prompt[..4])?;
            let rest = [StepInput::tokens(seq(1), &prompt[4..])];
            let mut step = prompts.cache.begin_step(&rest)?;
            let reused = step.start(seq(2), &prompt, plain())?;
            same(
                "tokens of the same step",
                reused,
                if publish_at == PublishAt::Begin { 12 } else { 4 },
            )?;
            drop(step);
            let found = prompts.cache.state().probe(&prompt, plain());
            same("tokens of a dropped step", found, 4).at(format!("{reuse:?}, {publish_at:?}"))?;
            // Tokens that the sequence computes now can.
            prompts.append(1, &prompt[4..])?;
            same("tokens", prompts.begin(2, &prompt[..13], plain())?, 12)?;
        }
    }
    Ok(Outcome::Holds)
}

fn with_names(a: &[PrefixHash], b: &[PrefixHash]) -> Vec<PrefixHash> {
    a.iter().chain(b).copied().collect()
}

fn diverge(backend: &AnyBackend) -> CaseResult {
    let mut prompts = Prompts::new(backend, small())?;
    prompts.begin(1, &tokens(0..10), plain())?;
    prompts.cache.fork(seq(1), seq(2))?;
    let hashes = prompts.hashes[&1].clone();
    prompts.hashes.insert(2, hashes);
    prompts.append(2, &[40, 41, 42])?;
    prompts.append(1, &[30, 31])?;
    prompts.check(2)?;
    // Truncated into a block that others may reuse, and continued differently.
    prompts.cache.truncate(seq(1), 6)?;
    prompts.hashes.entry(1).and_modify(|hashes| hashes.truncate(6));
    prompts.append(1, &[20, 21, 22])?;
    prompts.check(2)?;
    same(
        "tokens of the child",
        prompts.begin(3, &with(tokens(0..10), &[40, 41, 9]), plain())?,
        12,
    )?;
    // Drafts, one of which is right.
    let drafts = [60, 61, 62, 63, 64];
    let hashes = prompts.hashes_after(3, &drafts);
    let spec = prompts.spec.clone();
    let mut step =
        prompts.cache.begin_step(&[StepInput::tokens(seq(3), &drafts).with_drafts(4)])?;
    provenance::write(&mut step, &spec, &hashes)?;
    step.commit_accepted(&[2])?;
    prompts.hashes.entry(3).and_modify(|all| all.extend(&hashes[..2]));
    prompts.check(3)?;
    prompts.append(3, &[62, 70])?;
    let wrong = with(with(tokens(0..10), &[40, 41, 9]), &drafts);
    same("tokens of a rejected draft", prompts.cache.state().probe(&wrong, plain()), 16)?;
    Ok(Outcome::Holds)
}

fn windows(backend: &AnyBackend) -> CaseResult {
    let spec = small().window_left(5).publish_at(PublishAt::Begin);
    let mut prompts = Prompts::new(backend, spec.prefix_reuse(PrefixReuse::FullBlocks))?;
    let prompt = tokens(0..20);
    prompts.cache.start(seq(1), &prompt, plain())?;
    prompts.hashes.insert(1, Vec::new());
    for chunk in prompt.chunks(4) {
        prompts.append(1, chunk)?;
    }
    ensure(prompts.cache.state().free_blocks(GroupId(0)) > 11, || {
        "nothing left the window".to_owned()
    })?;
    let longer = with(prompt, &[50, 51]);
    same("tokens", prompts.begin(2, &longer, plain())?, 20)?;
    prompts.cache.release(seq(1))?;
    prompts.append(2, &[52, 53, 54])?;
    same(
        "tokens with a partly filled block",
        prompts.begin(3, &with(tokens(0..9), &[7]), plain())?,
        8,
    )?;
    Ok(Outcome::Holds)
}

/// A block may leave the window before its draft tokens are accepted, and is another sequence's
/// then.
fn unsure(backend: &AnyBackend) -> CaseResult {
    for publish_at in [PublishAt::Begin, PublishAt::Commit] {
        let mut prompts = Prompts::new(backend, small().window_left(0).publish_at(publish_at))?;
        prompts.cache.start(seq(1), &[], plain())?;
        prompts.hashes.insert(1, Vec::new());
        let drafts = tokens(0..8);
        let (hashes, spec) = (prompts.hashes_after(1, &drafts), prompts.spec.clone());
        let mut step =
            prompts.cache.begin_step(&[StepInput::tokens(seq(1), &drafts).with_drafts(7)])?;
        provenance::write(&mut step, &spec, &hashes)?;
        step.commit()?;
        prompts.hashes.insert(1, hashes);
        prompts.append(1, &[8])?;
        same("free blocks", prompts.cache.state().free_blocks(GroupId(0)), 15)?;
        same("tokens", prompts.begin(2, &tokens(0..9), plain())?, 0)
            .at(format!("{publish_at:?}"))?;
        prompts.check(1)?;
    }
    Ok(Outcome::Holds)
}

fn groups(backend: &AnyBackend) -> CaseResult {
    for reuse in [PrefixReuse::FullBlocks, PrefixReuse::Partial] {
        let spec = small().layers(3).prefix_reuse(reuse);
        let spec = spec.group([1], |group| group.paged(6, 12));
        let spec = spec.group([2], |group| group.paged(2, 40).window_left(7));
        let mut prompts = Prompts::new(backend, spec)?;
        prompts.begin(1, &tokens(0..27), plain())?;
        let got = prompts.begin(2, &with(tokens(0..20), &[80, 81]), plain())?;
        ensure(got >= 12, || format!("{got} tokens where 12 are a boundary of all groups"))?;
        prompts.append(2, &[82, 83, 84])?;
        prompts.append(1, &[85])?;
        prompts.check(2)?;
    }
    Ok(Outcome::Holds)
}
