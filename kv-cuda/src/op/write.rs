//! The scatter of new K and V rows into their slots.
use kv_core::DeviceError;
use kv_core::plan::{WriteArgs, WritePlan};

use crate::buffer::CudaBuffer;
use crate::gpu::Launch;
use crate::params::WriteParams;
use crate::queue::CudaQueue;
use crate::tensors::{Call, Room};

const OPERATION: &str = "write_kv";

pub(crate) fn write_kv(
    queue: &mut CudaQueue,
    plan: &WritePlan<'_>,
    args: &WriteArgs<'_, CudaBuffer>,
) -> Result<(), DeviceError> {
    let room = Room {
        entries: plan.sequences().len(),
        longest: plan.new_len_max(),
        total: plan.total_new(),
    };
    let step = queue.step(plan.batch(), plan.tables())?;
    queue.pack.clear();
    let call = Call { gpu: &queue.gpu, operation: OPERATION };
    let pack = &mut queue.pack;
    let (k, k_from) = call.input(args.k(), room, pack)?;
    let (v, v_from) = call.input(args.v(), room, pack)?;
    let (blocks, planned) = (plan.tables().num_blocks(), Some(plan.layout()));
    let k_plane = call.plane(args.k_plane(), blocks, planned, pack)?;
    let v_plane = call.plane(args.v_plane(), blocks, planned, pack)?;
    let base = queue.send()?;
    let mut params = WriteParams {
        plan: step.plan,
        k,
        v,
        k_plane: k_plane(base),
        v_plane: v_plane(base),
    };
    (params.k.data, params.v.data) = (k_from.at(base), v_from.at(base));
    let launch = launch(&params, plan);
    // SAFETY: every address is that of memory whose extent was compared with what plan and layouts
    // reach, and which its owner, or the queue, keeps until the stream has passed.
    unsafe { queue.launch(&launch, &params) }
}

fn launch(params: &WriteParams, plan: &WritePlan<'_>) -> Launch {
    let _ = (params, plan);
    Launch { kernel: "write_rows", grid: [1, 1, 1], threads: 128, shared_bytes: 0 }
}
