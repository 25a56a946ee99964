//! Rows of signed bytes as words of 16 bits, which some CPUs multiply twice as fast as `f32`, by
//! queries and weights in fixed point: where outputs have 16 bits themselves, for which a 65,536th
//! of the greatest value of a query row, or of the weights of a piece, is little enough.
#![expect(
    clippy::arithmetic_side_effects,
    clippy::inline_always,
    clippy::indexing_slicing,
    clippy::needless_range_loop,
    reason = "kernel code: the strip was checked, and loops must melt into the function that \
              carries the target features"
)]
use super::super::simd::{LANES_MAX, Simd};
use super::super::stored::{GROUP, Int8};
use super::super::tile::HALF;
use super::ask::Ask;
use super::multiply::{Decoded, Multiply, Operands};
use super::sums::{add_weighted, scale_weights};
use super::{Meeting, Piece, Rows, Weights, tokens_of};

/// Most values of a row: that many products of the greatest numbers are still below 2^31.
pub(super) const VALUES_MAX: usize = 512;

/// The greatest number in fixed point.
pub(super) const GREATEST: f32 = 32_767.0;

/// Products of words of 16 bits, two of which a lane has, and what is done with their sums, which
/// are integers of 32 bits.
pub(in super::super) trait DotWords: Copy {
    type S: Simd;

    fn simd(self) -> Self::S;
    /// 32 bytes as words.
    ///
    /// # Safety
    /// 1. As many bytes are readable.
    unsafe fn load(self, from: *const u8) -> <Self::S as Simd>::I;
    /// Adds the products of both words of each lane.
    fn dot(
        self,
        a: <Self::S as Simd>::I,
        b: <Self::S as Simd>::I,
        sums: <Self::S as Simd>::I,
    ) -> <Self::S as Simd>::I;
    fn add(self, a: <Self::S as Simd>::I, b: <Self::S as Simd>::I) -> <Self::S as Simd>::I;
    /// As [`Simd::fold`].
    fn fold(
        self,
        bit: u32,
        a: <Self::S as Simd>::I,
        b: <Self::S as Simd>::I,
    ) -> <Self::S as Simd>::I;
    fn floats(self, sums: <Self::S as Simd>::I) -> <Self::S as Simd>::F;

    /// Brings each of 32 words of one vector beside that of another one, in an order of its own.
    fn beside(self, a: <Self::S as Simd>::I, b: <Self::S as Simd>::I) -> [<Self::S as Simd>::I; 2];
    /// Sums of lanes that are in this order, in that of the words.
    fn in_order(self, sums: [<Self::S as Simd>::I; 2]) -> [<Self::S as Simd>::F; 2];

    fn is_finite(self, v: <Self::S as Simd>::F) -> bool;
    /// In each of `n` lanes, 2 to 16, the power of two that brings the greatest of them to 2^14 or
    /// more, but below 2^15.
    fn exponent(self, v: <Self::S as Simd>::F, n: usize) -> <Self::S as Simd>::F;
    /// `v * 2^exponent`.
    fn times_power(
        self,
        v: <Self::S as Simd>::F,
        exponent: <Self::S as Simd>::F,
    ) -> <Self::S as Simd>::F;
    /// Numbers below 2^15 as words, rounded, 2^15 to what is below it: in even lanes their own, and
    /// that of the next lane behind it.
    fn round_to_pairs(self, v: <Self::S as Simd>::F) -> <Self::S as Simd>::I;
    /// # Safety
    /// 1. A vector is writable.
    unsafe fn store(self, to: *mut u32, at: usize, v: <Self::S as Simd>::I);
}

/// Products with rows of bytes.
#[derive(Clone, Copy)]
pub(super) struct Bytes<B>(pub(super) B);

impl<B: DotWords> Multiply for Bytes<B> {
    type S = B::S;
    type Group = <B::S as Simd>::I;
    type Sums = <B::S as Simd>::I;
    const BYTES: usize = GROUP;
    const HAS_UNITS: bool = true;

