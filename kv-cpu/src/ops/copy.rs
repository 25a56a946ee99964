//! Copies between blocks of one group, in every plane.
use kv_core::BlockOrder;
use kv_core::error::DeviceError;
use kv_core::invariant::Invariant;
use kv_core::plan::{BlockCopy, CopyArgs, CopyPlan};

use crate::access::Access;
use crate::buffer::CpuBuffer;
use crate::context::Cpu;
use crate::layout::PlaneRows;
use crate::scratch::Workspace;
use kv_core::num::{to_offset, to_u64};

const OPERATION: &str = "copy_blocks";
/// Fewer bytes than this are copied faster by one thread.
const BYTES_PARALLEL_MIN: u64 = 1 << 20;

pub(crate) fn copy_blocks(
    cpu: &Cpu,
    workspace: &mut Workspace,
    plan: &CopyPlan<'_>,
    args: &CopyArgs<'_, CpuBuffer>,
) -> Result<(), DeviceError> {
    let copies = plan.copies();
    let blocks = copies.iter().map(|copy| copy.from.0.max(copy.to.0) + 1).max().unwrap_or(0);
    for view in args.storage().planes() {
        let mut access = Access::new(&mut workspace.entries, OPERATION);
        let constants = access.plane(&view, true)?;
        let locked = access.lock()?;
        // SAFETY: entered for writing above.
        let plane = unsafe { PlaneRows::new(&locked, view, constants, blocks, None, OPERATION) }?;
        let bytes = plane.layout().block_bytes() * to_u64(copies.len());
        let parallel = bytes >= BYTES_PARALLEL_MIN;
        cpu.threads.run(copies.len(), parallel, &mut workspace.scratch, |_, item| {
            copy_block(&plane, copies.get(item).invariant("a work item is a copy"));
        });
    }
    Ok(())
}

fn copy_block(plane: &PlaneRows<'_>, copy: &BlockCopy) {
    let layout = plane.layout();
    let slots = copy.slots.min(layout.block_size());
    let part = layout.token_stride() * u64::from(slots);
    let (runs, run) = match layout.order() {
        _ if slots == layout.block_size() => (1, layout.block_bytes()),
        BlockOrder::Nhd => (1, part),
        _ => (layout.num_kv_heads(), part),
    };
    for head in 0..runs {
        let begin = layout.head_stride() * u64::from(head);
        let from = plane.get(copy.from.0, begin, to_offset(run));
        // SAFETY: the plane is locked for writing; a copy plan writes no block twice and reads none
        // that it writes, and each copy is one work item.
        let to = unsafe { plane.get_mut(copy.to.0, begin, to_offset(run)) };
        to.copy_from_slice(from);
    }
    if layout.has_block_means() && slots < layout.block_size() {
        let begin = layout.mean_begin(0);
        let bytes = to_offset(layout.block_bytes() - begin);
        let from = plane.get(copy.from.0, begin, bytes);
        // SAFETY: as above.
        let to = unsafe { plane.get_mut(copy.to.0, begin, bytes) };
        to.copy_from_slice(from);
    }
}
