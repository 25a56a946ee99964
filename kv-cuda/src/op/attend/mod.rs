//! Attention over cached rows, and the kernel for each entry of the batch.
//!
//! An entry with few queries is decoding, one with more is prefill. Both have tensor-core kernels
//! for the usual shapes; the general kernel handles everything else. The kernel for an entry
//! depends on its number of queries and the layer, never on the other entries.
mod launches;

use kv_core::error::DeviceError;
use kv_core::plan::{AttendArgs, AttentionPlan, Determinism, Mask};

use self::launches::Prefill;
pub(super) use self::launches::head_dim_max;
use super::Refusal;
use super::pad::{self, Owned};
use crate::buffer::CudaBuffer;
use crate::capture::RowsOf;
use crate::decode::{self, Kind, Shape, Work};
use crate::params::{AttendParams, DecodeParams, PrefillParams, Tensor};
use crate::queue::{CudaQueue, Parts};
use crate::step::{Extent, StepPlan};
use crate::tensors::{Room, unsupported};
use kv_core::num::to_u32;

const OPERATION: &str = "attend";

/// The tensor-core kernels for a batch, or why the general kernel takes its entries.
#[derive(Debug)]
struct KernelSelection {
    decode: Result<(Shape, Work), Refusal>,
    prefill: Result<(Prefill, Work), Refusal>,
}

impl KernelSelection {
    /// Returns the range of query counts that is left for the general kernel, if any.
    fn rest(&self, q_len_max: u32) -> Option<(u32, u32)> {
        let from = if self.decode.is_ok() { decode::Q_LEN_MAX + 1 } else { 0 };
        let to = if self.prefill.is_ok() { decode::Q_LEN_MAX } else { u32::MAX };
        (from <= to && from <= q_len_max).then_some((from, to))
    }
}

pub(crate) fn attend(
    queue: &mut CudaQueue,
    plan: &AttentionPlan<'_>,
    mut args: AttendArgs<'_, CudaBuffer>,
) -> Result<(), DeviceError> {
    let room =
        Room { entries: plan.sequences().len(), longest: plan.q_len_max(), total: plan.total_q() };
    let step = queue.step(plan.batch(), plan.tables())?;
    let facts = (queue.gpu.facts().multiprocessors, queue.gpu.facts().shared_bytes_max);
    let options = *args.options();
    let Parts { call, pack, constants, mut transfer } = queue.parts(OPERATION);
    let (q, q_from) = call.input(args.q(), room, pack)?;
    let out = call.output(args.out(), room)?;
    let lse = args.lse().map(|lse| call.output(lse, room)).transpose()?;
    call.held.note_rows(RowsOf::Queries, args.q().rows());
    for output in args.outputs().into_iter().flatten() {
        call.held.note_rows(RowsOf::Queries, output.rows());
    }
    let (blocks, planned) = (plan.tables().num_blocks(), Some(plan.layout()));
    let k_plane = call.plane(args.k_plane(), blocks, planned, (constants, &mut transfer))?;
    let v_plane = call.plane(args.v_plane(), blocks, planned, (constants, &mut transfer))?;
    let kv_heads = k_plane.num_kv_heads;
    let group = q.heads.checked_div(kv_heads).unwrap_or(0);
    if group == 0 || v_plane.num_kv_heads != kv_heads {
        return Err(unsupported(OPERATION, format!("{} query, {kv_heads} kv heads", q.heads)));
    }
    launches::require_rows(step.extent.total_q, group)?;
    let sink_logits = options
        .sink_logits()
        .map(|sink_logits| constants.get((&mut transfer, call.held), sink_logits))
        .transpose()?;
    let mut params = AttendParams {
        plan: step.plan,
        q,
        out,
        lse: lse.unwrap_or_default(),
        k_plane,
        v_plane,
        sink_logits: sink_logits.unwrap_or(0),
        partial_index: step.partial_index,
        scale: options.scale(),
        soft_cap: options.soft_cap().unwrap_or(0.0),
        full: (options.mask() == Mask::Full).into(),
        window_left: options.window_left().unwrap_or(u32::MAX),
        sink_tokens: options.sink_tokens(),
        group,
        q_len_max: u32::MAX,
        ..AttendParams::default()
    };
    let is_invariant = plan.batch().determinism() == Determinism::BatchInvariant;
    let kernels = select_kernels(&params, facts, is_invariant);
    // The kernels run one after another and share the memory for partial results.
    let (rows, stats) = partial_bytes(&params, &kernels, &step.room);
    let (rows, stats) = (pack.room(rows), pack.room(stats));
    let base = queue.send()?;
    params.q = q_from.rows(params.q, base);
    params.partial_rows = rows.from(base);
    params.partial_stats = stats.from(base);
    let is_filled = run(queue, plan, &params, (&kernels, &step))?;
    if is_filled {
        return Ok(());
    }
    fill(queue, plan, (&step, out), 0.0)?;
    lse.map_or(Ok(()), |lse| fill(queue, plan, (&step, lse), f32::NEG_INFINITY))
}

