//! Every stored format compared with kv-quant, bit for bit: all kernels that write and gather rows.
use crate::params::FORMATS;
use half::{bf16, f16};
use kv_core::backend::{Place, PlaneLayout, PlaneShape};
use kv_core::calibration::{HeadConstants, PlaneConstants};
use kv_core::{BlockOrder, KvFormat};
use kv_quant::{block, row, transform};

use super::device::{Device, round16};
use super::random::Random;
use crate::op::{gather, write};
use crate::params::{Counts, GatherParams, Plan, Plane, Range, Sequence, Tensor, WriteParams};
use crate::step::Extent;
use crate::tensors;

/// Fill byte of memory that nothing may write.
pub(super) const UNTOUCHED: u8 = 0xA5;

/// One plane: its layout, its memory on the device, and its expected content.
#[derive(Debug)]
pub(super) struct Fixture {
    pub(super) layout: PlaneLayout,
    pub(super) constants: Vec<f32>,
    pub(super) plane: Plane,
    pub(super) image: Vec<u8>,
}

impl Fixture {
    pub(super) fn new(device: &mut Device, layout: PlaneLayout, random: &mut Random) -> Self {
        let (heads, dim) = (layout.num_kv_heads() as usize, layout.head_dim() as usize);
        let scales: Vec<f32> =
            (0..heads).map(|_| f32::exp2(random.below(8) as f32 - 6.0) * 1.25).collect();
        let mut constants = scales.clone();
        constants.extend(scales.iter().map(|scale| scale.recip()));
        constants.extend((0..heads * dim).map(|_| random.normal() / 4.0));
        let balance: Vec<f32> = (0..heads * dim).map(|_| random.normal()).collect();
        constants.extend(balance.iter().map(|balance| balance.recip()));
        constants.extend(&balance);
        assert_eq!(constants.len(), PlaneConstants::len_of(heads, dim));
        let image = vec![UNTOUCHED; layout.plane_bytes() as usize];
        let plane = Plane {
            base: device.put(&image),
            constants: device.put(&constants),
            ..tensors::shape(&layout)
        };
        Self { layout, constants, plane, image }
    }

    pub(super) fn constants(&self, head: usize) -> HeadConstants<'_> {
        let (heads, dim) = (self.layout.num_kv_heads() as usize, self.layout.head_dim() as usize);
        HeadConstants::of(&self.constants, heads, dim, head).unwrap()
    }

    /// Returns values as they are stored: transformed if the plane is.
    pub(super) fn stored(&self, head: usize, values: &[f32]) -> Vec<f32> {
        let mut values = values.to_vec();
        if self.layout.transforms() {
            transform::store(&mut values, &self.constants(head));
        }
        values
    }

    /// Returns the byte range of a row in the plane.
    pub(super) fn range(&self, block: u32, place: Place, head: usize) -> std::ops::Range<usize> {
        let begin = self.layout.block_bytes() * u64::from(block)
            + self.layout.row_begin(place, head as u32);
        let bytes =
            if place.is_wide { self.layout.wide_row_bytes() } else { self.layout.row_bytes() };
        begin as usize..(begin + bytes) as usize
    }

    /// Encodes stored values into the expected content.
    pub(super) fn put(&mut self, block: u32, place: Place, head: usize, values: &[f32]) {
        let inv_scale = self.constants(head).inv_scale;
        let (range, format) = (self.range(block, place, head), self.layout.format());
        let to = &mut self.image[range];
        if place.is_wide && format.is_quantised() {
            block::encode_wide(values, to);
        } else {
            row::encode_row(format, inv_scale, values, to);
        }
    }

    /// Decodes a row of the expected content.
    pub(super) fn get(&self, block: u32, place: Place, head: usize) -> Vec<f32> {
        let mut values = vec![0.0; self.layout.head_dim() as usize];
        let from = &self.image[self.range(block, place, head)];
        let (format, scale) = (self.layout.format(), self.constants(head).scale);
        if place.is_wide && format.is_quantised() {
            block::decode_wide(from, &mut values);
        } else {
            row::decode_row(format, scale, from, &mut values);
        }
        values
    }

    /// Returns whether the element around a byte is NaN on both sides.
    fn both_nan(&self, got: &[u8], at: usize) -> bool {
        let format = self.layout.format();
        let size = format.wide_format().row_bytes(1) as usize;
        let element = at / size * size..at / size * size + size;
        are_nan(format, [&got[element.clone()], &self.image[element]])
    }

    /// Compares the plane with the expected content.
    pub(super) fn check(&self, device: &mut Device, what: &str) {
        let got = device.bytes(self.plane.base, self.image.len());
        let differ = |at: &usize| got[*at] != self.image[*at] && !self.both_nan(&got, *at);
        let Some(at) = (0..got.len()).find(differ) else {
            return;
        };
        let around = at.saturating_sub(8)..(at + 8).min(got.len());
        panic!(
            "{what}: byte {at} of blocks of {} and rows of {} is not {:02x?} but {:02x?}",
            self.layout.block_bytes(),
            self.layout.row_bytes(),
            &self.image[around.clone()],
            &got[around]
        );
    }
}

