//! Signed bytes.
#![expect(
    clippy::inline_always,
    reason = "kernel code: offsets inside of a row, and helpers must inline into the \
              `#[target_feature]` caller"
)]
use super::Valuewise;
use crate::simd::Simd;

/// Signed bytes.
pub(crate) struct Int8;

impl Valuewise for Int8 {
    const SIZE: usize = 1;
    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, from: *const u8, at: usize) -> S::F {
        // SAFETY: condition 1 is passed on.
        unsafe { s.load_i8(from.cast(), at) }
    }
}
