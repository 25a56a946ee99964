//! Reasons for which a setting, an option or a call is refused, with the values that were given and
//! expected.
use std::fmt;

use kv_format::{DType, KvFormat};

use crate::ids::{LayerId, SequenceId};

/// The reason for which two settings of a cache conflict.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SpecConflict {
    /// A tail needs blocks that fill up.
    #[error("a block of a contiguous cache is a whole sequence")]
    Contiguous,
    /// A tail takes the whole pool.
    #[error("a tail takes {tail} blocks, the pool has {num_blocks}")]
    TailBlocks {
        /// Blocks of the largest tail.
        tail: u32,
        /// Blocks of the pool.
        num_blocks: u32,
    },
    /// A block is smaller than one row in 16 bits.
    #[error(
        "a row in 16 bits takes {slots} slots, a block has {block_size}: use larger blocks, or \
         keep no rows in 16 bits"
    )]
    BlockTooSmall {
        /// Slots of a row in 16 bits.
        slots: u32,
        /// Slots of a block.
        block_size: u32,
    },
    /// A row in 16 bits is given fewer slots than its bytes need.
    #[error("a row in 16 bits needs {needed} slots, {got} are given")]
    TooFewSlots {
        /// Slots that the bytes of a row need.
        needed: u32,
        /// Slots given.
        got: u32,
    },
    /// Fewer slots of states than one sequence needs.
    #[error(
        "one sequence needs {needed}: its state, the next one, and one for each draft; {got} given"
    )]
    StateSlots {
        /// Slots of a sequence in a step.
        needed: u64,
        /// Slots given.
        got: u32,
    },
    /// A state of numbers that are no floats.
    #[error("is of {got}, must be f32, f16 or bf16")]
    StateType {
        /// The type given.
        got: DType,
    },
    /// States of layers whose number is not fixed.
    #[error("the number of layers must be fixed")]
    StatesOnDemand,
    /// Means of blocks without a tail.
    #[error("the mean of a block is known when it is full: needs the tail")]
    NeedsTail,
    /// Late layers read as zeros in a format whose zero bytes are no zero row.
    #[error("zeros need rows of f32, f16 or bf16, not of {format}")]
    ZeroRows {
        /// The first such format of the group.
        format: KvFormat,
    },
}

/// The reason for which the value of an option is refused.
#[derive(Debug, Clone, Copy, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum OptionProblem {
    /// A NaN or an infinity.
    #[error("is {got}, must be finite")]
    NotFinite {
        /// The value given.
        got: f32,
    },
    /// A value that must be finite and above 0.
    #[error("is {got}, must be finite and above 0")]
    NotPositive {
        /// The value given.
        got: f32,
    },
    /// The logit of a head that is a NaN or positive infinity; negative infinity is none.
    #[error("hold {got} for head {head}, must be finite or negative infinity")]
    Logit {
        /// The query head.
        head: usize,
        /// The value given.
        got: f32,
    },
    /// A count that must be at least one.
    #[error("is 0, at least 1 is needed")]
    Zero,
    /// A stop of a prompt that does not follow the one before.
    #[error("{got} follows {before}, must be ascending and above 0")]
    StopOrder {
        /// The stop before; 0 for the first.
        before: u32,
        /// The stop given.
        got: u32,
    },
    /// A stop past the end of the prompt.
    #[error("{got} is past the prompt of {max} tokens")]
    StopPastPrompt {
        /// The stop given.
        got: u32,
        /// Tokens of the prompt.
        max: u32,
    },
    /// A stop between placeholder tokens of one content.
    #[error("{got} is inside the content of {len} tokens from {begin} on")]
    StopInContent {
        /// The stop given.
        got: u32,
        /// First token of the content.
        begin: u32,
        /// Tokens of the content.
        len: u32,
    },
    /// More than the group of the layer keeps.
    #[error("is {}, the group of the layer keeps {kept}", OrNone(*got))]
    NotKept {
        /// Requested tokens; `None` for all of them.
        got: Option<u32>,
        /// Tokens that the group keeps.
        kept: u32,
    },
    /// Prefix sums whose first is not 0.
    #[error("must start with 0, but {}", StartsWith(*first))]
    NotFromZero {
        /// The first sum; `None` for an empty list.
        first: Option<u32>,
    },
    /// Prefix sums that fall.
    #[error("must never fall, but entry {index} is {got} after {before}")]
    Falls {
        /// Index of the sum that is less than the one before.
        index: usize,
        /// The sum before.
        before: u32,
        /// The sum given.
        got: u32,
    },
}

