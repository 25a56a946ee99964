//! Filled caches, and tensors on the device.
use std::error::Error;

use half::bf16;
use kv_core::backend::{Backend, Fence, Queue};
use kv_core::calibration::{Calibration, LayerCalibration, PlaneCalibration};
use kv_core::error::{DeviceError, DeviceErrorKind};
use kv_core::{
    Axes, CacheError, CacheSpec, DType, KvCache, KvFormat, ScaleGroup, Scaling, SequenceId,
    StartOptions, Step, StepInput, TensorView,
};
use kv_cuda::{CudaBackend, CudaBuffer};
use kv_testkit::Shared;

use crate::bench::Result;

pub(crate) type Cache = KvCache<Shared<CudaBackend>>;

/// Maximum rows of K, and of V, that one filling step writes.
const FILL_ROWS: u32 = 1 << 14;

/// Values of one head in all measures but those of other head dims.
pub(crate) const HEAD_DIM: u32 = 128;
/// Scale of scores: one over the square root of [`HEAD_DIM`].
pub(crate) const SCALE: f32 = 0.088_388_35;

/// Measured formats, all of which have tensor-core kernels; the most common come first.
pub(crate) const FORMATS: [KvFormat; 6] = [
    KvFormat::Bf16,
    KvFormat::Fp8E4m3(Scaling::Tensor),
    KvFormat::Int8(Scaling::Tensor),
    KvFormat::Fp8E4m3(Scaling::Row),
    KvFormat::Int8(Scaling::Row),
    KvFormat::L4(ScaleGroup::Row),
];
/// Number of formats, from the first on, that are measured at every size.
pub(crate) const NUM_MAIN: usize = 3;

/// Returns whether a format needs given scales.
pub(crate) fn is_calibrated(format: KvFormat) -> bool {
    matches!(format, KvFormat::Fp8E4m3(Scaling::Tensor) | KvFormat::Int8(Scaling::Tensor))
}

/// Geometry and content of a cache.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Shape {
    pub(crate) format: KvFormat,
    pub(crate) block_size: u32,
    pub(crate) kv_heads: u32,
    pub(crate) head_dim: u32,
    pub(crate) batch: u32,
    /// Tokens of each sequence, including those of the measured step.
    pub(crate) context: u32,
    /// New tokens of the measured step.
    pub(crate) new: u32,
    pub(crate) order: BlockOrder,
}

/// The order in which a pool gives out its blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BlockOrder {
    /// Almost consecutive, as a new pool does.
    Consecutive,
    /// Random, as after many requests.
    Shuffled,
}

