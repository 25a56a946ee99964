//! Reuse between sequences, on a device that computes nothing.
use std::ops::Range;

use super::*;
use crate::eviction::Eviction;
use crate::num::to_usize;
use crate::spec::{PrefixReuse, PublishAt};

pub(super) fn cache_with(
    num_blocks: u32,
    change: impl FnOnce(crate::spec::CacheSpecBuilder) -> crate::spec::CacheSpecBuilder,
) -> KvCache<NullBackend> {
    let spec = CacheSpec::builder().layers(2).kv_heads(1).head_dim(2).paged(4, num_blocks);
    KvCache::new(NullBackend::new(), change(spec).build().unwrap()).unwrap()
}

fn full_blocks(num_blocks: u32) -> KvCache<NullBackend> {
    cache_with(num_blocks, |spec| {
        let spec = spec.prefix_reuse(PrefixReuse::FullBlocks).publish_at(PublishAt::Begin);
        spec.eviction(Eviction::Lru)
    })
}

/// Starts a sequence and computes its missing tokens; returns the number of cached tokens.
pub(super) fn run(cache: &mut KvCache<NullBackend>, sequence: SequenceId, prompt: &[u32]) -> u32 {
    let reused = cache.start(sequence, prompt, StartOptions::default()).unwrap();
    feed(cache, sequence, &prompt[to_usize(reused)..]);
    reused
}

fn feed(cache: &mut KvCache<NullBackend>, sequence: SequenceId, tokens: &[u32]) {
    let mut step = cache.begin_step(&[StepInput::tokens(sequence, tokens)]).unwrap();
    write_all(&mut step).unwrap();
    step.commit().unwrap();
}

pub(super) fn tokens(range: Range<u32>) -> Vec<u32> {
    range.collect()
}

#[test]
fn full_blocks_are_shared_while_their_owner_runs() {
    let mut cache = full_blocks(64);
    assert_eq!(run(&mut cache, SEQ[0], &tokens(0..18)), 0);
    assert_eq!(cache.state().probe(&tokens(0..18), StartOptions::default()), 16);
    assert_eq!(
        cache.state().probe(&tokens(0..16), StartOptions::default()),
        12,
        "the last is computed"
    );
    assert_eq!(run(&mut cache, SEQ[1], &tokens(0..18)), 16);
    assert_eq!(cache.state().free_blocks(GroupId(0)), 64 - 6);
    let rows = [0, 1].map(|s| cache.state().block_table(SEQ[s], GroupId(0)).unwrap().to_vec());
    assert_eq!(rows[0][..4], rows[1][..4]);
    assert_ne!(rows[0][4], rows[1][4]);
    check_invariants(cache.state());
    let stats = cache.state().stats();
    assert_eq!((stats.requests, stats.query_tokens, stats.hit_tokens), (2, 36, 16));
}

#[test]
fn a_part_of_a_block_is_copied_and_its_owner_keeps_it() {
    let mut cache = cache_with(64, |spec| spec);
    run(&mut cache, SEQ[0], &tokens(0..8));
    let mut other = tokens(0..6);
    other.extend([90, 91, 92]);
    assert_eq!(run(&mut cache, SEQ[1], &other), 6);
    assert_eq!(cache.state().stats().cow_copies, 1);
    assert_eq!(
        cache.state().probe(&tokens(0..9), StartOptions::default()),
        8,
        "the donor is whole"
    );
    assert_eq!(cache.state().stats().partial_hit_tokens, 2);
    cache.release(SEQ[1]).unwrap();
    // The sequence left one full block of its own and one more token.
    other.extend([93]);
    assert_eq!(cache.state().probe(&other, StartOptions::default()), 9);
    cache.release(SEQ[0]).unwrap();
    assert_eq!(cache.state().free_blocks(GroupId(0)), 64);
    check_invariants(cache.state());
}

#[test]
fn an_indexed_block_that_is_written_again_is_copied_or_evicted() {
    for num_blocks in [2, 3] {
        let mut cache = cache_with(num_blocks, |spec| spec);
        run(&mut cache, SEQ[0], &tokens(0..8));
        cache.truncate(SEQ[0], 6).unwrap();
        feed(&mut cache, SEQ[0], &[50, 51]);
        let whole = cache.state().probe(&tokens(0..9), StartOptions::default());
        assert_eq!(whole, if num_blocks == 3 { 8 } else { 6 });
        let mut now = tokens(0..6);
        now.extend([50, 51, 52]);
        assert_eq!(cache.state().probe(&now, StartOptions::default()), 8);
        check_invariants(cache.state());
    }
}

