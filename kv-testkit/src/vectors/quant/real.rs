//! `quant-meta/1`: K, V and some of Q of a running model, and the error of storing K or V.
//!
//! Constants come from the first half of the tokens. The queries of the second half attend, on the
//! device, to K or V in one format, with the first tokens in a full-precision prefix. The error is
//! that of attention's output, squared, relative to the output's own energy: the mean of all heads.
//!
//! The limit is twice the error that a first-order analysis of this recording predicts. A format of
//! relative squared error `D` on normal rows, after a rotation, adds white noise to a score in
//! proportion to the lengths of the transformed q' and k', to an output in proportion to that and
//! to the distance of the value, and white noise to a value's share of an output. The squared
//! change of an output is
//!
//! ```text
//! K    sum over keys of p^2 |v - out|^2 scale^2 |q'|^2 |k'|^2 D / d
//! V    sum over keys of p^2 |v|^2 D
//! ```
//!
//! The factor two is that of every tolerance here; it covers higher orders, and rows that are not
//! quite normal. Three standard deviations are added, with each query's error taken for the square
//! of one normal number, because a few sharp queries may decide a short recording.
mod limits;

use std::fs;
use std::path::{Path, PathBuf};

use kv_core::backend::{AnyBackend, AnyQueue, Backend, Plane};
use kv_core::calibration::Calibration;
use kv_core::spec::Transform;
use kv_core::{
    AttentionOptions, Axes, CacheSpec, DType, KvCache, KvFormat, StartOptions, StepInput,
};
use kv_quant::calibrate::{CalibrateError, Calibrator};
use serde_json::Value;

use crate::case::{At, CaseError, CaseResult, Outcome, ensure};
use crate::device::{Place, Staged};
use crate::fixture::{dense, seq};
use crate::oracle::gaussian;
use limits::Expected;

/// Tokens in the full-precision prefix.
const FULL_PRECISION_PREFIX: u32 = 4;

/// The description of a recording.
#[derive(Debug)]
pub(in crate::vectors) struct Recording {
    dir: PathBuf,
    layers: usize,
    kv_heads: usize,
    q_heads: usize,
    tokens: usize,
    dims: [usize; 2],
    /// Tokens from one recorded query to the next.
    stride: usize,
}

/// Its numbers, by layer: `[tokens, heads, dim]`, and `[queries, q_heads, dim]`.
#[derive(Debug)]
struct Rows {
    k: Vec<Vec<f32>>,
    v: Vec<Vec<f32>>,
    q: Vec<Vec<f32>>,
}

/// Reads the description; the numbers are read when the trial runs.
pub(super) fn read(path: &Path, value: &Value) -> Result<Recording, String> {
    let shape = |name: &str| -> Result<[usize; 4], String> {
        let list = value.get(name).and_then(Value::as_array);
        let list = list.ok_or_else(|| format!("does not fit its schema: no list {name}"))?;
        let sizes = list.iter().map(|n| n.as_u64().and_then(|n| usize::try_from(n).ok()));
        let sizes: Option<Vec<_>> =
            sizes.map(|n| n.filter(|n| (1..=1 << 24).contains(n))).collect();
        let sizes = sizes.and_then(|sizes| <[usize; 4]>::try_from(sizes).ok());
        sizes.ok_or_else(|| format!("does not fit its schema: {name} is not a shape of 4 axes"))
    };
    let [layers, kv_heads, tokens, dk] = shape("k_shape")?;
    let [v_layers, v_heads, v_tokens, dv] = shape("v_shape")?;
    let object = value.as_object().ok_or("no JSON object")?;
    let mut strides = object.keys().filter_map(|key| stride_of(key, "q_every", "_shape"));
    let stride = strides.next().ok_or("does not fit its schema: no q_every.._shape")?;
    let [q_layers, q_heads, queries, q_dim] = shape(&format!("q_every{stride}_shape"))?;
    let fits = (v_layers, v_heads, v_tokens) == (layers, kv_heads, tokens)
        && (q_layers, q_dim) == (layers, dk)
        && queries == tokens.div_ceil(stride)
        && q_heads % kv_heads == 0
        && u16::try_from(layers).is_ok();
    if !fits || strides.next().is_some() {
        return Err("the shapes of k, v and q do not match".to_owned());
    }
    let dir = path.parent().unwrap_or(path).to_owned();
    Ok(Recording { dir, layers, kv_heads, q_heads, tokens, dims: [dk, dv], stride })
}

