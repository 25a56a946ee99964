//! `copy_blocks`, `convert_rows`, `store_q8_0`, `load_q8_0` and `pad_rows`.
use half::{bf16, f16};
use kv_core::{BlockOrder, KvFormat};
use kv_quant::row::{decode_row, encode_row};

use super::device::Device;
use super::random::Random;
use super::rows::{Fixture, UNTOUCHED, elements, layout};
use crate::params::{
    Address, BlockCopy, ConvertParams, CopyParams, Counts, Entry, PadParams, Plane, StoredParams,
    Tensor,
};

#[test]
fn first_slots_of_blocks_are_copied_in_every_plane() {
    let formats = ["int8", "f32", "l3", "q4_0", "fp8-e4m3", "bf16"];
    for (i, names) in formats.windows(2).enumerate() {
        for order in [BlockOrder::Nhd, BlockOrder::Hnd] {
            let mut random = Random(i as u64);
            let mut device = Device::open(3);
            let mut fixtures: Vec<Fixture> = [0, 1, 2]
                .into_iter()
                .map(|plane| {
                    let format: KvFormat = names[plane % 2].parse().unwrap();
                    let layout = layout(format, order, [64, 5, 33][plane], 1 + plane as u32);
                    let means = plane == 2 && format.is_quantised();
                    let layout = if means { layout.with_block_means().unwrap() } else { layout };
                    let mut fixture = Fixture::new(&mut device, layout, &mut random);
                    // Different bytes everywhere, so that every misplaced copy shows.
                    fixture.image.fill_with(|| random.next() as u8);
                    fixture.plane.base = device.put(&fixture.image);
                    fixture
                })
                .collect();
            let copies: Vec<BlockCopy> = [(0, 7, 16), (1, 8, 1), (2, 5, 9), (0, 6, 0), (1, 4, 15)]
                .map(|(from, to, slots)| BlockCopy { from, to, slots, pad: 0 })
                .to_vec();
            let planes: Vec<Plane> = fixtures.iter().map(|fixture| fixture.plane).collect();
            let params = CopyParams {
                planes: device.put(&planes),
                copies: device.put(&copies),
                num_planes: 3,
                num_copies: 5,
            };
            device.launch(
                "copy_blocks",
                [1 + i as u32, 1 + i as u32 % 2, 1 + i as u32 % 4],
                0,
                &params,
            );
            for fixture in &mut fixtures {
                for copy in &copies {
                    copy_block(fixture, copy);
                }
                fixture.check(&mut device, &format!("{names:?} {order:?}"));
            }
        }
    }
}

/// Copies a block in the model: row by row, then the means.
fn copy_block(fixture: &mut Fixture, copy: &BlockCopy) {
    let layout = fixture.layout;
    let begin = |block: u32| (layout.block_bytes() * u64::from(block)) as usize;
    for slot in 0..copy.slots {
        let place = layout.slot_map().place(slot);
        for head in 0..layout.num_kv_heads() as usize {
            let from = fixture.range(copy.from, place, head);
            let to = fixture.range(copy.to, place, head).start;
            fixture.image.copy_within(from, to);
        }
    }
    if layout.has_block_means() {
        let means = layout.mean_begin(0) as usize;
        let from = begin(copy.from) + means..begin(copy.from + 1);
        fixture.image.copy_within(from, begin(copy.to) + means);
    }
}

/// Three entries, in every shape that a tensor can have.
const ENTRIES: [Entry; 3] =
    [Entry { start: 0, len: 5 }, Entry { start: 5, len: 0 }, Entry { start: 5, len: 3 }];
const TOTAL: u32 = 8;

