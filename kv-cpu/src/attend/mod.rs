//! Attention over cached rows: checks a call, cuts it into work items, runs them and merges.
//!
//! | file | what |
//! |---|---|
//! | `call` | what all work items of a call share, and how a query row ends |
//! | `plan` | batch to work items and merges |
//! | `strategy` | which algorithm runs a work item, and why not a faster one |
//! | `visible` | which keys queries see |
//! | `key_runs` | where visible keys lie in memory |
//! | `amx` | AMX matrix products, query rows as rows or as columns |
//! | `direct` | one query, K and V where they lie |
//! | `tiled` | many query rows, a tile decoded once |
//! | `merge`, `partials` | the merge of context splits |
//!
//! Keys that no query sees cost nothing: no work item and no read.
#[cfg(any(target_arch = "x86_64", test))]
mod amx;
mod call;
mod direct;
mod key_runs;
mod merge;
mod partials;
mod plan;
mod scales;
mod strategy;
mod tiled;
mod visible;

use kv_core::KvFormat;
use kv_core::error::DeviceError;
use kv_core::num::to_usize;
use kv_core::plan::{AttendArgs, AttentionPlan, PlannedSequence};
use kv_cpu_kernels::{Kernels, OnlineSoftmax, Partial, RowLayout};
use kv_quant::transform;

use self::call::{AttendCall, Heads, OPERATION};
use self::partials::Partials;
use self::plan::WorkItem;
pub(crate) use self::plan::WorkPlan;
use self::strategy::{Explanation, Facts, Strategy, choose, choose_vectors};
use crate::access::Access;
use crate::buffer::CpuBuffer;
use crate::context::Cpu;
use crate::layout::{PlaneRows, Room, RowAt, RowsIn, RowsOut};
use crate::scratch::{Scratch, Workspace};

/// Multiplications below which one thread is faster than several.
const WORK_PARALLEL_MIN: u64 = 1 << 17;

pub(crate) fn attend(
    cpu: &Cpu,
    workspace: &mut Workspace,
    plan: &AttentionPlan<'_>,
    mut args: AttendArgs<'_, CpuBuffer>,
) -> Result<(), DeviceError> {
    let Workspace { entries, work, partial_rows, partials, scratch } = workspace;
    let mut access = Access::new(entries, OPERATION);
    let constants = [access.plane(args.k_plane(), false)?, access.plane(args.v_plane(), false)?];
    let q_span = access.input(args.q())?;
    let out_span = access.output(args.out())?;
    let lse_span = args.lse().map(|lse| access.output(lse)).transpose()?;
    let locked = access.lock()?;
    let room =
        Room { entries: plan.sequences().len(), longest: plan.q_len_max(), total: plan.total_q() };
    // SAFETY: entered above.
    let q = unsafe { RowsIn::new(&locked, q_span, *args.q().rows(), room, OPERATION) }?;
    // SAFETY: entered for writing above; no slice of it is made but by `RowsOut`.
    let out = unsafe { RowsOut::new(&locked, out_span, *args.out().rows(), room, OPERATION) }?;
    let lse_rows = args.lse().map(|lse| *lse.rows()).zip(lse_span);
    let lse = lse_rows.map(|(rows, span)| {
        // SAFETY: as for `out`.
        unsafe { RowsOut::new(&locked, span, rows, room, OPERATION) }
    });
    let blocks = plan.tables().num_blocks();
    let planned = Some(plan.layout());
    let [k_constants, v_constants] = constants;
    let (k_view, v_view) = (*args.k_plane(), *args.v_plane());
    // SAFETY: entered above; this operation writes no plane.
    let k = unsafe { PlaneRows::new(&locked, k_view, k_constants, blocks, planned, OPERATION) }?;
    // SAFETY: entered above; this operation writes no plane.
    let v = unsafe { PlaneRows::new(&locked, v_view, v_constants, blocks, planned, OPERATION) }?;
    let heads = Heads::new(q.rows().heads(), k.layout(), v.layout())?;
    let (k, v) = (k.in_pairs(), v.in_pairs());
    let options = *args.options();
    let call = AttendCall { cpu, plan: *plan, options, q, out, lse: lse.transpose()?, k, v, heads };
    work.plan(&call);
    partials.resize(partials.len().max(work.partials), Partial::EMPTY);
    let partial_rows = partial_rows.get(work.partials * heads.stride_v);
    let partials = Partials::new(partial_rows, partials);
    let parallel = call.work() >= WORK_PARALLEL_MIN;
    cpu.threads.run(work.items.len(), parallel, scratch, |scratch, index| {
        run(&call, &work.items[index], scratch, &partials);
    });
    cpu.threads.run(work.merges.len(), parallel, scratch, |scratch, index| {
        merge::run(&call, &work.merges[index], scratch, &partials);
    });
    call.fill_empty(&work.empty);
    call.fill_padding(room);
    Ok(())
}

