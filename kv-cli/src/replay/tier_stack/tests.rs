//! The stack against a slow model, and the rules that its documentation states.
use std::collections::BTreeMap;
use std::num::NonZeroU32;
use std::sync::Arc;

use kv::eviction::{Clock, Eviction, ManualClock, Priority};
use kv::reuse::BlockKey;
use kv::tier::WritePolicy;

use super::*;
use crate::replay::tests::Random;

const NUM_BLOCKS: u32 = 24;

fn tier(capacity: u32, rule: WriteRule) -> BoundedTier {
    let clock: Arc<dyn Clock> = Arc::new(ManualClock::new());
    BoundedTier::new(capacity, rule, Eviction::Lru.policy(capacity, &clock))
}

fn stack(tiers: &[(u32, WriteRule)]) -> TierStack {
    TierStack::new(tiers.iter().map(|(n, rule)| tier(*n, *rule)).collect(), NUM_BLOCKS)
}

fn block(number: u32, is_on_device: bool) -> StackBlock {
    let key = BlockKey(number.into());
    let info = BlockInfo { key, parent: None, index: 0, priority: Priority::default() };
    StackBlock { number, info, is_on_device }
}

/// Requests blocks that are not on the device.
fn request(stack: &mut TierStack, numbers: &[u32], prompt_tokens: u32) {
    let blocks: Vec<_> = numbers.iter().map(|number| block(*number, false)).collect();
    stack.request(&blocks, prompt_tokens);
}

/// Returns the blocks of a tier, in ascending order.
fn contents(stack: &TierStack, tier: usize) -> Vec<u32> {
    (0..NUM_BLOCKS).filter(|number| stack.tiers()[tier].contains(*number)).collect()
}

fn reuse(uses: u32) -> WriteRule {
    WriteRule::new(WritePolicy::OnReuse(NonZeroU32::new(uses).expect("from 1")))
}

const PUBLISH: WriteRule = WriteRule::new(WritePolicy::OnPublish);
const LEAVE: WriteRule = WriteRule::new(WritePolicy::OnLeave);
const NEVER: WriteRule = WriteRule::new(WritePolicy::Never);

/// Lists instead of slots and policies: for every tier the blocks that can be evicted, the least
/// recently used one first, and those that the request holds.
struct Slow {
    rules: Vec<(usize, WriteRule, u32)>,
    idle: Vec<Vec<u32>>,
    held: Vec<Vec<u32>>,
    seen: BTreeMap<u32, (u32, u32)>,
    written: Vec<u64>,
    evictions: Vec<u64>,
}

impl Slow {
    fn new(tiers: &[(u32, WriteRule)], tokens_min: u32) -> Self {
        let rules = tiers.iter().map(|(n, rule)| (to_usize(*n), *rule, tokens_min));
        let rules = rules.collect();
        let (lists, counts) = (vec![Vec::new(); tiers.len()], vec![0; tiers.len()]);
        let (held, evictions) = (lists.clone(), counts.clone());
        Self { rules, idle: lists, held, seen: BTreeMap::new(), written: counts, evictions }
    }

    fn request(&mut self, blocks: &[(u32, bool)], prompt_tokens: u32) {
        for (idle, held) in self.idle.iter_mut().zip(&mut self.held) {
            idle.retain(|block| {
                let is_held = blocks.iter().any(|(number, _)| number == block);
                held.extend(is_held.then_some(*block));
                !is_held
            });
        }
        for (number, _) in blocks {
            let (uses, longest) = self.seen.entry(*number).or_default();
            (*uses, *longest) = (*uses + 1, prompt_tokens.max(*longest));
            for tier in 0..self.rules.len() {
                self.offer(tier, *number, false);
            }
        }
        for (idle, held) in self.idle.iter_mut().zip(&mut self.held) {
            for (number, _) in blocks.iter().rev() {
                if let Some(at) = held.iter().position(|block| block == number) {
                    idle.push(held.remove(at));
                }
            }
        }
    }

    fn offer(&mut self, tier: usize, number: u32, has_left: bool) {
        let Some((capacity, rule, tokens_min)) = self.rules.get(tier).copied() else { return };
        let (uses, longest) = self.seen[&number];
        let is_due = match rule.policy() {
            WritePolicy::OnPublish => !has_left,
            WritePolicy::OnLeave => has_left,
            WritePolicy::OnReuse(n) => !has_left && uses >= n.get(),
            _ => false,
        };
        let is_present = self.idle[tier].contains(&number) || self.held[tier].contains(&number);
        if is_present || longest < tokens_min || !is_due {
            return;
        }
        let is_full = self.idle[tier].len() + self.held[tier].len() == capacity;
        if is_full && self.idle[tier].is_empty() {
            return;
        }
        let evicted = is_full.then(|| self.idle[tier].remove(0));
        let list = if has_left { &mut self.idle } else { &mut self.held };
        list[tier].push(number);
        self.written[tier] += 1;
        if let Some(evicted) = evicted {
            self.evictions[tier] += 1;
            self.offer(tier + 1, evicted, true);
        }
    }
}

