//! The cost of starting a prompt that host memory has, by its length.
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput};
use kv::backend::NullBackend;
use kv::tier::{Identity, ModelDigest, TierOptions, Tiers, Wait};
use kv::{CacheSpec, KvCache, SequenceId, StartOptions, StepInput};
use kv_bench::{BLOCK_SIZE, is_smoke};

const FIRST: SequenceId = SequenceId(0);

/// Measures `Tiers::start` alone: the lookup, the copies of the null device, the import. It grows
/// with the prompt, and not faster.
pub(crate) fn benches(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("tiers");
    group.sample_size(10);
    let lens: &[u32] = if is_smoke() { &[1_024] } else { &[65_536, 262_144, 1_048_576] };
    for &len in lens {
        let prompt: Vec<u32> = (0..=len).collect();
        let (mut cache, mut tiers) = filled(&prompt);
        group.throughput(Throughput::Elements(len.into()));
        group.bench_function(BenchmarkId::new("start", len), |bencher| {
            bencher.iter_custom(|times| {
                (0..times).map(|_| start(&mut cache, &mut tiers, &prompt)).sum()
            });
        });
    }
}

/// Makes a cache that has lost a prompt, and tiers whose host memory has it.
fn filled(prompt: &[u32]) -> (KvCache<NullBackend>, Tiers<NullBackend>) {
    let blocks = u32::try_from(prompt.len()).unwrap() / BLOCK_SIZE + 8;
    let spec = CacheSpec::builder().layers(1).kv_heads(1).head_dim(2);
    let spec = spec.paged(BLOCK_SIZE, blocks).changes(prompt.len()).build().unwrap();
    let mut cache = KvCache::new(NullBackend::new(), spec).unwrap();
    let identity = Identity::new(ModelDigest::of_bytes(b"bench"));
    let options = TierOptions::new().with_host(256 << 20);
    let mut tiers = Tiers::new(&cache, identity, options).unwrap();
    cache.start(FIRST, prompt, StartOptions::default()).unwrap();
    let mut step = cache.begin_step(&[StepInput::tokens(FIRST, prompt)]).unwrap();
    step.mark_written();
    step.commit().unwrap();
    let deadline = Instant::now() + Duration::from_mins(1);
    assert!(tiers.flush(&mut cache, deadline).unwrap().is_empty(), "host memory has room");
    cache.release(FIRST).unwrap();
    assert!(cache.reset_prefixes().unwrap(), "nothing is held");
    (cache, tiers)
}

fn start(
    cache: &mut KvCache<NullBackend>,
    tiers: &mut Tiers<NullBackend>,
    prompt: &[u32],
) -> Duration {
    let options = StartOptions::default();
    let prefetch = tiers.prefetch_within(cache, prompt, &options, Wait::None);
    let began = Instant::now();
    let reused = tiers.start(cache, prefetch, FIRST, options).unwrap();
    let time = began.elapsed();
    assert_eq!(usize::try_from(reused).unwrap() + 1, prompt.len(), "all of it comes back");
    cache.release(FIRST).unwrap();
    tiers.poll(cache).unwrap();
    assert!(cache.reset_prefixes().unwrap(), "nothing is held");
    time
}
