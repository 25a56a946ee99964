//! Decode attention: one query per sequence over its whole context.
use kv_core::backend::Backend;
use kv_core::{AttentionOptions, DType, KvFormat, ScaleGroup, TensorView, TensorViewMut};

use crate::bench::{Bench, Result, Work};
use crate::input::{self, BlockOrder, Cache, FORMATS, HEAD_DIM, NUM_MAIN, Shape};

/// Batches and contexts that are also measured with shuffled blocks.
const SHUFFLED: [(u32, u32); 2] = [(1, 1 << 17), (64, 1 << 13)];
/// Other values of `head_dim`, measured in every format with 64 sequences of 8k tokens.
const DIMS: [u32; 2] = [64, 256];
/// Formats without a kernel of their own: the general kernel decodes them.
const GENERAL: [KvFormat; 2] = [KvFormat::Q8_0, KvFormat::L6(ScaleGroup::Row)];

/// Sizes that are measured.
struct Sizes {
    batches: &'static [u32],
    contexts: &'static [u32],
    groups: &'static [u32],
    blocks: &'static [u32],
    kv_heads: u32,
}

const FULL: Sizes = Sizes {
    batches: &[1, 4, 16, 64, 256],
    contexts: &[1 << 10, 1 << 13, 1 << 15, 1 << 17],
    groups: &[1, 4, 8, 16],
    blocks: &[16, 64],
    kv_heads: 8,
};

const TINY: Sizes =
    Sizes { batches: &[2], contexts: &[40], groups: &[1, 4], blocks: &[16], kv_heads: 2 };

pub(crate) fn run(bench: &mut Bench) -> Result<()> {
    let sizes = if bench.is_tiny { TINY } else { FULL };
    for (index, format) in FORMATS.into_iter().enumerate() {
        // Less common formats need only one group and one block size.
        let (blocks, groups): (&[u32], &[u32]) =
            if index < NUM_MAIN { (sizes.blocks, sizes.groups) } else { (&[16], &[8]) };
        for &block_size in blocks {
            for &batch in sizes.batches {
                for &context in sizes.contexts {
                    let shape = shape(bench, format, (block_size, batch, context));
                    with_groups(bench, shape, groups)?;
                }
            }
        }
        for head_dim in DIMS {
            let (batch, context) = if bench.is_tiny { (2, 40) } else { (64, 1 << 13) };
            let shape = shape(bench, format, (16, batch, context));
            with_groups(bench, Shape { head_dim, ..shape }, &[8])?;
        }
    }
    for (batch, context) in if bench.is_tiny { [(1, 40), (2, 40)] } else { SHUFFLED } {
        let shape = shape(bench, KvFormat::Bf16, (16, batch, context));
        with_groups(bench, Shape { order: BlockOrder::Shuffled, ..shape }, &[8])?;
    }
    for format in GENERAL {
        let (batch, context) = if bench.is_tiny { (2, 40) } else { (64, 1 << 13) };
        with_groups(bench, shape(bench, format, (16, batch, context)), &[8])?;
    }
    Ok(())
}

/// Returns a decode step of sequences of equal length.
pub(crate) fn shape(
    bench: &Bench,
    format: KvFormat,
    (block_size, batch, context): (u32, u32, u32),
) -> Shape {
    let kv_heads = if bench.is_tiny { TINY.kv_heads } else { FULL.kv_heads };
    let (head_dim, order) = (HEAD_DIM, BlockOrder::Consecutive);
    Shape { format, block_size, kv_heads, head_dim, batch, context, new: 1, order }
}

/// Measures one cache with increasing numbers of query heads.
pub(crate) fn with_groups(bench: &mut Bench, shape: Shape, groups: &[u32]) -> Result<()> {
    let Shape { format, block_size, batch, context, head_dim, .. } = shape;
    let dim = if head_dim == HEAD_DIM { String::new() } else { format!("/d{head_dim}") };
    let order = match shape.order {
        BlockOrder::Consecutive => "",
        BlockOrder::Shuffled => "/shuffled",
    };
    let name = |group: &str| {
        format!("decode/{format}/block{block_size}/{group}/b{batch}/c{context}{dim}{order}")
    };
    let named = groups.iter().map(|group| (*group, name(&format!("gqa{group}"))));
    let wanted: Vec<_> = named.filter(|(_, name)| bench.wants(format, name)).collect();
    if wanted.is_empty() {
        return Ok(());
    }
    let layers = shape.layers_of(bench.rotated());
    let bytes = shape.layer_bytes().saturating_mul(layers.into());
    if bytes > bench.room() {
        return bench.skip(&name("gqa*"), &format!("{bytes} bytes of cache do not fit"));
    }
    let mut cache = match shape.filled(&bench.device, layers) {
        Err(error) if input::is_full(&*error) => {
            return bench.skip(&name("gqa*"), &error.to_string());
        }
        filled => filled?,
    };
    for (group, name) in wanted {
        let (work, micros) = measure(bench, &mut cache, (shape, layers), group)?;
        bench.measure(&name, work, micros)?;
    }
    Ok(())
}

fn measure(
    bench: &Bench,
    cache: &mut Cache,
    (shape, layers): (Shape, u16),
    group: u32,
) -> Result<(Work, f64)> {
    let dims = [shape.batch, shape.kv_heads * group, shape.head_dim];
    let values: u64 = dims.into_iter().map(u64::from).product();
    let rows = u64::from(shape.batch) * shape.plain_bytes() / 4;
    let [q, k, v] = [(3, values), (4, rows), (5, rows)]
        .map(|(seed, values)| input::tensor(&bench.device, cache.queue_mut(), seed, values));
    let (q, k, v) = (q?, k?, v?);
    let out = bench.device.alloc(values * 2)?;
    let mut step = cache.begin_step(&shape.step_inputs())?;
    shape.write(&mut step, 0..layers, [&k, &v], shape.batch)?;
    let options = AttentionOptions::causal(1.0 / (shape.head_dim as f32).sqrt());
    let micros = bench.clock().time(
        &mut step,
        |step, call| {
            let layer = u16::try_from(call % u32::from(layers))?;
            let q = TensorView::device(DType::Bf16, &q, 0, &dims);
            let out = TensorViewMut::device(DType::Bf16, &out, 0, &dims);
            Ok(step.attend(layer, q, out, &options)?)
        },
        |step| input::drain(step.queue_mut()),
    )?;
    // Every cached row once, plus queries and outputs.
    let tokens = u64::from(shape.batch) * u64::from(shape.context);
    let bytes = tokens * shape.token_bytes() + values * 4;
    Ok((Work { bytes, flops: 0 }, micros))
}
