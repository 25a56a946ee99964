//! A decode step allocates nothing between `begin_step` and `commit`, host side and kernels
//! included, once the buffers of the first steps have reached their size.
#![expect(
    unsafe_code,
    clippy::unwrap_used,
    reason = "a test, and its helpers outside the test functions"
)]
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kv_core::backend::{AnyBackend, Backend};
use kv_core::calibration::{Calibration, LayerCalibration, PlaneCalibration};
use kv_core::plan::Determinism;
use kv_core::spec::{KeyMean, Transform};
use kv_core::{
    AttentionOptions, Axes, CacheError, CacheSpec, KvCache, KvFormat, ScaleGroup, Scaling,
    SequenceId, StartOptions, StepInput, TensorView, TensorViewMut,
};
use kv_cpu::{CpuBackend, CpuOptions, Workers};

thread_local! {
    static COUNTED: Cell<Option<u64>> = const { Cell::new(None) };
}

/// The system's allocator, which counts the allocations of a thread while its counter is on.
struct Counting;

fn count() {
    // A thread that ends has no counter any more, and is not counted.
    let _ = COUNTED.try_with(|counted| counted.set(counted.get().map(|n| n + 1)));
}

// SAFETY: every method hands its arguments to `System` unchanged and returns what that returns.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller keeps `GlobalAlloc::alloc`'s contract, which is `System`'s.
        unsafe { System.alloc(layout) }
    }
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: as in `alloc`.
        unsafe { System.alloc_zeroed(layout) }
    }
    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: `ptr` came from `System` through this allocator, with this layout.
        unsafe { System.realloc(ptr, layout, size) }
    }
    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: `ptr` came from `System` through this allocator, with this layout.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const LAYERS: u16 = 2;
const HEADS: u32 = 2;
const DIM: u32 = 16;
const BATCH: u32 = 5;

struct Tensors {
    kv: Vec<f32>,
    q: Vec<f32>,
    out: Vec<f32>,
    lse: Vec<f32>,
}

