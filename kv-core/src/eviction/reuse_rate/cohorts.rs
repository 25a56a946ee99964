//! Cohorts: contents that were used in the same request age together.
//!
//! A request creates one *cohort* for each cell of the contents that it releases. The cohort
//! counts them and lists the candidates that are ranked by that cell. It is dissolved when its
//! request is so old that age has no meaning any more; candidates then wait in one list per rank.
use crate::eviction::Priority;
use crate::eviction::lists::{BitSet, Lists};
use crate::eviction::reuse_rate::contents::SINCE_MASK;
use crate::eviction::reuse_rate::rates::{CELLS_MAX, NUM_BINS, Rates, bin_begin, bin_of};
#[cfg(test)]
use crate::num::list_bytes;
use crate::num::{to_u32, to_usize};

/// Requests after which age has no meaning any more: where the last bin begins.
const REQUESTS: u32 = 16_384;

/// The bin of everything older.
const LAST_BIN: u8 = 28;

#[derive(Debug, Clone, Copy)]
struct Cohort {
    /// The cell that is counted, and the rank of the candidates.
    cell: u16,
    /// Contents of the cell, evicted ones included.
    len: u32,
}

/// Candidates in the order of eviction, and the counts of all ageing contents.
#[derive(Debug, Clone)]
pub(super) struct Cohorts {
    all: Vec<Cohort>,
    /// Cohorts of each of the last requests, and those of none.
    of_request: Vec<Vec<u32>>,
    free: Vec<u32>,
    /// Blocks: first by level, then those older than all bins by rank, then by cohort.
    candidates: Lists,
    /// Cohorts with candidates by number, the oldest first, and some that had candidates.
    with_candidates: Lists,
    /// Places in the order of eviction at which there may be a candidate.
    filled: BitSet,
    /// The place of each (rank, bin), and the number of the (rank, bin) at each place.
    place: Vec<u32>,
    at_place: Vec<u32>,
    now: u32,
}

/// Why and since when a block is a candidate.
#[derive(Debug, Clone, Copy)]
pub(super) struct Spot {
    pub(super) level: u8,
    /// The cell by which it is ranked if it has the default level.
    pub(super) rank: u16,
    pub(super) since: u32,
}

/// Lists of candidates before those of ranks and cohorts: one for each level. Places in the order
/// of eviction are lower levels, (rank, bin) from here on, and higher levels.
const LEVELS: u32 = 256;
const COHORTS: u32 = LEVELS + CELLS_MAX;
const HIGHER: u32 = LEVELS + CELLS_MAX * BINS;
const BINS: u32 = 29;
const _: () = assert!(to_usize(BINS) == NUM_BINS, "a place for each bin");

impl Cohorts {
    pub(super) fn new(num_blocks: u32) -> Self {
        Self {
            all: Vec::new(),
            of_request: vec![Vec::new(); to_usize(REQUESTS)],
            free: Vec::new(),
            candidates: Lists::new(num_blocks, COHORTS),
            with_candidates: Lists::new(0, 0),
            filled: BitSet::new(HIGHER + LEVELS),
            place: Vec::new(),
            at_place: Vec::new(),
            now: 0,
        }
    }

    /// Returns the bytes of host memory.
    #[cfg(test)]
    pub(super) fn host_bytes(&self) -> usize {
        let numbers = [&self.free, &self.place, &self.at_place].map(list_bytes);
        let lists = [&self.candidates, &self.with_candidates].map(Lists::host_bytes);
        let others = [list_bytes(&self.all), list_bytes(&self.of_request)];
        let requests = self.of_request.iter().map(list_bytes).sum();
        numbers.iter().chain(&lists).chain(&others).chain(&[requests]).sum()
    }

    #[cfg(test)]
    pub(super) fn num_cohorts(&self) -> usize {
        self.all.len()
    }

    /// Returns the number of requests since content became idle.
    pub(super) fn age(&self, since: u32) -> u32 {
        self.now.wrapping_sub(since) & SINCE_MASK
    }
    /// Returns the current request; numbers begin again.
    pub(super) fn now(&self) -> u32 {
        self.now
    }

    /// Returns the cohort of a cell in a request, if the request is not too old.
    pub(super) fn find(&self, since: u32, cell: u16) -> Option<u32> {
        let is_young = self.age(since) < REQUESTS;
        let mut cohorts = self.of_request[to_usize(since % REQUESTS)].iter().copied();
        cohorts.find(|at| is_young && self.all[to_usize(*at)].cell == cell)
    }

    /// Returns the cohort of a cell in a young request, which is created if necessary.
    fn find_or_add(&mut self, since: u32, cell: u16) -> u32 {
        if let Some(cohort) = self.find(since, cell) {
            return cohort;
        }
        let at = self.free.pop().unwrap_or_else(|| {
            self.all.push(Cohort { cell, len: 0 });
            self.candidates.add_list();
            self.with_candidates.add_node()
        });
        self.all[to_usize(at)] = Cohort { cell, len: 0 };
        self.of_request[to_usize(since % REQUESTS)].push(at);
        at
    }

    /// Counts a content of a cell in the current request.
    pub(super) fn enter(&mut self, cell: u16) {
        let cohort = self.find_or_add(self.now, cell);
        self.all[to_usize(cohort)].len += 1;
    }

