//! Arguments of `kv replay`.
use std::num::NonZeroU32;
use std::path::PathBuf;

use clap::Args;

use super::at_least_1;
use crate::replay::{Policy, Sizes};

/// Replay a request trace through a cache's blocks, prefix index and eviction, without a model.
///
/// TRACE is of Mooncake (JSON lines of `timestamp`, `input_length`, `output_length` and `hash_ids`,
/// an id per 512 tokens), of Qwen's service Bailian (the same with `chat_id` and `parent_chat_id`,
/// an id per 16 tokens), of Azure (a CSV of TIMESTAMP,ContextTokens,GeneratedTokens, with or
/// without `NumImages`) or of `BurstGPT` (a CSV of Timestamp,Model,Request tokens,Response
/// tokens,Total tokens,Log Type, with or without Session ID and Elapsed time), plain or compressed
/// with zstd. Requests run one at a time, in the file's order. A request hits the blocks of its
/// input up to the first that is not cached; then all of them are cached, as far as they fit. A
/// request never evicts its own blocks. Generated tokens are not cached.
///
/// A CSV has lengths only: every block is new, and there are no hits. It shows evictions, peak
/// blocks and time.
///
/// Policies of caches: lru (least recently used first), lfu (least frequently used first), priority
/// (by the caller's priorities, of which a trace has none) and default (lowest expected reuse
/// first). And two limits: min evicts the block whose next use is the latest, which gives the most
/// hits of any policy at that capacity (if ids name whole prefixes, as in these traces); infinite
/// evicts nothing, and its capacity is the number of blocks it used.
#[derive(Debug, Args)]
#[command(
    allow_negative_numbers = true,
    after_help = "Examples:
  kv replay conversation.jsonl.zst
  kv replay conversation.jsonl.zst --policy lru --policy min --capacity-blocks 1000 \\
    --capacity-blocks 10000 --plot hits.svg
  kv replay qwen_traceA_blksz_16.jsonl --policy lru --policy default
  kv replay own.jsonl --tokens-per-id 64 --block-size 16
  kv replay azure.csv --block-size 32 --capacity-blocks 100000 --json"
)]
pub(crate) struct ReplayArgs {
    /// The trace
    #[arg(value_name = "TRACE")]
    pub(crate) trace: PathBuf,

    /// Tokens per block; in a trace with ids a divisor or a multiple of the tokens per id. Default:
    /// the tokens per id, or 16 in a trace without ids
    #[arg(long, value_name = "N", value_parser = non_zero)]
    pub(crate) block_size: Option<NonZeroU32>,

    /// Tokens per entry of `hash_ids`; default: 512 in a Mooncake trace and 16 in one of Qwen
    #[arg(long, value_name = "N", value_parser = non_zero)]
    pub(crate) tokens_per_id: Option<NonZeroU32>,

    /// Blocks of the cache, may be repeated; default: a 128th, a 32nd, an eighth and half of the
    /// trace's different blocks, rounded to two digits
    #[arg(long, value_name = "N", value_parser = at_least_1)]
    pub(crate) capacity_blocks: Vec<u32>,

    /// Eviction policy: lru, lfu, priority, default, infinite or min; may be repeated. Default:
    /// lru, default, infinite and min
    #[arg(long, value_name = "NAME")]
    pub(crate) policy: Vec<Policy>,

    /// Draw the token hit ratio against the capacity, one line per policy
    #[arg(long, value_name = "FILE.svg")]
    pub(crate) plot: Option<PathBuf>,

    /// Print one JSON list instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

impl ReplayArgs {
    /// Returns tokens per block and per id, if they are given.
    pub(crate) fn sizes(&self) -> Sizes {
        Sizes { block: self.block_size, id: self.tokens_per_id }
    }
}

fn non_zero(text: &str) -> Result<NonZeroU32, String> {
    at_least_1(text).and_then(|n| NonZeroU32::new(n).ok_or_else(|| "0".to_owned()))
}
