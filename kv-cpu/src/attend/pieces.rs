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
use super::parts::{KvPiece, Parts};
use super::unit::Unit;
use crate::kernel::{Lanes, Piece, PieceRows, Running, Weights};
use crate::num::to_u32;
use crate::rows::PlaneRows;

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
    let mut pieces = [KvPiece::EMPTY; 3];
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
fn meet_piece<'a>(
    job: &'a Job<'_>,
    first_head: u32,
    queries: &'a mut QueryRows<'_>,
    (now, next): (&KvPiece<'a>, &KvPiece<'a>),
) {
    let (rows, heads) = (queries.rows, job.heads);
    let (head, first) = (first_head + to_u32(now.head), now.head * rows);
    let of = |plane: &'a PlaneRows<'_>, index: usize| PieceRows {
        now: now.parts[index],
        next: next.parts[index],
        layout: plane.rows(now.is_wide),
        scale: plane.scale(head, now.is_wide),
    };
    job.cpu.kernels.meet_piece(&mut Piece {
        k: of(&job.k, 0),
        v: of(&job.v, 1),
        tokens: now.tokens,
        rows,
        q: &queries.q[first * heads.stride_k..],
        q_stride: heads.stride_k,
        scale: job.options.scale(),
        exact: job.has_exact_sums(),
        lanes: &mut queries.lanes[now.head],
        weights: queries.weights,
        out: &mut queries.out[first * heads.stride_v..],
        out_stride: heads.stride_v,
    });
}
