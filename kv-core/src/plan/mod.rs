//! Checked descriptions of work.
//!
//! A plan is made once per step, serves every layer of its group, and is proof: its fields are
//! private and its one constructor is fallible, so a backend indexes with what it finds and checks
//! nothing again. Plans borrow from [`PlanBuffers`] and [`BlockTables`](crate::block::BlockTables),
//! which live across steps; making one allocates nothing once those have grown to their size.
//!
//! A plan made by hand does not compile, so holding one is proof that it was checked:
//!
//! ```compile_fail,E0451
//! let forged = kv_core::plan::CopyPlan { layout: unreachable!(), copies: &[] };
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
pub use convert::{ConvertArgs, ConvertPlan};
pub use copy::{BlockCopy, CopyArgs, CopyPlan};
pub use gather::{GatherArgs, GatherPlan, GatherRange};
pub(crate) use growth::Growth;
pub use split::{Determinism, KvSplit};
pub use write::{WriteArgs, WritePlan};
