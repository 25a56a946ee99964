//! The cost of prompts that hit: with many pictures among their tokens, and beside many pins.
use criterion::{BenchmarkId, Criterion, Throughput};
use kv::backend::NullBackend;
use kv::reuse::ContentSpan;
use kv::tier::{Identity, ModelDigest, TierOptions, TieredCache};
use kv::{CacheSpec, KvCache, SequenceId, StartOptions, StepInput};
use kv_bench::{BLOCK_SIZE, is_smoke};

pub(crate) fn benches(criterion: &mut Criterion) {
    pictures(criterion);
    pins(criterion);
}

/// Measures the start of a cached prompt by the number of its pictures, one in each block.
fn pictures(criterion: &mut Criterion) {
    let counts: &[u32] = if is_smoke() { &[10] } else { &[100, 1_600, 12_800] };
    let mut group = criterion.benchmark_group("pictures");
    for &count in counts {
        let prompt: Vec<u32> = (0..=count * BLOCK_SIZE).collect();
        let begin = |n: u32| n * BLOCK_SIZE + 3;
        let spans = (0..count).map(|n| ContentSpan { begin: begin(n), len: 8, id: n.into() });
        let spans: Vec<_> = spans.collect();
        let options = StartOptions::default().with_contents(&spans);
        let mut cache = cache(count + 2);
        compute(&mut cache, SequenceId(0), &prompt, options);
        group.throughput(Throughput::Elements(count.into()));
        group.bench_function(BenchmarkId::new("start", count), |bencher| {
            bencher.iter(|| {
                let reused = cache.start(SequenceId(1), &prompt, options).unwrap();
                assert_eq!(reused, count * BLOCK_SIZE);
                cache.release(SequenceId(1)).unwrap();
            });
        });
    }
    group.finish();
}

/// Measures a poll of tiers that have nothing to do, by the number of pins.
fn pins(criterion: &mut Criterion) {
    let counts: &[u32] = if is_smoke() { &[10] } else { &[500, 16_000] };
    let mut group = criterion.benchmark_group("pins");
    for &count in counts {
        let mut cache = cache(count + 2);
        let identity = Identity::new(ModelDigest::of_bytes(b"weights"));
        let options = StartOptions::default();
        for pin in 0..count {
            let prompt: Vec<u32> = (0..BLOCK_SIZE).map(|at| pin * BLOCK_SIZE + at).collect();
            compute(&mut cache, SequenceId(pin.into()), &prompt, options);
            cache.release(SequenceId(pin.into())).unwrap();
            cache.pin_prefix(&prompt, options);
        }
        let mut cache = TieredCache::new(cache, identity, TierOptions::new()).unwrap();
        cache.poll().unwrap();
        group.bench_function(BenchmarkId::new("poll", count), |bencher| {
            bencher.iter(|| cache.poll().unwrap());
        });
    }
    group.finish();
}

fn cache(blocks: u32) -> KvCache<NullBackend> {
    let spec = CacheSpec::builder().layers(1).kv_heads(1).head_dim(2);
    let spec = spec.paged(BLOCK_SIZE, blocks).changes(1 << 16).build().unwrap();
    KvCache::new(NullBackend::new(), spec).unwrap()
}

fn compute(
    cache: &mut KvCache<NullBackend>,
    id: SequenceId,
    prompt: &[u32],
    options: StartOptions<'_>,
) {
    cache.start(id, prompt, options).unwrap();
    let mut step = cache.begin_step(&[StepInput::tokens(id, prompt)]).unwrap();
    step.mark_written();
    step.commit().unwrap();
}
