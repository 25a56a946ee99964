//! The measured operations, and the bytes that each moves.
use kv::backend::SlotMap;
use kv::quant::{Calibration, LayerCalibration, PlaneCalibration};
use kv::quant::{ScaleGroup, Scaling};
use kv::{BlockOrder, CacheSpec, KvFormat};
use serde::Serialize;

use super::error::Error;
use super::options::{BlockSize, Formats, Options};
use super::report::{RunsOn, order};
use crate::num::to_usize;

/// Bytes per value of the model's tensors, which are bf16.
pub(super) const VALUE_BYTES: u64 = 2;

/// Default formats.
const FORMATS: [KvFormat; 4] = [
    KvFormat::Bf16,
    KvFormat::Fp8E4m3(Scaling::Tensor),
    KvFormat::Int8(Scaling::Row),
    KvFormat::L4(ScaleGroup::Row),
];

/// The shape of a measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Shape {
    /// Number of sequences that decode in one step.
    pub batch: u32,
    /// Tokens per sequence.
    pub context: u32,
    /// Layers per step.
    pub layers: u16,
    /// Number of query heads.
    pub q_heads: u32,
    /// Number of kv heads.
    pub kv_heads: u32,
    /// Head dim.
    pub head_dim: u32,
    /// Tokens per block.
    pub block_size: BlockSize,
    /// Order of axes inside a block.
    #[serde(serialize_with = "order")]
    pub block_order: BlockOrder,
    /// Rounds after the warm-up.
    pub rounds: u32,
    /// Whether the sequences of the batch have their contexts, except the last token; otherwise
    /// they are empty.
    #[serde(skip)]
    pub(super) is_filled: bool,
    /// Empty sequences after the batch, each with room for a context.
    #[serde(skip)]
    pub(super) spares: u32,
}

impl Shape {
    /// Makes the shape of a measurement without a suite. Defaults are large enough to keep a card
    /// busy for longer than a launch takes, smaller on a CPU, and small for a driver in software,
    /// which would take hours.
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

    /// Returns the number of tokens of all contexts.
    pub(super) fn batch_tokens(&self) -> u64 {
        u64::from(self.batch) * u64::from(self.context)
    }
}

/// Returns the number of rounds after the warm-up.
pub(super) fn rounds(options: &Options, runs_on: RunsOn) -> u32 {
    options.rounds.unwrap_or(if runs_on == RunsOn::Software { 3 } else { 7 })
}

/// Returns the formats of a measurement without a suite.
pub(super) fn formats(options: &Options) -> Vec<Formats> {
    if options.formats.is_empty() {
        return FORMATS.map(Formats::from).to_vec();
    }
    options.formats.clone()
}

/// A measured operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "each is shown in a way of its own")]
pub enum Operation {
    /// Attention of the last token of every sequence, in every layer.
    Decode,
    /// Attention of every token of every sequence, in every layer.
    Prefill,
    /// Writing K and V of the last token of every sequence, in every layer.
    Append,
    /// Writing K and V of a prompt, in every layer.
    AppendPrompt,
    /// Gathering K and V of every sequence, decoded to bf16, in every layer.
    Gather,
    /// Copying the blocks of sequences to those of others, in every layer.
    Copy,
    /// Planning a step with one token per sequence.
    Plan,
}

impl Operation {
    /// The operations of a measurement without a suite.
    pub const FOUR: [Self; 4] = [Self::Decode, Self::Append, Self::AppendPrompt, Self::Copy];

    /// Returns the name in reports.
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

/// The bytes and operations of one run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[expect(clippy::exhaustive_structs, reason = "a literal names each of the numbers")]
pub struct Work {
    /// Bytes read.
    pub read: u64,
    /// Bytes written.
    pub written: u64,
    /// Floating-point operations of attention, without its softmax.
    pub flops: u64,
}

impl Work {
    /// Returns the size of the plain copy's source: the bytes read, in whole words.
    pub fn copied(self) -> u64 {
        self.read.next_multiple_of(4)
    }

