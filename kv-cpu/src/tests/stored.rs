//! Planes of every kind for the fixtures: their layouts, their constants, and the values of a
//! written row for a reader.
use kv_core::backend::{Backend, Plane, PlaneLayout, PlaneShape, Queue};
use kv_core::calibration::{PlaneCalibration, PlaneConstants};
use kv_core::error::DeviceErrorKind;
use kv_core::plan::{GatherArgs, GatherPlan, GatherRange};
use kv_core::{Axes, BlockOrder, KvFormat, LayerId, Scaling, TensorViewMut};
use kv_quant::{block, row, transform};

use super::fixture::{Case, Choice, Fixture};
use super::{Random, attend, backends};
use crate::{CpuBackend, CpuBuffer, CpuOptions};

/// Layouts of K and V with room for sequences of these lengths and three blocks more.
pub(super) fn layouts(case: &Case, lens: &[u32]) -> [PlaneLayout; 2] {
    let plane = |which: usize, num_blocks| {
        PlaneLayout::new(PlaneShape {
            num_blocks,
            block_size: case.block_size,
            num_kv_heads: case.kv_heads,
            head_dim: case.dims[which],
            order: case.order,
            format: case.formats[which],
        })
        .unwrap()
    };
    let plain = [plane(0, 1), plane(1, 1)];
    let slots = plain.iter().map(|layout| layout.format().wide_slots(layout.head_dim()));
    let slots = slots.max().unwrap();
    // Small blocks have no room for wide rows.
    let full_precision_prefix =
        if slots <= case.block_size { case.full_precision_prefix } else { 0 };
    let map = plain[0].with_wide_rows(full_precision_prefix, false, slots).unwrap();
    let needed: u32 = lens.iter().map(|len| map.slot_map().blocks(*len)).sum();
    [0, 1].map(|which: usize| {
        plane(which, needed + 3)
            .with_transform(case.transforms[which])
            .with_wide_rows(full_precision_prefix, false, slots)
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
        Some(Scaling::Head) => heads,
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

/// A row as a reader sees it, by the definitions of the formats and the transform.
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

fn case(format: KvFormat, order: BlockOrder) -> Case {
    Case {
        seed: 21,
        group: 4,
        dims: [80, 40],
        block_size: 16,
        order,
        formats: [format; 2],
        transforms: [true; 2],
        full_precision_prefix: 2,
        ..attend::case(vec![attend::entry(0, 9, 3, 2)])
    }
}

fn gather(backend: &CpuBackend, fixture: &Fixture, which: usize) -> Vec<f32> {
    let tokens = fixture.case.batch[0].cached + fixture.case.batch[0].new_tokens;
    let ranges = [GatherRange { row: 0, begin: 0, len: tokens }];
    let plan = GatherPlan::new(&fixture.layouts[0], &fixture.tables, &ranges).unwrap();
    let dims = [tokens, fixture.case.kv_heads, fixture.case.dims[which]];
    let mut rows = vec![0.0_f32; dims.iter().product::<u32>() as usize];
    let out = TensorViewMut::host(&mut rows, &dims);
    let args = GatherArgs::new(&plan, fixture.plane(which), out, Axes::Thd).unwrap();
    backend.queue().unwrap().gather(&plan, args).unwrap();
    rows
}

/// Every format, transformed and with a full-precision prefix, in both orders of blocks.
#[test]
fn every_format_is_written_attended_and_gathered() {
    for format in KvFormat::all() {
        for order in [BlockOrder::Nhd, BlockOrder::Hnd] {
            for (name, backend) in backends() {
                let fixture = Fixture::new(&backend, case(format, order));
                fixture.attend(&name, &backend, &Choice::default());
                for which in [0, 1] {
                    let rows = gather(&backend, &fixture, which);
                    assert_eq!(rows, fixture.content.values[which][0], "{name} {format} {order:?}");
                }
            }
        }
    }
}

/// A value that is NaN, infinite or huge changes its own row at most, as the definition of the
/// format says, in wide rows and in codes.
#[test]
fn a_non_finite_row_changes_no_other() {
    let bits = |x: &f32| if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() };
    for format in KvFormat::all() {
        for value in [f32::NAN, f32::INFINITY, -1e30, 1e6] {
            for (name, backend) in backends() {
                let broken = vec![(1, value), (6, value)];
                let fixture =
                    Fixture::new(&backend, Case { broken, ..case(format, BlockOrder::Hnd) });
                for which in [0, 1] {
                    let rows = gather(&backend, &fixture, which);
                    let dim = fixture.case.dims[which] as usize;
                    let expected = fixture.content.values[which][0].chunks(dim);
                    for (index, (row, expected)) in rows.chunks(dim).zip(expected).enumerate() {
                        let same = row.iter().map(bits).eq(expected.iter().map(bits));
                        assert!(same, "{name} {format} {value} {index}: {row:?} {expected:?}");
                        let is_broken = [2, 12].contains(&index);
                        let finite = row.iter().all(|x| x.is_finite());
                        assert!(is_broken || finite, "{name} {format} {value} {index}: {row:?}");
                    }
                }
            }
        }
    }
}

#[test]
fn too_few_constants_are_refused() {
    let backend = CpuBackend::open(CpuOptions::default().with_threads(1)).unwrap();
    let fixture = Fixture::new(&backend, case(KvFormat::Int8(Scaling::Head), BlockOrder::Hnd));
    let needed = PlaneConstants::len_of(2, 80) * 4;
    let ranges = [GatherRange { row: 0, begin: 0, len: 1 }];
    let plan = GatherPlan::new(&fixture.layouts[0], &fixture.tables, &ranges).unwrap();
    for (bytes, fits) in [(needed - 4, false), (needed - 1, false), (needed, true)] {
        let constants = backend.alloc(bytes as u64).unwrap();
        let plane = fixture.plane(0).with_constants(&constants);
        let mut row = vec![0.0_f32; 160];
        let out = TensorViewMut::host(&mut row, &[1, 2, 80]);
        let args = GatherArgs::new(&plan, plane, out, Axes::Thd).unwrap();
        let result = backend.queue().unwrap().gather(&plan, args);
        assert_eq!(result.is_ok(), fits, "{bytes}");
        let refused = result.err().map(|error| error.kind());
        assert_eq!(refused, (!fits).then_some(DeviceErrorKind::Unsupported));
    }
}
