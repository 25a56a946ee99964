//! The cost of recurrent states: in a step's bookkeeping, in lookups, and as copies.
use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput};
use kv::backend::{AnyBackend, NullBackend};
use kv::spec::StateFormat;
use kv::{CacheSpec, DType, KvCache, SequenceId, StartOptions, Step, StepInput, TensorView};
use kv_bench::{BLOCK_SIZE, is_smoke};
use rayon::prelude::*;

pub(crate) fn benches(criterion: &mut Criterion) {
    steps(criterion);
    lookups(criterion);
    copies(criterion);
}

/// Steps between two restarts of all sequences, which are not measured.
const STEPS: u32 = 64;

/// Measures decode steps by sequence, with and without a state beside the rows.
fn steps(criterion: &mut Criterion) {
    let sequences = if is_smoke() { 10 } else { 1000 };
    let mut group = criterion.benchmark_group("states");
    group.throughput(Throughput::Elements(sequences.into()));
    for (name, has_states) in [("rows", false), ("rows_and_state", true)] {
        let mut cache = small(sequences * (STEPS / BLOCK_SIZE + 1), sequences * 2, has_states);
        let ids = || (0..sequences).map(|id| SequenceId(id.into()));
        let inputs: Vec<_> = ids().map(|id| StepInput::tokens(id, &[7])).collect();
        group.bench_function(BenchmarkId::new("step", name), |bencher| {
            bencher.iter_custom(|iterations| {
                let mut took = Duration::ZERO;
                for step in 0..iterations {
                    if step % u64::from(STEPS) == 0 {
                        cache.reset().unwrap();
                        let options = StartOptions::default().with_reuse(false);
                        ids().for_each(|id| {
                            cache.start(id, &[], options).unwrap();
                        });
                    }
                    let begun = Instant::now();
                    commit(cache.begin_step(&inputs).unwrap(), has_states);
                    took += begun.elapsed();
                }
                took
            });
        });
    }
    group.finish();
}

/// Measures the lookup of a cached prompt, with and without a state behind it.
fn lookups(criterion: &mut Criterion) {
    let tokens = if is_smoke() { 64 } else { 8192 };
    let prompt: Vec<u32> = (0..=tokens).collect();
    let mut group = criterion.benchmark_group("states");
    group.throughput(Throughput::Elements(tokens.into()));
    for (name, has_states) in [("rows", false), ("rows_and_state", true)] {
        let mut cache = small(tokens / BLOCK_SIZE + 2, 4, has_states);
        let id = SequenceId(0);
        cache.start(id, &prompt, StartOptions::default()).unwrap();
        let input = StepInput::tokens(id, &prompt[..prompt.len() - 1]);
        commit(cache.begin_step(&[input]).unwrap(), has_states);
        cache.release(id).unwrap();
        group.bench_function(BenchmarkId::new("lookup", name), |bencher| {
            bencher.iter(|| {
                let cached = cache.state().probe(&prompt, StartOptions::default());
                assert_eq!(cached, tokens);
                cached
            });
        });
    }
    group.finish();
}

