//! What is measured, and how many bytes each of it moves.
use anyhow::Context;
use kv::calibration::{Calibration, LayerCalibration, PlaneCalibration};
use kv::{CacheSpec, SlotMap};
use serde::Serialize;

use super::report::RunsOn;
use crate::args::BenchArgs;
use crate::num::to_usize;
use crate::stored::Stored;

/// Bytes of a value of the tensors that come from the model, which are bf16.
pub(super) const VALUE_BYTES: u64 = 2;

/// How large everything is.
#[derive(Debug, Clone, Copy, Serialize)]
pub(super) struct Shape {
    pub(super) batch: u32,
    pub(super) context: u32,
    pub(super) layers: u16,
    pub(super) q_heads: u32,
    pub(super) kv_heads: u32,
    pub(super) head_dim: u32,
    pub(super) block_size: u32,
    pub(super) rounds: u32,
}

impl Shape {
    /// What was asked for. What was not is as much as keeps a card busy for longer than it takes to
    /// ask it, less on a CPU, and little on a driver in software, which would take hours.
    pub(super) fn new(args: &BenchArgs, runs_on: RunsOn) -> Self {
        let (batch, context, rounds) = match runs_on {
            RunsOn::Card => (16, 2048, 7),
            RunsOn::Cpu => (4, 2048, 7),
            RunsOn::Software => (4, 128, 3),
        };
        Self {
            batch: args.batch.unwrap_or(batch),
            context: args.context.unwrap_or(context),
            layers: args.layers,
            q_heads: args.q_heads,
            kv_heads: args.kv_heads,
            head_dim: args.head_dim,
            block_size: args.block_size,
            rounds: args.rounds.unwrap_or(rounds),
        }
    }
}

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Operation {
    /// Attention of the last token of every sequence, in every layer.
    Decode,
    /// K and V of the last token of every sequence into the cache, in every layer.
    Append,
    /// K and V of a prompt into the cache, in every layer.
    Prefill,
    /// The blocks of one sequence to those of another, in every layer.
    Copy,
}

impl Operation {
    pub(super) const ALL: [Self; 4] = [Self::Decode, Self::Append, Self::Prefill, Self::Copy];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Decode => "decode",
            Self::Append => "append",
            Self::Prefill => "prefill",
            Self::Copy => "copy",
        }
    }
}

/// Bytes that one run of an operation moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Work {
    pub(super) read: u64,
    pub(super) written: u64,
}

impl Work {
    /// Bytes that the plain copy beside it takes from one buffer to another: those that are read,
    /// in whole words.
    pub(super) fn copied(self) -> u64 {
        self.read.next_multiple_of(4)
    }
}

/// A cache to measure, before it has memory: the batch, and room for a prompt as long as each of
/// its sequences.
pub(super) fn spec(shape: &Shape, stored: &Stored) -> anyhow::Result<CacheSpec> {
    let sequences = shape.batch.checked_add(1).context("too many sequences")?;
    let build = |num_blocks: u32| {
        CacheSpec::builder()
            .layers(shape.layers)
            .kv_heads(shape.kv_heads)
            .head_dim(shape.head_dim)
            .formats(stored.k, stored.v)
            .sinks(stored.sinks())
            .max_sequences(sequences)
            .paged(shape.block_size, num_blocks)
            .build()
    };
    let blocks = slot_map(&build(1)?)?.blocks(shape.context).checked_mul(sequences);
    Ok(build(blocks.context("the contexts have more than 2^32 blocks")?)?)
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

/// What an operation moves at the least. Queries, outputs and tables are not counted: they are
/// small beside the rest.
pub(super) fn work(shape: &Shape, spec: &CacheSpec, operation: Operation) -> anyhow::Result<Work> {
    let map = slot_map(spec)?;
    let slots = |count: u32| spec.memory().bytes_per_token.saturating_mul(count.into());
    let (batch, context) = (u64::from(shape.batch), shape.context);
    let stored = slots(map.slots(context));
    let newest = slots(map.slots(context).saturating_sub(map.slots(context.saturating_sub(1))));
    // K and V of one token as they come from the model.
    let token = [u64::from(shape.kv_heads), shape.head_dim.into(), shape.layers.into(), 2]
        .iter()
        .fold(VALUE_BYTES, |product, factor| product.saturating_mul(*factor));
    Ok(match operation {
        Operation::Decode => Work { read: stored.saturating_mul(batch), written: 0 },
        Operation::Append => {
            Work { read: token.saturating_mul(batch), written: newest.saturating_mul(batch) }
        }
        Operation::Prefill => Work { read: token.saturating_mul(context.into()), written: stored },
        Operation::Copy => Work { read: stored, written: stored },
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
        let spec = spec(&shape, &args.formats[0]).expect("a cache");
        let bytes = |operation| work(&shape, &spec, operation).expect("bytes");
        Operation::ALL.map(bytes).map(|work| (work.read, work.written)).to_vec()
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
