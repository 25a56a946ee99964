//! Attention of a whole prompt over itself.
use kv_core::backend::Backend;
use kv_core::{AttentionOptions, DType, KvFormat, TensorView, TensorViewMut};

use crate::bench::{Bench, Result, Work};
use crate::input::{self, HEAD_DIM, SCALE, Shape};

/// Query heads per kv head.
const GROUP: u32 = 4;

pub(crate) fn run(bench: &mut Bench) -> Result<()> {
    let lengths: &[u32] =
        if bench.is_tiny { &[40] } else { &[1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 14] };
    for &context in lengths {
        one(bench, shape(bench, context))?;
    }
    Ok(())
}

/// Returns a prompt that attends over itself.
pub(crate) fn shape(bench: &Bench, context: u32) -> Shape {
    let kv_heads = if bench.is_tiny { 1 } else { 8 };
    let (format, new) = (KvFormat::Bf16, context);
    Shape { format, block_size: 16, kv_heads, head_dim: HEAD_DIM, batch: 1, context, new }
}

pub(crate) fn one(bench: &mut Bench, shape: Shape) -> Result<()> {
    let (tokens, q_heads) = (shape.new, shape.kv_heads * GROUP);
    let name = format!("prefill/{}/gqa{GROUP}/t{tokens}", shape.format);
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
    let options = AttentionOptions::causal(SCALE);
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
    let pairs = u64::from(tokens) * (u64::from(tokens) + 1) / 2 * u64::from(q_heads);
    let flops = pairs * u64::from(shape.head_dim) * 4;
    bench.measure(&name, Work { bytes: 0, flops }, micros)
}
