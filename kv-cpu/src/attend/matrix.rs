//! One tile of K and V against all query rows of a unit of work at once, by products of matrices.
//!
//! Every row scores every token of the tile; what a row does not see gets no weight. Where a result
//! is not finite, the unit of work runs again as in `tile.rs`, each row with the tokens that it
//! sees.
#![expect(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    reason = "kernel code: rows and tokens are counted by the unit that owns the memory"
)]
use super::tile::{Seen, Tile, Tiles, bias_rows, weigh};
use super::{Heads, Job};
use crate::encoding::Element;
use crate::kernel::{BLOCK, Matrix, Memory, Queries, QueryShape, TILE};
use crate::num::to_usize;
use crate::workspace::AlignedFloats;

/// Query rows of a unit of work as they are multiplied, and memory for tiles.
pub(super) struct OnMatrix<'s> {
    matrix: Matrix,
    queries: Queries<'s>,
    memory: Memory<'s>,
}

impl<'s> OnMatrix<'s> {
    /// Takes so many query rows, all of one kv head: units have several for few rows only.
    pub(super) fn new(
        matrix: Matrix,
        (q, rows): (&[f32], usize),
        heads: Heads,
        (words, memory): (&'s mut AlignedFloats, &'s mut AlignedFloats),
    ) -> Self {
        assert_eq!(q.len(), rows * heads.stride_k, "rows of one kv head");
        let shape = QueryShape { rows, dim: heads.dim_k, terms: matrix.terms(q) };
        let words: &mut [u32] = bytemuck::cast_slice_mut(words.get(shape.words()));
        matrix.queries((q, heads.stride_k), shape, words);
        let memory = memory.get(Memory::words(heads.dim_k, heads.dim_v));
        let memory = Memory::new(bytemuck::cast_slice_mut(memory), heads.dim_k, heads.dim_v);
        Self { matrix, queries: Queries { shape, words }, memory }
    }

    /// Whether all sums, in rows `stride` floats apart, are finite, and may be taken for what they
    /// are.
    pub(super) fn is_finite(&self, state: &Tiles<'_>, stride: usize) -> bool {
        self.matrix.is_finite(&state.out[..state.running.len() * stride])
            && state.running.iter().all(|row| row.sum.is_finite())
    }

    /// Lets all query rows meet a tile.
    pub(super) fn meet(
        &mut self,
        job: &Job<'_>,
        state: &mut Tiles<'_>,
        tile: &Tile<'_>,
        seen: &Seen<'_>,
    ) {
        let (rows, stride) = (state.running.len(), job.heads.stride_v);
        let exact = job.out.element() == Element::F32;
        bias_rows(job, state, tile);
        self.matrix.stage([&tile.k, &tile.v], &mut self.memory, &mut state.ahead);
        let (begin, end) = seeing(rows, seen, tile);
        for first in (begin..end).step_by(BLOCK) {
            let scores = &mut state.scores[first * TILE..][..BLOCK * TILE];
            self.matrix.scores(&self.queries, first, &self.memory, scores);
        }
        weigh_all(job, state, (begin, end), seen);
        for first in (begin..end).step_by(BLOCK) {
            let weights = &mut state.scores[first * TILE..][..BLOCK * TILE];
            let out = &mut state.out[first * stride..][..BLOCK * stride];
            self.matrix.sums(&mut self.memory, weights, exact, (out, stride));
        }
    }
}

/// The rows that see some of a tile, from a multiple of [`BLOCK`] on.
fn seeing(rows: usize, seen: &Seen<'_>, tile: &Tile<'_>) -> (usize, usize) {
    // Both ends of what a query sees move one way: some rows do not see it yet, some no longer.
    let (mut begin, mut end) = (0, rows);
    while begin + BLOCK < end && seen.by(begin + BLOCK - 1).1 == 0 {
        begin += BLOCK;
    }
    while begin + BLOCK < end && seen.by((end - 1) / BLOCK * BLOCK).0 == tile.k.rows.len() {
        end = (end - 1) / BLOCK * BLOCK;
    }
    (begin, end)
}

/// Makes the scores of some rows weights of the tokens that they see, and zero for others.
fn weigh_all(job: &Job<'_>, state: &mut Tiles<'_>, (begin, end): (usize, usize), seen: &Seen<'_>) {
    // Both ends of what a query sees move one way, so those between see what these do.
    let range = seen.by(begin);
    if range == seen.by(end - 1) {
        weigh_alike(job, state, (begin, end - begin), range);
        return;
    }
    // The weight of minus infinity is zero, if scaling leaves it what it is.
    let together = job.options.cap().is_none() && job.options.scale() > 0.0;
    let group = to_usize(job.heads.group);
    let mut first = begin;
    while first < end {
        let (low, high) = seen.by(first);
        let next = ((first / group + 1) * group).min(end);
        if together {
            for scores in state.scores[first * TILE..next * TILE].chunks_exact_mut(TILE) {
                scores[..low].fill(f32::NEG_INFINITY);
                scores[high..].fill(f32::NEG_INFINITY);
            }
        } else {
            weigh_alike(job, state, (first, next - first), (low, high));
        }
        first = next;
    }
    if together {
        weigh(job, state, (begin, end - begin), (0, TILE));
    }
}

/// The same for rows that see the same tokens.
fn weigh_alike(
    job: &Job<'_>,
    state: &mut Tiles<'_>,
    (row, rows): (usize, usize),
    range: (usize, usize),
) {
    if range.0 < range.1 {
        weigh(job, state, (row, rows), range);
    }
    for weights in state.scores[row * TILE..][..rows * TILE].chunks_exact_mut(TILE) {
        weights[..range.0].fill(0.0);
        weights[range.1..].fill(0.0);
    }
}
