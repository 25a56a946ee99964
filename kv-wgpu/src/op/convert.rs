//! Conversion of axes and element type.
use kv_core::error::DeviceError;
use kv_core::plan::{ConvertArgs, ConvertEnds, ConvertPlan};

use super::pad::{self, Owned};
use crate::buffer::WgpuBuffer;
use crate::device::unsupported;
use crate::params::ConvertParams;
use crate::pipelines::Kernel;
use crate::queue::WgpuQueue;
use crate::recording::Slot;
use crate::tensors::Room;
use kv_core::num::to_u32;

const OPERATION: &str = "convert";

fn kernel() -> Kernel {
    Kernel::new("convert.wgsl")
}

#[cfg(test)]
pub(crate) fn kernels() -> Vec<Kernel> {
    vec![kernel()]
}

pub(crate) fn convert(
    queue: &mut WgpuQueue,
    plan: &ConvertPlan,
    mut args: ConvertArgs<'_, WgpuBuffer>,
) -> Result<(), DeviceError> {
    let ConvertEnds::Tensors(src, dst) = args.ends() else {
        return Err(unsupported(OPERATION, "no kernel encodes or decodes rows"));
    };
    let (mut entries, mut longest) = (Vec::new(), 0);
    for (start, len) in plan.entries() {
        entries.extend([start, len]);
        longest = longest.max(len);
    }
    let room = Room { entries: plan.batch(), longest, total: plan.total() };
    let mut call = queue.call(OPERATION);
    let (dst, written) = call.output(dst, room)?;
    let (src, read) = call.input(src, room)?;
    let lists: Slot = call.recorder.push(&entries)?.into();
    let num_entries = to_u32(plan.batch());
    let params =
        ConvertParams { src, dst, num_entries, total: plan.total(), ..ConvertParams::default() };
    let recorder = &mut queue.recorder;
    let groups = recorder.groups(plan.total().into())?;
    let slots = [lists.clone(), read, written.clone()];
    recorder.dispatch(&kernel(), &params, &slots, groups)?;
    let owned = Owned { lists, entries: 0, count: num_entries, total: plan.total() };
    pad::pad_rows(recorder, (dst, written), owned, 0.0)
}
