//! Rates of reuse by class and age, counted online.
use std::array;

#[cfg(test)]
use crate::num::list_bytes;
use crate::num::{to_u32, to_usize};

/// Ages in requests at which the bins begin: two bins per octave.
const BEGIN: [u16; NUM_BINS] = [
    0, 1, 2, 3, 4, 6, 8, 11, 16, 23, 32, 45, 64, 91, 128, 181, 256, 362, 512, 724, 1024, 1448,
    2048, 2896, 4096, 5793, 8192, 11585, 16384,
];

/// Width of each bin; the last is as wide as the age at which it begins.
const WIDTH: [f32; NUM_BINS] = [
    1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 3.0, 5.0, 7.0, 9.0, 13.0, 19.0, 27.0, 37.0, 53.0, 75.0, 106.0,
    150.0, 212.0, 300.0, 424.0, 600.0, 848.0, 1200.0, 1697.0, 2399.0, 3393.0, 4799.0, 16384.0,
];

/// Bins of age.
pub(super) const NUM_BINS: usize = 29;

/// Grades of the number of uses of content, and of continuations of its conversation.
const NUM_USES: u8 = 7;

/// Classes of content: whether a sequence ends with the content, uses, turn.
pub(super) const NUM_CLASSES: usize = 98;

/// Assumed share of blocks reused within one bin, without observations.
const PRIOR: f32 = 0.025;

/// Weight, in observations, of the prior for a bin of all classes: that it is like the bin before.
/// Also the weight, in uses, of the prior for a class: that it is like all classes.
const GUESS: f32 = 20.0;

/// Weight, in observations, of the prior for a bin of one class. Blocks of one sequence are used
/// together, so many blocks are one observation.
const CLASS_GUESS: f32 = 1000.0;

/// Observations of a class after which all its counts are halved, so that it adapts.
const ENOUGH: f32 = 1_048_576.0;

/// Returns the age at which a bin begins.
pub(super) fn bin_begin(bin: u8) -> u32 {
    BEGIN.get(usize::from(bin)).map_or(u32::MAX, |age| u32::from(*age))
}

/// Returns the bin of an age.
pub(super) fn bin_of(age: u32) -> u8 {
    let bins = BEGIN.partition_point(|begin| u32::from(*begin) <= age);
    u8::try_from(bins - 1).unwrap_or(u8::MAX)
}

/// Returns the class of content used `uses` times, in the given turn.
pub(super) fn class(uses: u8, turn: u8, is_last: bool) -> u8 {
    let uses = grade(uses);
    let turn = grade(turn).min(NUM_USES - 2).max(uses);
    let last = u8::from(is_last) * NUM_USES;
    (last + uses) * NUM_USES + turn
}

/// Returns a class without its grade of uses.
pub(super) fn without_uses(class: u8) -> u8 {
    let (of_uses, turn) = (class / NUM_USES, class % NUM_USES);
    (of_uses / NUM_USES) * NUM_USES + turn
}

/// Returns the class of content used `uses` times, given the result of [`without_uses`].
pub(super) fn with_uses(rest: u8, uses: u8) -> u8 {
    let (last, turn) = (rest / NUM_USES, rest % NUM_USES);
    let of_uses = last * NUM_USES + grade(uses);
    of_uses * NUM_USES + turn
}

fn grade(count: u8) -> u8 {
    match count {
        0 | 1 => 0,
        2 => 1,
        3 => 2,
        4..=5 => 3,
        6..=9 => 4,
        10..=20 => 5,
        _ => 6,
    }
}

/// Observations of one class.
#[derive(Debug, Clone, Copy)]
struct Observations {
    /// Blocks that reached each bin of age unused.
    reached: [f32; NUM_BINS],
    /// Blocks that were used in each bin.
    used: [f32; NUM_BINS],
    /// Expected uses per space, by bin: see [`Rates::rate`].
    rate: [f32; NUM_BINS],
    /// Whether the class has ever had a candidate.
    in_use: bool,
}

