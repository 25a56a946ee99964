//! What is measured, and how many bytes each of it moves.
use anyhow::Context;
use kv::calibration::{Calibration, LayerCalibration, PlaneCalibration};
use kv::{CacheSpec, SlotMap};
use serde::Serialize;

use super::report::RunsOn;
use crate::args::{BenchArgs, BlockOrder, BlockSize};
use crate::num::to_usize;
use kv_runner::stored::Stored;

/// Bytes of a value of the tensors that come from the model, which are bf16.
pub(super) const VALUE_BYTES: u64 = 2;

/// Stored formats unless given.
const FORMATS: [&str; 4] = ["bf16", "fp8-e4m3", "int8", "l4"];

/// How large everything is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub(super) struct Shape {
    pub(super) batch: u32,
    pub(super) context: u32,
    pub(super) layers: u16,
    pub(super) q_heads: u32,
    pub(super) kv_heads: u32,
    pub(super) head_dim: u32,
    pub(super) block_size: BlockSize,
    pub(super) block_order: BlockOrder,
    pub(super) rounds: u32,
    /// Whether the sequences of the batch have their contexts, but for the last token; else they
    /// are empty.
    #[serde(skip)]
    pub(super) is_filled: bool,
    /// Empty sequences behind the batch, with room for a context each.
    #[serde(skip)]
    pub(super) spares: u32,
}

impl Shape {
    /// What was asked for without a suite. What was not is as much as keeps a card busy for longer
    /// than it takes to ask it, less on a CPU, and little on a driver in software, which would take
    /// hours.
    pub(super) fn new(args: &BenchArgs, runs_on: RunsOn) -> Self {
        let (batch, context) = match runs_on {
            RunsOn::Card => (16, 2048),
            RunsOn::Cpu => (4, 2048),
            RunsOn::Software => (4, 128),
        };
        let first = |given: &[u32], default| given.first().copied().unwrap_or(default);
        Self {
            batch: first(&args.batch, batch),
            context: first(&args.context, context),
            layers: args.layers.unwrap_or(4),
            q_heads: first(&args.q_heads, BenchArgs::Q_HEADS),
            kv_heads: first(&args.kv_heads, BenchArgs::KV_HEADS),
            head_dim: first(&args.head_dim, 128),
            block_size: args.block_size.first().copied().unwrap_or(BlockSize::Tokens(16)),
            block_order: args.block_order,
            rounds: rounds(args, runs_on),
            is_filled: true,
            spares: 1,
        }
    }

    /// Tokens of the batch's contexts.
    pub(super) fn batch_tokens(&self) -> u64 {
        u64::from(self.batch).saturating_mul(self.context.into())
    }
}

/// Rounds that count.
pub(super) fn rounds(args: &BenchArgs, runs_on: RunsOn) -> u32 {
    args.rounds.unwrap_or(if runs_on == RunsOn::Software { 3 } else { 7 })
}

/// Formats to measure without a suite.
pub(super) fn formats(args: &BenchArgs) -> anyhow::Result<Vec<Stored>> {
    if args.formats.is_empty() {
        return Ok(FORMATS.iter().map(|name| name.parse()).collect::<Result<_, _>>()?);
    }
    Ok(args.formats.clone())
}

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Operation {
    /// Attention of the last token of every sequence, in every layer.
    Decode,
    /// Attention of every token of every sequence, in every layer.
    Prefill,
    /// K and V of the last token of every sequence into the cache, in every layer.
    Append,
    /// K and V of a prompt into the cache, in every layer.
    AppendPrompt,
    /// K and V of every sequence out of the cache, decoded to bf16, in every layer.
    Gather,
    /// The blocks of sequences to those of others, in every layer.
    Copy,
    /// The plan of a step that brings one token a sequence.
    Plan,
}

impl Operation {
    /// What is measured without a suite.
    pub(super) const FOUR: [Self; 4] = [Self::Decode, Self::Append, Self::AppendPrompt, Self::Copy];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Decode => "decode",
            Self::Prefill => "prefill",
            Self::Append => "append",
            Self::AppendPrompt => "append-prompt",
            Self::Gather => "gather",
            Self::Copy => "copy",
            Self::Plan => "plan",
        }
    }
}

/// What one run of an operation does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Work {
    /// Bytes.
    pub(super) read: u64,
    /// Bytes.
    pub(super) written: u64,
    /// Multiplications and additions of attention, without its softmax.
    pub(super) flops: u64,
}

