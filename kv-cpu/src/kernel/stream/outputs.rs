//! What a few query rows come to: maxima, sums of weights, and weighted sums of V.
#![expect(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    clippy::inline_always,
    clippy::needless_range_loop,
    reason = "kernel code: bounds are asserted at the entry, and loops must melt into the function \
              that carries the target features"
)]
use super::super::Running;
use super::super::simd::{LANES_MAX, LINE, Simd};
use super::super::stored::GROUP;
use super::super::tile::HALF;
use super::hint::Hint;
use super::{InOrder, Rows, STEP};

/// Weights of a step: of row `r` those of its tokens come first.
type Weights<const R: usize> = [[f32; LANES_MAX]; R];

/// The state of `R` rows. `N` vectors of each are held in registers; where that is none, sums are
/// in memory.
pub(super) struct Outputs<'a, S: Simd, const R: usize, const N: usize> {
    running: &'a mut [Running],
    /// Output rows, how far they are apart, and how many values they have.
    out: &'a mut [f32],
    stride: usize,
    dim: usize,
    held: [[S::F; N]; R],
    /// Finite, so that what is infinitely less weighs nothing.
    max: [f32; R],
    /// Of weights, by token of a step.
    sums: [S::F; R],
}

impl<'a, S: Simd, const R: usize, const N: usize> Outputs<'a, S, R, N> {
    /// Takes `R` rows, each of so many values: whole groups, or as many as are held.
    #[inline(always)]
    pub(super) fn new(
        s: S,
        running: &'a mut [Running],
        (out, stride): (&'a mut [f32], usize),
        dim: usize,
    ) -> Self {
        assert!(
            running.len() == R && dim.is_multiple_of(GROUP) && dim <= stride,
            "whole groups of so many rows"
        );
        assert!(out.len() >= R * stride && N * S::LANES <= dim, "rows lie inside their slice");
        let (mut held, mut max) = ([[s.splat(0.0); N]; R], [0.0; R]);
        for r in 0..R {
            max[r] = running[r].max.max(f32::MIN);
            for i in 0..N {
                // SAFETY: values of an output row, by the assertion.
                held[r][i] = unsafe { s.load(out.as_ptr(), r * stride + i * S::LANES) };
            }
        }
        Self { running, out, stride, dim, held, max, sums: [s.splat(0.0); R] }
    }

    /// Turns scores of a step, before they are scaled, into weights.
    #[inline(always)]
    pub(super) fn weigh(
        &mut self,
        s: S,
        scores: [S::F; R],
        (scale, exact): (f32, bool),
    ) -> Weights<R> {
        let exp = |x: S::F| if exact { s.exp(x) } else { s.exp_short(x) };
        let mut weights = [[0.0; LANES_MAX]; R];
        for r in 0..R {
            let scores = s.mul(scores[r], s.splat(scale));
            if s.any_above(scores, self.max[r]) {
                let top = s.reduce_max(scores);
                let off = s.splat(self.max[r] - top);
                self.rescale(s, r, exp(off));
                self.max[r] = top;
            }
            let off = s.add(scores, s.splat(-self.max[r]));
            let weight = exp(off);
            self.sums[r] = s.add(self.sums[r], weight);
            // SAFETY: an array of `LANES_MAX`.
            unsafe { s.store(weights[r].as_mut_ptr(), 0, weight) };
        }
        weights
    }

    /// Brings the sums of a row to a new maximum.
    #[inline(always)]
    fn rescale(&mut self, s: S, r: usize, factor: S::F) {
        self.running[r].sum *= s.reduce_max(factor);
        self.sums[r] = s.mul(self.sums[r], factor);
        for i in 0..N {
            self.held[r][i] = s.mul(self.held[r][i], factor);
        }
        let in_memory = if N == 0 { self.dim } else { 0 };
        for i in (0..in_memory).step_by(S::LANES) {
            // SAFETY: values of an output row, by what `new` asserts.
            let sum = unsafe { s.load(self.out.as_ptr(), r * self.stride + i) };
            let at = self.out.as_mut_ptr();
            // SAFETY: as above.
            unsafe { s.store(at, r * self.stride + i, s.mul(sum, factor)) };
        }
    }

    /// Adds the values of `T` tokens by their weights.
    #[inline(always)]
    pub(super) fn add<E: InOrder, H: Hint, const T: usize>(
        &mut self,
        s: S,
        v: &Rows<'_>,
        weights: &Weights<R>,
        token: usize,
    ) {
        assert!(v.layout.dim() == self.dim, "rows of V have as many values");
        if N > 0 {
            add::<S, E, H, R, N, T>(s, v, (weights, token), (0, &mut self.held));
            return;
        }
        let (groups, mut first) = (self.dim / GROUP, 0);
        // Two groups at a time, so that their sums stay in registers for a step.
        while R == 1 && first + 2 <= groups {
            match S::LANES {
                16 => self.add_to_memory::<E, H, T, 4>(s, v, (weights, token), first),
                8 => self.add_to_memory::<E, H, T, 8>(s, v, (weights, token), first),
                _ => self.add_to_memory::<E, H, T, 16>(s, v, (weights, token), first),
            }
            first += 2;
        }
        while first < groups {
            match S::LANES {
                16 => self.add_to_memory::<E, H, T, 2>(s, v, (weights, token), first),
                8 => self.add_to_memory::<E, H, T, 4>(s, v, (weights, token), first),
                _ => self.add_to_memory::<E, H, T, 8>(s, v, (weights, token), first),
            }
            first += 1;
        }
    }

    /// The same to sums in memory, of `M` vectors from a group on.
    #[inline(always)]
    fn add_to_memory<E: InOrder, H: Hint, const T: usize, const M: usize>(
        &mut self,
        s: S,
        v: &Rows<'_>,
        weights: (&Weights<R>, usize),
        first: usize,
    ) {
        assert!(first * GROUP + M * S::LANES <= self.dim, "groups of a row");
        let (mut sums, out) = ([[s.splat(0.0); M]; R], self.out.as_mut_ptr());
        for r in 0..R {
            for i in 0..M {
                let at = r * self.stride + first * GROUP + i * S::LANES;
                // SAFETY: values of an output row, by the assertion and that of `new`.
                sums[r][i] = unsafe { s.load(out, at) };
            }
        }
        add::<S, E, H, R, M, T>(s, v, weights, (first, &mut sums));
        for r in 0..R {
            for i in 0..M {
                let at = r * self.stride + first * GROUP + i * S::LANES;
                // SAFETY: as above.
                unsafe { s.store(out, at, sums[r][i]) };
            }
        }
    }

    /// Gives back what is held.
    #[inline(always)]
    pub(super) fn finish(self, s: S) {
        for r in 0..R {
            for i in 0..N {
                let at = r * self.stride + i * S::LANES;
                // SAFETY: values of an output row, by what `new` asserts.
                unsafe { s.store(self.out.as_mut_ptr(), at, self.held[r][i]) };
            }
            let mut lanes = [0.0; LANES_MAX];
            // SAFETY: an array of `LANES_MAX`.
            unsafe { s.store(lanes.as_mut_ptr(), 0, self.sums[r]) };
            let running = &mut self.running[r];
            running.sum += lanes[..STEP].iter().sum::<f32>();
            // Where nothing weighs, nothing was seen.
            if running.sum != 0.0 {
                running.max = self.max[r];
            }
        }
    }
}

/// Adds values of `T` tokens from a group on to sums of `M` vectors, and asks for others.
#[inline(always)]
fn add<S: Simd, E: InOrder, H: Hint, const R: usize, const M: usize, const T: usize>(
    s: S,
    v: &Rows<'_>,
    (weights, token): (&Weights<R>, usize),
    (first, sums): (usize, &mut [[S::F; M]; R]),
) {
    for j in 0..T {
        let [row, next] = v.at(token + j);
        for i in 0..M * S::LANES / GROUP {
            for line in 0..E::LINES {
                H::ask(s, next.wrapping_add(((first + i) * E::LINES + line) * LINE));
            }
            for pair in 0..HALF / S::LANES {
                let (group, offset) = ((first + i) * GROUP, pair * S::LANES);
                // SAFETY: a whole group of a row, see `Rows::new`; callers know that it is one.
                let values = unsafe { E::load_pair(s, row, v.layout, group, offset) };
                for r in 0..R {
                    let weight = s.splat(weights[r][j]);
                    for half in 0..2 {
                        let sum = &mut sums[r][(i * GROUP + offset + half * HALF) / S::LANES];
                        *sum = s.fma(weight, values[half], *sum);
                    }
                }
            }
        }
        H::after_row();
    }
}