#[test]
fn drafts_are_not_reusable_before_they_are_confirmed() {
    for publish_at in [PublishAt::Begin, PublishAt::Commit] {
        let mut cache = cache_with(64, |spec| {
            spec.prefix_reuse(PrefixReuse::FullBlocks).publish_at(publish_at)
        });
        run(&mut cache, SEQ[0], &tokens(0..7));
        let input = StepInput::tokens(SEQ[0], &[7, 8, 9, 10, 11]).with_drafts(4);
        let mut step = cache.begin_step(&[input]).unwrap();
        write_all(&mut step).unwrap();
        step.commit_accepted(&[2]).unwrap();
        assert_eq!(cache.state().seq_len(SEQ[0]), Some(9));
        assert_eq!(cache.state().free_blocks(GroupId(0)), 61, "slots of drafts stay");
        assert_eq!(cache.state().probe(&tokens(0..13), StartOptions::default()), 8);
        feed(&mut cache, SEQ[0], &[9, 20, 21]);
        let mut now = tokens(0..10);
        now.extend([20, 21, 22]);
        assert_eq!(cache.state().probe(&now, StartOptions::default()), 12);
        assert_eq!(cache.state().probe(&tokens(0..13), StartOptions::default()), 8);
        check_invariants(cache.state());
    }
}

/// Tokens that were not drafts but were not accepted lie in blocks that are published already.
#[test]
fn published_blocks_are_not_written_in_place_after_a_rejection() {
    for accepted in 0..=5 {
        let mut cache = full_blocks(64);
        run(&mut cache, SEQ[0], &tokens(0..7));
        let input = StepInput::tokens(SEQ[0], &[7, 8, 9, 10, 11]);
        let mut step = cache.begin_step(&[input]).unwrap();
        write_all(&mut step).unwrap();
        step.commit_accepted(&[accepted]).unwrap();
        check_invariants(cache.state());
        // With 0 and 1 to 4 accepted, block 1 or 2 is published and gets another token.
        feed(&mut cache, SEQ[0], &[20]);
        check_invariants(cache.state());
        assert_eq!(cache.state().probe(&tokens(0..13), StartOptions::default()), 12, "{accepted}");
        let is_inside = accepted != 1 && accepted != 5;
        assert_eq!(cache.state().stats().cow_copies, u64::from(is_inside), "{accepted}");
    }
}

#[test]
fn requests_that_arrive_together_compute_their_prompt_once() {
    let mut cache = full_blocks(64);
    let prompt = tokens(0..18);
    cache.start(SEQ[0], &prompt, StartOptions::default()).unwrap();
    let mut step = cache.begin_step(&[StepInput::tokens(SEQ[0], &prompt)]).unwrap();
    assert_eq!(step.start(SEQ[1], &prompt, StartOptions::default()).unwrap(), 16);
    step.add(StepInput::tokens(SEQ[1], &prompt[16..])).unwrap();
    assert_eq!(step.positions().len(), 20);
    drop(step);
    assert!(!cache.state().contains(SEQ[1]), "it began in a step that was rolled back");
    assert_eq!(cache.state().probe(&prompt, StartOptions::default()), 0);
    check_invariants(cache.state());
    let mut step = cache.begin_step(&[StepInput::tokens(SEQ[0], &prompt)]).unwrap();
    step.start(SEQ[1], &prompt, StartOptions::default()).unwrap();
    step.add(StepInput::tokens(SEQ[1], &prompt[16..])).unwrap();
    write_all(&mut step).unwrap();
    step.commit().unwrap();
    assert_eq!([0, 1].map(|s| cache.state().seq_len(SEQ[s])), [Some(18); 2]);
    check_invariants(cache.state());
}