impl Work {
    /// Bytes that the plain copy beside it takes from one buffer to another: those that are read,
    /// in whole words.
    pub(super) fn copied(self) -> u64 {
        self.read.next_multiple_of(4)
    }

    pub(super) fn bytes(self) -> u64 {
        self.read.saturating_add(self.written)
    }
}

/// A cache to measure, before it has memory: the batch, and its spares.
pub(super) fn spec(shape: &Shape, stored: &Stored) -> anyhow::Result<CacheSpec> {
    let sequences = shape.batch.checked_add(shape.spares).context("too many sequences")?;
    let builder = || {
        CacheSpec::builder()
            .layers(shape.layers)
            .kv_heads(shape.kv_heads)
            .head_dim(shape.head_dim)
            .formats(stored.k, stored.v)
            .block_order(shape.block_order.into())
            .sinks(stored.sinks())
            .max_sequences(sequences)
    };
    let BlockSize::Tokens(block_size) = shape.block_size else {
        return Ok(builder().contiguous(sequences, shape.context).build()?);
    };
    let one = builder().paged(block_size, 1).build()?;
    let blocks = slot_map(&one)?.blocks(shape.context).checked_mul(sequences);
    let blocks = blocks.context("the contexts have more than 2^32 blocks")?;
    Ok(builder().paged(block_size, blocks).build()?)
}

/// Where the tokens of a sequence lie.
pub(super) fn slot_map(spec: &CacheSpec) -> anyhow::Result<SlotMap> {
    Ok(*spec.groups().first().context("a cache has a group")?.slot_map())
}

/// Constants for values between -1 and 1, for formats that need some.
pub(super) fn calibration(shape: &Shape) -> Calibration {
    let ones = vec![1.0; to_usize(shape.kv_heads)];
    let plane = || PlaneCalibration { amax: ones.clone(), ..PlaneCalibration::default() };
    Calibration::new(vec![LayerCalibration { k: plane(), v: plane() }; shape.layers.into()])
}

