//! Runs one trace through one pool: the block management of a cache, without rows and without a
//! model.
//!
//! A `CacheState` is not used, because it answers another question: it refuses a prompt that is
//! larger than the pool, computes the last token of every prompt anew, and finds a block only after
//! all blocks before it, while a trace may hold longer requests, is hit to its last block, and may
//! name ids in any order. Both have equal hits and evictions under `lru`, `lfu` and `priority` (a
//! test compares them); under `default` a cache counts a request after its lookup and sees blocks
//! after a gap computed again, which changed the hits on the Mooncake conversation trace by at most
//! 2.1 %.
use std::time::{Duration, Instant};

use kv::block::{BlockPool, Ledger};
use kv::eviction::{EvictionPolicy, Priority};
use kv::reuse::{BlockKey, Content, NamespaceId};
use kv::{BlockId, GroupId};

use super::trace::{Request, Trace};
use crate::num::to_u32;

/// Tokens in the pool's index that stand for one block: its id and its part of the id.
const BLOCK_TOKENS: u32 = 3;
/// Requests between two progress reports.
const REPORT_EVERY: usize = 256;

/// The result of a replay.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Outcome {
    /// Input tokens whose blocks were cached.
    pub(super) hit_tokens: u64,
    /// Evicted blocks.
    pub(super) evictions: u64,
    /// Most cached blocks at once.
    pub(super) peak_blocks: u32,
    /// Time of the whole replay.
    pub(super) elapsed: Duration,
}

/// The key and the index of one block of a request.
#[derive(Debug, Clone, Copy)]
pub(super) struct RequestBlock {
    tokens: [u32; 3],
    pub(super) key: BlockKey,
    pub(super) parent: BlockKey,
    /// The block, while the request holds it.
    pub(super) block: Option<BlockId>,
}

/// A pool, and the keys of its blocks.
struct Replay<'t> {
    trace: &'t Trace,
    pool: BlockPool,
    ledger: Ledger,
    namespace: NamespaceId,
    root: BlockKey,
    numbers: Vec<u32>,
    named: Vec<RequestBlock>,
}

/// Watches the requests of a replay.
pub(super) trait Observer {
    /// Sees a request before its missing blocks are stored, with the numbers of its blocks: those
    /// that were cached are held.
    fn looked_up(&mut self, request: &Request, numbers: &[u32], blocks: &[RequestBlock]);
}

impl Observer for () {
    fn looked_up(&mut self, _: &Request, _: &[u32], _: &[RequestBlock]) {}
}

/// Replays all requests, one at a time. `advance` is called after every few requests.
pub(super) fn replay(
    trace: &Trace,
    num_blocks: u32,
    policy: Box<dyn EvictionPolicy>,
    observer: &mut impl Observer,
    advance: impl Fn(usize),
) -> Outcome {
    let mut ledger = Ledger::new(0, 0);
    let (namespace, root) = ledger.join(b"", None);
    let pool = BlockPool::new(GroupId(0), num_blocks, BLOCK_TOKENS, policy);
    let (numbers, named) = (Vec::new(), Vec::new());
    let mut replay = Replay { trace, pool, ledger, namespace, root, numbers, named };
    let (mut hit_tokens, mut peak_blocks) = (0_u64, 0);
    let start = Instant::now();
    for requests in trace.requests().chunks(REPORT_EVERY) {
        for request in requests {
            hit_tokens += replay.request(request, observer);
            peak_blocks = peak_blocks.max(num_blocks.saturating_sub(replay.pool.num_empty()));
        }
        advance(requests.len());
    }
    let (elapsed, evictions) = (start.elapsed(), replay.pool.stats().evictions);
    Outcome { hit_tokens, evictions, peak_blocks, elapsed }
}

impl Replay<'_> {
    /// Holds the cached blocks of a request, stores the others as far as they fit, and releases
    /// all; returns the number of cached tokens.
    fn request(&mut self, request: &Request, observer: &mut impl Observer) -> u64 {
        self.pool.tick();
        self.name(request);
        let hits = self.hold();
        observer.looked_up(request, &self.numbers, &self.named);
        self.store(request.has_repeats);
        for named in self.named.iter().rev() {
            if let Some(block) = named.block {
                self.pool.release(block);
            }
        }
        let tokens = u64::from(hits) * u64::from(self.trace.block_size.get());
        tokens.min(request.tokens.into())
    }

    fn name(&mut self, request: &Request) {
        self.trace.blocks(request, &mut self.numbers);
        self.named.clear();
        let mut previous: Option<(u32, BlockKey)> = None;
        for number in &self.numbers {
            // A block keeps the parent it was first seen with: with another parent, the index would
            // take it for another block.
            let parent = match self.trace.parent(*number, previous.map(|(number, _)| number)) {
                None => self.root,
                Some(parent) => match previous {
                    Some((number, key)) if number == parent => key,
                    _ => self.root.child(&self.trace.tokens(parent), &[]),
                },
            };
            let tokens = self.trace.tokens(*number);
            let key = self.root.child(&tokens, &[]);
            self.named.push(RequestBlock { tokens, key, parent, block: None });
            previous = Some((*number, key));
        }
    }

    /// Holds every cached block, so that none is evicted for another one of the request; returns
    /// the number of blocks before the first that is not cached.
    fn hold(&mut self) -> u32 {
        let mut hits = None;
        for (index, named) in (0_u32..).zip(&mut self.named) {
            named.block = self.pool.find(&content(self.namespace, index, named));
            match named.block {
                Some(block) => self.pool.reuse(block),
                None => hits = hits.or(Some(index)),
            }
        }
        hits.unwrap_or(to_u32(self.named.len()))
    }

    fn store(&mut self, has_repeats: bool) {
        for (index, named) in (0_u32..).zip(&mut self.named) {
            if named.block.is_some() {
                continue;
            }
            let content = content(self.namespace, index, named);
            if let Some(block) = has_repeats.then(|| self.pool.find(&content)).flatten() {
                self.pool.reuse(block);
                named.block = Some(block);
                continue;
            }
            let Some(taken) = self.pool.allocate(&mut self.ledger) else {
                return;
            };
            self.pool.store(taken.block, &content, Priority::default(), &mut self.ledger);
            named.block = Some(taken.block);
        }
    }
}

fn content(namespace: NamespaceId, index: u32, named: &RequestBlock) -> Content<'_> {
    let RequestBlock { tokens, key, parent, .. } = named;
    Content { key: *key, parent: *parent, namespace, index, tokens, contents: &[] }
}
