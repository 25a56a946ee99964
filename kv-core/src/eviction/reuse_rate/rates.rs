//! How soon content comes back, by class and age, counted as it happens.
use std::array;

use crate::num::{to_u32, to_usize};

/// Ages in requests at which the bins begin: two bins an octave.
const BEGIN: [u16; NUM_BINS] = [
    0, 1, 2, 3, 4, 6, 8, 11, 16, 23, 32, 45, 64, 91, 128, 181, 256, 362, 512, 724, 1024, 1448,
    2048, 2896, 4096, 5793, 8192, 11585, 16384,
];

/// Bins of age.
pub(super) const NUM_BINS: usize = 29;

/// Levels of how often content was used, and of how often its conversation went on.
const NUM_USES: u8 = 7;

/// Classes of content: whether a sequence ends with it, its uses, the turn it is in.
pub(super) const NUM_CLASSES: usize = 98;

/// Share of blocks that come back within one bin while nothing is known.
const PRIOR: f32 = 0.025;

/// Observations a guess is worth: as much weight has a bin's neighbour for the bin of all classes,
/// and the bin of all classes for that of one.
const GUESS: f32 = 20.0;

/// Observations of a class after which all its counts are halved, so that it follows the times.
const ENOUGH: f32 = 1_048_576.0;

/// Where the bin behind this one begins, or `None` behind the last.
pub(super) fn bin_end(bin: u8) -> Option<u32> {
    BEGIN.get(usize::from(bin).saturating_add(1)).map(|age| u32::from(*age))
}

