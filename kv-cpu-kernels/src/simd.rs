//! The vector primitives that kernel bodies and decoders are written in.
//!
//! A token of a type that implements [`Simd`] exists only where its instructions may run: inside
//! functions that carry the target features, called through a table that was handed out after
//! detection. Arithmetic is therefore safe; memory access is not, because bounds are checked once
//! per call, not per vector. Closures do not carry the features: a loop that calls one with a token
//! in it is many times slower. Knows nothing of attention.
#![expect(
    clippy::inline_always,
    clippy::needless_range_loop,
    reason = "kernel code: bounds are asserted at the entry, and helpers must inline into the \
              function that carries the target features"
)]
use half::f16;
use kv_format::minifloat::E4M3;

/// Widest vector of any instruction set, in `f32` lanes; scratch rows are padded to it.
pub(crate) const LANES_MAX: usize = 16;

/// Bytes of a cache line.
pub(crate) const LINE: usize = 64;

/// Constants of [`Simd::exp`] and [`Simd::exp_short`].
pub(crate) mod exp {
    /// The natural logarithm of 2 in two parts, the first of few bits.
    pub(crate) const LN2_HIGH: f32 = 0.693_359_4;
    pub(crate) const LN2_LOW: f32 = -2.121_944_4e-4;
    /// Below this argument the result would be subnormal.
    pub(crate) const LEAST: f32 = -87.336;
    /// Adding and subtracting it rounds to integers: a number this large has no fraction bits.
    pub(crate) const ROUND: f32 = 12_582_912.0;
    /// Minimax polynomial of `(e^r - 1 - r) / r^2` for `r` up to half of `ln 2`, highest power
    /// first; its relative error in `e^r` is 3.1e-9.
    pub(crate) const SERIES: [f32; 5] =
        [1.381_454e-3, 8.368_745e-3, 4.166_839e-2, 1.666_652_1e-1, 4.999_999_4e-1];
    /// Minimax polynomial of `(2^r - 1) / r` for `r` up to a half, highest power first; its
    /// relative error in `2^r` is 3.6e-6.
    pub(crate) const SHORT: [f32; 4] =
        [9.782_983e-3, 5.597_708_7e-2, 2.402_070_9e-1, 6.931_135_7e-1];
}

/// One instruction set's vectors of `f32`.
pub(crate) trait Simd: Copy {
    /// A vector.
    type F: Copy;
    /// A vector of `LANES` unsigned integers of 32 bits.
    type I: Copy;
    /// Values in a vector; divides [`LANES_MAX`].
    const LANES: usize;
    /// Vectors of sums that a register tile has: 4, 8 or 16.
    const SUMS: usize;

    fn splat(self, x: f32) -> Self::F;
    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    /// Returns `a * b + c`.
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// Returns the greater of two lanes; `b` or NaN if either is NaN.
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    /// Returns `2^n` of integers in `-126..=127`.
    fn pow2(self, n: Self::F) -> Self::F;
    /// Returns zero where `x < limit`, else `value`.
    fn zero_below(self, x: Self::F, limit: f32, value: Self::F) -> Self::F;
    fn reduce_add(self, v: Self::F) -> f32;
    fn reduce_max(self, v: Self::F) -> f32;

    fn div(self, a: Self::F, b: Self::F) -> Self::F;

    /// Returns eight sums at once, each with the bits of [`Self::reduce_add`].
    #[inline(always)]
    fn reduce_add8(self, v: [Self::F; 8]) -> [f32; 8] {
        let mut sums = [0.0; 8];
        for i in 0..8 {
            sums[i] = self.reduce_add(v[i]);
        }
        sums
    }
    /// Returns sixteen sums at once, each with the bits of [`Self::reduce_add`].
    #[inline(always)]
    fn reduce_add16(self, [a, b]: [[Self::F; 8]; 2]) -> [f32; 16] {
        let mut sums = [0.0; 16];
        let (low, high) = sums.split_at_mut(8);
        low.copy_from_slice(&self.reduce_add8(a));
        high.copy_from_slice(&self.reduce_add8(b));
        sums
    }