impl Observations {
    /// Computes the rates, where `chance` is the chance of a use in each bin over all classes.
    fn conclude(&mut self, chance: &[f32; NUM_BINS]) {
        let used: f32 = self.used.iter().sum();
        let expected: f32 = self.reached.iter().zip(chance).map(|(n, chance)| n * chance).sum();
        // How much more often this class is used than all classes at the same ages.
        let factor = (used + GUESS) / (expected + GUESS);
        let counts = self.used.iter().zip(&self.reached).zip(chance);
        let mut chances = [0.0; NUM_BINS];
        for (chance, ((used, reached), of_all)) in chances.iter_mut().zip(counts) {
            *chance = share(*used, *reached, (factor * of_all).min(1.0), CLASS_GUESS);
        }
        self.rate = array::from_fn(|bin| best_rate(&chances, bin));
    }
}

/// Counts of reuse, and the rates that follow.
#[derive(Debug, Clone)]
pub(super) struct Rates {
    classes: Vec<Observations>,
    /// Numbers of (class, bin) by ascending rate; only classes in use.
    order: Vec<(f32, u32)>,
}

impl Rates {
    pub(super) fn new() -> Self {
        let zero = [0.0; NUM_BINS];
        let seen = Observations { reached: zero, used: zero, rate: zero, in_use: false };
        let order = Vec::with_capacity(NUM_CLASSES * NUM_BINS);
        let mut rates = Self { classes: vec![seen; NUM_CLASSES], order };
        rates.recompute();
        rates
    }

    /// Returns the bytes of host memory.
    #[cfg(test)]
    pub(super) fn host_bytes(&self) -> usize {
        let [classes, order] = [list_bytes(&self.classes), list_bytes(&self.order)];
        classes + order
    }

    /// Counts `count` blocks that have reached a bin.
    pub(super) fn reached(&mut self, class: u8, bin: u8, count: f32) {
        let seen = &mut self.classes[usize::from(class)];
        let reached = &mut seen.reached[usize::from(bin)];
        *reached += count;
        if *reached >= ENOUGH {
            let counts = seen.reached.iter_mut().chain(&mut seen.used);
            counts.for_each(|count| *count *= 0.5);
        }
    }

    /// Counts a use of a block.
    pub(super) fn used(&mut self, class: u8, bin: u8) {
        self.classes[usize::from(class)].used[usize::from(bin)] += 1.0;
    }

    /// Records that the class has candidates; returns whether that is new.
    pub(super) fn take_in_use(&mut self, class: u8) -> bool {
        !std::mem::replace(&mut self.classes[usize::from(class)].in_use, true)
    }

    /// Returns the highest rate of uses per request of waiting for a block of this class that was
    /// just used.
    pub(super) fn rate(&self, class: u8) -> f32 {
        self.classes[usize::from(class)].rate[0]
    }

    /// Recomputes the rates; returns the numbers of (class, bin) by ascending rate.
    pub(super) fn recompute(&mut self) -> &[(f32, u32)] {
        let guess = self.of_all_classes();
        let Self { classes, order } = self;
        order.clear();
        let unseen = array::from_fn(|bin| best_rate(&guess, bin));
        for seen in classes.iter_mut() {
            if seen.reached[0] > 0.0 {
                seen.conclude(&guess);
            } else {
                seen.rate = unseen;
            }
        }
        // The last block cannot be found without the blocks before it.
        let (inside, last) = classes.split_at_mut(NUM_CLASSES / 2);
        for (last, inside) in last.iter_mut().zip(inside) {
            for (last, inside) in last.rate.iter_mut().zip(&inside.rate) {
                *last = last.min(*inside);
            }
        }
        for (class, seen) in classes.iter().enumerate().filter(|(_, seen)| seen.in_use) {
            let numbers = to_u32(class * NUM_BINS)..;
            order.extend(seen.rate.iter().copied().zip(numbers));
        }
        order.sort_unstable_by(|(a, left), (b, right)| a.total_cmp(b).then(right.cmp(left)));
        order
    }

