//! Block copies in K and V of every layer of a group.
use kv_core::BlockOrder;
use kv_core::backend::PlaneLayout;
use kv_core::error::DeviceError;
use kv_core::invariant::Invariant;
use kv_core::plan::{BlockCopy, CopyArgs, CopyPlan};

use crate::buffer::WgpuBuffer;
use crate::params::CopyParams;
use crate::pipelines::Kernel;
use crate::queue::WgpuQueue;
use crate::recording::Slot;
use kv_core::num::to_u32;

const OPERATION: &str = "copy_blocks";
/// Bytes that one workgroup copies.
const PART_BYTES: u32 = 4096;

fn inside() -> Kernel {
    Kernel::new("copy.wgsl")
}
fn apart() -> Kernel {
    Kernel::new("copy.wgsl").flags(&["APART"])
}

#[cfg(test)]
pub(crate) fn kernels() -> Vec<Kernel> {
    vec![inside(), apart()]
}

pub(crate) fn copy_blocks(
    queue: &mut WgpuQueue,
    plan: &CopyPlan<'_>,
    args: &CopyArgs<'_, WgpuBuffer>,
) -> Result<(), DeviceError> {
    let copies = plan.copies();
    let blocks = copies.iter().map(|copy| copy.from.0.max(copy.to.0) + 1).max();
    let call = queue.call(OPERATION);
    // Layers have equal layouts and can share lists.
    let mut sent: Vec<(PlaneLayout, Vec<Runs>)> = Vec::new();
    for view in args.storage().planes() {
        let layout = view.layout();
        let plane = call.plane(&view, blocks.unwrap_or(0), None)?;
        let known = sent.iter().position(|(known, _)| known == layout);
        let index = if let Some(index) = known {
            index
        } else {
            let pairs = pairs(layout, copies);
            let runs = pairs.into_iter().map(|(segments, runs)| {
                let longest = runs.chunks_exact(3).filter_map(|run| run.last().copied()).max();
                let count = to_u32(runs.len() / 3);
                let lists = call.recorder.push(&runs)?.into();
                Ok(Runs { segments, count, longest: longest.unwrap_or(0), lists })
            });
            sent.push((*layout, runs.collect::<Result<_, DeviceError>>()?));
            sent.len() - 1
        };
        let (_, all) = sent.get(index).invariant("lists of the layout were sent");
        for runs in all {
            let (from, to) = runs.segments;
            let (target, written) = call.segment((&view, &plane), to, true)?;
            let parts = runs.longest.div_ceil(PART_BYTES).max(1);
            let mut params = CopyParams {
                src_begin: target.data,
                dst_begin: target.data,
                runs: runs.count,
                parts,
                part_bytes: PART_BYTES,
                ..CopyParams::default()
            };
            let mut slots = vec![runs.lists.clone(), written];
            if from != to {
                let (source, read) = call.segment((&view, &plane), from, false)?;
                params.src_begin = source.data;
                slots.push(read);
            }
            let kernel = if from == to { inside() } else { apart() };
            let units = u64::from(runs.count) * u64::from(parts);
            let groups = call.recorder.groups(units)?;
            call.recorder.dispatch(&kernel, &params, &slots, groups)?;
        }
    }
    Ok(())
}

/// Runs of bytes that are copied between one pair of segments.
struct Runs {
    segments: (u32, u32),
    count: u32,
    longest: u32,
    lists: Slot,
}

/// Groups runs of bytes by source and target segment: offset in each, and length.
fn pairs(layout: &PlaneLayout, copies: &[BlockCopy]) -> Vec<((u32, u32), Vec<u32>)> {
    let mut pairs: Vec<((u32, u32), Vec<u32>)> = Vec::new();
    let each = layout.blocks_per_segment().max(1);
    // Saturating: a segment whose bytes 32 bits do not count is refused when it is bound.
    let narrow = |bytes: u64| u32::try_from(bytes).unwrap_or(u32::MAX);
    let begin = |block: u32| narrow(layout.block_bytes() * u64::from(block % each));
    for copy in copies {
        let segment = |block: u32| block / each;
        let segments = (segment(copy.from.0), segment(copy.to.0));
        let place = pairs.iter().position(|(known, _)| *known == segments).unwrap_or_else(|| {
            pairs.push((segments, Vec::new()));
            pairs.len() - 1
        });
        let (_, runs) = pairs.get_mut(place).invariant("a pair was found or added");
        let (from, to) = (begin(copy.from.0), begin(copy.to.0));
        for (at, bytes) in parts_of_block(layout, copy.slots) {
            let (at, bytes) = (narrow(at), narrow(bytes));
            runs.extend([from.saturating_add(at), to.saturating_add(at), bytes]);
        }
    }
    pairs
}

/// Returns the byte ranges that the first `slots` slots of a block occupy.
fn parts_of_block(layout: &PlaneLayout, slots: u32) -> Vec<(u64, u64)> {
    if slots >= layout.block_size() {
        return vec![(0, layout.block_bytes())];
    }
    let bytes = layout.token_stride() * u64::from(slots);
    let heads = match layout.order() {
        BlockOrder::Nhd => 1,
        _ => layout.num_kv_heads(),
    };
    let begin = |head: u32| layout.head_stride() * u64::from(head);
    let mut parts: Vec<_> = (0..heads).map(|head| (begin(head), bytes)).collect();
    if layout.has_block_means() {
        let means = layout.mean_begin(0);
        parts.push((means, layout.block_bytes() - means));
    }
    parts.retain(|(_, bytes)| *bytes > 0);
    parts
}