#[test]
fn the_stack_does_what_a_slow_model_does() {
    let mut random = Random(17);
    let rules = [PUBLISH, LEAVE, reuse(2), reuse(3), NEVER];
    let (mut writes, mut cascades) = (0, 0);
    for round in 0..400 {
        let mut tiers = Vec::new();
        for _ in 0..=random.below(2) {
            let rule = rules[usize::try_from(random.below(5)).expect("small")];
            tiers.push((1 + to_u32(usize::try_from(random.below(8)).expect("small")), rule));
        }
        let tokens_min = to_u32(usize::try_from(random.below(3)).expect("small"));
        let fast: Vec<_> =
            tiers.iter().map(|(n, rule)| (*n, rule.with_prompt_tokens_min(tokens_min))).collect();
        let (mut fast, mut slow) = (stack(&fast), Slow::new(&tiers, tokens_min));
        for step in 0..60 {
            let mut blocks: Vec<(u32, bool)> = Vec::new();
            for _ in 0..=random.below(6) {
                let number = to_u32(usize::try_from(random.below(24)).expect("small"));
                if blocks.iter().all(|(other, _)| *other != number) {
                    blocks.push((number, random.below(3) == 0));
                }
            }
            let stack_blocks: Vec<_> = blocks.iter().map(|(n, on)| block(*n, *on)).collect();
            let prompt_tokens = to_u32(blocks.len());
            fast.request(&stack_blocks, prompt_tokens);
            slow.request(&blocks, prompt_tokens);
            for at in 0..tiers.len() {
                let mut expected = slow.idle[at].clone();
                expected.sort_unstable();
                let place = format!("tier {at} of {tiers:?} in round {round}, step {step}");
                assert_eq!(contents(&fast, at), expected, "{place}");
                let tier = &fast.tiers()[at];
                let got = (tier.written(), tier.evictions());
                assert_eq!(got, (slow.written[at], slow.evictions[at]), "{place}");
                assert!(expected.len() <= to_usize(tiers[at].0), "{place}");
            }
            for number in 0..NUM_BLOCKS {
                let expected = slow.idle.iter().position(|list| list.contains(&number));
                assert_eq!(fast.find(number), expected);
            }
        }
        writes += slow.written[0];
        cascades += slow.written.get(1).copied().unwrap_or(0);
    }
    assert!(writes > 5000 && cascades > 1000, "too few writes: {writes}, {cascades}");
}

#[test]
fn what_a_tier_evicts_goes_to_the_next_one() {
    let mut stack = stack(&[(2, PUBLISH), (2, LEAVE), (3, LEAVE)]);
    for number in 0..8 {
        request(&mut stack, &[number], 1);
    }
    let lists: Vec<_> = (0..3).map(|tier| contents(&stack, tier)).collect();
    assert_eq!(lists, [vec![6, 7], vec![4, 5], vec![1, 2, 3]]);
    assert_eq!(stack.tiers().iter().map(BoundedTier::written).collect::<Vec<_>>(), [8, 6, 4]);
    assert_eq!(stack.tiers().iter().map(BoundedTier::evictions).collect::<Vec<_>>(), [6, 4, 1]);
}

#[test]
fn a_tail_is_evicted_before_its_head() {
    let mut stack = stack(&[(4, PUBLISH)]);
    request(&mut stack, &[0, 1, 2], 1);
    request(&mut stack, &[7, 8], 1);
    assert_eq!(contents(&stack, 0), [0, 1, 7, 8]);
    // A larger request keeps its start, and nothing of it is evicted for the rest.
    request(&mut stack, &[0, 1, 2, 3, 4, 5], 1);
    assert_eq!(contents(&stack, 0), [0, 1, 2, 3]);
}

#[test]
fn uses_on_the_device_keep_a_block_below() {
    let mut stack = stack(&[(2, PUBLISH)]);
    request(&mut stack, &[0], 1);
    request(&mut stack, &[1], 1);
    stack.request(&[block(0, true)], 1);
    request(&mut stack, &[2], 1);
    assert_eq!(contents(&stack, 0), [0, 2]);
}

#[test]
fn a_prompt_that_grows_brings_its_start() {
    let mut stack = stack(&[(8, PUBLISH.with_prompt_tokens_min(256))]);
    request(&mut stack, &[0], 255);
    assert_eq!(contents(&stack, 0), Vec::<u32>::new());
    stack.request(&[block(0, true), block(1, false)], 256);
    assert_eq!(contents(&stack, 0), [0, 1]);
}
