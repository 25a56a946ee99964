//! Rates of reuse by cell and age, counted online.
use std::array;

use hashbrown::HashMap;

use crate::eviction::reuse_rate::features::{Features, NUM_FEATURES, NUM_GRADES, NUM_SHAPES};
use crate::num::to_u32;

/// Ages in requests at which the bins begin: two bins per octave.
const BEGIN: [u16; NUM_BINS] = [
    0, 1, 2, 3, 4, 6, 8, 11, 16, 23, 32, 45, 64, 91, 128, 181, 256, 362, 512, 724, 1024, 1448,
    2048, 2896, 4096, 5793, 8192, 11585, 16384,
];

/// Combinations of features at most; content with others is counted in the first cell.
pub(super) const CELLS_MAX: u32 = 4095;

/// Bins of age.
pub(super) const NUM_BINS: usize = 29;

/// Assumed share of blocks reused within one bin, without observations.
const PRIOR: f32 = 0.025;

/// Weight, in observations, of the guess that a bin of all cells is like the bin before, and in
/// uses, of the guess that a feature has no effect or a cell none of its own.
const GUESS: f32 = 20.0;

/// Weight, in observations, of the guess that a bin of a cell follows the shape of all cells.
/// Blocks of one sequence are used together, so many blocks are one observation.
const SHAPE_GUESS: f32 = 10_000.0;

/// The same as [`SHAPE_GUESS`] for the shape of an expected time.
const TIMED_GUESS: f32 = 1000.0;

/// Observations of a cell after which all its counts are halved, so that it adapts.
const ENOUGH: f32 = 1_048_576.0;

/// Rank of a last block, of that of one inside.
const BELOW: f64 = 0.999;

/// The bits of a key in the order of rates that hold a number.
const LOW: u64 = 0xffff_ffff;

/// One number for each bin of age.
type Bins = [f32; NUM_BINS];

/// Returns the age at which a bin begins.
pub(super) fn bin_begin(bin: u8) -> u32 {
    BEGIN.get(usize::from(bin)).map_or(u32::MAX, |age| u32::from(*age))
}

/// Returns the bin of an age.
pub(super) fn bin_of(age: u32) -> u8 {
    let bins = BEGIN.partition_point(|begin| u32::from(*begin) <= age);
    u8::try_from(bins - 1).unwrap_or(u8::MAX)
}

/// Returns the width of a bin; the last is as wide as the age at which it begins.
pub(super) fn width(bin: usize) -> f32 {
    let begin = f32::from(BEGIN[bin]);
    BEGIN.get(bin + 1).map_or(begin, |end| f32::from(*end) - begin)
}

/// Content with equal features: its observations, and what follows from them.
#[derive(Debug, Clone, Copy)]
struct Cell {
    features: Features,
    seen: Observations,
    /// Expected uses per space, by bin: see [`Rates::rate`].
    rate: [f64; NUM_BINS],
}

#[derive(Debug, Clone, Copy)]
struct Observations {
    /// Blocks that reached each bin of age unused.
    reached: Bins,
    /// Blocks that were used in each bin.
    used: Bins,
}

const UNSEEN: Observations = Observations { reached: [0.0; NUM_BINS], used: [0.0; NUM_BINS] };

/// Counts of reuse, and the rates that follow.
#[derive(Debug, Clone)]
pub(super) struct Rates {
    cells: Vec<Cell>,
    numbers: HashMap<Features, u16>,
    /// The chance of a use in each bin: of all contents, then of each expected time.
    shapes: [Bins; NUM_SHAPES],
    /// How much more often contents are used that have a grade of a feature.
    effects: [[f32; NUM_GRADES]; NUM_FEATURES],
    /// Numbers of (cell, bin) by ascending rate.
    order: Vec<u64>,
}

impl Rates {
    pub(super) fn new() -> Self {
        let (cells, numbers, order) = (Vec::new(), HashMap::new(), Vec::new());
        let shapes = [[PRIOR; NUM_BINS]; NUM_SHAPES];
        Self { cells, numbers, shapes, effects: [[1.0; NUM_GRADES]; NUM_FEATURES], order }
    }

    /// Returns the bytes of host memory.
    #[cfg(test)]
    pub(super) fn host_bytes(&self) -> usize {
        use crate::num::list_bytes;
        self.numbers.allocation_size() + list_bytes(&self.cells) + list_bytes(&self.order)
    }