/// One step of the whole batch, with `tokens` new tokens per sequence. Prompts are written without
/// attention, which would take most of the test's time; their steps are not counted.
fn step<B: Backend>(
    cache: &mut KvCache<B>,
    inputs: &[StepInput<'_>],
    tokens: u32,
    tensors: &mut Tensors,
) -> Result<(), CacheError> {
    let rows = BATCH * tokens;
    let len = |dims: &[u32]| usize::try_from(dims.iter().product::<u32>()).unwrap();
    let q_heads = u32::try_from(tensors.q.len()).unwrap() / (BATCH * DIM);
    let (kv, q) = ([rows, HEADS, DIM], [rows, q_heads, DIM]);
    let options = AttentionOptions::causal(0.25);
    let mut step = cache.begin_step(inputs)?;
    for layer in 0..LAYERS {
        let view = TensorView::host(&tensors.kv[..len(&kv)], &kv);
        step.write(layer, view, view, Axes::Thd)?;
        if tokens > 1 {
            continue;
        }
        let queries = TensorView::host(&tensors.q[..len(&q)], &q);
        let out = TensorViewMut::host(&mut tensors.out[..len(&q)], &q);
        let lse = TensorViewMut::host(&mut tensors.lse[..len(&q[..2])], &q[..2]);
        step.attend_lse(layer, queries, out, lse, &options)?;
    }
    step.commit()
}

fn cpu() -> CpuBackend {
    CpuBackend::open(CpuOptions::default().with_threads(1)).unwrap()
}

/// The cache that a step reads and writes.
#[derive(Clone, Copy)]
struct Stored {
    format: KvFormat,
    block_size: u32,
    full_precision_prefix: u32,
    tail: bool,
    key_mean: KeyMean,
    /// Query heads per kv head.
    group: usize,
}

impl Stored {
    fn plain(format: KvFormat, block_size: u32) -> Self {
        let key_mean = KeyMean::Calibrated;
        Self { format, block_size, full_precision_prefix: 0, tail: false, key_mean, group: 4 }
    }
}

/// A mean and scales for every layer, as a calibration would find them.
fn calibration(format: KvFormat) -> Calibration {
    let (heads, head_dim) = [HEADS, DIM].map(|n| usize::try_from(n).unwrap()).into();
    let scales = if format.given_scales() == Some(Scaling::Head) { heads } else { 1 };
    let v = PlaneCalibration { scales: vec![0.01; scales], ..PlaneCalibration::default() };
    let k = PlaneCalibration { mean: vec![0.25; heads * head_dim], ..v.clone() };
    let layer = LayerCalibration { k, v };
    Calibration::new(vec![layer; usize::from(LAYERS)])
}

fn allocations(backend: impl Backend, determinism: Determinism, stored: Stored) -> u64 {
    let spec = CacheSpec::builder()
        .layers(LAYERS)
        .kv_heads(HEADS)
        .head_dim(DIM)
        .format(stored.format)
        .transform(Transform::On)
        .full_precision_prefix(stored.full_precision_prefix)
        .tail(stored.tail)
        .key_mean(stored.key_mean)
        .paged(stored.block_size, 40_000 / stored.block_size)
        .determinism(determinism)
        .build()
        .unwrap();
    let mut cache =
        KvCache::builder(backend, spec).calibration(calibration(stored.format)).build().unwrap();
    let prompt = 1040_u32;
    let len = |rows: u32| usize::try_from(BATCH * rows * HEADS * DIM).unwrap();
    let queries = stored.group * len(1);
    let mut tensors = Tensors {
        kv: vec![0.5; len(prompt)],
        q: vec![0.5; queries],
        out: vec![0.0; queries],
        lse: vec![0.0; queries],
    };
    let ids: Vec<_> = (0..u64::from(BATCH)).map(SequenceId).collect();
    for id in &ids {
        cache.start(*id, &[], StartOptions::default()).unwrap();
    }
    let prefill: Vec<_> = ids.iter().map(|id| StepInput::count(*id, prompt)).collect();
    step(&mut cache, &prefill, prompt, &mut tensors).unwrap();
    let decode: Vec<_> = ids.iter().map(|id| StepInput::tokens(*id, &[7])).collect();
    // Past the end of a block, where lists of a step are longest.
    for _ in 0..20 {
        step(&mut cache, &decode, 1, &mut tensors).unwrap();
    }
    COUNTED.set(Some(0));
    // Far enough to cross several blocks.
    for _ in 0..100 {
        step(&mut cache, &decode, 1, &mut tensors).unwrap();
    }
    COUNTED.take().unwrap()
}

#[test]
fn the_counter_counts() {
    COUNTED.set(Some(0));
    let kept = vec![1_u8];
    assert_eq!(COUNTED.take(), Some(1));
    drop(kept);
}

#[test]
fn decode_steps_allocate_nothing() {
    for format in [KvFormat::F32, KvFormat::F16, KvFormat::Bf16] {
        for block_size in [1, 16] {
            let stored = Stored::plain(format, block_size);
            assert_eq!(allocations(cpu(), Determinism::Fast, stored), 0, "{format}");
        }
    }
}

/// More query heads than a register tile has rows.
#[test]
fn large_groups_allocate_nothing() {
    for format in [KvFormat::Bf16, KvFormat::L4(ScaleGroup::Row)] {
        let stored = Stored { group: 20, ..Stored::plain(format, 16) };
        assert_eq!(allocations(cpu(), Determinism::Fast, stored), 0, "{format}");
    }
}

#[test]
fn transformed_codes_and_wide_rows_allocate_nothing() {
    for format in KvFormat::all().filter(|format| format.is_quantised()) {
        let stored = Stored { full_precision_prefix: 4, ..Stored::plain(format, 16) };
        assert_eq!(allocations(cpu(), Determinism::Fast, stored), 0, "{format}");
    }
}

#[test]
fn tails_and_means_of_blocks_allocate_nothing() {
    let l4 = Stored::plain(KvFormat::L4(ScaleGroup::Row), 16);
    for key_mean in [KeyMean::Calibrated, KeyMean::PerBlock] {
        let stored = Stored { full_precision_prefix: 4, tail: true, key_mean, ..l4 };
        assert_eq!(allocations(cpu(), Determinism::Fast, stored), 0, "{key_mean:?}");
    }
}

#[test]
fn decode_steps_over_split_contexts_allocate_nothing() {
    for format in [KvFormat::F32, KvFormat::L4(ScaleGroup::Row)] {
        let stored = Stored::plain(format, 16);
        assert_eq!(allocations(cpu(), Determinism::BatchInvariant, stored), 0, "{format}");
    }
}

#[test]
fn erasure_allocates_nothing() {
    for format in [KvFormat::Bf16, KvFormat::Int8(Scaling::Row)] {
        let erased = AnyBackend::new(cpu());
        let stored = Stored::plain(format, 16);
        assert_eq!(allocations(erased, Determinism::BatchInvariant, stored), 0, "{format}");
    }
}

/// Makes all calls on the calling thread, and counts the runs.
#[derive(Default)]
struct InTurn(AtomicUsize);

impl Workers for InTurn {
    fn count(&self) -> usize {
        3
    }
    fn run(&self, workers: usize, task: &(dyn Fn(usize) + Sync)) {
        self.0.fetch_add(1, Ordering::Relaxed);
        (0..workers).for_each(task);
    }
}

#[test]
fn threads_of_the_program_are_called_without_an_allocation() {
    let workers = Arc::new(InTurn::default());
    let given: Arc<dyn Workers> = Arc::<InTurn>::clone(&workers);
    let backend = CpuBackend::open(CpuOptions::default().with_workers(given)).unwrap();
    let stored = Stored::plain(KvFormat::Bf16, 16);
    assert_eq!(allocations(backend, Determinism::Fast, stored), 0);
    assert!(workers.0.load(Ordering::Relaxed) > 100, "steps were run in parallel");
}