/// A part is copied when its sequence joins the step, before anything is written.
#[test]
fn no_part_is_reused_of_a_block_that_the_open_step_fills() {
    for publish_at in [PublishAt::Begin, PublishAt::Commit] {
        let mut cache = cache_with(64, |spec| spec.publish_at(publish_at));
        let prompt = tokens(0..16);
        cache.start(SEQ[0], &prompt, StartOptions::default()).unwrap();
        let mut step = cache.begin_step(&[StepInput::tokens(SEQ[0], &prompt)]).unwrap();
        let reused = step.start(SEQ[1], &prompt, StartOptions::default()).unwrap();
        assert_eq!(reused, if publish_at == PublishAt::Begin { 12 } else { 0 });
        step.add(StepInput::prompt(SEQ[1], &prompt)).unwrap();
        write_all(&mut step).unwrap();
        step.commit().unwrap();
        assert_eq!(cache.state().stats().cow_copies, 0);
        assert_eq!(run(&mut cache, SEQ[2], &prompt), 15, "now it is there");
        check_invariants(cache.state());
    }
}

#[test]
fn a_first_chunk_is_no_longer_than_the_prompt() {
    let cache = full_blocks(8);
    let admission = Admission::default().with_chunk(1000).with_must_fit(true);
    let admits = |tokens: u32| {
        let prompt: Vec<_> = (0..tokens).collect();
        cache.state().check_admission(&prompt, StartOptions::default(), &admission)
    };
    assert_eq!(admits(32).unwrap(), 0);
    assert!(admits(33).is_err());
}

#[test]
fn windows_release_what_no_query_sees() {
    let mut cache = cache_with(63, |spec| {
        spec.window_left(7).prefix_reuse(PrefixReuse::FullBlocks).publish_at(PublishAt::Begin)
    });
    cache.start(SEQ[0], &tokens(0..32), StartOptions::default()).unwrap();
    feed(&mut cache, SEQ[0], &tokens(0..16));
    assert_eq!(cache.state().free_blocks(GroupId(0)), 59);
    feed(&mut cache, SEQ[0], &tokens(16..32));
    assert_eq!(cache.state().free_blocks(GroupId(0)), 57);
    for token in 200..205 {
        feed(&mut cache, SEQ[0], &[token]);
    }
    assert_eq!(cache.state().free_blocks(GroupId(0)), 60);
    check_invariants(cache.state());
    let refused = cache.truncate(SEQ[0], 20).unwrap_err();
    assert!(refused.to_string().contains("left its window"), "{refused}");
    cache.truncate(SEQ[0], 36).unwrap();
    cache.release(SEQ[0]).unwrap();
    let mut turns = [tokens(0..33), tokens(0..20), tokens(0..12)];
    turns[1][17..].fill(900);
    turns[2][9..].fill(900);
    assert_eq!(turns.map(|turn| cache.state().probe(&turn, StartOptions::default())), [32, 16, 8]);
    assert_eq!(run(&mut cache, SEQ[1], &tokens(0..33)), 32);
    assert_eq!(cache.state().free_blocks(GroupId(0)), 60);
    check_invariants(cache.state());
}

#[test]
fn salts_adapters_and_contents_keep_prompts_apart() {
    let mut cache = full_blocks(64);
    let prompt = tokens(0..17);
    let image = |id| [crate::reuse::ContentSpan { begin: 5, len: 2, id }];
    let (cat, dog) = (image(1), image(2));
    let all = [
        StartOptions::default(),
        StartOptions::default().with_salt(b"t1"),
        StartOptions::default().with_salt(b"t2"),
        StartOptions::default().with_adapter(1),
        StartOptions::default().with_contents(&cat),
        StartOptions::default().with_contents(&dog),
    ];
    for (options, hits) in all.iter().zip([0, 0, 0, 0, 4, 4]) {
        assert_eq!(cache.state().probe(&prompt, *options), hits);
        assert_eq!(cache.start(SEQ[0], &prompt, *options).unwrap(), hits);
        feed(&mut cache, SEQ[0], &prompt[to_usize(hits)..]);
        cache.release(SEQ[0]).unwrap();
    }
    assert!(all.iter().all(|options| cache.state().probe(&prompt, *options) == 16));
    assert!(cache.reset_prefixes().unwrap());
    assert!(all.iter().all(|options| cache.state().probe(&prompt, *options) == 0));
}