    /// Returns the bytes read and written.
    pub fn bytes(self) -> u64 {
        self.read + self.written
    }
}

/// Makes the spec of a cache for the batch and its spares.
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

/// Returns the slot map of the only group.
pub(super) fn slot_map(spec: &CacheSpec) -> SlotMap {
    let group = spec.groups().first();
    *group.unwrap_or_else(|| unreachable!("a cache has a group")).slot_map()
}

/// Makes constants for values between -1 and 1, for formats that need them.
pub(super) fn calibration(shape: &Shape) -> Calibration {
    let ones = vec![1.0; to_usize(shape.kv_heads)];
    let plane = || PlaneCalibration { amax: ones.clone(), ..PlaneCalibration::default() };
    Calibration::new(vec![LayerCalibration { k: plane(), v: plane() }; shape.layers.into()])
}

/// Returns the minimal work of an operation, over all layers. Queries, outputs and tables are
/// counted for `Prefill` only: elsewhere they are comparatively small.
pub(super) fn work(shape: &Shape, spec: &CacheSpec, operation: Operation) -> Work {
    let map = slot_map(spec);
    let slots = |count: u32| spec.memory().bytes_per_token * u64::from(count);
    let (batch, context) = (u64::from(shape.batch), shape.context);
    let stored = slots(map.slots(context));
    let newest = slots(map.slots(context) - map.slots(context.saturating_sub(1)));
    let product = |factors: &[u64]| factors.iter().product::<u64>();
    let (dim, layers) = (u64::from(shape.head_dim), u64::from(shape.layers));
    // K and V of one token as tensors, and its queries or outputs.
    let token = product(&[dim, layers, shape.kv_heads.into(), 2, VALUE_BYTES]);
    let queries = product(&[dim, layers, shape.q_heads.into(), VALUE_BYTES]);
    // One query and one key: a product with K and one with V.
    let pair = product(&[dim, layers, shape.q_heads.into(), 4]);
    let moves = |read, written| Work { read, written, flops: 0 };
    match operation {
        Operation::Decode => {
            Work { flops: product(&[pair, shape.batch_tokens()]), ..moves(stored * batch, 0) }
        }
        Operation::Prefill => {
            let tokens = queries * shape.batch_tokens();
            let keys = u64::from(context) + 1;
            Work {
                flops: product(&[pair, shape.batch_tokens(), keys]).div_euclid(2),
                ..moves(stored * batch + tokens, tokens)
            }
        }
        Operation::Append => moves(token * batch, newest * batch),
        Operation::AppendPrompt => moves(token * u64::from(context), stored),
        Operation::Gather => moves(stored * batch, product(&[token, shape.batch_tokens()])),
        Operation::Copy => {
            let copied = stored * u64::from(shape.spares);
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
        // One byte per value.
        let half = context / 2;
        let append = (3 * token, 3 * token / 2);
        assert_eq!(of("fp8-e4m3"), [(3 * half, 0), append, (context, half), (half, half)]);
        // 34 bytes per row of 64. A row of the full-precision prefix has 128 bytes and takes four
        // slots: 3 extra slots for each of the first 4 tokens.
        let (slot, slots) = (34 * 16, 40 + 4 * 3);
        let stored = slots * slot;
        let append = (3 * token, 3 * slot);
        assert_eq!(of("l4"), [(3 * stored, 0), append, (context, stored), (stored, stored)]);
    }

    #[test]
    fn a_context_of_one_token_is_possible() {
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
        // One byte per value: 1024 per token. A query or output token: 2 layers, 8 heads of 64 in
        // bf16.
        let (stored, queries) = (3 * 40 * 1024, 3 * 40 * 2048);
        let pair = 2 * 8 * 64 * 4;
        let work = |read, written, flops| Work { read, written, flops };
        assert_eq!(of(Operation::Decode), work(stored, 0, 3 * 40 * pair));
        // A query sees itself and the keys before it: 1 + .. + 40 keys.
        let flops = 3 * 820 * pair;
        assert_eq!(of(Operation::Prefill), work(stored + queries, queries, flops));
        assert_eq!(of(Operation::Gather), work(stored, 2 * stored, 0));
        assert_eq!(of(Operation::Copy), work(stored, stored, 0));
        assert_eq!(of(Operation::Plan), work(0, 0, 0));
        assert_eq!(of(Operation::Gather).bytes(), 3 * stored);
    }

    #[test]
    fn defaults_depend_on_the_device() {
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
        let given = Options { batch, context, rounds: Some(2), ..none };
        assert_eq!(shape(&given, RunsOn::Software), (3, 9, 2));
    }
}
