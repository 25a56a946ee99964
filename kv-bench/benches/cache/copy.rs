//! Copies between blocks, as forks make them.
use criterion::{BenchmarkId, Criterion, Throughput};
use kv::BlockId;
use kv::backend::KvStorage;
use kv::backend::plan::{BlockCopy, CopyArgs, CopyPlan};
use kv::backend::{Backend, Queue};
use kv_bench::{BLOCK_SIZE, Shape, is_smoke};

const LAYERS: usize = 8;

pub(crate) fn benches(criterion: &mut Criterion) {
    let counts: &[u32] = if is_smoke() { &[2] } else { &[1, 64] };
    let mut group = criterion.benchmark_group("copy_blocks");
    for &count in counts {
        let shape = Shape::llama(2, count * BLOCK_SIZE);
        let spec = shape.spec(0).unwrap();
        let [only] = spec.groups() else { unreachable!("the shape has one layer") };
        let [layout, _] = *only.layouts();
        let device = super::cpu();
        let mut storage = KvStorage::new(&device, *only.layouts()).unwrap();
        for layer in 0..LAYERS {
            storage.allocate(&device, layer).unwrap();
        }
        let mut queue = device.queue().unwrap();
        for tokens in [BLOCK_SIZE, BLOCK_SIZE / 2] {
            // The first half of the pool into the second.
            let pairs = (0..count).zip(count..).map(|(from, to)| (BlockId(from), BlockId(to)));
            let copies: Vec<_> =
                pairs.map(|(from, to)| BlockCopy { from, to, slots: tokens }).collect();
            let rows = u64::from(count) * u64::from(tokens) * u64::try_from(LAYERS).unwrap();
            group.throughput(Throughput::Bytes(shape.token_bytes() * rows));
            let name = BenchmarkId::new(format!("{tokens}_tokens"), count);
            group.bench_function(name, |bencher| {
                bencher.iter(|| {
                    let plan = CopyPlan::new(&layout, &copies).unwrap();
                    let args = CopyArgs::new(&plan, storage.view()).unwrap();
                    queue.copy_blocks(&plan, args).unwrap();
                });
            });
        }
    }
}
