//! The bytes that a device stores for rows, and the values that it reads from given bytes.
use kv_core::backend::{AnyBackend, AnyBuffer, Backend, Plane, Queue};
use kv_core::calibration::{Calibration, LayerCalibration, PlaneCalibration};
use kv_core::spec::Transform;
use kv_core::{Axes, CacheSpec, DType, GroupId, KvCache, KvFormat, StartOptions, StepInput};

use crate::case::CaseError;
use crate::device::{self, Place, Staged, fetch};
use crate::fixture::{dense, seq};

/// The K plane of a cache of one layer and one head, with scale 1.
#[derive(Debug)]
struct Keys {
    cache: KvCache,
    dim: usize,
    tokens: usize,
}

/// Returns the bytes that a device stores for rows of `dim` values, one after another.
pub(super) fn encoded(
    backend: &AnyBackend,
    format: KvFormat,
    dim: usize,
    values: &[f32],
) -> Result<Vec<u8>, CaseError> {
    let mut keys = Keys::new(backend, format, dim, values)?;
    let mut all = Vec::new();
    for token in 0..keys.tokens {
        let (buffer, begin, bytes) = keys.row(token)?;
        let capabilities = backend.capabilities().clone();
        all.extend(fetch(&capabilities, keys.cache.queue_mut(), &buffer, (begin, bytes))?);
    }
    Ok(all)
}

/// Returns the values that a device reads from rows of bytes.
pub(super) fn decoded(
    backend: &AnyBackend,
    format: KvFormat,
    dim: usize,
    rows: &[u8],
) -> Result<Vec<f32>, CaseError> {
    let row_bytes = format.row_bytes(dim as u32) as usize;
    let zeros = vec![0.0; rows.len() / row_bytes * dim];
    let mut keys = Keys::new(backend, format, dim, &zeros)?;
    for (row, token) in rows.chunks(row_bytes).zip(0..) {
        let (buffer, begin, _) = keys.row(token)?;
        keys.cache.queue_mut().upload(&buffer, begin, row)?;
    }
    let tokens = keys.tokens;
    let layout = dense(Axes::Thd, &[tokens], [1, dim]);
    let mut out =
        Staged::output(backend, keys.cache.queue_mut(), (layout, DType::F32), Place::Device)?;
    let ranges = [(seq(1), 0, tokens as u32)];
    keys.cache.gather(0, Plane::Key, &ranges, out.view_mut(), Axes::Thd)?;
    Ok(out.read(backend.capabilities(), keys.cache.queue_mut())?.values())
}

impl Keys {
    fn new(
        backend: &AnyBackend,
        format: KvFormat,
        dim: usize,
        values: &[f32],
    ) -> Result<Self, CaseError> {
        let tokens = values.len() / dim;
        // V is not tested.
        let dim_v = device::dim(backend, 1);
        let spec = CacheSpec::builder()
            .layers(1)
            .kv_heads(1)
            .head_dims(dim as u32, dim_v)
            .formats(format, KvFormat::F32)
            .transform(Transform::Off)
            .paged(16, tokens.div_ceil(16).max(1) as u32);
        let k = PlaneCalibration { scales: vec![1.0], ..Default::default() };
        let given = LayerCalibration { k, v: PlaneCalibration::default() };
        let given = Calibration::new(vec![given]);
        let mut cache =
            KvCache::builder(backend.clone(), spec.build()?).calibration(given).build()?;
        cache.start(seq(1), &[], StartOptions::default())?;
        let mut stage = |values: &[f32], dim: usize| {
            let layout = dense(Axes::Thd, &[tokens], [1, dim]);
            let tensor = layout.pack(DType::F32, &[values.to_vec()], f32::NAN);
            Staged::new(backend, cache.queue_mut(), (layout, tensor), Place::Host)
        };
        let (k, v) =
            (stage(values, dim)?, stage(&vec![0.0; tokens * dim_v as usize], dim_v as usize)?);
        let mut step = cache.begin_step(&[StepInput::count(seq(1), tokens as u32)])?;
        step.write(0, k.view(), v.view(), Axes::Thd)?;
        step.commit()?;
        Ok(Self { cache, dim, tokens })
    }

    /// Locates the row of a token: its buffer, the first byte, and the number of bytes.
    fn row(&self, token: usize) -> Result<(AnyBuffer, u64, u64), CaseError> {
        let group = GroupId(0);
        let storage = self.cache.storage(group).ok_or("a group without storage")?;
        let plane = storage.plane(0, Plane::Key).ok_or("a layer without keys")?;
        let layout = plane.layout();
        let at = layout.slot_map().place(token as u32);
        let table =
            self.cache.state().block_table(seq(1), group).ok_or("a sequence without blocks")?;
        let block = table.get(at.index as usize).ok_or("a token without a block")?;
        let (segment, begin) = layout.locate(block.0);
        let buffer = plane.segment(segment).ok_or("a block without a buffer")?;
        let bytes = layout.format().row_bytes(self.dim as u32);
        Ok((buffer.clone(), begin + layout.row_begin(at, 0), bytes))
    }
}
