//! The keys of a unit in the order in which memory has them: block by block, head by head inside of
//! a block.
#![expect(
    clippy::arithmetic_side_effects,
    reason = "kernel code: indices come from the plan's guarantees and the unit's own bounds"
)]
use kv_core::plan::PlannedSequence;

use super::Job;
use super::reach::Reach;
use super::unit::Unit;
use super::walk::{Alike, Found, find};
use crate::kernel::{PIECE, Part, Strip, TILE};
use crate::num::to_usize;

/// The keys of a unit, those of all heads that follow each other at once.
pub(super) struct Strips<'j, 'a> {
    job: &'j Job<'a>,
    sequence: &'j PlannedSequence,
    reach: Reach,
    alike: Alike<'j>,
    /// First kv head, and how many.
    heads: (u32, usize),
    found: [Found<'a>; 2],
    is_wide: bool,
    /// Position behind what is found, and which run of that is next.
    position: u32,
    run: usize,
}

impl<'j, 'a> Strips<'j, 'a> {
    pub(super) fn new(job: &'j Job<'a>, unit: &Unit, sequence: &'j PlannedSequence) -> Self {
        let reach = Reach::of(&job.options, sequence, (unit.q_begin, unit.q_end))
            .within(unit.kv_begin, unit.kv_end);
        let (first, end) = unit.kv_heads;
        Self {
            job,
            sequence,
            reach,
            alike: Alike::new(job, sequence, TILE),
            heads: (first, to_usize(end - first)),
            found: [const { Found::new() }; 2],
            is_wide: false,
            position: unit.kv_begin,
            run: 0,
        }
    }

    /// Whether there was a next one, and whether its rows are such as are kept in 16 bits; an empty
    /// one otherwise.
    pub(super) fn next(&mut self, strip: &mut Strip<'a>) -> Option<bool> {
        if self.run == self.found[0].len() {
            let bounds = self.alike.tile(self.reach, self.position);
            if bounds.0 >= bounds.1 {
                *strip = Strip::EMPTY;
                return None;
            }
            find(self.job, self.sequence, bounds, &mut self.found);
            self.is_wide = self.alike.is_wide(bounds.0);
            (self.position, self.run) = (bounds.1, 0);
        }
        strip.heads = self.heads.1;
        strip.tokens = self.found[0].tokens(self.run);
        for (plane, found) in strip.planes.iter_mut().zip(&self.found) {
            *plane = found.of_heads(self.run, self.heads);
        }
        self.run += 1;
        Some(self.is_wide)
    }
}

/// K and V of some tokens of a kv head, which is counted from the unit's first one.
#[derive(Clone, Copy)]
pub(super) struct KvPart<'a> {
    pub(super) head: usize,
    pub(super) tokens: usize,
    pub(super) planes: [Part<'a>; 2],
}

impl KvPart<'_> {
    /// No tokens.
    pub(super) const EMPTY: Self =
        Self { head: 0, tokens: 0, planes: [Part { rows: &[], stride: 0 }; 2] };
}

/// The keys of a unit, [`PIECE`] tokens of a head at a time at most.
pub(super) struct Parts<'j, 'a> {
    strips: Strips<'j, 'a>,
    strip: Strip<'a>,
    /// The next head and token of the strip.
    next: (usize, usize),
}

impl<'j, 'a> Parts<'j, 'a> {
    pub(super) fn new(job: &'j Job<'a>, unit: &Unit, sequence: &'j PlannedSequence) -> Self {
        Self { strips: Strips::new(job, unit, sequence), strip: Strip::EMPTY, next: (0, 0) }
    }

    /// The next part, if there is one left; an empty one otherwise.
    #[inline]
    pub(super) fn next(&mut self, part: &mut KvPart<'a>) -> bool {
        let (head, token) = if self.next.0 < self.strip.heads {
            self.next
        } else if self.strips.next(&mut self.strip).is_some() {
            (0, 0)
        } else {
            *part = KvPart::EMPTY;
            return false;
        };
        (part.head, part.tokens) = (head, (self.strip.tokens - token).min(PIECE));
        for (part_of, plane) in part.planes.iter_mut().zip(&self.strip.planes) {
            *part_of = plane.part(head, (token, part.tokens));
        }
        self.next = self.strip.behind((head, token), PIECE);
        true
    }
}
