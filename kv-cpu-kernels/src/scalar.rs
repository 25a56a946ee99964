//! One lane: plain Rust, the path that every other is compared with.
#![expect(
    clippy::as_conversions,
    clippy::cast_precision_loss,
    clippy::inline_always,
    reason = "kernel code: indices are masked to their tables, and helpers must inline into the \
              kernel they are used in"
)]
use half::{bf16, f16};

use crate::simd::Simd;
use kv_format::num::to_usize;

/// A vector of one.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Scalar;

impl Simd for Scalar {
    type F = f32;
    type I = u32;
    const LANES: usize = 1;
    const SUMS: usize = 4;
    #[inline(always)]
    fn splat(self, x: f32) -> f32 {
        x
    }
    #[inline(always)]
    fn add(self, a: f32, b: f32) -> f32 {
        a + b
    }
    #[inline(always)]
    fn mul(self, a: f32, b: f32) -> f32 {
        a * b
    }
    #[inline(always)]
    fn fma(self, a: f32, b: f32, c: f32) -> f32 {
        // Rounded twice: without the instruction, a fused one is a call into the C library.
        a * b + c
    }
    #[inline(always)]
    fn div(self, a: f32, b: f32) -> f32 {
        a / b
    }
    #[inline(always)]
    fn max(self, a: f32, b: f32) -> f32 {
        if a > b { a } else { b }
    }
    #[inline(always)]
    fn pow2(self, n: f32) -> f32 {
        n.exp2()
    }
    #[inline(always)]
    fn zero_below(self, x: f32, limit: f32, value: f32) -> f32 {
        if x < limit { 0.0 } else { value }
    }
    #[inline(always)]
    fn exp(self, x: f32) -> f32 {
        x.exp()
    }
    #[inline(always)]
    fn exp_short(self, x: f32) -> f32 {
        x.exp()
    }
    #[inline(always)]
    fn tanh(self, x: f32) -> f32 {
        x.tanh()
    }
    #[inline(always)]
    fn reduce_add(self, v: f32) -> f32 {
        v
    }
    #[inline(always)]
    fn reduce_max(self, v: f32) -> f32 {
        v
    }
    #[inline(always)]
    unsafe fn load(self, from: *const f32, at: usize) -> f32 {
        // SAFETY: condition 1 of `Simd::load`.
        unsafe { from.wrapping_add(at).read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32, at: usize, v: f32) {
        // SAFETY: condition 1 of `Simd::store`.
        unsafe { to.wrapping_add(at).write_unaligned(v) }
    }
    #[inline(always)]
    unsafe fn load_f16(self, from: *const u16, at: usize) -> f32 {
        // SAFETY: condition 1 of `Simd::load`.
        let bits = unsafe { from.wrapping_add(at).read_unaligned() };
        f16::from_bits(bits).to_f32()
    }
    #[inline(always)]
    unsafe fn load_bf16(self, from: *const u16, at: usize) -> f32 {
        // SAFETY: condition 1 of `Simd::load`.
        let bits = unsafe { from.wrapping_add(at).read_unaligned() };
        bf16::from_bits(bits).to_f32()
    }
    #[inline(always)]
    unsafe fn load_bf16_pairs(self, from: *const u16, at: usize) -> [f32; 2] {
        // SAFETY: condition 1 of `Simd::load_bf16_pairs`.
        let bits = unsafe { from.wrapping_add(at).cast::<[u16; 2]>().read_unaligned() };
        bits.map(|bits| bf16::from_bits(bits).to_f32())
    }
    #[inline(always)]
    unsafe fn store_f16(self, to: *mut u16, at: usize, v: f32) {
        let bits = f16::from_f32(v).to_bits();
        // SAFETY: condition 1 of `Simd::store`.
        unsafe { to.wrapping_add(at).write_unaligned(bits) }
    }
    #[inline(always)]
    unsafe fn store_bf16(self, to: *mut u16, at: usize, v: f32) {
        let bits = bf16::from_f32(v).to_bits();
        // SAFETY: condition 1 of `Simd::store`.
        unsafe { to.wrapping_add(at).write_unaligned(bits) }
    }
    #[inline(always)]
    fn splat_bits(self, word: u32) -> u32 {
        word
    }
    #[inline(always)]
    fn shl(self, x: u32, bits: u32) -> u32 {
        x << bits
    }
    #[inline(always)]
    fn shr(self, x: u32, bits: u32) -> u32 {
        x >> bits
    }
    #[inline(always)]
    fn shl_each(self, x: u32, bits: u32) -> u32 {
        x << bits
    }
    #[inline(always)]
    fn shr_each(self, x: u32, bits: u32) -> u32 {
        x >> bits
    }
    #[inline(always)]
    fn nibble(self, x: u32) -> f32 {
        (x & 15) as f32
    }
    #[inline(always)]
    fn flip(self, x: f32, signs: u32) -> f32 {
        f32::from_bits(x.to_bits() ^ (signs & 1 << 31))
    }
    #[inline(always)]
    fn lookup4(self, table: &[f32; 4], code: u32) -> f32 {
        table[to_usize(code & 3)]
    }
    #[inline(always)]
    fn lookup32(self, table: &[f32; 32], low: u32, high: u32) -> f32 {
        table[to_usize(low & 15 | (high & 1) << 4)]
    }
    #[inline(always)]
    fn symmetric16(self, magnitudes: &[f32; 8], code: u32) -> f32 {
        self.flip(magnitudes[to_usize(code & 7)], code << 28)
    }
    #[inline(always)]
    unsafe fn load_bits(self, from: *const u32, at: usize) -> u32 {
        // SAFETY: condition 1 of `Simd::load`.
        unsafe { from.wrapping_add(at).read_unaligned() }
    }
    #[inline(always)]
    unsafe fn load_bytes(self, from: *const u8, at: usize) -> u32 {
        // SAFETY: condition 1 of `Simd::load`.
        u32::from(unsafe { from.wrapping_add(at).read() })
    }
    #[inline(always)]
    unsafe fn load_of_8(self, from: *const u8, at: usize) -> u32 {
        // SAFETY: condition 1 of `Simd::load_of_8`.
        u32::from(unsafe { from.wrapping_add(at % 8).read() })
    }
    #[inline(always)]
    unsafe fn load_nibbles(self, from: *const u8, at: usize) -> u32 {
        // SAFETY: condition 1 of `Simd::load_nibbles`.
        let byte = unsafe { from.wrapping_add(at / 2).read() };
        u32::from(byte) >> (at % 2 * 4)
    }
    #[inline(always)]
    unsafe fn load_i8(self, from: *const i8, at: usize) -> f32 {
        // SAFETY: condition 1 of `Simd::load`.
        f32::from(unsafe { from.wrapping_add(at).read() })
    }
}

crate::table::table! { [] Scalar, Scalar }
