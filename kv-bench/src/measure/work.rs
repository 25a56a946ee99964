//! What is measured, and how many bytes each of it moves.
use kv::backend::SlotMap;
use kv::quant::{Calibration, LayerCalibration, PlaneCalibration};
use kv::quant::{ScaleGroup, Scaling};
use kv::{BlockOrder, CacheSpec, KvFormat};
use serde::Serialize;

use super::error::Error;
use super::options::{BlockSize, Formats, Options};
use super::report::{RunsOn, order};
use crate::num::to_usize;

/// Bytes of a value of the tensors that come from the model, which are bf16.
pub(super) const VALUE_BYTES: u64 = 2;

/// Stored formats unless given.
const FORMATS: [KvFormat; 4] = [
    KvFormat::Bf16,
    KvFormat::Fp8E4m3(Scaling::Tensor),
    KvFormat::Int8(Scaling::Row),
    KvFormat::L4(ScaleGroup::Row),
];

/// How large everything is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Shape {
    /// Sequences that decode at once.
    pub batch: u32,
    /// Tokens of each.
    pub context: u32,
    /// Layers of one step.
    pub layers: u16,
    /// Query heads.
    pub q_heads: u32,
    /// Heads of K and V.
    pub kv_heads: u32,
    /// Values of one row.
    pub head_dim: u32,
    /// Tokens of a block.
    pub block_size: BlockSize,
    /// Axes inside a block.
    #[serde(serialize_with = "order")]
    pub block_order: BlockOrder,
    /// Rounds that count.
    pub rounds: u32,
    /// Whether the sequences of the batch have their contexts, but for the last token; else they
    /// are empty.
    #[serde(skip)]
    pub(super) is_filled: bool,
    /// Empty sequences after the batch, with room for a context each.
    #[serde(skip)]
    pub(super) spares: u32,
}

impl Shape {
    /// Makes the shape of a measurement without a suite. What the options leave out is large enough
    /// to keep a card busy for longer than a launch takes, smaller on a CPU, and small for a driver
    /// in software, which would take hours.
    pub fn new(options: &Options, runs_on: RunsOn) -> Self {
        let (batch, context) = match runs_on {
            RunsOn::Card => (16, 2048),
            RunsOn::Cpu => (4, 2048),
            RunsOn::Software => (4, 128),
        };
        let first = |given: &[u32], default| given.first().copied().unwrap_or(default);
        Self {
            batch: first(&options.batch, batch),
            context: first(&options.context, context),
            layers: options.layers.unwrap_or(4),
            q_heads: first(&options.q_heads, Options::Q_HEADS),
            kv_heads: first(&options.kv_heads, Options::KV_HEADS),
            head_dim: first(&options.head_dim, 128),
            block_size: options.block_size.first().copied().unwrap_or(BlockSize::Tokens(16)),
            block_order: options.block_order,
            rounds: rounds(options, runs_on),
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
pub(super) fn rounds(options: &Options, runs_on: RunsOn) -> u32 {
    options.rounds.unwrap_or(if runs_on == RunsOn::Software { 3 } else { 7 })
}

/// Formats to measure without a suite.
pub(super) fn formats(options: &Options) -> Vec<Formats> {
    if options.formats.is_empty() {
        return FORMATS.map(Formats::from).to_vec();
    }
    options.formats.clone()
}

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "each is shown in a way of its own")]
pub enum Operation {
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
    pub const FOUR: [Self; 4] = [Self::Decode, Self::Append, Self::AppendPrompt, Self::Copy];

    /// Returns its name in reports.
    pub fn name(self) -> &'static str {
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
#[expect(clippy::exhaustive_structs, reason = "a literal names each of the numbers")]
pub struct Work {
    /// Bytes.
    pub read: u64,
    /// Bytes.
    pub written: u64,
    /// Multiplications and additions of attention, without its softmax.
    pub flops: u64,
}

impl Work {
    /// Returns the bytes that the plain copy beside it takes from one buffer to another: those that
    /// are read, in whole words.
    pub fn copied(self) -> u64 {
        self.read.next_multiple_of(4)
    }

