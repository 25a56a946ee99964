//! Arguments of `kv bench`.
use std::num::NonZeroUsize;
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use kv::Device;
use kv::cpu::Isa;
use kv::tier::Bytes;
use kv_bench::measure::{self, BlockSize, Formats, Options};

use super::{at_least_1, backend};

/// Measure a cache's operations on a device, each next to a plain copy of memory there: decode
/// attention, new rows (one per sequence, and a prompt), copies of blocks.
///
/// A plain copy of the bytes that the operation reads is timed in the same rounds, interleaved with
/// the operation: its rate is the memory's own, and `of copy` is the operation's rate divided by
/// it. A rate counts every byte that is read and every byte that is written. The first round warms
/// up and is not counted; figures are medians of the others.
///
/// With --suite, operations are measured over a grid of shapes: all of --batch by all of --context
/// with the middle of everything else, then one list at a time (heads, head dims, blocks, formats).
/// Figures are those of one layer, and on a CPU the roofline of operations that only read is plain
/// reading by the same threads. Lists replace those of the grid.
///
/// The suite tier measures no device but stores of lower tiers: a folder beside plain direct reads
/// and writes of the same disk, Redis and S3 beside plain clients.
#[derive(Debug, Args)]
#[command(
    allow_negative_numbers = true,
    after_help = "Examples:
  kv bench
  kv bench --backend wgpu --formats bf16,l4
  kv bench --backend cuda:0 --batch 64 --context 8192 --layers 2 --formats int8/l4 --json
  kv bench --suite decode --plot roofline.svg
  kv bench --suite decode,append --threads 1,2 --batch 16 --context 4096 --json
  kv bench --suite tier --dir /var/cache --redis redis://127.0.0.1"
)]
pub(crate) struct BenchArgs {
    /// Device to measure: a name that `kv devices` lists, such as cpu, wgpu:0, wgpu:llvmpipe (a
    /// part of an adapter's name) or cuda:0
    #[arg(long, value_name = "NAME", default_value = "cpu", value_parser = backend)]
    pub(crate) backend: Device,

    /// Measure these operations over a grid of shapes
    #[arg(long, value_name = "NAME,..", value_delimiter = ',')]
    pub(crate) suite: Vec<Suite>,

    /// Stored formats separated by commas, such as l4 or int8/l4 (K/V); given scales are made for
    /// the written values. Default: bf16, fp8-e4m3, int8 and l4; in a suite all formats
    #[arg(long, visible_alias = "format", value_name = "NAME[/NAME],..", value_delimiter = ',')]
    pub(crate) formats: Vec<Formats>,

    /// Sequences per decode step; default: 16 on a card and 4 elsewhere. In a suite a list:
    /// 1,16,64, and 1,64,1000 for planning
    #[arg(long, value_name = "N,..", value_delimiter = ',', value_parser = at_least_1)]
    pub(crate) batch: Vec<u32>,

    /// Tokens per sequence, including the new one, and of the prompt; default: 2048, or 128 if a
    /// CPU runs the shaders of an adapter. In a suite a list: 512,4096,32768
    #[arg(long, value_name = "N,..", value_delimiter = ',', value_parser = at_least_1)]
    pub(crate) context: Vec<u32>,

