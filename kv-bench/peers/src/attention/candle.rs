//! Candle: `candle_nn::kv_cache`, and attention over it as candle's users write it.
use std::time::{Duration, Instant};

use anyhow::Result;
use candle_core::{D, DType, Device, Tensor, WithDType};
use candle_nn::attention::{AttnMask, flash_attn};
use candle_nn::kv_cache::KvCache;
use half::bf16;

use super::Contender;
use super::case::{Case, Tensors, Values, sizes};

/// Largest table of scores that is computed: candle holds several of them at once.
const SCORES_MAX: u64 = 1 << 30;

fn dtype(case: &Case) -> DType {
    if case.dtype() == kv::DType::F32 { DType::F32 } else { DType::BF16 }
}

fn tensor(case: &Case, values: &Values, dims: [u32; 4]) -> Result<Tensor> {
    let dims = sizes(dims)?;
    Ok(Tensor::from_raw_buffer(values.bytes(), dtype(case), &dims, &Device::Cpu)?)
}

/// Makes a cache with K and V of the case, `[batch, kv_heads, context, head_dim]`, or with tokens
/// before heads.
fn cache(case: &Case, tensors: &Tensors, tokens_first: bool) -> Result<KvCache> {
    let dims = [case.batch, case.kv_heads, case.context, case.head_dim];
    let (k, v) = (tensor(case, &tensors.k, dims)?, tensor(case, &tensors.v, dims)?);
    let mut cache = KvCache::new(if tokens_first { 1 } else { 2 }, sizes([case.context])?[0]);
    if tokens_first {
        cache.append(&k.transpose(1, 2)?.contiguous()?, &v.transpose(1, 2)?.contiguous()?)?;
    } else {
        cache.append(&k, &v)?;
    }
    Ok(cache)
}

fn cached(cache: &KvCache) -> Result<(Tensor, Tensor)> {
    match (cache.k()?, cache.v()?) {
        (Some(k), Some(v)) => Ok((k, v)),
        _ => anyhow::bail!("the cache of candle is empty"),
    }
}

/// Reorders `[batch, q_heads, q_len, head_dim]` to `[tokens, q_heads, head_dim]` in f32.
fn rows(out: Option<&Tensor>) -> Result<Vec<f32>> {
    let out = out.ok_or_else(|| anyhow::anyhow!("candle has not run yet"))?;
    Ok(out.transpose(1, 2)?.flatten_all()?.to_dtype(DType::F32)?.to_vec1()?)
}

/// Attention as two products and a softmax in f32, as in candle's own models: candle widens 16 bits
/// for a product anyway, and a softmax in bf16 sums in bf16. The heads of a group are rows of one
/// product, so K and V are not repeated.
pub(crate) struct Matmul {
    case: Case,
    cache: KvCache,
    q: Tensor,
    /// The causal mask that a prefill adds to the scores.
    mask: Option<Tensor>,
    out: Option<Tensor>,
}

impl Matmul {
    pub(crate) fn new(case: Case, tensors: &Tensors) -> Result<Self> {
        let bytes = case.scores_bytes();
        anyhow::ensure!(bytes <= SCORES_MAX, "its scores take {} MiB", bytes >> 20);
        let group = case.q_heads / case.kv_heads;
        let dims = [case.batch, case.kv_heads, group * case.q_len, case.head_dim];
        let q = tensor(&case, &tensors.q, dims)?;
        let mask = (!case.is_decode()).then(|| -> Result<Tensor> {
            let [tokens, len] = sizes([case.context, case.q_len])?;
            let row = |at: usize| {
                (0..tokens).map(move |key| if key <= at { 0.0 } else { f32::NEG_INFINITY })
            };
            let mask: Vec<f32> = (tokens - len..tokens).flat_map(row).collect();
            Ok(Tensor::from_vec(mask, (len, tokens), &Device::Cpu)?)
        });
        let cache = cache(&case, tensors, false)?;
        Ok(Self { case, cache, q, mask: mask.transpose()?, out: None })
    }

    fn attend(&self) -> Result<Tensor> {
        let (k, v) = cached(&self.cache)?;
        let case = &self.case;
        let (k, v) = (k.to_dtype(DType::F32)?, v.to_dtype(DType::F32)?);
        let q = (self.q.to_dtype(DType::F32)? * f64::from(case.scale()))?;
        let mut scores = q.matmul(&k.transpose(D::Minus2, D::Minus1)?)?;
        if let Some(mask) = &self.mask {
            let [batch, heads, len, context] =
                sizes([case.batch, case.q_heads, case.q_len, case.context])?;
            let shape = scores.shape().clone();
            scores = scores.reshape((batch, heads, len, context))?.broadcast_add(mask)?;
            scores = scores.reshape(shape)?;
        }
        let out = candle_nn::ops::softmax_last_dim(&scores)?.matmul(&v)?;
        Ok(out.to_dtype(dtype(case))?)
    }
}

impl Contender for Matmul {
    fn round(&mut self, times: usize) -> Result<Vec<Duration>> {
        (0..times)
            .map(|_| {
                let begin = Instant::now();
                self.out = Some(self.attend()?);
                Ok(begin.elapsed())
            })
            .collect()
    }

    fn output(&mut self) -> Result<Vec<f32>> {
        let case = &self.case;
        let dims = sizes([case.batch, case.q_heads, case.q_len, case.head_dim])?;
        rows(self.out.as_ref().map(|out| out.reshape(&dims)).transpose()?.as_ref())
    }
}

/// `candle_nn::attention::flash_attn`, one sequence at a time: it takes several at once in f32
/// only, and copies all of K and V for them.
pub(crate) struct Flash {
    case: Case,
    cache: KvCache,
    q: Tensor,
    out: Option<Tensor>,
}

impl Flash {
    pub(crate) fn new(case: Case, tensors: &Tensors) -> Result<Self> {
        let dims = [case.batch, case.q_heads, case.q_len, case.head_dim];
        let q = tensor(&case, &tensors.q, dims)?.transpose(1, 2)?.contiguous()?;
        Ok(Self { case, cache: cache(&case, tensors, true)?, q, out: None })
    }

    fn attend<T: WithDType + num_traits::Float>(&self) -> Result<Tensor> {
        let (k, v) = cached(&self.cache)?;
        let [offset, batch] = sizes([self.case.context - self.case.q_len, self.case.batch])?;
        let mut outs = Vec::with_capacity(batch);
        for at in 0..batch {
            let [q, k, v] = [self.q.narrow(0, at, 1), k.narrow(0, at, 1), v.narrow(0, at, 1)];
            let mask = AttnMask::causal_with_offset(offset);
            let scale = self.case.scale();
            outs.push(flash_attn::<T>(&q?, &k?, &v?, scale, mask, None, None)?);
        }
        Ok(Tensor::cat(&outs, 0)?)
    }
}

impl Contender for Flash {
    fn round(&mut self, times: usize) -> Result<Vec<Duration>> {
        (0..times)
            .map(|_| {
                let begin = Instant::now();
                self.out = Some(match dtype(&self.case) {
                    DType::F32 => self.attend::<f32>(),
                    _ => self.attend::<bf16>(),
                }?);
                Ok(begin.elapsed())
            })
            .collect()
    }

    fn output(&mut self) -> Result<Vec<f32>> {
        rows(self.out.as_ref())
    }
}