    #[inline(always)]
    fn simd(self) -> B::S {
        self.0.simd()
    }
    #[inline(always)]
    fn zero(self) -> Self::Sums {
        self.simd().splat_bits(0)
    }
    #[inline(always)]
    fn query(self, x: &Operands<'_>, row: usize, group: usize) -> Self::Group {
        x.query_words(self.simd(), row, group)
    }
    #[inline(always)]
    fn key(self, _: &Operands<'_>, row: *const u8, group: usize) -> Self::Group {
        // SAFETY: a whole group of a row of as many bytes, by the check of the strip.
        unsafe { self.0.load(row.wrapping_add(group * GROUP)) }
    }
    #[inline(always)]
    fn dot(self, [a, b]: [Self::Sums; 2], (q, k): (Self::Group, Self::Group)) -> [Self::Sums; 2] {
        [self.0.dot(q, k, a), b]
    }
    #[inline(always)]
    fn add(self, a: Self::Sums, b: Self::Sums) -> Self::Sums {
        self.0.add(a, b)
    }
    #[inline(always)]
    fn fold(self, bit: u32, a: Self::Sums, b: Self::Sums) -> Self::Sums {
        self.0.fold(bit, a, b)
    }
    #[inline(always)]
    fn floats(self, sums: Self::Sums) -> <B::S as Simd>::F {
        self.0.floats(sums)
    }
}

/// Adds a piece of V by weights in fixed point.
///
/// # Safety
/// 1. It is one of the strip, which was checked.
#[inline(always)]
pub(in super::super) unsafe fn sum_words<B: DotWords>(b: B, args: &mut Meeting<'_>, piece: &Piece) {
    let s = b.simd();
    // SAFETY: the condition is passed on.
    let v = unsafe { Rows::new(args, piece, 1) };
    let factors = v.factors(s, args.lanes[piece.head].scales[1], 1.0);
    scale_weights(s, args, piece, factors);
    let Some((pairs, units)) = fix_weights(b, args, piece) else {
        // SAFETY: the condition is passed on.
        unsafe { add_weighted(Decoded::<B::S, Int8>::new(s), args, piece) };
        return;
    };
    let mut ask = Ask::new(args, piece, 1);
    let out = args.out.as_mut_ptr().wrapping_add(piece.head * args.rows * args.out_stride);
    let x = &Words { v, pairs, units, out, stride: args.out_stride };
    match args.rows {
        1 => sum_rows::<B, 1, 16, 4>(b, x, &mut ask),
        2 => sum_rows::<B, 2, 8, 4>(b, x, &mut ask),
        3 => sum_rows::<B, 3, 4, 2>(b, x, &mut ask),
        4 => sum_rows::<B, 4, 4, 2>(b, x, &mut ask),
        _ => sum_rows::<B, 8, 2, 1>(b, x, &mut ask),
    }
    ask.finish(s);
}

/// Rows of V of a piece, the weights of its tokens and the sums of a head.
struct Words<'a> {
    v: Rows<'a>,
    /// As [`Weights`], in even lanes, those of the odd ones behind them.
    pairs: [u32; size_of::<Weights>() / 4],
    /// By lane, what a weight of 1 is.
    units: [f32; LANES_MAX],
    out: *mut f32,
    stride: usize,
}

