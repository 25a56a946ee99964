//! The decode schedule: work items for persistent thread blocks.
//!
//! All tiles of a batch are lined up: sequence by sequence, kv head by kv head, query tile by query
//! tile (16 query rows). Each query tile is preceded by some room, for what a work item costs
//! besides its tiles. Every slot (a thread block) owns an equal share of the line, as in
//! `FlashMLA`'s scheduler, and a query tile is split where a share ends; each split is a work item.
//! The splits of a query tile therefore follow from its position alone, and each one can be split
//! on its own.
//!
//! Keys outside a window have no tiles. If splits may not depend on the batch, they are after every
//! 16 tiles instead, and whole work items belong to the shares in which they begin.
//!
//! `kernels/plan.cu` computes this on the device, in the first decoding layer: also in graphs that
//! are replayed with other lengths, and without sending a list. `host` is its oracle in tests,
//! equal to the byte.
use crate::gpu::Launch;
use crate::params::{Address, DecodePlanParams, Plan};

/// Tokens of a split if splits may not depend on the batch.
pub(super) const INVARIANT_TOKENS: u64 = 1024;

/// What is decoded, and the number of thread blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Work {
    /// Thread blocks: two per multiprocessor. At least 1.
    pub(crate) slots: u32,
    pub(crate) kv_heads: u32,
    /// Query heads per kv head. At least 1.
    pub(crate) group: u32,
    /// Whether the mask is full instead of causal.
    pub(crate) full: bool,
    /// `u32::MAX` without a window.
    pub(crate) window_left: u32,
    /// Tokens at the start that a window always sees.
    pub(crate) sink_tokens: u32,
    /// Whether splits depend on positions alone.
    pub(crate) invariant: bool,
    /// Entries with more queries belong to another kernel.
    pub(crate) q_len_max: u32,
}

impl Work {
    /// Returns the launch of `plan_decode`: one thread block, and its shared memory.
    pub(crate) fn launch() -> Launch {
        Launch { kernel: "plan_decode", grid: [1; 3], threads: 512, shared_bytes: 30_912 }
    }

    /// Returns the parameters of `plan_decode` for the batch of `plan`: where to write work items
    /// and the starts of slots.
    pub(crate) fn params(&self, plan: Plan, [items, starts]: [Address; 2]) -> DecodePlanParams {
        DecodePlanParams {
            plan,
            items,
            starts,
            slots: self.slots,
            kv_heads: self.kv_heads,
            group: self.group,
            full: self.full.into(),
            window_left: self.window_left,
            sink_tokens: self.sink_tokens,
            invariant: self.invariant.into(),
            q_len_max: self.q_len_max,
        }
    }
}

#[cfg(test)]
mod host;
#[cfg(test)]
mod tests;
