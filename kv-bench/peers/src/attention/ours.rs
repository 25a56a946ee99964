//! This library: `KvCache<CpuBackend>` with blocks of 16 tokens.
use std::time::{Duration, Instant};

use anyhow::Result;
use kv::cpu::{CpuBackend, CpuOptions};
use kv::{
    AttentionOptions, CacheSpec, KvCache, Axes, SequenceId, StartOptions, StepInput,
    TensorView, TensorViewMut,
};
use kv_bench::BLOCK_SIZE;

use super::Contender;
use super::case::{Case, Tensors, Values};

/// A cache in which all tokens are committed except those of the timed step.
pub(crate) struct Ours {
    case: Case,
    cache: KvCache<CpuBackend>,
    q: Values,
    /// K and V of the step's tokens, one sequence after another.
    new: [Vec<u8>; 2],
    /// Values of the inputs' element type.
    out: Vec<u32>,
}

impl Ours {
    pub(crate) fn new(case: Case, tensors: &Tensors) -> Result<Self> {
        let blocks = case.context.div_ceil(BLOCK_SIZE) * case.batch;
        let spec = CacheSpec::builder()
            .layers(1)
            .kv_heads(case.kv_heads)
            .head_dim(case.head_dim)
            .format(case.format)
            .paged(BLOCK_SIZE, blocks)
            .build()?;
        let mut cache = KvCache::new(CpuBackend::open(CpuOptions::default())?, spec)?;
        let mut new = [Vec::new(), Vec::new()];
        let cached = case.context - case.q_len;
        for sequence in 0..case.batch {
            let id = SequenceId(u64::from(sequence));
            cache.start(id, &[], StartOptions::default())?;
            let rows = tensors.kv_rows(&case, sequence)?;
            let token_bytes = rows[0].bytes().len() / usize::try_from(case.context)?;
            let end = token_bytes * usize::try_from(cached)?;
            for (new, rows) in new.iter_mut().zip(&rows) {
                new.extend_from_slice(&rows.bytes()[end..]);
            }
            if cached > 0 {
                let dims = [cached, case.kv_heads, case.head_dim];
                let [k, v] = rows
                    .each_ref()
                    .map(|rows| TensorView::host_bytes(rows.dtype, &rows.bytes()[..end], &dims));
                let mut step = cache.begin_step(&[StepInput::count(id, cached)])?;
                step.write(0, k, v, Axes::Thd)?;
                step.commit()?;
            }
        }
        let q = tensors.q_rows(&case)?;
        let words = q.bytes().len() / 4;
        Ok(Self { case, cache, q, new, out: vec![0; words] })
    }
}

impl Contender for Ours {
    fn round(&mut self, times: usize) -> Result<Vec<Duration>> {
        let Self { case, cache, q, new, out } = self;
        let inputs: Vec<_> = (0..u64::from(case.batch))
            .map(|id| StepInput::count(SequenceId(id), case.q_len))
            .collect();
        let tokens = case.batch * case.q_len;
        // Begin and write are not timed, because the peers have their K and V written too. The step
        // is rolled back.
        let mut step = cache.begin_step(&inputs)?;
        let dims = [tokens, case.kv_heads, case.head_dim];
        let [k, v] = new.each_ref().map(|rows| TensorView::host_bytes(q.dtype, rows, &dims));
        step.write(0, k, v, Axes::Thd)?;
        let dims = [tokens, case.q_heads, case.head_dim];
        let options = AttentionOptions::causal(case.scale());
        let mut took = Vec::with_capacity(times);
        for _ in 0..times {
            let begin = Instant::now();
            let view = TensorView::host_bytes(q.dtype, q.bytes(), &dims);
            let bytes = bytemuck::cast_slice_mut(out);
            step.attend(0, view, TensorViewMut::host_bytes(q.dtype, bytes, &dims), &options)?;
            took.push(begin.elapsed());
        }
        Ok(took)
    }

    fn output(&mut self) -> Result<Vec<f32>> {
        Ok(match self.q.dtype {
            kv::DType::F32 => self.out.iter().map(|bits| f32::from_bits(*bits)).collect(),
            _ => bytemuck::cast_slice::<_, half::bf16>(&self.out)
                .iter()
                .map(|value| value.to_f32())
                .collect(),
        })
    }
}