    /// Returns whether any lane of `a` is greater than the lane of `b`; a NaN is not.
    #[inline(always)]
    fn any_greater(self, a: Self::F, b: Self::F) -> bool {
        let (mut all, mut limits) = ([0.0; LANES_MAX], [0.0; LANES_MAX]);
        // SAFETY: an array of `LANES_MAX`.
        unsafe { self.store(all.as_mut_ptr(), 0, a) };
        // SAFETY: as above.
        unsafe { self.store(limits.as_mut_ptr(), 0, b) };
        all.iter().zip(limits).any(|(a, b)| *a > b)
    }

    /// Returns `e^x` for `x <= 0` to about 1 ulp; 0 for negative infinity and below the least
    /// normal number, NaN for NaN. `2^n * p(x - n ln 2)`, with `ln 2` in two parts as in Cephes'
    /// `expf`.
    #[inline(always)]
    fn exp(self, x: Self::F) -> Self::F {
        let clamped = self.max(self.splat(-88.0), x);
        let n = self.fma(clamped, self.splat(std::f32::consts::LOG2_E), self.splat(exp::ROUND));
        let n = self.add(n, self.splat(-exp::ROUND));
        let r = self.fma(n, self.splat(-exp::LN2_HIGH), clamped);
        let r = self.fma(n, self.splat(-exp::LN2_LOW), r);
        let mut p = self.splat(exp::SERIES[0]);
        for term in &exp::SERIES[1..] {
            p = self.fma(p, r, self.splat(*term));
        }
        p = self.fma(self.mul(p, r), r, r);
        p = self.add(p, self.splat(1.0));
        // `n` is -127 only below `LEAST`, where the result is replaced.
        self.zero_below(x, exp::LEAST, self.mul(p, self.pow2(n)))
    }

    /// Returns `e^x` with a relative error of `2^-17`, for outputs of 16 bits: `2^n * p(x / ln 2 -
    /// n)`. Exact for zero.
    #[inline(always)]
    fn exp_short(self, x: Self::F) -> Self::F {
        let log2_e = self.splat(std::f32::consts::LOG2_E);
        let n = self.add(self.fma(x, log2_e, self.splat(exp::ROUND)), self.splat(-exp::ROUND));
        let r = self.fma(x, log2_e, self.mul(n, self.splat(-1.0)));
        let mut p = self.splat(exp::SHORT[0]);
        for term in &exp::SHORT[1..] {
            p = self.fma(p, r, self.splat(*term));
        }
        p = self.fma(p, r, self.splat(1.0));
        // Where `n` is out of range, or not finite, the result is replaced.
        self.zero_below(x, exp::LEAST, self.mul(p, self.pow2(n)))
    }

    /// Returns the hyperbolic tangent to about 2 ulp: `-e / (e + 2)` for `e = exp(-2 |x|) - 1`,
    /// with the sign of `x`. The subtraction is exact for small `x`, as the series of [`Self::exp`]
    /// has no 1 in it.
    #[inline(always)]
    fn tanh(self, x: Self::F) -> Self::F {
        let minus = self.mul(x, self.splat(-1.0));
        let y = self.mul(self.max(x, minus), self.splat(-2.0));
        // From here on the result is 1.
        let y = self.max(self.splat(-40.0), y);
        let n = self.fma(y, self.splat(std::f32::consts::LOG2_E), self.splat(exp::ROUND));
        let n = self.add(n, self.splat(-exp::ROUND));
        let r = self.fma(n, self.splat(-exp::LN2_HIGH), y);
        let r = self.fma(n, self.splat(-exp::LN2_LOW), r);
        let mut p = self.splat(exp::SERIES[0]);
        for term in &exp::SERIES[1..] {
            p = self.fma(p, r, self.splat(*term));
        }
        p = self.fma(self.mul(p, r), r, r);
        let power = self.pow2(n);
        let e = self.fma(power, p, self.add(power, self.splat(-1.0)));
        let t = self.div(self.mul(e, self.splat(-1.0)), self.add(e, self.splat(2.0)));
        // One of the two is zero.
        let negative = self.zero_below(minus, 0.0, t);
        self.fma(negative, self.splat(-1.0), self.zero_below(x, 0.0, t))
    }

