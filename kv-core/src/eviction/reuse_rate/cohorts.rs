//! Cohorts: contents that were used in the same request age together.
//!
//! A request creates one *cohort* for each class of the contents that it releases. The cohort
//! counts them and lists the candidates that are ranked as that class. It is dissolved when its
//! request is so old that age has no meaning any more; candidates then wait in one list per rank.
use crate::eviction::Priority;
use crate::eviction::lists::{BitSet, Lists};
use crate::eviction::reuse_rate::rates::{
    NUM_BINS, NUM_CLASSES, Rates, bin_begin, bin_of, num_numbers, number,
};
#[cfg(test)]
use crate::num::list_bytes;
use crate::num::{to_u32, to_usize};

/// Requests after which age has no meaning any more: where the last bin begins.
const REQUESTS: u32 = 16_384;

/// The bin of everything older.
const LAST_BIN: u8 = 28;

/// Not a cohort.
const NONE: u32 = u32::MAX;

#[derive(Debug, Clone, Copy)]
struct Cohort {
    /// The class that is counted, and the rank of the candidates.
    class: u8,
    bin: u8,
    /// The request after which its contents became idle.
    since: u32,
    /// Contents of the class, evicted ones included.
    len: u32,
    /// Next cohort of the request, or next free one.
    next: u32,
}

/// Candidates by the rate of their reuse, and the counts of all ageing contents.
#[derive(Debug, Clone)]
pub(super) struct Cohorts {
    all: Vec<Cohort>,
    free: u32,
    /// First cohort of each of the last requests.
    of_request: Vec<u32>,
    /// Blocks: first those older than all bins by rank, then by level, then by cohort.
    candidates: Lists,
    /// Cohorts with candidates by (rank, bin), the oldest first, and some that had candidates.
    with_candidates: Lists,
    /// Positions in the order of rates at which there may be a candidate.
    filled: BitSet,
    /// The position of each (rank, bin), and the (rank, bin) of each position.
    place: Vec<u32>,
    at_place: Vec<u32>,
    /// Levels at which there may be a candidate.
    levels: BitSet,
    now: u32,
}

/// Lists of candidates before those of cohorts: one per rank, and one per level.
const LEVELS: u32 = 98;
const COHORTS: u32 = LEVELS + 256;
const _: () = assert!(to_usize(LEVELS) == NUM_CLASSES, "the ranks come first");

impl Cohorts {
    pub(super) fn new(num_blocks: u32) -> Self {
        let num_numbers = num_numbers();
        Self {
            all: Vec::new(),
            free: NONE,
            of_request: vec![NONE; to_usize(REQUESTS)],
            candidates: Lists::new(num_blocks, COHORTS),
            with_candidates: Lists::new(0, num_numbers),
            filled: BitSet::new(num_numbers),
            place: vec![0; to_usize(num_numbers)],
            at_place: Vec::with_capacity(to_usize(num_numbers)),
            levels: BitSet::new(256),
            now: 0,
        }
    }

    /// Returns the bytes of host memory.
    #[cfg(test)]
    pub(super) fn host_bytes(&self) -> usize {
        let numbers = [&self.of_request, &self.place, &self.at_place].map(list_bytes);
        let lists = [&self.candidates, &self.with_candidates].map(Lists::host_bytes);
        numbers.iter().chain(&lists).chain(&[list_bytes(&self.all)]).sum()
    }

    /// Returns a cohort; `None` for [`NONE`].
    fn get(&self, cohort: u32) -> Option<&Cohort> {
        (cohort != NONE).then(|| &self.all[to_usize(cohort)])
    }
    fn cohort_mut(&mut self, cohort: u32) -> &mut Cohort {
        &mut self.all[to_usize(cohort)]
    }

    /// Returns the number of requests since content became idle.
    pub(super) fn age(&self, since: u32) -> u32 {
        self.now.wrapping_sub(since)
    }
    /// Returns the current request.
    pub(super) fn now(&self) -> u32 {
        self.now
    }

    fn first(&self, since: u32) -> u32 {
        let first = self.of_request[to_usize(since % REQUESTS)];
        let is_of = self.get(first).is_some_and(|cohort| cohort.since == since);
        if is_of { first } else { NONE }
    }

