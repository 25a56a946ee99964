//! The cost of starting a prompt that host memory has, by its length.
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput};
use kv::backend::NullBackend;
use kv::tier::{Identity, ModelDigest, TierOptions, TieredCache, Wait};
use kv::{CacheSpec, KvCache, SequenceId, StartOptions, StepInput};
use kv_bench::{BLOCK_SIZE, is_smoke};

const FIRST: SequenceId = SequenceId(0);

/// Measures `TieredCache::start` alone: the lookup, the copies of the null device, the import. It
/// grows with the prompt, and not faster.
pub(crate) fn benches(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("tiers");
    group.sample_size(10);
    let lens: &[u32] = if is_smoke() { &[1_024] } else { &[65_536, 262_144, 1_048_576] };
    for &len in lens {
        let prompt: Vec<u32> = (0..=len).collect();
        let mut cache = filled(&prompt);
        group.throughput(Throughput::Elements(len.into()));
        group.bench_function(BenchmarkId::new("start", len), |bencher| {
            bencher.iter_custom(|times| (0..times).map(|_| start(&mut cache, &prompt)).sum());
        });
    }
}

/// Makes a cache that has lost a prompt, whose host memory has it.
fn filled(prompt: &[u32]) -> TieredCache<NullBackend> {
    let blocks = u32::try_from(prompt.len()).unwrap() / BLOCK_SIZE + 8;
    let spec = CacheSpec::builder().layers(1).kv_heads(1).head_dim(2);
    let spec = spec.paged(BLOCK_SIZE, blocks).changes(prompt.len()).build().unwrap();
    let mut cache = KvCache::new(NullBackend::new(), spec).unwrap();
    let identity = Identity::new(ModelDigest::of_bytes(b"bench"));
    let options = TierOptions::new().with_host(256 << 20);
    cache.start(FIRST, prompt, StartOptions::default()).unwrap();
    let mut step = cache.begin_step(&[StepInput::tokens(FIRST, prompt)]).unwrap();
    step.mark_written();
    step.commit().unwrap();
    cache.release(FIRST).unwrap();
    let mut cache = TieredCache::new(cache, identity, options).unwrap();
    let deadline = Instant::now() + Duration::from_mins(1);
    assert!(cache.flush(deadline).unwrap().is_empty(), "host memory has room");
    assert!(cache.cache_mut().reset_prefixes().unwrap(), "nothing is held");
    cache
}

fn start(cache: &mut TieredCache<NullBackend>, prompt: &[u32]) -> Duration {
    let options = StartOptions::default();
    let prefetch = cache.prefetch_within(prompt, &options, Wait::None);
    let began = Instant::now();
    let reused = cache.start(prefetch, FIRST, options).unwrap();
    let time = began.elapsed();
    assert_eq!(usize::try_from(reused).unwrap() + 1, prompt.len(), "all of it comes back");
    cache.cache_mut().release(FIRST).unwrap();
    cache.poll().unwrap();
    assert!(cache.cache_mut().reset_prefixes().unwrap(), "nothing is held");
    time
}
