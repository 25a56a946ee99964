//! Rows of an output that no entry owns.
use kv_core::DeviceError;

use super::warps4;
use crate::gpu::Launch;
use crate::params::{Address, PadParams, Tensor};
use crate::queue::CudaQueue;

/// The rows that belong to the entries of a batch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Owned {
    /// `Entry` of each, in device memory.
    pub(crate) entries: Address,
    /// How many.
    pub(crate) count: u32,
    /// The counts of the step, where a captured launch may meet others; 0 without.
    pub(crate) counts: Address,
}

/// Sets every row of `out` behind those of the entries to `value`; `total`: rows that are owned.
pub(crate) fn pad_rows(
    queue: &mut CudaQueue,
    (out, owned): (Tensor, Owned),
    total: u32,
    value: f32,
) -> Result<(), DeviceError> {
    let rows = u64::from(out.batch).saturating_mul(out.tokens.into());
    // No entry has more rows than there is room for, so as many as there are means that none is
    // free. A replay may meet a batch that leaves some.
    if u64::from(total) >= rows && !queue.is_capturing() {
        return Ok(());
    }
    let params = PadParams {
        out,
        entries: owned.entries,
        num_entries: owned.count,
        total,
        value,
        pad: 0,
        counts: owned.counts,
    };
    let launch = launch(&params);
    // SAFETY: the caller has compared the reach of `out` with its buffer, and the entries lie where
    // the queue keeps them.
    unsafe { queue.launch(&launch, &params) }
}

/// How it is cut; the numbers are explained in `pad.cu`.
fn launch(params: &PadParams) -> Launch {
    let units = u64::from(params.out.batch).saturating_mul(params.out.tokens.into());
    Launch { kernel: "pad_rows", grid: [warps4(units), 1, 1], threads: 128, shared_bytes: 0 }
}