/// Returns a tensor with space for one entry and three tokens more than needed, and rows `gap`
/// values apart.
fn tensor(axes: u32, dtype: u32, (heads, dim): (u32, u32), gap: u32) -> (Tensor, u32) {
    let size = if dtype == 0 { 4 } else { 2 };
    let row = u64::from((heads * dim + gap) * size);
    let (batch, tokens) = if axes == 2 { (1, TOTAL + 3) } else { (4, 8) };
    let (batch_stride, token_stride) = match axes {
        0 => (row * 8, row),
        1 => (row, row * 4),
        _ => (0, row),
    };
    let shape =
        Tensor { batch_stride, token_stride, axes, dtype, batch, tokens, heads, dim, data: 0 };
    (shape, row as u32 * batch * tokens)
}

/// Returns the first byte of a token.
fn at(tensor: &Tensor, entry: usize, token: u32) -> usize {
    let start = if tensor.axes == 2 { ENTRIES[entry].start } else { 0 };
    (entry as u64 * tensor.batch_stride + u64::from(start + token) * tensor.token_stride) as usize
}

fn decode(dtype: u32, bytes: &[u8]) -> Vec<f32> {
    match dtype {
        0 => bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect(),
        1 => bytes.as_chunks().0.iter().map(|bytes| f16::from_le_bytes(*bytes).to_f32()).collect(),
        _ => bytes.as_chunks().0.iter().map(|bytes| bf16::from_le_bytes(*bytes).to_f32()).collect(),
    }
}

/// Sets rows of no entry in the model to the padding value; `owned` are the entries.
fn pad(tensor: &Tensor, owned: &[Entry], value: f32, image: &mut [u8]) {
    let bytes = elements(tensor.dtype, &vec![value; (tensor.heads * tensor.dim) as usize]).0;
    for entry in 0..tensor.batch {
        let used = match tensor.axes {
            2 => owned.iter().map(|entry| entry.len).sum(),
            _ => owned.get(entry as usize).map_or(0, |entry| entry.len),
        };
        for token in used..tensor.tokens {
            let at =
                u64::from(entry) * tensor.batch_stride + u64::from(token) * tensor.token_stride;
            image[at as usize..][..bytes.len()].copy_from_slice(&bytes);
        }
    }
}

#[test]
fn rows_change_axes_and_types_and_the_rest_is_padding() {
    let mut random = Random(5);
    for case in 0..3 * 3 * 3 * 3 * 3 {
        let [src_axes, dst_axes, src_dtype, dst_dtype, shape] =
            [1, 3, 9, 27, 81].map(|power| case / power % 3);
        let (shape, gap) = [((2, 64), 0), ((3, 5), 0), ((1, 24), 8)][shape as usize];
        let mut device = Device::open(case);
        let (mut src, src_bytes) = tensor(src_axes, src_dtype, shape, gap);
        let (mut dst, dst_bytes) = tensor(dst_axes, dst_dtype, shape, 8 - gap);
        let size = if src_dtype == 0 { 4 } else { 2 };
        // No NaN, whose bits would change.
        let mut values = random.row((src_bytes / size) as usize);
        values.iter_mut().filter(|value| value.is_nan()).for_each(|value| *value = 0.5);
        let (bytes, _) = elements(src_dtype, &values);
        let mut image = vec![UNTOUCHED; dst_bytes as usize];
        let row = (shape.0 * shape.1 * size) as usize;
        for (i, entry) in ENTRIES.iter().enumerate() {
            for token in 0..entry.len {
                let from = &bytes[at(&src, i, token)..][..row];
                let (to, _) = elements(dst_dtype, &decode(src_dtype, from));
                image[at(&dst, i, token)..][..to.len()].copy_from_slice(&to);
            }
        }
        // Sometimes not at a multiple of 16 bytes.
        let offset: u64 = if case % 2 == 0 { 0 } else { 4 };
        src.data = device.put_at(offset, &bytes);
        dst.data = device.put_at(offset, &vec![UNTOUCHED; dst_bytes as usize]);
        let entries = device.put(&ENTRIES);
        let params = ConvertParams { src, dst, entries, num_entries: 3, total: TOTAL };
        device.launch("convert_rows", [1 + case % 3, 1, 1], 0, &params);
        assert_eq!(device.bytes(dst.data, image.len()), image, "{params:?}");
        let value = [0.0, f32::NEG_INFINITY, 1.5][case as usize % 3];
        pad_and_check(&mut device, (dst, entries), value, image);
    }
}

