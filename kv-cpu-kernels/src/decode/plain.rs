//! Rows that are elements of a tensor: binary32, binary16 and bfloat16.
#![expect(
    clippy::inline_always,
    reason = "kernel code: offsets inside of a row, and helpers must inline into the \
              `#[target_feature]` caller"
)]
use super::{Decode, GROUP, HALF, Rest, rest_begin};
use crate::layout::RowLayout;
use crate::simd::{LANES_MAX, Simd};

/// An encoding with `SIZE` bytes for every value.
pub(crate) trait Valuewise {
    const SIZE: usize;
    /// As [`Decode::FACTOR`].
    const FACTOR: f32 = 1.0;
    /// Decodes `LANES` values from value `at` on.
    ///
    /// # Safety
    /// 1. Values `at..at + LANES` after `from` are readable.
    unsafe fn load<S: Simd>(s: S, from: *const u8, at: usize) -> S::F;
    /// Decodes two vectors, the second [`HALF`] values after the first.
    ///
    /// # Safety
    /// As [`Self::load`], for both.
    #[inline(always)]
    unsafe fn load_two<S: Simd>(s: S, from: *const u8, at: usize) -> [S::F; 2] {
        // SAFETY: the condition is passed on.
        let first = unsafe { Self::load(s, from, at) };
        // SAFETY: as above.
        [first, unsafe { Self::load(s, from, at + HALF) }]
    }
}

/// A [`Valuewise`] encoding that kernels write as well.
pub(crate) trait Plain: Valuewise {
    /// Encodes `LANES` values from value `at` on.
    ///
    /// # Safety
    /// 1. Values `at..at + LANES` after `to` are writable.
    unsafe fn store<S: Simd>(s: S, to: *mut u8, at: usize, v: S::F);
}

impl<E: Valuewise> Decode for E {
    const FACTOR: f32 = E::FACTOR;

    #[inline(always)]
    unsafe fn load_pair<S: Simd>(
        s: S,
        row: *const u8,
        _: &RowLayout,
        group: usize,
        offset: usize,
    ) -> [S::F; 2] {
        // SAFETY: inside the row, by conditions 1 and 2.
        unsafe { E::load_two(s, row, group + offset) }
    }

    #[inline(always)]
    unsafe fn rest<S: Simd>(s: S, row: *const u8, layout: &RowLayout) -> Rest {
        let begin = rest_begin(layout.dim());
        let n = layout.dim() - begin;
        let mut rest = [0.0; GROUP];
        for i in (0..n).step_by(S::LANES) {
            let v = if i + S::LANES <= n {
                // SAFETY: a whole vector of the row, by condition 1.
                unsafe { E::load(s, row, begin + i) }
            } else {
                // SAFETY: the last values of the row, by condition 1.
                unsafe { load_part::<S, E>(s, row, begin + i, n - i) }
            };
            // SAFETY: `i + LANES` is at most `GROUP`.
            unsafe { s.store(rest.as_mut_ptr(), i, v) };
        }
        rest
    }
    #[inline(always)]
    unsafe fn half_rest<S: Simd>(s: S, row: *const u8, layout: &RowLayout, offset: usize) -> S::F {
        // SAFETY: a vector of the rest, by conditions 1 and 2.
        unsafe { E::load(s, row, rest_begin(layout.dim()) + offset) }
    }
}