    /// Layers per step; default: 4. All of them together should be larger than the device's caches;
    /// in a suite the default is
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) layers: Option<u16>,

    /// Query heads, a multiple of --kv-heads; default: 32. In a suite a list
    #[arg(long, value_name = "N,..", value_delimiter = ',', value_parser = at_least_1)]
    pub(crate) q_heads: Vec<u32>,

    /// Heads of K and V; default: 8. In a suite a list: equal to the query heads, a fourth and an
    /// eighth of them
    #[arg(long, value_name = "N,..", value_delimiter = ',', value_parser = at_least_1)]
    pub(crate) kv_heads: Vec<u32>,

    /// Head dim; default: 128. In a suite a list: 64,128
    #[arg(long, value_name = "N,..", value_delimiter = ',', value_parser = at_least_1)]
    pub(crate) head_dim: Vec<u32>,

    /// Tokens per block; default: 16. In a suite a list, with `contiguous` for one block per
    /// sequence: 16,32,contiguous
    #[arg(long, value_name = "N,..", value_delimiter = ',', value_parser = block_size)]
    pub(crate) block_size: Vec<BlockSize>,

    /// Order of the rows in a block
    #[arg(long, value_enum, default_value_t)]
    pub(crate) block_order: BlockOrder,

    /// Rounds after the warm-up; default: 7, or 3 if a CPU runs the shaders of an adapter
    #[arg(long, value_name = "N", value_parser = at_least_1)]
    pub(crate) rounds: Option<u32>,

    /// Threads of the CPU, in a suite a list; default: the number of cores
    #[arg(long, value_name = "N,..", value_delimiter = ',')]
    pub(crate) threads: Vec<NonZeroUsize>,

    /// Instruction sets of the CPU (scalar, neon, avx2, avx512, or with optional parts such as
    /// avx512+bf16+vbmi), in a suite a list; default: the best one
    #[arg(long, value_name = "NAME,..", value_delimiter = ',')]
    pub(crate) isa: Vec<Isa>,

    /// Print which attention strategy runs each case on the CPU, and why no faster one does,
    /// instead of measuring
    #[arg(long, requires = "suite", conflicts_with_all = ["plot", "json"])]
    pub(crate) explain: bool,

    /// Measure every combination of the lists, not one list at a time
    #[arg(long, requires = "suite")]
    pub(crate) full: bool,

    /// Leave out cases that need more memory than this, such as 8GiB; default: half of the free
    /// memory
    #[arg(long, value_name = "BYTES", requires = "suite")]
    pub(crate) memory: Option<Bytes>,

    /// Draw bytes against time, one point per case, into this file
    #[arg(long, value_name = "FILE.svg", requires = "suite")]
    pub(crate) plot: Option<PathBuf>,

    /// With --suite tier: an existing folder on the disk to measure. What is written there is
    /// removed at the end. Default: `target` or the user's cache folder
    #[arg(long, value_name = "DIR", requires = "suite")]
    pub(crate) dir: Option<PathBuf>,

    /// With --suite tier: measure this server too, as `redis://HOST[:PORT]`
    #[arg(long, value_name = "URL", requires = "suite")]
    pub(crate) redis: Option<String>,

    /// With --suite tier: measure this bucket too, as
    /// `s3://BUCKET[/PREFIX][?endpoint=..]`
    #[arg(long, value_name = "URL", requires = "suite")]
    pub(crate) s3: Option<String>,

    /// With --suite tier: bytes of all chunks; default: 512MiB
    #[arg(long, value_name = "SIZE", requires = "suite")]
    pub(crate) size: Option<Bytes>,

    /// Print JSON instead of a table: one object, or with --suite a list of objects
    #[arg(long)]
    pub(crate) json: bool,
}

/// Order of the rows of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub(crate) enum BlockOrder {
    /// Head by head, the tokens of each together
    #[default]
    Hnd,
    /// Token by token, the heads of each together
    Nhd,
}

impl From<BlockOrder> for kv::BlockOrder {
    fn from(order: BlockOrder) -> Self {
        match order {
            BlockOrder::Hnd => Self::Hnd,
            BlockOrder::Nhd => Self::Nhd,
        }
    }
}

/// Operations that are measured together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Suite {
    /// Attention of one new token per sequence
    Decode,
    /// Attention of whole prompts
    Prefill,
    /// New rows into the cache: one token per sequence, and a prompt
    Append,
    /// Rows out of the cache, decoded
    Gather,
    /// Blocks of sequences to those of others
    Copy,
    /// The plan of a step, without running it
    Plan,
    /// All of them
    All,
    /// Stores of lower tiers: alone, and not part of all
    Tier,
}

impl Suite {
    /// Returns the suite of operations; `None` for that of stores.
    fn of_operations(self) -> Option<measure::Suite> {
        Some(match self {
            Self::Decode => measure::Suite::Decode,
            Self::Prefill => measure::Suite::Prefill,
            Self::Append => measure::Suite::Append,
            Self::Gather => measure::Suite::Gather,
            Self::Copy => measure::Suite::Copy,
            Self::Plan => measure::Suite::Plan,
            Self::All => measure::Suite::All,
            Self::Tier => return None,
        })
    }
}

fn block_size(text: &str) -> Result<BlockSize, String> {
    match text.trim() {
        "contiguous" => Ok(BlockSize::Contiguous),
        number => at_least_1(number).map(BlockSize::Tokens),
    }
}

