//! Attention over cached rows.
use kv_core::plan::{AttendArgs, AttentionPlan, Mask};
use kv_core::DeviceError;

use super::pad::{self, Owned};
use crate::buffer::CudaBuffer;
use crate::gpu::Launch;
use crate::num::{to_u32, to_u64};
use crate::params::{AttendParams, Tensor};
use crate::queue::CudaQueue;
use crate::step::StepPlan;
use crate::tensors::{Call, Room, unsupported};

const OPERATION: &str = "attend";

pub(crate) fn attend(
    queue: &mut CudaQueue,
    plan: &AttentionPlan<'_>,
    mut args: AttendArgs<'_, CudaBuffer>,
) -> Result<(), DeviceError> {
    let room =
        Room { entries: plan.sequences().len(), longest: plan.q_len_max(), total: plan.total_q() };
    let step = queue.step(plan.batch(), plan.tables())?;
    queue.pack.clear();
    let options = *args.options();
    let call = Call { gpu: &queue.gpu, operation: OPERATION };
    let pack = &mut queue.pack;
    let (q, q_from) = call.input(args.q(), room, pack)?;
    let out = call.output(args.out(), room)?;
    let lse = args.lse().map(|lse| call.output(lse, room)).transpose()?;
    let (blocks, planned) = (plan.tables().num_blocks(), Some(plan.layout()));
    let k_plane = call.plane(args.k_plane(), blocks, planned, pack)?;
    let v_plane = call.plane(args.v_plane(), blocks, planned, pack)?;
    let kv_heads = args.k_plane().layout().num_kv_heads();
    let group = q.heads.checked_div(kv_heads).unwrap_or(0);
    if group == 0 || args.v_plane().layout().num_kv_heads() != kv_heads {
        return Err(unsupported(OPERATION, format!("{} query, {kv_heads} kv heads", q.heads)));
    }
    let sinks = options.sink_logits().map(|sinks| pack.push(sinks));
    // Partial results: a row of V and two numbers for every query head.
    let parts = step.extent.parts.saturating_mul(q.heads.into());
    let dim_v = u64::from(args.v_plane().layout().head_dim());
    let part_rows = pack.room(parts.saturating_mul(dim_v).saturating_mul(4));
    let part_stats = pack.room(parts.saturating_mul(8));
    let base = queue.send()?;
    let mut params = AttendParams {
        plan: step.plan,
        q,
        out,
        lse: lse.unwrap_or_default(),
        k_plane: k_plane(base),
        v_plane: v_plane(base),
        sink_logits: sinks.map_or(0, |at| at.from(base)),
        part_rows: part_rows.from(base),
        part_stats: part_stats.from(base),
        part_index: step.part_index,
        counters: 0,
        scale: options.scale(),
        soft_cap: options.cap().unwrap_or(0.0),
        full: (options.mask() == Mask::Full).into(),
        window_left: options.window().unwrap_or(u32::MAX),
        sink_tokens: options.num_sink_tokens(),
        group,
    };
    params.q.data = q_from.at(base);
    params.counters = queue.counters(counters(&params, plan))?;
    run(queue, &params, plan)?;
    fill(queue, plan, (&step, out), 0.0)?;
    lse.map_or(Ok(()), |lse| fill(queue, plan, (&step, lse), f32::NEG_INFINITY))
}

/// Fills the rows that no query owns.
fn fill(
    queue: &mut CudaQueue,
    plan: &AttentionPlan<'_>,
    (step, out): (&StepPlan, Tensor),
    value: f32,
) -> Result<(), DeviceError> {
    let count = to_u32(plan.sequences().len());
    let owned = Owned { entries: step.queries, count, counts: step.plan.counts };
    pad::pad_rows(queue, (out, owned), plan.total_q(), value)
}

fn counters(params: &AttendParams, plan: &AttentionPlan<'_>) -> u64 {
    to_u64(plan.sequences().len()).saturating_mul(params.q.heads.into())
}

fn run(
    queue: &mut CudaQueue,
    params: &AttendParams,
    plan: &AttentionPlan<'_>,
) -> Result<(), DeviceError> {
    let _ = plan;
    let launch = Launch { kernel: "attend_rows", grid: [1, 1, 1], threads: 128, shared_bytes: 0 };
    // SAFETY: every address is that of memory whose extent was compared with what plan and layouts
    // reach, and which its owner, or the queue, keeps until the stream has passed.
    unsafe { queue.launch(&launch, params) }
}
