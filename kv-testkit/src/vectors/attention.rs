//! `attention-case/1`: ragged attention batches with f64 results.
use std::collections::HashMap;
use std::path::Path;

use kv_core::backend::{AnyBackend, AnyBuffer, Backend};
use kv_core::{Axes, BlockOrder, CacheSpec, DType, KvCache, KvFormat, StartOptions, StepInput};
use safetensors::{Dtype, SafeTensors};

use crate::case::{At, CaseError, CaseResult, Outcome, ensure};
use crate::device::{Place, Staged};
use crate::fixture::{AXES, append_results, check_values, dense, options, plain_errors, seq};
use crate::oracle::{Attention, AttentionResult};

/// One file, checked.
#[derive(Debug)]
struct Batch {
    oracle: Attention,
    dtype: DType,
    /// Queries by sequence.
    q: Vec<Vec<f32>>,
    kv: [Vec<Vec<f32>>; 2],
    /// The file's results, with the magnitudes of this crate's oracle.
    exact: AttentionResult,
    plain: [AttentionResult; 3],
    floors: [f64; 2],
}

/// The cache of one run.
#[derive(Debug, Clone, Copy)]
struct Form {
    order: BlockOrder,
    /// Tokens per block, `None` for contiguous.
    block_size: Option<u32>,
    stored: KvFormat,
    axes: Axes,
    q_dtype: DType,
}

/// Runs one file in every block order, axis order and geometry, stored in its own type and in f32.
pub(super) fn run(backend: &AnyBackend, path: &Path) -> CaseResult {
    let bytes = std::fs::read(path).map_err(|error| error.to_string())?;
    let batch = Batch::read(&bytes)?;
    let own = KvFormat::PLAIN.iter().find(|format| format.element() == Some(batch.dtype));
    let mut stored = vec![KvFormat::F32];
    stored.extend(own.filter(|format| **format != KvFormat::F32));
    for order in [BlockOrder::Nhd, BlockOrder::Hnd] {
        for block_size in [None, Some(16), Some(7)] {
            for (index, axes) in AXES.into_iter().enumerate() {
                for stored in stored.iter().copied() {
                    // A q in f32 holds the same values, so one axis order is enough.
                    let wide = index == 0 && stored == KvFormat::F32;
                    let q_dtype = if wide { DType::F32 } else { batch.dtype };
                    let form = Form { order, block_size, stored, axes, q_dtype };
                    one(backend, &batch, form).at(format!("{form:?}"))?;
                }
            }
        }
    }
    Ok(Outcome::Holds)
}

