//! Holders, idle blocks and events.
use std::sync::Arc;
use std::time::Duration;

use super::*;
use crate::eviction::{Clock, Eviction, Lru, ManualClock};

fn pool(num_blocks: u32) -> (BlockPool, Ledger) {
    let policy = Box::new(Lru::new(num_blocks));
    (BlockPool::new(GroupId(0), num_blocks, 2, policy), Ledger::new(0, 16))
}

/// Offers a full block, as a commit does: a block with the same content is used again.
fn offer(
    pool: &mut BlockPool,
    block: BlockId,
    content: &Content<'_>,
    ledger: &mut Ledger,
) -> Offered {
    let offered = pool.offer(block, content, (Priority::default(), Fill::Full), ledger);
    if let Offered::Known(known) = offered
        && known != block
    {
        pool.renew(known, None);
    }
    offered
}

/// Allocates a block with the content of the prompt `[token; 2]`.
fn stored(pool: &mut BlockPool, ledger: &mut Ledger, token: u32) -> BlockId {
    let block = pool.allocate(ledger).unwrap().block;
    let (namespace, parent) = ledger.join(b"", None);
    let tokens = [token; 2];
    let key = parent.child(&tokens, &[]);
    let content = Content { key, parent, namespace, index: 0, tokens: &tokens, contents: &[] };
    assert_eq!(offer(pool, block, &content, ledger), Offered::New);
    block
}

#[test]
fn hands_out_each_block_once() {
    let (mut pool, mut ledger) = pool(3);
    let taken: Vec<_> = std::iter::from_fn(|| pool.allocate(&mut ledger)).collect();
    let ids: Vec<_> = taken.iter().map(|taken| taken.block).collect();
    assert_eq!(ids, [BlockId(0), BlockId(1), BlockId(2)]);
    assert_eq!((pool.num_free(), pool.num_used()), (0, 3));
}

#[test]
fn frees_only_after_the_last_holder() {
    let (mut pool, mut ledger) = pool(1);
    let block = pool.allocate(&mut ledger).unwrap().block;
    pool.retain(block);
    assert!(!pool.release(block));
    assert_eq!(pool.holders(block), 1);
    assert!(pool.release(block));
    assert_eq!(pool.num_free(), 1);
}

#[test]
fn content_stays_until_the_block_is_needed() {
    let (mut pool, mut ledger) = pool(2);
    let (a, b) = (stored(&mut pool, &mut ledger, 1), stored(&mut pool, &mut ledger, 2));
    assert!(!pool.release(a) && !pool.release(b));
    assert_eq!((pool.num_free(), pool.num_idle(), pool.num_empty()), (2, 2, 0));
    pool.reuse(a);
    assert_eq!(pool.allocate(&mut ledger), Some(Taken { block: b, evicted: true }));
    assert_eq!(pool.allocate(&mut ledger), None);
    assert!(pool.is_stored(a) && !pool.is_stored(b));
    assert!(!pool.forget(a, &mut ledger), "it has a holder");
    assert!(pool.release(a));
    assert_eq!(pool.stats().evictions, 1);
}

#[test]
fn of_two_blocks_with_the_same_content_one_is_stored() {
    let (mut pool, mut ledger) = pool(2);
    let a = stored(&mut pool, &mut ledger, 1);
    let b = pool.allocate(&mut ledger).unwrap().block;
    let (namespace, parent) = ledger.join(b"", None);
    let tokens = [1; 2];
    let key = parent.child(&tokens, &[]);
    let content = Content { key, parent, namespace, index: 0, tokens: &tokens, contents: &[] };
    assert_ne!(offer(&mut pool, b, &content, &mut ledger), Offered::New);
    assert!(!pool.is_stored(b) && pool.is_private(b));
    assert_eq!((pool.stats().stored, pool.stats().duplicates), (1, 1));
    assert_eq!(ledger.take_events().len(), 1);
    // The holder of the second gets the first in its place, which is idle.
    assert!(!pool.release(a));
    assert!(pool.exchange(b, a), "it has no holder any more");
    assert_eq!((pool.num_idle(), pool.num_empty(), pool.holders(a)), (0, 1, 1));
    assert_ne!(offer(&mut pool, a, &content, &mut ledger), Offered::New, "it is stored already");
    assert_eq!(pool.stats().duplicates, 2);
    assert!(!pool.forget(a, &mut ledger), "it has a holder");
    assert!(pool.index().is_empty() && !pool.index().has_children(parent));
    assert_eq!(ledger.take_events().len(), 1);
}

#[test]
#[should_panic(expected = "has no holder")]
fn refuses_a_double_release() {
    let (mut pool, mut ledger) = pool(1);
    let block = pool.allocate(&mut ledger).unwrap().block;
    pool.release(block);
    pool.release(block);
}

#[test]
#[should_panic(expected = "has no holder")]
fn refuses_to_retain_a_free_block() {
    pool(1).0.retain(BlockId(0));
}

#[test]
#[should_panic(expected = "block 3 is outside of its pool of 3 blocks")]
fn refuses_to_release_a_block_outside_of_the_pool() {
    pool(3).0.release(BlockId(3));
}

#[test]
#[should_panic(expected = "block 3 is outside of its pool of 3 blocks")]
fn refuses_to_hold_a_block_outside_of_the_pool() {
    pool(3).0.hold(BlockId(3));
}

#[test]
#[should_panic(expected = "block 3 is outside of its pool of 3 blocks")]
fn refuses_to_reuse_a_block_outside_of_the_pool() {
    pool(3).0.reuse(BlockId(3));
}

#[test]
#[should_panic(expected = "block 3 is outside of its pool of 3 blocks")]
fn refuses_to_forget_a_block_outside_of_the_pool() {
    let (mut pool, mut ledger) = pool(3);
    pool.forget(BlockId(3), &mut ledger);
}

#[test]
fn queries_know_no_block_outside_of_the_pool() {
    let (pool, _) = pool(3);
    assert!(pool.content(BlockId(3)).is_none() && !pool.is_stored(BlockId(3)));
    assert_eq!(pool.holders(BlockId(3)), 0);
}

#[test]
fn an_expired_level_can_be_set_again() {
    let clock = Arc::new(ManualClock::new());
    let timed = Priority { level: 90, duration: Some(Duration::from_secs(10)) };
    for policy in [Eviction::Priority, Eviction::ReuseRate] {
        let shared: Arc<dyn Clock> = Arc::<ManualClock>::clone(&clock);
        let policy = policy.policy(4, &shared);
        let (mut pool, mut ledger) = (BlockPool::new(GroupId(0), 4, 2, policy), Ledger::new(0, 16));
        let blocks = [1, 2, 3, 4].map(|token| stored(&mut pool, &mut ledger, token));
        pool.set_priority(blocks[0], timed, &mut ledger);
        assert!(!blocks.into_iter().any(|block| pool.release(block)), "they are cached");
        clock.advance(Duration::from_secs(11));
        // The level has expired, which this call finds out.
        assert_eq!(pool.allocate(&mut ledger).map(|taken| taken.block), Some(blocks[1]));
        pool.reuse(blocks[0]);
        pool.set_priority(blocks[0], timed, &mut ledger);
        pool.release(blocks[0]);
        clock.advance(Duration::from_secs(5));
        let next = [(); 3].map(|()| pool.allocate(&mut ledger).map(|taken| taken.block));
        assert_eq!(next, [blocks[2], blocks[3], blocks[0]].map(Some));
    }
}