    /// Returns the rates of a cell by bin.
    #[cfg(test)]
    pub(super) fn of(&self, cell: u16) -> (Features, [f64; NUM_BINS]) {
        let cell = &self.cells[usize::from(cell)];
        (cell.features, cell.rate)
    }

    pub(super) fn num_cells(&self) -> u32 {
        to_u32(self.cells.len())
    }

    /// Returns the cell of features.
    pub(super) fn cell(&mut self, features: Features) -> u16 {
        if let Some(known) = self.numbers.get(&features) {
            return *known;
        }
        let new = u16::try_from(self.num_cells()).unwrap_or(u16::MAX);
        if u32::from(new) >= CELLS_MAX {
            return 0;
        }
        self.cells.push(Cell { features, seen: UNSEEN, rate: [0.0; NUM_BINS] });
        self.numbers.insert(features, new);
        self.conclude(usize::from(new));
        new
    }

    /// Counts `count` blocks that have reached a bin.
    pub(super) fn reached(&mut self, cell: u16, bin: u8, count: f32) {
        let Observations { reached, used } = &mut self.cells[usize::from(cell)].seen;
        let in_bin = &mut reached[usize::from(bin)];
        *in_bin += count;
        if *in_bin >= ENOUGH {
            reached.iter_mut().chain(used).for_each(|count| *count *= 0.5);
        }
    }

    /// Counts a use of a block.
    pub(super) fn used(&mut self, cell: u16, bin: u8) {
        self.cells[usize::from(cell)].seen.used[usize::from(bin)] += 1.0;
    }

    /// Returns the highest rate of uses per request of waiting for a block of this cell that was
    /// just used.
    pub(super) fn rate(&self, cell: u16) -> f64 {
        self.cells[usize::from(cell)].rate[0]
    }

    /// Recomputes the rates; returns the numbers of (cell, bin) by ascending rate.
    pub(super) fn learn(&mut self) -> impl Iterator<Item = u32> {
        self.learn_shapes();
        self.learn_effects();
        // What is inside of sequences comes before what ends them.
        let is_last = |cell: &usize| self.cells[*cell].features.inside().is_some();
        let (last, inside): (Vec<_>, Vec<_>) = (0..self.cells.len()).partition(is_last);
        inside.into_iter().chain(last).for_each(|cell| self.conclude(cell));
        let rates = self.cells.iter().flat_map(|cell| cell.rate);
        // Positive numbers are in the order of their bits, of which the lower ones are noise.
        let keys = rates
            .zip(0_u32..)
            .map(|(rate, number)| rate.to_bits() & !LOW | LOW ^ u64::from(number));
        self.order.clear();
        self.order.extend(keys);
        self.order.sort_unstable();
        self.order.iter().map(|key| u32::try_from(!key & LOW).unwrap_or(0))
    }

    /// Computes the chance of a use in each bin, over all contents: a bin without observations is
    /// assumed to be like the one before, so that the rate falls with age. Then that of each
    /// expected time, which is assumed to be like that of all contents, times one factor.
    fn learn_shapes(&mut self) {
        let mut sums = [UNSEEN; NUM_SHAPES];
        for Cell { features, seen, .. } in &self.cells {
            sums[0].add(seen);
            if features.shape() > 0 {
                sums[features.shape()].add(seen);
            }
        }
        let mut before = PRIOR;
        let all = array::from_fn(|bin| {
            before = share(sums[0].used[bin], sums[0].reached[bin], before, GUESS);
            before
        });
        self.shapes = sums.map(|seen| seen.chances(&all, 1.0, TIMED_GUESS));
        self.shapes[0] = all;
    }

    /// Estimates effects one after another, each with the others as they are then.
    fn learn_effects(&mut self) {
        // Uses of each cell, and those expected by what is known so far.
        let expect = |cell: &Cell| cell.seen.against(&self.shapes[cell.features.shape()]);
        let mut cells: Vec<_> = self.cells.iter().map(expect).collect();
        for (feature, effects) in self.effects.iter_mut().enumerate() {
            let grades = self.cells.iter().map(|cell| usize::from(cell.features.0[feature]));
            let mut sums = [(0.0, 0.0); NUM_GRADES];
            for (grade, (used, expected)) in grades.clone().zip(&cells) {
                sums[grade] = (sums[grade].0 + used, sums[grade].1 + expected);
            }
            *effects = sums.map(|(used, expected)| (used + GUESS) / (expected + GUESS));
            for (grade, (_, expected)) in grades.zip(&mut cells) {
                *expected *= effects[grade];
            }
        }
    }