    /// Returns the bytes that are read and written.
    pub fn bytes(self) -> u64 {
        self.read.saturating_add(self.written)
    }
}

/// A cache to measure, before it has memory: the batch, and its spares.
pub(super) fn spec(shape: &Shape, stored: Formats) -> Result<CacheSpec, Error> {
    let sequences = shape.batch.checked_add(shape.spares).ok_or(Error::TooManySequences)?;
    let builder = || {
        CacheSpec::builder()
            .layers(shape.layers)
            .kv_heads(shape.kv_heads)
            .head_dim(shape.head_dim)
            .formats(stored.k, stored.v)
            .block_order(shape.block_order)
            .full_precision_prefix(stored.full_precision_prefix())
            .max_sequences(sequences)
    };
    let BlockSize::Tokens(block_size) = shape.block_size else {
        return Ok(builder().contiguous(sequences, shape.context).build()?);
    };
    let one = builder().paged(block_size, 1).build()?;
    let blocks = slot_map(&one).blocks(shape.context).checked_mul(sequences);
    let blocks = blocks.ok_or(Error::TooManyBlocks)?;
    Ok(builder().paged(block_size, blocks).build()?)
}

/// Where the tokens of a sequence are.
pub(super) fn slot_map(spec: &CacheSpec) -> SlotMap {
    let group = spec.groups().first();
    *group.unwrap_or_else(|| unreachable!("a cache has a group")).slot_map()
}

/// Constants for values between -1 and 1, for formats that need some.
pub(super) fn calibration(shape: &Shape) -> Calibration {
    let ones = vec![1.0; to_usize(shape.kv_heads)];
    let plane = || PlaneCalibration { amax: ones.clone(), ..PlaneCalibration::default() };
    Calibration::new(vec![LayerCalibration { k: plane(), v: plane() }; shape.layers.into()])
}

/// What an operation does at the least, in all layers. Queries, outputs and tables are counted for
/// `Prefill` alone: elsewhere they are small beside the rest.
pub(super) fn work(shape: &Shape, spec: &CacheSpec, operation: Operation) -> Work {
    let map = slot_map(spec);
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
    match operation {
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
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn works(options: &Options, format: &str) -> Vec<(u64, u64)> {
        let shape = Shape::new(options, RunsOn::Cpu);
        let spec = spec(&shape, format.parse().expect("a format")).expect("a cache");
        let of = |operation| work(&shape, &spec, operation);
        Operation::FOUR.map(of).map(|work| (work.read, work.written)).to_vec()
    }

    #[test]
    fn bytes_follow_from_the_shape() {
        let options = Options {
            batch: vec![3],
            context: vec![40],
            layers: Some(2),
            kv_heads: vec![4],
            head_dim: vec![64],
            ..Options::default()
        };
        let of = |format| works(&options, format);
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
        // 34 bytes a row of 64, and a wide row of 128 bytes takes four of them: 3 slots more for
        // each of the first 4 tokens.
        let (slot, slots) = (34 * 16, 40 + 4 * 3);
        let stored = slots * slot;
        let append = (3 * token, 3 * slot);
        assert_eq!(of("l4"), [(3 * stored, 0), append, (context, stored), (stored, stored)]);
    }

    #[test]
    fn one_token_is_a_context() {
        let (batch, context) = (vec![1], vec![1]);
        let options = Options { batch, context, layers: Some(1), ..Options::default() };
        let token = 8 * 128 * 4;
        assert_eq!(
            works(&options, "bf16"),
            [(token, 0), (token, token), (token, token), (token, token)]
        );
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
        let spec = spec(&shape, "int8-head".parse().expect("a format")).expect("a cache");
        let of = |operation| work(&shape, &spec, operation);
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
        let shape = |options: &Options, runs_on| {
            let shape = Shape::new(options, runs_on);
            (shape.batch, shape.context, shape.rounds)
        };
        let none = Options::default();
        assert_eq!(shape(&none, RunsOn::Card), (16, 2048, 7));
        assert_eq!(shape(&none, RunsOn::Cpu), (4, 2048, 7));
        assert_eq!(shape(&none, RunsOn::Software), (4, 128, 3));
        let names: Vec<_> = formats(&none).iter().map(ToString::to_string).collect();
        assert_eq!(names, ["bf16", "fp8-e4m3", "int8", "l4"]);
        let (batch, context) = (vec![3], vec![9]);
        let asked = Options { batch, context, rounds: Some(2), ..none };
        assert_eq!(shape(&asked, RunsOn::Software), (3, 9, 2));
    }
}
