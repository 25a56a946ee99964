//! The exact merge of context splits.
//!
//! Dao et al., "Flash-Decoding for long-context inference" (2023): the row and the sum of every
//! split are relative to its own maximum, so they are rescaled to the common maximum and added,
//! split by split in order.
use kv_cpu_kernels::Partial;

use super::call::AttendCall;
use super::partials::Partials;
use super::plan::Merge;
use crate::layout::RowAt;
use crate::scratch::Scratch;

/// Merges the splits of every head of one query.
pub(super) fn run(
    call: &AttendCall<'_>,
    merge: &Merge,
    scratch: &mut Scratch,
    partials: &Partials<'_>,
) {
    let sequence = call.sequence(merge.entry);
    let at = RowAt { entry: merge.entry, start: sequence.q_start, token: merge.query };
    let row = scratch.row(call.heads.dim_v);
    for (head, first) in (0..call.q.rows().heads()).zip(merge.first..) {
        let mut total = Partial::EMPTY;
        row.fill(0.0);
        let mut index = first;
        for _ in 0..merge.splits {
            // SAFETY: the work items are done, so no thread writes partial results any more.
            let (partial, values) = unsafe { partials.get(index, call.heads) };
            let merged = total.merge(partial);
            if partial.sum != 0.0 {
                let (old, new) = (total.factor_to(merged), partial.factor_to(merged));
                call.cpu.kernels.combine(row, old, values, new);
            }
            total = merged;
            index += merge.stride;
        }
        // SAFETY: each query of a split context is one merge, and its work items finish no row.
        unsafe { call.finish(at, head, total, row) };
    }
}