    /// Computes the rates of a cell. A last block ranks lower than one inside, because it cannot be
    /// found without the blocks before it.
    fn conclude(&mut self, cell: usize) {
        let Cell { features, ref seen, .. } = self.cells[cell];
        let mut rate = self.rates(features, seen);
        if let Some(inside) = features.inside() {
            let known = self.numbers.get(&inside).map(|cell| self.cells[usize::from(*cell)].rate);
            let inside = known.unwrap_or_else(|| self.rates(inside, &UNSEEN));
            rate.iter_mut().zip(inside).for_each(|(rate, inside)| *rate = rate.min(inside) * BELOW);
        }
        self.cells[cell].rate = rate;
    }

    fn rates(&self, features: Features, seen: &Observations) -> [f64; NUM_BINS] {
        let shape = &self.shapes[features.shape()];
        let effects = self.effects.iter().zip(features.0);
        let factor: f32 = effects.map(|(of, grade)| of[usize::from(grade)]).product();
        let (used, expected) = seen.against(shape);
        let factor = factor * (used + GUESS) / (expected * factor + GUESS);
        best_rates(&seen.chances(shape, factor, SHAPE_GUESS))
    }
}

impl Observations {
    fn add(&mut self, other: &Self) {
        self.reached.iter_mut().zip(other.reached).for_each(|(sum, other)| *sum += other);
        self.used.iter_mut().zip(other.used).for_each(|(sum, other)| *sum += other);
    }

    /// Returns the uses, and those that a shape lets expect.
    fn against(&self, shape: &Bins) -> (f32, f32) {
        let expected = self.reached.iter().zip(shape).map(|(reached, chance)| reached * chance);
        (self.used.iter().sum(), expected.sum())
    }

    /// Returns the chance of a use in each bin, drawn to a shape times a factor.
    fn chances(&self, shape: &Bins, factor: f32, weight: f32) -> Bins {
        array::from_fn(|bin| {
            let guess = (factor * shape[bin]).min(1.0);
            share(self.used[bin], self.reached[bin], guess, weight).min(1.0)
        })
    }
}

/// Returns a share of events, weighted with a prior.
fn share(events: f32, of: f32, guess: f32, weight: f32) -> f32 {
    (events + weight * guess) / (of + weight)
}

/// Waiting for a use over some time: per block that begins it, the uses, the requests waited, and
/// the blocks left unused.
#[derive(Debug, Clone, Copy)]
struct Wait {
    uses: f64,
    requests: f64,
    left: f64,
}

impl Wait {
    fn new(chance: f64, width: f64) -> Self {
        let left = 1.0 - chance;
        Self { uses: chance, requests: width * 0.5 * (1.0 + left), left }
    }

    /// Returns the wait that goes on as long as that raises the uses per request, and how many of
    /// the later waits are left; the next later one is the last.
    fn extend(mut self, later: &[Self]) -> (Self, usize) {
        let before = later.len();
        for (more, left) in later.iter().rev().zip((0..before).rev()) {
            if more.uses * self.requests <= self.uses * more.requests {
                return (self, left + 1);
            }
            self.uses += self.left * more.uses;
            self.requests += self.left * more.requests;
            self.left *= more.left;
        }
        (self, 0)
    }
}

/// Returns the Gittins index of a block in the middle of each bin: the highest ratio, over all
/// times to evict it, of the chance that it is used before to the expected time until then.
pub(super) fn best_rates(chances: &Bins) -> [f64; NUM_BINS] {
    let mut rates = [0.0; NUM_BINS];
    // Waits that follow each other, the first one last, each with more uses per request than those
    // after it.
    let mut later = Vec::with_capacity(NUM_BINS);
    for bin in (0..NUM_BINS).rev() {
        let (chance, width) = (f64::from(chances[bin]), f64::from(width(bin)));
        // Half of the bin has passed.
        let (rest, _) = Wait::new(0.5 * chance, 0.5 * width).extend(&later);
        rates[bin] = rest.uses / rest.requests;
        let (whole, len) = Wait::new(chance, width).extend(&later);
        later.truncate(len);
        later.push(whole);
    }
    rates
}
