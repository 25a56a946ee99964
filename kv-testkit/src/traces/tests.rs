//! The default policy of eviction against LRU, on every generated trace.
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use kv_core::BlockId;
use kv_core::eviction::{BlockInfo, Eviction, EvictionPolicy, ManualClock, Priority, Return};
use kv_core::reuse::BlockKey;

use super::{Prompt, generate, kinds};
use crate::rng::Rng;

/// Seeds and pools that every trace is run with.
const CASES: [(u64, u32); 3] = [(1, 1000), (1, 5859), (2, 250)];

/// Returns by how much of the blocks the default may find less than LRU.
fn allowance(kind: &str) -> f64 {
    match kind {
        // Reuse falls with recency alone, or the meaning of a gap changes.
        "recency" | "recexp" | "gapflip" => 0.01,
        _ => 0.0005,
    }
}

#[test]
fn the_default_finds_no_less_than_lru() {
    for (kind, (seed, num_blocks)) in kinds().flat_map(|kind| CASES.map(|case| (kind, case))) {
        let prompts = generate(kind, seed);
        let of = |eviction| hits(eviction, num_blocks, &prompts, &[]);
        let [lru, default] = [Eviction::Lru, Eviction::ReuseRate].map(of);
        let place = format!("{kind} {seed}, {num_blocks} blocks: {default:.4}, {lru:.4} with LRU");
        println!("{place}");
        assert!(default >= lru - allowance(kind), "{place}");
        // Scans between popular prompts leave them.
        assert!((kind, num_blocks) != ("scanhot", 1000) || default >= 0.17, "{place}");
    }
}

#[test]
fn a_loop_longer_than_the_pool_finds_what_fits() {
    let prompts = generate("loop", 1);
    let [lru, default] =
        [Eviction::Lru, Eviction::ReuseRate].map(|eviction| hits(eviction, 2000, &prompts, &[]));
    assert!(lru < 0.001 && default >= 0.29, "{default:.4}, {lru:.4} with LRU");
}

#[test]
fn hints_that_are_right_help_and_wrong_ones_do_no_harm() {
    for kind in ["chat", "chatslow"] {
        let prompts = generate(kind, 1);
        let with = |wrong| hits(Eviction::ReuseRate, 1000, &prompts, &returns(&prompts, wrong));
        let none = hits(Eviction::ReuseRate, 1000, &prompts, &[]);
        let [right, half] = [0.0, 0.5].map(with);
        println!("{kind}: {none:.4}, {right:.4} with hints, {half:.4} if half are wrong");
        assert!(right > none + 0.05, "{kind}: {right:.4}, {none:.4} without hints");
        assert!(half > none - 0.005, "{kind}: {half:.4}, {none:.4} without hints");
    }
}

/// Measures the figures of the decision record about eviction.
#[test]
#[ignore = "takes minutes: every size and every trace"]
fn the_default_goes_a_third_of_the_way_to_the_optimum() {
    let mut shares = Vec::new();
    let more = ["chat", "agentmix", "recexp", "gapflip"].map(|kind| (kind, 2));
    for (kind, seed) in kinds().map(|kind| (kind, 1)).chain(more) {
        let prompts = generate(kind, seed);
        for num_blocks in [250, 500, 1000, 2000, 5859, 10_000, 20_000, 30_000] {
            let of = |eviction| hits(eviction, num_blocks, &prompts, &[]);
            let [lru, default] = [Eviction::Lru, Eviction::ReuseRate].map(of);
            let min = optimum(num_blocks, &prompts);
            println!("{kind} {seed} {num_blocks}: {lru:.4} {default:.4} {min:.4}");
            if min - lru > 0.01 {
                shares.push((default - lru) / (min - lru));
            }
        }
    }
    let mean = shares.iter().sum::<f64>() / shares.len() as f64;
    println!("{mean:.4} of the way");
    assert!(mean >= 0.34, "{mean:.4} of the way");
}

/// Returns what is right to say about every request, by the next use of its last full block, one
/// second a request; the opposite for the share that is wrong.
fn returns(prompts: &[Prompt], wrong: f64) -> Vec<Return> {
    let mut rng = Rng::new(9);
    let mut next = vec![None; num_contents(prompts)];
    let mut said: Vec<_> = (0..prompts.len())
        .rev()
        .map(|at| {
            let prompt = &prompts[at];
            let last = prompt[prompt.len().saturating_sub(2)] as usize;
            let later = next[last].map(|next: usize| Duration::from_secs((next - at) as u64));
            for content in prompt {
                next[*content as usize] = Some(at);
            }
            match later {
                _ if rng.unit() >= wrong => later.map_or(Return::Ended, Return::Within),
                Some(_) => Return::Ended,
                None => Return::Within(Duration::from_secs(rng.within(1, 1000).into())),
            }
        })
        .collect();
    said.reverse();
    said
}

