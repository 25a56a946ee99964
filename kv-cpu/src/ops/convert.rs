//! A change of axes and element type of a batch of rows.
use kv_core::error::DeviceError;
use kv_core::plan::{ConvertArgs, ConvertPlan};

use crate::access::Access;
use crate::buffer::CpuBuffer;
use crate::context::Cpu;
use crate::layout::{Room, RowAt, RowsIn, RowsOut};
use crate::scratch::Workspace;
use kv_core::num::to_usize;

const OPERATION: &str = "convert";
/// Tokens that one thread takes at a time.
const TOKENS_PER_UNIT: u32 = 32;
/// Shorter entries than this are moved faster by one thread.
const TOKENS_SIDE_BY_SIDE: u32 = 512;

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
        let units = to_usize(len.div_ceil(TOKENS_PER_UNIT));
        let side_by_side = len >= TOKENS_SIDE_BY_SIDE;
        let scratch = &mut workspace.scratch;
        cpu.threads.run(units, side_by_side, scratch, |_, unit| {
            let unit = u32::try_from(unit).unwrap_or(u32::MAX);
            let begin = unit.saturating_mul(TOKENS_PER_UNIT);
            let end = begin.saturating_add(TOKENS_PER_UNIT).min(len);
            for token in begin..end {
                let at = RowAt { entry, start, token };
                let from = src.get(at, 0, heads);
                // SAFETY: each token belongs to one unit and is written once.
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
