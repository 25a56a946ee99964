//! Properties of every policy, and comparisons with naive models.
use std::time::Duration;

use proptest::prelude::*;

use super::*;

#[test]
fn snapshots_are_evicted_by_recency_beside_rates() {
    let of = |policy: Eviction| policy.of_snapshots();
    assert_eq!(
        Eviction::ALL.map(of),
        [Eviction::Lru, Eviction::Lfu, Eviction::Priority, Eviction::Priority,]
    );
}

use crate::num::to_usize;

const NUM_BLOCKS: u32 = 6;

/// One call.
#[derive(Debug, Clone)]
enum Call {
    Tick,
    Stored(u32, u8, Priority),
    Reused(u32),
    Held(u32),
    Idle(u32),
    Dropped(u32),
    SetPriority(u32, Priority),
    Wait(u64),
    Evict,
}

fn priorities() -> impl Strategy<Value = Priority> {
    let level = prop_oneof![Just(Priority::DEFAULT_LEVEL), 0..=Priority::MAX_LEVEL];
    let duration = proptest::option::of((0..20_u64).prop_map(Duration::from_secs));
    (level, duration).prop_map(|(level, duration)| Priority { level, duration })
}

fn calls() -> impl Strategy<Value = Vec<Call>> {
    let block = || 0..NUM_BLOCKS;
    let call = prop_oneof![
        Just(Call::Tick),
        (block(), 0..12_u8, priorities()).prop_map(|(b, k, p)| Call::Stored(b, k, p)),
        (block(), 0..12_u8).prop_map(|(b, k)| Call::Stored(b, k, Priority::default())),
        block().prop_map(Call::Reused),
        block().prop_map(Call::Held),
        block().prop_map(Call::Idle),
        block().prop_map(Call::Idle),
        block().prop_map(Call::Dropped),
        (block(), priorities()).prop_map(|(b, p)| Call::SetPriority(b, p)),
        (0..15_u64).prop_map(Call::Wait),
        Just(Call::Evict),
    ];
    proptest::collection::vec(call, 0..200)
}

/// State of a block; `idle` counts the calls that made it a candidate, `is_held` hides it there.
#[derive(Debug, Clone, Copy)]
struct Known {
    uses: u64,
    priority: Priority,
    idle: Option<(u64, Duration)>,
    is_held: bool,
}

/// A naive model: a list of everything, searched from end to end.
#[derive(Debug, Default)]
struct Model {
    blocks: [Option<Known>; to_usize(NUM_BLOCKS)],
    calls: u64,
    now: Duration,
}

impl Model {
    /// Lets expired levels fall back, in order of expiry.
    fn expire(&mut self) {
        let end = |known: &Known| {
            let since = known.idle.filter(|_| known.priority.level != 35)?.1;
            Some(since + known.priority.duration?)
        };
        let blocks = self.blocks.iter_mut().flatten();
        let mut expired: Vec<_> = blocks
            .filter_map(|known| Some((end(known)?, known)))
            .filter(|(end, _)| *end <= self.now)
            .collect();
        expired.sort_by_key(|(end, _)| *end);
        for (_, known) in expired {
            self.calls += 1;
            known.priority = Priority::default();
            known.idle = Some((self.calls, self.now));
        }
    }

    fn known(&mut self, block: u32) -> Option<&mut Known> {
        self.blocks.get_mut(to_usize(block)).and_then(Option::as_mut)
    }

    /// Holds a candidate; `false` for any other block.
    fn hold(&mut self, block: u32) -> bool {
        let known = self.known(block).filter(|known| known.idle.is_some());
        known.map(|known| known.is_held = true).is_some()
    }

    /// Returns the candidates with the least key.
    fn least<K: Ord>(&self, key: impl Fn(&Known) -> K) -> Option<K> {
        let is_candidate = |known: &&Known| known.idle.is_some() && !known.is_held;
        let idle = self.blocks.iter().flatten().filter(is_candidate);
        idle.map(key).min()
    }
}

