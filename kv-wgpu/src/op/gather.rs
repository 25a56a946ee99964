//! Reading cached rows into a plain tensor.
use kv_core::error::DeviceError;
use kv_core::plan::{GatherArgs, GatherPlan};

use super::pad::{self, Owned};
use crate::buffer::WgpuBuffer;
use crate::params::{GatherParams, Plane};
use crate::pipelines::Kernel;
use crate::queue::WgpuQueue;
use crate::recording::Slot;
use crate::tensors::Room;
use kv_core::num::to_u32;

const OPERATION: &str = "gather";

fn kernel(plane: &Plane) -> Kernel {
    Kernel::new("gather.wgsl")
        .with("FORMAT", plane.format)
        .with("HAS_EXTRAS", plane.has_extras().into())
}

#[cfg(test)]
pub(crate) fn kernels() -> Vec<Kernel> {
    use crate::params::FORMATS;
    let plane = |(format, full_precision_prefix)| Plane {
        format,
        full_precision_prefix,
        ..Plane::default()
    };
    let formats = FORMATS.iter().map(|format| format.kernel_code());
    formats.flat_map(|format| [(format, 0), (format, 1)]).map(|of| kernel(&plane(of))).collect()
}

pub(crate) fn gather(
    queue: &mut WgpuQueue,
    plan: &GatherPlan<'_>,
    mut args: GatherArgs<'_, WgpuBuffer>,
) -> Result<(), DeviceError> {
    let lists = Lists::of(plan);
    let room = Room { entries: plan.ranges().len(), longest: lists.longest, total: plan.total() };
    let mut call = queue.call(OPERATION);
    let (out, written) = call.output(args.out(), room)?;
    let view = args.plane();
    let plane = call.plane(view, plan.tables().num_blocks(), Some(plan.layout()))?;
    let constants = call.constants(view)?;
    let sent: Slot = call.recorder.push(&lists.words)?.into();
    let units = u64::from(plan.total()) * u64::from(plane.num_kv_heads);
    for index in 0..view.layout().num_segments() {
        let (plane, read) = call.segment((view, &plane), index, false)?;
        let params = GatherParams {
            plane,
            out,
            ranges: lists.ranges,
            tables: lists.tables,
            num_ranges: to_u32(plan.ranges().len()),
            total: plan.total(),
            has_constants: view.layout().has_constants().into(),
            ..GatherParams::default()
        };
        let slots = [sent.clone(), read, constants.clone(), written.clone()];
        let groups = call.recorder.groups(units)?;
        call.recorder.dispatch(&kernel(&plane), &params, &slots, groups)?;
    }
    let count = to_u32(plan.ranges().len());
    let owned = Owned { lists: sent, entries: 0, count, total: plan.total() };
    pad::pad_rows(&mut queue.recorder, (out, written), owned, 0.0)
}

/// Output entries, ranges and block tables in one list, one after another.
struct Lists {
    words: Vec<u32>,
    ranges: u32,
    tables: u32,
    longest: u32,
}

impl Lists {
    fn of(plan: &GatherPlan<'_>) -> Self {
        let tables = plan.tables();
        let (mut entries, mut ranges, mut blocks) = (Vec::new(), Vec::new(), Vec::new());
        let (mut start, mut longest) = (0_u32, 0);
        for range in plan.ranges() {
            let coded = tables.coded(range.row);
            entries.extend([start, range.len]);
            ranges.extend([start, range.len, range.begin, coded, to_u32(blocks.len())]);
            blocks.extend(tables.row(range.row).iter().map(|block| block.0));
            start += range.len;
            longest = longest.max(range.len);
        }
        let (first, second) = (to_u32(entries.len()), to_u32(ranges.len()));
        let tables = first + second;
        Self { words: [entries, ranges, blocks].concat(), ranges: first, tables, longest }
    }
}
