//! Hits without their last block, for draft models that read one token ahead.
use super::reuse::{cache_with, run, tokens};
use super::*;
use crate::eviction::Eviction;
use crate::spec::PrefixReuse;

fn draft() -> StartOptions<'static> {
    StartOptions::default().with_backoff_blocks(1)
}

/// Creates groups with full-block reuse of 4 tokens, one per window.
fn windowed(windows: &[Option<u32>]) -> KvCache<NullBackend> {
    cache_with(64, |spec| {
        let spec = spec.layers(u16::try_from(windows.len()).unwrap());
        let spec = spec.prefix_reuse(PrefixReuse::FullBlocks).eviction(Eviction::Lru);
        (0..).zip(windows).fold(spec, |spec, (layer, window)| {
            spec.group([layer], |group| match window {
                Some(left) => group.window_left(*left),
                None => group,
            })
        })
    })
}

/// Removes all of a prompt's blocks in a group from the index except those at `kept`.
fn keep_only(cache: &mut KvCache<NullBackend>, group: usize, prompt: &[u32], kept: &[u32]) {
    let id = GroupId(u8::try_from(group).unwrap());
    assert_eq!(cache.state().pool(id).unwrap().index().len(), prompt.len() / 4);
    forget_but(&mut cache.state, group, kept);
}

/// Returns the tokens hit of eight blocks and one token, of which groups have only some.
fn found(windows: &[Option<u32>], kept: &[&[u32]], options: StartOptions<'_>) -> u32 {
    let mut cache = windowed(windows);
    // All at once, so that no block leaves a window before it is published.
    run(&mut cache, SEQ[0], &tokens(0..32));
    cache.release(SEQ[0]).unwrap();
    for (group, kept) in kept.iter().enumerate() {
        keep_only(&mut cache, group, &tokens(0..32), kept);
    }
    let found = cache.state().probe(&tokens(0..33), options);
    assert_eq!(cache.start(SEQ[1], &tokens(0..33), options).unwrap(), found);
    check_invariants(cache.state());
    found
}

#[test]
fn the_last_block_of_a_hit_is_dropped() {
    let all: &[u32] = &[0, 1, 2, 3, 4, 5, 6, 7];
    assert_eq!(found(&[None], &[all], draft()), 28);
    assert_eq!(found(&[Some(7)], &[all], draft()), 28);
    assert_eq!(found(&[None, Some(7)], &[all, all], draft()), 28);
    assert_eq!(found(&[None], &[&[0, 1, 2]], draft()), 8);
    assert_eq!(found(&[None], &[&[0]], draft()), 0);
    assert_eq!(found(&[None], &[all], StartOptions::default().with_backoff_blocks(9)), 0);
}

/// A window of 8 tokens needs two blocks before it, and one more for the backoff.
#[test]
fn a_window_needs_one_more_block_without_a_gap() {
    let one = [Some(7)];
    assert_eq!(found(&one, &[&[4, 5, 6]], StartOptions::default()), 28);
    assert_eq!(found(&one, &[&[4, 5, 6]], draft()), 24);
    assert_eq!(found(&one, &[&[0, 5, 6]], StartOptions::default()), 28);
    assert_eq!(found(&one, &[&[0, 5, 6]], draft()), 0, "one at the beginning is given back");
    assert_eq!(found(&one, &[&[0, 1, 4, 5]], draft()), 4, "of two, one stays");
    assert_eq!(found(&one, &[&[1, 2, 3, 6, 7]], draft()), 12);
    assert_eq!(found(&[Some(0)], &[&[2, 6]], draft()), 24, "the query alone: only the block more");
}

#[test]
fn hybrid_groups_back_off_once() {
    let both = [None, Some(7)];
    let all: &[u32] = &[0, 1, 2, 3, 4, 5, 6, 7];
    // The window's backoff block is the one after the hit of the full group.
    assert_eq!(found(&both, &[&[0, 1, 2, 3, 4], all], draft()), 16);
    assert_eq!(found(&both, &[&[0, 1, 2, 3, 4], &[2, 3, 4]], draft()), 16);
    assert_eq!(found(&both, &[&[0, 1, 2, 3, 4], &[2, 3, 5, 6, 7]], draft()), 0);
    assert_eq!(found(&both, &[&[0, 1, 2, 3, 4], &[0, 1, 2, 5, 6, 7]], draft()), 8);
    assert_eq!(found(&both, &[all, &[1, 2, 3]], draft()), 12);
    assert_eq!(found(&both, &[&[0, 1, 2], &[2, 3, 4, 5]], draft()), 0);
    // Without a backoff the same blocks give a longer hit.
    assert_eq!(found(&both, &[&[0, 1, 2, 3, 4], &[2, 3, 5, 6, 7]], StartOptions::default()), 16);
}

#[test]
fn groups_count_in_blocks_of_their_own() {
    let mut cache = cache_with(64, |spec| {
        let spec = spec.prefix_reuse(PrefixReuse::FullBlocks);
        spec.group([1], |group| group.paged(8, 32).window_left(7))
    });
    run(&mut cache, SEQ[0], &tokens(0..37));
    // 36 and 32 tokens are cached in the two groups, and 24 of them have a block more in each.
    assert_eq!(cache.state().probe(&tokens(0..40), draft()), 24);
    assert_eq!(cache.state().probe(&tokens(0..40), StartOptions::default()), 32);
}

/// Blocks missing in the window must not replace the sink tokens.
#[test]
fn sink_tokens_that_are_partly_cached_serve_a_shorter_prompt() {
    let mut cache = cache_with(64, |spec| {
        let spec = spec.prefix_reuse(PrefixReuse::FullBlocks).eviction(Eviction::Lru);
        spec.window_left(3).sink_tokens(8)
    });
    run(&mut cache, SEQ[0], &tokens(0..32));
    cache.release(SEQ[0]).unwrap();
    keep_only(&mut cache, 0, &tokens(0..32), &[0, 5, 6, 7]);
    assert_eq!(cache.state().probe(&tokens(0..33), StartOptions::default()), 4);
}