fn select_kernels(params: &AttendParams, facts: (u32, u32), invariant: bool) -> KernelSelection {
    let (multiprocessors, shared_bytes_max) = facts;
    let shape = Shape::of(params, shared_bytes_max);
    let work = |kind| Work {
        kind,
        slots: (multiprocessors * 2).max(1),
        kv_heads: params.k_plane.num_kv_heads,
        group: params.group,
        full: params.full != 0,
        window_left: params.window_left,
        // Without a window, sink tokens change nothing.
        sink_tokens: if params.window_left == u32::MAX { 0 } else { params.sink_tokens },
        invariant,
        q_len_max: decode::Q_LEN_MAX,
    };
    let prefill = Prefill::of(params, shared_bytes_max);
    KernelSelection {
        decode: shape.map(|shape| (shape, work(Kind::Decode))),
        prefill: prefill.map(|prefill| (prefill, work(Kind::Prefill { rows: prefill.rows }))),
    }
}

/// Returns the bytes of partial rows, and of their maxima and sums; for step limits, which may be
/// any, `u64::MAX` if more.
fn partial_bytes(params: &AttendParams, kernels: &KernelSelection, room: &Extent) -> (u64, u64) {
    let dim = u64::from(params.v_plane.head_dim);
    let prefill = kernels.prefill.ok().filter(|_| room.q_len_max > decode::Q_LEN_MAX);
    let prefill = prefill.map_or(0, |(prefill, work)| {
        decode::Room::of(&work, room).partials.saturating_mul(prefill.partial_bytes(dim))
    });
    let (rows, stats) = if let Ok((_, work)) = &kernels.decode {
        let of_partial = decode::Rows::of(work, room).of_partial;
        (decode::Room::of(work, room).partials.saturating_mul(of_partial), 4)
    } else {
        (room.partials.saturating_mul(params.q.heads.into()), 8)
    };
    (rows.saturating_mul(dim).saturating_mul(4).max(prefill), rows.saturating_mul(stats))
}

/// Launches the kernels. Returns whether one of them fills the rows that belong to no query, as
/// those for decoding do (`decode_fill.h`).
fn run(
    queue: &mut CudaQueue,
    plan: &AttentionPlan<'_>,
    params: &AttendParams,
    (kernels, step): (&KernelSelection, &StepPlan),
) -> Result<bool, DeviceError> {
    let (extent, room) = (&step.extent, &step.room);
    let few = |queries: u32| (1..=decode::Q_LEN_MAX).contains(&queries);
    let has_few = queue.is_capturing() || plan.sequences().iter().any(|s| few(s.q_len));
    let decode = kernels.decode.as_ref().ok().filter(|_| has_few);
    let is_filled = decode.is_some();
    if let Some((shape, work)) = decode {
        let partials = decode::Room::of(work, room).partials;
        let q_len_max = decode::Rows::of(work, room).q_len_max;
        let (items, starts) = queue.schedule(plan.batch().id(), work)?;
        let counters = queue.counters(partials)?;
        let params = DecodeParams {
            attend: AttendParams { counters, q_len_max, ..*params },
            items,
            starts,
            stages: shape.stages,
            block_shift: shape.block_shift,
        };
        // SAFETY: the extent of every address was compared with what plan and layouts reach, and
        // the owner of the memory, or the queue, keeps it until the stream has passed.
        unsafe { queue.launch(&launches::decode(shape, work), &params)? };
    }
    let prefill = kernels.prefill.ok().filter(|_| extent.q_len_max > decode::Q_LEN_MAX);
    if let Some((prefill, work)) = prefill {
        let (items, count) = queue.schedule(plan.batch().id(), &work)?;
        let counters = queue.counters(decode::Room::of(&work, room).partials)?;
        let params = PrefillParams { attend: AttendParams { counters, ..*params }, items, count };
        // SAFETY: as above.
        unsafe { queue.launch(&launches::prefill(prefill, &work, extent), &params)? };
    }
    if kernels.rest(room.q_len_max).is_some() {
        let splits = plan.sequences().iter().map(|s| s.num_splits).max().unwrap_or(0);
        let [blocks, heads, _] = launches::rows(params, room, splits).grid;
        let counters = queue.counters(u64::from(blocks) * u64::from(heads))?;
        let Some((q_len_min, q_len_max)) = kernels.rest(extent.q_len_max) else {
            return Ok(is_filled);
        };
        let launch = launches::rows(params, extent, splits);
        let params = AttendParams { counters, q_len_min, q_len_max, ..*params };
        // SAFETY: as above.
        unsafe { queue.launch(&launch, &params)? };
    }
    Ok(is_filled)
}

/// Fills the rows that belong to no query by a launch of its own.
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
