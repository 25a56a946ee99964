//! Requests that the cache cannot fulfil in its present state.
use std::fmt;

use kv_format::{DType, KvFormat};

use crate::dims::Dims;
use crate::error::{OptionProblem, StateProblem, UnknownName};
use crate::ids::{LayerId, SequenceId};

/// A request that the cache cannot fulfil in its present state.
///
/// Always found before anything changes and before any backend is called.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// No sequence of this id was started.
    #[error("sequence {sequence} is unknown")]
    UnknownSequence {
        /// The id given.
        sequence: SequenceId,
    },
    /// The id is already in use.
    #[error("sequence {sequence} exists already")]
    SequenceExists {
        /// The id given.
        sequence: SequenceId,
    },
    /// One step names a sequence twice.
    #[error("sequence {sequence} appears twice in one step")]
    DuplicateSequence {
        /// The id given.
        sequence: SequenceId,
    },
    /// An input without tokens or queries that needs some.
    #[error("sequence {sequence}: 0 tokens given, at least 1 is needed")]
    ZeroTokens {
        /// The sequence.
        sequence: SequenceId,
    },
    /// A sequence would outgrow its limit.
    #[error("sequence {sequence}: {len} cached + {new} new tokens exceed the maximum of {max}")]
    SequenceTooLong {
        /// The sequence.
        sequence: SequenceId,
        /// Tokens cached before.
        len: u32,
        /// Tokens to add.
        new: u64,
        /// The limit.
        max: u32,
    },
    /// A count is above the cache's limit.
    #[error("{what}: {got} given, at most {max} are possible")]
    TooMany {
        /// The counted things.
        what: &'static str,
        /// The count given.
        got: u64,
        /// The limit.
        max: u64,
    },
    /// A sequence is shorter than the requested length.
    #[error("sequence {sequence} has {len} tokens, {asked} were requested")]
    SequenceTooShort {
        /// The sequence.
        sequence: SequenceId,
        /// Tokens it has.
        len: u32,
        /// Tokens requested.
        asked: u32,
    },
    /// A request needs tokens that have left a sliding window.
    #[error(
        "sequence {sequence}: tokens before {kept} left its window, position {asked} sees them"
    )]
    OutOfWindow {
        /// The sequence.
        sequence: SequenceId,
        /// Position of the first query, or the first requested token.
        asked: u32,
        /// The first token of the window that is still cached.
        kept: u32,
    },
    /// The cache has no such layer.
    #[error("layer {layer} is unknown, the cache has {num_layers} layers")]
    UnknownLayer {
        /// The layer given.
        layer: LayerId,
        /// Layers of the cache.
        num_layers: u16,
    },
    /// Rows of a layer that has a recurrent state alone.
    #[error("layer {layer} keeps no keys and values, only a state")]
    NoRows {
        /// The layer given.
        layer: LayerId,
    },
    /// The state of a layer that has none.
    #[error("layer {layer} has no state")]
    NoState {
        /// The layer given.
        layer: LayerId,
    },
    /// A part of a state that a layer does not have.
    #[error("layer {layer} has no part {part}, its state has {parts}")]
    UnknownPart {
        /// The layer.
        layer: LayerId,
        /// The part given.
        part: usize,
        /// Parts of the layer's state.
        parts: usize,
    },
    /// A commit before every state that it keeps was written.
    #[error(
        "part {part} of the state of layer {layer} behind {tokens} new tokens of sequence \
         {sequence} was not written in this step"
    )]
    StateUnwritten {
        /// The layer.
        layer: LayerId,
        /// The part of its state.
        part: usize,
        /// The sequence.
        sequence: SequenceId,
        /// New tokens of the sequence that the commit keeps.
        tokens: u32,
    },
    /// A sequence cannot have a length at which its recurrent state is unknown.
    #[error(
        "sequence {sequence}: no state behind {asked} tokens, the nearest ones are behind \
         {shorter} and {longer}"
    )]
    StateMissing {
        /// The sequence.
        sequence: SequenceId,
        /// Tokens requested.
        asked: u32,
        /// The longest shorter length with a state; 0 needs none.
        shorter: u32,
        /// The shortest longer length with a state.
        longer: u32,
    },
    /// A layer whose memory was not allocated yet is used.
    #[error("layer {layer} has no memory yet: allocate it first")]
    LayerUnallocated {
        /// The layer given.
        layer: LayerId,
    },
    /// A commit, or an advance, before every layer was written.
    #[error("layer {layer} {} not written in this step", with_others(*others))]
    LayersUnwritten {
        /// The first unwritten layer.
        layer: LayerId,
        /// Number of other unwritten layers.
        others: usize,
    },
    /// Attention over a layer whose new rows were not written yet.
    #[error("layer {layer}: attend before write in this step")]
    AttendBeforeWrite {
        /// The layer.
        layer: LayerId,
    },
    /// A layer was allocated after a sequence had tokens, and the missing rows are requested.
    #[error(
        "layer {layer} lacks the first {tokens} tokens of sequence {sequence}: they were cached \
         before the layer had memory"
    )]
    RowsUnwritten {
        /// The layer.
        layer: LayerId,
        /// The sequence.
        sequence: SequenceId,
        /// Leading tokens without rows in the layer.
        tokens: u32,
    },
    /// A tensor has the wrong number of axes or a wrong extent.
    #[error("{tensor} has shape {got}, expected {expected}")]
    Shape {
        /// The tensor.
        tensor: &'static str,
        /// The required shape, in words and numbers.
        expected: Expected,
        /// The shape given.
        got: Dims,
    },
    /// A tensor has an element type that is not allowed here.
    #[error("{tensor} is {got}, expected {expected}")]
    ElementType {
        /// The tensor.
        tensor: &'static str,
        /// The required type.
        expected: &'static str,
        /// The type given.
        got: DType,
    },
    /// Rows that [`ConvertPlan::encodes`](crate::plan::ConvertPlan::encodes) does not list.
    #[error("rows in {dtype} are not converted to and from stored rows in {format}")]
    Conversion {
        /// The element type of the tensor.
        dtype: DType,
        /// The stored format.
        format: KvFormat,
    },
    /// The query heads are not a multiple of the kv heads.
    #[error("{q_heads} query heads are not a multiple of {kv_heads} kv heads")]
    HeadsNotDivisible {
        /// Query heads given.
        q_heads: u32,
        /// Heads of the cache.
        kv_heads: u32,
    },
    /// A tensor's bytes are fewer than its shape and strides reach.
    #[error("{tensor} needs {needed} bytes, got {got}")]
    TensorBytes {
        /// The tensor.
        tensor: &'static str,
        /// Bytes its shape and strides reach.
        needed: u64,
        /// Bytes given.
        got: u64,
    },
    /// Rows of an output tensor overlap in memory.
    #[error("{tensor}: strides {strides:?} make rows overlap")]
    Overlap {
        /// The tensor.
        tensor: &'static str,
        /// Outer strides, in elements.
        strides: [u64; 2],
    },
    /// A tensor whose entries are not one after another, each with its values together.
    #[error("{tensor}: strides {strides:?} leave gaps, the tensor must be dense")]
    NotDense {
        /// The tensor.
        tensor: &'static str,
        /// Outer strides, in elements.
        strides: [u64; 2],
    },
    /// A tensor does not start at a multiple of its element size.
    #[error("{tensor} starts at an address or offset that is not a multiple of {align} bytes")]
    Misaligned {
        /// The tensor.
        tensor: &'static str,
        /// The alignment needed, in bytes.
        align: usize,
    },
    /// An attention option is out of its domain.
    #[error("option {option}: {problem}")]
    Option {
        /// The option.
        option: &'static str,
        /// The reason.
        problem: OptionProblem,
    },
    /// A block table or a copy names a block the group does not have.
    #[error("block {block} is out of range, the group has {num_blocks} blocks")]
    BlockOutOfRange {
        /// The block named.
        block: u32,
        /// Blocks of the group.
        num_blocks: u32,
    },
    /// A sequence is longer than the blocks of its table.
    #[error("batch row {index}: {tokens} tokens do not fit {blocks} blocks of {block_size}")]
    TableTooShort {
        /// Index of the sequence in the batch.
        index: usize,
        /// Tokens in the sequence.
        tokens: u32,
        /// Blocks in its table.
        blocks: usize,
        /// Tokens a block holds.
        block_size: u32,
    },
    /// A plane belongs to another pool than the one the plan was checked against.
    #[error("plane of {got:?} (blocks, tokens a block) with a plan for {expected:?}")]
    LayoutMismatch {
        /// Blocks and block size of the plan.
        expected: (u32, u32),
        /// Blocks and block size of the plane.
        got: (u32, u32),
    },
    /// A plane with transformed rows or given scales, without its constants.
    #[error("a plane lacks the constants that its layout needs")]
    ConstantsMissing,
    /// Two entries of one batch write the same block.
    #[error("block {block} is written or copied to more than once")]
    BlockShared {
        /// The block.
        block: u32,
    },
    /// Two lists that must run in parallel have different lengths.
    #[error("{what}: expected {expected} entries, got {got}")]
    LengthMismatch {
        /// The list.
        what: &'static str,
        /// The length required.
        expected: usize,
        /// The length given.
        got: usize,
    },
    /// The call is not possible in the present state.
    #[error("{operation}: {problem}")]
    State {
        /// The call.
        operation: &'static str,
        /// The reason.
        problem: StateProblem,
    },
    /// A layer of `kv-compat`, with the caller's own number.
    #[error("layer number {number} {problem}")]
    LayerNumber {
        /// The caller's number.
        number: usize,
        /// The reason.
        problem: LayerProblem,
    },
    /// Every slot of a slot cache is taken.
    #[error("no free slot: {used} of {total} are in use")]
    NoFreeSlot {
        /// Slots in use.
        used: u32,
        /// Slots of the cache.
        total: u32,
    },
    /// An unknown name.
    #[error(transparent)]
    Name(#[from] UnknownName),
}

