//! Prefix reuse: whose bytes are read, and attention over reused blocks.
//!
//! K and V are derived from the tokens before them, so a row of another prefix is noticed wherever
//! it is read.
mod bytes;
mod keep;
mod prompts;
mod share;

use kv_core::StartOptions;

use crate::case::Case;

pub(super) fn cases() -> Vec<Case> {
    [share::cases(), bytes::cases(), keep::cases()].concat()
}

fn plain() -> StartOptions<'static> {
    StartOptions::default()
}

fn tokens(range: std::ops::Range<u32>) -> Vec<u32> {
    range.collect()
}

fn with(mut tokens: Vec<u32>, more: &[u32]) -> Vec<u32> {
    tokens.extend(more);
    tokens
}
