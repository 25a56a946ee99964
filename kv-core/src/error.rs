//! Error types, narrowest first.
//!
//! Callers act differently on each kind: a [`SpecError`] or [`PlanError`] is a mistake in their data,
//! [`BlocksExhausted`] is normal operation for a scheduler, a [`DeviceError`] is the driver's. The
//! cache returns [`CacheError`], which holds one of the three.
use std::error::Error as StdError;
use std::fmt;

use crate::element::DType;
use crate::ids::{GroupId, LayerId, SequenceId};
use crate::tensor::Dims;

/// A name that is none of the known ones.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown {what} {name:?}, expected one of {expected}")]
pub struct UnknownName {
    what: &'static str,
    name: String,
    expected: &'static str,
}

impl UnknownName {
    /// Says what was looked for, what came and what would have done.
    pub fn new(what: &'static str, name: &str, expected: &'static str) -> Self {
        Self { what, name: name.to_owned(), expected }
    }
}

/// A cache geometry that cannot be built. Found by the spec builder, nowhere later.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SpecError {
    /// A required setting was never given.
    #[error("{field} is not set")]
    Missing {
        /// The setting.
        field: &'static str,
    },
    /// A count that must be at least one is zero.
    #[error("{field} is 0, at least 1 is needed")]
    Zero {
        /// The setting.
        field: &'static str,
    },
    /// A product of settings does not fit its integer type.
    #[error("{what} overflows: the geometry is too large")]
    Overflow {
        /// The product.
        what: &'static str,
    },
    /// A setting is above its limit.
    #[error("{field} is {got}, at most {max} is possible")]
    TooLarge {
        /// The setting.
        field: &'static str,
        /// The value given.
        got: u64,
        /// The largest possible value.
        max: u64,
    },
    /// One setting does not divide another.
    #[error("{field} {got} is not a multiple of {of} {divisor}")]
    NotDivisible {
        /// The setting that must be a multiple.
        field: &'static str,
        /// Its value.
        got: u32,
        /// The setting that must divide it.
        of: &'static str,
        /// Its value.
        divisor: u32,
    },
    /// A layer belongs to two groups, or to none.
    #[error("layer {layer} is in {groups} groups, exactly 1 is needed")]
    LayerGroups {
        /// The layer.
        layer: LayerId,
        /// How many groups list it.
        groups: usize,
    },
    /// A group lists a layer the model does not have.
    #[error("layer {layer} is listed in a group, the model has {num_layers} layers")]
    LayerOutOfRange {
        /// The layer listed.
        layer: LayerId,
        /// Layers of the model.
        num_layers: u16,
    },
}

