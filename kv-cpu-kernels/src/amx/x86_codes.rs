//! Turns codes of one byte into bf16, 64 at a time: AVX-512 VBMI, VBMI2 and GFNI.
#![expect(
    clippy::as_conversions,
    clippy::inline_always,
    reason = "indices computed at compile time, and helpers that must inline into the \
              `#[target_feature]` caller"
)]
#![allow(
    clippy::wildcard_imports,
    reason = "intrinsics by the dozen; clippy is silent about them in test builds, so not `expect`"
)]
use std::arch::x86_64::*;

use super::BLOCK;
use super::codes::{Codes, Floats, Integers, Linear, Lines};
#[cfg(doc)]
use super::unit::Unit;
use crate::decode::GROUP;

/// Source of each code of two rows of words, an index into two groups of [`GROUP`] codes: codes of
/// the first row have even indices in this list, those of the second row odd ones.
#[repr(align(64))]
struct Order([u8; 64]);

/// Returns the order of [`Unit::code_words`], or of [`Unit::code_pairs`].
const fn order(are_pairs: bool) -> Order {
    let mut order = [0; 64];
    let mut i = 0_u8;
    while i < 64 {
        // Which row of words, and which value of it.
        let (row, value) = (i % 2, i / 2);
        let (word, upper) = (value / 2, value % 2);
        order[i as usize] =
            if are_pairs { upper * 32 + row * 16 + word } else { row * 32 + upper * 16 + word };
        i += 1;
    }
    Order(order)
}
static WORDS: Order = order(false);
static PAIRS: Order = order(true);

const _: () = assert!(GROUP == 32 && BLOCK == 16, "the orders rely on these sizes");

/// Writes the words of [`Unit::code_words`], or those of [`Unit::code_pairs`].
///
/// # Safety
/// 1. [`GROUP`] codes from each place on are readable, and rows of [`BLOCK`] words are writable.
/// 2. The CPU has the features of what this calls.
#[inline(always)]
pub(super) unsafe fn words<const ARE_PAIRS: bool>(
    codes: &Codes,
    from: [*const u8; 4],
    to: [*mut u32; 4],
) {
    let order = if ARE_PAIRS { &PAIRS } else { &WORDS };
    for ([a, b], to) in from.as_chunks::<2>().0.iter().zip(to.as_chunks::<2>().0) {
        // SAFETY: conditions 1 and 2.
        let both = unsafe { load([*a, *b], order) };
        // SAFETY: as above.
        unsafe { convert(codes, both, *to) };
    }
}

/// Writes the words of [`Unit::code_line`].
///
/// # Safety
/// 1. A line from the place on is readable, and rows of [`BLOCK`] words are writable.
/// 2. The CPU has the features of what this calls.
#[inline(always)]
pub(super) unsafe fn line(codes: &Codes, from: *const u8, to: [*mut u32; 2]) {
    // SAFETY: conditions 1 and 2.
    let line = unsafe { load_line(from) };
    // SAFETY: as above.
    unsafe { convert(codes, line, to) };
}

/// Stores a row of words of the codes at even indices, and one of those at odd indices.
///
/// # Safety
/// 1. [`BLOCK`] words from both pointers on are writable.
/// 2. The CPU has the features of what this calls.
#[inline(always)]
unsafe fn convert(codes: &Codes, of: __m512i, to: [*mut u32; 2]) {
    let bytes = match codes {
        // SAFETY: condition 2.
        Codes::Floats(floats) => unsafe { bytes_of_floats(floats, of) },
        // SAFETY: condition 2.
        Codes::Integers(integers) => unsafe { bytes_of_integers(integers, of) },
    };
    // SAFETY: conditions 1 and 2.
    unsafe { store(bytes, to) };
}

/// Loads a line of codes.
///
/// # Safety
/// 1. It is readable.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn load_line(from: *const u8) -> __m512i {
    // SAFETY: the caller's condition.
    unsafe { _mm512_loadu_si512(from.cast()) }
}

/// Loads codes from two places, in an order.
///
/// # Safety
/// 1. [`GROUP`] of each are readable.
#[inline]
#[target_feature(enable = "avx512f,avx512vbmi")]
unsafe fn load([a, b]: [*const u8; 2], order: &Order) -> __m512i {
    // SAFETY: 64 bytes, aligned by their type.
    let order = unsafe { _mm512_load_si512(order.0.as_ptr().cast()) };
    // SAFETY: the caller's condition.
    let a = unsafe { _mm256_loadu_si256(a.cast()) };
    // SAFETY: the caller's condition.
    let b = unsafe { _mm256_loadu_si256(b.cast()) };
    let both = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(a), b);
    _mm512_permutexvar_epi8(order, both)
}

