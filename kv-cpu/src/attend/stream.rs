//! A query of one or two heads a kv head against a context in the order in which memory has it:
//! block by block, head by head inside of a block, a little of K and a little of V by turns.
//!
//! That is for rows that are stored as they came and need no decoding: few query rows wait for
//! memory then, which gives most in that order (`docs/performance.md`). Others meet tiles, head by
//! head (`tile.rs`).
#![expect(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    reason = "kernel code: indices come from the plan's guarantees and the unit's own bounds"
)]
use kv_core::plan::PlannedSequence;

use super::Job;
use super::reach::Reach;
use super::unit::Unit;
use super::walk::{Found, find};
use crate::kernel::{Part, Running, Stream, TILE};
use crate::num::{to_u32, to_usize};

/// Tokens of a part: while it is at work the next one is asked for.
const TOKENS: usize = 16;

/// Whether the query rows of a unit, so many a kv head, meet the context so: those of one query,
/// which all see the same.
pub(super) fn is_worth_it(job: &Job<'_>, unit: &Unit, rows: usize) -> bool {
    let as_they_came = [&job.k, &job.v].iter().all(|plane| {
        let map = plane.layout().slot_map();
        plane.as_they_came().is_some() && map.sinks() == 0 && !map.has_tail()
    });
    unit.q_end - unit.q_begin == 1
        && as_they_came
        && job.options.cap().is_none()
        && job.cpu.kernels.has_stream(rows, [job.k.rows(false), job.v.rows(false)])
}

/// Lets the query rows of each head, so many, meet all keys that the unit's query sees.
pub(super) fn meet(
    job: &Job<'_>,
    (unit, sequence): (&Unit, &PlannedSequence),
    rows: usize,
    (q, out, running): (&[f32], &mut [f32], &mut [Running]),
) {
    let heads = job.heads;
    let (q_rows, out_rows) = (rows * heads.stride_k, rows * heads.stride_v);
    let mut parts = Parts::new(job, unit, sequence);
    // What was written just before is slow to copy, so places change and not what is there.
    let (mut some, mut other) = (Piece::default(), Piece::default());
    let (mut now, mut next) = (&mut some, &mut other);
    let mut is_there = parts.next(now);
    while is_there {
        is_there = parts.next(next);
        let Piece { head, tokens, .. } = *now;
        let mut args = Stream {
            q: &q[head * q_rows..][..q_rows],
            q_stride: heads.stride_k,
            now: &now.parts,
            next: &next.parts,
            layouts: [job.k.rows(false), job.v.rows(false)],
            tokens,
            scale: job.options.scale(),
            exact: job.has_exact_sums(),
            running: &mut running[head * rows..][..rows],
            out: &mut out[head * out_rows..][..out_rows],
            out_stride: heads.stride_v,
        };
        job.cpu.kernels.stream(&mut args);
        std::mem::swap(&mut now, &mut next);
    }
}

/// Some tokens of a kv head, counted from the unit's first one.
#[derive(Default)]
struct Piece<'a> {
    head: usize,
    tokens: usize,
    parts: [Part<'a>; 2],
}

/// The parts of a unit's keys, in the order of memory.
struct Parts<'j, 'a> {
    job: &'j Job<'a>,
    sequence: &'j PlannedSequence,
    reach: Reach,
    /// First kv head, and how many.
    heads: (u32, usize),
    found: [Found<'a>; 2],
    /// Position behind what is found.
    position: u32,
    /// Which run of that, which head, and which token of the run is next.
    run: usize,
    head: usize,
    token: usize,
}

impl<'j, 'a> Parts<'j, 'a> {
    fn new(job: &'j Job<'a>, unit: &Unit, sequence: &'j PlannedSequence) -> Self {
        let reach = Reach::of(&job.options, sequence, (unit.q_begin, unit.q_end))
            .within(unit.kv_begin, unit.kv_end);
        let (first, end) = unit.kv_heads;
        Self {
            job,
            sequence,
            reach,
            heads: (first, to_usize(end - first)),
            found: [const { Found::new() }; 2],
            position: unit.kv_begin,
            run: 0,
            head: 0,
            token: 0,
        }
    }

    /// The next piece, if there is one left.
    #[inline]
    fn next(&mut self, piece: &mut Piece<'a>) -> bool {
        if self.run == self.found[0].len() {
            let (from, end) = self.reach.seen_from(self.position);
            if from >= end {
                return false;
            }
            let tile = to_u32(TILE);
            self.position = from.saturating_add(tile - from % tile).min(end);
            find(self.job, self.sequence, (from, self.position), &mut self.found);
            self.run = 0;
        }
        let all = self.found[0].tokens(self.run);
        let (head, tokens) = (self.head, (all - self.token).min(TOKENS));
        let place = (self.heads.0 + to_u32(head), self.token, tokens);
        (piece.head, piece.tokens) = (head, tokens);
        for (part, found) in piece.parts.iter_mut().zip(&self.found) {
            (part.rows, part.stride) = found.part(self.run, place);
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