/// A shape of attention, for [`CpuBackend::explain`](crate::CpuBackend::explain).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttendShape {
    /// Stored formats of K and of V.
    pub formats: [KvFormat; 2],
    /// Values of a row of K and of V.
    pub head_dims: [u32; 2],
    /// Query heads per kv head.
    pub group: u32,
    /// Queries of a sequence in one step.
    pub queries: u32,
}

/// Says which strategy runs a shape, and why no faster one.
pub(crate) fn explain(kernels: Kernels, shape: &AttendShape) -> Option<String> {
    let [k, v] = [0, 1].map(|plane| {
        let (format, dim) = (shape.formats.get(plane)?, shape.head_dims.get(plane)?);
        Some(RowLayout::of(*format, *dim)?.in_pairs().encoding())
    });
    let rows = to_usize(shape.queries) * to_usize(shape.group);
    let facts = Facts { isa: kernels.isa(), queries: shape.queries, rows, k: [k?; 2], v: [v?; 2] };
    Some(Explanation(facts).to_string())
}

/// Runs one work item: its query rows are attended by the fastest strategy, then finished.
fn run(call: &AttendCall<'_>, item: &WorkItem, scratch: &mut Scratch, partials: &Partials<'_>) {
    let facts = call.facts(item.num_queries());
    strategy::log(&facts);
    let mut strategy = choose(&facts);
    if !attend_by(strategy, call, item, scratch) {
        if item.num_heads() > 1 {
            // The strategy of a head must not depend on the heads that share its work item.
            for head in item.kv_heads.0..item.kv_heads.1 {
                run(call, &item.of_head(head), scratch, partials);
            }
            return;
        }
        strategy = choose_vectors(&facts);
        attend_by(strategy, call, item, scratch);
    }
    finish_rows(call, item, padded_rows(strategy, call, facts.rows), scratch, partials);
}

/// Loads the query rows of a work item and attends with them. Returns `false` where AMX gave sums
/// that are not finite.
fn attend_by(
    strategy: Strategy,
    call: &AttendCall<'_>,
    item: &WorkItem,
    scratch: &mut Scratch,
) -> bool {
    let facts = call.facts(item.num_queries());
    let (rows, padded) = (facts.rows, padded_rows(strategy, call, facts.rows));
    let of_item = (item, call.sequence(item.entry));
    load_queries(call, of_item, (rows, padded), scratch);
    match strategy {
        #[cfg(any(target_arch = "x86_64", test))]
        Strategy::AmxGemm | Strategy::AmxNarrow => {
            return amx::run(call, of_item, rows, scratch);
        }
        Strategy::Direct => {
            let [encoding, _] = facts.k;
            let has_words = call.has_bf16_queries() && call.cpu.kernels.takes_words(encoding);
            if has_words {
                load_words(call, item.num_heads() * padded, scratch);
            }
            direct::run(call, of_item, padded, has_words, scratch);
        }
        _ => tiled::run(call, of_item, rows, scratch),
    }
    true
}

/// Returns the query rows per kv head, padded with zeros, that a strategy takes for `rows` rows.
fn padded_rows(strategy: Strategy, call: &AttendCall<'_>, rows: usize) -> usize {
    match strategy {
        #[cfg(any(target_arch = "x86_64", test))]
        Strategy::AmxGemm | Strategy::AmxNarrow => amx::padded_rows(rows),
        Strategy::Direct => call.cpu.kernels.padded_rows(rows),
        _ => rows,
    }
}

