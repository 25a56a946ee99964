//! The decode schedule: work items for persistent thread blocks.
//!
//! All tiles of a batch are lined up: sequence by sequence, kv head by kv head, query tile by query
//! tile (16 query rows). Each query tile is preceded by some room, for the costs of a work item
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
//! equal to the byte. The schedule of prefill is of the same kind: `kernels/prefill_plan.h`.
use kv_core::error::DeviceError;

use crate::gpu::{Launch, Stream};
use crate::params::{Address, DecodePlanParams, Plan, PrefillPlanParams};

/// Tokens of a split if splits may not depend on the batch.
pub(super) const INVARIANT_TOKENS: u64 = 1024;
/// The same for prefill.
pub(super) const INVARIANT_TOKENS_PREFILL: u64 = 4096;
/// Work items of a sequence up to which prefill splits it then.
pub(super) const INVARIANT_BLOCKS_PREFILL: u64 = 128;
/// Maximum tokens of a context that prefill never splits.
pub(super) const SHORT_PREFILL: u64 = 512;

/// The kernels that a schedule is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Entries with up to `q_len_max` queries.
    Decode,
    /// Entries with more, in query tiles of `rows` rows.
    Prefill { rows: u32 },
}

/// The attended keys, and the number of thread blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Work {
    pub(crate) kind: Kind,
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
    /// Maximum queries of an entry that is decoded.
    pub(crate) q_len_max: u32,
}

impl Work {
    /// Computes the schedule for the batch of `plan`: writes work items and the starts of slots,
    /// for prefill the number of work items.
    ///
    /// # Safety
    /// The plan is in device memory, and both addresses have the room of any batch of its extent.
    pub(crate) unsafe fn plan(
        &self,
        stream: &mut dyn Stream,
        plan: Plan,
        to: [Address; 2],
    ) -> Result<(), DeviceError> {
        let batch = self.params(plan, to);
        let launch = self.launch();
        match self.kind {
            // SAFETY: a condition of this function.
            Kind::Decode => unsafe { stream.launch(&launch, bytemuck::bytes_of(&batch)) },
            Kind::Prefill { rows } => {
                let params = PrefillPlanParams { batch, rows, pad: 0 };
                // SAFETY: as above.
                unsafe { stream.launch(&launch, bytemuck::bytes_of(&params)) }
            }
        }
    }

    /// Returns the launch of `plan_decode` or `plan_prefill`: one thread block, and its shared
    /// memory.
    fn launch(&self) -> Launch {
        let (kernel, shared_bytes) = match self.kind {
            Kind::Decode => ("plan_decode", 30_912),
            Kind::Prefill { .. } => ("plan_prefill", 10_560),
        };
        Launch { kernel, grid: [1; 3], threads: 512, shared_bytes }
    }

    fn params(&self, plan: Plan, [items, starts]: [Address; 2]) -> DecodePlanParams {
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
#[cfg(feature = "emulated")]
mod prefill;
#[cfg(test)]
mod tests;
