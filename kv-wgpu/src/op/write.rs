//! The scatter of new K and V rows into their slots.
use kv_core::plan::{WriteArgs, WritePlan};
use kv_core::{DeviceError, PlaneView, TokenTensor};

use crate::buffer::WgpuBuffer;
use crate::device::unsupported;
use crate::params::WriteParams;
use crate::pipelines::Kernel;
use crate::queue::WgpuQueue;
use crate::steps::Step;
use crate::tensors::{Call, Room};

const OPERATION: &str = "write_kv";

fn kernel() -> Kernel {
    Kernel::new("write.wgsl")
}

#[cfg(test)]
pub(crate) fn kernels() -> Vec<Kernel> {
    vec![kernel()]
}

pub(crate) fn write_kv(
    queue: &mut WgpuQueue,
    plan: &WritePlan<'_>,
    args: &WriteArgs<'_, WgpuBuffer>,
) -> Result<(), DeviceError> {
    let step = queue.steps.get(&mut queue.recorder, plan.batch(), plan.tables())?;
    let mut call = queue.call(OPERATION);
    put(&mut call, (plan, &step), (args.k(), args.k_plane()))?;
    put(&mut call, (plan, &step), (args.v(), args.v_plane()))
}

/// One plane.
fn put(
    call: &mut Call<'_>,
    (plan, step): (&WritePlan<'_>, &Step),
    (tensor, view): (&TokenTensor<'_, WgpuBuffer>, &PlaneView<'_, WgpuBuffer>),
) -> Result<(), DeviceError> {
    let room = Room {
        entries: plan.sequences().len(),
        longest: plan.new_len_max(),
        total: plan.total_new(),
    };
    let plane = call.plane(view, plan.tables().num_blocks(), Some(plan.layout()))?;
    if view.layout().format().is_quantised() || plane.has_tail != 0 {
        return Err(unsupported(OPERATION, "rows of codes"));
    }
    let (rows, read) = call.input(tensor, room)?;
    let constants = call.constants(view)?;
    let units = u64::from(plan.total_new()).saturating_mul(plane.num_kv_heads.into());
    for index in 0..view.layout().num_segments() {
        let (plane, written) = call.segment((view, &plane), index, true)?;
        let has_constants = view.layout().has_constants().into();
        let params =
            WriteParams { plan: step.plan, rows, plane, has_constants, ..WriteParams::default() };
        let slots = [step.lists.clone(), read.clone(), constants.clone(), written];
        let groups = call.recorder.groups(units)?;
        call.recorder.dispatch(&kernel(), &params, &slots, groups)?;
    }
    Ok(())
}