/// Drives a policy; `check` compares each eviction with the model, before it is applied there.
fn drive(policy: Eviction, calls: &[Call], check: impl Fn(&Model, Option<Known>)) {
    let time = Arc::new(ManualClock::new());
    let clock: Arc<dyn Clock> = Arc::<ManualClock>::clone(&time);
    let mut policy = policy.policy(NUM_BLOCKS, &clock);
    let mut model = Model::default();
    for call in calls {
        model.calls += 1;
        let (calls, now) = (model.calls, model.now);
        match *call {
            Call::Tick => policy.tick(),
            Call::Stored(block, key, priority) => {
                let key_of = |key: u8| BlockKey(u128::from(key) << 60 | u128::from(key));
                let parent = key.checked_sub(1).map(key_of);
                let (key, index) = (key_of(key), u32::from(key));
                policy.stored(BlockId(block), &BlockInfo { key, parent, index, priority });
                if let Some(slot) = model.blocks.get_mut(to_usize(block)) {
                    *slot = Some(Known { uses: 1, priority, idle: None, is_held: false });
                }
            }
            // Only known blocks: a pool never mentions others.
            Call::Reused(block) => {
                if let Some(known) = model.known(block) {
                    (known.idle, known.is_held) = (None, false);
                    known.uses += 1;
                    policy.reused(BlockId(block));
                }
            }
            // Only candidates, as a pool does.
            Call::Held(block) if model.hold(block) => policy.held(BlockId(block)),
            Call::Held(_) => {}
            Call::Idle(block) => {
                if let Some(known) = model.known(block) {
                    known.idle = known.idle.or(Some((calls, now)));
                    known.is_held = false;
                    policy.idle(BlockId(block));
                }
            }
            Call::Dropped(block) => {
                policy.dropped(BlockId(block));
                if let Some(slot) = model.blocks.get_mut(to_usize(block)) {
                    *slot = None;
                }
            }
            Call::SetPriority(block, priority) => {
                if let Some(known) = model.known(block) {
                    known.priority = priority;
                    policy.set_priority(BlockId(block), priority);
                    known.idle = known.idle.map(|_| (calls, now));
                }
            }
            Call::Wait(seconds) => {
                time.advance(Duration::from_secs(seconds));
                model.now += Duration::from_secs(seconds);
            }
            Call::Evict => {
                model.expire();
                let evicted = policy.evict().map(|block| {
                    model.blocks[to_usize(block.0)].expect("only what is known can be evicted")
                });
                check(&model, evicted);
                let at = |slot: &Option<Known>| slot.and_then(|known| known.idle);
                let same = |slot: &&mut Option<Known>| {
                    evicted.is_some_and(|evicted| at(slot) == evicted.idle)
                };
                if let Some(slot) = model.blocks.iter_mut().find(same) {
                    *slot = None;
                }
            }
        }
    }
}

proptest! {
    #[test]
    fn lru_evicts_the_longest_idle(calls in calls()) {
        // This policy ignores priorities: changing one must not change the order.
        let calls: Vec<_> =
            calls.into_iter().filter(|call| !matches!(call, Call::SetPriority(..))).collect();
        let calls: Vec<_> = calls.into_iter().map(|call| match call {
            Call::Stored(block, key, _) => Call::Stored(block, key, Priority::default()),
            call => call,
        }).collect();
        drive(Eviction::Lru, &calls, |model, evicted| {
            assert_eq!(evicted.map(|known| known.idle), model.least(|known| known.idle));
        });
        drive(Eviction::Lfu, &calls, |model, evicted| {
            let key = |known: &Known| (known.uses.min(255), known.idle);
            assert_eq!(evicted.as_ref().map(key), model.least(key));
        });
    }

    #[test]
    fn priority_evicts_the_lowest_level_and_there_the_longest_idle(calls in calls()) {
        drive(Eviction::Priority, &calls, |model, evicted| {
            let key = |known: &Known| (known.priority.level, known.idle);
            assert_eq!(evicted.as_ref().map(key), model.least(key));
        });
    }

    #[test]
    fn the_default_evicts_the_lowest_level_and_any_candidate_there(calls in calls()) {
        drive(Eviction::ReuseRate, &calls, |model, evicted| {
            let level = |known: &Known| known.priority.level;
            assert_eq!(evicted.as_ref().map(level), model.least(level));
            let is_held = evicted.is_some_and(|known| known.idle.is_none() || known.is_held);
            assert!(!is_held, "a held block was evicted");
            // Levels other than the default one have an order.
            let key = |known: &Known| (known.priority.level, known.idle);
            if evicted.is_some_and(|known| known.priority.level != 35) {
                assert_eq!(evicted.as_ref().map(key), model.least(key));
            }
        });
    }
}

