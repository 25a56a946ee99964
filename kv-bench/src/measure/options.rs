//! The options of a measurement.
use std::fmt;
use std::num::NonZeroUsize;
use std::str::FromStr;

use kv::cpu::Isa;
use kv::error::UnknownName;
use kv::{BlockOrder, Device, KvFormat};
use serde::Serialize;

/// Tokens in the full-precision prefix, in formats whose rows are transformed.
const FULL_PRECISION_PREFIX: u32 = 4;

/// Options of a measurement. An empty list and `None` select defaults for the device; without
/// suites, only the first value of each list is used.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Options {
    /// The device.
    pub backend: Device,
    /// Suites of operations, for [`measure_suites`](super::measure_suites).
    pub suites: Vec<Suite>,
    /// Stored formats.
    pub formats: Vec<Formats>,
    /// Number of sequences that decode in one step.
    pub batch: Vec<u32>,
    /// Tokens per sequence, including the new one, and per prompt.
    pub context: Vec<u32>,
    /// Layers per step.
    pub layers: Option<u16>,
    /// Number of query heads, a multiple of the kv heads.
    pub q_heads: Vec<u32>,
    /// Number of kv heads.
    pub kv_heads: Vec<u32>,
    /// Head dim.
    pub head_dim: Vec<u32>,
    /// Tokens per block.
    pub block_size: Vec<BlockSize>,
    /// Order of axes inside a block.
    pub block_order: BlockOrder,
    /// Rounds after the warm-up.
    pub rounds: Option<u32>,
    /// Numbers of CPU threads.
    pub threads: Vec<NonZeroUsize>,
    /// Instruction sets of the CPU.
    pub isa: Vec<Isa>,
    /// Whether suites measure every combination of the lists, or vary one list at a time.
    pub full: bool,
    /// Bytes that one case may allocate.
    pub memory: Option<u64>,
}

impl Options {
    /// Default number of query heads.
    pub const Q_HEADS: u32 = 32;
    /// Default number of kv heads.
    pub const KV_HEADS: u32 = 8;
}

/// A group of operations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "the command line names each of them")]
pub enum Suite {
    /// Attention of one new token per sequence.
    Decode,
    /// Attention of whole prompts.
    Prefill,
    /// Writing new rows to the cache: one token per sequence, and a prompt.
    Append,
    /// Gathering rows from the cache, decoded.
    Gather,
    /// Copying blocks of sequences to those of others.
    Copy,
    /// Planning a step, without running it.
    Plan,
    /// All suites.
    All,
}

/// Tokens per block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(untagged)]
#[expect(clippy::exhaustive_enums, reason = "the command line names each of them")]
pub enum BlockSize {
    /// Blocks of this number of tokens.
    Tokens(u32),
    /// One block per sequence.
    Contiguous,
}

impl fmt::Display for BlockSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tokens(tokens) => tokens.fmt(f),
            Self::Contiguous => f.pad("contiguous"),
        }
    }
}

/// Stored formats of K and V, as text `K` or `K/V`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "a layer has two planes")]
pub struct Formats {
    /// Format of K.
    pub k: KvFormat,
    /// Format of V.
    pub v: KvFormat,
}

impl Formats {
    /// Returns the number of tokens in the full-precision prefix.
    pub(super) fn full_precision_prefix(self) -> u32 {
        let transforms = self.k.is_for_transformed() || self.v.is_for_transformed();
        if transforms { FULL_PRECISION_PREFIX } else { 0 }
    }
}

impl From<KvFormat> for Formats {
    fn from(format: KvFormat) -> Self {
        Self { k: format, v: format }
    }
}

impl FromStr for Formats {
    type Err = UnknownName;

    fn from_str(text: &str) -> Result<Self, UnknownName> {
        let text = text.trim();
        match text.split_once('/') {
            Some((k, v)) => Ok(Self { k: k.parse()?, v: v.parse()? }),
            None => text.parse().map(KvFormat::into),
        }
    }
}

impl fmt::Display for Formats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { k, v } = self;
        if k == v { k.fmt(f) } else { write!(f, "{k}/{v}") }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_are_one_or_two_names() {
        for (text, shown, prefix) in [
            ("bf16", "bf16", 0),
            (" int8/l4", "int8/l4", 4),
            ("l4/l4", "l4", 4),
            ("int8-head", "int8-head", 0),
        ] {
            let formats: Formats = text.parse().unwrap();
            assert_eq!(
                (formats.to_string().as_str(), formats.full_precision_prefix()),
                (shown, prefix)
            );
        }
        for text in ["", "l4/", "/l4", "l4,full-precision-prefix=8", "l4/l4/l4", "abc"] {
            assert!(text.parse::<Formats>().is_err(), "{text}");
        }
    }
}
