//! Tests of the parts of the policy, and of what it learns.
use std::time::Duration;

use super::contents::SINCE_MASK;
use super::features::{NUM_GRADES, NUM_SHAPES};
use super::rates::{CELLS_MAX, NUM_BINS, bin_begin};
use super::*;
use crate::eviction::ManualClock;
use crate::num::to_usize;
use crate::reuse::BlockKey;

fn policy(num_blocks: u32) -> ReuseRate {
    ReuseRate::new(num_blocks, Arc::new(ManualClock::new()))
}

fn info(key: u128, parent: Option<u128>) -> BlockInfo {
    let parent = parent.map(BlockKey);
    BlockInfo { key: BlockKey(key), parent, index: 0, priority: Priority::default() }
}

const CONTENT: Content =
    Content { uses: 1, turn: 1, continuations: 1, status: Status::Used { run: 1, gap: 0 } };

/// Returns features of content inside of a sequence.
fn inside(uses: u16, turn: u8) -> Features {
    Features::new(Content { uses, ..CONTENT }, false, Request { turn, ..Request::default() })
}

/// Stores a prompt of blocks after those that are reused, and releases it with a hint.
fn request(
    policy: &mut ReuseRate,
    reused: u32,
    blocks: std::ops::Range<u32>,
    said: Option<Return>,
) {
    policy.tick();
    (blocks.start - reused..blocks.start).for_each(|block| policy.reused(BlockId(block)));
    for block in blocks.clone() {
        let is_first = block == blocks.start && reused == 0;
        let parent = block.checked_sub(1).filter(|_| !is_first).map(u128::from);
        policy.stored(BlockId(block), &info(u128::from(block), parent));
    }
    for block in (blocks.start - reused..blocks.end).rev() {
        policy.hinted(BlockId(block), said);
        policy.idle(BlockId(block));
    }
}

/// Runs requests with one block each that is never reused; the first ones find the pool empty.
fn fill(policy: &mut ReuseRate, first: u128, num_blocks: u32) {
    for block in 0..num_blocks {
        policy.tick();
        let found = if first == 0 { BlockId(block) } else { policy.evict().unwrap() };
        policy.stored(found, &info(first + u128::from(block), None));
        policy.idle(found);
    }
}

#[test]
fn inside_a_prompt_tails_go_before_heads() {
    let mut policy = policy(6);
    request(&mut policy, 0, 0..3, None);
    request(&mut policy, 0, 3..6, None);
    (0..8).for_each(|_| policy.tick());
    let order: Vec<_> = std::iter::from_fn(|| policy.evict()).map(|block| block.0).collect();
    assert_eq!(order.len(), 6);
    // The last blocks, 2 and 5, have a cell of their own.
    let inside = [0..2, 3..5].map(|prompt| {
        let of_prompt = order.iter().copied().filter(|block| prompt.contains(block));
        of_prompt.collect::<Vec<_>>()
    });
    assert_eq!(inside, [[1, 0], [4, 3]]);
}

#[test]
fn returning_content_keeps_its_uses() {
    let mut policy = policy(2);
    fill(&mut policy, 0, 2);
    fill(&mut policy, 10, 2); // 0 and 1 are evicted, but remembered
    policy.tick();
    let block = policy.evict().unwrap();
    policy.stored(block, &info(1, None));
    assert_eq!(policy.contents.get(block.0).unwrap().uses, 2);
}

#[test]
fn a_longer_prompt_is_the_next_turn_and_a_continuation() {
    let mut policy = policy(8);
    request(&mut policy, 0, 0..2, None);
    request(&mut policy, 2, 2..4, None);
    request(&mut policy, 4, 4..5, None);
    let contents = [0, 1, 2, 3, 4].map(|block| policy.contents.get(block).unwrap());
    assert_eq!(contents.map(|content| content.turn), [1, 1, 2, 2, 3]);
    assert_eq!(contents.map(|content| content.uses), [3, 3, 2, 2, 1]);
    assert_eq!(contents.map(|content| content.continuations), [1, 1, 1, 1, 0]);
}

