//! Prefix reuse: how blocks of K and V are named by the tokens they came from, and found again.
mod key;

pub use key::{BlockContent, BlockKey, ContentSpan};