#[test]
fn rows_are_stored_in_blocks_and_loaded_again() {
    // Less than a block, whole blocks, one part of a warp and several, with a rest.
    const SHAPES: [(u32, u32); 6] = [(2, 24), (1, 32), (3, 33), (2, 128), (1, 300), (2, 512)];
    let mut random = Random(8);
    for case in 0..3 * 6 {
        let (axes, shape) = (case % 3, SHAPES[case as usize / 3]);
        let (heads, dim) = shape;
        let mut device = Device::open(case);
        let (mut rows, bytes) = tensor(axes, 0, shape, case % 2);
        let mut values = random.row(bytes as usize / 4);
        // Encoding keeps the bits of no NaN; blocks of NaN are covered where results are compared.
        values.iter_mut().filter(|value| value.is_nan()).for_each(|value| *value = 0.5);
        let (image, _) = elements(0, &values);
        let row_bytes = KvFormat::Q8_0.row_bytes(dim) as usize;
        let (mut stored, mut loaded) = (Vec::new(), vec![UNTOUCHED; image.len()]);
        for (i, entry) in ENTRIES.iter().enumerate() {
            for token in 0..entry.len {
                let begin = at(&rows, i, token);
                for head in 0..heads as usize {
                    let begin = begin + head * dim as usize * 4;
                    let plain = &image[begin..][..dim as usize * 4];
                    let mut row = vec![0; row_bytes];
                    encode_row(KvFormat::Q8_0, 1.0, &decode(0, plain), &mut row);
                    let mut back = vec![0.0; dim as usize];
                    decode_row(KvFormat::Q8_0, 1.0, &row, &mut back);
                    loaded[begin..][..plain.len()].copy_from_slice(&elements(0, &back).0);
                    stored.extend(row);
                }
            }
        }
        // At a multiple of 16 bytes, and not.
        rows.data = device.put_at([0, 4][case as usize % 2], &image);
        let around = [UNTOUCHED; 6];
        let whole = device.put(&[&around[..], &vec![UNTOUCHED; stored.len()], &around].concat());
        let entries = device.put(&ENTRIES);
        let params =
            StoredParams { rows, stored: whole + 6, entries, num_entries: 3, total: TOTAL };
        device.launch("store_q8_0", [1 + case % 3, 1, 1], 0, &params);
        let expected = [&around[..], &stored, &around].concat();
        assert_eq!(device.bytes(whole, expected.len()), expected, "{params:?}");
        let data = device.put_at([0, 4][case as usize % 2], &vec![UNTOUCHED; image.len()]);
        let params = StoredParams { rows: Tensor { data, ..rows }, ..params };
        device.launch("load_q8_0", [1 + case % 3, 1, 1], 0, &params);
        assert_eq!(device.bytes(data, loaded.len()), loaded, "{params:?}");
    }
}

/// Pads with the parameters' counts, then with fewer entries, which only the step's counts say.
fn pad_and_check(
    device: &mut Device,
    (out, entries): (Tensor, Address),
    value: f32,
    mut image: Vec<u8>,
) {
    let mut params =
        PadParams { out, entries, num_entries: 3, total: TOTAL, value, ..Default::default() };
    device.launch("pad_rows", [2, 1, 1], 0, &params);
    pad(&out, &ENTRIES, value, &mut image);
    assert_eq!(device.bytes(out.data, image.len()), image, "{params:?}");
    params.counts = device.put(&[Counts { sequences: 2, total_q: 5, ..Default::default() }]);
    device.launch("pad_rows", [3, 1, 1], 0, &params);
    pad(&out, &ENTRIES[..2], value, &mut image);
    assert_eq!(device.bytes(out.data, image.len()), image, "{params:?}");
}
