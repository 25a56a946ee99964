//! Content that is computed more than once: it is indexed once, and shared if possible.
use super::reuse::{cache_with, run, tokens};
use super::*;
use crate::events::EventKind;
use crate::eviction::Eviction;
use crate::num::to_usize;
use crate::reuse::ContentSpan;
use crate::spec::{PrefixReuse, PublishAt};

const POOL: GroupId = GroupId(0);

/// Creates a cache with blocks of 16 tokens.
fn of_16(
    num_blocks: u32,
    change: impl FnOnce(crate::spec::CacheSpecBuilder) -> crate::spec::CacheSpecBuilder,
) -> KvCache<NullBackend> {
    cache_with(num_blocks, |spec| change(spec.layers(1).paged(16, num_blocks)))
}

/// Computes a prompt and ends it; returns how many of its tokens were cached.
fn request(cache: &mut KvCache<NullBackend>, prompt: &[u32]) -> u32 {
    let reused = run(cache, SEQ[0], prompt);
    cache.release(SEQ[0]).unwrap();
    reused
}

/// Computes the rest of prompts that have begun, in one step.
fn step_all(cache: &mut KvCache<NullBackend>, inputs: &[(SequenceId, &[u32])]) {
    let inputs: Vec<_> = inputs.iter().map(|(s, t)| StepInput::tokens(*s, t)).collect();
    let mut step = cache.begin_step(&inputs).unwrap();
    write_all(&mut step).unwrap();
    step.commit().unwrap();
}

fn cached(cache: &KvCache<NullBackend>) -> usize {
    cache.state().pool(POOL).unwrap().index().len()
}

fn block(cache: &KvCache<NullBackend>, sequence: SequenceId, index: usize) -> BlockId {
    cache.state().block_table(sequence, POOL).unwrap()[index]
}

#[test]
fn a_repeated_prompt_is_indexed_once() {
    for reuse in [PrefixReuse::Partial, PrefixReuse::FullBlocks] {
        for publish_at in [PublishAt::Begin, PublishAt::Commit] {
            for (len, blocks) in [(15, 1), (16, 1), (17, 2), (33, 3)] {
                let mut cache = of_16(64, |spec| spec.prefix_reuse(reuse).publish_at(publish_at));
                let prompt = tokens(0..len);
                for _ in 0..200 {
                    request(&mut cache, &prompt);
                    check_invariants(cache.state());
                }
                let full = prompt.len() / 16;
                let expected = if reuse == PrefixReuse::Partial { blocks } else { full };
                assert_eq!(cached(&cache), expected, "{len} tokens, {reuse:?}, {publish_at:?}");
                assert_eq!(cache.state().stats().stored_blocks, u64::try_from(expected).unwrap());
                assert_eq!(cache.state().stats().evictions, 0);
            }
        }
    }
}

#[test]
fn five_thousand_repeats_of_a_prompt_cache_one_block() {
    for eviction in Eviction::ALL {
        let mut cache = of_16(1 << 13, |spec| spec.eviction(eviction));
        let prompt = tokens(0..16);
        for round in 0..5_000 {
            let reused = request(&mut cache, &prompt);
            assert_eq!(reused, if round == 0 { 0 } else { 15 });
        }
        assert_eq!(cached(&cache), 1, "{eviction}");
        assert_eq!(
            (cache.state().stats().evictions, cache.state().stats().duplicate_blocks),
            (0, 4_999)
        );
    }
}

/// 551 blocks hold everything that is ever requested, and the pool has 1,000.
#[test]
fn a_ping_between_other_prompts_evicts_nothing() {
    for eviction in Eviction::ALL {
        for ping in [15_u32, 16, 17] {
            let mut cache = of_16(1000, |spec| spec.eviction(eviction));
            let ping = tokens(900_000..900_000 + ping);
            for round in 0..3 {
                for prompt in 0..50_u32 {
                    let prompt = tokens(prompt * 1000..prompt * 1000 + 161);
                    let reused = request(&mut cache, &prompt);
                    assert_eq!(reused, if round == 0 { 0 } else { 160 }, "{eviction}");
                    for _ in 0..20 {
                        request(&mut cache, &ping);
                    }
                }
            }
            assert_eq!(cache.state().stats().evictions, 0, "{eviction}, {} tokens", ping.len());
            assert_eq!(cached(&cache), 550 + ping.len().div_ceil(16), "{eviction}");
        }
    }
}

