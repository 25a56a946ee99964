//! Weighted sums of the V rows of a tile.
#![expect(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    clippy::inline_always,
    clippy::needless_range_loop,
    reason = "kernel code: bounds are asserted at the entry, and loops must melt into the function \
              that carries the target features"
)]
use super::simd::{LANES_MAX, Simd};
use super::stored::{GROUP, Stored, whole};
use super::tile::{HALF, NO_RESTS, check_rows, decode_rests, factors, fetch, multiply};
use super::{ROWS, Sums, TILE};

/// Adds `weight * V` of the tokens of a range to `args.rows` output rows.
#[inline(always)]
pub(super) fn sums<S: Simd, E: Stored>(s: S, args: &mut Sums<'_>) {
    check_rows(args.v, args.range, args.layout);
    assert!(
        args.stride.is_multiple_of(LANES_MAX)
            && args.layout.dim() <= args.stride
            && args.out.len() >= args.rows * args.stride
            && args.weights.len() >= args.rows * TILE,
        "output and weight rows lie inside their slices"
    );
    let mut scaled = [0.0; ROWS * TILE];
    let mut weights = args.weights;
    if let Some(factors) = factors(s, args.v, args.range, args.layout, args.scale) {
        let rows = args.weights.chunks_exact(TILE).take(args.rows);
        for (from, to) in rows.zip(scaled.chunks_exact_mut(TILE)) {
            multiply(s, from.as_ptr(), &factors, to.as_mut_ptr());
        }
        weights = &scaled;
    }
    if S::LANES == 1 {
        match args.rows {
            ROWS => sum_rows::<S, E, ROWS, 1>(s, args, weights),
            2 => sum_rows::<S, E, 2, 1>(s, args, weights),
            1 => sum_rows::<S, E, 1, 1>(s, args, weights),
            _ => unreachable!("kernels take 1, 2 or 4 rows"),
        }
    } else {
        match args.rows {
            ROWS => sum_rows::<S, E, ROWS, 1>(s, args, weights),
            2 => sum_rows::<S, E, 2, 2>(s, args, weights),
            1 => sum_rows::<S, E, 1, 4>(s, args, weights),
            _ => unreachable!("kernels take 1, 2 or 4 rows"),
        }
    }
    let dim = args.layout.dim();
    let (group, whole) = (dim / GROUP * GROUP, whole::<S, E>(dim));
    if group == dim {
        return;
    }
    let mut rests = NO_RESTS;
    decode_rests::<S, E>(s, args.v, args.range, args.layout, &mut rests);
    let (begin, end) = args.range;
    for token in begin..end {
        let mut d = group;
        while d < dim {
            let value = if d < whole {
                // SAFETY: a vector of a V row, `d + LANES <= whole`.
                unsafe { E::load(s, args.v[token].as_ptr(), args.layout, group, d - group) }
            } else {
                // SAFETY: the rest is written, since there is one; `d - whole` is a multiple of
                // `LANES` below `GROUP`.
                unsafe { s.load(rests[token].as_ptr().cast(), d - whole) }
            };
            for r in 0..args.rows {
                let out = args.out.as_mut_ptr();
                // SAFETY: output rows are padded to `LANES_MAX`, by the assertion above.
                let sum = unsafe { s.load(out, r * args.stride + d) };
                let sum = s.fma(s.splat(weights[r * TILE + token]), value, sum);
                // SAFETY: as above.
                unsafe { s.store(out, r * args.stride + d, sum) };
            }
            d += S::LANES;
        }
    }
}