fn one(backend: &AnyBackend, batch: &Batch, form: Form) -> Result<(), CaseError> {
    let lens: Vec<_> = batch.lens();
    let mut cache = KvCache::new(backend.clone(), spec(batch, &lens, form)?)?;
    for (id, _) in (0..).zip(&lens) {
        cache.start(seq(id), &[], StartOptions::default())?;
    }
    // More queries than keys: all keys are cached before, and the step has queries only.
    let new: Vec<_> = lens.iter().map(|[nq, nk]| if nq > nk { 0 } else { *nq }).collect();
    let prefix: Vec<_> = lens.iter().zip(&new).map(|([_, nk], new)| nk - new).collect();
    let input = |id, n: usize| match n {
        0 => StepInput::idle(seq(id)),
        n => StepInput::count(seq(id), n as u32),
    };
    let inputs: Vec<_> = (0..).zip(&prefix).map(|(id, n)| input(id, *n)).collect();
    let kv = stage_kv(backend, &mut cache, batch, form, |i, nk| 0..nk - new[i])?;
    let mut step = cache.begin_step(&inputs)?;
    step.write(0, kv[0].view(), kv[1].view(), form.axes)?;
    step.commit()?;
    let last = |(id, ([nq, nk], n)): (u64, (&[usize; 2], &usize))| {
        if nq > nk { StepInput::query(seq(id), *nq as u32) } else { input(id, *n) }
    };
    let inputs: Vec<_> = (0..).zip(lens.iter().zip(&new)).map(last).collect();
    let kv = stage_kv(backend, &mut cache, batch, form, |i, nk| nk - new[i]..nk)?;
    let queries: Vec<_> = lens.iter().map(|[nq, _]| *nq).collect();
    let Attention { q_heads, dk, dv, .. } = batch.oracle;
    let layout = dense(form.axes, &queries, [q_heads, dk]);
    let queue = cache.queue_mut();
    let tensor = layout.pack(form.q_dtype, &batch.q, f32::NAN);
    let q = Staged::new(backend, queue, (layout, tensor), Place::Device)?;
    let layout = dense(form.axes, &queries, [q_heads, dv]);
    let mut out = Staged::output(backend, queue, (layout, form.q_dtype), Place::Device)?;
    let layout = dense(form.axes, &queries, [q_heads, 1]);
    let mut lse = Staged::output(backend, queue, (layout, DType::F32), Place::Device)?;
    let mut step = cache.begin_step(&inputs)?;
    step.write(0, kv[0].view(), kv[1].view(), form.axes)?;
    let chosen = options(&batch.oracle, form.axes);
    step.attend_lse(0, q.view(), out.view_mut(), lse.lse_mut(), &chosen)?;
    step.commit()?;
    let (capabilities, layout) = (backend.capabilities(), out.layout);
    let got = out.read(capabilities, cache.queue_mut())?;
    let got = layout.unpack("out", got, &queries, 0.0)?;
    let layout = lse.layout;
    let got_lse = lse.read(capabilities, cache.queue_mut())?;
    let got_lse = layout.unpack("lse", got_lse, &queries, f32::NEG_INFINITY)?;
    check_values(&batch.exact, &batch.plain, batch.floors, (&got, Some(&got_lse)), form.q_dtype)?;
    Ok(())
}

fn spec(batch: &Batch, lens: &[[usize; 2]], form: Form) -> Result<CacheSpec, CaseError> {
    let Attention { kv_heads, dk, dv, .. } = batch.oracle;
    let spec = CacheSpec::builder()
        .layers(1)
        .kv_heads(kv_heads as u32)
        .head_dims(dk as u32, dv as u32)
        .format(form.stored)
        .block_order(form.order);
    let tokens = lens.iter().map(|[_, nk]| *nk as u32);
    let spec = match form.block_size {
        Some(size) => spec.paged(size, tokens.map(|n| n.div_ceil(size)).sum::<u32>().max(1)),
        None => spec.contiguous(lens.len() as u32, tokens.max().unwrap_or(0).max(1)),
    };
    Ok(spec.build()?)
}

/// Stages some rows of every sequence, with NaN in the padding.
fn stage_kv(
    backend: &AnyBackend,
    cache: &mut KvCache,
    batch: &Batch,
    form: Form,
    range: impl Fn(usize, usize) -> std::ops::Range<usize>,
) -> Result<[Staged<AnyBuffer>; 2], CaseError> {
    let Attention { kv_heads, dk, dv, .. } = batch.oracle;
    let mut plane = |plane: usize, dim: usize| -> Result<_, CaseError> {
        let width = kv_heads * dim;
        let part = |(i, rows): (usize, &Vec<f32>)| {
            let range = range(i, rows.len() / width);
            rows[range.start * width..range.end * width].to_vec()
        };
        let rows: Vec<_> = batch.kv[plane].iter().enumerate().map(part).collect();
        let lens: Vec<_> = rows.iter().map(|rows| rows.len() / width).collect();
        let layout = dense(form.axes, &lens, [kv_heads, dim]);
        let tensor = layout.pack(batch.dtype, &rows, f32::NAN);
        Ok(Staged::new(backend, cache.queue_mut(), (layout, tensor), Place::Host)?)
    };
    Ok([plane(0, dk)?, plane(1, dv)?])
}