/// The reason for which a call is not possible in the present state.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StateProblem {
    /// The call needs an open step.
    #[error("no step is open")]
    NoStep,
    /// The call needs that no step is open.
    #[error("a step is open")]
    StepOpen,
    /// The batch of a step cannot grow any more.
    #[error("layer {layer} is written already")]
    LayerWritten {
        /// The first layer that is written.
        layer: LayerId,
    },
    /// Constants of layers that may have no memory cannot be exchanged.
    #[error("layers come on demand: give the calibration when the cache is made")]
    LayersOnDemand,
    /// Codes of a sequence that was truncated among them cannot be encoded again.
    #[error("sequence {sequence} was cut inside codes")]
    CutInCodes {
        /// The first such sequence.
        sequence: SequenceId,
    },
    /// The rows of a tail are read after the step.
    #[error("the tail of a sequence is read after the step")]
    TailInStep,
    /// The call needs a prepared step.
    #[error("pre_step comes first")]
    NotPrepared,
    /// Everything was evicted since, or the constants or layers of the cache changed; or the call
    /// names something of another cache.
    #[error("what was cached then is invalid now, or of another cache")]
    Outdated,
    /// A hold or an import that has ended, or is of another cache.
    #[error("it has ended, or is of another cache")]
    Ended,
    /// Blocks are held while their bytes are read.
    #[error("{blocks} blocks are held while their bytes are read")]
    BlocksHeld {
        /// Number of [holds](crate::reuse::BlockHold).
        blocks: u32,
    },
    /// A cache manager of the caller's own tracks other sequences, or other lengths.
    #[error("the cache manager tracks other rows than the step names")]
    OtherRows,
    /// A cache manager of the caller's own knows the layer but has no plane of it.
    #[error("the cache manager has no plane for the layer")]
    NoPlane,
}

struct OrNone(Option<u32>);

impl fmt::Display for OrNone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(got) => got.fmt(f),
            None => f.write_str("none"),
        }
    }
}

struct StartsWith(Option<u32>);

impl fmt::Display for StartsWith {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(first) => write!(f, "starts with {first}"),
            None => f.write_str("is empty"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::{PlanError, SpecError};

    #[test]
    fn conflicts_name_the_setting_and_both_numbers() {
        let text = |what, problem| SpecError::Conflict { what, problem }.to_string();
        let tail = SpecConflict::TailBlocks { tail: 3, num_blocks: 2 };
        assert_eq!(text("tail", tail), "tail: a tail takes 3 blocks, the pool has 2");
        let small = SpecConflict::BlockTooSmall { slots: 4, block_size: 2 };
        assert_eq!(
            text("full_precision_prefix", small),
            "full_precision_prefix: a row in 16 bits takes 4 slots, a block has 2: use larger \
             blocks, or keep no rows in 16 bits"
        );
        let few = SpecConflict::TooFewSlots { needed: 4, got: 1 };
        assert_eq!(
            text("full_precision_prefix", few),
            "full_precision_prefix: a row in 16 bits needs 4 slots, 1 are given"
        );
    }

    #[test]
    fn options_show_the_value_and_its_bounds() {
        let text = |option, problem| PlanError::Option { option, problem }.to_string();
        for (problem, expected) in [
            (OptionProblem::NotFinite { got: f32::NAN }, "option x: is NaN, must be finite"),
            (
                OptionProblem::NotPositive { got: -1.5 },
                "option x: is -1.5, must be finite and above 0",
            ),
            (
                OptionProblem::Logit { head: 3, got: f32::INFINITY },
                "option x: hold inf for head 3, must be finite or negative infinity",
            ),
            (OptionProblem::Zero, "option x: is 0, at least 1 is needed"),
            (
                OptionProblem::NotKept { got: Some(9), kept: 7 },
                "option x: is 9, the group of the layer keeps 7",
            ),
            (
                OptionProblem::NotKept { got: None, kept: 7 },
                "option x: is none, the group of the layer keeps 7",
            ),
            (
                OptionProblem::NotFromZero { first: Some(2) },
                "option x: must start with 0, but starts with 2",
            ),
            (
                OptionProblem::NotFromZero { first: None },
                "option x: must start with 0, but is empty",
            ),
            (
                OptionProblem::Falls { index: 2, before: 5, got: 4 },
                "option x: must never fall, but entry 2 is 4 after 5",
            ),
        ] {
            assert_eq!(text("x", problem), expected);
        }
    }

    #[test]
    fn calls_say_what_is_in_their_way() {
        let text = |operation, problem| PlanError::State { operation, problem }.to_string();
        assert_eq!(text("add", StateProblem::NoStep), "add: no step is open");
        assert_eq!(text("begin step", StateProblem::StepOpen), "begin step: a step is open");
        let written = StateProblem::LayerWritten { layer: LayerId(2) };
        assert_eq!(text("add", written), "add: layer 2 is written already");
        let held = StateProblem::BlocksHeld { blocks: 2 };
        let expected = "recalibrate: 2 blocks are held while their bytes are read";
        assert_eq!(text("recalibrate", held), expected);
        let cut = StateProblem::CutInCodes { sequence: SequenceId(7) };
        assert_eq!(text("recalibrate", cut), "recalibrate: sequence 7 was cut inside codes");
    }
}
