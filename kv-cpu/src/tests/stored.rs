//! Planes of every kind for the worlds: their layouts, their constants, and what a reader sees of a
//! row that was written.
use kv_core::backend::{Backend, Queue};
use kv_core::calibration::{PlaneCalibration, PlaneConstants};
use kv_core::{KvFormat, LayerId, Plane, PlaneLayout, PlaneShape};
use kv_quant::{block, row, transform};

use super::Random;
use super::world::Case;
use crate::{CpuBackend, CpuBuffer};

/// Layouts of K and V with room for sequences of these lengths and three blocks more.
pub(super) fn layouts(case: &Case, lens: &[u32]) -> [PlaneLayout; 2] {
    let plain = [0, 1].map(|which: usize| {
        PlaneLayout::new(PlaneShape {
            num_blocks: 1,
            block_size: case.block_size,
            num_kv_heads: case.kv_heads,
            head_dim: case.dims[which],
            order: case.order,
            format: case.formats[which],
        })
        .unwrap()
    });
    let slots = plain.iter().map(|layout| layout.format().wide_slots(layout.head_dim()));
    let slots = slots.max().unwrap();
    // Small blocks have no room for sinks.
    let sinks = if slots <= case.block_size { case.sinks } else { 0 };
    let map = plain[0].with_wide_rows(sinks, false, slots).unwrap();
    let needed: u32 = lens.iter().map(|len| map.slot_map().blocks(*len)).sum();
    [0, 1].map(|which: usize| {
        PlaneLayout::new(PlaneShape {
            num_blocks: needed + 3,
            block_size: case.block_size,
            num_kv_heads: case.kv_heads,
            head_dim: case.dims[which],
            order: case.order,
            format: case.formats[which],
        })
        .unwrap()
        .with_transform(case.transforms[which])
        .with_wide_rows(sinks, false, slots)
        .unwrap()
        .with_segments_of(case.blocks_per_segment)
    })
}

/// Constants of a plane: scales by head, and of K a mean and a balance.
pub(super) fn constants(
    random: &mut Random,
    which: usize,
    layout: &PlaneLayout,
) -> Option<PlaneConstants> {
    let heads = layout.num_kv_heads() as usize;
    let channels = heads * layout.head_dim() as usize;
    let plane = [Plane::Key, Plane::Value][which];
    let scaling = layout.format().given_scales();
    let scales = match scaling {
        Some(kv_core::Scaling::Head) => heads,
        Some(_) => 1,
        None => 0,
    };
    let largest = match layout.format() {
        KvFormat::Fp8E5m2(_) => 57344.0,
        KvFormat::Int8(_) => 127.0,
        KvFormat::Fp8E4m3(_) => 448.0,
        _ => 6.0 * 448.0,
    };
    let (mean, balance) = if layout.transforms() && plane == Plane::Key {
        (random.units(channels), (0..channels).map(|_| 1.25 + random.unit()).collect())
    } else {
        (Vec::new(), Vec::new())
    };
    let given = PlaneCalibration {
        scales: (0..scales).map(|_| (3.0 + random.unit()) / largest).collect(),
        mean,
        balance,
        ..PlaneCalibration::default()
    };
    PlaneConstants::new(LayerId(0), plane, layout, Some(&given)).unwrap()
}

pub(super) fn upload(backend: &CpuBackend, constants: &PlaneConstants) -> CpuBuffer {
    let bytes: Vec<u8> = constants.values().iter().flat_map(|x| x.to_ne_bytes()).collect();
    let buffer = backend.alloc(bytes.len() as u64).unwrap();
    backend.queue().unwrap().upload(&buffer, 0, &bytes).unwrap();
    buffer
}

/// What a reader sees of a row, by the definitions of the formats and the transform.
pub(super) fn round_trip(
    layout: &PlaneLayout,
    constants: Option<&PlaneConstants>,
    (head, position): (usize, u32),
    values: &mut [f32],
) {
    let head = constants.map(|constants| constants.head(head).unwrap());
    let transform = head.filter(|_| layout.transforms());
    if let Some(constants) = &transform {
        transform::store(values, constants);
    }
    if layout.format().is_quantised() && layout.slot_map().place(position).is_wide {
        for x in &mut *values {
            *x = block::round_wide(*x);
        }
    } else {
        let mut bytes = vec![0; layout.row_bytes() as usize];
        let (scale, inv_scale) = head.map_or((1.0, 1.0), |head| (head.scale, head.inv_scale));
        row::encode_row(layout.format(), inv_scale, values, &mut bytes);
        row::decode_row(layout.format(), scale, &bytes, values);
    }
    if let Some(constants) = &transform {
        transform::load(values, constants);
    }
}
