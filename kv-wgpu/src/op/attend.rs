//! Attention over cached rows: partial results of KV splits, and their merge.
mod form;

use kv_core::error::DeviceError;
use kv_core::plan::{AttendArgs, AttentionOptions, AttentionPlan, Mask};

use super::pad::{self, Owned};
use crate::buffer::WgpuBuffer;
use crate::device::unsupported;
use crate::params::{AttendParams, MaskOptions, MergeParams, Plane, Tensor};
use crate::pipelines::Kernel;
use crate::queue::WgpuQueue;
use crate::recording::Slot;
use crate::steps::Step;
use crate::tensors::Room;
#[cfg(test)]
pub(crate) use form::kernels;
use form::{Form, Rows, Side};
use kv_core::num::{to_offset, to_u32};

const OPERATION: &str = "attend";
/// Limit for the bytes of partial results: longer prompts take several rounds.
const PARTS_BYTES: u64 = 32 << 20;

/// Parameters and bindings that all dispatches of a call share.
struct Work {
    form: Form,
    merge: Kernel,
    params: AttendParams,
    merged: MergeParams,
    /// Query, constants of K, constants of V.
    inputs: [Slot; 3],
    sink_logits: Slot,
    /// Output, and the log-sum-exp if it was requested.
    outputs: Vec<Slot>,
    tiles: u32,
    kv_heads: u32,
}

pub(crate) fn attend(
    queue: &mut WgpuQueue,
    plan: &AttentionPlan<'_>,
    mut args: AttendArgs<'_, WgpuBuffer>,
) -> Result<(), DeviceError> {
    let step = queue.steps.get(&mut queue.recorder, plan.batch(), plan.tables())?;
    let room =
        Room { entries: plan.sequences().len(), longest: plan.q_len_max(), total: plan.total_q() };
    let options = *args.options();
    let mut call = queue.call(OPERATION);
    let (q, q_slot) = call.input(args.q(), room)?;
    let (out, out_slot) = call.output(args.out(), room)?;
    let lse = args.lse().map(|lse| call.output(lse, room)).transpose()?;
    let blocks = plan.tables().num_blocks();
    let (k_view, v_view) = (*args.k_plane(), *args.v_plane());
    let k = call.plane(&k_view, blocks, Some(plan.layout()))?;
    let v = call.plane(&v_view, blocks, Some(plan.layout()))?;
    let inputs = [q_slot, call.constants(&k_view)?, call.constants(&v_view)?];
    let sink_logits = call.recorder.push(options.sink_logits().unwrap_or(&[0.0; 4]))?.into();
    let group = group(&q, &k, &v)?;
    let most = plan.sequences().iter().map(|s| s.q_len).max().unwrap_or(0) * group;
    let rows = Rows::of(&k, &v, most);
    let units = u64::from(plan.total_q()) * u64::from(group);
    let units = units.checked_div(rows.count.into()).unwrap_or(0);
    let splits = plan.sequences().iter().map(|s| s.num_splits).max().unwrap_or(0).max(1);
    // `AttendArgs` refuses planes of K and V with segments of different blocks.
    let segments = k_view.layout().num_segments();
    let slices = splits * segments;
    let (k_constants, v_constants) =
        (k_view.layout().has_constants().into(), v_view.layout().has_constants().into());
    let params = AttendParams {
        plan: step.plan,
        q,
        k,
        v,
        mask: mask_options(&options),
        scale: options.scale(),
        soft_cap: options.soft_cap().unwrap_or(0.0),
        group,
        splits,
        slices,
        k_constants,
        v_constants,
        ..AttendParams::default()
    };
    let merged = MergeParams {
        plan: step.plan,
        out,
        lse: lse.as_ref().map(|(lse, _)| *lse).unwrap_or_default(),
        v,
        group,
        splits,
        slices,
        segments,
        rows: rows.count,
        sink_logits: options.sink_logits().is_some().into(),
        v_constants,
        ..MergeParams::default()
    };
    let merge = form::merge(lse.is_some(), out.dtype, v.transforms != 0);
    let lse_slot = lse.as_ref().map(|(_, slot)| slot.clone());
    let work = Work {
        form: Form::of(&k, &v, rows),
        merge,
        params,
        merged,
        inputs,
        sink_logits,
        outputs: std::iter::once(out_slot.clone()).chain(lse_slot).collect(),
        tiles: to_u32(to_offset(units)) + to_u32(room.entries),
        kv_heads: k.num_kv_heads,
    };
    run(queue, &step, &work, (&k_view, &v_view))?;
    fill(queue, &step, (out, out_slot), (plan.total_q(), 0.0))?;
    lse.map_or(Ok(()), |lse| fill(queue, &step, lse, (plan.total_q(), f32::NEG_INFINITY)))
}

