//! The state that all work items of one call share, and the end of a query row.
use kv_core::backend::PlaneLayout;
use kv_core::error::DeviceError;
use kv_core::invariant::Invariant;
use kv_core::num::{to_u64, to_usize};
use kv_core::plan::{AttentionOptions, AttentionPlan, PlannedSequence};
use kv_cpu_kernels::{Element, Logits, OUTPUT_PAD, Partial, QUERY_PAD};
use kv_quant::transform;

use super::strategy::Facts;
use super::visible::Visible;
use crate::context::Cpu;
use crate::layout::{PlaneRows, Room, RowAt, RowsIn, RowsOut, unsupported};

/// Names the operation in errors.
pub(super) const OPERATION: &str = "attend";

/// One call of attention.
#[derive(Debug, Clone, Copy)]
pub(super) struct AttendCall<'a> {
    pub(super) cpu: &'a Cpu,
    pub(super) plan: AttentionPlan<'a>,
    pub(super) options: AttentionOptions<'a>,
    pub(super) q: RowsIn<'a>,
    pub(super) out: RowsOut<'a>,
    pub(super) lse: Option<RowsOut<'a>>,
    pub(super) k: PlaneRows<'a>,
    pub(super) v: PlaneRows<'a>,
    pub(super) heads: Heads,
}

/// Head counts, row lengths, and row strides in scratch memory.
#[derive(Debug, Clone, Copy)]
pub(super) struct Heads {
    /// Query heads per kv head.
    pub(super) group: usize,
    pub(super) dim_k: usize,
    pub(super) dim_v: usize,
    pub(super) stride_k: usize,
    pub(super) stride_v: usize,
}

impl Heads {
    pub(super) fn new(q_heads: u32, k: &PlaneLayout, v: &PlaneLayout) -> Result<Self, DeviceError> {
        let kv_heads = k.num_kv_heads();
        let group = to_usize(q_heads.checked_div(kv_heads).unwrap_or(0));
        let is_even = v.num_kv_heads() == kv_heads && q_heads.checked_rem(kv_heads) == Some(0);
        if !is_even || group == 0 {
            return Err(unsupported(
                OPERATION,
                format!("{q_heads} query, {kv_heads} key and {} value heads", v.num_kv_heads()),
            ));
        }
        let (dim_k, dim_v) = (to_usize(k.head_dim()), to_usize(v.head_dim()));
        let (stride_k, stride_v) =
            (dim_k.next_multiple_of(QUERY_PAD), dim_v.next_multiple_of(OUTPUT_PAD));
        Ok(Self { group, dim_k, dim_v, stride_k, stride_v })
    }
}

impl<'a> AttendCall<'a> {
    /// An entry of the batch.
    pub(super) fn sequence(&self, entry: usize) -> &'a PlannedSequence {
        self.plan.sequences().get(entry).invariant("an item is of an entry of the batch")
    }

    /// Query heads of the call.
    pub(super) fn q_heads(&self) -> usize {
        to_usize(self.q.rows().heads())
    }

    /// Returns whether outputs need the precision of `f32`.
    pub(super) fn is_exact(&self) -> bool {
        self.out.element() == Element::F32
    }

    /// Returns the conversion of scores to logits. Log-sum-exps are `f32` where outputs may not be.
    pub(super) fn logits(&self) -> Logits {
        let exact = self.is_exact() || self.lse.is_some();
        Logits::new(self.options.scale(), self.options.soft_cap(), exact)
    }

    /// Returns the inputs of the choice of a strategy, for `queries` queries of a sequence.
    pub(super) fn facts(&self, queries: u32) -> Facts {
        let kernels = self.cpu.kernels;
        Facts {
            isa: kernels.isa(),
            queries,
            rows: to_usize(queries) * self.heads.group,
            k: [false, true].map(|is_wide| self.k.rows(is_wide).encoding()),
            v: [false, true].map(|is_wide| self.v.rows(is_wide).encoding()),
        }
    }

    /// Returns whether queries are bf16 and stay untransformed, as products of bf16 need.
    pub(super) fn has_bf16_queries(&self) -> bool {
        self.q.element() == Element::Bf16 && !self.k.layout().transforms()
    }

    /// Approximate number of multiplications of the call.
    pub(super) fn work(&self) -> u64 {
        let pairs = self.plan.sequences().iter().map(|sequence| {
            let visible = Visible::of(&self.options, sequence, (0, sequence.q_len));
            u64::from(visible.num_keys()) * u64::from(sequence.q_len)
        });
        pairs.sum::<u64>() * u64::from(self.q.rows().heads()) * to_u64(self.heads.dim_k)
    }

    /// Finishes one query row: joins the sink logit, divides by the sum, undoes the transform of V,
    /// writes the row and its log-sum-exp.
    ///
    /// # Safety
    /// 1. No other thread finishes the same token and head.
    pub(super) unsafe fn finish(&self, at: RowAt, head: u32, partial: Partial, row: &mut [f32]) {
        let mut total = partial;
        if let Some(sink_logits) = self.options.sink_logits() {
            let logit = sink_logits.get(to_usize(head)).invariant("every query head has a logit");
            total = partial.with_sink_logit(*logit);
        }
        // SAFETY: condition 1.
        let out = unsafe { self.out.get_mut(at, head, 1) };
        if total.sum == 0.0 || partial.sum == 0.0 {
            out.fill(0);
        } else {
            self.cpu.kernels.scale(row, partial.weight_in(total));
            if self.v.is_in_pairs() {
                self.cpu.kernels.join_pairs(row);
            }
            if let Some(constants) = self.v.transform(self.kv_head(head)) {
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

    /// The kv head of a query head.
    pub(super) fn kv_head(&self, head: u32) -> u32 {
        let kv_head = to_usize(head).checked_div(self.heads.group);
        kv_core::num::to_u32(kv_head.unwrap_or(0))
    }

    /// Writes the rows of sequences whose queries see no key.
    pub(super) fn fill_empty(&self, entries: &[usize]) {
        for &entry in entries {
            let sequence = self.sequence(entry);
            for token in 0..sequence.q_len {
                let at = RowAt { entry, start: sequence.q_start, token };
                for head in 0..self.q.rows().heads() {
                    // SAFETY: the work items are done, and none of them had this sequence.
                    unsafe { self.finish(at, head, Partial::EMPTY, &mut []) };
                }
            }
        }
    }

    /// Writes the rows that no query owns.
    pub(super) fn fill_padding(&self, room: Room) {
        let len = |entry: usize| self.sequence(entry).q_len;
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
