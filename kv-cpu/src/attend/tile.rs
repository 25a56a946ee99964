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
use crate::kernel::{ROWS, RowScale, Running, Scores, Softmax, Sums, TILE};
use crate::num::to_usize;

/// The state of a unit between tiles.
pub(super) struct Tiles<'s> {
    pub(super) q: &'s [f32],
    /// What is added to every score of a query row.
    pub(super) bias: &'s [f32],
    pub(super) out: &'s mut [f32],
    pub(super) scores: &'s mut [f32],
    pub(super) running: &'s mut [Running],
    /// Query heads that share the kv head.
    pub(super) group: usize,
}

/// Rows of a tile that are stored alike.
#[derive(Clone, Copy)]
pub(super) struct Stored<'t> {
    pub(super) rows: &'t [&'t [u8]],
    pub(super) layout: &'t RowLayout,
    pub(super) scale: RowScale<'t>,
}

/// One tile of K and V.
pub(super) struct Tile<'t> {
    /// Positions of its tokens.
    pub(super) bounds: (u32, u32),
    pub(super) k: Stored<'t>,
    pub(super) v: Stored<'t>,
    /// The mean of the block that is off its keys, in f16.
    pub(super) k_mean: Option<&'t [u8]>,
    /// What to fetch while scoring, and while summing.
    pub(super) v_ahead: &'t [&'t [u8]],
    pub(super) k_ahead: &'t [&'t [u8]],
}

/// Lets all query rows meet a tile, a few rows at a time. All of them score before any of them
/// sums, so that K is not pushed out of the first cache by V.
pub(super) fn meet(
    job: &Job<'_>,
    unit: &Unit,
    sequence: &PlannedSequence,
    state: &mut Tiles<'_>,
    tile: &Tile<'_>,
) {
    let rows = state.running.len();
    let (begin, end) = tile.bounds;
    let group = state.group;
    let sinks = job.options.window().map_or(0, |_| job.options.num_sink_tokens());
    let seen = |row: usize| {
        let query = unit.q_begin + u32::try_from(row / group).unwrap_or(0);
        let (low, high) = job.options.visible(sequence, query);
        // A tile of sink tokens holds no other, and a query sees what lies before its end.
        let low = if begin < sinks { 0 } else { low };
        let (low, high) = (low.clamp(begin, end) - begin, high.clamp(begin, end) - begin);
        (to_usize(low), to_usize(high.max(low)))
    };
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
    fn new(first: usize, rows: usize, seen: impl Fn(usize) -> (usize, usize)) -> Self {
        let count = match rows - first {
            1 => 1,
            2 | 3 => 2,
            _ => ROWS,
        };
        let mut ranges = [(0, 0); ROWS];
        for (i, range) in ranges[..count].iter_mut().enumerate() {
            *range = seen(first + i);
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
    // What the first rows fetch ahead serves all.
    let ahead = if first == 0 { tile.v_ahead } else { &[] };
    let means = score_mean(job, state, tile, (first, count));
    if common.0 < common.1 {
        score(job, state, tile, (first, count), common, ahead);
    }
    for (row, left, right) in rows.alone() {
        for part in [left, right] {
            if part.0 < part.1 {
                score(job, state, tile, (row, 1), part, &[]);
            }
        }
    }
    for (i, range) in rows.ranges[..count].iter().enumerate() {
        if range.0 < range.1 {
            weigh(job, state, (first + i, means[i]), *range);
        }
    }
}

/// Adds a tile's values by their weights.
fn sum_rows(job: &Job<'_>, state: &mut Tiles<'_>, tile: &Tile<'_>, rows: &Neighbours) {
    let (first, count, common) = (rows.first, rows.count, rows.common);
    let ahead = if first == 0 { tile.k_ahead } else { &[] };
    for (row, left, _) in rows.alone() {
        if left.0 < left.1 {
            sum(job, state, tile, (row, 1), left, &[]);
        }
    }
    if common.0 < common.1 {
        sum(job, state, tile, (first, count), common, ahead);
    }
    for (row, _, right) in rows.alone() {
        if right.0 < right.1 {
            sum(job, state, tile, (row, 1), right, &[]);
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
    ahead: &[&[u8]],
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
        ahead,
    };
    job.cpu.kernels.scores(&mut args);
}

/// Products of query rows with the mean that is off the keys of a tile; 0 where none is.
fn score_mean(
    job: &Job<'_>,
    state: &Tiles<'_>,
    tile: &Tile<'_>,
    (row, rows): (usize, usize),
) -> [f32; ROWS] {
    let mut means = [0.0; ROWS];
    if let Some(mean) = tile.k_mean {
        let stride = job.heads.stride_k;
        let mut out = [0.0; ROWS * TILE];
        job.cpu.kernels.scores(&mut Scores {
            rows,
            q: &state.q[row * stride..],
            stride,
            k: &[mean],
            layout: &RowLayout::plain(Element::F16, job.heads.dim_k),
            scale: RowScale::Given(1.0),
            range: (0, 1),
            out: &mut out,
            ahead: &[],
        });
        for (to, from) in means.iter_mut().zip(out.chunks(TILE)) {
            *to = from[0];
        }
    }
    means
}

fn weigh(job: &Job<'_>, state: &mut Tiles<'_>, (row, mean): (usize, f32), range: (usize, usize)) {
    let factor = job.cpu.kernels.softmax(&mut Softmax {
        scores: &mut state.scores[row * TILE..][..TILE],
        range,
        bias: state.bias[row] + mean,
        scale: job.options.scale(),
        cap: job.options.cap(),
        running: &mut state.running[row],
    });
    // The maximum seldom moves after the first tiles.
    if factor.to_bits() != 1.0_f32.to_bits() {
        let stride = job.heads.stride_v;
        let out = &mut state.out[row * stride..][..stride];
        job.cpu.kernels.scale(out, factor);
    }
}

fn sum(
    job: &Job<'_>,
    state: &mut Tiles<'_>,
    tile: &Tile<'_>,
    (row, rows): (usize, usize),
    range: (usize, usize),
    ahead: &[&[u8]],
) {
    let stride = job.heads.stride_v;
    let mut args = Sums {
        rows,
        weights: &state.scores[row * TILE..],
        v: tile.v.rows,
        layout: tile.v.layout,
        scale: tile.v.scale,
        range,
        out: &mut state.out[row * stride..],
        stride,
        ahead,
    };
    job.cpu.kernels.sums(&mut args);
}
