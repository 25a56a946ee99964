//! Conversion of axes and element type.
use kv_core::error::DeviceError;
use kv_core::plan::{ConvertArgs, ConvertEnds, ConvertPlan};

use super::pad::{self, Owned};
use super::warps4;
use crate::buffer::CudaBuffer;
use crate::gpu::Launch;
use crate::params::{ConvertParams, Entry};
use crate::queue::{CudaQueue, Parts};
use crate::tensors::{Room, unsupported};
use kv_core::num::to_u32;

const OPERATION: &str = "convert";

pub(crate) fn convert(
    queue: &mut CudaQueue,
    plan: &ConvertPlan,
    mut args: ConvertArgs<'_, CudaBuffer>,
) -> Result<(), DeviceError> {
    let ConvertEnds::Tensors(src, dst) = args.ends() else {
        return Err(unsupported(OPERATION, "no kernel encodes or decodes rows"));
    };
    let entries: Vec<_> = plan.entries().map(|(start, len)| Entry { start, len }).collect();
    let longest = entries.iter().map(|entry| entry.len).max().unwrap_or(0);
    let room = Room { entries: plan.batch(), longest, total: plan.total() };
    let Parts { call, pack, .. } = queue.parts(OPERATION);
    let dst = call.output(dst, room)?;
    let (src, from) = call.input(src, room, pack)?;
    let entries_at = pack.push(&entries);
    let base = queue.send()?;
    let params = ConvertParams {
        src: from.rows(src, base),
        dst,
        entries: entries_at.from(base),
        num_entries: to_u32(entries.len()),
        total: plan.total(),
    };
    let launch = launch(&params);
    // SAFETY: the extent of every address was compared with what the plan reaches, and the owner of
    // the memory, or the queue, keeps it until the stream has passed.
    unsafe { queue.launch(&launch, &params)? };
    let owned = Owned { entries: params.entries, count: params.num_entries, counts: 0 };
    pad::pad_rows(queue, (dst, owned), plan.total(), 0.0)
}

/// Returns the launch; `convert.cu` explains the numbers.
fn launch(params: &ConvertParams) -> Launch {
    let grid = [warps4(params.total.into()), 1, 1];
    Launch { kernel: "convert_rows", grid, threads: 128, shared_bytes: 0 }
}