#[test]
fn names_are_read_back() {
    for policy in Eviction::ALL {
        assert_eq!(policy.to_string().parse(), Ok(policy));
    }
    let error = "arc".parse::<Eviction>().unwrap_err();
    assert_eq!("default".parse(), Ok(Eviction::ReuseRate));
    let names = "lru, lfu, priority, reuse-rate, default";
    let expected = format!("unknown eviction policy \"arc\", expected one of {names}");
    assert_eq!(error.to_string(), expected);
}

#[test]
fn a_priority_counts_from_when_the_block_is_idle() {
    for policy in [Eviction::Priority, Eviction::ReuseRate] {
        let time = Arc::new(ManualClock::new());
        let clock: Arc<dyn Clock> = Arc::<ManualClock>::clone(&time);
        let mut policy = policy.policy(3, &clock);
        let high = Priority { level: 80, duration: Some(Duration::from_secs(10)) };
        for (block, priority) in [(0, high), (1, Priority { level: 50, duration: None })] {
            let key = BlockKey(u128::from(block) + 1);
            let info = BlockInfo { key, parent: None, index: 0, priority };
            policy.stored(BlockId(block), &info);
        }
        time.advance(Duration::from_mins(1)); // held all the time
        policy.idle(BlockId(0));
        policy.idle(BlockId(1));
        time.advance(Duration::from_secs(9));
        assert_eq!(policy.evict(), Some(BlockId(1)), "level 80 still holds");
        policy.stored(
            BlockId(1),
            &BlockInfo {
                key: BlockKey(2),
                parent: None,
                index: 0,
                priority: Priority { level: 36, duration: None },
            },
        );
        policy.idle(BlockId(1));
        time.advance(Duration::from_secs(1));
        assert_eq!(policy.evict(), Some(BlockId(0)), "level 80 ran out and fell to 35");
        assert_eq!(policy.evict(), Some(BlockId(1)));
        assert_eq!(policy.evict(), None);
    }
}

/// Memory of index, counts and policy of a pool, after more was cached than it holds.
#[test]
fn the_default_takes_at_most_half_as_much_memory_again_as_lru() {
    let num_blocks = 1_u32 << 18;
    let clock: Arc<dyn Clock> = Arc::new(ManualClock::new());
    let (mut default, lru) = (ReuseRate::new(num_blocks, clock), Lru::new(num_blocks));
    let mut next = 0;
    for _ in 0..1000 {
        default.tick();
        let prompt = next..next + 400;
        next = prompt.end;
        let blocks: Vec<_> = prompt
            .map(|at| {
                let block = if at < num_blocks { BlockId(at) } else { default.evict().unwrap() };
                let key = BlockKey(u128::from(at));
                let parent = (at % 400 > 0).then(|| BlockKey(u128::from(at - 1)));
                let (index, priority) = (at % 400, Priority::default());
                default.stored(block, &BlockInfo { key, parent, index, priority });
                block
            })
            .collect();
        blocks.iter().rev().for_each(|block| default.idle(*block));
    }
    let counts_and_free = 2 * to_usize(num_blocks) * size_of::<u32>();
    let index = crate::reuse::PrefixIndex::new(num_blocks, 16).host_bytes() + counts_and_free;
    // The documented bytes of the policy alone, the classes of 1,000 requests included.
    let per_block = default.host_bytes() / to_usize(num_blocks);
    assert_eq!(per_block, 94, "{} bytes for {num_blocks} blocks", default.host_bytes());
    let [lru, default] = [lru.host_bytes(), default.host_bytes()].map(|policy| index + policy);
    assert!(2 * default <= 3 * lru, "{default} bytes, {lru} with LRU");
}
