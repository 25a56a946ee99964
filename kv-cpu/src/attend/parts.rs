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
use crate::kernel::{PIECE, Part, TILE};
use crate::num::{to_u32, to_usize};

/// K and V of some tokens of a kv head, which is counted from the unit's first one.
#[derive(Clone, Copy)]
pub(super) struct KvPiece<'a> {
    pub(super) head: usize,
    pub(super) tokens: usize,
    /// Whether they are such as are kept in 16 bits.
    pub(super) is_wide: bool,
    pub(super) parts: [Part<'a>; 2],
}

impl KvPiece<'_> {
    /// No tokens.
    pub(super) const EMPTY: Self = Self {
        head: 0,
        tokens: 0,
        is_wide: false,
        parts: [Part { rows: &[], stride: 0, bytes: 0 }; 2],
    };
}

/// The parts of a unit's keys, in the order of memory.
pub(super) struct Parts<'j, 'a> {
    job: &'j Job<'a>,
    sequence: &'j PlannedSequence,
    reach: Reach,
    alike: Alike<'j>,
    /// First kv head, and how many.
    heads: (u32, usize),
    found: [Found<'a>; 2],
    is_wide: bool,
    /// Position behind what is found.
    position: u32,
    /// Which run of that, which head, and which token of the run is next.
    run: usize,
    head: usize,
    token: usize,
}

impl<'j, 'a> Parts<'j, 'a> {
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
            head: 0,
            token: 0,
        }
    }

    /// The next piece, if there is one left; an empty one otherwise.
    #[inline]
    pub(super) fn next(&mut self, piece: &mut KvPiece<'a>) -> bool {
        if self.run == self.found[0].len() {
            let bounds = self.alike.tile(self.reach, self.position);
            if bounds.0 >= bounds.1 {
                *piece = KvPiece::EMPTY;
                return false;
            }
            find(self.job, self.sequence, bounds, &mut self.found);
            self.is_wide = self.alike.is_wide(bounds.0);
            (self.position, self.run) = (bounds.1, 0);
        }
        let all = self.found[0].tokens(self.run);
        let (head, tokens) = (self.head, (all - self.token).min(PIECE));
        let place = (self.heads.0 + to_u32(head), self.token, tokens);
        (piece.head, piece.tokens, piece.is_wide) = (head, tokens, self.is_wide);
        for (part, found) in piece.parts.iter_mut().zip(&self.found) {
            *part = found.part(self.run, place);
        }
        self.token += tokens;
        if self.token == all {
            (self.token, self.head) = (0, head + 1);
        }
        if self.head == self.heads.1 {
            (self.head, self.run) = (0, self.run + 1);
        }
        true
    }
}