    /// Returns the chance of a use in each bin, over all classes. A bin without observations is
    /// assumed to be like the one before, so that the rate falls with age.
    fn of_all_classes(&self) -> [f32; NUM_BINS] {
        let mut before = PRIOR;
        array::from_fn(|bin| {
            let sum = |of: fn(&Observations) -> &[f32; NUM_BINS]| {
                self.classes.iter().map(|seen| of(seen)[bin]).sum::<f32>()
            };
            before = share(sum(|seen| &seen.used), sum(|seen| &seen.reached), before, GUESS);
            before
        })
    }
}

/// Returns a share of events, weighted with a prior.
fn share(events: f32, of: f32, guess: f32, weight: f32) -> f32 {
    (events + weight * guess) / (of + weight)
}

/// Returns the Gittins index of a block in the middle of a bin: the highest ratio, over all times
/// to evict it, of the chance that it is used before to the expected time until then.
fn best_rate(chance: &[f32; NUM_BINS], bin: usize) -> f32 {
    let (mut alive, mut waited) = (1.0_f32, 0.0_f32);
    // Chance and time of the best so far; ratios are compared without a division.
    let mut best = (0.0_f32, 1.0_f32);
    // Half of the first bin has passed.
    let mut part = 0.5;
    for (chance, width) in chance.iter().zip(&WIDTH).skip(bin) {
        let left = alive * (1.0 - (part * chance).min(1.0));
        waited += part * width * 0.5 * (alive + left);
        alive = left;
        if (1.0 - alive) * best.1 > best.0 * waited {
            best = (1.0 - alive, waited);
        }
        part = 1.0;
    }
    best.0 / best.1
}

/// Returns the number of (class, bin).
pub(super) fn number(class: u8, bin: u8) -> u32 {
    to_u32(usize::from(class) * NUM_BINS + usize::from(bin))
}

/// Returns the count of numbers of (class, bin).
pub(super) const fn num_numbers() -> u32 {
    // 2842; `to_usize` is the only conversion available in constants.
    const NUMBERS: u32 = 2842;
    const _: () = assert!(to_usize(NUMBERS) == NUM_CLASSES * NUM_BINS, "one for each");
    NUMBERS
}

#[cfg(test)]
mod tests {
    #![expect(clippy::float_cmp, reason = "small whole numbers are exact")]
    use super::*;

    #[test]
    fn bins_are_as_wide_as_they_say() {
        for (bin, width) in WIDTH.iter().enumerate() {
            let begin = f32::from(BEGIN[bin]);
            let end = BEGIN.get(bin + 1).map_or(2.0 * begin, |end| f32::from(*end));
            assert_eq!(end - begin, *width, "bin {bin}");
        }
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
    fn every_class_is_in_range() {
        for (uses, turn) in (0..=u8::MAX).flat_map(|uses| (0..30).map(move |turn| (uses, turn))) {
            for is_last in [false, true] {
                assert!(usize::from(class(uses, turn, is_last)) < NUM_CLASSES);
            }
        }
    }

    #[test]
    fn without_observations_the_rate_falls_with_age() {
        let rates = Rates::new();
        let rate = rates.classes[0].rate;
        assert!(rate.is_sorted_by(|young, old| young > old), "{rate:?}");
    }

    #[test]
    fn a_pause_is_worth_waiting_for() {
        let mut rates = Rates::new();
        // Half of all blocks are used again, between 64 and 91 requests later and never else.
        let pause = 13;
        for bin in 0..29 {
            rates.reached(0, bin, if bin <= pause { 10_000.0 } else { 5_000.0 });
        }
        (0..5_000).for_each(|_| rates.used(0, pause));
        rates.recompute();
        let rate = rates.classes[0].rate;
        assert!(rate[8] > rate[0], "the nearer the pause's end, the better: {rate:?}");
        assert!(rate[12] > rate[8]);
        assert!(rate[14] < rate[0] / 10.0, "after the pause, waiting is not worthwhile: {rate:?}");
    }
}