/// Returns the number between a beginning and an end of `text`.
fn stride_of(text: &str, begin: &str, end: &str) -> Option<usize> {
    let number = text.strip_prefix(begin)?.strip_suffix(end)?;
    number.parse().ok().filter(|n| (1..=1 << 24).contains(n))
}

impl Recording {
    /// Loads `[layers, heads, rows, dim]` f16 values from the file whose name ends in `end`, as
    /// `[rows, heads, dim]` by layer.
    fn load(&self, end: &str, [heads, rows, dim]: [usize; 3]) -> Result<Vec<Vec<f32>>, CaseError> {
        let list = fs::read_dir(&self.dir).map_err(|error| error.to_string())?;
        let mut files =
            list.filter_map(|entry| entry.ok().map(|entry| entry.path())).filter(|path| {
                path.file_name().is_some_and(|name| name.to_string_lossy().ends_with(end))
            });
        let file = files.next().ok_or_else(|| format!("no file ..{end} beside it"))?;
        ensure(files.next().is_none(), || format!("several files ..{end} beside it"))?;
        let bytes = fs::read(&file).map_err(|error| format!("{}: {error}", file.display()))?;
        let sizes = [self.layers, heads, rows, dim, 2];
        let expected = sizes.iter().try_fold(1_usize, |all, n| all.checked_mul(*n));
        ensure(expected == Some(bytes.len()), || {
            format!("{} has {} bytes, the shape needs {expected:?}", file.display(), bytes.len())
        })?;
        let at = |index: usize| half::f16::from_le_bytes([bytes[2 * index], bytes[2 * index + 1]]);
        let layer = |layer: usize| {
            let row = move |row: usize| {
                (0..heads).flat_map(move |head| {
                    let begin = ((layer * heads + head) * rows + row) * dim;
                    begin..begin + dim
                })
            };
            (0..rows).flat_map(row).map(|index| at(index).to_f32()).collect()
        };
        let all: Vec<Vec<f32>> = (0..self.layers).map(layer).collect();
        let finite = all.iter().flatten().all(|x| x.is_finite());
        ensure(finite, || format!("{} holds NaN or infinity", file.display()))?;
        Ok(all)
    }

    fn rows(&self) -> Result<Rows, CaseError> {
        let queries = self.tokens.div_ceil(self.stride);
        Ok(Rows {
            k: self.load("_k.f16", [self.kv_heads, self.tokens, self.dims[0]])?,
            v: self.load("_v.f16", [self.kv_heads, self.tokens, self.dims[1]])?,
            q: self.load(
                &format!("_q_every{}.f16", self.stride),
                [self.q_heads, queries, self.dims[0]],
            )?,
        })
    }

    /// Makes constants from the first half.
    fn calibration(&self, rows: &Rows) -> Result<Calibration, CaseError> {
        let half = self.tokens / 2;
        let heads = self.kv_heads as u32;
        let dims = self.dims.map(|dim| dim as u32);
        let refused = |error: CalibrateError| CaseError::Broken(error.to_string());
        let mut calibrator = Calibrator::new(self.layers as u16, heads, dims)
            .map_err(refused)?
            .skip_first(FULL_PRECISION_PREFIX);
        for layer in 0..self.layers {
            let part = |rows: &[f32], heads: usize, dim: usize| rows[..half * heads * dim].to_vec();
            // Every recorded query also represents the tokens without a recorded query.
            let q_width = self.q_heads * self.dims[0];
            let query = |token: usize| &rows.q[layer][token / self.stride * q_width..][..q_width];
            let q: Vec<f32> = (0..half).flat_map(|token| query(token).iter().copied()).collect();
            let k = part(&rows.k[layer], self.kv_heads, self.dims[0]);
            let v = part(&rows.v[layer], self.kv_heads, self.dims[1]);
            let q_heads = self.q_heads as u32;
            calibrator.observe(layer as u16, 0, &k, &v, &q, q_heads).map_err(refused)?;
        }
        calibrator.finish().map_err(refused)
    }