/// The class of content used `uses` times, in the given turn.
pub(super) fn class(uses: u8, turn: u8, is_last: bool) -> u8 {
    let uses = grade(uses);
    let turn = grade(turn).min(NUM_USES.saturating_sub(2)).max(uses);
    let last = u8::from(is_last).saturating_mul(NUM_USES);
    last.saturating_add(uses).saturating_mul(NUM_USES).saturating_add(turn)
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

/// What was seen of one class.
#[derive(Debug, Clone, Copy)]
struct Seen {
    /// Blocks that reached each bin of age without being used.
    reached: [f32; NUM_BINS],
    /// Blocks that were used in it.
    used: [f32; NUM_BINS],
    /// Expected uses for the room a block takes, by bin: see [`Rates::rate`].
    rate: [f32; NUM_BINS],
    /// Has the class ever held a candidate?
    in_use: bool,
}

/// Counts of reuse, and what they say about the future.
#[derive(Debug, Clone)]
pub(super) struct Rates {
    classes: Vec<Seen>,
    /// Numbers of (class, bin), by rising rate; only the classes in use.
    order: Vec<u16>,
}

impl Rates {
    pub(super) fn new() -> Self {
        let zero = [0.0; NUM_BINS];
        let seen = Seen { reached: zero, used: zero, rate: zero, in_use: false };
        let order = Vec::with_capacity(NUM_CLASSES.saturating_mul(NUM_BINS));
        let mut rates = Self { classes: vec![seen; NUM_CLASSES], order };
        rates.learn();
        rates
    }

    /// `count` blocks have reached a bin.
    pub(super) fn reached(&mut self, class: u8, bin: u8, count: f32) {
        let Some(seen) = self.classes.get_mut(usize::from(class)) else { return };
        if let Some(reached) = seen.reached.get_mut(usize::from(bin)) {
            *reached += count;
            if *reached >= ENOUGH {
                let counts = seen.reached.iter_mut().chain(&mut seen.used);
                counts.for_each(|count| *count *= 0.5);
            }
        }
    }

    /// A block was used.
    pub(super) fn used(&mut self, class: u8, bin: u8) {
        let seen = self.classes.get_mut(usize::from(class));
        if let Some(used) = seen.and_then(|seen| seen.used.get_mut(usize::from(bin))) {
            *used += 1.0;
        }
    }

    /// Notes that the class holds candidates; says whether that is new.
    pub(super) fn take_in_use(&mut self, class: u8) -> bool {
        let seen = self.classes.get_mut(usize::from(class));
        seen.is_some_and(|seen| !std::mem::replace(&mut seen.in_use, true))
    }

    /// The most uses per request of waiting that a block of this class just used may bring.
    pub(super) fn rate(&self, class: u8) -> f32 {
        self.classes.get(usize::from(class)).map_or(0.0, |seen| seen.rate[0])
    }

    /// Draws the conclusions from what was seen; answers with the numbers of (class, bin) by rising
    /// rate.
    pub(super) fn learn(&mut self) -> &[u16] {
        let guess = self.of_all_classes();
        let Self { classes, order } = self;
        order.clear();
        for (class, seen) in classes.iter_mut().enumerate() {
            let chance: [f32; NUM_BINS] = array::from_fn(|bin| {
                let at = |of: &[f32; NUM_BINS]| of.get(bin).copied().unwrap_or(0.0);
                share(at(&seen.used), at(&seen.reached), at(&guess))
            });
            if seen.in_use || seen.rate[0] == 0.0 || class == 0 {
                seen.rate = array::from_fn(|bin| best_rate(&chance, bin));
            }
            if seen.in_use {
                let first = class.saturating_mul(NUM_BINS);
                let numbers = first..first.saturating_add(NUM_BINS);
                order.extend(numbers.filter_map(|number| u16::try_from(number).ok()));
            }
        }
        let rate = |number: u16| {
            let number = usize::from(number);
            let seen = classes.get(number / NUM_BINS);
            seen.and_then(|seen| seen.rate.get(number % NUM_BINS)).copied().unwrap_or(0.0)
        };
        order.sort_unstable_by(|a, b| rate(*a).total_cmp(&rate(*b)).then(b.cmp(a)));
        order
    }

    /// The chance of a use in each bin, over all classes. A bin nobody has reached is taken to be
    /// like the one before, so that the rate falls with age where nothing is known.
    fn of_all_classes(&self) -> [f32; NUM_BINS] {
        let mut before = PRIOR;
        array::from_fn(|bin| {
            let sum = |of: fn(&Seen) -> &[f32; NUM_BINS]| {
                self.classes.iter().filter_map(|seen| of(seen).get(bin)).sum::<f32>()
            };
            before = share(sum(|seen| &seen.used), sum(|seen| &seen.reached), before);
            before
        })
    }
}

/// A share of events, drawn to a guess as long as there are few.
fn share(events: f32, of: f32, guess: f32) -> f32 {
    (events + GUESS * guess) / (of + GUESS)
}

/// The Gittins index of a block in the middle of a bin: the largest ratio, over all times to give
/// it up, of the chance that it is used before to the time it is expected to take room.
fn best_rate(chance: &[f32; NUM_BINS], bin: usize) -> f32 {
    let (mut alive, mut waited, mut best) = (1.0_f32, 0.0_f32, 0.0_f32);
    // Half of the first bin is over.
    let mut part = 0.5;
    for (at, chance) in chance.iter().enumerate().skip(bin) {
        let left = alive * (1.0 - (part * chance).min(1.0));
        waited += part * width(at) * 0.5 * (alive + left);
        alive = left;
        best = best.max((1.0 - alive) / waited);
        part = 1.0;
    }
    best
}

/// Requests that a bin is wide; the last is as wide as the age at which it begins.
fn width(bin: usize) -> f32 {
    let at = |bin: usize| BEGIN.get(bin).map(|age| f32::from(*age));
    let begin = at(bin).unwrap_or(0.0);
    at(bin.saturating_add(1)).map_or(begin, |end| end - begin)
}

/// The number of (class, bin).
pub(super) fn number(class: u8, bin: u8) -> u32 {
    to_u32(usize::from(class).saturating_mul(NUM_BINS).saturating_add(usize::from(bin)))
}

/// How many numbers of (class, bin) there are.
pub(super) const fn num_numbers() -> u32 {
    // 2842; `to_usize` is the only conversion there is for constants.
    const NUMBERS: u32 = 2842;
    const _: () = assert!(to_usize(NUMBERS) == NUM_CLASSES * NUM_BINS, "one for each");
    NUMBERS
}
