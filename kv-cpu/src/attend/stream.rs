//! A query of one or two heads a kv head against a context in the order in which memory has it:
//! block by block, head by head inside of a block, a little of K and a little of V by turns.
//!
//! That is for rows that are stored as they came and need no decoding: few query rows wait for
//! memory then, which gives most in that order (`docs/performance.md`). Others meet pieces
//! (`pieces.rs`) or tiles (`tile.rs`).
#![expect(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    reason = "kernel code: indices come from the plan's guarantees and the unit's own bounds"
)]
use kv_core::plan::PlannedSequence;

use super::Job;
use super::parts::{KvPart, Parts};
use super::unit::Unit;
use crate::kernel::{Running, Stream};

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
    let (mut some, mut other) = (KvPart::EMPTY, KvPart::EMPTY);
    let (mut now, mut next) = (&mut some, &mut other);
    let mut is_there = parts.next(now);
    while is_there {
        is_there = parts.next(next);
        let KvPart { head, tokens, .. } = *now;
        let mut args = Stream {
            q: &q[head * q_rows..][..q_rows],
            q_stride: heads.stride_k,
            now: &now.planes,
            next: &next.planes,
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