/// Returns the verb for one layer and `others` more, with their number.
fn with_others(others: usize) -> String {
    match others {
        0 => "was".to_owned(),
        1 => "and 1 more layer were".to_owned(),
        more => format!("and {more} more layers were"),
    }
}

/// A problem with a layer that has the caller's own number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LayerProblem {
    /// It is used before it has memory.
    #[error("has no memory yet: allocate it first")]
    Unallocated,
    /// A step ends before every layer was written.
    #[error("{} not written in this step", with_others(*others))]
    Unwritten {
        /// Number of other unwritten layers.
        others: usize,
    },
    /// Rows are read before the step has written its own.
    #[error("is read before it is written in this step")]
    ReadBeforeWrite,
}

/// The required shape of a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Expected {
    /// The axes by name, such as `[b >= 2, s >= 5, h, d]`.
    pub axes: &'static str,
    /// The numbers for those axes, in order.
    pub dims: Dims,
}

impl fmt::Display for Expected {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} = {}", self.axes, self.dims)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_that_were_not_written_are_counted_in_words() {
        let layer = LayerId(3);
        for (others, text, numbered) in [
            (0, "layer 3 was not written in this step", "layer number 40 was not written"),
            (1, "layer 3 and 1 more layer were not", "layer number 40 and 1 more layer were not"),
            (5, "layer 3 and 5 more layers were not", "layer number 40 and 5 more layers were"),
        ] {
            let error = PlanError::LayersUnwritten { layer, others }.to_string();
            assert!(error.starts_with(text), "{error}");
            let problem = LayerProblem::Unwritten { others };
            let error = PlanError::LayerNumber { number: 40, problem }.to_string();
            assert!(error.starts_with(numbered), "{error}");
        }
    }
}
