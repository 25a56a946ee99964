//! Writing rows to the cache and gathering them.
use criterion::{BenchmarkId, Criterion, Throughput};
use kv::backend::Plane;
use kv::{Axes, BlockOrder, KvFormat, StepInput, TensorView, TensorViewMut};
use kv_bench::{Shape, is_smoke, values};

pub(crate) fn benches(criterion: &mut Criterion) {
    append(criterion);
    gather(criterion);
}

/// Writes the new tokens of one step repeatedly.
fn append(criterion: &mut Criterion) {
    let sizes: &[(u32, u32)] = if is_smoke() { &[(2, 3)] } else { &[(64, 1), (1, 1024)] };
    let mut group = criterion.benchmark_group("append");
    for (&(batch, new), order) in each_order(sizes) {
        for format in formats(order) {
            let shape = Shape { format, order, ..Shape::llama(batch, 100) };
            let total = batch * new;
            group.throughput(Throughput::Bytes(shape.token_bytes() * u64::from(total)));
            let mut cache = shape.filled(super::cpu(), new).unwrap();
            let inputs: Vec<_> = shape.sequences().map(|id| StepInput::count(id, new)).collect();
            let mut step = cache.begin_step(&inputs).unwrap();
            let rows = values(shape.token_values() * u64::from(total));
            let rows = TensorView::host(&rows, &[total, shape.kv_heads, shape.head_dim]);
            let name = format!("{format}/{order:?}/b{batch}");
            group.bench_function(BenchmarkId::new(name, new), |bencher| {
                bencher.iter(|| step.write(0, rows, rows, Axes::Thd).unwrap());
            });
        }
    }
}

/// Gathers the keys of a whole sequence as f32.
fn gather(criterion: &mut Criterion) {
    let sizes: &[(u32, u32)] = if is_smoke() { &[(1, 40)] } else { &[(1, 4096)] };
    let mut group = criterion.benchmark_group("gather");
    for (&(batch, context), order) in each_order(sizes) {
        for format in formats(order) {
            let shape = Shape { format, order, ..Shape::llama(batch, context) };
            // Keys only: half of a token.
            group.throughput(Throughput::Bytes(shape.token_bytes() / 2 * u64::from(context)));
            let mut cache = shape.filled(super::cpu(), 0).unwrap();
            let ranges: Vec<_> = shape.sequences().map(|id| (id, 0, context)).collect();
            let mut out = values(shape.token_values() * u64::from(context));
            let dims = [context, shape.kv_heads, shape.head_dim];
            let name = format!("{format}/{order:?}");
            group.bench_function(BenchmarkId::new(name, context), |bencher| {
                bencher.iter(|| {
                    let out = TensorViewMut::host(&mut out, &dims);
                    cache.gather(0, Plane::Key, &ranges, out, Axes::Thd).unwrap();
                });
            });
        }
    }
}

fn each_order(sizes: &[(u32, u32)]) -> impl Iterator<Item = (&(u32, u32), BlockOrder)> {
    sizes.iter().flat_map(|size| [BlockOrder::Hnd, BlockOrder::Nhd].map(|order| (size, order)))
}

/// Returns the formats for a block order: plain ones for both orders, encoded ones for one.
fn formats(order: BlockOrder) -> Vec<KvFormat> {
    match order {
        BlockOrder::Nhd => KvFormat::PLAIN.to_vec(),
        _ => KvFormat::PLAIN.iter().copied().chain(super::compared().skip(1)).collect(),
    }
}