impl Shape {
    /// Returns the bytes of K and V of one token in one layer.
    pub(crate) fn token_bytes(&self) -> u64 {
        self.format.row_bytes(self.head_dim) * u64::from(self.kv_heads) * 2
    }
    /// Returns the same in bf16, as in a caller's tensors.
    pub(crate) fn plain_bytes(&self) -> u64 {
        u64::from(self.head_dim) * u64::from(self.kv_heads) * 4
    }
    fn blocks(&self) -> u32 {
        self.context.div_ceil(self.block_size).saturating_mul(self.batch)
    }
    /// Returns the bytes of one layer.
    pub(crate) fn layer_bytes(&self) -> u64 {
        u64::from(self.blocks()) * u64::from(self.block_size) * self.token_bytes()
    }
    /// Returns the number of layers that hold `bytes` bytes together.
    pub(crate) fn layers_of(&self, bytes: u64) -> u16 {
        let layers = bytes.div_ceil(self.layer_bytes().max(1)).clamp(1, 64);
        u16::try_from(layers).unwrap_or(1)
    }
    pub(crate) fn spec(&self, layers: u16) -> Result<CacheSpec> {
        let sequences = match self.order {
            BlockOrder::Consecutive => self.batch,
            BlockOrder::Shuffled => self.blocks(),
        };
        let spec = CacheSpec::builder()
            .layers(layers)
            .kv_heads(self.kv_heads)
            .head_dim(self.head_dim)
            .format(self.format)
            .max_sequences(sequences)
            .max_seq_len(self.context)
            .paged(self.block_size, self.blocks());
        Ok(spec.build()?)
    }
    pub(crate) fn kv_dims(&self, tokens: u32) -> [u32; 3] {
        [tokens, self.kv_heads, self.head_dim]
    }
    pub(crate) fn sequences(&self) -> impl Iterator<Item = SequenceId> + use<> {
        (0..u64::from(self.batch)).map(SequenceId)
    }
    /// Returns the inputs of the measured step.
    pub(crate) fn step_inputs(&self) -> Vec<StepInput<'static>> {
        let new = self.new;
        self.sequences().map(|id| StepInput::count(id, new)).collect()
    }
    pub(crate) fn total_new(&self) -> u32 {
        self.batch.saturating_mul(self.new)
    }

    /// Creates a cache in which every sequence has all but its new tokens, random in every layer.
    pub(crate) fn filled(&self, device: &Shared<CudaBackend>, layers: u16) -> Result<Cache> {
        let spec = self.spec(layers)?;
        let mut cache = if is_calibrated(self.format) {
            KvCache::builder(device.clone(), spec).calibration(scales(layers)).build()?
        } else {
            KvCache::new(device.clone(), spec)?
        };
        let mut left = self.context.saturating_sub(self.new);
        let chunk = (FILL_ROWS / self.batch.max(1)).clamp(1, left.max(1));
        let rows = chunk.saturating_mul(self.batch);
        let values = u64::from(rows) * self.plain_bytes() / 4;
        let [k, v] = [1, 2].map(|seed| tensor(device, cache.queue_mut(), seed, values));
        let (k, v) = (k?, v?);
        if self.order == BlockOrder::Shuffled {
            self.shuffle(&mut cache, layers, [&k, &v], rows)?;
        }
        for sequence in self.sequences() {
            cache.start(sequence, &[], StartOptions::default())?;
        }
        while left > 0 {
            let now = chunk.min(left);
            let inputs: Vec<_> = self.sequences().map(|id| StepInput::count(id, now)).collect();
            let mut step = cache.begin_step(&inputs)?;
            self.write(&mut step, 0..layers, [&k, &v], now.saturating_mul(self.batch))?;
            step.commit()?;
            left -= now;
        }
        cache.queue_mut().submit()?.wait()?;
        Ok(cache)
    }

    /// Shuffles the free list of an empty pool: sequences of one token take all blocks, at most
    /// `rows` in a step, and are released in random order.
    fn shuffle(
        &self,
        cache: &mut Cache,
        layers: u16,
        tensors: [&CudaBuffer; 2],
        rows: u32,
    ) -> Result<()> {
        let mut ids: Vec<_> = (0..u64::from(self.blocks())).map(SequenceId).collect();
        for part in ids.chunks(usize::try_from(rows)?) {
            for id in part {
                cache.start(*id, &[], StartOptions::default())?;
            }
            let inputs: Vec<_> = part.iter().map(|id| StepInput::count(*id, 1)).collect();
            let mut step = cache.begin_step(&inputs)?;
            self.write(&mut step, 0..layers, tensors, u32::try_from(part.len())?)?;
            step.commit()?;
        }
        ids.sort_by_key(|id| (id.0 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29));
        for id in ids {
            cache.release(id)?;
        }
        Ok(())
    }

    /// Writes the first rows of two tensors to layers of a step.
    pub(crate) fn write(
        &self,
        step: &mut Step<'_, Shared<CudaBackend>>,
        layers: impl IntoIterator<Item = u16>,
        [k, v]: [&CudaBuffer; 2],
        tokens: u32,
    ) -> Result<()> {
        let dims = self.kv_dims(tokens);
        for layer in layers {
            let [k, v] = [k, v].map(|buffer| TensorView::device(DType::Bf16, buffer, 0, &dims));
            step.write(layer, k, v, Axes::Thd)?;
        }
        Ok(())
    }
}

/// Returns given scales for values between -1 and 1.
pub(crate) fn scales(layers: u16) -> Calibration {
    let plane = || PlaneCalibration { scales: vec![1.0 / 120.0], ..PlaneCalibration::default() };
    let layer = LayerCalibration { k: plane(), v: plane() };
    Calibration::new(vec![layer; layers.into()])
}

/// Allocates `values` random bf16 between -1 and 1 on the device.
pub(crate) fn tensor(
    device: &Shared<CudaBackend>,
    queue: &mut <Shared<CudaBackend> as Backend>::Queue,
    seed: u32,
    values: u64,
) -> Result<CudaBuffer> {
    let buffer = device.alloc(values.max(1) * 2)?;
    let mut state = seed.wrapping_mul(2_654_435_761) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        let short = u16::try_from(state >> 16).unwrap_or(0);
        bf16::from_f32(f32::from(short) / 32768.0 - 1.0)
    };
    // In chunks, to use little page-locked memory.
    let (mut at, mut left) = (0, values);
    while left > 0 {
        let now = left.min(1 << 22);
        let part: Vec<bf16> = (0..now).map(|_| next()).collect();
        queue.upload(&buffer, at, bytemuck::cast_slice(&part))?;
        at += now * 2;
        left -= now;
    }
    Ok(buffer)
}

/// Returns whether the device is out of memory: another program may use some of it.
pub(crate) fn is_full(error: &(dyn Error + Send + Sync + 'static)) -> bool {
    let device = match error.downcast_ref::<CacheError>() {
        Some(CacheError::Device(error)) => Some(error),
        _ => error.downcast_ref::<DeviceError>(),
    };
    device.is_some_and(|error| error.kind() == DeviceErrorKind::OutOfMemory)
}

/// Waits for all submitted work of a queue.
pub(crate) fn drain(queue: &mut <Shared<CudaBackend> as Backend>::Queue) -> Result<()> {
    Ok(queue.submit()?.wait()?)
}