fn num_contents(prompts: &[Prompt]) -> usize {
    prompts.iter().flatten().max().map_or(0, |last| *last as usize + 1)
}

/// Returns the share of blocks that requests find, one request at a time, with what each says.
fn hits(eviction: Eviction, num_blocks: u32, prompts: &[Prompt], said: &[Return]) -> f64 {
    let mut policy = eviction.policy(num_blocks, &(Arc::new(ManualClock::new()) as _));
    let mut pool = Pool::new(num_blocks, prompts);
    let (mut found, mut total) = (0, 0);
    for (at, prompt) in prompts.iter().enumerate() {
        total += prompt.len();
        if prompt.len() > num_blocks as usize {
            continue;
        }
        policy.tick();
        found += prompt.iter().take_while(|content| pool.find(**content).is_some()).count();
        pool.hold(policy.as_mut(), prompt);
        for content in prompt.iter().rev() {
            let block = pool.find(*content).expect("it was stored");
            policy.hinted(block, said.get(at).copied());
            policy.idle(block);
        }
    }
    found as f64 / total as f64
}

/// The blocks of a pool by content, and the reverse.
struct Pool {
    at: Vec<Option<BlockId>>,
    contents: Vec<u32>,
    num_blocks: usize,
}

impl Pool {
    fn new(num_blocks: u32, prompts: &[Prompt]) -> Self {
        let at = vec![None; num_contents(prompts)];
        Self { at, contents: Vec::new(), num_blocks: num_blocks as usize }
    }
    fn find(&self, content: u32) -> Option<BlockId> {
        self.at[content as usize]
    }
    /// Reuses what is there, then stores the rest.
    fn hold(&mut self, policy: &mut dyn EvictionPolicy, prompt: &[u32]) {
        let stays = prompt.iter().filter_map(|content| self.find(*content));
        stays.for_each(|block| policy.reused(block));
        for (index, content) in prompt.iter().enumerate() {
            if self.find(*content).is_some() {
                continue;
            }
            let block = if self.contents.len() < self.num_blocks {
                self.contents.push(*content);
                BlockId(self.contents.len() as u32 - 1)
            } else {
                policy.evict().expect("a prompt is shorter than the pool")
            };
            let before = std::mem::replace(&mut self.contents[block.0 as usize], *content);
            self.at[before as usize] = None;
            self.at[*content as usize] = Some(block);
            let parent = index.checked_sub(1).map(|before| key(prompt[before]));
            let (key, index, priority) = (key(*content), index as u32, Priority::default());
            policy.stored(block, &BlockInfo { key, parent, index, priority });
        }
    }
}

fn key(content: u32) -> BlockKey {
    BlockKey(u128::from(Rng::new(content.into()).bits()))
}

/// Returns the share of blocks found when those go whose next use is the latest (Belady's MIN).
fn optimum(num_blocks: u32, prompts: &[Prompt]) -> f64 {
    let fits = |prompt: &&Prompt| prompt.len() <= num_blocks as usize;
    // The next use of every requested block, the last request first.
    let mut upcoming = vec![u32::MAX; num_contents(prompts)];
    let requested: Vec<_> = prompts.iter().filter(fits).flatten().collect();
    let mut next = Vec::new();
    for (content, at) in requested.iter().rev().zip((0..u32::MAX).rev()) {
        next.push(std::mem::replace(&mut upcoming[**content as usize], at));
    }
    let mut resident = vec![None; upcoming.len()];
    let (mut candidates, mut found) = (BTreeSet::new(), 0);
    for prompt in prompts.iter().filter(fits) {
        let is_resident = |content: &&u32| resident[**content as usize].is_some();
        found += prompt.iter().take_while(is_resident).count();
        for content in prompt {
            if let Some(next) = resident[*content as usize] {
                candidates.remove(&(next, *content));
            }
        }
        let room = num_blocks as usize - prompt.len();
        while candidates.len() > room {
            let (_, content) = candidates.pop_last().expect("there are some");
            resident[content as usize] = None;
        }
        for content in prompt {
            let later = next.pop().expect("one for each block");
            resident[*content as usize] = Some(later);
            candidates.insert((later, *content));
        }
    }
    found as f64 / prompts.iter().map(Vec::len).sum::<usize>() as f64
}

#[test]
fn every_trace_is_the_same_for_its_seed() {
    for kind in kinds() {
        let [one, same, other] = [1, 1, 2].map(|seed| generate(kind, seed));
        assert!(one == same && one != other && one.len() >= 4000, "{kind}");
        assert!(one.iter().all(|prompt| !prompt.is_empty()), "{kind}");
    }
    assert_eq!(generate("none", 1), Vec::<Prompt>::new());
}
