//! Block copies in K and V of every layer of a group.
use kv_core::error::DeviceError;
use kv_core::plan::{CopyArgs, CopyPlan};

use super::MAX_YZ;
use crate::buffer::CudaBuffer;
use crate::gpu::Launch;
use crate::params::{BlockCopy, CopyParams, Plane};
use crate::queue::{CudaQueue, Parts};
use kv_core::num::to_u32;

const OPERATION: &str = "copy_blocks";

pub(crate) fn copy_blocks(
    queue: &mut CudaQueue,
    plan: &CopyPlan<'_>,
    args: &CopyArgs<'_, CudaBuffer>,
) -> Result<(), DeviceError> {
    let copies: Vec<_> = plan
        .copies()
        .iter()
        .map(|copy| BlockCopy { from: copy.from.0, to: copy.to.0, slots: copy.slots, pad: 0 })
        .collect();
    let blocks = copies.iter().map(|copy| copy.from.max(copy.to) + 1).max();
    let Parts { call, pack, constants, mut transfer } = queue.parts(OPERATION);
    let blocks = blocks.unwrap_or(0);
    let mut planes = Vec::new();
    for view in args.storage().planes() {
        planes.push(call.plane(&view, blocks, None, (&mut *constants, &mut transfer))?);
    }
    let copies_at = pack.push(&copies);
    let planes_at = pack.push(&planes);
    let base = queue.send()?;
    let params = CopyParams {
        planes: planes_at.from(base),
        copies: copies_at.from(base),
        num_planes: to_u32(planes.len()),
        num_copies: to_u32(copies.len()),
    };
    let launch = launch(&params, &planes);
    // SAFETY: the extent of every address was compared with what plan and layouts reach, and the
    // owner of the memory, or the queue, keeps it until the stream has passed.
    unsafe { queue.launch(&launch, &params) }
}

/// Returns the launch; `copy.cu` explains the numbers.
fn launch(params: &CopyParams, planes: &[Plane]) -> Launch {
    let bytes = planes.iter().map(|plane| plane.block_bytes).max().unwrap_or(0);
    let parts = u32::try_from(bytes.div_ceil(16_384)).unwrap_or(u32::MAX).min(MAX_YZ);
    let grid = [params.num_copies, params.num_planes.min(MAX_YZ), parts];
    Launch { kernel: "copy_blocks", grid, threads: 256, shared_bytes: 0 }
}
