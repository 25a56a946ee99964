//! How the work of decoding is cut into pieces for thread blocks that stay.
//!
//! All tiles of a batch are laid in a row: sequence by sequence, kv head by kv head, 16 query rows
//! after 16 query rows, with some room before each of these *items* for what a piece costs besides
//! its tiles. Every slot, a thread block, owns an equal share of that row (as `FlashMLA`'s
//! scheduler does), and an item is cut where a share ends. So where an item is cut follows from
//! where it begins, and each can be cut on its own.
//!
//! What a window leaves out has no tiles. A cut that may not depend on the batch falls after every
//! 16 tiles instead, and whole pieces are dealt to the shares in which they begin.
//!
//! `kernels/plan.cu` does it on the device, when the first layer that decodes so attends: also in
//! graphs that are replayed with other lengths, and without a list of pieces to be sent. `host` is
//! its oracle in tests, equal to the byte.
use crate::gpu::Launch;
use crate::params::{Address, DecodePlanParams, Plan};

/// Tokens of a piece when the cut may not depend on the batch.
pub(super) const INVARIANT_TOKENS: u64 = 1024;

/// What is decoded, and by how many thread blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Work {
    /// Thread blocks: two for every multiprocessor. At least 1.
    pub(crate) slots: u32,
    pub(crate) kv_heads: u32,
    /// Query heads of a kv head. At least 1.
    pub(crate) group: u32,
    /// Every key is seen, not only those before.
    pub(crate) full: bool,
    /// `u32::MAX` without a window.
    pub(crate) window_left: u32,
    /// Seen besides a window.
    pub(crate) sink_tokens: u32,
    /// The cut depends on positions alone.
    pub(crate) invariant: bool,
    /// Entries with more queries are another kernel's.
    pub(crate) q_len_max: u32,
}

impl Work {
    /// How `plan_decode` is started: one thread block, and what its threads share.
    pub(crate) fn launch() -> Launch {
        Launch { kernel: "plan_decode", grid: [1; 3], threads: 512, shared_bytes: 30_912 }
    }

    /// What `plan_decode` takes to cut the batch of `plan` into pieces, with the starts of slots.
    pub(crate) fn params(&self, plan: Plan, [pieces, starts]: [Address; 2]) -> DecodePlanParams {
        DecodePlanParams {
            plan,
            pieces,
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
