//! Error types, narrowest first.
//!
//! Callers act differently on each kind: a [`SpecError`] or [`PlanError`] is a mistake in their
//! data, [`BlocksExhausted`] is normal operation for a scheduler, a [`DeviceError`] is the
//! driver's. The cache returns [`CacheError`], which holds one of the three.
mod device;
mod plan;
mod problem;

pub use device::{DeviceError, DeviceErrorKind};
pub use plan::{Expected, LayerProblem, PlanError};
pub use problem::{OptionProblem, SpecConflict, StateProblem};

use crate::calibration::CalibrationError;
use crate::ids::{GroupId, LayerId};

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
    /// Two settings that cannot go together.
    #[error("{what}: {problem}")]
    Conflict {
        /// The setting.
        what: &'static str,
        /// What is wrong with it.
        problem: SpecConflict,
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

/// Too few free blocks for a request; nothing was taken, and nothing was given back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "group {group} is out of blocks: {needed} needed, {free} free, {evictable} of them evictable"
)]
pub struct BlocksExhausted {
    /// The group whose pool is too small.
    pub group: GroupId,
    /// Blocks the whole request needs.
    pub needed: u32,
    /// Blocks the request could take: those that nobody holds, empty and idle ones, and those that
    /// leave a window as the step begins. Idle blocks that the request itself would hold are not
    /// among them.
    pub free: u32,
    /// Of these, idle blocks: they hold reusable content, which is given up when they are taken.
    pub evictable: u32,
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
    /// The constants do not fit the cache.
    #[error(transparent)]
    Calibration(#[from] CalibrationError),
    /// The cache is full.
    #[error(transparent)]
    Exhausted(#[from] BlocksExhausted),
    /// The device failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
}
