//! Attention over cached rows: checks a call, cuts it into units and runs them.
//!
//! A unit is some kv heads of one part of one context, with as many queries as share tiles well.
//! Its content depends on the plan alone, so neither the number of threads nor their order changes
//! a bit. Contexts cut into several parts leave partial results, which [`merge`] joins. What
//! no query sees costs nothing: neither a unit nor a read.
mod matrix;
mod merge;
mod parts;
mod pieces;
mod reach;
mod stage;
mod stream;
mod tile;
mod unit;
mod walk;

use kv_core::plan::{AttendArgs, AttentionOptions, AttentionPlan, PlannedSequence};
use kv_core::{DeviceError, PlaneLayout};
use kv_quant::transform;

pub(crate) use merge::Merge;
use reach::Reach;
pub(crate) use unit::{Scratch, Unit};

use crate::access::Access;
use crate::backend::Cpu;
use crate::buffer::CpuBuffer;
use crate::encoding::{Element, unsupported};
use crate::kernel::{LANES_MAX, Running};
use crate::num::{to_u64, to_usize};
use crate::rows::{PlaneRows, Room, RowAt, RowsIn, RowsOut};
use crate::workspace::Workspace;

const OPERATION: &str = "attend";
/// Query rows of one unit, where a group of heads has no more: what stays in the second cache.
const ROWS_PER_UNIT: usize = 128;
/// The same where matrices are multiplied, which has more to do at once.
const ROWS_BY_MATRIX: usize = 512;
/// Multiplications below which one thread is faster than several.
const WORK_SIDE_BY_SIDE: u64 = 1 << 17;

/// Queries of a sequence that has no keys at all.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Blank {
    entry: usize,
}

/// Everything the units of one call share.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Job<'a> {
    cpu: &'a Cpu,
    plan: AttentionPlan<'a>,
    options: AttentionOptions<'a>,
    q: RowsIn<'a>,
    out: RowsOut<'a>,
    lse: Option<RowsOut<'a>>,
    k: PlaneRows<'a>,
    v: PlaneRows<'a>,
    heads: Heads,
    /// Whether rows of K and V are such as can be multiplied as matrices here.
    by_matrix: bool,
}

/// Head counts, and row lengths with their padding in scratch memory.
#[derive(Debug, Clone, Copy)]
struct Heads {
    group: u32,
    dim_k: usize,
    dim_v: usize,
    stride_k: usize,
    stride_v: usize,
}

pub(crate) fn attend(
    cpu: &Cpu,
    workspace: &mut Workspace,
    plan: &AttentionPlan<'_>,
    mut args: AttendArgs<'_, CpuBuffer>,
) -> Result<(), DeviceError> {
    let Workspace { entries, units, merges, blanks, partial_rows, partial_running, scratch } =
        workspace;
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
    let layouts = [k.rows(false), k.rows(true), v.rows(false), v.rows(true)];
    let by_matrix = layouts.iter().all(|rows| cpu.kernels.has_matrix(rows.encoding()));
    let job = Job {
        cpu,
        plan: *plan,
        options: *args.options(),
        q,
        out,
        lse: lse.transpose()?,
        k,
        v,
        heads,
        by_matrix,
    };
    let partials = unit::plan(&job, units, merges, blanks);
    partial_running.resize(partial_running.len().max(partials), Running::EMPTY);
    let partial_rows = partial_rows.get(partials.saturating_mul(heads.stride_v));
    let partials = unit::Partials::new(partial_rows, partial_running);
    let side_by_side = job.work() >= WORK_SIDE_BY_SIDE;
    cpu.threads.run(units.len(), side_by_side, scratch, |scratch, index| {
        if let Some(unit) = units.get(index) {
            unit::run(&job, unit, scratch, &partials);
        }
    });
    cpu.threads.run(merges.len(), side_by_side, scratch, |scratch, index| {
        if let Some(merge) = merges.get(index) {
            merge::run(&job, merge, scratch, &partials);
        }
    });
    job.fill_blanks(blanks);
    job.fill_padding(room);
    Ok(())
}

