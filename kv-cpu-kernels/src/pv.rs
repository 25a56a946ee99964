//! Weighted sums of rows of V.
//!
//! A register tile is `R` output rows by `P` pairs of vectors, which stay in registers over all
//! tokens.
#![expect(
    clippy::inline_always,
    clippy::needless_range_loop,
    reason = "kernel code: bounds are asserted at the entry, and loops must inline into the \
              `#[target_feature]` caller"
)]
use crate::decode::{GROUP, HALF, Rest, rest_begin};
use crate::load::{Load, place};
use crate::prefetch::Prefetch;
use crate::rows::TileRows;
use crate::simd::Simd;

/// Values to which output rows are padded.
pub const OUTPUT_PAD: usize = GROUP;

/// Weights by rows of V, added to output rows.
#[derive(Debug)]
pub struct Pv<'a, 'p> {
    /// Number of output rows.
    pub rows: usize,
    /// Weights times the scales of V's rows and [`Kernels::factor`](crate::Kernels::factor),
    /// `weight_stride` an output row.
    pub weights: &'a [f32],
    /// Floats from a row of weights to the next.
    pub weight_stride: usize,
    /// Rows of V.
    pub v: TileRows<'a>,
    /// The rows, `out_stride` floats apart.
    pub out: &'a mut [f32],
    /// Floats from an output row to the next, a multiple of [`OUTPUT_PAD`].
    pub out_stride: usize,
    /// Memory for decoded rows of V, [`Kernels::decoded_len`](crate::Kernels::decoded_len) floats.
    pub decoded: &'a mut [f32],
    /// Lines to prefetch meanwhile.
    pub prefetch: &'a mut Prefetch<'p>,
}

impl Pv<'_, '_> {
    /// Asserts the bounds that the loops rely on.
    #[inline]
    pub(crate) fn check(&self) {
        assert!(
            self.v.len() <= self.weight_stride
                && self.weights.len() + self.weight_stride
                    >= self.rows * self.weight_stride + self.v.len()
                && self.out_stride.is_multiple_of(OUTPUT_PAD)
                && self.v.layout().dim() <= self.out_stride
                && self.out.len() >= self.rows * self.out_stride,
            "weight and output rows lie inside their slices"
        );
    }
}

/// Tokens between two steps of the prefetch.
const TOKENS: usize = 4;

/// Adds all tokens to `R` output rows, `P` pairs at a time. The arguments were checked, and have
/// `R` rows.
#[inline(always)]
pub(crate) fn pv<L: Load, const R: usize, const P: usize>(l: L, x: &mut Pv<'_, '_>) {
    let (s, layout) = (l.simd(), x.v.layout());
    let rest = rest_begin(layout.dim());
    let pairs = rest / (2 * L::S::LANES);
    let mut prefetch = *x.prefetch;
    let steps: usize = x.v.runs().iter().map(|run| run.len().div_ceil(TOKENS)).sum();
    let pace = prefetch.pace(steps * (pairs / P + (pairs % P).min(2)));
    let mut pair = 0;
    while pair + P <= pairs {
        add_pairs::<L, R, P>(l, x, pair, (&mut prefetch, pace));
        pair += P;
    }
    while P > 2 && pair + 2 <= pairs {
        add_pairs::<L, R, 2>(l, x, pair, (&mut prefetch, pace));
        pair += 2;
    }
    while P > 1 && pair < pairs {
        add_pairs::<L, R, 1>(l, x, pair, (&mut prefetch, pace));
        pair += 1;
    }
    if layout.dim() - rest == HALF {
        add_half_rest::<L, R>(l, x, rest);
    } else if rest < layout.dim() {
        add_rest::<L, R>(l, x, rest);
    }
    prefetch.finish(s);
    *x.prefetch = prefetch;
}