#[test]
fn pins_hold_and_forgetting_stops_at_shared_blocks() {
    let mut cache = full_blocks(6);
    let (system, other) = (tokens(0..9), tokens(100..124));
    run(&mut cache, SEQ[0], &system);
    cache.release(SEQ[0]).unwrap();
    let pin = cache.pin_prefix(&system, StartOptions::default());
    assert_eq!(pin.tokens, 8);
    assert!(!cache.reset_prefixes().unwrap(), "a pin holds blocks");
    run(&mut cache, SEQ[0], &other[..16]);
    cache.release(SEQ[0]).unwrap();
    assert_eq!(cache.state().probe(&system, StartOptions::default()), 8);
    assert!(cache.unpin(pin.id).unwrap() && !cache.unpin(pin.id).unwrap());
    let mut longer = system.clone();
    longer[8] = 77;
    longer.extend(tokens(70..74));
    run(&mut cache, SEQ[1], &longer);
    assert_eq!(cache.forget_sequence(SEQ[1]).unwrap(), 3, "the prefix is its own too");
    assert_eq!(cache.state().probe(&system, StartOptions::default()), 0);
    assert_eq!(cache.forget_prefix(&other, StartOptions::default(), 0).unwrap(), 2);
    check_invariants(cache.state());
}

/// The partial last block of a prompt belongs to the prompt, unless another prompt continues it.
#[test]
fn a_prompt_that_ends_inside_a_block_is_forgotten_whole() {
    for more in [0, 2] {
        let mut cache = cache_with(8, |spec| spec);
        let prompt = tokens(0..10);
        run(&mut cache, SEQ[0], &[prompt.clone(), tokens(50..50 + more)].concat());
        cache.release(SEQ[0]).unwrap();
        let forget = |cache: &mut KvCache<NullBackend>, keep| {
            cache.forget_prefix(&prompt, StartOptions::default(), keep).unwrap()
        };
        assert_eq!(forget(&mut cache, 9), 0, "its last block begins within what is kept");
        let all = if more == 0 { 3 } else { 0 };
        assert_eq!(forget(&mut cache, 0), all);
        assert_eq!(
            cache.state().probe(&prompt, StartOptions::default()),
            if more == 0 { 0 } else { 9 }
        );
        check_invariants(cache.state());
    }
}

#[test]
fn a_salt_is_forgotten_but_what_is_held() {
    let mut cache = cache_with(16, |spec| spec);
    let (prompt, other) = (tokens(0..10), tokens(100..109));
    let [none, salt] = [&b""[..], b"a"].map(|salt| StartOptions::default().with_salt(salt));
    for (number, options) in [none, salt, salt.with_adapter(3)].into_iter().enumerate() {
        cache.start(SEQ[number], &prompt, options).unwrap();
        feed(&mut cache, SEQ[number], &prompt);
        cache.release(SEQ[number]).unwrap();
    }
    cache.start(SEQ[0], &other, salt).unwrap();
    feed(&mut cache, SEQ[0], &other);
    assert_eq!(cache.forget_salt(b"b").unwrap(), 0);
    assert_eq!(cache.forget_salt(b"a").unwrap(), 6);
    assert_eq!(cache.state().probe(&prompt, none), 9);
    assert_eq!([salt, salt.with_adapter(3)].map(|of| cache.state().probe(&prompt, of)), [0; 2]);
    assert_eq!(cache.state().probe(&other, salt), 8, "a sequence holds it");
    cache.release(SEQ[0]).unwrap();
    assert_eq!((cache.forget_salt(b"").unwrap(), cache.forget_salt(b"a").unwrap()), (3, 3));
    assert!(cache.reset_prefixes().unwrap());
    check_invariants(cache.state());
}

#[test]
fn the_last_holder_copies_if_it_would_overwrite_another() {
    for (cut, copies) in [(3, 1), (2, 2)] {
        let mut cache = cache_with(8, |spec| spec.prefix_reuse(PrefixReuse::Off));
        start(&mut cache, SEQ[0]);
        append(&mut cache, &[(SEQ[0], 3)]).unwrap();
        cache.fork(SEQ[0], SEQ[1]).unwrap();
        cache.truncate(SEQ[1], cut).unwrap();
        let shared = cache.state().block_table(SEQ[0], GroupId(0)).unwrap()[0];
        let inputs = [0, 1].map(|s| StepInput::count(SEQ[s], 1));
        let demand = cache.state().blocks_for_step(GroupId(0), &inputs).unwrap();
        let free = cache.state().free_blocks(GroupId(0));
        let step = cache.begin_step(&inputs).unwrap();
        let rows = [0, 1].map(|s| step.cache().state().block_table(SEQ[s], GroupId(0)).unwrap()[0]);
        let copied = u32::try_from(rows.iter().filter(|block| **block != shared).count()).unwrap();
        let taken = free - step.cache().state().free_blocks(GroupId(0));
        assert_eq!((copied, demand.needed, taken), (copies, copies, copies), "cut to {cut}");
        drop(step);
        let rows = [0, 1].map(|s| cache.state().block_table(SEQ[s], GroupId(0)).unwrap()[0]);
        assert_eq!(rows, [shared; 2]);
        check_invariants(cache.state());
    }
}