/// Stores a row of words of the codes at even indices, and one of those at odd indices, given as
/// lower and upper bytes.
///
/// # Safety
/// 1. [`BLOCK`] words from both pointers on are writable.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi2")]
unsafe fn store([low, high]: [__m512i; 2], [even, odd]: [*mut u32; 2]) {
    // Swaps the bytes of each word.
    let low = _mm512_shldi_epi16::<8>(low, low);
    let words = _mm512_shldi_epi16::<8>(high, low);
    // SAFETY: the caller's condition.
    unsafe { _mm512_storeu_si512(even.cast(), words) };
    // Selects the second operand where the first is set, else the third.
    let words = _mm512_ternarylogic_epi32::<0xca>(_mm512_set1_epi16(0x00ff), low, high);
    // SAFETY: the caller's condition.
    unsafe { _mm512_storeu_si512(odd.cast(), words) };
}

/// Returns the lower and upper bytes of the bf16 of FP8 codes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi,gfni")]
fn bytes_of_floats(floats: &Floats, of: __m512i) -> [__m512i; 2] {
    let place = linear(&floats.order, of);
    let [low, high] = [linear(&floats.low, of), linear(&floats.high, of)];
    let is_first = is_less(place, floats.first);
    let high = looked_up(high, is_first, place, &floats.first_high);
    [looked_up(low, is_first, place, &floats.first_low), high]
}

/// Applies a linear function to bytes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,gfni")]
fn linear(function: &Linear, of: __m512i) -> __m512i {
    // SAFETY: a cache line, aligned by its type.
    let matrices = unsafe { _mm512_load_si512(function.matrices.0.as_ptr().cast()) };
    match function.constant {
        0 => _mm512_gf2p8affine_epi64_epi8::<0>(of, matrices),
        // The constant is an immediate: those of E4M3 and E5M2.
        0x3c => _mm512_gf2p8affine_epi64_epi8::<0x3c>(of, matrices),
        0x38 => _mm512_gf2p8affine_epi64_epi8::<0x38>(of, matrices),
        other => {
            let sums = _mm512_gf2p8affine_epi64_epi8::<0>(of, matrices);
            _mm512_xor_si512(sums, _mm512_set1_epi8(other.cast_signed()))
        }
    }
}

/// Returns which bytes are less than a power of two.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn is_less(bytes: __m512i, power: u8) -> __mmask64 {
    let others = _mm512_set1_epi8((!(power - 1)).cast_signed());
    _mm512_testn_epi8_mask(bytes, others)
}

/// Looks some bytes up by the six lower bits of their index; leaves the others unchanged.
#[inline]
#[target_feature(enable = "avx512f,avx512vbmi")]
fn looked_up(bytes: __m512i, some: __mmask64, place: __m512i, table: &Lines<64>) -> __m512i {
    // SAFETY: a cache line, aligned by its type.
    let table = unsafe { _mm512_load_si512(table.0.as_ptr().cast()) };
    _mm512_mask_permutexvar_epi8(bytes, some, place, table)
}

/// Returns the lower and upper bytes of the bf16 of integers.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
fn bytes_of_integers(integers: &Integers, of: __m512i) -> [__m512i; 2] {
    let magnitude = _mm512_abs_epi8(of);
    let [low, high] = [&integers.low, &integers.high].map(|table| {
        // SAFETY: 64 bytes of 128, aligned by their type.
        let first = unsafe { _mm512_load_si512(table.0.as_ptr().cast()) };
        // SAFETY: the others, 64 bytes on.
        let second = unsafe { _mm512_load_si512(table.0.as_ptr().wrapping_add(64).cast()) };
        // The instruction reads seven bits of an index.
        _mm512_permutex2var_epi8(first, magnitude, second)
    });
    // 128 is the only magnitude of eight bits.
    let is_highest = _mm512_movepi8_mask(magnitude);
    let highest = _mm512_set1_epi8(integers.highest.cast_signed());
    let high = _mm512_mask_mov_epi8(high, is_highest, highest);
    let sign = _mm512_set1_epi8(-128);
    [low, _mm512_ternarylogic_epi32::<0xf8>(high, of, sign)]
}