/// Returns whether both elements, unquantised or 16-bit among codes, are NaN with any bits: a GPU
/// has one NaN, a CPU keeps the given bits.
fn are_nan(format: KvFormat, elements: [&[u8]; 2]) -> bool {
    elements.iter().all(|element| {
        let mut value = [0.0];
        row::decode_row(format.wide_format(), 1.0, element, &mut value);
        value[0].is_nan()
    })
}

/// Returns a tensor of ragged rows.
pub(super) fn ragged(data: u64, dtype: u32, tokens: u32, (heads, dim): (u32, u32)) -> Tensor {
    let token_stride = u64::from(heads * dim) * if dtype == 0 { 4 } else { 2 };
    Tensor { data, token_stride, axes: 2, dtype, batch: 1, tokens, heads, dim, ..Tensor::default() }
}

/// Returns values as elements of a tensor, and their rounded values.
pub(super) fn elements(dtype: u32, values: &[f32]) -> (Vec<u8>, Vec<f32>) {
    let f16s = || values.iter().map(|value| f16::from_f32(*value));
    let bf16s = || values.iter().map(|value| bf16::from_f32(*value));
    match dtype {
        0 => (bytemuck::cast_slice(values).to_vec(), values.to_vec()),
        1 => (f16s().flat_map(f16::to_le_bytes).collect(), f16s().map(f16::to_f32).collect()),
        _ => (bf16s().flat_map(bf16::to_le_bytes).collect(), bf16s().map(bf16::to_f32).collect()),
    }
}

fn bits(value: f32) -> u32 {
    if value.is_nan() { f32::NAN.to_bits() } else { value.to_bits() }
}

pub(super) fn layout(format: KvFormat, order: BlockOrder, dim: u32, heads: u32) -> PlaneLayout {
    let (num_blocks, block_size) = (9, 16);
    let num_kv_heads = heads;
    let shape = PlaneShape { num_blocks, block_size, num_kv_heads, head_dim: dim, order, format };
    PlaneLayout::new(shape).unwrap()
}

/// One case: both planes of one step are written, compared, and read back.
#[derive(Debug, Clone, Copy)]
struct Case {
    formats: [KvFormat; 2],
    dims: [u32; 2],
    heads: u32,
    dtype: u32,
    order: BlockOrder,
    transforms: bool,
    full_precision_prefix: u32,
    /// Offset of tensors from a multiple of 16, in bytes.
    offset: u64,
}

/// New tokens of three entries; the second has none.
const NEW: [u32; 3] = [13, 0, 20];
const TOTAL: u32 = 33;

fn run(case: Case, seed: u64) {
    let what = format!("{case:?}");
    let mut random = Random(seed);
    let mut device = Device::open(random.below(5));
    let Case { formats, dims, heads, order, .. } = case;
    let wide_slots = formats[0].wide_slots(dims[0]).max(formats[1].wide_slots(dims[1]));
    let mut fixtures: [Fixture; 2] = std::array::from_fn(|i| {
        let plain = layout(formats[i], order, dims[i], heads).with_transform(case.transforms);
        let full_precision_prefix = if wide_slots <= 16 { case.full_precision_prefix } else { 0 };
        Fixture::new(
            &mut device,
            plain.with_wide_rows(full_precision_prefix, false, wide_slots).unwrap(),
            &mut random,
        )
    });
    let map = *fixtures[0].layout.slot_map();
    // Each entry has blocks of its own; the step writes all its tokens.
    let mut pool: Vec<u32> = (0..9).collect();
    let (mut sequences, mut slots, mut places) = (Vec::new(), Vec::new(), Vec::new());
    let mut tables = Vec::new();
    let mut start = 0;
    for new_len in NEW {
        let table = tables.len() as u32;
        let blocks = map.blocks(new_len);
        for _ in 0..blocks {
            let at = random.below(pool.len() as u32) as usize;
            tables.push(pool.swap_remove(at));
        }
        for position in 0..new_len {
            let place = map.place(position);
            let block = tables[(table + place.index) as usize];
            slots.push(block * 16 + place.inside);
            places.push((block, place));
        }
        let sequence =
            Sequence { new_start: start, new_len, kv_len: new_len, table, ..Default::default() };
        sequences.push(sequence);
        start += new_len;
    }
    let inputs: [Tensor; 2] = std::array::from_fn(|i| {
        let dim = dims[i] as usize;
        let rows: Vec<f32> = (0..TOTAL * heads).flat_map(|_| random.row(dim)).collect();
        let (bytes, values) = elements(case.dtype, &rows);
        for (unit, values) in values.chunks(dim).enumerate() {
            let (head, (block, place)) = (unit % heads as usize, places[unit / heads as usize]);
            let stored = fixtures[i].stored(head, values);
            fixtures[i].put(block, place, head, &stored);
        }
        ragged(device.put_at(case.offset, &bytes), case.dtype, TOTAL, (heads, dims[i]))
    });
    let counts = Counts { sequences: 3, total_new: TOTAL, ..Default::default() };
    let plan = Plan {
        counts: device.put(&[counts]),
        sequences: device.put(&sequences),
        splits: 0,
        slots: device.put(&slots),
        tables: device.put(&tables),
    };
    let [k, v] = inputs;
    let [k_plane, v_plane] = [fixtures[0].plane, fixtures[1].plane];
    let params = WriteParams { plan, k, v, k_plane, v_plane };
    write_new(&mut device, &params, random.next() as u32);
    for fixture in &fixtures {
        fixture.check(&mut device, &what);
        read_back(&mut device, fixture, (&sequences, &places), plan.tables, random.below(3));
    }
}