/// Weights in fixed point, and what one is; `None` where the square of one is not finite.
#[inline(always)]
fn fix_weights<B: DotWords>(
    b: B,
    args: &Meeting<'_>,
    piece: &Piece,
) -> Option<([u32; size_of::<Weights>() / 4], [f32; LANES_MAX])> {
    let (s, tokens) = (b.simd(), tokens_of(args.rows));
    let steps = piece.tokens.div_ceil(tokens);
    let (mut top, mut sum) = (s.splat(1e-30), s.splat(0.0));
    for step in 0..steps {
        // SAFETY: a vector of the weights, as all that is loaded or stored here.
        let weights = unsafe { s.load(args.weights.as_ptr(), step * LANES_MAX) };
        sum = s.fma(weights, weights, sum);
        top = s.max(weights, top);
        top = s.max(s.mul(weights, s.splat(-1.0)), top);
    }
    if !b.is_finite(sum) {
        return None;
    }
    let exponent = b.exponent(top, tokens);
    let mut pairs = [0; _];
    for step in 0..steps {
        // SAFETY: as above.
        let weights = unsafe { s.load(args.weights.as_ptr(), step * LANES_MAX) };
        let words = b.round_to_pairs(b.times_power(weights, exponent));
        // SAFETY: as above.
        unsafe { b.store(pairs.as_mut_ptr(), step * LANES_MAX, words) };
    }
    let unit = b.times_power(s.splat(1.0), s.mul(exponent, s.splat(-1.0)));
    let mut units = [0.0; LANES_MAX];
    // SAFETY: as above.
    unsafe { s.store(units.as_mut_ptr(), 0, unit) };
    Some((pairs, units))
}

/// `R` rows, whose vectors of weights have `T` tokens each, `C` groups of values at a time.
#[inline(always)]
fn sum_rows<B: DotWords, const R: usize, const T: usize, const C: usize>(
    b: B,
    x: &Words<'_>,
    ask: &mut Ask,
) {
    let groups = x.v.layout.dim() / GROUP;
    let mut group = 0;
    while group + C <= groups {
        sum_groups::<B, R, T, C>(b, x, group, ask);
        group += C;
    }
    while C > 2 && group + 2 <= groups {
        sum_groups::<B, R, T, 2>(b, x, group, ask);
        group += 2;
    }
    if C > 1 && group < groups {
        sum_groups::<B, R, T, 1>(b, x, group, ask);
    }
}

/// `C` groups of them, whose sums stay in registers.
#[inline(always)]
fn sum_groups<B: DotWords, const R: usize, const T: usize, const C: usize>(
    b: B,
    x: &Words<'_>,
    group: usize,
    ask: &mut Ask,
) {
    let s = b.simd();
    let mut sums = [[[s.splat_bits(0); 2]; C]; R];
    let mut token = 0;
    while token < x.v.tokens {
        // Two tokens have as many lines as one has groups.
        ask.step(s, C);
        let mut weights = [s.splat_bits(0); R];
        for r in 0..R {
            let lane = token / T * LANES_MAX + r * T + token % T;
            // SAFETY: those of two tokens by a row, which are as many as weights.
            weights[r] = s.splat_bits(unsafe { x.pairs.as_ptr().wrapping_add(lane).read() });
        }
        let row = x.v.first.wrapping_add(token * x.v.stride);
        // Behind the last row that is met again, and weighs nothing.
        let next = row.wrapping_add(if token + 1 < x.v.tokens { x.v.stride } else { 0 });
        for c in 0..C {
            let at = (group + c) * GROUP;
            // SAFETY: a whole group of a row of as many bytes, see `Rows::new`, as below.
            let first = unsafe { b.load(row.wrapping_add(at)) };
            // SAFETY: as above.
            let second = unsafe { b.load(next.wrapping_add(at)) };
            let values = b.beside(first, second);
            for r in 0..R {
                for half in 0..2 {
                    sums[r][c][half] = b.dot(values[half], weights[r], sums[r][c][half]);
                }
            }
        }
        token += 2;
    }
    for r in 0..R {
        let unit = s.splat(x.units[r * T]);
        for c in 0..C {
            let added = b.in_order(sums[r][c]);
            for half in 0..2 {
                let at = r * x.stride + (group + c) * GROUP + half * HALF;
                // SAFETY: values of an output row, by the check of the strip.
                let sum = s.fma(added[half], unit, unsafe { s.load(x.out, at) });
                // SAFETY: as above.
                unsafe { s.store(x.out, at, sum) };
            }
        }
    }
}