#[test]
fn equal_prompts_of_one_step_end_with_the_same_blocks() {
    for publish_at in [PublishAt::Begin, PublishAt::Commit] {
        let mut cache = cache_with(4096, |spec| spec.publish_at(publish_at).max_sequences(300));
        let prompt = tokens(0..17);
        let sequences: Vec<_> = (0..200).map(SequenceId).collect();
        for sequence in &sequences {
            assert_eq!(cache.start(*sequence, &prompt, StartOptions::default()).unwrap(), 0);
        }
        let inputs: Vec<_> = sequences.iter().map(|s| (*s, prompt.as_slice())).collect();
        step_all(&mut cache, &inputs);
        check_invariants(cache.state());
        let first = cache.state().block_table(sequences[0], POOL).unwrap()[..4].to_vec();
        for sequence in &sequences {
            assert_eq!(cache.state().block_table(*sequence, POOL).unwrap()[..4], first);
        }
        assert_eq!(cached(&cache), 4);
        assert_eq!(
            cache.state().free_blocks(POOL),
            4096 - 4 - 200,
            "the last block is each one's own"
        );
        for sequence in &sequences {
            cache.release(*sequence).unwrap();
        }
        assert_eq!(cached(&cache), 5);
        check_invariants(cache.state());
    }
}

#[test]
fn a_step_that_is_dropped_replaces_nothing() {
    for publish_at in [PublishAt::Begin, PublishAt::Commit] {
        let mut cache = cache_with(64, |spec| spec.publish_at(publish_at));
        let prompt = tokens(0..8);
        for sequence in [SEQ[0], SEQ[1]] {
            cache.start(sequence, &prompt, StartOptions::default()).unwrap();
        }
        let before = books(cache.state());
        let inputs = [SEQ[0], SEQ[1]].map(|s| StepInput::tokens(s, &prompt));
        let mut step = cache.begin_step(&inputs).unwrap();
        write_all(&mut step).unwrap();
        drop(step);
        assert_eq!(books(cache.state()), before);
        assert_eq!(cached(&cache), 0);
        check_invariants(cache.state());
    }
}

#[test]
fn drafts_are_shared_only_when_they_are_accepted() {
    for publish_at in [PublishAt::Begin, PublishAt::Commit] {
        let mut cache = cache_with(64, |spec| spec.publish_at(publish_at));
        request(&mut cache, &tokens(0..12));
        for (accepted, shared) in [(0, 1), (3, 1), (4, 2), (5, 2)] {
            let mut prompt = tokens(0..4);
            cache.start(SEQ[1], &prompt, StartOptions::default()).unwrap();
            let reused = cache.state().seq_len(SEQ[1]).unwrap();
            prompt.drain(..usize::try_from(reused).unwrap());
            step_all(&mut cache, &[(SEQ[1], &prompt)]);
            let drafts = tokens(4..9);
            let input = StepInput::tokens(SEQ[1], &drafts).with_drafts(5);
            let mut step = cache.begin_step(&[input]).unwrap();
            write_all(&mut step).unwrap();
            step.commit_accepted(&[accepted]).unwrap();
            check_invariants(cache.state());
            let pool = cache.state().pool(POOL).unwrap();
            let table = cache.state().block_table(SEQ[1], POOL).unwrap();
            let indexed = table.iter().filter(|block| pool.is_stored(**block)).count();
            let at_commit = publish_at == PublishAt::Commit;
            // Only tokens that were certain when the step began are published early.
            let expected = if at_commit { shared } else { 1 };
            assert_eq!(indexed, expected, "{accepted} accepted, {publish_at:?}");
            cache.release(SEQ[1]).unwrap();
            assert!(cached(&cache) <= 4, "{accepted}");
        }
    }
}

