//! The scatter of new K and V rows into their slots.
use kv_core::DeviceError;
use kv_core::plan::{WriteArgs, WritePlan};

use crate::buffer::CudaBuffer;
use crate::gpu::Launch;
use crate::params::WriteParams;
use crate::queue::{CudaQueue, Parts};
use crate::tensors::Room;

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
    let Parts { call, pack, constants, mut way } = queue.parts(OPERATION);
    let (k, k_from) = call.input(args.k(), room, pack)?;
    let (v, v_from) = call.input(args.v(), room, pack)?;
    let (blocks, planned) = (plan.tables().num_blocks(), Some(plan.layout()));
    let k_plane = call.plane(args.k_plane(), blocks, planned, (constants, &mut way))?;
    let v_plane = call.plane(args.v_plane(), blocks, planned, (constants, &mut way))?;
    let base = queue.send()?;
    let (k, v) = (k_from.rows(k, base), v_from.rows(v, base));
    let params = WriteParams { plan: step.plan, k, v, k_plane, v_plane };
    let launch = launch(&params, plan);
    // SAFETY: every address is that of memory whose extent was compared with what plan and layouts
    // reach, and which its owner, or the queue, keeps until the stream has passed.
    unsafe { queue.launch(&launch, &params) }
}

fn launch(params: &WriteParams, plan: &WritePlan<'_>) -> Launch {
    let _ = (params, plan);
    Launch { kernel: "write_rows", grid: [1, 1, 1], threads: 128, shared_bytes: 0 }
}
