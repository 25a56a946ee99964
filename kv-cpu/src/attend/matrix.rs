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
use super::Job;
use super::tile::{Seen, Tile, Tiles, bias_rows, weigh};
use crate::encoding::Encoding;
use crate::kernel::{BLOCK, Columns, GROUP, Matrix, Memory, Queries, QueryShape, TILE, VISIT};
use crate::num::to_usize;
use crate::rows::PlaneRows;
use crate::workspace::AlignedFloats;

/// Query rows of a unit of work as they are multiplied, and memory for tiles.
pub(super) struct OnMatrix<'s> {
    matrix: Matrix,
    /// Of each kv head.
    shape: QueryShape,
    /// Those of all heads: for each, so many words for rows of 16 bits, for rows of codes, and for
    /// rows of signed bytes.
    words: &'s [u32],
    of_head: [usize; 3],
    memory: Memory<'s>,
}

impl<'s> OnMatrix<'s> {
    /// Takes the query rows of some kv heads, `rows` each; fewer than a block are columns.
    pub(super) fn new(
        mut matrix: Matrix,
        (q, rows): (&[f32], usize),
        job: &Job<'_>,
        (words, memory): (&'s mut AlignedFloats, &'s mut AlignedFloats),
    ) -> Self {
        let heads = job.heads;
        let (dim, terms) = (heads.dim_k, matrix.terms(q));
        let wanted = [true, false].map(|is_wide| Columns::of(job.k.rows(is_wide).encoding()));
        let (shape, of_head) = if rows < BLOCK {
            let bytes = wanted.contains(&Columns::Bytes);
            let shape = matrix.narrow((rows, dim, terms), job.is_exact(), bytes);
            let (terms, bytes) = (shape.column_words(), shape.byte_words());
            let all = [(Columns::Words, terms), (Columns::Codes, terms), (Columns::Bytes, bytes)];
            (shape, all.map(|(columns, words)| if wanted.contains(&columns) { words } else { 0 }))
        } else {
            let shape = QueryShape { rows, dim, terms, columns: BLOCK };
            (shape, [shape.words(), 0, 0])
        };
        let of_rows = q.chunks_exact(rows * heads.stride_k);
        let len = of_head.iter().sum();
        let words: &mut [u32] = bytemuck::cast_slice_mut(words.get(of_rows.len() * len));
        for (q, words) in of_rows.zip(words.chunks_exact_mut(len)) {
            let (q, (words, others)) = ((q, heads.stride_k), words.split_at_mut(of_head[0]));
            if rows >= BLOCK {
                matrix.queries(q, shape, words);
                continue;
            }
            let (codes, bytes) = others.split_at_mut(of_head[1]);
            let all = [(words, Columns::Words), (codes, Columns::Codes), (bytes, Columns::Bytes)];
            for (words, columns) in all.into_iter().filter(|(words, _)| !words.is_empty()) {
                matrix.columns(q, shape, (words, columns));
            }
        }
        let memory = memory.get(Memory::len(heads.dim_k, heads.dim_v));
        let memory = Memory::new(memory, heads.dim_k, heads.dim_v);
        Self { matrix, shape, words, of_head, memory }
    }

    /// Whether all sums are finite, and may be taken for what they are.
    pub(super) fn is_finite(&self, state: &Tiles<'_>) -> bool {
        self.matrix.is_finite(state.out) && state.running.iter().all(|row| row.sum.is_finite())
    }

    /// Lets all query rows of a kv head meet a tile.
    pub(super) fn meet(
        &mut self,
        job: &Job<'_>,
        state: &mut Tiles<'_>,
        tile: &Tile<'_>,
        seen: &Seen<'_>,
    ) {
        bias_rows(job, state, tile);
        let [words, codes, _] = self.of_head;
        let len = self.of_head.iter().sum();
        let (words, others) = self.words[state.head * len..][..len].split_at(words);
        let (codes, bytes) = others.split_at(codes);
        let queries = Queries { shape: self.shape, words, codes, bytes };
        if self.shape.rows < BLOCK {
            self.meet_few(job, state, (tile, seen), &queries);
        } else {
            self.meet_many(job, state, (tile, seen), &queries);
        }
    }

