//! A change of axes and element type of a batch of rows.
use kv_core::error::DeviceError;
use kv_core::plan::{ConvertArgs, ConvertPlan};

use crate::access::Access;
use crate::buffer::CpuBuffer;
use crate::context::Cpu;
use crate::layout::{Room, RowAt, RowsIn, RowsOut};
use crate::scratch::Workspace;
use kv_core::num::{to_u32, to_usize};

const OPERATION: &str = "convert";
/// Tokens that one thread takes at a time.
const TOKENS_PER_ITEM: u32 = 32;
/// Shorter entries than this are moved faster by one thread.
const TOKENS_PARALLEL_MIN: u32 = 512;

pub(crate) fn convert(
    cpu: &Cpu,
    workspace: &mut Workspace,
    plan: &ConvertPlan,
    mut args: ConvertArgs<'_, CpuBuffer>,
) -> Result<(), DeviceError> {
    let mut access = Access::new(&mut workspace.entries, OPERATION);
    let from = access.input(args.src())?;
    let to = access.output(args.dst())?;
    let locked = access.lock()?;
    let room = Room {
        entries: plan.batch(),
        longest: plan.entries().map(|(_, len)| len).max().unwrap_or(0),
        total: plan.total(),
    };
    // SAFETY: entered above.
    let src = unsafe { RowsIn::new(&locked, from, *args.src().rows(), room, OPERATION) }?;
    // SAFETY: entered for writing above, and `args` is not used again.
    let dst = unsafe { RowsOut::new(&locked, to, *args.dst().rows(), room, OPERATION) }?;
    let heads = src.rows().heads();
    for (entry, (start, len)) in plan.entries().enumerate() {
        let items = to_usize(len.div_ceil(TOKENS_PER_ITEM));
        let parallel = len >= TOKENS_PARALLEL_MIN;
        let scratch = &mut workspace.scratch;
        cpu.threads.run(items, parallel, scratch, |_, item| {
            let item = to_u32(item);
            let begin = item * TOKENS_PER_ITEM;
            let end = (begin + TOKENS_PER_ITEM).min(len);
            let first = RowAt { entry, start, token: begin };
            // Rows without gaps, as those of a state, are one copy.
            if let Some(from) = src.run(first, end - begin) {
                // SAFETY: each token belongs to one work item; the slice ends before any other of
                // these tokens is made.
                if let Some(to) = unsafe { dst.run_mut(first, end - begin) } {
                    cpu.kernels.convert((src.element(), from), (dst.element(), to));
                    return;
                }
            }
            for token in begin..end {
                let at = RowAt { entry, start, token };
                let from = src.get(at, 0, heads);
                // SAFETY: each token belongs to one work item and is written once.
                let to = unsafe { dst.get_mut(at, 0, heads) };
                cpu.kernels.convert((src.element(), from), (dst.element(), to));
            }
        });
    }
    // Quadratic in the entries of a batch, which are few.
    let len = |entry: usize| plan.entries().nth(entry).map_or(0, |(_, len)| len);
    dst.for_padding(room, len, |row| row.fill(0));
    Ok(())
}