    fn find(&self, since: u32, class: u8) -> Option<u32> {
        let mut at = self.first(since);
        while let Some(cohort) = self.get(at) {
            if cohort.class == class {
                return Some(at);
            }
            at = cohort.next;
        }
        None
    }

    /// Returns the cohort of a request, which is created if necessary.
    fn find_or_add(&mut self, since: u32, class: u8) -> u32 {
        if let Some(cohort) = self.find(since, class) {
            return cohort;
        }
        let next = self.first(since);
        let new = Cohort { class, bin: bin_of(self.age(since)), since, len: 0, next };
        let mut at = self.free;
        if at == NONE {
            self.all.push(new);
            self.candidates.add_list();
            at = self.with_candidates.add_node();
        } else {
            self.free = std::mem::replace(self.cohort_mut(at), new).next;
        }
        self.of_request[to_usize(since % REQUESTS)] = at;
        at
    }

    /// Counts a content of a class in the current request.
    pub(super) fn enter(&mut self, class: u8) {
        let cohort = self.find_or_add(self.now, class);
        self.cohort_mut(cohort).len += 1;
    }

    /// Removes a content that does not age any more.
    pub(super) fn leave(&mut self, class: u8, since: u32) {
        if let Some(cohort) = self.find(since, class) {
            self.cohort_mut(cohort).len -= 1;
        }
    }

    /// Makes a block a candidate by rank and age.
    pub(super) fn push(&mut self, block: u32, rank: u8, since: u32) {
        if self.age(since) >= REQUESTS {
            self.candidates.push_back(u32::from(rank), block);
            self.fill(number(rank, LAST_BIN));
            return;
        }
        let cohort = self.find_or_add(since, rank);
        self.candidates.push_back(COHORTS + cohort, block);
        self.note_candidate(cohort, rank);
    }

    /// Records that a cohort has a candidate.
    fn note_candidate(&mut self, cohort: u32, rank: u8) {
        if !self.with_candidates.contains(cohort) {
            let bin = self.all[to_usize(cohort)].bin;
            self.with_candidates.push_back(number(rank, bin), cohort);
            self.fill(number(rank, bin));
        }
    }

    /// Makes a block a candidate by level.
    pub(super) fn push_level(&mut self, block: u32, level: u8) {
        self.candidates.push_back(LEVELS + u32::from(level), block);
        self.levels.set(level.into(), true);
    }

    /// Passes over a candidate until it is shown.
    pub(super) fn hide(&mut self, block: u32) {
        self.candidates.hide(block);
    }

    /// Shows a hidden candidate; `false` for any other block. The caller calls
    /// [`Self::note_shown`] then.
    pub(super) fn show(&mut self, block: u32) -> bool {
        self.candidates.show(block)
    }

    /// Records that there is a candidate of this rank, age and level again.
    pub(super) fn note_shown(&mut self, (rank, since): (u8, u32), level: u8) {
        if level != Priority::DEFAULT_LEVEL {
            self.levels.set(level.into(), true);
        } else if self.age(since) >= REQUESTS {
            self.fill(number(rank, LAST_BIN));
        } else {
            let cohort = self.find_or_add(since, rank);
            self.note_candidate(cohort, rank);
        }
    }

    /// Removes a candidate.
    pub(super) fn remove(&mut self, block: u32) {
        self.candidates.remove(block);
    }

    fn fill(&mut self, number: u32) {
        self.filled.set(self.place[to_usize(number)], true);
    }

    /// Begins a request: cohorts that are old enough move to the next bin.
    pub(super) fn advance(&mut self, rates: &mut Rates) {
        self.now = self.now.wrapping_add(1);
        for bin in 1..=LAST_BIN {
            let since = self.now.wrapping_sub(bin_begin(bin));
            let mut at = self.first(since);
            while let Some(&Cohort { class, len, next, .. }) = self.get(at) {
                if len > 0 {
                    rates.reached(class, bin, count(len));
                }
                self.grow_older(at, class, bin);
                if bin == LAST_BIN {
                    self.end(at);
                }
                at = next;
            }
        }
        self.of_request[to_usize(self.now % REQUESTS)] = NONE;
    }