/// Launches the kernel that writes; `choice` selects one if several can.
fn write_new(device: &mut Device, params: &WriteParams, choice: u32) {
    let extent = Extent { total_new: TOTAL, ..Extent::default() };
    let in_lanes = write::in_lanes(params, &extent);
    if let Some(launch) = in_lanes.ok().filter(|_| !choice.is_multiple_of(4)) {
        let grid = [1 + choice / 4 % launch.grid[0], 1, 1];
        return device.launch(launch.kernel, grid, launch.shared_bytes, params);
    }
    let WriteParams { k_plane, v_plane, .. } = params;
    let dim = k_plane.head_dim.max(v_plane.head_dim);
    let bytes = k_plane.row_bytes.max(v_plane.row_bytes);
    let shared = 4 * (round16(4 * dim) + 256 + round16(bytes));
    let is_plain =
        [k_plane, v_plane].iter().all(|plane| plane.format <= 2 && plane.transforms == 0);
    // Sometimes fewer thread blocks than work items.
    let grid = [1 + choice / 2 % TOTAL, 1, 1];
    if is_plain && choice.is_multiple_of(2) {
        device.launch("write_plain", grid, 0, params);
    } else {
        device.launch("write_rows", grid, shared, params);
    }
}

/// Reads all rows back into a ragged tensor and compares them.
fn read_back(
    device: &mut Device,
    fixture: &Fixture,
    (sequences, places): (&[Sequence], &[(u32, Place)]),
    tables: u64,
    dtype: u32,
) {
    let (heads, dim) = (fixture.layout.num_kv_heads(), fixture.layout.head_dim());
    let ranges: Vec<Range> = sequences
        .iter()
        .map(|s| Range {
            table: s.table,
            len: s.new_len,
            start: s.new_start,
            coded: s.new_len,
            ..Default::default()
        })
        .collect();
    let size = if dtype == 0 { 4 } else { 2 };
    let bytes = (TOTAL * heads * dim * size) as usize;
    let out = ragged(device.put(&vec![UNTOUCHED; bytes]), dtype, TOTAL, (heads, dim));
    let params = GatherParams {
        plane: fixture.plane,
        out,
        ranges: device.put(&ranges),
        tables,
        num_ranges: 3,
        total: TOTAL,
    };
    let in_lanes = gather::values(&params);
    if let Some(launch) = in_lanes.ok().filter(|_| sequences.len() + dtype as usize != 3) {
        device.launch(launch.kernel, [1 + dtype, 1, 1], launch.shared_bytes, &params);
    } else {
        device.launch("gather_rows", [1 + heads, 1, 1], 4 * round16(4 * dim), &params);
    }
    let got = device.bytes(out.data, bytes);
    let got: Vec<f32> = match dtype {
        0 => got.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect(),
        1 => got.as_chunks().0.iter().map(|bytes| f16::from_le_bytes(*bytes).to_f32()).collect(),
        _ => got.as_chunks().0.iter().map(|bytes| bf16::from_le_bytes(*bytes).to_f32()).collect(),
    };
    for (unit, got) in got.chunks(dim as usize).enumerate() {
        let (head, (block, place)) = (unit % heads as usize, places[unit / heads as usize]);
        let mut values = fixture.get(block, place, head);
        if fixture.layout.transforms() {
            transform::load(&mut values, &fixture.constants(head));
        }
        let (_, expected) = elements(dtype, &values);
        for (at, (got, expected)) in got.iter().zip(&expected).enumerate() {
            let format = fixture.layout.format();
            assert_eq!(
                bits(*got),
                bits(*expected),
                "{format}, dim {dim}, value {at}: {got} {expected}"
            );
        }
    }
}