#[test]
fn a_replaced_block_is_wiped_and_a_shared_one_is_copied_when_it_is_written_again() {
    let mut cache = cache_with(64, |spec| spec.wipe_on_release(true));
    request(&mut cache, &tokens(0..9));
    let prompt = tokens(0..8);
    cache.start(SEQ[0], &prompt, StartOptions::default()).unwrap();
    let mut step = cache.begin_step(&[StepInput::tokens(SEQ[0], &[7])]).unwrap();
    write_all(&mut step).unwrap();
    let own = step.cache().state().block_table(SEQ[0], POOL).unwrap()[1];
    step.commit().unwrap();
    let indexed = block(&cache, SEQ[0], 1);
    assert_ne!(indexed, own);
    assert_eq!(cache.state().unwiped(), [(GroupId(0), own)]);
    assert_eq!(cache.state().pool(POOL).unwrap().holders(own), 0);
    cache.truncate(SEQ[0], 6).unwrap();
    step_all(&mut cache, &[(SEQ[0], &[50, 51])]);
    assert_ne!(block(&cache, SEQ[0], 1), indexed);
    assert_eq!(cache.state().probe(&tokens(0..9), StartOptions::default()), 8);
    check_invariants(cache.state());
}

#[test]
fn content_is_announced_once_and_its_end_once() {
    for publish_at in [PublishAt::Begin, PublishAt::Commit] {
        let mut cache = cache_with(4, |spec| spec.publish_at(publish_at).events(64));
        for _ in 0..3 {
            request(&mut cache, &tokens(0..8));
        }
        let kinds = |cache: &mut KvCache<NullBackend>| {
            let count = |stored: bool, events: &[crate::events::Event]| {
                let is_kind = |e: &&crate::events::Event| match e.kind {
                    EventKind::Stored(_) => stored,
                    EventKind::Removed { .. } => !stored,
                    _ => false,
                };
                events.iter().filter(is_kind).count()
            };
            let events = cache.take_events();
            (count(true, &events), count(false, &events))
        };
        assert_eq!(kinds(&mut cache), (2, 0));
        request(&mut cache, &tokens(100..116));
        assert_eq!(kinds(&mut cache), (4, 2));
        check_invariants(cache.state());
    }
}

#[test]
fn a_partial_block_is_replaced_by_content_that_continues_it() {
    let mut cache = of_16(64, |spec| spec);
    for len in 2..=16 {
        request(&mut cache, &tokens(0..len));
        assert_eq!(cached(&cache), 1, "{len} tokens");
        check_invariants(cache.state());
    }
    for len in (2..16).rev() {
        assert_eq!(request(&mut cache, &tokens(0..len)), len - 1);
        assert_eq!(cached(&cache), 1, "{len} tokens");
    }
    let mut other = tokens(0..9);
    other[8] = 77;
    assert_eq!(request(&mut cache, &other), 8);
    assert_eq!(cached(&cache), 2, "it goes on otherwise");
    assert_eq!(cache.state().stats().evictions, 0);
    check_invariants(cache.state());
}

/// A search for a common beginning visits a few siblings: the one in use must be among them.
#[test]
fn a_repeated_part_stays_findable_among_many_siblings() {
    let mut cache = of_16(4096, |spec| spec);
    let ping = tokens(900_000..900_015);
    request(&mut cache, &ping);
    for prompt in 0..200_u32 {
        request(&mut cache, &tokens(prompt * 1000..prompt * 1000 + 20));
        assert_eq!(request(&mut cache, &ping), 14, "after {prompt} prompts");
    }
    assert_eq!(cached(&cache), 401);
}