/// Decodes the first `n < LANES` values from value `at` on; the other lanes decode zero bytes, and
/// the bytes after the values are not read.
///
/// # Safety
/// 1. Values `at..at + n` after `from` are readable.
#[inline(always)]
pub(crate) unsafe fn load_part<S: Simd, E: Valuewise>(
    s: S,
    from: *const u8,
    at: usize,
    n: usize,
) -> S::F {
    let mut padded = [0_u8; LANES_MAX * 4];
    let n = n.min(LANES_MAX);
    let from = from.wrapping_add(at * E::SIZE);
    // Most rows have multiples of eight values, and copies of a known length need no call.
    let eight = 8 * E::SIZE;
    let (bytes, to) = (n * E::SIZE, padded.as_mut_ptr());
    if n == 8 {
        // SAFETY: as many bytes are readable by condition 1 and fit the array, which is new.
        unsafe { std::ptr::copy_nonoverlapping(from, to, eight) };
    } else {
        // SAFETY: as above.
        unsafe { std::ptr::copy_nonoverlapping(from, to, bytes) };
    }
    // SAFETY: the array holds `LANES_MAX` values of the widest kind.
    unsafe { E::load(s, padded.as_ptr(), 0) }
}

/// Encodes the first `n < LANES` lanes from value `at` on and touches no byte after them.
///
/// # Safety
/// 1. Values `at..at + n` after `to` are writable.
#[inline(always)]
pub(crate) unsafe fn store_part<S: Simd, E: Plain>(
    s: S,
    to: *mut u8,
    at: usize,
    n: usize,
    v: S::F,
) {
    let mut padded = [0_u8; LANES_MAX * 4];
    let n = n.min(LANES_MAX);
    let to = to.wrapping_add(at * E::SIZE);
    // SAFETY: the array holds `LANES_MAX` values of the widest kind.
    unsafe { E::store(s, padded.as_mut_ptr(), 0, v) };
    // SAFETY: `n * SIZE` bytes are writable by condition 1, and the array is new.
    unsafe { std::ptr::copy_nonoverlapping(padded.as_ptr(), to, n * E::SIZE) };
}

/// Implements [`Valuewise`] by the primitive that loads a vector, and [`Plain`] by the one that
/// stores it.
macro_rules! plain {
    ($($(#[$doc:meta])* $encoding:ident, $size:literal, $load:ident, $store:ident;)*) => {$(
        $(#[$doc])*
        pub(crate) struct $encoding;
        impl Valuewise for $encoding {
            const SIZE: usize = $size;
            #[inline(always)]
            unsafe fn load<S: Simd>(s: S, from: *const u8, at: usize) -> S::F {
                // SAFETY: condition 1 is passed on.
                unsafe { s.$load(from.cast(), at) }
            }
        }
        impl Plain for $encoding {
            #[inline(always)]
            unsafe fn store<S: Simd>(s: S, to: *mut u8, at: usize, v: S::F) {
                // SAFETY: condition 1 is passed on.
                unsafe { s.$store(to.cast(), at, v) }
            }
        }
    )*};
}

plain! {
    /// Binary32.
    F32, 4, load, store;
    /// Binary16.
    F16, 2, load_f16, store_f16;
    /// bfloat16.
    Bf16, 2, load_bf16, store_bf16;
}

/// bfloat16 with the even values of each whole group before the odd ones; see
/// [`RowLayout::in_pairs`].
pub(crate) struct Bf16Pairs;

impl Decode for Bf16Pairs {
    #[inline(always)]
    unsafe fn load_pair<S: Simd>(
        s: S,
        row: *const u8,
        _: &RowLayout,
        group: usize,
        offset: usize,
    ) -> [S::F; 2] {
        // SAFETY: `offset + LANES <= HALF`, so the values lie in the group.
        unsafe { s.load_bf16_pairs(row.cast(), group + 2 * offset) }
    }
    #[inline(always)]
    unsafe fn rest<S: Simd>(s: S, row: *const u8, layout: &RowLayout) -> Rest {
        // SAFETY: the conditions are passed on; what is no whole group is in order.
        unsafe { <Bf16 as Decode>::rest(s, row, layout) }
    }
    #[inline(always)]
    unsafe fn half_rest<S: Simd>(s: S, row: *const u8, layout: &RowLayout, offset: usize) -> S::F {
        // SAFETY: as above.
        unsafe { <Bf16 as Decode>::half_rest(s, row, layout, offset) }
    }
}
