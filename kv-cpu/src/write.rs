//! The scatter of new K and V rows into their slots.
mod tail;

use kv_core::plan::{PlannedSequence, WriteArgs, WritePlan};
use kv_core::{BlockOrder, DeviceError, Place, PlaneLayout, Slot};
use kv_quant::{block, row, transform};

use crate::access::Access;
use crate::attend::Scratch;
use crate::backend::Cpu;
use crate::buffer::CpuBuffer;
use crate::encoding::{Element, RowLayout};
use crate::num::{offset, to_usize};
use crate::rows::{PlaneRows, Room, RowAt, RowsIn};
use crate::workspace::Workspace;

const OPERATION: &str = "write_kv";
/// Tokens that one thread takes at a time.
const TOKENS_PER_UNIT: usize = 16;
/// Fewer bytes than this are written faster by one thread.
const BYTES_SIDE_BY_SIDE: u64 = 1 << 19;
/// Bytes that are copied in the time that a value takes to be encoded.
const ENCODED_VALUE_BYTES: u64 = 128;

pub(crate) fn write_kv(
    cpu: &Cpu,
    workspace: &mut Workspace,
    plan: &WritePlan<'_>,
    args: &WriteArgs<'_, CpuBuffer>,
) -> Result<(), DeviceError> {
    let mut access = Access::new(&mut workspace.entries, OPERATION);
    let spans = [access.input(args.k())?, access.input(args.v())?];
    let constants = [access.plane(args.k_plane(), true)?, access.plane(args.v_plane(), true)?];
    let locked = access.lock()?;
    let room = Room {
        entries: plan.sequences().len(),
        longest: plan.new_len_max(),
        total: plan.total_new(),
    };
    let blocks = plan.tables().num_blocks();
    let planned = Some(plan.layout());
    let [k_span, v_span] = spans;
    // SAFETY: entered above.
    let k = unsafe { RowsIn::new(&locked, k_span, *args.k().rows(), room, OPERATION) }?;
    // SAFETY: entered above.
    let v = unsafe { RowsIn::new(&locked, v_span, *args.v().rows(), room, OPERATION) }?;
    let [k_constants, v_constants] = constants;
    let (k_view, v_view) = (*args.k_plane(), *args.v_plane());
    // SAFETY: entered for writing above.
    let k_plane =
        unsafe { PlaneRows::new(&locked, k_view, k_constants, blocks, planned, OPERATION) }?;
    // SAFETY: entered for writing above.
    let v_plane =
        unsafe { PlaneRows::new(&locked, v_view, v_constants, blocks, planned, OPERATION) }?;
    let tokens = plan.slots().len();
    let work = token_work(&k_plane)
        .saturating_add(token_work(&v_plane))
        .saturating_mul(u64::from(plan.total_new()));
    let side_by_side = work >= BYTES_SIDE_BY_SIDE;
    if k_plane.layout().slot_map().has_tail() {
        let heads = to_usize(k_plane.layout().num_kv_heads().max(1));
        let units = plan.sequences().len().saturating_mul(heads);
        cpu.threads.run(units, side_by_side, &mut workspace.scratch, |scratch, unit| {
            let entry = unit.checked_div(heads).unwrap_or(0);
            let head = unit.checked_rem(heads).and_then(|head| u32::try_from(head).ok());
            let at = (entry, head.unwrap_or(0));
            tail::write(cpu, plan, at, (&k, &k_plane), scratch);
            tail::write(cpu, plan, at, (&v, &v_plane), scratch);
        });
        return Ok(());
    }
    let units = tokens.div_ceil(TOKENS_PER_UNIT);
    cpu.threads.run(units, side_by_side, &mut workspace.scratch, |scratch, unit| {
        let mut token = unit.saturating_mul(TOKENS_PER_UNIT);
        let end = token.saturating_add(TOKENS_PER_UNIT).min(tokens);
        while let Some(run) = Run::of(plan, k_plane.layout(), (token, end)) {
            write_run(cpu, &run, (&k, &k_plane), scratch);
            write_run(cpu, &run, (&v, &v_plane), scratch);
            token = token.saturating_add(to_usize(run.tokens));
        }
    });
    Ok(())
}

/// Tokens of one entry that follow each other in one block, and are stored alike.
#[derive(Debug, Clone, Copy)]
struct Run {
    first: RowAt,
    tokens: u32,
    block: u32,
    place: Place,
}

