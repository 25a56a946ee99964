//! What is asked for as rows pass by, as a type: a choice line by line keeps loops over tokens from
//! being unrolled.
use std::sync::atomic::{Ordering, compiler_fence};

use super::super::simd::Simd;
use crate::read_ahead::Fetch;

/// Values from a row to the one that is near it, at least.
const NEAR: usize = 256;

pub(super) trait Hint {
    const FETCH: Fetch;
    /// Values from a row to the one that is asked for along with it, at least. Where there is none,
    /// that is the row at the same place of what comes next.
    const VALUES_AHEAD: Option<usize> =
        if matches!(Self::FETCH, Fetch::Near) { Some(NEAR) } else { None };

    /// Asks for a line.
    #[inline(always)]
    fn ask<S: Simd>(s: S, at: *const u8) {
        Self::FETCH.ask(s, at);
    }
    /// Keeps the compiler from asking for the lines of several rows at once, which it otherwise
    /// does after all of their products; what is asked for too fast waits or is lost.
    #[inline(always)]
    fn after_row() {
        if !matches!(Self::FETCH, Fetch::Nothing) {
            compiler_fence(Ordering::SeqCst);
        }
    }
}

pub(super) struct First;
impl Hint for First {
    const FETCH: Fetch = Fetch::First;
}

pub(super) struct Second;
impl Hint for Second {
    const FETCH: Fetch = Fetch::Second;
}

pub(super) struct Near;
impl Hint for Near {
    const FETCH: Fetch = Fetch::Near;
}

pub(super) struct Nothing;
impl Hint for Nothing {
    const FETCH: Fetch = Fetch::Nothing;
}
