//! The vector primitives that kernel bodies are written in, and the element encodings they read.
//!
//! A token of a type that implements [`Simd`] exists only where its instructions may run: inside
//! functions that carry the target features, called through a table that was handed out after
//! detection. That is what lets arithmetic be safe; memory access is not, because bounds are
//! checked once a call and not once a vector. Knows nothing of attention.
#![expect(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    clippy::inline_always,
    reason = "kernel code: bounds are asserted at the entry, and helpers must melt into the \
              function that carries the target features"
)]
/// Widest vector of any instruction set, in `f32` lanes; scratch rows are padded to it.
pub(crate) const LANES_MAX: usize = 16;

/// One instruction set's vectors of `f32`.
pub(crate) trait Simd: Copy {
    /// A vector.
    type F: Copy;
    /// Values in a vector; divides [`LANES_MAX`].
    const LANES: usize;

    fn splat(self, x: f32) -> Self::F;
    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`.
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// The greater; `b` where either is NaN, or NaN.
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    /// Nearest integers.
    fn round(self, x: Self::F) -> Self::F;
    /// `2^n` of integers in `-126..=127`.
    fn pow2(self, n: Self::F) -> Self::F;
    /// Zero where `x < limit`, else `value`.
    fn zero_below(self, x: Self::F, limit: f32, value: Self::F) -> Self::F;
    fn reduce_add(self, v: Self::F) -> f32;
    fn reduce_max(self, v: Self::F) -> f32;

    /// Eight sums at once, each with the bits of [`Self::reduce_add`].
    #[inline(always)]
    fn reduce_add8(self, v: [Self::F; 8]) -> [f32; 8] {
        let mut sums = [0.0; 8];
        for i in 0..8 {
            sums[i] = self.reduce_add(v[i]);
        }
        sums
    }

    /// `e^x` for `x <= 0` to about 1 ulp; 0 for negative infinity and below the least normal
    /// number, NaN for NaN. Cephes' `expf`: `2^n * p(x - n ln 2)`.
    #[inline(always)]
    fn exp(self, x: Self::F) -> Self::F {
        const LN2_HIGH: f32 = 0.693_359_4;
        const LN2_LOW: f32 = -2.121_944_4e-4;
        const LEAST: f32 = -87.336;
        let clamped = self.max(self.splat(-88.0), x);
        let n = self.round(self.mul(clamped, self.splat(std::f32::consts::LOG2_E)));
        let r = self.fma(n, self.splat(-LN2_HIGH), clamped);
        let r = self.fma(n, self.splat(-LN2_LOW), r);
        let mut p = self.splat(1.987_569_1e-4);
        p = self.fma(p, r, self.splat(1.398_2e-3));
        p = self.fma(p, r, self.splat(8.333_452e-3));
        p = self.fma(p, r, self.splat(4.166_579_6e-2));
        p = self.fma(p, r, self.splat(1.666_666_5e-1));
        p = self.fma(p, r, self.splat(5.0e-1));
        p = self.fma(self.mul(p, r), r, r);
        p = self.add(p, self.splat(1.0));
        // `n` is -127 only below `LEAST`, where the result is replaced.
        self.zero_below(x, LEAST, self.mul(p, self.pow2(n)))
    }

    /// Starts to fetch the cache line at `at`; never faults.
    #[inline(always)]
    fn prefetch(self, _at: *const u8) {}

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
    /// As [`Self::load`], from bfloat16.
    ///
    /// # Safety
    /// As [`Self::load`].
    unsafe fn load_bf16(self, from: *const u16, at: usize) -> Self::F;
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
}

/// How values lie in memory, as a type.
pub(crate) trait Stored {
    /// Bytes of one value.
    const SIZE: usize;
    /// Decodes `LANES` values from element `at` on.
    ///
    /// # Safety
    /// 1. Elements `at..at + LANES` after `from` are readable.
    unsafe fn load<S: Simd>(s: S, from: *const u8, at: usize) -> S::F;
    /// Encodes `LANES` values from element `at` on.
    ///
    /// # Safety
    /// 1. Elements `at..at + LANES` after `to` are writable.
    unsafe fn store<S: Simd>(s: S, to: *mut u8, at: usize, v: S::F);
}

/// Binary32.
pub(crate) struct F32;
/// Binary16.
pub(crate) struct F16;
/// bfloat16.
pub(crate) struct Bf16;

impl Stored for F32 {
    const SIZE: usize = 4;
    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, from: *const u8, at: usize) -> S::F {
        // SAFETY: condition 1 is passed on.
        unsafe { s.load(from.cast(), at) }
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(s: S, to: *mut u8, at: usize, v: S::F) {
        // SAFETY: condition 1 is passed on.
        unsafe { s.store(to.cast(), at, v) }
    }
}

impl Stored for F16 {
    const SIZE: usize = 2;
    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, from: *const u8, at: usize) -> S::F {
        // SAFETY: condition 1 is passed on.
        unsafe { s.load_f16(from.cast(), at) }
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(s: S, to: *mut u8, at: usize, v: S::F) {
        // SAFETY: condition 1 is passed on.
        unsafe { s.store_f16(to.cast(), at, v) }
    }
}

impl Stored for Bf16 {
    const SIZE: usize = 2;
    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, from: *const u8, at: usize) -> S::F {
        // SAFETY: condition 1 is passed on.
        unsafe { s.load_bf16(from.cast(), at) }
    }
    #[inline(always)]
    unsafe fn store<S: Simd>(s: S, to: *mut u8, at: usize, v: S::F) {
        // SAFETY: condition 1 is passed on.
        unsafe { s.store_bf16(to.cast(), at, v) }
    }
}

/// Decodes the first `n < LANES` values from element `at` on; the other lanes are zero and the
/// bytes behind the values are not read.
///
/// # Safety
/// 1. Elements `at..at + n` after `from` are readable.
#[inline(always)]
pub(crate) unsafe fn load_tail<S: Simd, E: Stored>(
    s: S,
    from: *const u8,
    at: usize,
    n: usize,
) -> S::F {
    let mut padded = [0_u8; LANES_MAX * 4];
    let n = n.min(LANES_MAX);
    let from = from.wrapping_add(at * E::SIZE);
    // SAFETY: `n * SIZE` bytes are readable by condition 1 and fit the array, which is new.
    unsafe { std::ptr::copy_nonoverlapping(from, padded.as_mut_ptr(), n * E::SIZE) };
    // SAFETY: the array holds `LANES_MAX` elements of the widest kind.
    unsafe { E::load(s, padded.as_ptr(), 0) }
}

/// Encodes the first `n < LANES` lanes from element `at` on and touches no byte behind them.
///
/// # Safety
/// 1. Elements `at..at + n` after `to` are writable.
#[inline(always)]
pub(crate) unsafe fn store_tail<S: Simd, E: Stored>(
    s: S,
    to: *mut u8,
    at: usize,
    n: usize,
    v: S::F,
) {
    let mut padded = [0_u8; LANES_MAX * 4];
    let n = n.min(LANES_MAX);
    let to = to.wrapping_add(at * E::SIZE);
    // SAFETY: the array holds `LANES_MAX` elements of the widest kind.
    unsafe { E::store(s, padded.as_mut_ptr(), 0, v) };
    // SAFETY: `n * SIZE` bytes are writable by condition 1, and the array is new.
    unsafe { std::ptr::copy_nonoverlapping(padded.as_ptr(), to, n * E::SIZE) };
}