#[test]
fn namespaces_and_contents_are_indexed_apart() {
    let mut cache = of_16(64, |spec| spec);
    let prompt = tokens(0..16);
    let image = |id| [ContentSpan { begin: 5, len: 2, id }];
    let (cat, dog) = (image(1), image(2));
    let all = [
        StartOptions::default(),
        StartOptions::default().with_salt(b"t1"),
        StartOptions::default().with_adapter(1),
        StartOptions::default().with_contents(&cat),
        StartOptions::default().with_contents(&dog),
    ];
    for round in 0..3 {
        for options in &all {
            let reused = cache.start(SEQ[0], &prompt, *options).unwrap();
            step_all(&mut cache, &[(SEQ[0], &prompt[to_usize(reused)..])]);
            cache.release(SEQ[0]).unwrap();
            check_invariants(cache.state());
            assert!(round == 0 || reused == 15, "{options:?}: {reused} reused");
        }
    }
    assert_eq!(cached(&cache), 5);
}

/// Rows of an image are reused for the same image only.
#[test]
fn a_part_of_a_block_is_reused_up_to_where_images_differ() {
    let span = |begin, len, id| ContentSpan { begin, len, id };
    let prompt = tokens(0..16);
    let probe = |made: &[ContentSpan], asked: &[ContentSpan]| {
        let mut cache = of_16(64, |spec| spec);
        cache.start(SEQ[0], &prompt[..15], StartOptions::default().with_contents(made)).unwrap();
        step_all(&mut cache, &[(SEQ[0], &prompt[..15])]);
        cache.release(SEQ[0]).unwrap();
        cache.state().probe(&prompt, StartOptions::default().with_contents(asked))
    };
    let cat = span(5, 4, 1);
    assert_eq!(probe(&[cat], &[cat]), 15);
    assert_eq!(probe(&[cat], &[span(5, 4, 2)]), 5, "another image");
    assert_eq!(probe(&[cat], &[]), 5, "no image");
    assert_eq!(probe(&[], &[cat]), 5, "an image where there was none");
    assert_eq!(probe(&[cat], &[span(4, 4, 1)]), 4, "the same image elsewhere");
    assert_eq!(probe(&[cat], &[span(5, 2, 1)]), 7, "less of the image");
    assert_eq!(probe(&[cat], &[cat, span(12, 2, 3)]), 12, "another image after it");
    assert_eq!(probe(&[cat, span(12, 9, 3)], &[cat, span(12, 3, 3)]), 15);
    assert_eq!(probe(&[span(0, 20, 1)], &[span(0, 20, 1)]), 15);
    assert_eq!(probe(&[span(0, 20, 1)], &[span(0, 20, 2)]), 0);
}

#[test]
fn groups_with_other_block_sizes_and_windows_share_what_is_repeated() {
    for publish_at in [PublishAt::Begin, PublishAt::Commit] {
        let spec = CacheSpec::builder()
            .layers(3)
            .kv_heads(1)
            .head_dim(2)
            .paged(4, 64)
            .group([1], |group| group.paged(6, 64))
            .group([2], |group| group.window_left(5).paged(4, 64))
            .publish_at(publish_at);
        let mut cache = KvCache::new(NullBackend::new(), spec.build().unwrap()).unwrap();
        let prompt = tokens(0..24);
        for _ in 0..4 {
            for sequence in [SEQ[0], SEQ[1], SEQ[2]] {
                cache.start(sequence, &prompt, StartOptions::default()).unwrap();
            }
            for sequence in [SEQ[0], SEQ[1], SEQ[2]] {
                let len = usize::try_from(cache.state().seq_len(sequence).unwrap()).unwrap();
                for chunk in prompt[len..].chunks(5) {
                    step_all(&mut cache, &[(sequence, chunk)]);
                    check_invariants(cache.state());
                }
            }
            for sequence in [SEQ[0], SEQ[1], SEQ[2]] {
                cache.release(sequence).unwrap();
                check_invariants(cache.state());
            }
        }
        for (spec, group) in cache.state().spec().groups().iter().zip(0..) {
            let most = 24_usize.div_ceil(usize::try_from(spec.block_size()).unwrap());
            let pool = cache.state().pool(GroupId(group)).unwrap();
            assert!(pool.index().len() <= most, "{publish_at:?}, group {group}");
        }
    }
}