    fn grow_older(&mut self, at: u32, rank: u8, bin: u8) {
        self.with_candidates.remove(at);
        let list = COHORTS + at;
        self.cohort_mut(at).bin = bin;
        if self.candidates.is_empty(list) {
            return;
        }
        if bin == LAST_BIN {
            self.candidates.append(rank.into(), list);
        } else {
            self.with_candidates.push_back(number(rank, bin), at);
        }
        self.fill(number(rank, bin));
    }

    fn end(&mut self, at: u32) {
        let (free, now) = (std::mem::replace(&mut self.free, at), self.now);
        let cohort = self.cohort_mut(at);
        // It belongs to no request any more.
        (cohort.next, cohort.since) = (free, now);
    }

    /// Returns the first candidate by rank and age.
    pub(super) fn first_by_rate(&mut self) -> Option<u32> {
        loop {
            let place = self.filled.first()?;
            let number = *self.at_place.get(to_usize(place))?;
            let found = self.front(number);
            if found.is_some() {
                return found;
            }
            self.filled.set(place, false);
        }
    }

    /// Returns the first candidate of a (rank, bin).
    fn front(&mut self, number: u32) -> Option<u32> {
        let (rank, bin) = (number / NUMBERS_PER_RANK, number % NUMBERS_PER_RANK);
        if bin == u32::from(LAST_BIN) {
            return self.candidates.front(rank);
        }
        while let Some(cohort) = self.with_candidates.front(number) {
            let found = self.candidates.front(COHORTS + cohort);
            if found.is_some() {
                return found;
            }
            self.with_candidates.remove(cohort);
        }
        None
    }

    /// Returns the first candidate by level, and the level.
    pub(super) fn first_by_level(&mut self) -> Option<(u8, u32)> {
        loop {
            let level = self.levels.first()?;
            match self.candidates.front(LEVELS + level) {
                Some(block) => return Some((u8::try_from(level).ok()?, block)),
                None => self.levels.set(level, false),
            }
        }
    }

    /// Installs a new order of rates, which contains every (rank, bin) in use.
    pub(super) fn rank(&mut self, order: &[(f32, u32)]) {
        self.filled.clear();
        self.at_place.clear();
        for (place, (_, number)) in order.iter().enumerate() {
            let number = *number;
            self.at_place.push(number);
            self.place[to_usize(number)] = to_u32(place);
            if self.front(number).is_some() {
                self.fill(number);
            }
        }
    }
}

/// Numbers of (rank, bin) per rank.
const NUMBERS_PER_RANK: u32 = 29;
const _: () = assert!(to_usize(NUMBERS_PER_RANK) == NUM_BINS, "a number for each bin");

/// Converts a number of contents; more than 65535 count as that many.
fn count(len: u32) -> f32 {
    f32::from(u16::try_from(len).unwrap_or(u16::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_bin_holds_everything_older() {
        assert_eq!(usize::from(LAST_BIN) + 1, NUM_BINS);
        assert_eq!(bin_begin(LAST_BIN), REQUESTS);
    }

    #[test]
    fn a_content_leaves_the_counts_of_its_request() {
        let (mut cohorts, mut rates) = (Cohorts::new(2), Rates::new());
        cohorts.enter(3);
        cohorts.enter(3);
        cohorts.leave(3, 0);
        let before = cohorts.all.len();
        for _ in 0..REQUESTS {
            cohorts.advance(&mut rates);
        }
        assert!(cohorts.find(0, 3).is_none(), "its request is over");
        cohorts.enter(4);
        assert_eq!(cohorts.all.len(), before, "what is over makes room");
    }

    #[test]
    fn candidates_of_one_rank_go_in_the_order_in_which_they_came() {
        let (mut cohorts, mut rates) = (Cohorts::new(4), Rates::new());
        rates.take_in_use(5);
        for block in 0..4 {
            cohorts.push(block, 5, cohorts.now());
            (0..10_000).for_each(|_| cohorts.advance(&mut rates));
            cohorts.rank(rates.recompute());
        }
        let order: Vec<_> = std::iter::from_fn(|| {
            let block = cohorts.first_by_rate()?;
            cohorts.remove(block);
            Some(block)
        })
        .collect();
        assert_eq!(order.len(), 4);
        // Blocks 0 to 2 are in the last bin, where age has no meaning.
        let old: Vec<_> = order.into_iter().filter(|block| *block < 3).collect();
        assert_eq!(old, [0, 1, 2]);
    }
}
