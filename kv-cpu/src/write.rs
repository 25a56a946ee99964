//! The scatter of new K and V rows into their slots.
use kv_core::DeviceError;
use kv_core::plan::{PlannedSequence, WriteArgs, WritePlan};

use crate::access::Access;
use crate::backend::Cpu;
use crate::buffer::CpuBuffer;
use crate::num::to_usize;
use crate::rows::{PlaneRows, Room, RowAt, RowsIn};
use crate::workspace::Workspace;

const OPERATION: &str = "write_kv";
/// Tokens that one thread takes at a time.
const TOKENS_PER_UNIT: usize = 16;
/// Fewer bytes than this are written faster by one thread.
const BYTES_SIDE_BY_SIDE: u64 = 1 << 19;

pub(crate) fn write_kv(
    cpu: &Cpu,
    workspace: &mut Workspace,
    plan: &WritePlan<'_>,
    args: &WriteArgs<'_, CpuBuffer>,
) -> Result<(), DeviceError> {
    let mut access = Access::new(&mut workspace.entries, OPERATION);
    let spans = [access.input(args.k())?, access.input(args.v())?];
    access.plane(args.k_plane(), true)?;
    access.plane(args.v_plane(), true)?;
    let locked = access.lock()?;
    let room = Room {
        entries: plan.sequences().len(),
        longest: plan.new_len_max(),
        total: plan.total_new(),
    };
    let blocks = plan.tables().num_blocks();
    let block_size = Some(plan.layout().block_size());
    let [k_span, v_span] = spans;
    // SAFETY: entered above.
    let k = unsafe { RowsIn::new(&locked, k_span, *args.k().rows(), room, OPERATION) }?;
    // SAFETY: entered above.
    let v = unsafe { RowsIn::new(&locked, v_span, *args.v().rows(), room, OPERATION) }?;
    // SAFETY: entered for writing above.
    let k_plane =
        unsafe { PlaneRows::new(&locked, *args.k_plane(), blocks, block_size, OPERATION) }?;
    // SAFETY: entered for writing above.
    let v_plane =
        unsafe { PlaneRows::new(&locked, *args.v_plane(), blocks, block_size, OPERATION) }?;
    let tokens = plan.slots().len();
    let token_bytes = |plane: &PlaneRows<'_>| {
        let layout = plane.layout();
        layout.row_bytes().saturating_mul(u64::from(layout.num_kv_heads()))
    };
    let bytes = token_bytes(&k_plane)
        .saturating_add(token_bytes(&v_plane))
        .saturating_mul(u64::from(plan.total_new()));
    let units = tokens.div_ceil(TOKENS_PER_UNIT);
    let side_by_side = bytes >= BYTES_SIDE_BY_SIDE;
    cpu.threads.run(units, side_by_side, &mut workspace.scratch, |_, unit| {
        let begin = unit.saturating_mul(TOKENS_PER_UNIT);
        let end = begin.saturating_add(TOKENS_PER_UNIT).min(tokens);
        for token in begin..end {
            write_token(cpu, plan, token, &k, &k_plane);
            write_token(cpu, plan, token, &v, &v_plane);
        }
    });
    Ok(())
}

/// The entry that brings ragged row `token`.
fn entry_of(sequences: &[PlannedSequence], token: usize) -> Option<(usize, &PlannedSequence)> {
    let after = sequences.partition_point(|s| to_usize(s.new_start) <= token);
    let entry = after.checked_sub(1)?;
    Some((entry, sequences.get(entry)?))
}

fn write_token(
    cpu: &Cpu,
    plan: &WritePlan<'_>,
    token: usize,
    rows: &RowsIn<'_>,
    plane: &PlaneRows<'_>,
) {
    let Some(((entry, sequence), slot)) =
        entry_of(plan.sequences(), token).zip(plan.slots().get(token))
    else {
        return;
    };
    let in_entry = token.saturating_sub(to_usize(sequence.new_start));
    let at = RowAt {
        entry,
        start: sequence.new_start,
        token: u32::try_from(in_entry).unwrap_or(u32::MAX),
    };
    let layout = plane.layout();
    let block_size = layout.block_size();
    let block = slot.0.checked_div(block_size).unwrap_or(0);
    let inside = slot.0.checked_rem(block_size).unwrap_or(0);
    // A head at a time, or all of them where they lie together.
    let heads = layout.num_kv_heads();
    let together = match layout.order() {
        kv_core::BlockOrder::Nhd => heads,
        _ => 1,
    };
    let row_bytes = crate::num::offset(layout.row_bytes()).saturating_mul(to_usize(together));
    let mut head = 0;
    while head < heads {
        let from = rows.get(at, head, together);
        // SAFETY: the plane is locked for writing; slots of a plan are distinct, each is written by
        // one unit, and a unit writes its heads one after another.
        let to = unsafe { plane.get_mut(block, plane.row_begin(inside, head), row_bytes) };
        cpu.kernels.convert((rows.encoding(), from), (plane.encoding(), to));
        head = head.saturating_add(together);
    }
}
