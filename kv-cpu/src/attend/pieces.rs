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
use super::parts::Strips;
use super::unit::Unit;
use crate::kernel::{Lanes, Meeting, Running, Strip, Weights};
use crate::num::to_u32;

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
    /// Room for them as words.
    pub(super) words: &'s mut [u32],
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
    queries: QueryRows<'_>,
) {
    let QueryRows { rows, q, words, bias, out, running, lanes, weights } = queries;
    let scales = |head: usize, is_wide: bool| {
        [&job.k, &job.v].map(|plane| plane.scale(unit.kv_heads.0 + to_u32(head), is_wide))
    };
    lanes.clear();
    let biases = bias.chunks(rows).enumerate();
    lanes.extend(biases.map(|(head, bias)| Lanes::new(bias, scales(head, false))));
    let exact = job.has_exact_sums();
    if let Some(kind) = job.cpu.kernels.words(job.k.rows(false), exact) {
        let stride = rows * job.heads.stride_k;
        let heads = lanes.iter_mut().zip(q.chunks(stride).zip(words.chunks_mut(stride / 2)));
        for (lanes, (q, words)) in heads {
            lanes.put_words(kind, (q, rows, job.k.is_in_pairs()), words);
        }
    }
    let mut strips = Strips::new(job, unit, sequence);
    // The one at hand, and the two behind it.
    let mut ring = [(Strip::EMPTY, None); 3];
    for (strip, is_wide) in &mut ring {
        *is_wide = strips.next(strip);
    }
    let (mut at, mut were_wide) = (0, false);
    while let (strip, Some(is_wide)) = &ring[at] {
        if *is_wide != were_wide {
            were_wide = *is_wide;
            let heads = lanes.iter_mut().enumerate();
            heads.for_each(|(head, lanes)| lanes.set_scales(scales(head, were_wide)));
        }
        job.cpu.kernels.meet_strip(&mut Meeting {
            strip,
            next: [&ring[(at + 1) % 3].0, &ring[(at + 2) % 3].0],
            layouts: [job.k.rows(were_wide), job.v.rows(were_wide)],
            rows,
            q,
            q_stride: job.heads.stride_k,
            words,
            scale: job.options.scale(),
            exact,
            lanes,
            weights,
            out,
            out_stride: job.heads.stride_v,
        });
        ring[at].1 = strips.next(&mut ring[at].0);
        at = (at + 1) % 3;
    }
    for (index, running) in running.iter_mut().enumerate() {
        *running = lanes[index / rows].running(index % rows, rows);
    }
}
