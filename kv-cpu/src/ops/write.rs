//! The scatter of new K and V rows into their slots.
use kv_core::error::DeviceError;
use kv_core::invariant::Invariant;
use kv_core::plan::{PlannedSequence, WriteArgs, WritePlan};
use kv_quant::{block, transform};

use super::write_tail;
use crate::access::Access;
use crate::buffer::CpuBuffer;
use crate::context::Cpu;
use crate::layout::{PlaneRows, Room, RowAt, RowsIn};
use crate::scratch::Scratch;
use crate::scratch::Workspace;
use kv_core::num::{to_u32, to_usize};
use kv_cpu_kernels::NonTemporal;
use kv_cpu_kernels::{Element, RowLayout};

const OPERATION: &str = "write_kv";
/// Tokens that one thread takes at a time.
const TOKENS_PER_ITEM: usize = 16;
/// Fewer bytes than this are written faster by one thread.
const BYTES_PARALLEL_MIN: u64 = 1 << 17;
/// Prompts of this many bytes and more are written with non-temporal stores: a cache line that is
/// written whole need not be read first. Encoded rows are written with ordinary stores.
const PROMPT_BYTES_NON_TEMPORAL: u64 = 1 << 18;
/// Steps with at most this many new tokens per sequence are not prompts.
const DECODE_TOKENS_MAX: u32 = 16;
/// Prefetch distance, in tokens, of rows that are written with non-temporal stores.
const TOKENS_AHEAD: u32 = 4;
/// Bytes that are copied in the time in which one value is encoded.
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
    let work = (token_work(&k_plane) + token_work(&v_plane)) * u64::from(plan.total_new());
    let parallel = work >= BYTES_PARALLEL_MIN;
    if k_plane.layout().slot_map().has_tail() {
        let heads = to_usize(k_plane.layout().num_kv_heads().max(1));
        let items = plan.sequences().len() * heads;
        cpu.threads.run(items, parallel, &mut workspace.scratch, |scratch, item| {
            let at = (item / heads, to_u32(item % heads));
            write_tail::write(cpu, plan, at, (&k, &k_plane), scratch);
            write_tail::write(cpu, plan, at, (&v, &v_plane), scratch);
        });
        return Ok(());
    }
    let is_non_temporal =
        work >= PROMPT_BYTES_NON_TEMPORAL && plan.new_len_max() > DECODE_TOKENS_MAX;
    let items = tokens.div_ceil(TOKENS_PER_ITEM);
    cpu.threads.run(items, parallel, &mut workspace.scratch, |scratch, item| {
        let begin = item * TOKENS_PER_ITEM;
        let end = (begin + TOKENS_PER_ITEM).min(tokens);
        let non_temporal = is_non_temporal.then(|| cpu.kernels.non_temporal());
        for token in begin..end {
            write_token(cpu, plan, token, (&k, &k_plane), (scratch, non_temporal.as_ref()));
            write_token(cpu, plan, token, (&v, &v_plane), (scratch, non_temporal.as_ref()));
        }
    });
    Ok(())
}

/// Returns the entry that ragged row `token` belongs to.
fn entry_of(sequences: &[PlannedSequence], token: usize) -> (usize, &PlannedSequence) {
    let after = sequences.partition_point(|s| to_usize(s.new_start) <= token);
    let entry = after.checked_sub(1).and_then(|entry| Some((entry, sequences.get(entry)?)));
    entry.invariant("every new token of a batch is an entry's")
}

/// Returns the cost of writing one token, as the bytes that would take as long to copy.
fn token_work(plane: &PlaneRows<'_>) -> u64 {
    let layout = plane.layout();
    let row = match plane.plain_element() {
        Some(_) => layout.row_bytes(),
        None => u64::from(layout.head_dim()) * ENCODED_VALUE_BYTES,
    };
    row * u64::from(layout.num_kv_heads())
}

fn write_token(
    cpu: &Cpu,
    plan: &WritePlan<'_>,
    token: usize,
    (rows, plane): (&RowsIn<'_>, &PlaneRows<'_>),
    (scratch, non_temporal): (&mut Scratch, Option<&NonTemporal>),
) {
    let (entry, sequence) = entry_of(plan.sequences(), token);
    let slot = plan.slots().get(token).invariant("every new token of a batch has a slot");
    let in_entry = to_u32(token) - sequence.new_start;
    let at = RowAt { entry, start: sequence.new_start, token: in_entry };
    let layout = plane.layout();
    let position = sequence.kv_len - sequence.new_len + in_entry;
    // The plan's slots are distinct, so they say where; the map says how wide the row is.
    let mut found = layout.slot_map().place(position);
    found.inside = slot.0 % layout.block_size();
    let block = slot.0 / layout.block_size();
    let heads = layout.num_kv_heads();
    let Some(element) = plane.plain_element() else {
        for head in 0..heads {
            let row_bytes = plane.rows(found.is_wide).bytes();
            // SAFETY: the plane is locked for writing; slots of a plan are distinct, each is
            // written by one work item, and an item writes its heads one after another.
            let to = unsafe { plane.get_mut(block, layout.row_begin(found, head), row_bytes) };
            let values = scratch.row(to_usize(layout.head_dim()));
            let source = RowLayout::plain(rows.element(), values.len());
            cpu.kernels.decode(&source, rows.get(at, head, 1), values);
            encode_row(cpu, plane, (head, found.is_wide), values, to);
        }
        return;
    };
    // A head at a time, or all of them where they lie together.
    let together = match layout.order() {
        kv_core::BlockOrder::Nhd if !found.is_wide => heads,
        _ => 1,
    };
    let row_bytes = kv_core::num::to_offset(layout.row_bytes()) * to_usize(together);
    let mut head = 0;
    while head < heads {
        let from = rows.get(at, head, together);
        // SAFETY: as above.
        let to = unsafe { plane.get_mut(block, layout.row_begin(found, head), row_bytes) };
        if let Some(kernels) = non_temporal {
            let ahead = RowAt { token: at.token + TOKENS_AHEAD, ..at };
            let ahead = rows.ahead(ahead, head, together);
            kernels.convert((rows.element(), from), (element, to), ahead);
        } else {
            cpu.kernels.convert((rows.element(), from), (element, to));
        }
        head += together;
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
    if let Some(constants) = plane.transform(head) {
        transform::store(values, &constants);
    }
    let format = plane.layout().format();
    match Element::of_format(format) {
        Some(element) => cpu.kernels.encode(element, values, to),
        None if is_wide => block::encode_wide(values, to),
        None => {
            let inv_scale = plane.head_constants(head).map_or(1.0, |head| head.inv_scale);
            cpu.kernels.encode_row(format, inv_scale, values, to);
        }
    }
}
