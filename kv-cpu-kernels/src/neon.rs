//! Vectors of four: NEON, which every 64-bit Arm CPU has.
#![allow(
    clippy::wildcard_imports,
    reason = "intrinsics by the dozen; clippy is silent about them in test builds, so not `expect`"
)]
use std::arch::aarch64::*;
use std::arch::asm;

use crate::simd::Simd;

/// Witness that the instructions may run: made only inside functions that carry the feature.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Neon(());

#[cfg(test)]
impl Neon {
    /// The witness, for tests on CPUs that have the instructions.
    pub(crate) const fn witness() -> Self {
        Self(())
    }
}

/// Writes each primitive twice: as a function with the target feature, and as the trait's method
/// that calls it.
macro_rules! primitives {
    ($(fn $name:ident($($arg:ident: $type:ty),*) -> $result:ty $body:block)*) => {
        impl Simd for Neon {
            type F = float32x4_t;
            type I = uint32x4_t;
            const LANES: usize = 4;
            const SUMS: usize = 16;
            $(#[inline(always)]
            fn $name(self, $($arg: $type),*) -> $result {
                #[inline]
                #[target_feature(enable = "neon")]
                fn inner($($arg: $type),*) -> $result $body
                // SAFETY: a `Neon` exists only where the feature does.
                unsafe { inner($($arg),*) }
            })*

            #[inline(always)]
            fn prefetch_l1(self, at: *const u8) {
                // SAFETY: it changes nothing but caches, and faults at no address.
                unsafe {
                    asm!("prfm pldl1keep, [{at}]", at = in(reg) at,
                        options(nostack, readonly, preserves_flags));
                }
            }
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
                // SAFETY: condition 1 of `Simd::load`, and the witness.
                let bits = unsafe { vld1_u16(from.wrapping_add(at)) };
                widen_f16(self, bits)
            }
            #[inline(always)]
            unsafe fn load_bf16(self, from: *const u16, at: usize) -> float32x4_t {
                // SAFETY: condition 1 of `Simd::load`, and the witness.
                let bits = unsafe { vld1_u16(from.wrapping_add(at)) };
                widen_bf16(self, bits)
            }
            #[inline(always)]
            unsafe fn load_bf16_pairs(self, from: *const u16, at: usize) -> [float32x4_t; 2] {
                // SAFETY: condition 1 of `Simd::load_bf16_pairs`, and the witness.
                let bits = unsafe { vld1q_u16(from.wrapping_add(at)) };
                split_bf16(self, bits)
            }
            #[inline(always)]
            unsafe fn store_f16(self, to: *mut u16, at: usize, v: float32x4_t) {
                let bits = narrow_f16(self, v);
                // SAFETY: condition 1 of `Simd::store`, and the witness.
                unsafe { vst1_u16(to.wrapping_add(at), bits) }
            }
            #[inline(always)]
            unsafe fn store_bf16(self, to: *mut u16, at: usize, v: float32x4_t) {
                let bits = narrow_bf16(self, v);
                // SAFETY: condition 1 of `Simd::store`, and the witness.
                unsafe { vst1_u16(to.wrapping_add(at), bits) }
            }
            #[inline(always)]
            unsafe fn load_bits(self, from: *const u32, at: usize) -> uint32x4_t {
                // SAFETY: condition 1 of `Simd::load`, and the witness.
                unsafe { vld1q_u32(from.wrapping_add(at)) }
            }
            #[inline(always)]
            unsafe fn load_bytes(self, from: *const u8, at: usize) -> uint32x4_t {
                // SAFETY: condition 1 of `Simd::load`.
                let bytes = unsafe { from.wrapping_add(at).cast::<[u8; 4]>().read() };
                widen_bytes(self, u32::from_le_bytes(bytes))
            }
            #[inline(always)]
            unsafe fn load_of_8(self, from: *const u8, at: usize) -> uint32x4_t {
                // SAFETY: condition 1 of `Simd::load_of_8`: the first four or the last.
                unsafe { self.load_bytes(from, at % 8) }
            }
            #[inline(always)]
            unsafe fn load_nibbles(self, from: *const u8, at: usize) -> uint32x4_t {
                // SAFETY: condition 1 of `Simd::load_nibbles`.
                let bytes = unsafe { from.wrapping_add(at / 2).cast::<[u8; 2]>().read() };
                spread_nibbles(self, u32::from(u16::from_le_bytes(bytes)))
            }
            #[inline(always)]
            unsafe fn load_i8(self, from: *const i8, at: usize) -> float32x4_t {
                // SAFETY: condition 1 of `Simd::load`.
                let bytes = unsafe { from.wrapping_add(at).cast::<[u8; 4]>().read() };
                widen_i8(self, u32::from_le_bytes(bytes))
            }
            #[inline(always)]
            unsafe fn load_e4m3(self, from: *const u8, at: usize) -> float32x4_t {
                // SAFETY: condition 1 of `Simd::load`.
                let bytes = unsafe { from.wrapping_add(at).cast::<[u8; 4]>().read() };
                widen_e4m3(self, u32::from_le_bytes(bytes))
            }
            #[inline(always)]
            unsafe fn load_e5m2(self, from: *const u8, at: usize) -> float32x4_t {
                // SAFETY: condition 1 of `Simd::load`.
                let bytes = unsafe { from.wrapping_add(at).cast::<[u8; 4]>().read() };
                widen_e5m2(self, u32::from_le_bytes(bytes))
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
    fn div(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        vdivq_f32(a, b)
    }
    // NaN where either is NaN.
    fn max(a: float32x4_t, b: float32x4_t) -> float32x4_t {
        vmaxq_f32(a, b)
    }
    // Builds the biased exponent. For NaN the result is arbitrary: it is multiplied with the NaN.
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
    fn splat_bits(word: u32) -> uint32x4_t {
        vdupq_n_u32(word)
    }
    // Counts are constants where the primitives are used, and become immediates; a shift to the
    // right is one to the left by a negative count.
    fn shl(x: uint32x4_t, bits: u32) -> uint32x4_t {
        vshlq_u32(x, vdupq_n_s32(bits.cast_signed()))
    }
    fn shr(x: uint32x4_t, bits: u32) -> uint32x4_t {
        vshlq_u32(x, vnegq_s32(vdupq_n_s32(bits.cast_signed())))
    }
    fn shl_each(x: uint32x4_t, bits: uint32x4_t) -> uint32x4_t {
        vshlq_u32(x, vreinterpretq_s32_u32(bits))
    }
    fn shr_each(x: uint32x4_t, bits: uint32x4_t) -> uint32x4_t {
        vshlq_u32(x, vnegq_s32(vreinterpretq_s32_u32(bits)))
    }
    fn nibble(x: uint32x4_t) -> float32x4_t {
        vcvtq_f32_u32(vandq_u32(x, vdupq_n_u32(15)))
    }
    fn flip(x: float32x4_t, signs: uint32x4_t) -> float32x4_t {
        let signs = vandq_u32(signs, vdupq_n_u32(1 << 31));
        vreinterpretq_f32_u32(veorq_u32(vreinterpretq_u32_f32(x), signs))
    }
    fn lookup4(table: &[f32; 4], code: uint32x4_t) -> float32x4_t {
        // SAFETY: an array of four.
        let table = unsafe { vld1q_f32(table.as_ptr()) };
        let bytes = byte_indices(vandq_u32(code, vdupq_n_u32(3)));
        vreinterpretq_f32_u8(vqtbl1q_u8(vreinterpretq_u8_f32(table), bytes))
    }
    fn lookup32(table: &[f32; 32], low: uint32x4_t, high: uint32x4_t) -> float32x4_t {
        // SAFETY: the first sixteen of 32.
        let lower = unsafe { vld1q_u8_x4(table.as_ptr().cast()) };
        // SAFETY: the other sixteen.
        let upper = unsafe { vld1q_u8_x4(table.as_ptr().wrapping_add(16).cast()) };
        let low = vandq_u32(low, vdupq_n_u32(15));
        let high = vshlq_n_u32::<4>(vandq_u32(high, vdupq_n_u32(1)));
        let bytes = byte_indices(vorrq_u32(low, high));
        // An index beyond its table gives zero in TBL, and keeps the byte in TBX.
        let first = vqtbl4q_u8(lower, bytes);
        vreinterpretq_f32_u8(vqtbx4q_u8(first, upper, vsubq_u8(bytes, vdupq_n_u8(64))))
    }
    fn symmetric16(magnitudes: &[f32; 8], code: uint32x4_t) -> float32x4_t {
        // SAFETY: an array of eight.
        let table = unsafe { vld1q_u8_x2(magnitudes.as_ptr().cast()) };
        let bytes = byte_indices(vandq_u32(code, vdupq_n_u32(7)));
        let magnitude = vreinterpretq_u32_u8(vqtbl2q_u8(table, bytes));
        let sign = vandq_u32(vshlq_n_u32::<28>(code), vdupq_n_u32(1 << 31));
        vreinterpretq_f32_u32(veorq_u32(magnitude, sign))
    }
}

/// Offsets of the four bytes of each indexed float in a table of floats.
#[inline]
#[target_feature(enable = "neon")]
fn byte_indices(index: uint32x4_t) -> uint8x16_t {
    let first = vmulq_u32(index, vdupq_n_u32(0x0404_0404));
    vreinterpretq_u8_u32(vaddq_u32(first, vdupq_n_u32(0x0302_0100)))
}

/// Returns the bits of E4M3, read as a binary16.
#[inline]
#[target_feature(enable = "neon")]
fn e4m3_as_f16(bytes: int8x8_t) -> uint16x8_t {
    // Above the sign of a code are copies of it, of which one is cleared.
    let shifted = vreinterpretq_u16_s16(vshll_n_s8::<7>(bytes));
    vandq_u16(shifted, vdupq_n_u16(0xbf80))
}

/// Conversions with shorter vectors, which are not part of the trait.
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
    fn widen_f16(bits: uint16x4_t) -> float32x4_t {
        vcvt_f32_f16(vreinterpret_f16_u16(bits))
    }
    fn narrow_f16(v: float32x4_t) -> uint16x4_t {
        vreinterpret_u16_f16(vcvt_f16_f32(v))
    }
    fn split_bf16(bits: uint16x8_t) -> [float32x4_t; 2] {
        let words = vreinterpretq_u32_u16(bits);
        let upper = vandq_u32(words, vdupq_n_u32(0xffff_0000));
        [vreinterpretq_f32_u32(vshlq_n_u32::<16>(words)), vreinterpretq_f32_u32(upper)]
    }
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
    fn widen_bytes(bytes: u32) -> uint32x4_t {
        let bytes = vreinterpret_u8_u32(vdup_n_u32(bytes));
        vmovl_u16(vget_low_u16(vmovl_u8(bytes)))
    }
    fn widen_i8(bytes: u32) -> float32x4_t {
        let bytes = vreinterpret_s8_u32(vdup_n_u32(bytes));
        vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(bytes))))
    }
    // The upper byte of a binary16.
    fn widen_e5m2(bytes: u32) -> float32x4_t {
        let bytes = vreinterpret_u8_u32(vdup_n_u32(bytes));
        let bits = vget_low_u16(vshll_n_u8::<8>(bytes));
        vcvt_f32_f16(vreinterpret_f16_u16(bits))
    }
    // Read as a binary16, its bits are the value times 2^-8, except for NaN: all ones is an
    // ordinary number there.
    fn widen_e4m3(bytes: u32) -> float32x4_t {
        let bytes = vreinterpret_s8_u32(vdup_n_u32(bytes));
        let bits = vget_low_u16(e4m3_as_f16(bytes));
        let unsigned = vand_u16(bits, vdup_n_u16(0x7f80));
        let nan = vceq_u16(unsigned, vdup_n_u16(0x3f80));
        vcvt_f32_f16(vreinterpret_f16_u16(vorr_u16(bits, nan)))
    }
    fn spread_nibbles(word: u32) -> uint32x4_t {
        let (first, last) = (0xffff_fffc_0000_0000, 0xffff_fff4_ffff_fff8);
        let shifts = vcombine_s32(vcreate_s32(first), vcreate_s32(last));
        vshlq_u32(vdupq_n_u32(word), shifts)
    }
}

crate::table::table! { [#[target_feature(enable = "neon")]] Neon, Neon(()) }