impl Heads {
    fn new(q_heads: u32, k: &PlaneLayout, v: &PlaneLayout) -> Result<Self, DeviceError> {
        let kv_heads = k.num_kv_heads();
        let group = q_heads.checked_div(kv_heads).unwrap_or(0);
        let alike = v.num_kv_heads() == kv_heads && q_heads.checked_rem(kv_heads) == Some(0);
        if !alike || group == 0 {
            return Err(unsupported(
                OPERATION,
                format!("{q_heads} query, {kv_heads} key and {} value heads", v.num_kv_heads()),
            ));
        }
        let pad = |dim: usize| dim.next_multiple_of(LANES_MAX);
        let (dim_k, dim_v) = (to_usize(k.head_dim()), to_usize(v.head_dim()));
        Ok(Self { group, dim_k, dim_v, stride_k: pad(dim_k), stride_v: pad(dim_v) })
    }
}

impl Job<'_> {
    /// The entry of a batch, and its index.
    fn sequence(&self, entry: usize) -> Option<&PlannedSequence> {
        self.plan.sequences().get(entry)
    }

    /// Whether outputs have use for all bits of a weight.
    fn is_exact(&self) -> bool {
        self.out.element() == Element::F32
    }

    /// Whether a result has use for all bits of the sum of a row's weights: log-sum-exps are `f32`
    /// where outputs are not.
    fn has_exact_sums(&self) -> bool {
        self.is_exact() || self.lse.is_some()
    }

    /// Multiplications of the whole call, about.
    fn work(&self) -> u64 {
        let pairs = self.plan.sequences().iter().map(|sequence| {
            let seen = Reach::of(&self.options, sequence, (0, sequence.q_len));
            u64::from(seen.num_keys()).saturating_mul(u64::from(sequence.q_len))
        });
        pairs
            .fold(0_u64, u64::saturating_add)
            .saturating_mul(u64::from(self.q.rows().heads()))
            .saturating_mul(to_u64(self.heads.dim_k))
    }

    /// Ends one query row: joins the sink logit, divides by the sum, turns the mean of stored rows
    /// of V into that of the rows themselves, writes it and the log-sum-exp.
    ///
    /// # Safety
    /// 1. No other thread finishes the same token and head.
    unsafe fn finish(&self, at: RowAt, head: u32, running: Running, row: &mut [f32]) {
        let mut total = running;
        if let Some(sink) = self.options.sink_logits() {
            let sink = sink.get(to_usize(head)).copied();
            total = running.with_sink(sink.unwrap_or(f32::NEG_INFINITY));
        }
        // SAFETY: condition 1.
        let out = unsafe { self.out.get_mut(at, head, 1) };
        if total.sum == 0.0 || running.sum == 0.0 {
            out.fill(0);
        } else {
            self.cpu.kernels.scale(row, running.weight_in(total));
            if self.v.is_in_pairs() {
                self.cpu.kernels.join_pairs(row);
            }
            let kv_head = head.checked_div(self.heads.group).unwrap_or(0);
            if let Some(constants) = self.v.transform(kv_head) {
                transform::output(row, &constants);
            }
            self.cpu.kernels.encode(self.out.element(), row, out);
        }
        if let Some(lse) = &self.lse {
            // SAFETY: condition 1.
            let lse = unsafe { lse.get_mut(at, head, 1) };
            lse.copy_from_slice(&total.log_sum_exp().to_ne_bytes());
        }
    }

    /// Writes the rows of queries whose sequence has no keys.
    fn fill_blanks(&self, blanks: &[Blank]) {
        for blank in blanks {
            let Some(sequence) = self.sequence(blank.entry) else {
                continue;
            };
            for token in 0..sequence.q_len {
                let at = RowAt { entry: blank.entry, start: sequence.q_start, token };
                for head in 0..self.q.rows().heads() {
                    // SAFETY: the units are done, and none of them had this sequence.
                    unsafe { self.finish(at, head, Running::EMPTY, &mut []) };
                }
            }
        }
    }

    /// Writes the rows that no query owns.
    fn fill_padding(&self, room: Room) {
        let len = |entry: usize| self.sequence(entry).map_or(0, |s| s.q_len);
        self.out.for_padding(room, len, |row| row.fill(0));
        if let Some(lse) = &self.lse {
            lse.for_padding(room, len, |row| {
                for value in row.chunks_exact_mut(4) {
                    value.copy_from_slice(&f32::NEG_INFINITY.to_ne_bytes());
                }
            });
        }
    }
}