/// Returns how many query heads share a kv head.
fn group(q: &Tensor, k: &Plane, v: &Plane) -> Result<u32, DeviceError> {
    match q.heads.checked_div(k.num_kv_heads) {
        Some(group) if group > 0 && v.num_kv_heads == k.num_kv_heads => Ok(group),
        _ => {
            let why =
                format!("{} query heads do not divide by {} kv heads", q.heads, k.num_kv_heads);
            Err(unsupported(OPERATION, why))
        }
    }
}

fn mask_options(options: &AttentionOptions<'_>) -> MaskOptions {
    MaskOptions {
        full: (options.mask() == Mask::Full).into(),
        window_left: options.window_left().unwrap_or(u32::MAX),
        sink_tokens: options.sink_tokens(),
        pad: 0,
    }
}

fn run(
    queue: &mut WgpuQueue,
    step: &Step,
    work: &Work,
    (k_view, v_view): (
        &kv_core::backend::PlaneView<'_, WgpuBuffer>,
        &kv_core::backend::PlaneView<'_, WgpuBuffer>,
    ),
) -> Result<(), DeviceError> {
    let shared = &std::sync::Arc::clone(&queue.recorder.shared);
    let Work { params, merged, .. } = work;
    // Words of a tile of rows: its values, then the maximum and the sum of each row.
    let rows = u64::from(work.kv_heads) * u64::from(params.slices) * u64::from(merged.rows);
    let each = rows * (u64::from(params.v.head_dim) + 2);
    let most = PARTS_BYTES.min(shared.limits.max_storage_buffer_binding_size);
    let columns = shared.limits.max_compute_workgroups_per_dimension;
    let together = most.checked_div(each * 4).unwrap_or(0).max(1);
    // At most one part for each tile.
    let together = u32::try_from(together).unwrap_or(u32::MAX).min(columns).min(work.tiles);
    if together == 0 {
        return Ok(());
    }
    let stats = rows * u64::from(params.v.head_dim) * u64::from(together);
    let bytes = each * u64::from(together) * 4;
    let memory = queue.scratch.reserve(shared, bytes, OPERATION)?;
    let stats = u32::try_from(stats)
        .map_err(|_| unsupported(OPERATION, "partial results beyond 4 Gi words"))?;
    let mut first_tile = 0;
    while first_tile < work.tiles {
        let tiles = together.min(work.tiles - first_tile);
        for segment in 0..merged.segments {
            let call = queue.call(OPERATION);
            let (k, k_slot) = call.segment((k_view, &params.k), segment, false)?;
            let (v, v_slot) = call.segment((v_view, &params.v), segment, false)?;
            let params = AttendParams { k, v, first_tile, segment, stats, ..*params };
            let (parts, _) = call.recorder.slot(&memory, (0, bytes), (true, OPERATION))?;
            let [q, k_constants, v_constants] = work.inputs.clone();
            let slots = [step.lists.clone(), q, k_slot, v_slot, k_constants, v_constants, parts];
            let groups = [tiles, work.kv_heads, params.splits];
            let form = Form { k: Side::of(&k), v: Side::of(&v), ..work.form };
            call.recorder.dispatch(&form.kernel(), &params, &slots, groups)?;
        }
        let recorder = &mut queue.recorder;
        let (parts, _) = recorder.slot(&memory, (0, bytes), (false, OPERATION))?;
        let merged = MergeParams { first_tile, stats, ..*merged };
        let [_, _, v_constants] = work.inputs.clone();
        let inputs = [step.lists.clone(), parts, work.sink_logits.clone(), v_constants];
        let slots = [inputs.as_slice(), &work.outputs].concat();
        recorder.dispatch(&work.merge, &merged, &slots, [tiles, work.kv_heads, 1])?;
        first_tile += tiles;
    }
    Ok(())
}

/// Fills the rows that belong to no query.
fn fill(
    queue: &mut WgpuQueue,
    step: &Step,
    out: (Tensor, Slot),
    (total, value): (u32, f32),
) -> Result<(), DeviceError> {
    let owned = Owned {
        lists: step.lists.clone(),
        entries: step.plan.entries,
        count: step.plan.num_sequences,
        total,
    };
    pad::pad_rows(&mut queue.recorder, out, owned, value)
}
