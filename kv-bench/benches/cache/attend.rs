//! Decode attention: one query per sequence over its whole context.
use criterion::{BenchmarkId, Criterion, Throughput};
use kv::{AttentionOptions, Axes, KvFormat, StepInput, TensorView, TensorViewMut};
use kv_bench::{Shape, is_smoke, values};

pub(crate) fn benches(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("attend");
    for (name, shape) in shapes() {
        // Each cached row has to be read once; queries and outputs are small in comparison.
        let tokens = u64::from(shape.batch) * u64::from(shape.context);
        group.throughput(Throughput::Bytes(shape.token_bytes() * tokens));
        let mut cache = shape.filled(super::cpu(), 1).unwrap();
        let inputs: Vec<_> = shape.sequences().map(|id| StepInput::tokens(id, &[7])).collect();
        let mut step = cache.begin_step(&inputs).unwrap();
        let new = values(shape.token_values() * u64::from(shape.batch));
        let new = TensorView::host(&new, &[shape.batch, shape.kv_heads, shape.head_dim]);
        step.write(0, new, new, Axes::Thd).unwrap();
        let dims = [shape.batch, shape.q_heads, shape.head_dim];
        let q = values(dims.into_iter().map(u64::from).product());
        let mut out = vec![0.0_f32; q.len()];
        let options = AttentionOptions::causal(0.088);
        group.bench_function(name, |bencher| {
            bencher.iter(|| {
                let out = TensorViewMut::host(&mut out, &dims);
                step.attend(0, TensorView::host(&q, &dims), out, &options).unwrap();
            });
        });
    }
}

/// Pairs of batch and context.
type Sizes = &'static [(u32, u32)];

fn shapes() -> Vec<(BenchmarkId, Shape)> {
    let mut shapes = Vec::new();
    let mut add = |format: KvFormat, (batch, context): (u32, u32), q_heads: u32| {
        let name = format!("{format}/b{batch}/gqa{}", q_heads / 8);
        let shape = Shape { q_heads, format, ..Shape::llama(batch, context) };
        shapes.push((BenchmarkId::new(name, context), shape));
    };
    let (plain, all): (Sizes, Sizes) = if is_smoke() {
        (&[(2, 48)], &[(1, 48)])
    } else {
        (&[(1, 1024), (1, 8192), (16, 1024)], &[(1, 4096), (8, 4096)])
    };
    for &format in KvFormat::PLAIN {
        for &size in plain {
            for q_heads in [8, 32] {
                add(format, size, q_heads);
            }
        }
    }
    for &size in all {
        for format in super::compared() {
            add(format, size, 32);
        }
    }
    shapes
}
