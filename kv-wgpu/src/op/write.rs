//! Writing new K and V rows into their slots.
use kv_core::KvFormat;
use kv_core::backend::{PlaneView, TokenTensor};
use kv_core::error::DeviceError;
use kv_core::plan::{WriteArgs, WritePlan};

use super::tail::{CodedRuns, Tail};
use crate::buffer::WgpuBuffer;
use crate::params::{Plane, WriteParams};
use crate::pipelines::Kernel;
use crate::queue::WgpuQueue;
use crate::recording::Slot;
use crate::steps::Step;
use crate::tensors::Room;

pub(super) const OPERATION: &str = "write_kv";

/// Rows of one head that one workgroup writes: `new_row.wgsl`.
const ROWS: u64 = 8;

fn kernel(format: KvFormat) -> Kernel {
    specialised(Kernel::new("write.wgsl"), format)
}

/// Specialises a kernel for planes of a format. Formats that differ only in the source of a given
/// scale share one specialisation, and so do all unquantised formats.
pub(super) fn specialised(kernel: Kernel, format: KvFormat) -> Kernel {
    use kv_core::Scaling::{Row, Tensor};
    let of_row = |scaling| if scaling == Row { Row } else { Tensor };
    let alike = match format {
        KvFormat::Fp8E4m3(scaling) => KvFormat::Fp8E4m3(of_row(scaling)),
        KvFormat::Fp8E5m2(scaling) => KvFormat::Fp8E5m2(of_row(scaling)),
        KvFormat::Int8(scaling) => KvFormat::Int8(of_row(scaling)),
        other => other,
    };
    if !alike.is_quantised() {
        return kernel;
    }
    kernel.flags(&["CODES"]).with("FORMAT", alike.kernel_code())
}

#[cfg(test)]
pub(crate) fn kernels() -> Vec<Kernel> {
    let formats = crate::params::FORMATS.iter();
    let mut all: Vec<_> = formats.map(|format| kernel(*format)).collect();
    all.dedup();
    all.into_iter().chain(super::tail::kernels()).collect()
}

pub(crate) fn write_kv(
    queue: &mut WgpuQueue,
    plan: &WritePlan<'_>,
    args: &WriteArgs<'_, WgpuBuffer>,
) -> Result<(), DeviceError> {
    let step = queue.steps.get(&mut queue.recorder, plan.batch(), plan.tables())?;
    let runs = CodedRuns::of(&mut queue.recorder, plan)?;
    put(queue, (plan, &step, &runs), (args.k(), args.k_plane()))?;
    put(queue, (plan, &step, &runs), (args.v(), args.v_plane()))
}

/// Parameters and bindings that all dispatches for one plane share.
pub(super) struct PlaneWrite<'a> {
    pub(super) view: &'a PlaneView<'a, WgpuBuffer>,
    pub(super) plane: Plane,
    pub(super) params: WriteParams,
    pub(super) lists: Slot,
    pub(super) rows: Slot,
    pub(super) constants: Slot,
}

/// Writes one plane.
fn put(
    queue: &mut WgpuQueue,
    (plan, step, runs): (&WritePlan<'_>, &Step, &CodedRuns),
    (tensor, view): (&TokenTensor<'_, WgpuBuffer>, &PlaneView<'_, WgpuBuffer>),
) -> Result<(), DeviceError> {
    let room = Room {
        entries: plan.sequences().len(),
        longest: plan.new_len_max(),
        total: plan.total_new(),
    };
    let mut call = queue.call(OPERATION);
    let plane = call.plane(view, plan.tables().num_blocks(), Some(plan.layout()))?;
    let (rows, read) = call.input(tensor, room)?;
    let constants = call.constants(view)?;
    let params = WriteParams {
        plan: step.plan,
        rows,
        plane,
        has_constants: view.layout().has_constants().into(),
        num_runs: runs.count,
        ..WriteParams::default()
    };
    let lists = step.lists.clone();
    let put = PlaneWrite { view, plane, params, lists, rows: read, constants };
    // The old tail is read before anything is written.
    let tail = Tail::stage(queue, &put, runs)?;
    let units = u64::from(plan.total_new()) * u64::from(plane.num_kv_heads);
    let kernel = kernel(view.layout().format());
    let call = queue.call(OPERATION);
    for index in 0..view.layout().num_segments() {
        let (plane, written) = call.segment((view, &plane), index, true)?;
        let params = WriteParams { plane, ..params };
        let slots = [put.lists.clone(), put.rows.clone(), put.constants.clone(), written.clone()];
        let groups = call.recorder.groups(units.div_ceil(ROWS))?;
        call.recorder.dispatch(&kernel, &params, &slots, groups)?;
        if let Some(tail) = &tail {
            tail.encode(call.recorder, &params, slots)?;
        }
    }
    Ok(())
}
