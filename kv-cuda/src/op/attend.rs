//! Attention over cached rows.
use kv_core::DeviceError;
use kv_core::plan::{AttendArgs, AttentionPlan, Mask};

use super::pad::{self, Owned};
use crate::buffer::CudaBuffer;
use crate::gpu::Launch;
use crate::num::to_u32;
use crate::params::{AttendParams, Tensor};
use crate::queue::{CudaQueue, Parts};
use crate::step::{Extent, StepPlan};
use crate::tensors::{Room, unsupported};

const OPERATION: &str = "attend";

pub(crate) fn attend(
    queue: &mut CudaQueue,
    plan: &AttentionPlan<'_>,
    mut args: AttendArgs<'_, CudaBuffer>,
) -> Result<(), DeviceError> {
    let room =
        Room { entries: plan.sequences().len(), longest: plan.q_len_max(), total: plan.total_q() };
    let step = queue.step(plan.batch(), plan.tables())?;
    let options = *args.options();
    let Parts { call, pack, constants, mut way } = queue.parts(OPERATION);
    let (q, q_from) = call.input(args.q(), room, pack)?;
    let out = call.output(args.out(), room)?;
    let lse = args.lse().map(|lse| call.output(lse, room)).transpose()?;
    let (blocks, planned) = (plan.tables().num_blocks(), Some(plan.layout()));
    let k_plane = call.plane(args.k_plane(), blocks, planned, (constants, &mut way))?;
    let v_plane = call.plane(args.v_plane(), blocks, planned, (constants, &mut way))?;
    let kv_heads = args.k_plane().layout().num_kv_heads();
    let group = q.heads.checked_div(kv_heads).unwrap_or(0);
    if group == 0 || args.v_plane().layout().num_kv_heads() != kv_heads {
        return Err(unsupported(OPERATION, format!("{} query, {kv_heads} kv heads", q.heads)));
    }
    let sinks = options.sink_logits().map(|sinks| constants.get(&mut way, sinks)).transpose()?;
    // Partial results: a row of V and two numbers for every query head.
    let parts = step.extent.parts.saturating_mul(q.heads.into());
    let dim_v = u64::from(args.v_plane().layout().head_dim());
    let part_rows = pack.room(parts.saturating_mul(dim_v).saturating_mul(4));
    let part_stats = pack.room(parts.saturating_mul(8));
    let base = queue.send()?;
    let mut params = AttendParams {
        plan: step.plan,
        q: q_from.rows(q, base),
        out,
        lse: lse.unwrap_or_default(),
        k_plane,
        v_plane,
        sink_logits: sinks.unwrap_or(0),
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
        q_len_min: 0,
        q_len_max: u32::MAX,
    };
    let splits_max = plan.sequences().iter().map(|s| s.num_splits).max().unwrap_or(0);
    run(queue, &mut params, (&step.extent, splits_max))?;
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

/// The kernel for every shape, and how it is cut; the numbers are explained in `attend.cu`.
fn launch(params: &AttendParams, extent: &Extent, splits_max: u32) -> Launch {
    let up = |n: u32| n.checked_next_multiple_of(64).unwrap_or(u32::MAX);
    let dims = up(params.k_plane.head_dim).saturating_add(up(params.v_plane.head_dim));
    // By head_dim alone, because results differ in the last bits.
    let (kernel, rows) =
        if dims <= DIMS_MAX { ("attend_rows", 4) } else { ("attend_rows_large", 1) };
    let units = extent.total_q.saturating_mul(params.group).checked_div(4 * rows).unwrap_or(0);
    let shared_bytes = dims.saturating_add(72).saturating_mul(16 * rows).saturating_add(43008 + 16);
    let grid =
        [units.saturating_add(extent.sequences), params.k_plane.num_kv_heads, splits_max.max(1)];
    Launch { kernel, grid, threads: 128, shared_bytes }
}

/// `head_dim` of K and V together up to which four rows a warp fit the shared memory that every
/// card since sm_80 has.
const DIMS_MAX: u32 = 768;

fn run(
    queue: &mut CudaQueue,
    params: &mut AttendParams,
    (extent, splits_max): (&Extent, u32),
) -> Result<(), DeviceError> {
    let launch = launch(params, extent, splits_max);
    let [units, heads, _] = launch.grid;
    params.counters = queue.counters(u64::from(units).saturating_mul(heads.into()))?;
    // SAFETY: every address is that of memory whose extent was compared with what plan and layouts
    // reach, and which its owner, or the queue, keeps until the stream has passed.
    unsafe { queue.launch(&launch, params) }
}
