//! Padding: rows of an output that belong to no entry.
use kv_core::error::DeviceError;

use super::warps4;
use crate::gpu::Launch;
use crate::params::{Address, PadParams, Tensor};
use crate::queue::CudaQueue;

/// The rows that belong to the entries of a batch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Owned {
    /// The `Entry` list, in device memory.
    pub(crate) entries: Address,
    /// Number of entries.
    pub(crate) count: u32,
    /// The counts of the step, if a captured launch may be replayed with others; otherwise 0.
    pub(crate) counts: Address,
}

/// Sets every row of `out` that belongs to no entry to `value`; `total` rows belong to entries.
pub(crate) fn pad_rows(
    queue: &mut CudaQueue,
    (out, owned): (Tensor, Owned),
    total: u32,
    value: f32,
) -> Result<(), DeviceError> {
    let rows = u64::from(out.batch) * u64::from(out.tokens);
    // No entry has more rows than fit, so an equal total means that no row is left over. The
    // batch of a replay may leave some, so a capture always has the launch.
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
    // SAFETY: the caller has compared the reach of `out` with its buffer, and the queue keeps the
    // entries.
    unsafe { queue.launch(&launch, &params) }
}

/// Returns the launch; `pad.cu` explains the numbers.
fn launch(params: &PadParams) -> Launch {
    let warps = u64::from(params.out.batch) * u64::from(params.out.tokens);
    Launch { kernel: "pad_rows", grid: [warps4(warps), 1, 1], threads: 128, shared_bytes: 0 }
}
