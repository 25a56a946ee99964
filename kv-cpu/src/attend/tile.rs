//! One tile of K and V against the query rows of a unit: score, weigh, sum.
//!
//! Rows go a few at a time, so that each vector loaded from the tile serves all of them, and each
//! row meets exactly the tokens it sees. Knows nothing of blocks and tables.
#![expect(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    reason = "kernel code: rows and tokens are counted by the unit that owns the memory"
)]
use kv_core::plan::PlannedSequence;

use super::Job;
use super::unit::Unit;
use crate::encoding::{Element, RowLayout};
use crate::kernel::{
    Ahead, ROWS, RowScale, Running, Scores, Softmax, StoredRows, Sums, TILE, TileRows,
};
use crate::num::{to_u32, to_usize};

/// The state of a unit's rows between tiles, head by head.
pub(super) struct Tiles<'s> {
    /// Tokens of a tile.
    pub(super) tokens: usize,
    /// Which one of the unit's kv heads it is that meets a tile.
    pub(super) head: usize,
    pub(super) q: &'s [f32],
    /// What is added to every score of a query row.
    pub(super) bias: &'s [f32],
    /// The same for the tile at hand, with what its keys lack.
    pub(super) tile_bias: &'s mut [f32],
    pub(super) out: &'s mut [f32],
    pub(super) scores: &'s mut [f32],
    pub(super) running: &'s mut [Running],
    /// K and V of the next tile.
    pub(super) ahead: &'s mut Ahead<'s>,
}

impl Tiles<'_> {
    /// Those of one kv head, of as many rows as have scores.
    pub(super) fn of_head<'a>(&'a mut self, index: usize, ahead: &'a mut Ahead<'a>) -> Tiles<'a> {
        let rows = self.tile_bias.len();
        let part = |len: usize| index * len..(index + 1) * len;
        let heads = self.running.len() / rows;
        let (k, v) = (self.q.len() / heads, self.out.len() / heads);
        Tiles {
            tokens: self.tokens,
            head: index,
            q: &self.q[part(k)],
            bias: &self.bias[part(rows)],
            tile_bias: self.tile_bias,
            out: &mut self.out[part(v)],
            scores: self.scores,
            running: &mut self.running[part(rows)],
            ahead,
        }
    }
}

/// One tile of K and V.
pub(super) struct Tile<'t> {
    /// Positions of its tokens.
    pub(super) bounds: (u32, u32),
    pub(super) k: StoredRows<'t>,
    pub(super) v: StoredRows<'t>,
    /// The mean of the block that is off its keys, in f16.
    pub(super) k_mean: Option<&'t [u8]>,
}

/// Which tokens of a tile each query row sees.
pub(super) struct Seen<'a> {
    job: &'a Job<'a>,
    unit: &'a Unit,
    sequence: &'a PlannedSequence,
    /// Positions of the tile.
    bounds: (u32, u32),
}

impl<'a> Seen<'a> {
    pub(super) fn new(
        job: &'a Job<'a>,
        unit: &'a Unit,
        sequence: &'a PlannedSequence,
        tile: &Tile<'_>,
    ) -> Self {
        Self { job, unit, sequence, bounds: tile.bounds }
    }

    /// From one token of the tile to another, by a row.
    pub(super) fn by(&self, row: usize) -> (usize, usize) {
        let (begin, end) = self.bounds;
        let options = &self.job.options;
        let query = self.unit.q_begin + to_u32(row / to_usize(self.job.heads.group));
        let sinks = options.window().map_or(0, |_| options.num_sink_tokens());
        let (low, high) = options.visible(self.sequence, query);
        // A tile of sink tokens holds no other, and a query sees what lies before its end.
        let low = if begin < sinks { 0 } else { low };
        let (low, high) = (low.clamp(begin, end) - begin, high.clamp(begin, end) - begin);
        (to_usize(low), to_usize(high.max(low)))
    }
}

/// Lets all query rows meet a tile. All of them score before any of them sums, so that K is not
/// pushed out of the first cache by V.
pub(super) fn meet(job: &Job<'_>, state: &mut Tiles<'_>, tile: &Tile<'_>, seen: &Seen<'_>) {
    let rows = state.running.len();
    bias_rows(job, state, tile);
    // Both ends of what a query sees move one way, so those between see what these do.
    let (range, last) = (seen.by(0), seen.by(rows.saturating_sub(1)));
    if range == last {
        score(job, state, tile, (0, rows), range);
        weigh(job, state, (0, rows), range);
        sum(job, state, tile, (0, rows), range);
        return;
    }
    let mut first = 0;
    while first < rows {
        let neighbours = Neighbours::new(first, rows, seen);
        weigh_rows(job, state, tile, &neighbours);
        first += neighbours.count;
    }
    first = 0;
    while first < rows {
        let neighbours = Neighbours::new(first, rows, seen);
        sum_rows(job, state, tile, &neighbours);
        first += neighbours.count;
    }
}

/// A few neighbouring query rows: they meet the tokens that all of them see together, the others
/// row by row, in the order of positions.
struct Neighbours {
    first: usize,
    count: usize,
    /// Tokens of the tile that each row sees.
    ranges: [(usize, usize); ROWS],
    /// Those that all rows see.
    common: (usize, usize),
}

