//! How rows are read: one type an encoding.
//!
//! [`Stored`] is what the loops of [`super::body`] ask of an encoding. Here are the encodings with
//! a code of its own bytes for every value; [`super::codes`] has those that pack values in groups.
//! A scale of the whole row is applied by the loops, to scores and weights instead of values.
#![expect(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    clippy::inline_always,
    reason = "kernel code: bounds are asserted at the entry, and helpers must melt into the \
              function that carries the target features"
)]
use super::TileRows;
use super::simd::{LANES_MAX, LINE, Simd};
use super::tile::check_rows;
use crate::encoding::RowLayout;

/// Values of a group of the packed encodings; loops walk rows in such steps.
pub(crate) const GROUP: usize = 32;

/// The values of a row that fill no vector, and zeros behind them.
pub(crate) type Rest = [f32; GROUP];

/// How a row lies in memory, as a type. The `layout`s given are those of rows of this encoding.
pub(crate) trait Stored {
    /// Vectors are loaded from whole runs of so many values: 1 or [`GROUP`].
    const RUN: usize;
    /// What loaded values are multiplied with besides the row's scale.
    const FACTOR: f32 = 1.0;
    /// Whether one query row meets rows one after another instead of side by side, as memory gives
    /// them: where there is next to nothing to decode that is faster (`docs/performance.md`).
    const BY_ROW: bool = false;
    /// Cache lines of a group where its values need hardly any decoding, or 0. Rows are met whole
    /// then, in the order of memory, though some is decoded more than once (`docs/performance.md`).
    const LINES: usize = 0;

    /// Decodes `LANES` values from value `group + offset` on. `group` is a multiple of [`GROUP`],
    /// `offset` is below it and a multiple of `LANES`; the split lets a decoder know at compile
    /// time where in a group it is.
    ///
    /// # Safety
    /// 1. The bytes of the row are readable.
    /// 2. The vector ends at or before value [`whole`] of the row.
    unsafe fn load<S: Simd>(
        s: S,
        row: *const u8,
        layout: &RowLayout,
        group: usize,
        offset: usize,
    ) -> S::F;

    /// The vectors `offset` and `offset + GROUP / 2` values behind `group`, which loops always take
    /// together.
    ///
    /// # Safety
    /// As for [`Self::load`], of both.
    #[inline(always)]
    unsafe fn load_pair<S: Simd>(
        s: S,
        row: *const u8,
        layout: &RowLayout,
        group: usize,
        offset: usize,
    ) -> [S::F; 2] {
        // SAFETY: the conditions are passed on.
        let first = unsafe { Self::load(s, row, layout, group, offset) };
        // SAFETY: as above.
        [first, unsafe { Self::load(s, row, layout, group, offset + GROUP / 2) }]
    }

    /// Decodes values `begin..dim`, fewer than [`GROUP`].
    ///
    /// # Safety
    /// 1. The bytes of the row are readable.
    /// 2. `begin` is a multiple of `LANES`, and of [`GROUP`] if [`Self::RUN`] is.
    unsafe fn rest<S: Simd>(s: S, row: *const u8, layout: &RowLayout, begin: usize) -> Rest;
}

/// Value at which the vectors of a row end and its rest begins.
#[inline(always)]
pub(crate) fn whole<S: Simd, E: Stored>(dim: usize) -> usize {
    let step = if E::RUN == 1 { S::LANES } else { E::RUN };
    dim / step * step
}

/// An encoding with `SIZE` bytes for every value.
pub(crate) trait Valuewise {
    const SIZE: usize;
    /// Decodes `LANES` values from value `at` on.
    ///
    /// # Safety
    /// 1. Values `at..at + LANES` after `from` are readable.
    unsafe fn load<S: Simd>(s: S, from: *const u8, at: usize) -> S::F;
}

/// One that values can be encoded in as well.
pub(crate) trait Plain: Valuewise {
    /// Encodes `LANES` values from value `at` on.
    ///
    /// # Safety
    /// 1. Values `at..at + LANES` after `to` are writable.
    unsafe fn store<S: Simd>(s: S, to: *mut u8, at: usize, v: S::F);
}

