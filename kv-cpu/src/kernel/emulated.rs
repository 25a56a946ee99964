//! Sixteen lanes in plain Rust, so that the loops of a wide vector are tested on any CPU.
#![expect(
    clippy::as_conversions,
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "tests: exponents are small integers"
)]
use half::{bf16, f16};

use super::simd::Simd;

/// Sixteen lanes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Wide;

fn each<const N: usize>(mut lane: impl FnMut(usize) -> f32) -> [f32; N] {
    std::array::from_fn(&mut lane)
}

impl Simd for Wide {
    type F = [f32; 16];
    const LANES: usize = 16;
    fn splat(self, x: f32) -> [f32; 16] {
        [x; 16]
    }
    fn add(self, a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        each(|i| a[i] + b[i])
    }
    fn mul(self, a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        each(|i| a[i] * b[i])
    }
    fn fma(self, a: [f32; 16], b: [f32; 16], c: [f32; 16]) -> [f32; 16] {
        each(|i| a[i].mul_add(b[i], c[i]))
    }
    fn max(self, a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        each(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }
    fn round(self, x: [f32; 16]) -> [f32; 16] {
        x.map(f32::round_ties_even)
    }
    fn pow2(self, n: [f32; 16]) -> [f32; 16] {
        n.map(|n| f32::from_bits(((n as i32).wrapping_add(127) as u32) << 23))
    }
    fn zero_below(self, x: [f32; 16], limit: f32, value: [f32; 16]) -> [f32; 16] {
        each(|i| if x[i] < limit { 0.0 } else { value[i] })
    }
    fn reduce_add(self, v: [f32; 16]) -> f32 {
        v.iter().sum()
    }
    fn reduce_max(self, v: [f32; 16]) -> f32 {
        v.into_iter().reduce(|a, b| if a > b { a } else { b }).unwrap()
    }
    unsafe fn load(self, from: *const f32, at: usize) -> [f32; 16] {
        // SAFETY: condition 1 of `Simd::load`.
        unsafe { from.wrapping_add(at).cast::<[f32; 16]>().read_unaligned() }
    }
    unsafe fn store(self, to: *mut f32, at: usize, v: [f32; 16]) {
        // SAFETY: condition 1 of `Simd::store`.
        unsafe { to.wrapping_add(at).cast::<[f32; 16]>().write_unaligned(v) }
    }
    unsafe fn load_f16(self, from: *const u16, at: usize) -> [f32; 16] {
        // SAFETY: condition 1 of `Simd::load`.
        let bits = unsafe { from.wrapping_add(at).cast::<[u16; 16]>().read_unaligned() };
        bits.map(|bits| f16::from_bits(bits).to_f32())
    }
    unsafe fn load_bf16(self, from: *const u16, at: usize) -> [f32; 16] {
        // SAFETY: condition 1 of `Simd::load`.
        let bits = unsafe { from.wrapping_add(at).cast::<[u16; 16]>().read_unaligned() };
        bits.map(|bits| bf16::from_bits(bits).to_f32())
    }
    unsafe fn store_f16(self, to: *mut u16, at: usize, v: [f32; 16]) {
        let bits = v.map(|v| f16::from_f32(v).to_bits());
        // SAFETY: condition 1 of `Simd::store`.
        unsafe { to.wrapping_add(at).cast::<[u16; 16]>().write_unaligned(bits) }
    }
    unsafe fn store_bf16(self, to: *mut u16, at: usize, v: [f32; 16]) {
        let bits = v.map(|v| bf16::from_f32(v).to_bits());
        // SAFETY: condition 1 of `Simd::store`.
        unsafe { to.wrapping_add(at).cast::<[u16; 16]>().write_unaligned(bits) }
    }
}

super::table! { [] Wide }