impl Neighbours {
    /// The rows from `first` on that are worked at together.
    fn new(first: usize, rows: usize, seen: &Seen<'_>) -> Self {
        let count = (rows - first).min(ROWS);
        let mut ranges = [(0, 0); ROWS];
        for (i, range) in ranges[..count].iter_mut().enumerate() {
            *range = seen.by(first + i);
        }
        let low = ranges[..count].iter().map(|r| r.0).max().unwrap_or(0);
        let high = ranges[..count].iter().map(|r| r.1).min().unwrap_or(0);
        // Empty, and then at a place where it cuts no row's own range in the middle of an order.
        let common = if low < high { (low, high) } else { (TILE, TILE) };
        Self { first, count, ranges, common }
    }

    /// Each row, with the tokens that it sees before and behind those of all, if any.
    fn alone(&self) -> impl Iterator<Item = (usize, (usize, usize), (usize, usize))> + '_ {
        self.ranges[..self.count].iter().enumerate().map(|(i, range)| {
            let (left, right) = around(*range, self.common);
            (self.first + i, left, right)
        })
    }
}

/// Scores a tile, and turns scores into weights.
fn weigh_rows(job: &Job<'_>, state: &mut Tiles<'_>, tile: &Tile<'_>, rows: &Neighbours) {
    let (first, count, common) = (rows.first, rows.count, rows.common);
    if common.0 < common.1 {
        score(job, state, tile, (first, count), common);
    }
    for (row, left, right) in rows.alone() {
        for part in [left, right] {
            if part.0 < part.1 {
                score(job, state, tile, (row, 1), part);
            }
        }
    }
    for (i, range) in rows.ranges[..count].iter().enumerate() {
        if range.0 < range.1 {
            weigh(job, state, (first + i, 1), *range);
        }
    }
}

/// Adds a tile's values by their weights.
fn sum_rows(job: &Job<'_>, state: &mut Tiles<'_>, tile: &Tile<'_>, rows: &Neighbours) {
    let (first, count, common) = (rows.first, rows.count, rows.common);
    for (row, left, _) in rows.alone() {
        if left.0 < left.1 {
            sum(job, state, tile, (row, 1), left);
        }
    }
    if common.0 < common.1 {
        sum(job, state, tile, (first, count), common);
    }
    for (row, _, right) in rows.alone() {
        if right.0 < right.1 {
            sum(job, state, tile, (row, 1), right);
        }
    }
}

/// What of a range lies before and what behind another inside it.
fn around(
    (low, high): (usize, usize),
    (common_low, common_high): (usize, usize),
) -> ((usize, usize), (usize, usize)) {
    let left = (low, high.min(common_low));
    let right = (low.max(common_high), high);
    (left, right)
}

fn score(
    job: &Job<'_>,
    state: &mut Tiles<'_>,
    tile: &Tile<'_>,
    (row, rows): (usize, usize),
    range: (usize, usize),
) {
    let stride = job.heads.stride_k;
    let mut args = Scores {
        rows,
        q: &state.q[row * stride..],
        stride,
        k: tile.k.rows,
        layout: tile.k.layout,
        scale: tile.k.scale,
        range,
        out: &mut state.scores[row * TILE..],
    };
    job.cpu.kernels.scores(&mut args, state.ahead);
}

/// What is added to the scores of each row: its bias, and its product with the mean that is off the
/// keys of the tile.
pub(super) fn bias_rows(job: &Job<'_>, state: &mut Tiles<'_>, tile: &Tile<'_>) {
    state.tile_bias.copy_from_slice(state.bias);
    if let Some(mean) = tile.k_mean {
        let rows = state.running.len();
        let layout = RowLayout::plain(Element::F16, job.heads.dim_k);
        let mut args = Scores {
            rows,
            q: state.q,
            stride: job.heads.stride_k,
            k: &TileRows::of([mean], layout.bytes()),
            layout: &layout,
            scale: RowScale::Given(1.0),
            range: (0, 1),
            out: state.scores,
        };
        job.cpu.kernels.scores(&mut args, &mut Ahead::default());
        for (bias, scores) in state.tile_bias.iter_mut().zip(state.scores.chunks(TILE)) {
            *bias += scores[0];
        }
    }
}

/// Turns the scores of some tokens by some rows into weights.
pub(super) fn weigh(
    job: &Job<'_>,
    state: &mut Tiles<'_>,
    (row, rows): (usize, usize),
    range: (usize, usize),
) {
    let stride = job.heads.stride_v;
    let mut args = Softmax {
        scores: &mut state.scores[row * TILE..],
        range,
        bias: &state.tile_bias[row..][..rows],
        scale: job.options.scale(),
        cap: job.options.cap(),
        exact: job.has_exact_sums(),
        running: &mut state.running[row..][..rows],
        out: &mut state.out[row * stride..],
        stride,
    };
    job.cpu.kernels.softmax(&mut args, state.ahead);
}

fn sum(
    job: &Job<'_>,
    state: &mut Tiles<'_>,
    tile: &Tile<'_>,
    (row, rows): (usize, usize),
    range: (usize, usize),
) {
    let stride = job.heads.stride_v;
    let mut args = Sums {
        rows,
        weights: &mut state.scores[row * TILE..],
        v: tile.v.rows,
        layout: tile.v.layout,
        scale: tile.v.scale,
        range,
        out: &mut state.out[row * stride..],
        stride,
    };
    job.cpu.kernels.sums(&mut args, state.ahead);
}
