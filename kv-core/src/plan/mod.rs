//! Plans: checked descriptions of work.
//!
//! A plan is made once per step and serves every layer of its group. Its fields are private and its
//! one constructor is fallible, so a backend need not check it again. Plans borrow from
//! [`PlanBuffers`] and [`BlockTables`](crate::block::BlockTables), which are kept across steps:
//! once these have grown, making a plan does not allocate.
//!
//! A plan made by hand does not compile, so holding one is proof that it was checked:
//!
//! ```compile_fail,E0451
//! let forged = kv::backend::plan::CopyPlan { layout: unreachable!(), copies: &[] };
//! ```
mod attend;
mod batch;
mod convert;
mod copy;
mod gather;
mod growth;
mod split;
#[cfg(test)]
mod tests;
mod write;

pub(crate) use attend::AttendParts;
pub use attend::{AttendArgs, AttentionOptions, AttentionPlan, Mask};
pub(crate) use batch::SplitPolicy;
pub use batch::{BatchEntry, PlanBuffers, PlanId, PlannedSequence};
pub use convert::{ConvertArgs, ConvertEnds, ConvertPlan, StoredRows};
pub use copy::{BlockCopy, CopyArgs, CopyPlan};
pub use gather::{GatherArgs, GatherPlan, GatherRange};
pub(crate) use growth::Growth;
pub use split::{Determinism, KvSplit};
pub use write::{WriteArgs, WritePlan};
