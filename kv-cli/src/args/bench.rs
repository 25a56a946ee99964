//! Arguments of `kv bench`.
use clap::Args;
use kv::Device;

use super::{at_least_1, backend};
use crate::stored::Stored;

/// Measure what a cache does on a device, each beside a plain copy of memory there: decode
/// attention, new rows (one a sequence, and a prompt), copies of blocks.
///
/// A copy from one buffer to another of as many bytes as the operation reads is timed in the same
/// rounds, the two in turns: its rate is the memory's own, and `of copy` is the operation's rate
/// divided by it. A rate counts every byte that is read and every byte that is written. The first
/// round warms up and is not counted; figures are medians of the others.
#[derive(Debug, Args)]
#[command(
    allow_negative_numbers = true,
    after_help = "Examples:
  kv bench
  kv bench --backend wgpu --formats bf16,l4
  kv bench --backend cuda:0 --batch 64 --context 8192 --layers 2 --formats int8/l4 --json"
)]
pub(crate) struct BenchArgs {
    /// What to measure: a name that `kv devices` lists, such as cpu,
    /// wgpu:0, wgpu:llvmpipe (a part of an adapter's name) or cuda:0
    #[arg(long, value_name = "NAME", default_value = "cpu", value_parser = backend)]
    pub(crate) backend: Device,

    /// Stored formats behind commas, such as l4 or int8/l4 (K/V); scales that must be given are
    /// made for the values that are written
    #[arg(
        long,
        visible_alias = "format",
        value_name = "NAME[/NAME],..",
        value_delimiter = ',',
        default_value = "bf16,fp8-e4m3,int8,l4"
    )]
    pub(crate) formats: Vec<Stored>,

    /// Sequences that decode at once; 16 on a card and 4 elsewhere unless given
    #[arg(long, value_name = "N", value_parser = at_least_1)]
    pub(crate) batch: Option<u32>,

    /// Tokens of each sequence, the new one included, and of the prompt; 2048 unless given, 128
    /// where a CPU runs the shaders of an adapter
    #[arg(long, value_name = "N", value_parser = at_least_1)]
    pub(crate) context: Option<u32>,

    /// Layers of one step; all of them together should be larger than the device's caches
    #[arg(
        long,
        value_name = "N",
        default_value_t = 4,
        value_parser = clap::value_parser!(u16).range(1..)
    )]
    pub(crate) layers: u16,

    /// Query heads, a multiple of --kv-heads
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = at_least_1)]
    pub(crate) q_heads: u32,

    /// Heads of K and V
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = at_least_1)]
    pub(crate) kv_heads: u32,

    /// Values of one row
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = at_least_1)]
    pub(crate) head_dim: u32,

    /// Tokens of a block
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = at_least_1)]
    pub(crate) block_size: u32,

    /// Rounds that count; 7 unless given, 3 where a CPU runs the shaders of an adapter
    #[arg(long, value_name = "N", value_parser = at_least_1)]
    pub(crate) rounds: Option<u32>,

    /// Print one JSON object instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

/// Query heads that cannot share the kv heads evenly.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("--q-heads {q_heads} is no multiple of --kv-heads {kv_heads}")]
pub(crate) struct UnevenHeads {
    q_heads: u32,
    kv_heads: u32,
}

impl BenchArgs {
    /// Refuses numbers that do not fit each other.
    pub(super) fn check(&self) -> Result<(), UnevenHeads> {
        let Self { q_heads, kv_heads, .. } = *self;
        if q_heads.is_multiple_of(kv_heads) {
            Ok(())
        } else {
            Err(UnevenHeads { q_heads, kv_heads })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Cli, Command};
    use super::*;
    use clap::Parser;

    fn parse(args: &[&str]) -> Result<BenchArgs, clap::Error> {
        let cli = Cli::try_parse_from([&["kv", "bench"], args].concat())?.checked()?;
        match cli.command {
            Command::Bench(args) => Ok(args),
            _ => panic!("another command"),
        }
    }

    #[test]
    fn formats_are_a_list() {
        let names = |args: &[&str]| {
            let formats = parse(args).expect("formats").formats;
            formats.iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        assert_eq!(names(&[]), ["bf16", "fp8-e4m3", "int8", "l4"]);
        assert_eq!(names(&["--formats", "l4, int8/l3"]), ["l4", "int8/l3"]);
        assert_eq!(names(&["--format", "f32", "--format", "l6"]), ["f32", "l6"]);
    }

    #[test]
    fn heads_must_share_evenly() {
        let args = |q, kv| parse(&["--q-heads", q, "--kv-heads", kv]);
        assert!(args("32", "32").is_ok() && args("6", "2").is_ok());
        let error = args("4", "8").expect_err("4 on 8");
        assert_eq!(error.kind(), clap::error::ErrorKind::ValueValidation);
        assert!(error.to_string().contains("--q-heads 4 is no multiple of --kv-heads 8"));
        assert!(args("9", "2").is_err());
    }
}