/// Reads the numbers of one tensor, little-endian.
fn numbers<const N: usize, T>(
    file: &SafeTensors<'_>,
    name: &str,
    dtype: Dtype,
    convert: fn([u8; N]) -> T,
) -> Result<(Vec<usize>, Vec<T>), CaseError> {
    let tensor = file.tensor(name).map_err(|error| format!("tensor {name}: {error}"))?;
    ensure(tensor.dtype() == dtype, || {
        format!("tensor {name} is {:?}, expected {dtype:?}", tensor.dtype())
    })?;
    let (chunks, _) = tensor.data().as_chunks::<N>();
    Ok((tensor.shape().to_vec(), chunks.iter().map(|bytes| convert(*bytes)).collect()))
}

/// Splits rows at prefix sums.
fn cut<T: Clone>(values: &[T], sums: &[usize], width: usize) -> Vec<Vec<T>> {
    sums.windows(2).map(|pair| values[pair[0] * width..pair[1] * width].to_vec()).collect()
}

impl Batch {
    fn lens(&self) -> Vec<[usize; 2]> {
        let Attention { q_heads, kv_heads, dk, .. } = self.oracle;
        let len =
            |(q, k): (&Vec<f32>, &Vec<f32>)| [q.len() / (q_heads * dk), k.len() / (kv_heads * dk)];
        self.q.iter().zip(&self.kv[0]).map(len).collect()
    }

    fn read(bytes: &[u8]) -> Result<Self, CaseError> {
        let no = |error| CaseError::Broken(format!("not a safetensors file: {error}"));
        let (_, header) = SafeTensors::read_metadata(bytes).map_err(no)?;
        let metadata = header.metadata().clone().unwrap_or_default();
        let file = SafeTensors::deserialize(bytes).map_err(no)?;
        let (q_shape, q) = numbers(&file, "q", Dtype::F32, f32::from_le_bytes)?;
        let (k_shape, k) = numbers(&file, "k", Dtype::F32, f32::from_le_bytes)?;
        let (v_shape, v) = numbers(&file, "v", Dtype::F32, f32::from_le_bytes)?;
        let shapes = (q_shape.as_slice(), k_shape.as_slice(), v_shape.as_slice());
        let (&[total_q, q_heads, dk], &[total_kv, kv_heads, k_dim], &[num_v, v_heads, dv]) = shapes
        else {
            return Err(CaseError::Broken(format!("shapes {shapes:?} do not have 3 axes")));
        };
        ensure(
            dk == k_dim
                && (total_kv, kv_heads) == (num_v, v_heads)
                && [q_heads, kv_heads, dk, dv].iter().all(|n| (1..=1 << 12).contains(n))
                && q_heads % kv_heads == 0,
            || format!("shapes {shapes:?} do not fit each other"),
        )?;
        let cu_q = sums(&file, "cu_seqlens_q", total_q)?;
        let cu_kv = sums(&file, "cu_seqlens_kv", total_kv)?;
        ensure(cu_q.len() == cu_kv.len(), || "batches of q and kv differ".to_owned())?;
        let (out_shape, out) = numbers(&file, "out", Dtype::F64, f64::from_le_bytes)?;
        ensure(out_shape == [total_q, q_heads, dv], || format!("out has shape {out_shape:?}"))?;
        let (lse_shape, lse) = numbers(&file, "lse", Dtype::F64, f64::from_le_bytes)?;
        ensure(lse_shape == [total_q, q_heads], || format!("lse has shape {lse_shape:?}"))?;
        let sink_logits = match metadata.get("sinks").map(String::as_str) {
            Some("true") => {
                let (shape, sink_logits) = numbers(&file, "sinks", Dtype::F32, f32::from_le_bytes)?;
                ensure(shape == [q_heads], || format!("sink logits have shape {shape:?}"))?;
                Some(sink_logits)
            }
            _ => None,
        };
        let oracle =
            Attention { sink_logits, ..attention(&metadata, [q_heads, kv_heads, dk, dv])? };
        let q = cut(&q, &cu_q, q_heads * dk);
        let kv = [cut(&k, &cu_kv, kv_heads * dk), cut(&v, &cu_kv, kv_heads * dv)];
        let dtype = dtype(&metadata)?;
        Self {
            oracle,
            dtype,
            q,
            kv,
            exact: AttentionResult::default(),
            plain: Default::default(),
            floors: [0.0; 2],
        }
        .with_references(out, lse)
    }