    /// Prefetches the cache line at `at` into L1, non-temporal where possible; never faults.
    #[inline(always)]
    fn prefetch_l1(self, _at: *const u8) {}
    /// Prefetches the cache line at `at` into L2, where possible; never faults.
    #[inline(always)]
    fn prefetch_l2(self, at: *const u8) {
        self.prefetch_l1(at);
    }
    /// Writes a whole cache line with a non-temporal store where there is one, so that the line is
    /// not read first. Other threads see it after a [`Self::fence`] at the latest.
    ///
    /// # Safety
    /// 1. A cache line begins at `to`.
    #[inline(always)]
    unsafe fn stream(self, from: &[u8; LINE], to: &mut [u8; LINE]) {
        *to = *from;
    }
    /// Makes lines written by [`Self::stream`] visible before later stores.
    #[inline(always)]
    fn fence(self) {}

    /// Loads `LANES` values from `from + at` on.
    ///
    /// # Safety
    /// 1. `from[at..at + LANES]` is readable. Alignment is not needed.
    unsafe fn load(self, from: *const f32, at: usize) -> Self::F;
    /// Stores `LANES` values from `to + at` on.
    ///
    /// # Safety
    /// 1. `to[at..at + LANES]` is writable. Alignment is not needed.
    unsafe fn store(self, to: *mut f32, at: usize, v: Self::F);
    /// As [`Self::load`], from binary16.
    ///
    /// # Safety
    /// As [`Self::load`].
    unsafe fn load_f16(self, from: *const u16, at: usize) -> Self::F;
    /// Returns `LANES` values of binary16, the first at `from`, each `stride` bytes after the one
    /// before, less than 2^27.
    ///
    /// # Safety
    /// 1. They are readable, and so are the two bytes before each. Alignment is not needed.
    #[inline(always)]
    unsafe fn gather_f16(self, from: *const u8, stride: u32) -> Self::F {
        let stride = kv_format::num::to_usize(stride);
        let mut bits = [0; LANES_MAX];
        for i in 0..Self::LANES {
            let at = from.wrapping_add(i * stride).cast::<[u8; 2]>();
            // SAFETY: condition 1.
            bits[i] = u16::from_le_bytes(unsafe { at.read() });
        }
        // SAFETY: an array of as many.
        unsafe { self.load_f16(bits.as_ptr(), 0) }
    }
    /// As [`Self::load`], from bfloat16.
    ///
    /// # Safety
    /// As [`Self::load`].
    unsafe fn load_bf16(self, from: *const u16, at: usize) -> Self::F;
    /// Returns `2 * LANES` values from bfloat16, from `from + at` on: the even ones, and the odd
    /// ones. A word of 32 bits has one of each, and a shift or a mask makes it an `f32`: no value
    /// is widened.
    ///
    /// # Safety
    /// 1. `from[at..at + 2 * LANES]` is readable. Alignment is not needed.
    unsafe fn load_bf16_pairs(self, from: *const u16, at: usize) -> [Self::F; 2];
    /// As [`Self::store`], to binary16, rounded to nearest even.
    ///
    /// # Safety
    /// As [`Self::store`].
    unsafe fn store_f16(self, to: *mut u16, at: usize, v: Self::F);
    /// As [`Self::store`], to bfloat16, rounded to nearest even.
    ///
    /// # Safety
    /// As [`Self::store`].
    unsafe fn store_bf16(self, to: *mut u16, at: usize, v: Self::F);

    /// Moves the even ones of 32 values before the odd ones.
    #[inline(always)]
    fn split_pairs(self, group: &mut [f32; 32]) {
        let from = *group;
        let (even, odd) = group.split_at_mut(16);
        for ((even, odd), [a, b]) in even.iter_mut().zip(odd).zip(from.as_chunks().0) {
            (*even, *odd) = (*a, *b);
        }
    }
    /// Undoes [`Self::split_pairs`].
    #[inline(always)]
    fn join_pairs(self, group: &mut [f32; 32]) {
        let from = *group;
        let (even, odd) = from.split_at(16);
        for (([a, b], even), odd) in group.as_chunks_mut().0.iter_mut().zip(even).zip(odd) {
            (*a, *b) = (*even, *odd);
        }
    }