#[test]
fn the_unknown_part_of_a_request_is_counted_from_its_first_block() {
    let mut policy = policy(8);
    request(&mut policy, 0, 0..2, None);
    (0..40).for_each(|_| policy.tick());
    policy.tick();
    (0..2).for_each(|block| policy.reused(BlockId(block)));
    for block in 2..5_u32 {
        policy.stored(BlockId(block), &info(block.into(), Some((block - 1).into())));
        let expected = Status::Used { run: u8::try_from(block - 1).unwrap(), gap: gap(41) };
        assert_eq!(policy.contents.get(block).map(|content| content.status), Some(expected));
    }
    assert_eq!(
        policy.contents.get(1).map(|content| content.status),
        Some(Status::Used { run: 0, gap: gap(41) })
    );
}

/// Conversations that all have equal features, of which half return after 20 requests and half
/// never, as their callers say.
#[test]
fn what_ended_goes_before_what_is_expected() {
    let expected = Some(Return::Within(Duration::from_secs(20)));
    for said in [[Some(Return::Ended), expected], [Some(Return::Ended), Some(Return::ToolCall)]] {
        let mut policy = policy(400);
        for round in 0..400_u32 {
            policy.tick();
            let block = BlockId(round);
            policy.stored(block, &info(round.into(), None));
            policy.hinted(block, said[usize::from(round.is_multiple_of(2))]);
            policy.idle(block);
            if let Some(back) = round.checked_sub(20).filter(|back| back.is_multiple_of(2)) {
                policy.reused(BlockId(back));
            }
        }
        // Those that ended are older by one request, and younger by one.
        let order: Vec<_> = (0..10).map_while(|_| policy.evict()).map(|block| block.0).collect();
        assert!(order.iter().all(|block| !block.is_multiple_of(2)), "{said:?}: {order:?}");
    }
}

#[test]
fn shared_content_is_ranked_without_a_hint() {
    let mut policy = policy(12);
    for (at, said) in [None, None, None, Some(Return::Ended)].into_iter().enumerate() {
        policy.tick();
        let first = u32::try_from(at).unwrap() + 1;
        match at {
            0 => policy.stored(BlockId(0), &info(0, None)),
            _ => policy.reused(BlockId(0)),
        }
        policy.stored(BlockId(first), &info(u128::from(first), Some(0)));
        for block in [first, 0] {
            policy.hinted(BlockId(block), said);
            policy.idle(BlockId(block));
        }
    }
    let hints =
        [0, 4].map(|block| match policy.contents.get(block).map(|content| content.status) {
            Some(Status::Idle { cell, .. }) => policy.rates.of(cell).0.0[6],
            other => panic!("{other:?}"),
        });
    assert_eq!(hints, [0, hint(Some(Return::Ended))]);
}

#[test]
fn a_later_octave_is_a_later_grade() {
    let grade = |seconds| hint(Some(Return::Within(Duration::from_secs(seconds))));
    let grades = [0, 1, 2, 3, 4, 900, 3600, u64::MAX].map(grade);
    assert_eq!(grades, [4, 4, 5, 5, 6, 13, 15, 15]);
    let others = [None, Some(Return::Ended), Some(Return::Idle), Some(Return::ToolCall)];
    assert_eq!(others.map(hint), [0, 1, 2, 3]);
}

#[test]
fn every_grade_is_in_range() {
    let hint = hint(Some(Return::Within(Duration::MAX)));
    for (uses, small) in (0..1024).flat_map(|uses| (0..=40).map(move |small| (uses, small))) {
        let content = Content { uses, continuations: 1 + small % 2, ..CONTENT };
        let request = Request { turn: small, run: small, gap: gap(u32::from(uses) * 4), hint };
        let features = Features::new(content, true, request);
        assert!(features.0.iter().all(|grade| usize::from(*grade) < NUM_GRADES));
        assert!((1..NUM_SHAPES).contains(&features.shape()));
        let inside = Features::new(content, false, request);
        assert_eq!([features.inside(), inside.inside()], [Some(inside), None]);
    }
    let grades = [1, 2, 21, 1000].map(|uses| inside(uses, 1).0[1]);
    assert_eq!(grades, [0, 1, 6, 11]);
}