    fn meet_few(
        &mut self,
        job: &Job<'_>,
        state: &mut Tiles<'_>,
        (tile, seen): (&Tile<'_>, &Seen<'_>),
        queries: &Queries<'_>,
    ) {
        let (rows, stride) = (self.shape.rows, job.heads.stride_v);
        let k = (&tile.k, &mut self.memory);
        self.matrix.scores_of_few(queries, k, state.scores, state.ahead);
        // The unit would sleep if softmax waited for memory, so what is next is not asked for
        // there.
        let lines = state.ahead.pause();
        let padded = tile.k.rows.len().next_multiple_of(GROUP);
        weigh_all(job, state, (0, rows), (seen, padded));
        state.ahead.resume(lines);
        let weights = (&mut state.scores[..rows * TILE], job.is_exact());
        let v = (&tile.v, &mut self.memory);
        self.matrix.sums_of_few(v, weights, (state.out, stride), state.ahead);
    }

    fn meet_many(
        &mut self,
        job: &Job<'_>,
        state: &mut Tiles<'_>,
        (tile, seen): (&Tile<'_>, &Seen<'_>),
        queries: &Queries<'_>,
    ) {
        let stride = job.heads.stride_v;
        self.matrix.stage([&tile.k, &tile.v], &mut self.memory, state.ahead);
        let (begin, end) = seeing(self.shape.rows, seen, tile);
        for first in (begin..end).step_by(BLOCK) {
            let scores = &mut state.scores[first * TILE..][..BLOCK * TILE];
            self.matrix.scores(queries, first, &self.memory, scores);
        }
        let padded = tile.k.rows.len().next_multiple_of(VISIT);
        weigh_all(job, state, (begin, end), (seen, padded));
        for first in (begin..end).step_by(BLOCK) {
            let weights = &mut state.scores[first * TILE..][..BLOCK * TILE];
            let out = &mut state.out[first * stride..][..BLOCK * stride];
            self.matrix.sums(&mut self.memory, weights, job.is_exact(), (out, stride));
        }
    }
}

/// Whether so many query rows of a kv head are multiplied as matrices: a product of blocks takes as
/// long for one as for sixteen, so vectors are faster with few (`docs/performance.md`).
pub(super) fn is_worth_it(job: &Job<'_>, rows: usize) -> bool {
    let fewest = |plane: &PlaneRows<'_>| match plane.rows(false).encoding() {
        Encoding::E4m3 => 1,
        Encoding::E5m2 => 2,
        Encoding::Int8 => 3,
        Encoding::Bf16 | Encoding::Bf16Pairs => 5,
        _ => 13,
    };
    job.by_matrix && rows >= fewest(&job.k).max(fewest(&job.v))
}

/// Tokens of a tile for so many query rows of a kv head. Each tile costs something of its own, but
/// a tile of K should fit the first cache beside others; many rows keep it in blocks.
pub(super) fn tokens(job: &Job<'_>, rows: usize) -> usize {
    let bytes = job.k.rows(false).bytes();
    if rows >= BLOCK || bytes * TILE <= BYTES_OF_FEW { TILE } else { VISIT }
}
/// Bytes of a tile of K for few rows.
const BYTES_OF_FEW: usize = 20 << 10;

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

/// Makes the scores of some rows weights of the tokens that they see, and zero for others, `padded`
/// in all.
fn weigh_all(
    job: &Job<'_>,
    state: &mut Tiles<'_>,
    (begin, end): (usize, usize),
    (seen, padded): (&Seen<'_>, usize),
) {
    // Both ends of what a query sees move one way, so those between see what these do.
    let range = seen.by(begin);
    if range == seen.by(end - 1) {
        weigh_alike(job, state, (begin, end - begin), (range, padded));
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
                scores[high..padded].fill(f32::NEG_INFINITY);
            }
        } else {
            weigh_alike(job, state, (first, next - first), ((low, high), padded));
        }
        first = next;
    }
    if together {
        weigh(job, state, (begin, end - begin), (0, padded));
    }
}

/// The same for rows that see the same tokens.
fn weigh_alike(
    job: &Job<'_>,
    state: &mut Tiles<'_>,
    (row, rows): (usize, usize),
    (range, padded): ((usize, usize), usize),
) {
    if range.0 < range.1 {
        weigh(job, state, (row, rows), range);
    }
    for weights in state.scores[row * TILE..][..rows * TILE].chunks_exact_mut(TILE) {
        weights[..range.0].fill(0.0);
        weights[range.1..padded].fill(0.0);
    }
}
