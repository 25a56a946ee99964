//! Options of every command that runs a model over a cache.
use std::path::PathBuf;

use clap::Args;
use kv::Device;
use kv::quant::Stored;
use kv::tier::policy::WritePolicy;
use kv::tier::{Bytes, TierAddress, Wait};

use super::{at_least_1, backend};
use crate::tier::AddressParser;
use crate::tiers::policy;

// Without a documentation comment, which would be that of the command.
#[derive(Debug, Args)]
pub(crate) struct ModelArgs {
    /// Directory with config.json, model.safetensors (or its index and shards) and tokenizer.json,
    /// or one .gguf file (of a split model the first); default: the bundled stories260K
    #[arg(long, value_name = "DIR|FILE.gguf")]
    pub(crate) model: Option<PathBuf>,

    /// A tokenizer.json, for a .gguf file without one in its folder
    #[arg(long, value_name = "FILE")]
    pub(crate) tokenizer: Option<PathBuf>,

    /// Device of the cache: a name that `kv devices` lists, such as cpu, wgpu:0, wgpu:llvmpipe (a
    /// part of an adapter's name) or cuda:0
    #[arg(long, value_name = "NAME", default_value = "cpu", value_parser = backend)]
    pub(crate) backend: Device,
}

#[derive(Debug, Args)]
pub(crate) struct EngineArgs {
    #[command(flatten)]
    pub(crate) model: ModelArgs,

    /// Sequences that run at once
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = at_least_1)]
    pub(crate) max_batch: u32,

    /// Tokens per step: longer prompts are prefilled in chunks, while others generate
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = at_least_1)]
    pub(crate) max_step_tokens: u32,

    /// Stored format of K and V, such as l4 or int8/l4 (K/V), with options after commas: V=NAME,
    /// calib=FILE (written by `kv calibrate`) or calib=online (constants from the first tokens of
    /// the run), full-precision-prefix=N (first tokens of a sequence in 16 bits), tail=on (the
    /// block that is being filled too), transform=on or off, mean=block (subtract each block's own
    /// mean from K)
    #[arg(long, value_name = "NAME[,..]", default_value = "f32")]
    pub(crate) format: Stored,

    /// Tokens per block, and number of blocks; default: 16 tokens, and as many blocks as the batch
    /// can need in 1 GiB
    #[arg(long, value_name = "BLOCK_SIZE,NUM_BLOCKS")]
    pub(crate) paged: Option<Paged>,

    /// A lower tier, may be repeated: `host=SIZE`, `disk=DIR:SIZE`, `redis://HOST:PORT`,
    /// `s3://BUCKET/PREFIX?endpoint=URL`. Prompts reuse what earlier runs of the same model left
    /// there; a tier that fails costs time and no text
    #[arg(long, value_name = "TIER", value_parser = AddressParser::<TierAddress>::new())]
    pub(crate) tier: Vec<TierAddress>,

    /// Encrypt what goes to disk and stores with the key in FILE: 64 hexadecimal digits, or 32
    /// bytes. Runs with other keys, or without one, neither find nor disturb it
    #[cfg(feature = "seal")]
    #[arg(long, value_name = "FILE", requires = "tier")]
    pub(crate) tier_key: Option<PathBuf>,

    /// How long a prompt waits for tiers: compute (as long as computing it would take), all, none,
    /// or a time such as 200ms
    #[arg(long, value_name = "TIME", default_value = "compute", requires = "tier")]
    pub(crate) wait: Wait,

    /// When chunks are written to disk and stores: publish, leave (when host memory gives them up),
    /// reuse:N or never; default: leave for disk, publish for stores, without generated text
    #[arg(long, value_name = "WHEN", value_parser = policy, requires = "tier")]
    pub(crate) tier_write: Option<WritePolicy>,

    /// Bytes that each disk and each store gets within 24 hours, such as 200GB: limits the wear of
    /// a disk
    #[arg(long, value_name = "SIZE", requires = "tier")]
    pub(crate) tier_bytes_per_day: Option<Bytes>,
}

/// The argument of `--paged`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Paged {
    pub(crate) block_size: u32,
    pub(crate) num_blocks: u32,
}

impl std::str::FromStr for Paged {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (block_size, num_blocks) =
            text.split_once(',').ok_or("expected BLOCK_SIZE,NUM_BLOCKS, such as 16,256")?;
        let block_size = at_least_1(block_size.trim()).map_err(|e| format!("block size: {e}"))?;
        let num_blocks = at_least_1(num_blocks.trim()).map_err(|e| format!("blocks: {e}"))?;
        Ok(Self { block_size, num_blocks })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paged_takes_two_counts() {
        let paged = |text: &str| text.parse::<Paged>();
        assert_eq!(paged("16,256"), Ok(Paged { block_size: 16, num_blocks: 256 }));
        for text in ["", "16", "16,", ",16", "0,16", "16,0", "a,b", "16,256,1", "-1,4", "1,5e9"] {
            assert!(paged(text).is_err(), "{text}");
        }
    }
}
