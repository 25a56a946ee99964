//! What is to be measured.
use std::fmt;
use std::num::NonZeroUsize;
use std::str::FromStr;

use kv::cpu::Isa;
use kv::error::UnknownName;
use kv::{BlockOrder, Device, KvFormat};
use serde::Serialize;

/// First tokens of a sequence that stay in 16 bits, in formats whose rows are transformed.
const FULL_PRECISION_PREFIX: u32 = 4;

/// Choices of a measurement. An empty list and `None` stand for what suits the device; without
/// suites the first value of each list counts.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Options {
    /// The device.
    pub backend: Device,
    /// Suites of operations, for [`measure_suites`](super::measure_suites).
    pub suites: Vec<Suite>,
    /// Stored formats.
    pub formats: Vec<Formats>,
    /// Sequences that decode at once.
    pub batch: Vec<u32>,
    /// Tokens of each sequence, the new one included, and of the prompt.
    pub context: Vec<u32>,
    /// Layers of one step.
    pub layers: Option<u16>,
    /// Query heads, a multiple of the heads of K and V.
    pub q_heads: Vec<u32>,
    /// Heads of K and V.
    pub kv_heads: Vec<u32>,
    /// Values of one row.
    pub head_dim: Vec<u32>,
    /// Tokens of a block.
    pub block_size: Vec<BlockSize>,
    /// Axes inside a block.
    pub block_order: BlockOrder,
    /// Rounds that count.
    pub rounds: Option<u32>,
    /// Threads of the CPU.
    pub threads: Vec<NonZeroUsize>,
    /// Instruction sets of the CPU.
    pub isa: Vec<Isa>,
    /// Whether suites have every combination of the lists, not one list at a time.
    pub full: bool,
    /// Bytes that one case may take.
    pub memory: Option<u64>,
}

impl Options {
    /// Query heads unless given.
    pub const Q_HEADS: u32 = 32;
    /// Heads of K and V unless given.
    pub const KV_HEADS: u32 = 8;
}

/// Operations that are measured together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "the command line names each of them")]
pub enum Suite {
    /// Attention of one new token a sequence.
    Decode,
    /// Attention of whole prompts.
    Prefill,
    /// New rows into the cache: one token a sequence, and a prompt.
    Append,
    /// Rows out of the cache, decoded.
    Gather,
    /// Blocks of sequences to those of others.
    Copy,
    /// The plan of a step, without running it.
    Plan,
    /// All of them.
    All,
}

/// How the tokens of a sequence are divided.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(untagged)]
#[expect(clippy::exhaustive_enums, reason = "the command line names each of them")]
pub enum BlockSize {
    /// Blocks of this number of tokens.
    Tokens(u32),
    /// One block a sequence.
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
    /// First tokens of a sequence that stay in 16 bits.
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
