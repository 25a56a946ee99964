//! A query of a few heads a kv head against a context in the order in which memory has it, whatever
//! its rows are stored in: pieces of a block, which all of its query rows meet at once.
//!
//! Where several queries come together they see different tokens, and meet tiles (`tile.rs`).
#![expect(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    reason = "kernel code: rows and heads are counted by the unit that owns the memory"
)]
use kv_core::plan::PlannedSequence;

use super::Job;
use super::parts::{Parts, Piece};
use super::unit::Unit;
use crate::kernel::{Lanes, Running, SumPiece, WeighPiece, Weights};
use crate::num::to_u32;

/// Pieces of fewer bytes of K are asked for two ahead: one is over before memory answers.
const BYTES_AHEAD: usize = 4 << 10;

/// Whether the query rows of a unit, so many a kv head, meet the context so: those of one query,
/// which all see the same.
pub(super) fn is_worth_it(job: &Job<'_>, unit: &Unit, rows: usize) -> bool {
    let layouts = [job.k.rows(false), job.k.rows(true), job.v.rows(false), job.v.rows(true)];
    unit.q_end - unit.q_begin == 1
        && job.options.cap().is_none()
        && !job.k.layout().has_block_means()
        && job.cpu.kernels.has_pieces(rows, layouts)
}

/// What the query rows of a unit are, and what they come to: those of each kv head one after
/// another.
pub(super) struct QueryRows<'s> {
    /// Of a kv head.
    pub(super) rows: usize,
    pub(super) q: &'s [f32],
    pub(super) bias: &'s [f32],
    pub(super) out: &'s mut [f32],
    pub(super) running: &'s mut [Running],
    pub(super) lanes: &'s mut Vec<Lanes>,
    pub(super) weights: &'s mut Weights,
}

/// Lets the query rows of each head meet all keys that the unit's query sees.
pub(super) fn meet(
    job: &Job<'_>,
    (unit, sequence): (&Unit, &PlannedSequence),
    mut queries: QueryRows<'_>,
) {
    let rows = queries.rows;
    queries.lanes.clear();
    queries.lanes.extend(queries.bias.chunks(rows).map(Lanes::new));
    let mut parts = Parts::new(job, unit, sequence);
    // The one at hand, and the two behind it.
    let mut pieces = [Piece::EMPTY; 3];
    for piece in &mut pieces {
        parts.next(piece);
    }
    let mut at = 0;
    while pieces[at].tokens > 0 {
        let now = &pieces[at];
        let is_short = now.parts[0].rows.len() < BYTES_AHEAD;
        let next = &pieces[(at + if is_short { 2 } else { 1 }) % 3];
        meet_piece(job, unit.kv_heads.0, &mut queries, (now, next));
        parts.next(&mut pieces[at]);
        at = (at + 1) % 3;
    }
    for (index, running) in queries.running.iter_mut().enumerate() {
        *running = queries.lanes[index / rows].running(index % rows, rows);
    }
}

/// Lets the rows of a head meet a piece, while another one is asked for.
fn meet_piece(
    job: &Job<'_>,
    first_head: u32,
    queries: &mut QueryRows<'_>,
    (now, next): (&Piece<'_>, &Piece<'_>),
) {
    let (rows, heads, tokens) = (queries.rows, job.heads, now.tokens);
    let (head, first) = (first_head + to_u32(now.head), now.head * rows);
    let out = &mut queries.out[first * heads.stride_v..];
    job.cpu.kernels.weigh_piece(&mut WeighPiece {
        rows,
        q: &queries.q[first * heads.stride_k..],
        q_stride: heads.stride_k,
        k: now.parts[0],
        next: next.parts[0],
        layout: job.k.rows(now.is_wide),
        row_scale: job.k.scale(head, now.is_wide),
        tokens,
        scale: job.options.scale(),
        exact: job.has_exact_sums(),
        lanes: &mut queries.lanes[now.head],
        weights: queries.weights,
        out,
        out_stride: heads.stride_v,
    });
    job.cpu.kernels.sum_piece(&mut SumPiece {
        rows,
        weights: queries.weights,
        v: now.parts[1],
        next: next.parts[1],
        layout: job.v.rows(now.is_wide),
        row_scale: job.v.scale(head, now.is_wide),
        tokens,
        out,
        out_stride: heads.stride_v,
    });
}