    /// Adds the references, after checking that the oracle agrees with the file.
    fn with_references(mut self, out: Vec<f64>, lse: Vec<f64>) -> Result<Self, CaseError> {
        for (q, (k, v)) in self.q.iter().zip(self.kv[0].iter().zip(&self.kv[1])) {
            append_results(&mut self.exact, self.oracle.exact(q, k, v));
            let plain = self.oracle.plain(q, k, v);
            self.plain.iter_mut().zip(plain).for_each(|(all, one)| append_results(all, one));
        }
        let pairs = [
            ("out", &out, &self.exact.out, &self.exact.magnitude),
            ("lse", &lse, &self.exact.lse, &self.exact.lse_magnitude),
        ];
        for (what, theirs, ours, magnitude) in pairs {
            for (i, (theirs, ours)) in theirs.iter().zip(ours).enumerate() {
                // Rounding to f64 of some thousand terms.
                let limit = magnitude[i] * f64::EPSILON * 4096.0;
                ensure(theirs == ours || (theirs - ours).abs() <= limit, || {
                    format!("{what}[{i}] of the file is {theirs:e}, the oracle says {ours:e}")
                })?;
            }
        }
        let pairs = self.kv[0].iter().cloned().zip(self.kv[1].iter().cloned());
        let cached: Vec<_> = pairs.map(|(k, v)| [k, v]).collect();
        self.floors = plain_errors(&self.oracle, &self.q, &cached);
        (self.exact.out, self.exact.lse) = (out, lse);
        Ok(self)
    }
}

fn sums(file: &SafeTensors<'_>, name: &str, total: usize) -> Result<Vec<usize>, CaseError> {
    let (_, values) = numbers(file, name, Dtype::I32, i32::from_le_bytes)?;
    let values: Option<Vec<usize>> = values.iter().map(|n| usize::try_from(*n).ok()).collect();
    let fit = values.filter(|sums| {
        sums.len() > 1
            && sums.first() == Some(&0)
            && sums.last() == Some(&total)
            && sums.is_sorted()
    });
    fit.ok_or_else(|| {
        CaseError::Broken(format!("{name} is not a list of prefix sums up to {total}"))
    })
}

fn dtype(metadata: &HashMap<String, String>) -> Result<DType, CaseError> {
    let name = metadata.get("input_dtype").map_or("f32", String::as_str);
    match name {
        "f32" => Ok(DType::F32),
        "f16" => Ok(DType::F16),
        "bf16" => Ok(DType::Bf16),
        _ => Err(CaseError::Broken(format!("input_dtype {name:?} is not one of f32, f16, bf16"))),
    }
}

/// Makes the options of a file, without the sink logits.
fn attention(
    metadata: &HashMap<String, String>,
    [q_heads, kv_heads, dk, dv]: [usize; 4],
) -> Result<Attention, CaseError> {
    let number = |key: &str| -> Result<f64, CaseError> {
        let text = metadata.get(key).map(String::as_str).unwrap_or_default();
        let number = text.parse::<f64>().ok().filter(|n| n.is_finite());
        number.ok_or_else(|| CaseError::Broken(format!("metadata {key} is {text:?}")))
    };
    let soft_cap = if metadata.contains_key("softcap") { number("softcap")? } else { 0.0 };
    let window = if metadata.contains_key("window_left") { number("window_left")? } else { -1.0 };
    Ok(Attention {
        scale: number("scale")? as f32,
        causal: metadata.get("causal").map(String::as_str) != Some("false"),
        window_left: (window >= 0.0).then_some(window as u32),
        soft_cap: (soft_cap > 0.0).then_some(soft_cap as f32),
        ..Attention::causal(q_heads, kv_heads, dk, dv)
    })
}