/// Writes the rows of a work item, or their partial results where the context is split. Each kv
/// head has `padded` rows.
fn finish_rows(
    call: &AttendCall<'_>,
    item: &WorkItem,
    padded: usize,
    scratch: &mut Scratch,
    partials: &Partials<'_>,
) {
    let (heads, rows) = (item.num_heads(), call.facts(item.num_queries()).rows);
    let (sequence, stride) = (call.sequence(item.entry), call.heads.stride_v);
    let out = scratch.out.get(heads * padded * stride);
    for (head, row) in (0..heads).flat_map(|head| (0..rows).map(move |row| (head, row))) {
        let index = head * padded + row;
        let values = &mut out[index * stride..][..call.heads.dim_v];
        let partial = scratch.states[index].finish();
        let (head, query) = item.place(head, row, call.heads.group);
        if let Some(index) = item.partial(call, head, query) {
            // SAFETY: each query and head of a split belongs to one work item.
            unsafe { partials.put(index, call.heads, partial, values) };
        } else {
            let at = RowAt { entry: item.entry, start: sequence.q_start, token: query };
            // SAFETY: a context that is not split has one work item for each query and head.
            unsafe { call.finish(at, head, partial, values) };
        }
    }
}

/// Decodes the query rows of a work item, `rows` per kv head padded with rows of zeros, and clears
/// their results. Where rows of K are transformed, queries are too, and the mean that is subtracted
/// from keys becomes a bias of the scores.
fn load_queries(
    call: &AttendCall<'_>,
    (item, sequence): (&WorkItem, &PlannedSequence),
    (rows, padded): (usize, usize),
    scratch: &mut Scratch,
) {
    let heads = call.heads;
    let all = item.num_heads() * padded;
    let (q, bias) = (scratch.q.get(all * heads.stride_k), scratch.bias.get(all));
    scratch.out.get(all * heads.stride_v).fill(0.0);
    scratch.states.clear();
    scratch.states.resize(all, OnlineSoftmax::EMPTY);
    let source = RowLayout::plain(call.q.element(), heads.dim_k);
    for (index, (row, bias)) in q.chunks_exact_mut(heads.stride_k).zip(bias).enumerate() {
        *bias = 0.0;
        if index % padded >= rows {
            row.fill(0.0);
            continue;
        }
        let (head, token) = item.place(index / padded, index % padded, heads.group);
        let at = RowAt { entry: item.entry, start: sequence.q_start, token };
        let (values, padding) = row.split_at_mut(heads.dim_k);
        padding.fill(0.0);
        call.cpu.kernels.decode(&source, call.q.get(at, head, 1), values);
        if let Some(constants) = call.k.transform(call.kv_head(head)) {
            *bias = dot(values, constants.mean);
            transform::query(values, &constants);
        }
        if call.k.is_in_pairs() {
            call.cpu.kernels.split_pairs(&mut values[..heads.dim_k]);
        }
    }
}

/// Writes the query rows that are loaded as words of two bf16.
fn load_words(call: &AttendCall<'_>, rows: usize, scratch: &mut Scratch) {
    let heads = call.heads;
    let q = scratch.q.get(rows * heads.stride_k);
    let words: &mut [u32] = bytemuck::cast_slice_mut(scratch.words.get(rows * heads.stride_k / 2));
    let in_pairs = call.k.is_in_pairs();
    let rows = q.chunks_exact(heads.stride_k).zip(words.chunks_exact_mut(heads.stride_k / 2));
    for (row, words) in rows {
        call.cpu.kernels.query_words(row, (heads.dim_k, in_pairs), words);
    }
}

/// Returns the dot product of two rows, summed in 16 lanes.
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0; 16];
    for (a, b) in a.chunks(16).zip(b.chunks(16)) {
        for (sum, (a, b)) in sums.iter_mut().zip(a.iter().zip(b)) {
            *sum += a * b;
        }
    }
    sums.iter().sum()
}
