//! The cost of block management: decode steps, cached prompts, evictions.
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput};
use kv::eviction::Eviction;
use kv_bench::blocks::{Decode, Full, Hit, Repeat};
use kv_bench::is_smoke;

pub(crate) fn benches(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("blocks");
    let sequences = if is_smoke() { 10 } else { 1000 };
    let pools: &[u32] = if is_smoke() { &[128] } else { &[1_000, 30_000, 1_000_000] };
    for eviction in [Eviction::Lru, Eviction::ReuseRate] {
        group.throughput(Throughput::Elements(sequences.into()));
        group.bench_function(BenchmarkId::new("decode", eviction), |bencher| {
            let mut decode = Decode::new(sequences, 256, eviction).unwrap();
            bencher.iter_custom(|n| (0..n).map(|_| decode.step().unwrap()).sum());
        });
        group.throughput(Throughput::Elements(1));
        group.bench_function(BenchmarkId::new("hit/64", eviction), |bencher| {
            let mut hit = Hit::new(64, 100, eviction).unwrap();
            assert_eq!(hit.start().unwrap().1, 1024);
            bencher.iter_custom(|n| (0..n).map(|_| hit.start().unwrap().0).sum());
        });
        // The cost must not depend on how often the prompt came before.
        let repeats: &[u32] = if is_smoke() { &[100] } else { &[100, 10_000, 100_000] };
        for &before in repeats {
            let name = format!("repeat/{eviction}");
            group.bench_function(BenchmarkId::new(name, before), |bencher| {
                let mut repeat = Repeat::new(16, before, eviction).unwrap();
                bencher.iter_custom(|n| (0..n).map(|_| repeat.request().unwrap()).sum());
                assert_eq!(repeat.cached(), 1);
            });
        }
        for &num_blocks in pools {
            let name = format!("evict/{eviction}");
            group.bench_function(BenchmarkId::new(name, num_blocks), |bencher| {
                let mut full = Full::new(num_blocks, eviction).unwrap();
                bencher.iter_custom(|n| (0..n).map(|_| full.request().unwrap()).sum::<Duration>());
            });
        }
    }
}
