//! Cached rows read back into a plain tensor.
use kv_core::error::DeviceError;
use kv_core::invariant::Invariant;
use kv_core::plan::{GatherArgs, GatherPlan, GatherRange};
use kv_quant::transform;

use crate::access::Access;
use crate::buffer::CpuBuffer;
use crate::context::Cpu;
use crate::layout::unsupported;
use crate::layout::{PlaneRows, Room, RowAt, RowScale, RowsOut};
use crate::scratch::Scratch;
use crate::scratch::Workspace;
use kv_core::num::{to_u32, to_usize};

const OPERATION: &str = "gather";
/// Tokens that one thread takes at a time.
const TOKENS_PER_ITEM: u32 = 32;
/// Shorter ranges than this are read faster by one thread.
const TOKENS_PARALLEL_MIN: u32 = 512;

pub(crate) fn gather(
    cpu: &Cpu,
    workspace: &mut Workspace,
    plan: &GatherPlan<'_>,
    mut args: GatherArgs<'_, CpuBuffer>,
) -> Result<(), DeviceError> {
    let ranges = plan.ranges();
    let view = *args.plane();
    let mut access = Access::new(&mut workspace.entries, OPERATION);
    let constants = access.plane(&view, false)?;
    let span = access.output(args.out())?;
    let locked = access.lock()?;
    let room = Room {
        entries: ranges.len(),
        longest: ranges.iter().map(|range| range.len).max().unwrap_or(0),
        total: plan.total(),
    };
    let (blocks, planned) = (plan.tables().num_blocks(), Some(plan.layout()));
    // SAFETY: entered above.
    let plane = unsafe { PlaneRows::new(&locked, view, constants, blocks, planned, OPERATION) }?;
    // SAFETY: entered for writing above, and `args` is not used again.
    let out = unsafe { RowsOut::new(&locked, span, *args.out().rows(), room, OPERATION) }?;
    let same_heads = out.rows().heads() == plane.layout().num_kv_heads();
    if !(same_heads && out.rows().dim() == plane.layout().head_dim()) {
        return Err(unsupported(OPERATION, "the plane is not the output's"));
    }
    let mut start = 0_u32;
    for (entry, range) in ranges.iter().enumerate() {
        let items = range.len.div_ceil(TOKENS_PER_ITEM);
        let parallel = range.len >= TOKENS_PARALLEL_MIN;
        cpu.threads.run(to_usize(items), parallel, &mut workspace.scratch, |scratch, item| {
            let item = to_u32(item);
            let begin = item * TOKENS_PER_ITEM;
            let end = (begin + TOKENS_PER_ITEM).min(range.len);
            for token in begin..end {
                let at = RowAt { entry, start, token };
                gather_token(cpu, plan, range, (&plane, &out), at, scratch);
            }
        });
        start += range.len;
    }
    // Rows of no entry are padding.
    let len = |entry: usize| ranges.get(entry).map_or(0, |range| range.len);
    out.for_padding(room, len, |row| row.fill(0));
    Ok(())
}

fn gather_token(
    cpu: &Cpu,
    plan: &GatherPlan<'_>,
    range: &GatherRange,
    (plane, out): (&PlaneRows<'_>, &RowsOut<'_>),
    at: RowAt,
    scratch: &mut Scratch,
) {
    let layout = plane.layout();
    let found = layout.slot_map().place_in(range.begin + at.token, plan.tables().coded(range.row));
    let rows = plane.rows(found.is_wide);
    let block = plan.tables().row(range.row).get(to_usize(found.index));
    let block = block.invariant("ranges of a plan lie inside the blocks of their rows");
    for head in 0..layout.num_kv_heads() {
        // SAFETY: each token belongs to one work item, which writes its heads one after another.
        let to = unsafe { out.get_mut(at, head, 1) };
        let from = plane.get(block.0, layout.row_begin(found, head), rows.bytes());
        if let Some(element) = plane.plain_element() {
            cpu.kernels.convert((element, from), (out.element(), to));
        } else {
            let (values, mean) = scratch.rows(rows.dim());
            let given = match plane.scale(head, found.is_wide) {
                RowScale::Given(scale) => scale,
                RowScale::Stored => 1.0,
            };
            cpu.kernels.decode_scaled(rows, given, from, values);
            if layout.has_block_means() && !found.is_wide {
                add_mean(plane, (block.0, head), values, mean);
            }
            if let Some(constants) = plane.transform(head) {
                transform::load(values, &constants);
            }
            cpu.kernels.encode(out.element(), values, to);
        }
    }
}

/// Adds the mean of a block to one of its rows.
fn add_mean(
    plane: &PlaneRows<'_>,
    (block, head): (u32, u32),
    values: &mut [f32],
    mean: &mut [f32],
) {
    plane.read_mean(block, head, mean);
    for (value, mean) in values.iter_mut().zip(mean) {
        *value += *mean;
    }
}