/// A request the cache cannot honour as it stands.
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
    /// An input that must bring tokens or queries brings none.
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
        /// What is counted.
        what: &'static str,
        /// The count given.
        got: u64,
        /// The limit.
        max: u64,
    },
    /// A sequence is shorter than the length asked for.
    #[error("sequence {sequence} has {len} tokens, {asked} were asked for")]
    SequenceTooShort {
        /// The sequence.
        sequence: SequenceId,
        /// Tokens it has.
        len: u32,
        /// Tokens asked for.
        asked: u32,
    },
    /// The cache has no such layer.
    #[error("layer {layer} is unknown, the cache has {num_layers} layers")]
    UnknownLayer {
        /// The layer given.
        layer: LayerId,
        /// Layers of the cache.
        num_layers: u16,
    },
    /// A layer whose memory was not allocated yet is used.
    #[error("layer {layer} has no memory yet: allocate it first")]
    LayerUnallocated {
        /// The layer given.
        layer: LayerId,
    },
    /// A commit, or an advance, before every layer was written.
    #[error("layer {layer} and {others} more were not written in this step")]
    LayersUnwritten {
        /// The first unwritten layer.
        layer: LayerId,
        /// How many more there are.
        others: usize,
    },
    /// Attention over a layer whose new rows were not written yet.
    #[error("layer {layer}: attend before write in this step")]
    AttendBeforeWrite {
        /// The layer.
        layer: LayerId,
    },
    /// A tensor has the wrong number of axes or a wrong extent.
    #[error("{tensor} has shape {got}, expected {expected}")]
    Shape {
        /// Which tensor.
        tensor: &'static str,
        /// What was needed, in words and numbers.
        expected: Expected,
        /// The shape given.
        got: Dims,
    },
    /// A tensor has an element type that is not possible here.
    #[error("{tensor} is {got}, expected {expected}")]
    ElementType {
        /// Which tensor.
        tensor: &'static str,
        /// What was needed.
        expected: &'static str,
        /// The type given.
        got: DType,
    },
    /// The query heads are no multiple of the kv heads.
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
        /// Which tensor.
        tensor: &'static str,
        /// Bytes its shape and strides reach.
        needed: u64,
        /// Bytes given.
        got: u64,
    },
    /// Rows of an output tensor overlap in memory.
    #[error("{tensor}: strides {strides:?} make rows overlap")]
    Overlap {
        /// Which tensor.
        tensor: &'static str,
        /// Outer strides, in elements.
        strides: [u64; 2],
    },
    /// A tensor does not start at a multiple of its element size.
    #[error("{tensor} starts at an address or offset that is no multiple of {align} bytes")]
    Misaligned {
        /// Which tensor.
        tensor: &'static str,
        /// The alignment needed, in bytes.
        align: usize,
    },
    /// An attention option is out of its domain.
    #[error("option {option}: {problem}")]
    Option {
        /// The option.
        option: &'static str,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// A block table or a copy names a block the group does not have.
    #[error("block {block} is out of range, the group has {num_blocks} blocks")]
    BlockOutOfRange {
        /// The block named.
        block: u32,
        /// Blocks of the group.
        num_blocks: u32,
    },
    /// A sequence is longer than the blocks its table names.
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
    /// Two entries of one batch write the same block.
    #[error("block {block} is written or copied to more than once")]
    BlockShared {
        /// The block.
        block: u32,
    },
    /// Two lists that must run in parallel have different lengths.
    #[error("{what}: expected {expected} entries, got {got}")]
    LengthMismatch {
        /// Which list.
        what: &'static str,
        /// The length required.
        expected: usize,
        /// The length given.
        got: usize,
    },
    /// The call is not possible in the present state of the life cycle.
    #[error("{operation}: {problem}")]
    State {
        /// The call.
        operation: &'static str,
        /// Why it is not possible now.
        problem: &'static str,
    },
    /// A layer of a front end, which numbers layers as the caller likes.
    #[error("layer number {number} {problem}")]
    LayerNumber {
        /// The caller's number.
        number: usize,
        /// What is wrong with it.
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
    /// A name from outside is none of the known ones.
    #[error(transparent)]
    Name(#[from] UnknownName),
}

/// What is wrong with a layer of a front end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LayerProblem {
    /// It is used before it has memory.
    #[error("has no memory yet: allocate it first")]
    Unallocated,
    /// A step ends before every layer was written.
    #[error("and {others} more were not written in this step")]
    Unwritten {
        /// How many more there are.
        others: usize,
    },
    /// Rows are read before the step's own were written.
    #[error("is read before it is written in this step")]
    ReadBeforeWrite,
}

/// The shape a tensor should have had.
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

/// Not enough free blocks for what was asked; nothing was taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("group {group} is out of blocks: {needed} needed, {free} free, {evictable} evictable")]
pub struct BlocksExhausted {
    /// The group whose pool is too small.
    pub group: GroupId,
    /// Blocks the whole request needs.
    pub needed: u32,
    /// Blocks free now.
    pub free: u32,
    /// Blocks that hold reusable content nobody uses, included in what could be taken.
    pub evictable: u32,
}

/// What went wrong on a device, as far as a caller can act on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DeviceErrorKind {
    /// Device memory is exhausted.
    OutOfMemory,
    /// The device is gone; every handle of this backend is dead.
    Lost,
    /// This device, or this build, cannot do it.
    Unsupported,
    /// A handle made by another backend or device was passed in.
    ForeignHandle,
    /// A range reaches past the end of a buffer.
    OutOfRange,
    /// The driver reported something else.
    Driver,
}

/// A device failure with the operation that met it.
#[derive(Debug, thiserror::Error)]
#[error("{operation}: {kind:?}{}", detail.as_deref().map(|d| format!(" ({d})")).unwrap_or_default())]
pub struct DeviceError {
    kind: DeviceErrorKind,
    operation: &'static str,
    detail: Option<String>,
    #[source]
    source: Option<Box<dyn StdError + Send + Sync>>,
}

impl DeviceError {
    /// Makes an error without an underlying cause.
    pub fn new(kind: DeviceErrorKind, operation: &'static str) -> Self {
        Self { kind, operation, detail: None, source: None }
    }

    /// Adds what was asked or found, for people.
    #[must_use]
    pub fn with_detail(mut self, detail: impl Into<String>) -> Self {
        self.detail = Some(detail.into());
        self
    }

    /// Attaches the driver's own error.
    #[must_use]
    pub fn with_source(mut self, source: impl StdError + Send + Sync + 'static) -> Self {
        self.source = Some(Box::new(source));
        self
    }

    /// The category to match on.
    pub fn kind(&self) -> DeviceErrorKind {
        self.kind
    }

    /// The operation that failed.
    pub fn operation(&self) -> &'static str {
        self.operation
    }
}

/// Anything a cache operation can answer with.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CacheError {
    /// The geometry is impossible.
    #[error(transparent)]
    Spec(#[from] SpecError),
    /// The caller's data do not fit the cache.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The cache is full.
    #[error(transparent)]
    Exhausted(#[from] BlocksExhausted),
    /// The device failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
}