    /// Returns positions of the queries of the second half, and their numbers.
    fn queries(&self) -> impl DoubleEndedIterator<Item = (usize, usize)> {
        let (tokens, stride) = (self.tokens, self.stride);
        (0..tokens.div_ceil(stride))
            .map(move |n| (n * stride, n))
            .filter(move |q| q.0 >= tokens / 2)
    }

    fn spec(&self, plane: Plane, format: KvFormat) -> Result<CacheSpec, CaseError> {
        let formats = match plane {
            Plane::Key => [format, KvFormat::F32],
            Plane::Value => [KvFormat::F32, format],
        };
        let [dk, dv] = self.dims.map(|dim| dim as u32);
        let spec = CacheSpec::builder()
            .layers(self.layers as u16)
            .kv_heads(self.kv_heads as u32)
            .head_dims(dk, dv)
            .formats(formats[0], formats[1])
            .transform(Transform::On)
            .full_precision_prefix(FULL_PRECISION_PREFIX)
            .paged(16, self.tokens.div_ceil(16) as u32 + FULL_PRECISION_PREFIX);
        Ok(spec.build()?)
    }
}

/// Runs every format for K and for V.
pub(super) fn run(backend: &AnyBackend, recording: &Recording) -> CaseResult {
    let rows = recording.rows()?;
    let calibration = recording.calibration(&rows)?;
    for plane in [Plane::Key, Plane::Value] {
        let expected = Expected::new(recording, &rows, &calibration, plane)?;
        for (format, gaussian) in gaussian::ERRORS {
            let spec = recording.spec(plane, *format)?;
            let cache =
                KvCache::builder(backend.clone(), spec).calibration(calibration.clone()).build()?;
            let got = attend(cache, recording, &rows).at(format!("{plane:?} as {format}"))?;
            expected.check(&got, *gaussian).at(format!("{plane:?} as {format}"))?;
        }
    }
    Ok(Outcome::Holds)
}

/// Returns outputs of the queries, last one first, by layer: an earlier query attends to the rows
/// that are left after the later tokens are truncated.
fn attend(
    mut cache: KvCache,
    recording: &Recording,
    rows: &Rows,
) -> Result<Vec<Vec<f32>>, CaseError> {
    let backend = cache.backend().clone();
    let Recording { kv_heads, q_heads, dims: [dk, dv], tokens, .. } = *recording;
    cache.start(seq(1), &[], StartOptions::default())?;
    let stage = |values: &[f32], heads_dim: [usize; 2], queue: &mut AnyQueue| {
        let layout = dense(Axes::Thd, &[values.len() / (heads_dim[0] * heads_dim[1])], heads_dim);
        let tensor = layout.pack(DType::F32, &[values.to_vec()], f32::NAN);
        Staged::new(&backend, queue, (layout, tensor), Place::Host)
    };
    let mut kv = Vec::new();
    for (k, v) in rows.k.iter().zip(&rows.v) {
        let queue = cache.queue_mut();
        kv.push([stage(k, [kv_heads, dk], queue)?, stage(v, [kv_heads, dv], queue)?]);
    }
    let mut step = cache.begin_step(&[StepInput::count(seq(1), tokens as u32)])?;
    for (layer, [k, v]) in (0_u16..).zip(&kv) {
        step.write(layer, k.view(), v.view(), Axes::Thd)?;
    }
    step.commit()?;
    let options = AttentionOptions::causal(limits::scale(dk));
    let mut all = Vec::new();
    for (position, number) in recording.queries().rev() {
        cache.truncate(seq(1), position as u32 + 1)?;
        for layer in 0..recording.layers {
            let queue = cache.queue_mut();
            let q = stage(
                &rows.q[layer][number * q_heads * dk..][..q_heads * dk],
                [q_heads, dk],
                queue,
            )?;
            let layout = dense(Axes::Thd, &[1], [q_heads, dv]);
            let mut out = Staged::output(&backend, queue, (layout, DType::F32), Place::Device)?;
            let mut step = cache.begin_step(&[StepInput::query(seq(1), 1)])?;
            step.attend(layer as u16, q.view(), out.view_mut(), &options)?;
            step.commit()?;
            all.push(out.read(backend.capabilities(), cache.queue_mut())?.values());
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests;
