//! This library: `CandleCache` with blocks of 16 tokens.
use anyhow::Result;
use candle_core::{Device, Tensor};
use kv::{
    AttentionOptions, CacheSpec, KvFormat, Axes, SequenceId, StartOptions, StepInput,
    TensorView,
};
use kv_bench::BLOCK_SIZE;
use kv_candle::CandleCache;

use super::candle::Candle;
use super::case::{Case, Shape};
use super::decoder::Decoder;

/// Tokens of a sequence that are written at once before the first step.
const CHUNK: usize = 512;

/// A cache with the same K and V as candle's.
pub(crate) struct Ours {
    cache: CandleCache,
    batch: u32,
    context: u32,
    scale: f32,
}

/// Describes a cache for a case: room for the context and the step's token.
pub(crate) fn spec(case: &Case, format: KvFormat) -> Result<CacheSpec> {
    let Case { shape, batch, context, .. } = case;
    let blocks = (u32::try_from(*context)? + 1).div_ceil(BLOCK_SIZE) * u32::try_from(*batch)?;
    Ok(CacheSpec::builder()
        .layers(u16::try_from(shape.layers)?)
        .kv_heads(u32::try_from(shape.kv_heads)?)
        .head_dim(u32::try_from(shape.head_dim)?)
        .format(format)
        .paged(BLOCK_SIZE, blocks)
        .build()?)
}

/// Returns the bytes of such a cache.
pub(crate) fn bytes(spec: &CacheSpec) -> u64 {
    let memory = spec.memory();
    memory.bytes_total.saturating_add(memory.bytes_constants)
}

impl Ours {
    pub(crate) fn filled(case: &Case, format: KvFormat, from: &Candle) -> Result<Self> {
        let Shape { layers, kv_heads, head_dim, .. } = case.shape;
        let mut cache = CandleCache::new(&Device::Cpu, spec(case, format)?)?;
        let [batch, context, heads, dim] =
            [case.batch, case.context, kv_heads, head_dim].map(u32::try_from);
        let (batch, context, heads, dim) = (batch?, context?, heads?, dim?);
        for id in (0..u64::from(batch)).map(SequenceId) {
            cache.kv_mut().start(id, &[], StartOptions::default())?;
        }
        for begin in (0..case.context).step_by(CHUNK) {
            let len = CHUNK.min(case.context - begin);
            let tokens = u32::try_from(len)?;
            let ids = (0..u64::from(batch)).map(SequenceId);
            let inputs: Vec<_> = ids.map(|id| StepInput::count(id, tokens)).collect();
            let mut step = cache.kv_mut().begin_step(&inputs)?;
            for layer in 0..layers {
                let part = |rows: &Tensor| {
                    rows.narrow(2, begin, len)?.transpose(1, 2)?.flatten_all()?.to_vec1::<f32>()
                };
                let [k, v] = from.rows(layer)?.map(part);
                let (k, v) = (k?, v?);
                let dims = [batch * tokens, heads, dim];
                let [k, v] = [&k, &v].map(|rows| TensorView::host(rows, &dims));
                step.write(u16::try_from(layer)?, k, v, Axes::Thd)?;
            }
            step.commit()?;
        }
        let scale = f32::from(u16::try_from(head_dim)?).sqrt().recip();
        Ok(Self { cache, batch, context, scale })
    }

    /// Returns the bytes of all blocks.
    pub(crate) fn bytes(&self) -> u64 {
        bytes(self.cache.kv().spec())
    }

    /// Computes a step's logits, and commits the step.
    pub(crate) fn step(&mut self, decoder: &Decoder, tokens: &Tensor) -> Result<Tensor> {
        let ids = (0..u64::from(self.batch)).map(SequenceId);
        let inputs: Vec<_> = ids.map(|id| StepInput::count(id, 1)).collect();
        let options = AttentionOptions::causal(self.scale);
        let step = self.cache.step(&inputs)?;
        let logits = decoder.forward(tokens, step.positions(), |layer, q, k, v| {
            step.attend(layer, q, k, v, &options)
        })?;
        step.commit()?;
        Ok(logits)
    }

    /// Drops the tokens of a step.
    pub(crate) fn rewind(&mut self) -> Result<()> {
        for id in (0..u64::from(self.batch)).map(SequenceId) {
            self.cache.kv_mut().truncate(id, self.context)?;
        }
        Ok(())
    }
}
