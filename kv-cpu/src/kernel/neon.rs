//! Vectors of four: NEON, which every 64-bit Arm CPU has.
//!
//! Binary16 goes through the `half` crate value by value: its vector conversions need a type that
//! is not stable yet.
#![allow(
    clippy::wildcard_imports,
    reason = "intrinsics by the dozen; clippy is silent about them in test builds, so not `expect`"
)]
use std::arch::aarch64::*;

use half::f16;

use super::simd::Simd;

/// Witness that the instructions may run: made only inside functions that carry the feature.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Neon(());

/// Writes each primitive twice: behind the feature, and as the trait's method that calls it.
macro_rules! primitives {
    ($(fn $name:ident($($arg:ident: $type:ty),*) -> $result:ty $body:block)*) => {
        impl Simd for Neon {
            type F = float32x4_t;
            const LANES: usize = 4;
            $(#[inline(always)]
            fn $name(self, $($arg: $type),*) -> $result {
                #[inline]
                #[target_feature(enable = "neon")]
                fn inner($($arg: $type),*) -> $result $body
                // SAFETY: a `Neon` exists only where the feature does.
                unsafe { inner($($arg),*) }
            })*

            #[inline(always)]
            unsafe fn load(self, from: *const f32, at: usize) -> float32x4_t {
                // SAFETY: condition 1 of `Simd::load`, and the witness.
                unsafe { vld1q_f32(from.wrapping_add(at)) }
            }
            #[inline(always)]
            unsafe fn store(self, to: *mut f32, at: usize, v: float32x4_t) {
                // SAFETY: condition 1 of `Simd::store`, and the witness.
                unsafe { vst1q_f32(to.wrapping_add(at), v) }
            }
            #[inline(always)]
            unsafe fn load_f16(self, from: *const u16, at: usize) -> float32x4_t {
                // SAFETY: condition 1 of `Simd::load`.
                let bits = unsafe { from.wrapping_add(at).cast::<[u16; 4]>().read_unaligned() };
                let values = bits.map(|bits| f16::from_bits(bits).to_f32());
                // SAFETY: an array of four.
                unsafe { self.load(values.as_ptr(), 0) }
            }
            #[inline(always)]
            unsafe fn load_bf16(self, from: *const u16, at: usize) -> float32x4_t {
                // SAFETY: condition 1 of `Simd::load`, and the witness.
                let bits = unsafe { vld1_u16(from.wrapping_add(at)) };
                widen_bf16(self, bits)
            }
            #[inline(always)]
            unsafe fn store_f16(self, to: *mut u16, at: usize, v: float32x4_t) {
                let mut values = [0.0; 4];
                // SAFETY: an array of four.
                unsafe { self.store(values.as_mut_ptr(), 0, v) };
                let bits = values.map(|value| f16::from_f32(value).to_bits());
                // SAFETY: condition 1 of `Simd::store`.
                unsafe { to.wrapping_add(at).cast::<[u16; 4]>().write_unaligned(bits) }
            }
            #[inline(always)]
            unsafe fn store_bf16(self, to: *mut u16, at: usize, v: float32x4_t) {
                let bits = narrow_bf16(self, v);
                // SAFETY: condition 1 of `Simd::store`, and the witness.
                unsafe { vst1_u16(to.wrapping_add(at), bits) }
            }
        }
    };
}

primitives! {
    fn splat(x: f32) -> float32x4_t {
        vdupq_n_f32(x)
    }
    fn add(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        vaddq_f32(a, b)
    }
    fn mul(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        vmulq_f32(a, b)
    }
    fn fma(a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t {
        vfmaq_f32(c, a, b)
    }
    // NaN where either is NaN.
    fn max(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        vmaxq_f32(a, b)
    }
    fn round(x: float32x4_t) -> float32x4_t {
        vrndnq_f32(x)
    }
    // The exponent's bits, biased; of a NaN something that the NaN is then multiplied with.
    fn pow2(n: float32x4_t) -> float32x4_t {
        let biased = vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127));
        vreinterpretq_f32_s32(vshlq_n_s32::<23>(biased))
    }
    fn zero_below(x: float32x4_t, limit: f32, value: float32x4_t) -> float32x4_t {
        vbslq_f32(vcltq_f32(x, vdupq_n_f32(limit)), vdupq_n_f32(0.0), value)
    }
    fn reduce_add(v: float32x4_t) -> f32 {
        vaddvq_f32(v)
    }
    fn reduce_max(v: float32x4_t) -> f32 {
        vmaxvq_f32(v)
    }
}

/// Conversions with 16-bit vectors, which the trait does not name.
macro_rules! conversions {
    ($(fn $name:ident($arg:ident: $type:ty) -> $result:ty $body:block)*) => {$(
        #[inline(always)]
        fn $name(_witness: Neon, $arg: $type) -> $result {
            #[inline]
            #[target_feature(enable = "neon")]
            fn inner($arg: $type) -> $result $body
            // SAFETY: a `Neon` exists only where the feature does.
            unsafe { inner($arg) }
        }
    )*};
}

conversions! {
    fn widen_bf16(bits: uint16x4_t) -> float32x4_t {
        vreinterpretq_f32_u32(vshlq_n_u32::<16>(vmovl_u16(bits)))
    }
    // Adds just under half of the last place kept, or half where that place is odd; a NaN keeps its
    // upper bits and becomes quiet.
    fn narrow_bf16(v: float32x4_t) -> uint16x4_t {
        let bits = vreinterpretq_u32_f32(v);
        let upper = vshrq_n_u32::<16>(bits);
        let odd = vandq_u32(upper, vdupq_n_u32(1));
        let half = vaddq_u32(odd, vdupq_n_u32(0x7fff));
        let rounded = vshrq_n_u32::<16>(vaddq_u32(bits, half));
        let quiet = vorrq_u32(upper, vdupq_n_u32(0x40));
        vmovn_u32(vbslq_u32(vceqq_f32(v, v), rounded, quiet))
    }
}

super::table! { [#[target_feature(enable = "neon")]] Neon(()) }
