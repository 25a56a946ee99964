//! The cost of forking a sequence, with its token ids and without, and of reordering beams.
use criterion::{BenchmarkId, Criterion};
use kv::backend::NullBackend;
use kv::{CacheSpec, KvCache, SequenceId, StartOptions, StepInput};
use kv_bench::{BLOCK_SIZE, is_smoke};

const BEAMS: u64 = 8;

pub(crate) fn benches(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("fork");
    let lens: &[u32] = if is_smoke() { &[40] } else { &[1_000, 100_000, 1_000_000] };
    for &len in lens {
        for (name, has_ids) in [("ids", true), ("counts", false)] {
            let mut cache = cache(len, has_ids);
            group.bench_function(BenchmarkId::new(name, len), |bencher| {
                bencher.iter(|| {
                    cache.fork(SequenceId(0), SequenceId(1)).unwrap();
                    cache.release(SequenceId(1)).unwrap();
                });
            });
        }
    }
    let lens: &[u32] = if is_smoke() { &[40] } else { &[32_000, 128_000] };
    for &len in lens {
        let mut cache = cache(len, true);
        let mut beams: Vec<_> = (0..BEAMS).collect();
        for beam in beams.iter().skip(1) {
            cache.fork(SequenceId(0), SequenceId(*beam)).unwrap();
        }
        group.bench_function(BenchmarkId::new("beams", len), |bencher| {
            bencher.iter(|| choose(&mut cache, &mut beams));
        });
    }
}

/// Makes one sequence of `len` tokens, with room for the last blocks of the beams.
fn cache(len: u32, has_ids: bool) -> KvCache<NullBackend> {
    let blocks = len.div_ceil(BLOCK_SIZE) + 64;
    let spec = CacheSpec::builder().layers(1).kv_heads(1).head_dim(2);
    let spec = spec.paged(BLOCK_SIZE, blocks).build().unwrap();
    let mut cache = KvCache::new(NullBackend::new(), spec).unwrap();
    let prompt: Vec<u32> = (0..len).collect();
    let known = if has_ids { prompt.as_slice() } else { &[] };
    cache.start(SequenceId(0), known, StartOptions::default()).unwrap();
    let input = if has_ids {
        StepInput::tokens(SequenceId(0), &prompt)
    } else {
        StepInput::count(SequenceId(0), len)
    };
    let mut step = cache.begin_step(&[input]).unwrap();
    step.mark_written();
    step.commit().unwrap();
    cache
}

/// Continues the first half of the beams twice and releases the other half.
fn choose(cache: &mut KvCache<NullBackend>, beams: &mut Vec<u64>) {
    let first = beams.iter().max().unwrap() + 1;
    let chosen: Vec<_> = (first..first + BEAMS).collect();
    for (child, parent) in chosen.iter().zip(beams.iter().flat_map(|beam| [beam, beam])) {
        cache.fork(SequenceId(*parent), SequenceId(*child)).unwrap();
    }
    for ended in beams.drain(..) {
        cache.release(SequenceId(ended)).unwrap();
    }
    *beams = chosen;
}