    /// Removes a content that does not age any more.
    pub(super) fn leave(&mut self, cell: u16, since: u32) {
        if let Some(cohort) = self.find(since, cell) {
            let len = &mut self.all[to_usize(cohort)].len;
            // The request may be another one of the same number, which wraps.
            *len = len.saturating_sub(1);
        }
    }

    /// Makes a block a candidate.
    pub(super) fn push(&mut self, block: u32, spot: Spot) {
        let list = self.open(spot);
        self.candidates.push_back(list, block);
    }
    /// Passes over a candidate until it is shown.
    pub(super) fn hide(&mut self, block: u32) {
        self.candidates.hide(block);
    }
    /// Shows a hidden candidate, which has its former place; `false` for any other block. The
    /// caller calls [`Self::open`] then.
    pub(super) fn show(&mut self, block: u32) -> bool {
        self.candidates.show(block)
    }
    /// Removes a candidate.
    pub(super) fn remove(&mut self, block: u32) {
        self.candidates.remove(block);
    }

    /// Returns the list of candidates of a spot, which is going to have one.
    pub(super) fn open(&mut self, Spot { level, rank, since }: Spot) -> u32 {
        let (list, place) = if level != Priority::DEFAULT_LEVEL {
            let first = if level < Priority::DEFAULT_LEVEL { 0 } else { HIGHER };
            (u32::from(level), first + u32::from(level))
        } else if self.age(since) >= REQUESTS {
            (LEVELS + u32::from(rank), self.place(rank, LAST_BIN))
        } else {
            let cohort = self.find_or_add(since, rank);
            let bin = bin_of(self.age(since));
            if !self.with_candidates.contains(cohort) {
                self.with_candidates.push_back(number(rank, bin), cohort);
            }
            (COHORTS + cohort, self.place(rank, bin))
        };
        self.filled.set(place, true);
        list
    }

    fn place(&self, rank: u16, bin: u8) -> u32 {
        self.place[to_usize(number(rank, bin))]
    }

    /// Begins a request: cohorts that are old enough move to the next bin.
    pub(super) fn advance(&mut self, rates: &mut Rates) {
        self.now = (self.now + 1) & SINCE_MASK;
        for bin in 1..=LAST_BIN {
            let request = self.now.wrapping_sub(bin_begin(bin)) % REQUESTS;
            let cohorts = std::mem::take(&mut self.of_request[to_usize(request)]);
            for at in &cohorts {
                let Cohort { cell, len } = self.all[to_usize(*at)];
                // More than 65,535 count as that many.
                rates.reached(cell, bin, u16::try_from(len).unwrap_or(u16::MAX).into());
                self.grow_older(*at, cell, bin);
            }
            if bin == LAST_BIN {
                self.free.extend(cohorts);
            } else {
                self.of_request[to_usize(request)] = cohorts;
            }
        }
    }

    fn grow_older(&mut self, at: u32, cell: u16, bin: u8) {
        self.with_candidates.remove(at);
        let list = COHORTS + at;
        if self.candidates.is_empty(list) {
            return;
        }
        if bin == LAST_BIN {
            self.candidates.append(LEVELS + u32::from(cell), list);
        } else {
            self.with_candidates.push_back(number(cell, bin), at);
        }
        self.filled.set(self.place(cell, bin), true);
    }

    /// Returns the candidate that is evicted next.
    pub(super) fn next(&mut self) -> Option<u32> {
        loop {
            let place = self.filled.first()?;
            let found = self.front(place);
            if found.is_some() {
                return found;
            }
            self.filled.set(place, false);
        }
    }

    /// Returns the first candidate of a place.
    fn front(&mut self, place: u32) -> Option<u32> {
        let number =
            place.checked_sub(LEVELS).and_then(|at| self.at_place.get(to_usize(at)).copied());
        let Some(number) = number else {
            return self.candidates.front(place.checked_sub(HIGHER).unwrap_or(place));
        };
        let (rank, bin) = (number / BINS, number % BINS);
        if bin == u32::from(LAST_BIN) {
            return self.candidates.front(LEVELS + rank);
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

    /// Adds cells, whose candidates are evicted after those of other cells before the next
    /// [`Self::rank`].
    pub(super) fn add_cells(&mut self, num_cells: u32) {
        for number in to_u32(self.place.len())..num_cells * BINS {
            self.with_candidates.add_list();
            self.place.push(LEVELS + number);
            self.at_place.push(number);
        }
    }

    /// Installs a new order of rates, with every (rank, bin).
    pub(super) fn rank(&mut self, order: impl Iterator<Item = u32>) {
        self.at_place.clear();
        self.at_place.extend(order);
        for (number, place) in self.at_place.iter().zip(LEVELS..) {
            self.place[to_usize(*number)] = place;
        }
        for place in LEVELS..LEVELS + to_u32(self.at_place.len()) {
            let is_filled = self.front(place).is_some();
            self.filled.set(place, is_filled);
        }
    }
}

/// Returns the number of (rank, bin).
fn number(rank: u16, bin: u8) -> u32 {
    u32::from(rank) * BINS + u32::from(bin)
}
