//! Attention over cached rows: which kernel takes which entries of the batch.
//!
//! A few queries of an entry are decoding, more are prefill. Either has kernels for tensor cores
//! that take the usual shapes; the kernel for everything takes the rest. Which kernel takes an
//! entry follows from its number of queries and the layer, never from its neighbours.
mod launches;

use kv_core::DeviceError;
use kv_core::plan::{AttendArgs, AttentionPlan, Determinism, Mask};

use self::launches::Prefill;
pub(super) use self::launches::head_dim_max;
use super::pad::{self, Owned};
use crate::buffer::CudaBuffer;
use crate::decode::{self, Shape, Work};
use crate::params::{AttendParams, DecodeParams, Tensor};
use crate::queue::{CudaQueue, Parts};
use crate::step::{Extent, StepPlan};
use crate::tensors::{Room, unsupported};
use kv_core::num::to_u32;

const OPERATION: &str = "attend";
/// Queries of an entry up to which it is decoding. The core cuts the contexts of no other entries.
const DECODE_Q_LEN_MAX: u32 = 8;

/// Who takes the entries of a batch.
#[derive(Debug)]
struct Takers {
    decode: Option<(Shape, Work)>,
    prefill: Option<Prefill>,
}

impl Takers {
    /// Numbers of queries that are left for the kernel for everything, `None` where none is.
    fn rest(&self, q_len_max: u32) -> Option<(u32, u32)> {
        let from = if self.decode.is_some() { DECODE_Q_LEN_MAX.saturating_add(1) } else { 0 };
        let to = if self.prefill.is_some() { DECODE_Q_LEN_MAX } else { u32::MAX };
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
    let Parts { call, pack, constants, mut way } = queue.parts(OPERATION);
    let (q, q_from) = call.input(args.q(), room, pack)?;
    let out = call.output(args.out(), room)?;
    let lse = args.lse().map(|lse| call.output(lse, room)).transpose()?;
    let (blocks, planned) = (plan.tables().num_blocks(), Some(plan.layout()));
    let k_plane = call.plane(args.k_plane(), blocks, planned, (constants, &mut way))?;
    let v_plane = call.plane(args.v_plane(), blocks, planned, (constants, &mut way))?;
    let kv_heads = k_plane.num_kv_heads;
    let group = q.heads.checked_div(kv_heads).unwrap_or(0);
    if group == 0 || v_plane.num_kv_heads != kv_heads {
        return Err(unsupported(OPERATION, format!("{} query, {kv_heads} kv heads", q.heads)));
    }
    let sink_logits = options
        .sink_logits()
        .map(|sink_logits| constants.get((&mut way, call.held), sink_logits))
        .transpose()?;
    let mut params = AttendParams {
        plan: step.plan,
        q,
        out,
        lse: lse.unwrap_or_default(),
        k_plane,
        v_plane,
        sink_logits: sink_logits.unwrap_or(0),
        part_index: step.part_index,
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
    let takers = takers(&params, facts, is_invariant);
    // The kernels run one after another and share the room.
    let (rows, stats) = part_bytes(&params, &takers, &step.room);
    let (rows, stats) = (pack.room(rows), pack.room(stats));
    let base = queue.send()?;
    params.q = q_from.rows(params.q, base);
    params.part_rows = rows.from(base);
    params.part_stats = stats.from(base);
    run(queue, plan, &params, (&takers, &step))?;
    fill(queue, plan, (&step, out), 0.0)?;
    lse.map_or(Ok(()), |lse| fill(queue, plan, (&step, lse), f32::NEG_INFINITY))
}

fn takers(params: &AttendParams, facts: (u32, u32), invariant: bool) -> Takers {
    let (multiprocessors, shared_bytes_max) = facts;
    let (q, k, v) = (&params.q, &params.k_plane, &params.v_plane);
    // A tensor from the host is not there yet; it will lie well.
    let shape = Shape::of((q, &params.out), (k, v), shared_bytes_max);
    let shape = shape.filter(|_| params.lse.data == 0 || decode::scores_exactly(k));
    let work = Work {
        slots: multiprocessors.saturating_mul(2).max(1),
        kv_heads: k.num_kv_heads,
        group: params.group,
        full: params.full != 0,
        window_left: params.window_left,
        // They say nothing without a window.
        sink_tokens: if params.window_left == u32::MAX { 0 } else { params.sink_tokens },
        invariant,
        q_len_max: DECODE_Q_LEN_MAX,
    };
    Takers {
        decode: shape.map(|shape| (shape, work)),
        prefill: Prefill::of(params, shared_bytes_max),
    }
}

/// Bytes of partial rows and of what belongs to them.
fn part_bytes(params: &AttendParams, takers: &Takers, room: &Extent) -> (u64, u64) {
    let dim = u64::from(params.v_plane.head_dim);
    if let Some((_, work)) = &takers.decode {
        let rows = decode::room(work, room).partials.saturating_mul(16);
        return (rows.saturating_mul(dim).saturating_mul(4), rows.saturating_mul(4));
    }
    let rows = room.parts.saturating_mul(params.q.heads.into());
    (rows.saturating_mul(dim).saturating_mul(4), rows.saturating_mul(8))
}

/// Starts the kernels.
fn run(
    queue: &mut CudaQueue,
    plan: &AttentionPlan<'_>,
    params: &AttendParams,
    (takers, step): (&Takers, &StepPlan),
) -> Result<(), DeviceError> {
    let (extent, room) = (&step.extent, &step.room);
    let few = |queries: u32| (1..=DECODE_Q_LEN_MAX).contains(&queries);
    let has_few = queue.is_capturing() || plan.sequences().iter().any(|s| few(s.q_len));
    if let Some((shape, work)) = takers.decode.as_ref().filter(|_| has_few) {
        let partials = decode::room(work, room).partials;
        let (pieces, starts) = queue.decode(plan.batch().id(), work)?;
        let counters = queue.counters(partials)?;
        let params = DecodeParams {
            attend: AttendParams { counters, q_len_max: DECODE_Q_LEN_MAX, ..*params },
            pieces,
            starts,
            units: shape.units,
            block_shift: shape.block_shift,
        };
        // SAFETY: every address is that of memory whose extent was compared with what plan and
        // layouts reach, and which its owner, or the queue, keeps until the stream has passed.
        unsafe { queue.launch(&launches::decode(shape, work), &params)? };
    }
    if let Some(taker) = takers.prefill.filter(|_| extent.q_len_max > DECODE_Q_LEN_MAX) {
        let q_len_min = DECODE_Q_LEN_MAX.saturating_add(1);
        let params = AttendParams { q_len_min, ..*params };
        // SAFETY: as above.
        unsafe { queue.launch(&launches::prefill(taker, &params, extent), &params)? };
    }
    if takers.rest(room.q_len_max).is_some() {
        let splits = plan.sequences().iter().map(|s| s.num_splits).max().unwrap_or(0);
        let [units, heads, _] = launches::rows(params, room, splits).grid;
        let counters = queue.counters(u64::from(units).saturating_mul(heads.into()))?;
        let Some((q_len_min, q_len_max)) = takers.rest(extent.q_len_max) else { return Ok(()) };
        let launch = launches::rows(params, extent, splits);
        let params = AttendParams { counters, q_len_min, q_len_max, ..*params };
        // SAFETY: as above.
        unsafe { queue.launch(&launch, &params)? };
    }
    Ok(())
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
