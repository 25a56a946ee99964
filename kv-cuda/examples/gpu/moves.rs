//! Data movement without attention: copies, new rows, rows read back.
use kv_core::backend::{Backend, KvStorage, Plane, Queue};
use kv_core::plan::{BlockCopy, CopyArgs, CopyPlan};
use kv_core::{Axes, BlockId, DType, KvFormat, TensorViewMut};

use crate::bench::{Bench, Result, Work};
use crate::input::{self, BlockOrder, FORMATS, HEAD_DIM, Shape};

/// Measures the driver's own copy, the reference of all other rates.
pub(crate) fn copy(bench: &mut Bench, is_reported: bool) -> Result<()> {
    let half = bench.rotated() / 2;
    let [from, to] = [bench.device.alloc(half)?, bench.device.alloc(half)?];
    let mut queue = bench.device.queue()?;
    // Different bytes: memory of zeros may be faster.
    let content = input::tensor(&bench.device, &mut queue, 7, (half / 2).min(1 << 24))?;
    let mut at = 0;
    while at < half {
        let part = content.len().min(half - at);
        queue.copy((&content, 0), (&from, at), part)?;
        at += part;
    }
    let micros = bench.clock().time(
        &mut queue,
        |queue, _| Ok(queue.copy((&from, 0), (&to, 0), half)?),
        input::drain,
    )?;
    // Each byte is read and written.
    bench.set_copy(half * 2, micros);
    if !is_reported {
        return Ok(());
    }
    bench.measure("copy/driver", Work { bytes: half * 2, flops: 0 }, micros)
}

pub(crate) fn run(bench: &mut Bench) -> Result<()> {
    let steps: &[(u32, u32)] = if bench.is_tiny {
        &[(3, 1), (1, 20)]
    } else {
        &[(64, 1), (1, 1 << 12), (1, 1 << 14), (1, 1 << 16)]
    };
    for format in FORMATS {
        if !bench.wants_format(format) {
            continue;
        }
        for &(batch, new) in steps {
            append(bench, format, (batch, new))?;
        }
        gather(bench, format)?;
        copy_blocks(bench, format)?;
    }
    Ok(())
}

fn shape(bench: &Bench, format: KvFormat, (batch, context, new): (u32, u32, u32)) -> Shape {
    let kv_heads = if bench.is_tiny { 2 } else { 8 };
    let (block_size, head_dim, order) = (16, HEAD_DIM, BlockOrder::Consecutive);
    Shape { format, block_size, kv_heads, head_dim, batch, context, new, order }
}

/// Measures writing new rows into the cache.
pub(crate) fn append(bench: &mut Bench, format: KvFormat, (batch, new): (u32, u32)) -> Result<()> {
    let name = format!("append/{format}/b{batch}/t{new}");
    if !bench.wants(format, &name) {
        return Ok(());
    }
    let shape = shape(bench, format, (batch, new + 40, new));
    let layers = shape.layers_of(bench.rotated());
    let mut cache = shape.filled(&bench.device, layers)?;
    let tokens = u64::from(shape.total_new());
    let values = tokens * shape.plain_bytes() / 4;
    let [k, v] = [4, 5].map(|seed| input::tensor(&bench.device, cache.queue_mut(), seed, values));
    let (k, v) = (k?, v?);
    let mut step = cache.begin_step(&shape.step_inputs())?;
    let work = Work { bytes: tokens * (shape.plain_bytes() + shape.token_bytes()), flops: 0 };
    for (clock, name) in [
        (bench.clock(), name.clone()),
        // From the call to the end of its work, one at a time: the latency in a decode step.
        (bench.clock().each(), format!("{name}/alone")),
    ] {
        let micros = clock.time(
            &mut step,
            |step, call| {
                let layer = u16::try_from(call % u32::from(layers))?;
                shape.write(step, [layer], [&k, &v], shape.total_new())
            },
            |step| input::drain(step.queue_mut()),
        )?;
        bench.measure(&name, work, micros)?;
    }
    Ok(())
}

/// Measures reading back the keys of a whole sequence as bf16.
fn gather(bench: &mut Bench, format: KvFormat) -> Result<()> {
    let context = if bench.is_tiny { 40 } else { 1 << 15 };
    let shape = shape(bench, format, (1, context, 0));
    let layers = shape.layers_of(bench.rotated());
    let mut cache = shape.filled(&bench.device, layers)?;
    let out = bench.device.alloc(u64::from(context) * shape.plain_bytes() / 2)?;
    let ranges: Vec<_> = shape.sequences().map(|id| (id, 0, context)).collect();
    let dims = shape.kv_dims(context);
    let micros = bench.clock().time(
        &mut cache,
        |cache, call| {
            let layer = u16::try_from(call % u32::from(layers))?;
            let out = TensorViewMut::device(DType::Bf16, &out, 0, &dims);
            Ok(cache.gather(layer, Plane::Key, &ranges, out, Axes::Thd)?)
        },
        |cache| input::drain(cache.queue_mut()),
    )?;
    let bytes = u64::from(context) * (shape.plain_bytes() + shape.token_bytes()) / 2;
    bench.measure(&format!("gather/{format}/t{context}"), Work { bytes, flops: 0 }, micros)
}

/// Measures copying the first half of a pool's blocks to the second, in eight layers.
fn copy_blocks(bench: &mut Bench, format: KvFormat) -> Result<()> {
    const LAYERS: u16 = 8;
    let counts: &[u32] = if bench.is_tiny { &[2] } else { &[1, 64, 1024] };
    for &count in counts {
        let shape = shape(bench, format, (2, count * 16, 0));
        let spec = shape.spec(LAYERS)?;
        let layouts = *spec.groups().first().ok_or("a geometry without layers")?.layouts();
        let mut storage = KvStorage::new(&bench.device, layouts)?;
        for layer in 0..LAYERS {
            storage.allocate(&bench.device, layer.into())?;
        }
        let pairs = (0..count).zip(count..).map(|(from, to)| (BlockId(from), BlockId(to)));
        let copies: Vec<_> = pairs.map(|(from, to)| BlockCopy { from, to, slots: 16 }).collect();
        let [layout, _] = layouts;
        let micros = bench.clock().time(
            &mut bench.device.queue()?,
            |queue, _| {
                let plan = CopyPlan::new(&layout, &copies)?;
                Ok(queue.copy_blocks(&plan, CopyArgs::new(&plan, storage.view())?)?)
            },
            input::drain,
        )?;
        let bytes = shape.layer_bytes() * u64::from(LAYERS);
        bench.measure(
            &format!("copy_blocks/{format}/n{count}"),
            Work { bytes, flops: 0 },
            micros,
        )?;
    }
    Ok(())
}