/// Measures copies of a state of 35B models with linear attention, 30 layers, beside a plain copy
/// of as many bytes by as many threads.
fn copies(criterion: &mut Criterion) {
    let layers: u16 = if is_smoke() { 2 } else { 30 };
    let mut group = criterion.benchmark_group("states");
    let bytes = u64::from(layers) * (8192 * 3 + 32 * 128 * 128) * 4;
    group.throughput(Throughput::Bytes(bytes));
    group.sample_size(20);
    let source = vec![1_u8; usize::try_from(bytes).unwrap()];
    let mut target = source.clone();
    group.bench_function("copy/plain", |bencher| {
        bencher.iter(|| {
            let chunks = target.par_chunks_mut(1 << 20).zip(source.par_chunks(1 << 20));
            chunks.for_each(|(to, from)| to.copy_from_slice(from));
            black_box(&target);
        });
    });
    let formats =
        [("same", StateFormat::Same), ("f16", StateFormat::F16), ("int8", StateFormat::Int8)];
    for (name, format) in formats {
        let spec = CacheSpec::builder().layers(layers).paged(BLOCK_SIZE, 64);
        let spec = spec.states(0..layers, |states| {
            let states = states.part([8192, 3], DType::F32).part([32, 128, 128], DType::F32);
            states.slots(6).snapshots(2, format)
        });
        let mut cache = KvCache::new(super::cpu(), spec.build().unwrap()).unwrap();
        fill(&mut cache, layers);
        let id = SequenceId(0);
        let mut next = 0;
        group.bench_function(BenchmarkId::new("snapshot", name), |bencher| {
            bencher.iter_custom(|iterations| {
                let mut took = Duration::ZERO;
                for _ in 0..iterations {
                    next += 1;
                    cache.start(id, &[next, 2, 3], StartOptions::default()).unwrap();
                    let step = cache.begin_step(&[StepInput::tokens(id, &[next])]).unwrap();
                    commit_all(step, layers);
                    let begun = Instant::now();
                    cache.keep_state(id).unwrap();
                    synchronize(&mut cache);
                    took += begun.elapsed();
                    cache.release(id).unwrap();
                }
                took
            });
        });
        group.bench_function(BenchmarkId::new("restore", name), |bencher| {
            bencher.iter_custom(|iterations| {
                let mut took = Duration::ZERO;
                for _ in 0..iterations {
                    let cached = cache.start(id, &[next, 2], StartOptions::default()).unwrap();
                    assert_eq!(cached, 1);
                    let begun = Instant::now();
                    drop(cache.begin_step(&[StepInput::tokens(id, &[2])]).unwrap());
                    synchronize(&mut cache);
                    took += begun.elapsed();
                    cache.release(id).unwrap();
                }
                took
            });
        });
    }
    group.finish();
}

/// Makes a cache without bytes to speak of.
fn small(blocks: u32, slots: u32, has_states: bool) -> KvCache<NullBackend> {
    let spec = CacheSpec::builder().layers(if has_states { 2 } else { 1 });
    let spec = spec.kv_heads(1).head_dim(2).paged(BLOCK_SIZE, blocks);
    let spec = if has_states {
        spec.states([1], |states| {
            states.part([2], DType::F32).slots(slots).snapshots(16, StateFormat::Same)
        })
    } else {
        spec
    };
    KvCache::new(NullBackend::new(), spec.build().unwrap()).unwrap()
}

fn commit(mut step: Step<'_, NullBackend>, has_states: bool) {
    step.mark_written();
    if has_states {
        step.mark_state_written(1).unwrap();
    }
    step.commit().unwrap();
}

/// Writes every slot once: memory that nothing was written to costs nothing to read.
fn fill(cache: &mut KvCache<AnyBackend>, layers: u16) {
    let values = kv_bench::values(3 * 32 * 128 * 128);
    let ids = [1, 2, 3].map(SequenceId);
    for id in ids {
        cache.start(id, &[], StartOptions::default().with_reuse(false)).unwrap();
    }
    let inputs = ids.map(|id| StepInput::tokens(id, &[7]));
    for _ in 0..3 {
        let mut step = cache.begin_step(&inputs).unwrap();
        for layer in 0..layers {
            let window = TensorView::host(&values[..3 * 8192 * 3], &[3, 8192, 3]);
            step.write_state(layer, 0, window).unwrap();
            step.write_state(layer, 1, TensorView::host(&values, &[3, 32, 128, 128])).unwrap();
        }
        step.commit().unwrap();
    }
    cache.reset().unwrap();
}

fn commit_all(mut step: Step<'_>, layers: u16) {
    (0..layers).for_each(|layer| step.mark_state_written(layer).unwrap());
    step.commit().unwrap();
}

/// Waits for the device.
fn synchronize(cache: &mut KvCache<AnyBackend>) {
    use kv::backend::{Fence, Queue};
    cache.queue_mut().submit().unwrap().wait().unwrap();
}
