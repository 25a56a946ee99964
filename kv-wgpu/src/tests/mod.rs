//! Tests of features that only this backend has: the caller's devices and buffers, unaligned bytes,
//! lost devices, limits. Without an adapter they print that they are skipped, and pass.
#![expect(
    clippy::as_conversions,
    clippy::cast_precision_loss,
    reason = "small numbers, and overflow checks are on"
)]
mod bytes;
mod foreign;
mod lost;
mod params;
mod segments;
mod subgroups;
mod tasks;

use kv_core::backend::{Backend, Plane, Queue, Readback};
use kv_core::error::DeviceError;
use kv_core::{
    AttentionOptions, Axes, CacheSpec, DType, KvCache, KvFormat, SequenceId, StartOptions,
    StepInput, TensorView, TensorViewMut,
};

use crate::adapter::{self, AdapterName};
use crate::{WgpuBackend, WgpuBuffer, WgpuOptions, WgpuQueue};

fn name() -> AdapterName {
    let name = std::env::var("KV_WGPU_ADAPTER").unwrap_or_default();
    if name.is_empty() { AdapterName::default() } else { name.parse().unwrap() }
}

/// Finds the adapter to test; prints why there is none.
fn find() -> Option<wgpu::Adapter> {
    match adapter::find(&name()) {
        Ok((adapter, _)) => Some(adapter),
        Err(error) => {
            eprintln!("skipped: {error}");
            None
        }
    }
}

/// Opens the adapter; prints why there is none.
fn open() -> Option<WgpuBackend> {
    find()?;
    let is_without = std::env::var("KV_WGPU_SUBGROUPS").is_ok_and(|value| value == "0");
    Some(WgpuBackend::open(&WgpuOptions::new(name()).with_subgroups(!is_without)).unwrap())
}

/// Opens a device that the caller owns, with WebGPU's default limits as changed by `change`.
fn device(
    adapter: &wgpu::Adapter,
    change: impl FnOnce(&mut wgpu::Limits),
) -> (wgpu::Device, wgpu::Queue) {
    let mut required_limits = wgpu::Limits::default();
    change(&mut required_limits);
    let descriptor = wgpu::DeviceDescriptor { required_limits, ..Default::default() };
    pollster::block_on(adapter.request_device(&descriptor)).unwrap()
}

/// Reads the whole buffer.
fn read(queue: &mut WgpuQueue, buffer: &WgpuBuffer) -> Result<Vec<u8>, DeviceError> {
    queue.download(buffer, 0, buffer.len())?.wait()
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|four| f32::from_le_bytes(four.try_into().unwrap())).collect()
}

/// Returns pseudo-random values that depend on the seed only.
fn values(seed: u32, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        (state >> 8) as f32 / 8_388_608.0 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

const LAYERS: u16 = 2;
const HEADS: u32 = 4;
const KV_HEADS: u32 = 2;
const DIM: u32 = 64;

/// Describes 16 tokens of two heads of 64: 8 KiB a block and plane.
fn spec(num_blocks: u32) -> CacheSpec {
    let builder = CacheSpec::builder().layers(LAYERS).kv_heads(KV_HEADS).head_dim(DIM);
    builder.format(KvFormat::F32).paged(16, num_blocks).build().unwrap()
}

/// Runs steps of three sequences, one of them a fork. Returns the outputs of every attention, and
/// all rows of K.
fn play<B: Backend>(backend: B, num_blocks: u32) -> (Vec<f32>, Vec<f32>) {
    let mut cache = KvCache::new(backend, spec(num_blocks)).unwrap();
    let [first, second, child] = [1, 2, 3].map(SequenceId);
    cache.start(first, &[], StartOptions::default()).unwrap();
    cache.start(second, &[], StartOptions::default()).unwrap();
    let mut outputs = Vec::new();
    for (lens, seed) in [([70, 50], 1), ([80, 40], 2), ([1, 1], 3), ([1, 40], 4)] {
        let inputs = [StepInput::count(first, lens[0]), StepInput::count(second, lens[1])];
        outputs.extend(run(&mut cache, &inputs, lens[0] + lens[1], seed));
    }
    cache.fork(first, child).unwrap();
    outputs.extend(run(&mut cache, &[StepInput::count(child, 9)], 9, 5));
    let mut all = Vec::new();
    for (sequence, len) in [(first, 152), (second, 131), (child, 161)] {
        let dims = [len, KV_HEADS, DIM];
        let bytes = u64::from(dims.iter().product::<u32>()) * 4;
        let rows = cache.backend().alloc(bytes).unwrap();
        let out = TensorViewMut::device(DType::F32, &rows, 0, &dims);
        cache.gather(1, Plane::Key, &[(sequence, 0, len)], out, Axes::Thd).unwrap();
        let rows = cache.queue_mut().download(&rows, 0, bytes).unwrap().wait().unwrap();
        all.extend(floats(&rows));
    }
    (outputs, all)
}

/// Runs one step over all layers with rows made from `seed`, and returns the outputs of attention.
fn run<B: Backend>(
    cache: &mut KvCache<B>,
    inputs: &[StepInput<'_>],
    tokens: u32,
    seed: u32,
) -> Vec<f32> {
    let (q_dims, kv_dims) = ([tokens, HEADS, DIM], [tokens, KV_HEADS, DIM]);
    let count = |dims: [u32; 3]| dims.iter().product::<u32>() as usize;
    let bytes = count(q_dims) as u64 * 4;
    let mut step = cache.begin_step(inputs).unwrap();
    let mut all = Vec::new();
    for layer in 0..LAYERS {
        let seed = seed * 10 + u32::from(layer) * 3;
        let [k, v] = [seed, seed + 1].map(|seed| values(seed, count(kv_dims)));
        let q = values(seed + 2, count(q_dims));
        let view = |data| TensorView::host::<f32>(data, &kv_dims);
        step.write(layer, view(&k), view(&v), Axes::Thd).unwrap();
        let out = step.cache().backend().alloc(bytes).unwrap();
        let (q, to) = (
            TensorView::host::<f32>(&q, &q_dims),
            TensorViewMut::device(DType::F32, &out, 0, &q_dims),
        );
        step.attend(layer, q, to, &AttentionOptions::causal(0.125)).unwrap();
        let out = step.queue_mut().download(&out, 0, bytes).unwrap();
        all.extend(floats(&out.wait().unwrap()));
    }
    step.commit().unwrap();
    all
}