impl Run {
    /// The run from ragged row `token` on, which ends before `end`.
    fn of(
        plan: &WritePlan<'_>,
        layout: &PlaneLayout,
        (token, end): (usize, usize),
    ) -> Option<Self> {
        let slots = plan.slots().get(token..end)?;
        let (slot, others) = slots.split_first()?;
        let (entry, sequence) = entry_of(plan.sequences(), token)?;
        let in_entry = token.checked_sub(to_usize(sequence.new_start))?;
        let in_entry = u32::try_from(in_entry).ok()?;
        let first = RowAt { entry, start: sequence.new_start, token: in_entry };
        let position = sequence.kv_len.checked_sub(sequence.new_len)?.checked_add(in_entry)?;
        // The plan's slots are distinct, so they say where; the map says how wide the row is.
        let mut place = layout.slot_map().place(position);
        place.inside = slot.0.checked_rem(layout.block_size())?;
        let block = slot.0.checked_div(layout.block_size())?;
        let tokens = if place.is_wide {
            1
        } else {
            let room = layout.block_size().saturating_sub(place.inside);
            let most = to_usize(room.min(sequence.new_len.saturating_sub(in_entry)));
            let follows = |(after, slot): &(u32, &Slot)| slot.0.checked_sub(*after) == Some(1);
            let before = std::iter::successors(Some(slot.0), |slot| slot.checked_add(1));
            let others = before.zip(others).take(most.saturating_sub(1)).take_while(follows);
            u32::try_from(others.count()).ok()?.saturating_add(1)
        };
        Some(Self { first, tokens, block, place })
    }

    /// Where row `token` of the run comes from.
    fn at(&self, token: u32) -> RowAt {
        RowAt { token: self.first.token.saturating_add(token), ..self.first }
    }
}

/// The entry that brings ragged row `token`.
fn entry_of(sequences: &[PlannedSequence], token: usize) -> Option<(usize, &PlannedSequence)> {
    let after = sequences.partition_point(|s| to_usize(s.new_start) <= token);
    let entry = after.checked_sub(1)?;
    Some((entry, sequences.get(entry)?))
}

/// What writing one token costs, as bytes that would take as long to copy.
fn token_work(plane: &PlaneRows<'_>) -> u64 {
    let layout = plane.layout();
    let row = match plane.as_they_came() {
        Some(_) => layout.row_bytes(),
        None => u64::from(layout.head_dim()).saturating_mul(ENCODED_VALUE_BYTES),
    };
    row.saturating_mul(u64::from(layout.num_kv_heads()))
}

/// Writes a run head by head: each head's rows lie one behind the other, and memory is written
/// faster in long runs than a row here and a row there.
fn write_run(
    cpu: &Cpu,
    run: &Run,
    (rows, plane): (&RowsIn<'_>, &PlaneRows<'_>),
    scratch: &mut Scratch,
) {
    let layout = plane.layout();
    let element = plane.as_they_came();
    let heads = layout.num_kv_heads();
    // All heads at once where those of a token lie together.
    let together = match layout.order() {
        BlockOrder::Nhd if element.is_some() && !run.place.is_wide => heads.max(1),
        _ => 1,
    };
    let stride = offset(layout.token_stride());
    let bytes = plane.rows(run.place.is_wide).bytes().saturating_mul(to_usize(together));
    let reach = to_usize(run.tokens.saturating_sub(1)).saturating_mul(stride).saturating_add(bytes);
    let values = scratch.row(to_usize(layout.head_dim()));
    let source = RowLayout::plain(rows.element(), values.len());
    let mut head = 0;
    while head < heads {
        // SAFETY: the plane is locked for writing; slots of a plan are distinct, each is written by
        // one unit, and a unit writes its heads one after another.
        let to = unsafe { plane.get_mut(run.block, layout.row_begin(run.place, head), reach) };
        for (token, to) in (0..run.tokens).zip(to.chunks_mut(stride.max(1))) {
            let to = to.get_mut(..bytes).unwrap_or_default();
            let from = rows.get(run.at(token), head, together);
            if let Some(element) = element {
                cpu.kernels.convert((rows.element(), from), (element, to));
            } else {
                cpu.kernels.decode(&source, from, values);
                encode_row(cpu, plane, (head, run.place.is_wide), values, to);
            }
        }
        head = head.saturating_add(together);
    }
}

/// Transforms and encodes one row of a plane.
fn encode_row(
    cpu: &Cpu,
    plane: &PlaneRows<'_>,
    (head, is_wide): (u32, bool),
    values: &mut [f32],
    to: &mut [u8],
) {
    if to.is_empty() {
        return;
    }
    if let Some(constants) = plane.transform(head) {
        transform::store(values, &constants);
    }
    let format = plane.layout().format();
    match Element::of_format(format) {
        Some(element) => cpu.kernels.encode(element, values, to),
        None if is_wide => block::encode_wide(values, to),
        None => {
            let inv_scale = plane.head_constants(head).map_or(1.0, |head| head.inv_scale);
            row::encode_row(format, inv_scale, values, to);
        }
    }
}