const ORDERS: [BlockOrder; 2] = [BlockOrder::Nhd, BlockOrder::Hnd];

#[test]
fn every_format_equals_the_hosts() {
    for (i, format) in FORMATS.iter().enumerate() {
        for (j, dim) in [128, 64, 1, 5, 31, 33, 80, 100, 256].into_iter().enumerate() {
            let other = FORMATS[(i + j + 1) % FORMATS.len()];
            let dims = if j % 2 == 0 { [dim, dim] } else { [dim, dim + 8] };
            let case = Case {
                formats: [*format, other],
                dims,
                heads: 1 + (j as u32) % 3,
                dtype: 0,
                order: ORDERS[j % 2],
                transforms: false,
                full_precision_prefix: 0,
                offset: 0,
            };
            run(case, (i * 100 + j) as u64);
        }
    }
}

#[test]
fn rows_are_transformed_and_the_prefix_has_16_bits() {
    for (i, format) in FORMATS.iter().enumerate() {
        for (j, dim) in [128, 7, 80, 96].into_iter().enumerate() {
            let case = Case {
                formats: [*format, KvFormat::F16],
                dims: [dim, dim],
                heads: 2,
                dtype: (j as u32) % 3,
                order: ORDERS[i % 2],
                transforms: j % 2 == 0,
                full_precision_prefix: (i as u32) % 4,
                offset: 0,
            };
            run(case, (10_000 + i * 100 + j) as u64);
        }
    }
}

/// K and V of one kind, as the kernels that hold rows in registers need them: every pair of codes
/// with one scale, aligned tensors and others, with and without the transform.
#[test]
fn rows_in_registers_equal_the_hosts() {
    use kv_core::{ScaleGroup, Scaling};
    let scalings = [Scaling::Tensor, Scaling::Head, Scaling::Row];
    let kinds = [KvFormat::Fp8E4m3, KvFormat::Fp8E5m2, KvFormat::Int8];
    let bytes: Vec<_> = scalings.into_iter().flat_map(|it| kinds.map(|kind| kind(it))).collect();
    let lloyd = [KvFormat::L6, KvFormat::L4, KvFormat::L3].map(|kind| kind(ScaleGroup::Row));
    for (i, kind) in [&bytes[..], &lloyd].into_iter().enumerate() {
        for (j, format) in kind.iter().enumerate() {
            for (l, dim) in [64, 128, 256].into_iter().enumerate() {
                let seed = (30_000 + i * 1000 + j * 10 + l) as u64;
                let case = Case {
                    formats: [*format, kind[(j + l) % kind.len()]],
                    dims: [dim, dim],
                    heads: 1 + seed as u32 % 3,
                    dtype: (j + l) as u32 % 3,
                    order: ORDERS[(i + j + l) % 2],
                    transforms: (i + j) % 2 == 0,
                    full_precision_prefix: 0,
                    offset: if seed.is_multiple_of(7) { 8 } else { 0 },
                };
                run(case, seed);
            }
        }
    }
}

#[test]
fn unquantised_rows_of_any_type_and_alignment_are_moved() {
    for (i, format) in KvFormat::PLAIN.iter().enumerate() {
        for dtype in 0..3 {
            for (j, (dim, offset)) in [(128, 0), (128, 8), (12, 4), (3, 0)].into_iter().enumerate()
            {
                let case = Case {
                    formats: [*format, KvFormat::PLAIN[(i + j) % 3]],
                    dims: [dim, dim + 4],
                    heads: 3,
                    dtype,
                    order: ORDERS[j % 2],
                    transforms: false,
                    full_precision_prefix: 0,
                    offset,
                };
                run(case, (20_000 + i * 100 + j * 10) as u64 + u64::from(dtype));
            }
        }
    }
}

#[test]
fn an_unknown_format_number_is_reported() {
    let mut device = Device::open(7);
    let plane = Plane {
        base: device.put(&[0_u8; 64]),
        block_bytes: 64,
        token_stride: 16,
        head_stride: 16,
        blocks_per_segment: 1,
        num_blocks: 1,
        block_size: 4,
        num_kv_heads: 1,
        head_dim: 8,
        format: FORMATS.len() as u32,
        row_bytes: 16,
        wide_slots: 1,
        wide_per_block: 4,
        ..Plane::default()
    };
    let out = device.put(&[0.0_f32; 8]);
    let params = GatherParams {
        plane,
        out: ragged(out, 0, 1, (1, 8)),
        ranges: device.put(&[Range { len: 1, ..Range::default() }]),
        tables: device.put(&[0_u32]),
        num_ranges: 1,
        total: 1,
    };
    let error = device.try_launch("gather_rows", [1; 3], 4 * 32, &params).unwrap_err();
    assert!(error.to_string().contains("no stored format has the number 21"), "{error}");
}