impl<E: Valuewise> Stored for E {
    const RUN: usize = 1;
    const LINES: usize = if E::SIZE > 1 { GROUP * E::SIZE / LINE } else { 0 };

    #[inline(always)]
    unsafe fn load<S: Simd>(
        s: S,
        row: *const u8,
        _: &RowLayout,
        group: usize,
        offset: usize,
    ) -> S::F {
        // SAFETY: inside the row, by conditions 1 and 2.
        unsafe { <E as Valuewise>::load(s, row, group + offset) }
    }

    #[inline(always)]
    unsafe fn rest<S: Simd>(s: S, row: *const u8, layout: &RowLayout, begin: usize) -> Rest {
        let mut rest = [0.0; GROUP];
        let n = layout.dim() - begin;
        // SAFETY: the last `n` values of the row, fewer than a vector's by condition 2.
        let v = unsafe { load_part::<S, E>(s, row, begin, n) };
        // SAFETY: the array holds `LANES_MAX` values and more.
        unsafe { s.store(rest.as_mut_ptr(), 0, v) };
        rest
    }
}

/// Binary32.
pub(crate) struct F32;
/// Binary16.
pub(crate) struct F16;
/// bfloat16.
pub(crate) struct Bf16;
/// FP8 E4M3.
pub(crate) struct E4m3;
/// FP8 E5M2.
pub(crate) struct E5m2;
/// Signed bytes.
pub(crate) struct Int8;

/// The impls of an encoding whose vectors have a primitive to load them, and perhaps to store them.
macro_rules! valuewise {
    ($($encoding:ident, $size:literal, $load:ident $(, $store:ident)?;)*) => {$(
        impl Valuewise for $encoding {
            const SIZE: usize = $size;
            #[inline(always)]
            unsafe fn load<S: Simd>(s: S, from: *const u8, at: usize) -> S::F {
                // SAFETY: condition 1 is passed on.
                unsafe { s.$load(from.cast(), at) }
            }
        }
        $(impl Plain for $encoding {
            #[inline(always)]
            unsafe fn store<S: Simd>(s: S, to: *mut u8, at: usize, v: S::F) {
                // SAFETY: condition 1 is passed on.
                unsafe { s.$store(to.cast(), at, v) }
            }
        })?
    )*};
}

valuewise! {
    F32, 4, load, store;
    F16, 2, load_f16, store_f16;
    Bf16, 2, load_bf16, store_bf16;
    E4m3, 1, load_e4m3;
    E5m2, 1, load_e5m2;
    Int8, 1, load_i8;
}

/// FP8 E4M3 in tiles that have no NaN, without which a code is a binary16 but for shifts. A scale
/// times the factor is finite: that of the largest `f32` is below 2^120.
pub(crate) struct FiniteE4m3;

impl FiniteE4m3 {
    /// Whether rows are such.
    #[inline(always)]
    pub(super) fn holds<S: Simd>(
        s: S,
        rows: &TileRows<'_>,
        (begin, end): (usize, usize),
        layout: &RowLayout,
    ) -> bool {
        check_rows(rows, (begin, end), layout);
        // SAFETY: rows of the layout, whose values are their first bytes.
        !unsafe { s.has_nan_e4m3(&rows.at()[begin..end], layout.dim()) }
    }
}

impl Stored for FiniteE4m3 {
    const RUN: usize = 1;
    const FACTOR: f32 = 256.0;
    #[inline(always)]
    unsafe fn load<S: Simd>(
        s: S,
        row: *const u8,
        layout: &RowLayout,
        group: usize,
        offset: usize,
    ) -> S::F {
        // SAFETY: the conditions are passed on.
        let values = unsafe { <E4m3 as Stored>::load(s, row, layout, group, offset) };
        s.mul(values, s.splat(1.0 / Self::FACTOR))
    }
    #[inline(always)]
    unsafe fn load_pair<S: Simd>(
        s: S,
        row: *const u8,
        _: &RowLayout,
        group: usize,
        offset: usize,
    ) -> [S::F; 2] {
        // SAFETY: inside the row, by conditions 1 and 2.
        unsafe { s.load_finite_e4m3(row, group + offset) }
    }
    #[inline(always)]
    unsafe fn rest<S: Simd>(s: S, row: *const u8, layout: &RowLayout, begin: usize) -> Rest {
        // SAFETY: the conditions are passed on.
        let mut rest = unsafe { <E4m3 as Stored>::rest(s, row, layout, begin) };
        for value in &mut rest {
            *value /= Self::FACTOR;
        }
        rest
    }
}