#[test]
fn a_block_that_its_last_holder_copied_is_wiped() {
    let mut cache = cache_with(8, |spec| spec.prefix_reuse(PrefixReuse::Off).wipe_on_release(true));
    start(&mut cache, SEQ[0]);
    append(&mut cache, &[(SEQ[0], 3)]).unwrap();
    cache.fork(SEQ[0], SEQ[1]).unwrap();
    cache.truncate(SEQ[1], 2).unwrap();
    let shared = cache.state().block_table(SEQ[0], GroupId(0)).unwrap()[0];
    append(&mut cache, &[(SEQ[0], 1), (SEQ[1], 1)]).unwrap();
    assert_eq!(cache.state().pool(GroupId(0)).unwrap().holders(shared), 0);
    assert_eq!(cache.state().unwiped(), [(GroupId(0), shared)], "it has no holder any more");
}

#[test]
fn a_block_kept_in_a_rolled_back_step_is_shared_again() {
    let mut cache = cache_with(8, |spec| spec.prefix_reuse(PrefixReuse::Off));
    start(&mut cache, SEQ[0]);
    append(&mut cache, &[(SEQ[0], 2)]).unwrap();
    cache.fork(SEQ[0], SEQ[1]).unwrap();
    let inputs = [0, 1].map(|s| StepInput::count(SEQ[s], 1));
    drop(cache.begin_step(&inputs).unwrap());
    let alone = [StepInput::count(SEQ[1], 1)];
    assert_eq!(cache.state().blocks_for_step(GroupId(0), &alone).unwrap().needed, 1);
    append(&mut cache, &[(SEQ[1], 1)]).unwrap();
    let rows = [0, 1].map(|s| cache.state().block_table(SEQ[s], GroupId(0)).unwrap()[0]);
    assert_ne!(rows[0], rows[1]);
    check_invariants(cache.state());
}

#[test]
fn a_block_that_left_the_window_is_not_published() {
    let mut cache = cache_with(8, |spec| spec.window_left(0));
    start(&mut cache, SEQ[0]);
    append(&mut cache, &[(SEQ[0], 4)]).unwrap();
    // The other's tokens are known up to the middle of its first block.
    cache.start(SEQ[1], &[], StartOptions::default()).unwrap();
    feed(&mut cache, SEQ[1], &[5, 6]);
    append(&mut cache, &[(SEQ[1], 6)]).unwrap();
    append(&mut cache, &[(SEQ[1], 1)]).unwrap();
    cache.release(SEQ[1]).unwrap();
    assert_eq!(cache.state().probe(&[5, 6, 7], StartOptions::default()), 0);
    check_invariants(cache.state());
}

#[test]
fn drafts_that_are_committed_wait_for_a_later_step() {
    for publish_at in [PublishAt::Begin, PublishAt::Commit] {
        let mut cache = cache_with(64, |spec| {
            spec.prefix_reuse(PrefixReuse::FullBlocks).publish_at(publish_at)
        });
        run(&mut cache, SEQ[0], &tokens(0..7));
        let input = StepInput::tokens(SEQ[0], &[7, 8, 9, 10, 11, 12]).with_drafts(5);
        let mut step = cache.begin_step(&[input]).unwrap();
        write_all(&mut step).unwrap();
        step.commit().unwrap();
        assert_eq!(
            cache.state().probe(&tokens(0..14), StartOptions::default()),
            8,
            "{publish_at:?}"
        );
        feed(&mut cache, SEQ[0], &[13]);
        assert_eq!(
            cache.state().probe(&tokens(0..14), StartOptions::default()),
            12,
            "{publish_at:?}"
        );
    }
}