/// A fork that completes the block its parent has completed gets the parent's.
#[test]
fn forks_with_equal_tokens_end_with_one_block() {
    let mut cache = cache_with(64, |spec| spec);
    run(&mut cache, SEQ[0], &tokens(0..6));
    cache.fork(SEQ[0], SEQ[1]).unwrap();
    cache.fork(SEQ[0], SEQ[2]).unwrap();
    let next: &[u32] = &[6, 7, 8];
    step_all(&mut cache, &[(SEQ[0], next), (SEQ[1], next), (SEQ[2], &[6, 9, 8])]);
    assert_eq!(block(&cache, SEQ[0], 1), block(&cache, SEQ[1], 1));
    assert_ne!(block(&cache, SEQ[0], 1), block(&cache, SEQ[2], 1));
    check_invariants(cache.state());
    for sequence in [SEQ[0], SEQ[1], SEQ[2]] {
        cache.release(sequence).unwrap();
        check_invariants(cache.state());
    }
    assert_eq!(cached(&cache), 5);
}

/// Quantised tokens that stay in a truncated block keep it, and no other block, out of the index.
#[test]
fn accepted_drafts_are_published_before_a_truncated_block() {
    for publish_at in [PublishAt::Begin, PublishAt::Commit] {
        let mut cache = cache_with(32, |spec| {
            let spec = spec.head_dim(32).format(crate::KvFormat::Int8(crate::Scaling::Row));
            spec.tail(true).publish_at(publish_at)
        });
        run(&mut cache, SEQ[0], &tokens(0..4));
        let drafts = tokens(4..12);
        let mut step =
            cache.begin_step(&[StepInput::tokens(SEQ[0], &drafts).with_drafts(8)]).unwrap();
        write_all(&mut step).unwrap();
        step.commit().unwrap();
        cache.truncate(SEQ[0], 9).unwrap();
        step_all(&mut cache, &[(SEQ[0], &tokens(9..17))]);
        assert_eq!(
            cache.state().probe(&tokens(0..17), StartOptions::default()),
            8,
            "{publish_at:?}"
        );
        check_invariants(cache.state());
    }
}

#[test]
fn a_block_that_forks_hold_is_not_replaced_by_an_idle_one() {
    let mut cache = of_16(16, |spec| spec);
    let prompt = tokens(0..17);
    request(&mut cache, &prompt[..16]);
    // The fork holds the same block of 16 tokens, two of which are not accepted yet.
    cache.start(SEQ[1], &[], StartOptions::default()).unwrap();
    let mut step =
        cache.begin_step(&[StepInput::tokens(SEQ[1], &prompt[..16]).with_drafts(2)]).unwrap();
    write_all(&mut step).unwrap();
    step.commit().unwrap();
    cache.fork(SEQ[1], SEQ[2]).unwrap();
    let (own, free) = (block(&cache, SEQ[1], 0), cache.state().free_blocks(POOL));
    step_all(&mut cache, &[(SEQ[1], &prompt[16..])]);
    assert_eq!(cache.state().free_blocks(POOL), free - 1, "the step needs one block");
    assert_eq!((block(&cache, SEQ[1], 0), block(&cache, SEQ[2], 0)), (own, own));
    check_invariants(cache.state());
    // With one holder, its block is replaced.
    cache.release(SEQ[1]).unwrap();
    step_all(&mut cache, &[(SEQ[2], &prompt[16..])]);
    assert_ne!(block(&cache, SEQ[2], 0), own);
    cache.release(SEQ[2]).unwrap();
    assert_eq!((cached(&cache), cache.state().free_blocks(POOL)), (2, 16));
    check_invariants(cache.state());
}