/// Adds `P` pairs of vectors of all tokens, from pair `first` on.
#[inline(always)]
fn add_pairs<L: Load, const R: usize, const P: usize>(
    l: L,
    x: &mut Pv<'_, '_>,
    first: usize,
    (prefetch, pace): (&mut Prefetch<'_>, usize),
) {
    let (s, layout) = (l.simd(), x.v.layout());
    let out = x.out.as_mut_ptr();
    let mut at = [0; P];
    for p in 0..P {
        let (group, offset) = place::<L::S>(first + p);
        at[p] = group + offset;
    }
    let mut sums = [[[s.splat(0.0); 2]; P]; R];
    for r in 0..R {
        for p in 0..P {
            for half in 0..2 {
                // SAFETY: values of an output row, which were checked.
                sums[r][p][half] = unsafe { s.load(out, r * x.out_stride + at[p] + half * HALF) };
            }
        }
    }
    let mut weights = x.weights.as_ptr();
    for run in x.v.runs() {
        prefetch.catch_up(s);
        let (mut row, mut left) = (run.at(0), run.len());
        while left > 0 {
            prefetch.step(s, pace);
            let tokens = left.min(TOKENS);
            for _ in 0..tokens {
                // SAFETY: a row of V, and pairs of its whole groups.
                let values = unsafe { l.pairs::<P>(row, layout, first) };
                row = row.wrapping_add(run.stride());
                for r in 0..R {
                    let weight = weights.wrapping_add(r * x.weight_stride);
                    // SAFETY: the weight of a token, which were checked.
                    let weight = s.splat(unsafe { weight.read() });
                    for p in 0..P {
                        for half in 0..2 {
                            sums[r][p][half] = s.fma(weight, values[p][half], sums[r][p][half]);
                        }
                    }
                }
                weights = weights.wrapping_add(1);
            }
            left -= tokens;
        }
    }
    for r in 0..R {
        for p in 0..P {
            for half in 0..2 {
                // SAFETY: as for the loads.
                unsafe { s.store(out, r * x.out_stride + at[p] + half * HALF, sums[r][p][half]) };
            }
        }
    }
}

/// Adds the values after the last whole group where there are [`HALF`], two vectors at a time.
#[inline(always)]
fn add_half_rest<L: Load, const R: usize>(l: L, x: &mut Pv<'_, '_>, begin: usize) {
    if 2 * L::S::LANES > HALF {
        add_rest_vectors::<L, R, 1>(l, x, (begin, 0));
        return;
    }
    for offset in (0..HALF).step_by(2 * L::S::LANES) {
        add_rest_vectors::<L, R, 2>(l, x, (begin, offset));
    }
}

/// Adds `N` vectors of a rest of [`HALF`] values of all tokens, from value `offset` of it on.
#[inline(always)]
fn add_rest_vectors<L: Load, const R: usize, const N: usize>(
    l: L,
    x: &mut Pv<'_, '_>,
    (begin, offset): (usize, usize),
) {
    let (s, layout) = (l.simd(), x.v.layout());
    let out = x.out.as_mut_ptr();
    let at = begin + offset;
    let mut sums = [[s.splat(0.0); N]; R];
    for r in 0..R {
        for n in 0..N {
            // SAFETY: values of an output row, which were checked.
            sums[r][n] = unsafe { s.load(out, r * x.out_stride + at + n * L::S::LANES) };
        }
    }
    let mut weights = x.weights.as_ptr();
    for run in x.v.runs() {
        let mut row = run.at(0);
        for _ in 0..run.len() {
            let mut values = [s.splat(0.0); N];
            for n in 0..N {
                // SAFETY: a row of V, whose rest has `HALF` values.
                values[n] = unsafe { l.half_rest(row, layout, offset + n * L::S::LANES) };
            }
            row = row.wrapping_add(run.stride());
            for r in 0..R {
                let weight = weights.wrapping_add(r * x.weight_stride);
                // SAFETY: the weight of a token, which were checked.
                let weight = s.splat(unsafe { weight.read() });
                for n in 0..N {
                    sums[r][n] = s.fma(weight, values[n], sums[r][n]);
                }
            }
            weights = weights.wrapping_add(1);
        }
    }
    for r in 0..R {
        for n in 0..N {
            // SAFETY: as for the loads.
            unsafe { s.store(out, r * x.out_stride + at + n * L::S::LANES, sums[r][n]) };
        }
    }
}

/// Tokens whose rests are decoded together.
const RESTS: usize = 16;

/// Adds the values after the last whole group.
#[inline(always)]
fn add_rest<L: Load, const R: usize>(l: L, x: &mut Pv<'_, '_>, begin: usize) {
    let (s, layout) = (l.simd(), x.v.layout());
    let n = layout.dim() - begin;
    let mut rests: [Rest; RESTS] = [[0.0; GROUP]; RESTS];
    let mut first = 0;
    for run in x.v.runs() {
        for token in (0..run.len()).step_by(RESTS) {
            let count = (run.len() - token).min(RESTS);
            for i in 0..count {
                // SAFETY: a row of V, which has a rest.
                rests[i] = unsafe { l.rest(run.at(token + i), layout) };
            }
            for value in (0..n).step_by(L::S::LANES) {
                for r in 0..R {
                    let at = r * x.out_stride + begin + value;
                    // SAFETY: output rows are padded to a multiple of `OUTPUT_PAD`.
                    let mut sum = unsafe { s.load(x.out.as_ptr(), at) };
                    for i in 0..count {
                        let weight = x.weights[r * x.weight_stride + first + token + i];
                        // SAFETY: `value + LANES` is at most `GROUP`.
                        let values = unsafe { s.load(rests[i].as_ptr(), value) };
                        sum = s.fma(s.splat(weight), values, sum);
                    }
                    // SAFETY: as for the load.
                    unsafe { s.store(x.out.as_mut_ptr(), at, sum) };
                }
            }
        }
        first += run.len();
    }
}
