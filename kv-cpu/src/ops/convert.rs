//! A change of axes and element type of a batch of rows, and its encoding and decoding.
use kv_core::backend::{TokenTensor, TokenTensorMut};
use kv_core::error::DeviceError;
use kv_core::plan::{ConvertArgs, ConvertEnds, ConvertPlan, StoredRows};
use kv_cpu_kernels::RowLayout;

use crate::access::Access;
use crate::buffer::CpuBuffer;
use crate::context::Cpu;
use crate::layout::{Room, RowAt, RowsIn, RowsOut, StoredIn, StoredOut};
use crate::scratch::Workspace;
use kv_core::num::{to_u32, to_usize};

const OPERATION: &str = "convert";
/// Tokens that one thread takes at a time.
const TOKENS_PER_ITEM: u32 = 32;
/// Shorter entries than this are moved faster by one thread.
const TOKENS_PARALLEL_MIN: u32 = 512;
/// Entries of as many encoded tokens are faster on several threads: a value costs more than a copy.
const ENCODED_PARALLEL_MIN: u32 = 2 * TOKENS_PER_ITEM;

pub(crate) fn convert(
    cpu: &Cpu,
    workspace: &mut Workspace,
    plan: &ConvertPlan,
    mut args: ConvertArgs<'_, CpuBuffer>,
) -> Result<(), DeviceError> {
    match args.ends() {
        ConvertEnds::Tensors(src, dst) => convert_tensors(cpu, workspace, plan, (src, dst)),
        ConvertEnds::Encode(src, dst) => encode(cpu, workspace, plan, (src, *dst)),
        ConvertEnds::Decode(src, dst) => decode(cpu, workspace, plan, (*src, dst)),
    }
}

/// Returns the rows that a plan requires of tensors.
fn room_of(plan: &ConvertPlan) -> Room {
    Room {
        entries: plan.batch(),
        longest: plan.entries().map(|(_, len)| len).max().unwrap_or(0),
        total: plan.total(),
    }
}

fn convert_tensors(
    cpu: &Cpu,
    workspace: &mut Workspace,
    plan: &ConvertPlan,
    (src, dst): (&TokenTensor<'_, CpuBuffer>, &mut TokenTensorMut<'_, CpuBuffer>),
) -> Result<(), DeviceError> {
    let mut access = Access::new(&mut workspace.entries, OPERATION);
    let from = access.input(src)?;
    let to = access.output(dst)?;
    let locked = access.lock()?;
    let room = room_of(plan);
    // SAFETY: entered above.
    let src = unsafe { RowsIn::new(&locked, from, *src.rows(), room, OPERATION) }?;
    // SAFETY: entered for writing above, and the tensor is not used again.
    let dst = unsafe { RowsOut::new(&locked, to, *dst.rows(), room, OPERATION) }?;
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
    pad(plan, &dst);
    Ok(())
}

/// Zeroes the rows that no entry owns.
fn pad(plan: &ConvertPlan, dst: &RowsOut<'_>) {
    // Quadratic in the entries of a batch, which are few.
    let len = |entry: usize| plan.entries().nth(entry).map_or(0, |(_, len)| len);
    dst.for_padding(room_of(plan), len, |row| row.fill(0));
}

fn encode(
    cpu: &Cpu,
    workspace: &mut Workspace,
    plan: &ConvertPlan,
    (src, dst): (&TokenTensor<'_, CpuBuffer>, StoredRows<'_, CpuBuffer>),
) -> Result<(), DeviceError> {
    let mut access = Access::new(&mut workspace.entries, OPERATION);
    let from = access.input(src)?;
    let to = access.enter(dst.buffer(), (dst.offset(), dst.bytes()), true)?;
    let locked = access.lock()?;
    let room = room_of(plan);
    // SAFETY: entered above.
    let src = unsafe { RowsIn::new(&locked, from, *src.rows(), room, OPERATION) }?;
    // SAFETY: entered for writing above.
    let dst = unsafe { StoredOut::new(&locked, to, &dst, room, OPERATION) }?;
    let source_row = RowLayout::plain(src.element(), to_usize(src.rows().dim()));
    for (entry, (start, len)) in plan.entries().enumerate() {
        let items = to_usize(len.div_ceil(TOKENS_PER_ITEM));
        let parallel = len >= ENCODED_PARALLEL_MIN;
        cpu.threads.run(items, parallel, &mut workspace.scratch, |scratch, item| {
            let begin = to_u32(item) * TOKENS_PER_ITEM;
            let end = (begin + TOKENS_PER_ITEM).min(len);
            for token in begin..end {
                for head in 0..src.rows().heads() {
                    let from = src.get(RowAt { entry, start, token }, head, 1);
                    // SAFETY: each token belongs to one work item, which writes its rows one after
                    // another.
                    let to = unsafe { dst.row_mut(start + token, head) };
                    let values = scratch.row(source_row.dim());
                    cpu.kernels.decode(&source_row, from, values);
                    cpu.kernels.encode_row(dst.format(), 1.0, values, to);
                }
            }
        });
    }
    Ok(())
}

fn decode(
    cpu: &Cpu,
    workspace: &mut Workspace,
    plan: &ConvertPlan,
    (src, dst): (StoredRows<'_, CpuBuffer>, &mut TokenTensorMut<'_, CpuBuffer>),
) -> Result<(), DeviceError> {
    let mut access = Access::new(&mut workspace.entries, OPERATION);
    let from = access.enter(src.buffer(), (src.offset(), src.bytes()), false)?;
    let to = access.output(dst)?;
    let locked = access.lock()?;
    let room = room_of(plan);
    // SAFETY: entered above.
    let src = unsafe { StoredIn::new(&locked, from, &src, room, OPERATION) }?;
    // SAFETY: entered for writing above, and the tensor is not used again.
    let dst = unsafe { RowsOut::new(&locked, to, *dst.rows(), room, OPERATION) }?;
    for (entry, (start, len)) in plan.entries().enumerate() {
        let items = to_usize(len.div_ceil(TOKENS_PER_ITEM));
        let parallel = len >= ENCODED_PARALLEL_MIN;
        cpu.threads.run(items, parallel, &mut workspace.scratch, |scratch, item| {
            let begin = to_u32(item) * TOKENS_PER_ITEM;
            let end = (begin + TOKENS_PER_ITEM).min(len);
            for token in begin..end {
                for head in 0..dst.rows().heads() {
                    let from = src.row(start + token, head);
                    // SAFETY: each token belongs to one work item, which writes its heads one after
                    // another.
                    let to = unsafe { dst.get_mut(RowAt { entry, start, token }, head, 1) };
                    let values = scratch.row(src.layout().dim());
                    cpu.kernels.decode_scaled(src.layout(), 1.0, from, values);
                    cpu.kernels.encode(dst.element(), values, to);
                }
            }
        });
    }
    pad(plan, &dst);
    Ok(())
}