/// The whole groups of `R` rows, `P` pairs of vectors at a time, which stay in registers for all
/// tokens.
#[inline(always)]
fn sum_rows<S: Simd, E: Stored, const R: usize, const P: usize>(
    s: S,
    args: &mut Sums<'_>,
    weights: &[f32],
) {
    let dim = args.layout.dim();
    // Pairs of a group, and groups that `P` pairs span.
    let pairs = HALF / S::LANES;
    let span = P.div_ceil(pairs) * GROUP;
    let mut ahead = Ahead::new(args.ahead, dim / span * pairs.div_ceil(P));
    let mut group = 0;
    while group + span <= dim {
        let mut first = 0;
        while first < pairs {
            sum_pairs::<S, E, R, P>(s, args, weights, (group, first), &mut ahead);
            first += P;
        }
        group += span;
    }
    // Where more than one group is taken at a time, some may be left.
    while P > pairs && group + GROUP <= dim {
        for first in 0..pairs {
            sum_pairs::<S, E, R, 1>(s, args, weights, (group, first), &mut ahead);
        }
        group += GROUP;
    }
    ahead.rest(s);
}

/// Rows to fetch, spread over the passes through a tile: a core has few lines under way at a time,
/// and more than that would only wait.
struct Ahead<'a> {
    rows: &'a [&'a [u8]],
    /// How many at a time.
    step: usize,
}

/// Times that a pass fetches.
const FETCHES: usize = 4;

impl<'a> Ahead<'a> {
    #[inline(always)]
    fn new(rows: &'a [&'a [u8]], passes: usize) -> Self {
        Self { rows, step: rows.len().div_ceil((passes * FETCHES).max(1)) }
    }

    #[inline(always)]
    fn some<S: Simd>(&mut self, s: S) {
        let (now, later) = self.rows.split_at(self.step.min(self.rows.len()));
        for row in now {
            fetch(s, row);
        }
        self.rows = later;
    }

    /// What no pass has fetched.
    #[inline(always)]
    fn rest<S: Simd>(self, s: S) {
        for row in self.rows {
            fetch(s, row);
        }
    }
}

/// `P` pairs of `R` rows, from pair `first` of a group on. `sums` has asserted the extents,
/// `sum_rows` that the pairs end at or before the last whole group.
#[inline(always)]
fn sum_pairs<S: Simd, E: Stored, const R: usize, const P: usize>(
    s: S,
    args: &mut Sums<'_>,
    weights: &[f32],
    (group, first): (usize, usize),
    ahead: &mut Ahead<'_>,
) {
    let pairs = HALF / S::LANES;
    let place = |p: usize, half: usize| {
        let pair = first + p;
        (group + pair / pairs * GROUP, pair % pairs * S::LANES + half * HALF)
    };
    let (out, stride, (begin, end)) = (args.out.as_mut_ptr(), args.stride, args.range);
    let mut sums = [[[s.splat(0.0); 2]; P]; R];
    for r in 0..R {
        for p in 0..P {
            for half in 0..2 {
                let (group, offset) = place(p, half);
                // SAFETY: the vector lies in output row `r`, see above.
                sums[r][p][half] = unsafe { s.load(out, r * stride + group + offset) };
            }
        }
    }
    for (token, row) in (begin..end).zip(&args.v[begin..end]) {
        if token % (TILE / FETCHES) == 0 {
            ahead.some(s);
        }
        let mut values = [[s.splat(0.0); 2]; P];
        for p in 0..P {
            for half in 0..2 {
                let (group, offset) = place(p, half);
                let row = row.as_ptr();
                // SAFETY: a whole group of a V row, see above.
                values[p][half] = unsafe { E::load(s, row, args.layout, group, offset) };
            }
        }
        for r in 0..R {
            // SAFETY: `token < TILE`, and there are `R * TILE` weights.
            let weight = s.splat(unsafe { *weights.get_unchecked(r * TILE + token) });
            for p in 0..P {
                for half in 0..2 {
                    sums[r][p][half] = s.fma(weight, values[p][half], sums[r][p][half]);
                }
            }
        }
    }
    for r in 0..R {
        for p in 0..P {
            for half in 0..2 {
                let (group, offset) = place(p, half);
                // SAFETY: as for the loads.
                unsafe { s.store(out, r * stride + group + offset, sums[r][p][half]) };
            }
        }
    }
}