#[test]
fn cells_are_bounded() {
    let mut rates = Rates::new();
    for number in 0..CELLS_MAX + 5 {
        let [low, high, ..] = number.to_le_bytes();
        let cell = rates.cell(Features([low % 16, low / 16, 0, high, 0, 0, 0]));
        assert_eq!(u32::from(cell), if number < CELLS_MAX { number } else { 0 });
    }
    assert_eq!(rates.num_cells(), CELLS_MAX);
    assert_eq!(rates.cell(Features([7, 0, 0, 0, 0, 0, 0])), 7);
}

#[test]
fn an_age_is_in_the_bin_that_began_last() {
    for age in 0..40_000 {
        let bin = bin_of(age);
        assert!(bin_begin(bin) <= age && age < bin_begin(bin + 1), "{age} in bin {bin}");
    }
    assert_eq!(usize::from(bin_of(u32::MAX)), NUM_BINS - 1);
}

#[test]
fn without_observations_the_rate_falls_with_age() {
    let mut rates = Rates::new();
    rates.cell(inside(1, 1));
    assert!(rates.of(0).1.is_sorted_by(|young, old| young > old), "{:?}", rates.of(0).1);
}

#[test]
fn a_pause_is_worth_waiting_for() {
    let mut rates = Rates::new();
    rates.cell(inside(1, 1));
    // Half of all blocks are used again, between 64 and 91 requests later and never else.
    let pause = 13;
    for bin in 0..29 {
        rates.reached(0, bin, if bin <= pause { 10_000.0 } else { 5_000.0 });
    }
    (0..5_000).for_each(|_| rates.used(0, pause));
    assert_eq!(rates.learn().count(), NUM_BINS);
    let rate = rates.of(0).1;
    assert!(rate[8] > rate[0], "the nearer the pause's end, the better: {rate:?}");
    assert!(rate[12] > rate[8]);
    assert!(rate[14] < rate[0] / 10.0, "after the pause, waiting is not worthwhile: {rate:?}");
}

/// A combination of features that was not seen is rated by the effects of each.
#[test]
fn effects_of_features_multiply() {
    let mut rates = Rates::new();
    for (turn, uses, share) in [(1, 1, 500), (1, 30, 2000), (9, 1, 1500)] {
        let cell = rates.cell(inside(uses, turn));
        for bin in 0..20 {
            rates.reached(cell, bin, 50_000.0);
            (0..share).for_each(|_| rates.used(cell, bin));
        }
    }
    rates.learn().for_each(drop);
    let new = rates.cell(inside(30, 9));
    assert_eq!(new, 3);
    let [low, used, turned, both] = [0, 1, 2, new].map(|cell| rates.rate(cell));
    assert!(low < turned && turned < used && used < both, "{low} {turned} {used} {both}");
}

/// The index of a pass over all bins, against a search through all times to evict.
#[test]
fn a_rate_is_the_best_over_all_times_to_evict() {
    let mut random = 1_u64;
    for _ in 0..200 {
        let chances = std::array::from_fn(|_| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let small = u16::try_from(random >> 50).unwrap();
            f32::from(small) / 16_384.0 / f32::from(1 + (small % 7) * 40)
        });
        let rates = rates::best_rates(&chances);
        for (bin, rate) in rates.into_iter().enumerate() {
            let expected = best_by_search(&chances, bin);
            assert!(
                (rate - expected).abs() <= 1e-9 * expected,
                "bin {bin}: {rate}, not {expected}"
            );
        }
    }
}

fn best_by_search(chances: &[f32; NUM_BINS], bin: usize) -> f64 {
    let (mut alive, mut waited, mut best, mut part) = (1.0, 0.0, 0.0_f64, 0.5);
    for (bin, chance) in chances.iter().enumerate().skip(bin) {
        let left = alive * (1.0 - part * f64::from(*chance));
        // The second half of a bin starts with those that the first half left.
        waited += part * f64::from(rates::width(bin)) * 0.5 * (alive + left);
        alive = left;
        best = best.max((1.0 - alive) / waited);
        part = 1.0;
    }
    best
}

