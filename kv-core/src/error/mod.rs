//! Errors of every kind: a function returns the narrowest.
//!
//! Callers act differently on each kind: a [`SpecError`] or [`PlanError`] is a mistake in their
//! data, [`BlocksExhausted`] is normal operation for a scheduler, and a [`DeviceError`] comes from
//! the driver. The cache returns [`CacheError`], which holds one of them.
mod calibration;
mod device;
mod plan;
mod problem;

pub use calibration::CalibrationError;
pub use device::{DeviceError, DeviceErrorKind, MemoryShortage};
pub use kv_format::UnknownName;
pub use plan::{Expected, LayerProblem, PlanError};
pub use problem::{OptionProblem, SpecConflict, StateProblem};

use crate::ids::{GroupId, LayerId};

/// A cache geometry that cannot be built, found by the spec builder.
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
        /// The conflict.
        problem: SpecConflict,
    },
    /// A layer belongs to two groups, or to none.
    #[error("layer {layer} is in {groups} groups, exactly 1 is needed")]
    LayerGroups {
        /// The layer.
        layer: LayerId,
        /// Number of groups that list it.
        groups: usize,
    },
    /// A layer is in two lists of states.
    #[error("layer {layer} has a state already")]
    LayerStates {
        /// The layer.
        layer: LayerId,
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

/// Too few free blocks for a request; nothing was allocated or released.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "group {group} is out of blocks: {needed} needed, {free} free, {evictable} of them evictable"
)]
pub struct BlocksExhausted {
    /// The group with too few blocks.
    pub group: GroupId,
    /// Blocks the whole request needs.
    pub needed: u32,
    /// Blocks that the request could take: empty and idle blocks, and those that leave a window
    /// when the step begins. Idle blocks that the request itself would hold are not included.
    pub free: u32,
    /// Idle blocks among them: their reusable content is evicted when they are taken.
    pub evictable: u32,
}

/// Any error of a cache operation.
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
