//! Contents that were used in the same request and are of one class age together.
use crate::eviction::lists::{BitSet, Lists};
use crate::eviction::reuse_rate::rates::{
    NUM_BINS, NUM_CLASSES, Rates, bin_end, num_numbers, number,
};
use crate::num::{to_u32, to_usize};

/// The list of cohorts that are not in use, behind those of the bins.
const FREE: u32 = 29;
const _: () = assert!(to_usize(FREE) == NUM_BINS, "the bins come first");

/// Contents of one class whose last use ended in the same request.
#[derive(Debug, Clone, Copy, Default)]
struct Cohort {
    /// The request after which they were idle.
    since: u32,
    /// Contents in it, evicted ones included.
    len: u32,
    /// By what they are counted.
    class: u8,
    /// By what they are ranked.
    rank: u8,
    bin: u8,
}

/// All cohorts, by age and by what their rate of reuse is.
#[derive(Debug, Clone)]
pub(super) struct Cohorts {
    all: Vec<Cohort>,
    /// Cohorts by bin, the oldest first, and free ones.
    by_age: Lists,
    /// Cohorts with candidates by (rank, bin), the oldest first.
    with_candidates: Lists,
    /// Places in the order of rates at which there is a candidate.
    filled: BitSet,
    /// The place of each (rank, bin), and the (rank, bin) of each place.
    place: Vec<u32>,
    at_place: Vec<u32>,
    /// The cohort of this request, by class; may be out of date.
    latest: [u32; NUM_CLASSES],
}

impl Cohorts {
    /// Room for as many cohorts as there can be contents.
    pub(super) fn new(num_contents: u32) -> Self {
        let num_numbers = num_numbers();
        let mut by_age = Lists::new(num_contents, FREE.saturating_add(1));
        (0..num_contents).for_each(|cohort| by_age.push_back(FREE, cohort));
        Self {
            all: vec![Cohort::default(); to_usize(num_contents)],
            by_age,
            with_candidates: Lists::new(num_contents, num_numbers),
            filled: BitSet::new(num_numbers),
            place: vec![0; to_usize(num_numbers)],
            at_place: Vec::with_capacity(to_usize(num_numbers)),
            latest: [0; NUM_CLASSES],
        }
    }

    fn get(&self, cohort: u32) -> Cohort {
        self.all.get(to_usize(cohort)).copied().unwrap_or_default()
    }

    /// The class and bin of a cohort.
    pub(super) fn class_and_bin(&self, cohort: u32) -> (u8, u8) {
        let Cohort { class, bin, .. } = self.get(cohort);
        (class, bin)
    }

    /// Counts a content into the cohort of this request; `None` if there is no room.
    pub(super) fn enter(&mut self, class: u8, rank: u8, now: u32) -> Option<u32> {
        let latest = self.latest.get_mut(usize::from(class))?;
        if let Some(cohort) = self.all.get_mut(to_usize(*latest))
            && cohort.len > 0
            && (cohort.since, cohort.class, cohort.rank) == (now, class, rank)
        {
            cohort.len = cohort.len.saturating_add(1);
            return Some(*latest);
        }
        let new = self.by_age.pop_front(FREE)?;
        *latest = new;
        *self.all.get_mut(to_usize(new))? = Cohort { since: now, len: 1, class, rank, bin: 0 };
        self.by_age.push_back(0, new);
        Some(new)
    }

    /// A content without candidates leaves.
    pub(super) fn leave(&mut self, cohort: u32) {
        if let Some(slot) = self.all.get_mut(to_usize(cohort)) {
            slot.len = slot.len.saturating_sub(1);
            if slot.len == 0 {
                self.by_age.remove(cohort);
                self.by_age.push_back(FREE, cohort);
            }
        }
    }

    /// A cohort has got its first candidate or lost its last.
    pub(super) fn set_candidates(&mut self, cohort: u32, any: bool) {
        let Cohort { rank, bin, .. } = self.get(cohort);
        let number = number(rank, bin);
        if any && !self.with_candidates.contains(cohort) {
            self.with_candidates.push_back(number, cohort);
        } else if !any {
            self.with_candidates.remove(cohort);
        }
        self.update_filled(number);
    }

    fn update_filled(&mut self, number: u32) {
        if let Some(place) = self.place.get(to_usize(number)) {
            self.filled.set(*place, self.with_candidates.front(number).is_some());
        }
    }

    /// A request begins: cohorts that are old enough go on to the next bin.
    pub(super) fn advance(&mut self, now: u32, rates: &mut Rates) {
        for bin in 0_u8.. {
            let Some(end) = bin_end(bin) else { break };
            while let Some(cohort) = self.by_age.front(u32::from(bin)) {
                if now.wrapping_sub(self.get(cohort).since) < end {
                    break;
                }
                self.age(cohort, rates);
            }
        }
    }

    fn age(&mut self, cohort: u32, rates: &mut Rates) {
        let is_candidate = self.with_candidates.contains(cohort);
        if is_candidate {
            self.set_candidates(cohort, false);
        }
        if let Some(slot) = self.all.get_mut(to_usize(cohort)) {
            slot.bin = slot.bin.saturating_add(1);
            let Cohort { class, bin, len, .. } = *slot;
            rates.reached(class, bin, count(len));
            self.by_age.remove(cohort);
            self.by_age.push_back(u32::from(bin), cohort);
        }
        if is_candidate {
            self.set_candidates(cohort, true);
        }
    }

    /// The oldest cohort with candidates among those whose rate is least.
    pub(super) fn first(&self) -> Option<u32> {
        let number = self.at_place.get(to_usize(self.filled.first()?))?;
        self.with_candidates.front(*number)
    }

    /// Takes over a new order of rates, which names every (rank, bin) in use.
    pub(super) fn rank(&mut self, order: &[(f32, u32)]) {
        self.filled.clear();
        self.at_place.clear();
        for (place, (_, number)) in order.iter().enumerate() {
            let number = *number;
            self.at_place.push(number);
            if let Some(slot) = self.place.get_mut(to_usize(number)) {
                *slot = to_u32(place);
            }
            self.update_filled(number);
        }
    }
}

/// A number of contents; more than 65535 at once count as that many.
fn count(len: u32) -> f32 {
    f32::from(u16::try_from(len).unwrap_or(u16::MAX))
}
