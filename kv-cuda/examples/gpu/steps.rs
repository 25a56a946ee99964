//! Costs of a step besides its kernels: planning, and launches with and without capture.
use std::time::Instant;

use kv_core::backend::Backend;
use kv_core::{AttentionOptions, DType, KvFormat, Step, TensorView, TensorViewMut};
use kv_cuda::{CudaBackend, CudaBuffer, StepLimits};
use kv_testkit::Shared;

use crate::bench::{Bench, Result, Work, median};
use crate::input::{self, BlockOrder, Cache, HEAD_DIM, SCALE, Shape};

/// Query heads per kv head.
const GROUP: u32 = 4;

pub(crate) fn run(bench: &mut Bench) -> Result<()> {
    plan(bench)?;
    captured(bench)
}

fn shape(bench: &Bench, batch: u32, context: u32) -> Shape {
    let kv_heads = if bench.is_tiny { 1 } else { 8 };
    let (format, head_dim, order) = (KvFormat::Bf16, HEAD_DIM, BlockOrder::Consecutive);
    Shape { format, block_size: 16, kv_heads, head_dim, batch, context, new: 1, order }
}

/// Measures the host's time to begin a decode step: reservation, plans, and sending lists.
fn plan(bench: &mut Bench) -> Result<()> {
    let (batch, context) = if bench.is_tiny { (4, 20) } else { (256, 1 << 10) };
    let shape = shape(bench, batch, context);
    let mut cache = shape.filled(&bench.device, 1)?;
    let inputs = shape.step_inputs();
    let mut samples = Vec::new();
    for round in 0..120 {
        let begin = Instant::now();
        let step = cache.begin_step(&inputs)?;
        let took = begin.elapsed();
        drop(step);
        input::drain(cache.queue_mut())?;
        if round >= 20 {
            samples.push(took.as_secs_f64() * 1e6);
        }
    }
    bench.measure(&format!("begin_step/b{batch}"), Work::default(), median(samples))
}

/// Tensors of one decode step, the same for every layer.
struct Tensors {
    q: CudaBuffer,
    k: CudaBuffer,
    v: CudaBuffer,
    out: CudaBuffer,
}

/// Writes and attends all layers.
fn layers(
    step: &mut Step<'_, Shared<CudaBackend>>,
    (shape, layers): (Shape, u16),
    tensors: &Tensors,
) -> Result<()> {
    let dims = [shape.batch, shape.kv_heads * GROUP, shape.head_dim];
    let options = AttentionOptions::causal(SCALE);
    for layer in 0..layers {
        shape.write(step, [layer], [&tensors.k, &tensors.v], shape.batch)?;
        let q = TensorView::device(DType::Bf16, &tensors.q, 0, &dims);
        let out = TensorViewMut::device(DType::Bf16, &tensors.out, 0, &dims);
        step.attend(layer, q, out, &options)?;
    }
    Ok(())
}

/// Measures a decode step of all layers, launched one by one and as one graph, each from the first
/// call to the end of its work.
fn captured(bench: &mut Bench) -> Result<()> {
    let (num_layers, sizes): (u16, &[(u32, u32)]) =
        if bench.is_tiny { (2, &[(2, 20)]) } else { (32, &[(1, 1 << 10), (64, 1 << 10)]) };
    for &(batch, context) in sizes {
        let shape = shape(bench, batch, context);
        let mut cache = shape.filled(&bench.device, num_layers)?;
        cache.queue_mut().set_step_limits(StepLimits {
            sequences: batch,
            tokens_per_sequence: 1,
            cached_sequences: batch,
            max_seq_len: context,
            splits: 4096,
        });
        let tensors = tensors(bench, &mut cache, shape)?;
        let mut step = cache.begin_step(&shape.step_inputs())?;
        let wait = |step: &mut Step<'_, Shared<CudaBackend>>| input::drain(step.queue_mut());
        let all = (shape, num_layers);
        let clock = bench.clock().each();
        let launched = clock.time(&mut step, |step, _| layers(step, all, &tensors), wait)?;
        step.queue_mut().begin_capture()?;
        layers(&mut step, all, &tensors)?;
        let graph = step.queue_mut().end_capture()?;
        let submit =
            |step: &mut Step<'_, Shared<CudaBackend>>, _| Ok(step.queue_mut().replay(&graph)?);
        let replayed = clock.time(&mut step, submit, wait)?;
        let name = format!("step/layers{num_layers}/b{batch}/c{context}");
        bench.measure(&format!("{name}/launched"), Work::default(), launched)?;
        bench.measure(&format!("{name}/replayed"), Work::default(), replayed)?;
    }
    Ok(())
}

fn tensors(bench: &Bench, cache: &mut Cache, shape: Shape) -> Result<Tensors> {
    let rows = u64::from(shape.batch) * shape.plain_bytes() / 4;
    let queries = rows * u64::from(GROUP);
    let mut tensor = |seed, values| input::tensor(&bench.device, cache.queue_mut(), seed, values);
    let (q, k, v) = (tensor(3, queries)?, tensor(4, rows)?, tensor(5, rows)?);
    Ok(Tensors { q, k, v, out: bench.device.alloc(queries * 2)? })
}
