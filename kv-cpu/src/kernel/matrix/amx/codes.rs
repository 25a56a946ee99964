//! Codes of a byte that become bf16 by a lookup of each half.
#![expect(
    clippy::arithmetic_side_effects,
    clippy::as_conversions,
    clippy::indexing_slicing,
    reason = "indices that are computed at compile time, or are those of arrays"
)]
#![allow(
    clippy::wildcard_imports,
    reason = "intrinsics by the dozen; clippy is silent about them in test builds, so not `expect`"
)]
use std::arch::x86_64::*;

use super::super::codes::Codes;
use super::super::{BLOCK, GROUP};

/// Where the codes of two rows of words come from, of two places with [`GROUP`] each: those of the
/// first row have even places, those of the second odd ones.
#[repr(align(64))]
struct Order([u8; 64]);

/// The order of [`super::Unit::code_words`], or of `code_pairs`.
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

const _: () = assert!(GROUP == 32 && BLOCK == 16, "what the orders count on");

/// The words of [`super::Unit::code_words`], or those of `code_pairs`.
///
/// # Safety
/// 1. [`GROUP`] codes from each place on are readable, and rows of [`BLOCK`] words are writable.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
pub(super) unsafe fn words<const ARE_PAIRS: bool>(
    codes: &Codes,
    from: [*const u8; 4],
    to: [*mut u32; 4],
) {
    let order = if ARE_PAIRS { &PAIRS } else { &WORDS };
    // SAFETY: 64 bytes, aligned by their type.
    let order = unsafe { _mm512_load_si512(order.0.as_ptr().cast()) };
    for ([a, b], to) in from.as_chunks::<2>().0.iter().zip(to.as_chunks::<2>().0) {
        // SAFETY: the caller's condition.
        let both = _mm512_permutexvar_epi8(order, unsafe { load(*a, *b) });
        let [low, high] = halves(codes, both);
        let even = _mm512_set1_epi16(0x00ff);
        let odd = _mm512_set1_epi16(0xff00_u16.cast_signed());
        // The first or the other two, as shifts leave zeros.
        let rows = [
            _mm512_ternarylogic_epi32::<0xf8>(_mm512_slli_epi16::<8>(high), low, even),
            _mm512_ternarylogic_epi32::<0xf8>(_mm512_srli_epi16::<8>(low), high, odd),
        ];
        for (to, row) in to.iter().zip(rows) {
            // SAFETY: the caller's condition.
            unsafe { _mm512_storeu_si512(to.cast(), row) };
        }
    }
}

/// Codes from two places.
///
/// # Safety
/// 1. [`GROUP`] of each are readable.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
unsafe fn load(a: *const u8, b: *const u8) -> __m512i {
    // SAFETY: the caller's condition.
    let a = unsafe { _mm256_loadu_si256(a.cast()) };
    // SAFETY: the caller's condition.
    let b = unsafe { _mm256_loadu_si256(b.cast()) };
    _mm512_inserti64x4::<1>(_mm512_castsi256_si512(a), b)
}

/// The lower bytes of what codes are, and the upper ones.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi")]
fn halves(codes: &Codes, of: __m512i) -> [__m512i; 2] {
    let sign = _mm512_set1_epi8(-128);
    let index = if codes.are_integers { _mm512_abs_epi8(of) } else { of };
    let [low, mut high] = [&codes.low, &codes.high].map(|table| {
        // SAFETY: 64 bytes of 128, aligned by their type.
        let first = unsafe { _mm512_load_si512(table.0.as_ptr().cast()) };
        // SAFETY: the others, 64 bytes behind.
        let second = unsafe { _mm512_load_si512(table.0.as_ptr().wrapping_add(64).cast()) };
        // Looks at seven bits.
        _mm512_permutex2var_epi8(first, index, second)
    });
    if codes.are_integers {
        // The one magnitude of eight bits, 128, whose lower byte is that of zero.
        let largest = _mm512_cmpeq_epi8_mask(index, sign);
        high = _mm512_mask_mov_epi8(high, largest, _mm512_set1_epi8(0x43));
    }
    [low, _mm512_ternarylogic_epi32::<0xf8>(high, of, sign)]
}