/// bfloat16, the values of each whole group in another order: first all even ones, then all odd
/// ones. That is how two of them lie in a word of 32 bits, which saves widening them. Queries must
/// have the same order, [`split_pairs`], and outputs get it, [`join_pairs`].
pub(crate) struct Bf16Pairs;

impl Stored for Bf16Pairs {
    const RUN: usize = GROUP;
    const BY_ROW: bool = true;
    const LINES: usize = 1;
    #[inline(always)]
    unsafe fn load<S: Simd>(
        s: S,
        row: *const u8,
        layout: &RowLayout,
        group: usize,
        offset: usize,
    ) -> S::F {
        let (half, offset) = (offset / (GROUP / 2), offset % (GROUP / 2));
        // SAFETY: vectors end with their group, as there are no others in a `RUN`.
        let [even, odd] = unsafe { Self::load_pair(s, row, layout, group, offset) };
        if half == 0 { even } else { odd }
    }
    #[inline(always)]
    unsafe fn load_pair<S: Simd>(
        s: S,
        row: *const u8,
        _layout: &RowLayout,
        group: usize,
        offset: usize,
    ) -> [S::F; 2] {
        // SAFETY: `offset + LANES <= GROUP / 2`, so the values lie in the group.
        unsafe { s.load_bf16_pairs(row.cast(), group + 2 * offset) }
    }
    #[inline(always)]
    unsafe fn rest<S: Simd>(s: S, row: *const u8, layout: &RowLayout, begin: usize) -> Rest {
        let (mut rest, mut i, dim) = ([0.0; GROUP], begin, layout.dim());
        while i + S::LANES <= dim {
            // SAFETY: values of the row, by condition 1.
            let v = unsafe { s.load_bf16(row.cast(), i) };
            // SAFETY: fewer than `GROUP` values, by condition 2 and as there are no whole groups.
            unsafe { s.store(rest.as_mut_ptr(), i - begin, v) };
            i += S::LANES;
        }
        if i < dim {
            // SAFETY: the last values of the row, fewer than a vector's.
            let v = unsafe { load_part::<S, Bf16>(s, row, i, dim - i) };
            // SAFETY: `i - begin` is a multiple of `LANES` below `GROUP`, which `LANES` divides.
            unsafe { s.store(rest.as_mut_ptr(), i - begin, v) };
        }
        rest
    }
}

/// Brings a row into the order of [`Bf16Pairs`].
#[inline(always)]
pub(crate) fn split_pairs<S: Simd>(s: S, row: &mut [f32]) {
    for group in row.as_chunks_mut::<GROUP>().0 {
        s.split_pairs(group);
    }
}

/// Brings a row back into its own order.
#[inline(always)]
pub(crate) fn join_pairs<S: Simd>(s: S, row: &mut [f32]) {
    for group in row.as_chunks_mut::<GROUP>().0 {
        s.join_pairs(group);
    }
}

/// Decodes the first `n < LANES` values from value `at` on; the other lanes are those of zero bytes
/// and the bytes behind the values are not read.
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
    // SAFETY: `n * SIZE` bytes are readable by condition 1 and fit the array, which is new.
    unsafe { std::ptr::copy_nonoverlapping(from, padded.as_mut_ptr(), n * E::SIZE) };
    // SAFETY: the array holds `LANES_MAX` values of the widest kind.
    unsafe { <E as Valuewise>::load(s, padded.as_ptr(), 0) }
}

/// Encodes the first `n < LANES` lanes from value `at` on and touches no byte behind them.
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