    /// Returns `word` in every lane.
    fn splat_bits(self, word: u32) -> Self::I;
    /// Shifts every lane logically, by fewer than 32 bits.
    fn shl(self, x: Self::I, bits: u32) -> Self::I;
    fn shr(self, x: Self::I, bits: u32) -> Self::I;
    /// As above, each lane by its own number of bits.
    fn shl_each(self, x: Self::I, bits: Self::I) -> Self::I;
    fn shr_each(self, x: Self::I, bits: Self::I) -> Self::I;
    /// Returns the lowest four bits of each lane as a number.
    fn nibble(self, x: Self::I) -> Self::F;
    /// Returns `x`, negated where the top bit of `signs` is set.
    fn flip(self, x: Self::F, signs: Self::I) -> Self::F;
    /// Returns `table[code % 4]`.
    fn lookup4(self, table: &[f32; 4], code: Self::I) -> Self::F;
    /// Returns `table[low % 16 + high % 2 * 16]`.
    fn lookup32(self, table: &[f32; 32], low: Self::I, high: Self::I) -> Self::F;
    /// Returns `magnitudes[code % 8]`, negated where bit 3 of the code is set.
    fn symmetric16(self, magnitudes: &[f32; 8], code: Self::I) -> Self::F;

    /// Returns a binary16 in every lane, given by its bits.
    #[inline(always)]
    fn splat_f16(self, bits: u16) -> Self::F {
        self.splat(f16::from_bits(bits).to_f32())
    }
    /// As [`Self::load`], 32-bit words as they are.
    ///
    /// # Safety
    /// As [`Self::load`].
    unsafe fn load_bits(self, from: *const u32, at: usize) -> Self::I;
    /// As [`Self::load`], one unsigned byte per lane.
    ///
    /// # Safety
    /// As [`Self::load`].
    unsafe fn load_bytes(self, from: *const u8, at: usize) -> Self::I;
    /// Returns one of eight bytes per lane: lane `i` has `from[(at + i) % 8]`; `at` is a multiple
    /// of `LANES`.
    ///
    /// # Safety
    /// 1. `from[0..8]` is readable.
    unsafe fn load_of_8(self, from: *const u8, at: usize) -> Self::I;
    /// Nibbles in the lowest four bits of each lane, whose upper bits are arbitrary: lane `i` has
    /// value `at + i`, even ones lie in the low halves of bytes.
    ///
    /// # Safety
    /// 1. The bytes of values `at..at + LANES` are readable; `at` is a multiple of `LANES`.
    unsafe fn load_nibbles(self, from: *const u8, at: usize) -> Self::I;
    /// As [`Self::load`], from signed bytes.
    ///
    /// # Safety
    /// As [`Self::load`].
    unsafe fn load_i8(self, from: *const i8, at: usize) -> Self::F;
    /// As [`Self::load`], the values of FP8 E4M3 times 2^-8.
    ///
    /// # Safety
    /// As [`Self::load`].
    #[inline(always)]
    unsafe fn load_e4m3(self, from: *const u8, at: usize) -> Self::F {
        let mut values = [0.0; LANES_MAX];
        for i in 0..Self::LANES {
            // SAFETY: `i < LANES`, by the condition of `load`.
            let code = unsafe { from.wrapping_add(at + i).read() };
            values[i] = E4M3[usize::from(code)] / 256.0;
        }
        // SAFETY: an array of `LANES_MAX`.
        unsafe { self.load(values.as_ptr(), 0) }
    }
    /// Returns the vectors of [`Self::load_e4m3`] at `at`, and `apart` values after it.
    ///
    /// # Safety
    /// As [`Self::load`], for both.
    #[inline(always)]
    unsafe fn load_e4m3_pair(self, from: *const u8, at: usize, apart: usize) -> [Self::F; 2] {
        // SAFETY: the condition is passed on.
        let first = unsafe { self.load_e4m3(from, at) };
        // SAFETY: as above.
        [first, unsafe { self.load_e4m3(from, at + apart) }]
    }
    /// As [`Self::load`], from FP8 E5M2, the upper byte of a binary16.
    ///
    /// # Safety
    /// As [`Self::load`].
    #[inline(always)]
    unsafe fn load_e5m2(self, from: *const u8, at: usize) -> Self::F {
        let mut values = [0_u16; LANES_MAX];
        for i in 0..Self::LANES {
            // SAFETY: `i < LANES`, by the condition of `load`.
            let code = unsafe { from.wrapping_add(at + i).read() };
            values[i] = u16::from(code) << 8;
        }
        // SAFETY: an array of `LANES_MAX`.
        unsafe { self.load_f16(values.as_ptr(), 0) }
    }
}
