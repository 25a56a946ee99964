//! The cost of a step before any byte of K or V moves.
use std::hint::black_box;

use criterion::{BatchSize, BenchmarkId, Criterion, Throughput};
use kv::backend::{Backend, NullBackend};
use kv::{Axes, CacheSpec, KvCache, SequenceId, StartOptions, StepInput, TensorView};
use kv_bench::{BLOCK_SIZE, Shape, is_smoke, values};

const SEQUENCES: u32 = 1000;
/// Parallel workers for which contexts are split.
const WORKERS: u32 = 16;

pub(crate) fn benches(criterion: &mut Criterion) {
    let contexts: &[u32] = if is_smoke() { &[64] } else { &[64, 4096] };
    let mut group = criterion.benchmark_group("plan");
    group.throughput(Throughput::Elements(SEQUENCES.into()));
    for &context in contexts {
        let shape = Shape::bookkeeping(SEQUENCES, context);
        let mut cache = shape.filled(NullBackend::new(), 1).unwrap();
        group.bench_function(BenchmarkId::new("null/roll_back", context), |bencher| {
            let inputs = decode(&shape);
            bencher.iter(|| plan(&mut cache, &inputs));
        });
        group.bench_function(BenchmarkId::new("null/commit_and_truncate", context), |bencher| {
            let inputs = decode(&shape);
            let rows = values(shape.token_values() * u64::from(SEQUENCES));
            bencher.iter(|| step_and_back(&mut cache, &shape, &inputs, &rows));
        });
        let mut cache = shape.filled(super::cpu(), 1).unwrap();
        group.bench_function(BenchmarkId::new("cpu/roll_back", context), |bencher| {
            let inputs = decode(&shape);
            bencher.iter(|| plan(&mut cache, &inputs));
        });
    }
    group.finish();
    beside_a_long_one(criterion);
    one_by_one(criterion);
}

/// Measures decode steps that get their sequences one after another, with contexts that are split:
/// a sequence costs the same in a step of any size.
fn one_by_one(criterion: &mut Criterion) {
    let counts: &[u32] = if is_smoke() { &[20] } else { &[500, 2_000, 8_000] };
    let mut group = criterion.benchmark_group("add");
    for &count in counts {
        let spec = CacheSpec::builder().layers(1).kv_heads(1).head_dim(2);
        let spec = spec.paged(BLOCK_SIZE, 64 * count).build().unwrap();
        let capabilities = NullBackend::new().capabilities().clone().with_workers(WORKERS);
        let device = NullBackend::new().with_capabilities(capabilities);
        let mut cache = KvCache::new(device, spec).unwrap();
        let ids = || (0..count).map(|id| SequenceId(id.into()));
        let first: Vec<_> = ids().map(|id| StepInput::count(id, 900)).collect();
        for id in ids() {
            cache.start(id, &[], StartOptions::default()).unwrap();
        }
        let mut step = cache.begin_step(&first).unwrap();
        step.mark_written();
        step.commit().unwrap();
        group.throughput(Throughput::Elements(count.into()));
        group.bench_function(BenchmarkId::new("decode", count), |bencher| {
            bencher.iter(|| {
                let mut step = cache.begin_step(&[]).unwrap();
                for id in ids() {
                    step.add(StepInput::tokens(id, &[7])).unwrap();
                }
                black_box(step.positions());
            });
        });
    }
    group.finish();
}

/// Measures steps of many one-token sequences and one long sequence: the step that prefills the
/// long one, and the decode steps after it.
fn beside_a_long_one(criterion: &mut Criterion) {
    let (others, tokens) = if is_smoke() { (30, 1000) } else { (30_000, 999_999) };
    let mut group = criterion.benchmark_group("plan");
    let shape = Shape::bookkeeping(others + 1, BLOCK_SIZE);
    let long = SequenceId(others.into());
    let empty = || {
        let blocks = others + tokens / BLOCK_SIZE + 1;
        let spec = CacheSpec::builder().layers(1).kv_heads(1).head_dim(2);
        let spec = spec.paged(BLOCK_SIZE, blocks).build().unwrap();
        let mut cache = KvCache::new(NullBackend::new(), spec).unwrap();
        for sequence in shape.sequences() {
            cache.start(sequence, &[], StartOptions::default()).unwrap();
        }
        cache
    };
    let first: Vec<_> = shape
        .sequences()
        .map(|id| StepInput::count(id, if id == long { tokens } else { 1 }))
        .collect();
    let commit = |mut cache: KvCache<NullBackend>| {
        let mut step = cache.begin_step(&first).unwrap();
        step.mark_written();
        step.commit().unwrap();
        cache
    };
    group.throughput(Throughput::Elements((others + 1).into()));
    group.bench_function(BenchmarkId::new("beside_a_long_one/first", others), |bencher| {
        bencher.iter_batched(empty, commit, BatchSize::PerIteration);
    });
    let mut cache = commit(empty());
    let inputs = decode(&shape);
    group.bench_function(BenchmarkId::new("beside_a_long_one/roll_back", others), |bencher| {
        bencher.iter(|| plan(&mut cache, &inputs));
    });
}

/// Makes one new token for every sequence.
fn decode(shape: &Shape) -> Vec<StepInput<'static>> {
    shape.sequences().map(|sequence| StepInput::tokens(sequence, &[7])).collect()
}

/// Plans a step and drops it: reservation, plans, rollback.
fn plan<B: Backend>(cache: &mut KvCache<B>, inputs: &[StepInput<'_>]) {
    let step = cache.begin_step(inputs).unwrap();
    black_box(step.positions());
}

/// Runs a whole step without a device and truncates back to the start.
fn step_and_back<B: Backend>(
    cache: &mut KvCache<B>,
    shape: &Shape,
    inputs: &[StepInput<'_>],
    rows: &[f32],
) {
    let mut step = cache.begin_step(inputs).unwrap();
    let rows = TensorView::host(rows, &[SEQUENCES, shape.kv_heads, shape.head_dim]);
    step.write(0, rows, rows, Axes::Thd).unwrap();
    step.commit().unwrap();
    for sequence in shape.sequences() {
        let len = cache.state().seq_len(sequence).unwrap();
        cache.truncate(sequence, len - 1).unwrap();
    }
}
