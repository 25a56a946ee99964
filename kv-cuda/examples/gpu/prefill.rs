//! Attention of a prompt: all of it, or its last tokens after a cached prefix.
use kv_core::backend::Backend;
use kv_core::{AttentionOptions, DType, KvFormat, ScaleGroup, Scaling, TensorView, TensorViewMut};

use crate::bench::{Bench, Result, Work};
use crate::input::{self, BlockOrder, HEAD_DIM, Shape};

/// Query heads per kv head.
const GROUP: u32 = 4;

/// Formats of codes, whose rows prefill decodes.
const CODED: [KvFormat; 4] = [
    KvFormat::Fp8E4m3(Scaling::Tensor),
    KvFormat::Int8(Scaling::Tensor),
    KvFormat::Int8(Scaling::Row),
    KvFormat::L4(ScaleGroup::Row),
];

pub(crate) fn run(bench: &mut Bench) -> Result<()> {
    let lengths: &[u32] =
        if bench.is_tiny { &[40] } else { &[1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 14] };
    for &context in lengths {
        one(bench, whole(bench, context))?;
    }
    for shape in others(bench) {
        one(bench, shape)?;
    }
    Ok(())
}

/// Returns a prompt that attends to itself.
pub(crate) fn whole(bench: &Bench, context: u32) -> Shape {
    let kv_heads = if bench.is_tiny { 1 } else { 8 };
    let (format, head_dim, order) = (KvFormat::Bf16, HEAD_DIM, BlockOrder::Consecutive);
    Shape { format, block_size: 16, kv_heads, head_dim, batch: 1, context, new: context, order }
}

/// Returns what differs from a whole prompt in bf16: few new tokens after a long cached prefix,
/// other head dims, codes, shuffled blocks.
fn others(bench: &Bench) -> Vec<Shape> {
    let (tokens, unit) = if bench.is_tiny { (40, 6) } else { (1 << 12, 1 << 10) };
    let base = whole(bench, tokens);
    // New tokens, and contexts in `unit` tokens.
    let suffix =
        |new: u32, context: u32| Shape { context: context * unit, new: new.min(tokens), ..base };
    let mut shapes = vec![suffix(64, 32), suffix(512, 32), suffix(16, 32)];
    shapes.extend([suffix(64, 8), suffix(64, 128), Shape { batch: 4, ..suffix(64, 32) }]);
    shapes.extend(CODED.map(|format| Shape { format, ..suffix(64, 32) }));
    shapes.push(Shape { format: KvFormat::Int8(Scaling::Tensor), ..suffix(512, 32) });
    shapes.extend([64, 256].map(|head_dim| Shape { head_dim, ..base }));
    shapes.extend(CODED.map(|format| Shape { format, ..base }));
    shapes.push(Shape { order: BlockOrder::Shuffled, ..base });
    shapes
}

/// Returns the name of a measure; what is as in [`whole`] is left out.
fn name(shape: &Shape) -> String {
    let base = format!("prefill/{}/gqa{GROUP}/t{}", shape.format, shape.new);
    let batch = (shape.batch > 1).then(|| format!("/b{}", shape.batch));
    let context = (shape.context != shape.new).then(|| format!("/c{}", shape.context));
    let dim = (shape.head_dim != HEAD_DIM).then(|| format!("/d{}", shape.head_dim));
    let order = (shape.order == BlockOrder::Shuffled).then(|| "/shuffled".to_owned());
    [Some(base), batch, context, dim, order].into_iter().flatten().collect()
}

pub(crate) fn one(bench: &mut Bench, shape: Shape) -> Result<()> {
    let (tokens, q_heads) = (shape.total_new(), shape.kv_heads * GROUP);
    let name = name(&shape);
    if !bench.wants(shape.format, &name) {
        return Ok(());
    }
    let mut cache = shape.filled(&bench.device, 1)?;
    let dims = [tokens, q_heads, shape.head_dim];
    let values: u64 = dims.into_iter().map(u64::from).product();
    let rows = values / u64::from(GROUP);
    let [q, k, v] = [(3, values), (4, rows), (5, rows)]
        .map(|(seed, values)| input::tensor(&bench.device, cache.queue_mut(), seed, values));
    let (q, k, v) = (q?, k?, v?);
    let out = bench.device.alloc(values * 2)?;
    let mut step = cache.begin_step(&shape.step_inputs())?;
    shape.write(&mut step, [0], [&k, &v], tokens)?;
    let options = AttentionOptions::causal(1.0 / (shape.head_dim as f32).sqrt());
    let micros = bench.clock().time(
        &mut step,
        |step, _| {
            let q = TensorView::device(DType::Bf16, &q, 0, &dims);
            let out = TensorViewMut::device(DType::Bf16, &out, 0, &dims);
            Ok(step.attend(0, q, out, &options)?)
        },
        |step| input::drain(step.queue_mut()),
    )?;
    // Two products of `head_dim` multiplications and additions for every pair of a query and a key
    // it sees.
    let [new, cached] = [shape.new, shape.context - shape.new].map(u64::from);
    let pairs = (new * cached + new * (new + 1) / 2) * u64::from(shape.batch * q_heads);
    let flops = pairs * u64::from(shape.head_dim) * 4;
    bench.measure(&name, Work { bytes: 0, flops }, micros)
}
