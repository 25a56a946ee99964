//! What is asked for as rows pass by.
use std::sync::atomic::{Ordering, compiler_fence};

use super::super::simd::Simd;

/// Values from a row to the one that is asked for near it.
const NEAR: usize = 256;

/// What [`Fetch`](crate::read_ahead::Fetch) says, as a type.
pub(super) trait Hint {
    /// Values from a row to the one that is asked for along with it, at least. Where there is none,
    /// that is the row at the same place of what comes next.
    const VALUES_AHEAD: Option<usize> = None;
    /// Asks for a line.
    fn ask<S: Simd>(s: S, at: *const u8);
    /// Keeps the compiler from asking for the lines of several rows at once, which it otherwise
    /// does after all of their products; what is asked for too fast waits or is lost.
    #[inline(always)]
    fn after_row() {
        compiler_fence(Ordering::SeqCst);
    }
}

pub(super) struct First;
impl Hint for First {
    #[inline(always)]
    fn ask<S: Simd>(s: S, at: *const u8) {
        s.prefetch_once(at);
    }
}

pub(super) struct Second;
impl Hint for Second {
    #[inline(always)]
    fn ask<S: Simd>(s: S, at: *const u8) {
        s.prefetch_second(at);
    }
}

pub(super) struct Near;
impl Hint for Near {
    const VALUES_AHEAD: Option<usize> = Some(NEAR);
    #[inline(always)]
    fn ask<S: Simd>(s: S, at: *const u8) {
        s.prefetch_second(at);
    }
}

pub(super) struct Nothing;
impl Hint for Nothing {
    #[inline(always)]
    fn ask<S: Simd>(_: S, _: *const u8) {}
    #[inline(always)]
    fn after_row() {}
}