/// Arguments of `kv bench` that contradict each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(crate) enum BenchArgsError {
    #[error("--q-heads {q_heads} is not a multiple of --kv-heads {kv_heads}")]
    UnevenHeads { q_heads: u32, kv_heads: u32 },
    #[error("{name} takes one value without --suite, {got} are given")]
    ListWithoutSuite { name: &'static str, got: usize },
    #[error("--block-size contiguous needs --suite")]
    ContiguousWithoutSuite,
    #[error("{name} is for the backend cpu")]
    OnlyOnCpu { name: &'static str },
    #[error("{name} holds {value} twice")]
    Twice { name: &'static str, value: u32 },
    #[error("--suite tier is measured alone")]
    TierWithOthers,
    #[error("{name} is not for --suite tier")]
    NotOfTier { name: &'static str },
    #[error("{name} is for --suite tier")]
    OnlyOfTier { name: &'static str },
}

impl BenchArgs {
    /// Returns the options of the measurement.
    pub(crate) fn options(&self) -> Options {
        Options {
            backend: self.backend.clone(),
            suites: self.suite.iter().filter_map(|suite| suite.of_operations()).collect(),
            formats: self.formats.clone(),
            batch: self.batch.clone(),
            context: self.context.clone(),
            layers: self.layers,
            q_heads: self.q_heads.clone(),
            kv_heads: self.kv_heads.clone(),
            head_dim: self.head_dim.clone(),
            block_size: self.block_size.clone(),
            block_order: self.block_order.into(),
            rounds: self.rounds,
            threads: self.threads.clone(),
            isa: self.isa.clone(),
            full: self.full,
            memory: self.memory.map(|Bytes(bytes)| bytes),
        }
    }

    /// Returns whether stores are measured.
    pub(crate) fn is_tier(&self) -> bool {
        self.suite.contains(&Suite::Tier)
    }

    /// Refuses options of operations with the suite of stores, and the other way round.
    fn check_tier(&self) -> Result<(), BenchArgsError> {
        let of_tier = [
            ("--dir", self.dir.is_some()),
            ("--redis", self.redis.is_some()),
            ("--s3", self.s3.is_some()),
            ("--size", self.size.is_some()),
        ];
        let of_operations = [
            ("--formats", !self.formats.is_empty()),
            ("--batch", !self.batch.is_empty()),
            ("--context", !self.context.is_empty()),
            ("--layers", self.layers.is_some()),
            ("--q-heads", !self.q_heads.is_empty()),
            ("--kv-heads", !self.kv_heads.is_empty()),
            ("--head-dim", !self.head_dim.is_empty()),
            ("--block-size", !self.block_size.is_empty()),
            ("--backend", self.backend != Device::Cpu),
            ("--threads", !self.threads.is_empty()),
            ("--isa", !self.isa.is_empty()),
            ("--explain", self.explain),
            ("--full", self.full),
            ("--memory", self.memory.is_some()),
            ("--plot", self.plot.is_some()),
        ];
        let given = |options: &[(&'static str, bool)]| {
            options.iter().find(|(_, is_given)| *is_given).map(|(name, _)| *name)
        };
        if !self.is_tier() {
            return match given(&of_tier) {
                Some(name) => Err(BenchArgsError::OnlyOfTier { name }),
                None => Ok(()),
            };
        }
        if self.suite.len() > 1 {
            return Err(BenchArgsError::TierWithOthers);
        }
        match given(&of_operations) {
            Some(name) => Err(BenchArgsError::NotOfTier { name }),
            None => Ok(()),
        }
    }

    /// Refuses arguments that contradict each other.
    pub(super) fn check(&self) -> Result<(), BenchArgsError> {
        self.check_tier()?;
        let numbers: [(&'static str, &[u32]); 5] = [
            ("--batch", &self.batch),
            ("--context", &self.context),
            ("--q-heads", &self.q_heads),
            ("--kv-heads", &self.kv_heads),
            ("--head-dim", &self.head_dim),
        ];
        if self.suite.is_empty() {
            let others = [
                ("--block-size", self.block_size.len()),
                ("--threads", self.threads.len()),
                ("--isa", self.isa.len()),
            ];
            let counts = numbers.iter().map(|(name, values)| (*name, values.len())).chain(others);
            if let Some((name, got)) = counts.into_iter().find(|(_, got)| *got > 1) {
                return Err(BenchArgsError::ListWithoutSuite { name, got });
            }
            if self.block_size.contains(&BlockSize::Contiguous) {
                return Err(BenchArgsError::ContiguousWithoutSuite);
            }
        }
        for (name, values) in numbers {
            let twice = values
                .iter()
                .enumerate()
                .find(|(index, value)| values.iter().take(*index).any(|before| before == *value));
            if let Some((_, value)) = twice {
                return Err(BenchArgsError::Twice { name, value: *value });
            }
        }
        if self.backend != Device::Cpu {
            let given = [
                ("--threads", !self.threads.is_empty()),
                ("--isa", !self.isa.is_empty()),
                ("--explain", self.explain),
            ];
            if let Some((name, _)) = given.into_iter().find(|(_, is_given)| *is_given) {
                return Err(BenchArgsError::OnlyOnCpu { name });
            }
        }
        self.check_heads()
    }

    fn check_heads(&self) -> Result<(), BenchArgsError> {
        // In a suite, kv heads follow from the query heads unless they are given.
        if !self.suite.is_empty() && self.kv_heads.is_empty() {
            return Ok(());
        }
        let or = |given: &[u32], default| {
            if given.is_empty() { vec![default] } else { given.to_vec() }
        };
        for q_heads in or(&self.q_heads, Options::Q_HEADS) {
            for kv_heads in or(&self.kv_heads, Options::KV_HEADS) {
                if !q_heads.is_multiple_of(kv_heads) {
                    return Err(BenchArgsError::UnevenHeads { q_heads, kv_heads });
                }
            }
        }
        Ok(())
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
        assert_eq!(names(&[]), [""; 0]);
        assert_eq!(names(&["--formats", "l4, int8/l3"]), ["l4", "int8/l3"]);
        assert_eq!(names(&["--format", "f32", "--format", "l6"]), ["f32", "l6"]);
    }

    #[test]
    fn a_suite_takes_lists() {
        let args = ["--suite", "decode,plan", "--batch", "1,2", "--context", "8", "--full"];
        let more = ["--block-size", "16,contiguous", "--threads", "1,2", "--isa", "scalar"];
        let args = parse(&[&args[..], &more].concat()).expect("a suite");
        assert_eq!(args.suite, [Suite::Decode, Suite::Plan]);
        assert_eq!((args.batch, args.context), (vec![1, 2], vec![8]));
        assert_eq!(args.block_size, [BlockSize::Tokens(16), BlockSize::Contiguous]);
        assert_eq!(args.threads.iter().map(|n| n.get()).collect::<Vec<_>>(), [1, 2]);
        assert_eq!(args.isa, [Isa::SCALAR]);
        assert_eq!((args.full, args.memory), (true, None));
    }

    #[test]
    fn contradicting_arguments_are_refused_by_name() {
        let check = |args: &[&str]| {
            let cli = Cli::try_parse_from([&["kv", "bench"], args].concat()).expect("arguments");
            let Command::Bench(args) = cli.command else { panic!("another command") };
            args.check()
        };
        let suite = |args: &[&str]| check(&[&["--suite", "all"], args].concat());
        for name in ["--batch", "--context", "--q-heads", "--head-dim", "--block-size", "--threads"]
        {
            let refused = Err(BenchArgsError::ListWithoutSuite { name, got: 2 });
            assert_eq!(check(&[name, "64,128"]), refused);
            assert_eq!(suite(&[name, "64,128"]), Ok(()));
        }
        let contiguous = ["--block-size", "contiguous"];
        assert_eq!(check(&contiguous), Err(BenchArgsError::ContiguousWithoutSuite));
        assert_eq!(suite(&contiguous), Ok(()));
        for (name, value) in [("--threads", "2"), ("--isa", "scalar")] {
            let refused = Err(BenchArgsError::OnlyOnCpu { name });
            assert_eq!(suite(&["--backend", "wgpu:0", name, value]), refused);
            assert_eq!(check(&["--backend", "cuda:0", name, value]), refused);
            assert_eq!(check(&[name, value]), Ok(()));
        }
        let twice = Err(BenchArgsError::Twice { name: "--batch", value: 4 });
        assert_eq!(suite(&["--batch", "4,8,4"]), twice);
        let uneven = Err(BenchArgsError::UnevenHeads { q_heads: 32, kv_heads: 5 });
        assert_eq!(suite(&["--kv-heads", "8,5"]), uneven);
        assert_eq!(suite(&["--q-heads", "6"]), Ok(()));
    }

    #[test]
    fn arguments_that_need_a_suite_are_refused_without_one() {
        for option in [&["--full"][..], &["--memory", "1GiB"], &["--plot", "a.svg"]] {
            let error = parse(option).expect_err("no suite");
            assert_eq!(error.kind(), clap::error::ErrorKind::MissingRequiredArgument);
            assert!(error.to_string().contains("--suite"), "{error}");
        }
    }

    #[test]
    fn heads_must_share_evenly() {
        let args = |q, kv| parse(&["--q-heads", q, "--kv-heads", kv]);
        assert!(args("32", "32").is_ok() && args("6", "2").is_ok());
        let error = args("4", "8").expect_err("4 on 8");
        assert_eq!(error.kind(), clap::error::ErrorKind::ValueValidation);
        assert!(error.to_string().contains("--q-heads 4 is not a multiple of --kv-heads 8"));
        assert!(args("9", "2").is_err());
    }
}
