//! Memory that a queue keeps from call to call, so that a call allocates nothing once its buffers
//! have grown.
use kv_cpu_kernels::{OnlineSoftmax, Partial};
use kv_quant::block::BlockMean;

use crate::access::Entry;
use crate::aligned::AlignedFloats;
use crate::attend::WorkPlan;

/// Buffers of one queue.
#[derive(Debug, Default)]
pub(crate) struct Workspace {
    /// Locks of the current call; empty between calls.
    pub(crate) entries: Vec<Entry>,
    /// Work items of the current attention.
    pub(crate) work: WorkPlan,
    /// Output rows of context splits, before they are merged.
    pub(crate) partial_rows: AlignedFloats,
    /// Their maxima and sums.
    pub(crate) partials: Vec<Partial>,
    /// One per thread.
    pub(crate) scratch: Vec<Scratch>,
}

/// Memory of one thread.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    /// Query rows, and the same as words for products of bf16 or for AMX.
    pub(crate) q: AlignedFloats,
    pub(crate) words: AlignedFloats,
    /// Bias of the scores of each query row, and its value for the current tile.
    pub(crate) bias: AlignedFloats,
    pub(crate) tile_bias: AlignedFloats,
    /// Sums of V of each query row, and their maxima and sums of weights.
    pub(crate) out: AlignedFloats,
    pub(crate) states: Vec<OnlineSoftmax>,
    /// Scores of a tile.
    pub(crate) scores: AlignedFloats,
    /// A tile of K and of V, decoded or packed for AMX.
    pub(crate) k: AlignedFloats,
    pub(crate) v: AlignedFloats,
    mean: BlockMean,
}

impl Scratch {
    /// One row.
    pub(crate) fn row(&mut self, len: usize) -> &mut [f32] {
        self.out.get(len)
    }
    /// Two rows.
    pub(crate) fn rows(&mut self, len: usize) -> (&mut [f32], &mut [f32]) {
        (self.out.get(len), self.k.get(len))
    }
    /// One row, and the mean of a block.
    pub(crate) fn row_and_mean(&mut self, len: usize) -> (&mut [f32], &mut BlockMean) {
        (self.out.get(len), &mut self.mean)
    }
}