#[test]
fn a_content_leaves_the_counts_of_its_request() {
    let (mut cohorts, mut rates) = (Cohorts::new(2), Rates::new());
    for uses in [1, 2, 3, 4, 6] {
        rates.cell(inside(uses, 1));
    }
    cohorts.add_cells(5);
    cohorts.enter(3);
    cohorts.enter(3);
    cohorts.leave(3, 0);
    assert!(cohorts.find(0, 3).is_some());
    let before = cohorts.num_cohorts();
    (0..16_384).for_each(|_| cohorts.advance(&mut rates));
    assert!(cohorts.find(0, 3).is_none(), "its request is over");
    cohorts.enter(4);
    assert_eq!(cohorts.num_cohorts(), before, "what is over makes room");
}

#[test]
fn candidates_of_one_rank_go_in_the_order_in_which_they_came() {
    let (mut cohorts, mut rates) = (Cohorts::new(4), Rates::new());
    rates.cell(inside(1, 1));
    cohorts.add_cells(1);
    for block in 0..4 {
        let spot = Spot { level: Priority::DEFAULT_LEVEL, rank: 0, since: cohorts.now() };
        cohorts.push(block, spot);
        (0..10_000).for_each(|_| cohorts.advance(&mut rates));
        cohorts.rank(rates.learn());
    }
    let order: Vec<_> = std::iter::from_fn(|| {
        let block = cohorts.next()?;
        cohorts.remove(block);
        Some(block)
    })
    .collect();
    assert_eq!(order.len(), 4);
    // Blocks 0 to 2 are in the last bin, where age has no meaning.
    let old: Vec<_> = order.into_iter().filter(|block| *block < 3).collect();
    assert_eq!(old, [0, 1, 2]);
}

#[test]
fn statistics_are_packed_up_to_their_largest_values() {
    let status = [
        Status::Idle { cell: 0, since: 0 },
        Status::Idle { cell: 4094, since: SINCE_MASK },
        Status::Used { run: 0, gap: 0 },
        Status::Used { run: 32, gap: 6 },
    ];
    let mut contents = Contents::new(1);
    for (uses, turn, continuations) in [(1, 1, 0), (1023, 7, 3), (500, 3, 2)] {
        for status in status {
            let content = Content { uses, turn, continuations, status };
            contents.set(0, content);
            assert_eq!(contents.get(0), Some(content));
        }
    }
    contents.set(0, Content { uses: 5000, turn: 200, continuations: 9, ..CONTENT });
    let most = Content { uses: 1023, turn: 7, continuations: 3, ..CONTENT };
    assert_eq!(contents.get(0), Some(most));
}

/// Against a list of all contents, of which the oldest is forgotten and others come back.
#[test]
fn contents_are_found_by_key_until_they_are_forgotten() {
    let mut contents = Contents::new(3);
    let key = |name: u32| short_key(BlockKey(name.into()));
    let (mut blocks, mut gone) = ([None; 3], Vec::new());
    for round in 0..70_000_u32 {
        let block = round % 3;
        // One in 16 came back from eviction, early or late.
        let back = (round % 16 == 15 && round > 100)
            .then(|| gone[gone.len() - 20 - to_usize(round % 7) * 9]);
        if let Some(before) = blocks[to_usize(block)].take() {
            contents.lose(block);
            gone.push(before);
        }
        let name = back.unwrap_or(round);
        if let Some(slot) = contents.find(key(name)) {
            assert!(back.is_some() && !contents.is_held(slot), "{name} was new");
            contents.remove(slot);
            assert_eq!(contents.find(key(name)), None);
        }
        contents.insert(block, [key(name), 0], CONTENT);
        assert_eq!(contents.find(key(name)), Some(block));
        blocks[to_usize(block)] = Some(name);
    }
    let is_found = |name: &&u32| contents.find(key(**name)).is_some();
    let (old, young) = gone.split_at(gone.len() - 32_768);
    assert_eq!(young.iter().filter(is_found).count(), young.len());
    // Of the older ones, those that came back later are remembered.
    let known = old.iter().filter(is_found).count();
    assert!(known < 200, "{known} are remembered for too long");
}
