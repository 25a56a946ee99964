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
use super::unit::{Scratch, Unit};
use crate::kernel::{Lanes, Meeting, Running, Strip, Weights};
use crate::num::to_u32;

/// As how many query rows those of a unit, so many a kv head, meet the context so, if they do:
/// those of one query, which all see the same.
pub(super) fn rows(job: &Job<'_>, unit: &Unit, rows: usize) -> Option<usize> {
    let layouts = [job.k.rows(false), job.k.rows(true), job.v.rows(false), job.v.rows(true)];
    let is_one = unit.q_end - unit.q_begin == 1
        && job.options.cap().is_none()
        && !job.k.layout().has_block_means();
    job.cpu.kernels.piece_rows(rows, layouts).filter(|_| is_one)
}

/// Lets the query rows that are loaded, `rows` a kv head and `all` of them, meet the pieces of a
/// unit, with rows of zeros behind those of a head if need be.
pub(super) fn meet(
    job: &Job<'_>,
    unit: (&Unit, &PlannedSequence),
    scratch: &mut Scratch,
    (rows, as_rows, all): (usize, usize, usize),
) {
    let (stride_k, stride_v) = (job.heads.stride_k, job.heads.stride_v);
    let q = scratch.q.get(all * stride_k);
    let bias = scratch.bias.get(all);
    let out = scratch.out.get(all * stride_v);
    let (lanes, running) = (&mut scratch.lanes, &mut scratch.running);
    let count = all / rows * as_rows;
    let words = bytemuck::cast_slice_mut(scratch.queries.get(count * stride_k / 2));
    let weights = &mut [0.0; _];
    if rows == as_rows {
        let queries = QueryRows { rows, q, words, bias, out, running, lanes, weights };
        meet_pieces(job, unit, queries);
        return;
    }
    let padded_q = scratch.k.get(count * stride_k);
    let padded_bias = scratch.tile_bias.get(count);
    let padded_out = scratch.v.get(count * stride_v);
    for padded in [&mut *padded_q, &mut *padded_bias, &mut *padded_out] {
        padded.fill(0.0);
    }
    copy_runs((q, rows * stride_k), (padded_q, as_rows * stride_k));
    copy_runs((bias, rows), (padded_bias, as_rows));
    running.resize(count, Running::EMPTY);
    let queries = QueryRows {
        rows: as_rows,
        q: padded_q,
        words,
        bias: padded_bias,
        out: padded_out,
        running,
        lanes,
        weights,
    };
    meet_pieces(job, unit, queries);
    copy_runs((padded_out, as_rows * stride_v), (out, rows * stride_v));
    for index in 0..all {
        running[index] = running[index / rows * as_rows + index % rows];
    }
}

/// Copies runs of so many values to others, which are longer or shorter.
fn copy_runs((from, from_len): (&[f32], usize), (to, to_len): (&mut [f32], usize)) {
    let len = from_len.min(to_len);
    for (from, to) in from.chunks_exact(from_len).zip(to.chunks_exact_mut(to_len)) {
        to[..len].copy_from_slice(&from[..len]);
    }
}

/// What the query rows of a unit are, and what they come to: those of each kv head one after
/// another.
struct QueryRows<'s> {
    /// Of a kv head, such a number as [`rows`] answers.
    rows: usize,
    q: &'s [f32],
    /// Room for them as words.
    words: &'s mut [u32],
    bias: &'s [f32],
    out: &'s mut [f32],
    running: &'s mut [Running],
    lanes: &'s mut Vec<Lanes>,
    weights: &'s mut Weights,
}

/// Lets the query rows of each head meet all keys that the unit's query sees.
fn meet_pieces(job: &Job<'_>, (unit, sequence): (&Unit, &PlannedSequence), queries: QueryRows<'_>) {
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