/// What an operation does at the least, in all layers. Queries, outputs and tables are counted for
/// `Prefill` alone: elsewhere they are small beside the rest.
pub(super) fn work(shape: &Shape, spec: &CacheSpec, operation: Operation) -> anyhow::Result<Work> {
    let map = slot_map(spec)?;
    let slots = |count: u32| spec.memory().bytes_per_token.saturating_mul(count.into());
    let (batch, context) = (u64::from(shape.batch), shape.context);
    let stored = slots(map.slots(context));
    let newest = slots(map.slots(context).saturating_sub(map.slots(context.saturating_sub(1))));
    let product = |factors: &[u64]| factors.iter().copied().fold(1, u64::saturating_mul);
    let (dim, layers) = (u64::from(shape.head_dim), u64::from(shape.layers));
    // K and V of one token as they come from the model, and its queries or outputs.
    let token = product(&[dim, layers, shape.kv_heads.into(), 2, VALUE_BYTES]);
    let queries = product(&[dim, layers, shape.q_heads.into(), VALUE_BYTES]);
    // Of one query and one key: a product with K and one with V.
    let pair = product(&[dim, layers, shape.q_heads.into(), 4]);
    let moves = |read, written| Work { read, written, flops: 0 };
    Ok(match operation {
        Operation::Decode => Work {
            flops: product(&[pair, shape.batch_tokens()]),
            ..moves(stored.saturating_mul(batch), 0)
        },
        Operation::Prefill => {
            let tokens = queries.saturating_mul(shape.batch_tokens());
            let keys = u64::from(context).saturating_add(1);
            Work {
                flops: product(&[pair, shape.batch_tokens(), keys]).div_euclid(2),
                ..moves(stored.saturating_mul(batch).saturating_add(tokens), tokens)
            }
        }
        Operation::Append => moves(token.saturating_mul(batch), newest.saturating_mul(batch)),
        Operation::AppendPrompt => moves(token.saturating_mul(context.into()), stored),
        Operation::Gather => {
            moves(stored.saturating_mul(batch), product(&[token, shape.batch_tokens()]))
        }
        Operation::Copy => {
            let copied = stored.saturating_mul(shape.spares.into());
            moves(copied, copied)
        }
        Operation::Plan => Work::default(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Cli, Command};
    use clap::Parser;

    fn works(args: &[&str]) -> Vec<(u64, u64)> {
        let cli = Cli::try_parse_from([&["kv", "bench"], args].concat()).expect("arguments");
        let Command::Bench(args) = cli.command else { panic!("another command") };
        let shape = Shape::new(&args, RunsOn::Cpu);
        let spec = spec(&shape, &formats(&args).expect("formats")[0]).expect("a cache");
        let bytes = |operation| work(&shape, &spec, operation).expect("bytes");
        Operation::FOUR.map(bytes).map(|work| (work.read, work.written)).to_vec()
    }

    #[test]
    fn bytes_follow_from_the_shape() {
        let shape = ["--batch", "3", "--context", "40", "--layers", "2", "--kv-heads", "4"];
        let of = |format| works(&[&shape[..], &["--head-dim", "64", "--formats", format]].concat());
        // K and V of 2 layers, 4 heads of 64: 1024 values a token, in bf16 2048 bytes.
        let (token, context) = (2048, 40 * 2048);
        assert_eq!(
            of("bf16"),
            [(3 * context, 0), (3 * token, 3 * token), (context, context), (context, context)]
        );
        // A byte a value.
        let half = context / 2;
        let append = (3 * token, 3 * token / 2);
        assert_eq!(of("fp8-e4m3"), [(3 * half, 0), append, (context, half), (half, half)]);
        // 34 bytes a row of 64, and a sink of 128 bytes takes four of them: 3 slots more for each
        // of the first 4 tokens.
        let (slot, slots) = (34 * 16, 40 + 4 * 3);
        let stored = slots * slot;
        let append = (3 * token, 3 * slot);
        assert_eq!(of("l4"), [(3 * stored, 0), append, (context, stored), (stored, stored)]);
    }

    #[test]
    fn one_token_is_a_context() {
        let args = ["--batch", "1", "--context", "1", "--formats", "bf16", "--layers", "1"];
        let token = 8 * 128 * 4;
        assert_eq!(works(&args), [(token, 0), (token, token), (token, token), (token, token)]);
    }

    #[test]
    fn suites_count_outputs_and_arithmetic() {
        let shape = Shape {
            batch: 3,
            context: 40,
            layers: 2,
            q_heads: 8,
            kv_heads: 4,
            head_dim: 64,
            block_size: BlockSize::Contiguous,
            block_order: BlockOrder::Nhd,
            rounds: 1,
            is_filled: true,
            spares: 3,
        };
        let spec = spec(&shape, &"int8-head".parse().expect("a format")).expect("a cache");
        let of = |operation| work(&shape, &spec, operation).expect("bytes");
        // A byte a value: 1024 a token. A query or output token: 2 layers, 8 heads of 64 in bf16.
        let (stored, queries) = (3 * 40 * 1024, 3 * 40 * 2048);
        let pair = 2 * 8 * 64 * 4;
        let work = |read, written, flops| Work { read, written, flops };
        assert_eq!(of(Operation::Decode), work(stored, 0, 3 * 40 * pair));
        // A query sees itself and what is before it: 1 + .. + 40 keys.
        let flops = 3 * 820 * pair;
        assert_eq!(of(Operation::Prefill), work(stored + queries, queries, flops));
        assert_eq!(of(Operation::Gather), work(stored, 2 * stored, 0));
        assert_eq!(of(Operation::Copy), work(stored, stored, 0));
        assert_eq!(of(Operation::Plan), work(0, 0, 0));
        assert_eq!(of(Operation::Gather).bytes(), 3 * stored);
    }

    #[test]
    fn a_device_gets_what_suits_it_unless_asked() {
        let shape = |args: &[&str], runs_on| {
            let cli = Cli::try_parse_from([&["kv", "bench"], args].concat()).expect("arguments");
            let Command::Bench(args) = cli.command else { panic!("another command") };
            let shape = Shape::new(&args, runs_on);
            (shape.batch, shape.context, shape.rounds)
        };
        assert_eq!(shape(&[], RunsOn::Card), (16, 2048, 7));
        assert_eq!(shape(&[], RunsOn::Cpu), (4, 2048, 7));
        assert_eq!(shape(&[], RunsOn::Software), (4, 128, 3));
        let asked = ["--batch", "3", "--context", "9", "--rounds", "2"];
        assert_eq!(shape(&asked, RunsOn::Software), (3, 9, 2));
    }
}
