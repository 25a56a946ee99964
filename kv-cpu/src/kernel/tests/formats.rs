//! Rows of every stored format: decoded as the definition says, scored and summed.
use kv_core::{KvFormat, ScaleGroup, Scaling};

use super::*;
use crate::encoding::RowLayout;

fn layout(format: KvFormat, dim: usize) -> RowLayout {
    RowLayout::of(format, dim as u32).unwrap()
}

fn bits(values: &[f32]) -> Vec<u32> {
    // Every NaN is alike: which one comes out of an operation is nobody's promise.
    values.iter().map(|x| if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() }).collect()
}

/// Bytes that may be a row: all codes, group scales of any kind, a row scale of a common size.
fn random_row(random: &mut Random, layout: &RowLayout) -> Vec<u8> {
    let mut row: Vec<u8> = (0..layout.bytes()).map(|_| random.bits() as u8).collect();
    if layout.has_scale() {
        let scale = f16::from_f32(random.unit().abs() + 0.01).to_le_bytes();
        row[layout.scales()..][..2].copy_from_slice(&scale);
    }
    row
}

fn given(format: KvFormat) -> f32 {
    if format.given_scales().is_some() { 0.37 } else { 1.0 }
}

#[test]
fn rows_decode_to_the_bits_of_the_definition() {
    let mut random = Random::new(7);
    for format in KvFormat::all() {
        for dim in 1..=130 {
            let layout = layout(format, dim);
            let row = random_row(&mut random, &layout);
            let mut expected = vec![0.0; dim];
            kv_quant::row::decode_row(format, given(format), &row, &mut expected);
            for (name, kernels) in all() {
                // Right behind the row, memory ends: a tool that watches reads would see more.
                let row = row.clone().into_boxed_slice();
                let mut values = vec![f32::NAN; dim];
                kernels.decode_scaled(&layout, given(format), &row, &mut values);
                assert_eq!(bits(&values), bits(&expected), "{name} {format} {dim}");
            }
        }
    }
}

/// Compiled for any instruction set, as vector code or not.
#[test]
fn rows_encode_to_the_bytes_of_the_definition() {
    const ODD: [f32; 6] = [f32::NAN, f32::INFINITY, -0.0, 1e-42, -3e38, 65504.0];
    let mut random = Random::new(11);
    for format in KvFormat::all() {
        for dim in 1..=130 {
            let size = [1e-3, 1.0, 300.0][dim % 3];
            let mut values: Vec<_> = random.units(dim).iter().map(|x| x * size).collect();
            if dim % 2 == 0 {
                values[dim / 2] = ODD[dim / 2 % ODD.len()];
            }
            let mut expected = vec![0; layout(format, dim).bytes()];
            kv_quant::row::encode_row(format, given(format), &values, &mut expected);
            for (name, kernels) in all() {
                let mut row = vec![0xa5; expected.len()];
                kernels.encode_row(format, given(format), &values, &mut row);
                assert_eq!(row, expected, "{name} {format} {dim}");
            }
        }
    }
}

#[test]
fn every_code_of_a_byte_decodes() {
    let codes: Vec<u8> = (0..=255).collect();
    for scaling in [Scaling::Tensor, Scaling::Head] {
        let formats = [KvFormat::Fp8E4m3, KvFormat::Fp8E5m2, KvFormat::Int8];
        for format in formats.map(|of| of(scaling)) {
            let mut expected = vec![0.0; 256];
            kv_quant::row::decode_row(format, 1.0, &codes, &mut expected);
            for (name, kernels) in all() {
                let mut values = vec![0.0; 256];
                kernels.decode(&layout(format, 256), &codes, &mut values);
                assert_eq!(bits(&values), bits(&expected), "{name} {format}");
            }
        }
    }
}

/// A tile of rows and what they decode to.
pub(super) struct Tiled {
    pub(super) layout: RowLayout,
    pub(super) bytes: Vec<Vec<u8>>,
    pub(super) values: Vec<Vec<f32>>,
    given: f32,
}

impl Tiled {
    pub(super) fn new(random: &mut Random, format: KvFormat, dim: usize) -> Self {
        let layout = layout(format, dim);
        let (mut bytes, mut values) = (Vec::new(), Vec::new());
        for _ in 0..TILE {
            let mut row = vec![0; layout.bytes()];
            let given = given(format);
            kv_quant::row::encode_row(format, given.recip(), &random.units(dim), &mut row);
            let mut decoded = vec![0.0; dim];
            kv_quant::row::decode_row(format, given, &row, &mut decoded);
            bytes.push(row);
            values.push(decoded);
        }
        Self { layout, bytes, values, given: given(format) }
    }
    pub(super) fn scale(&self) -> RowScale<'static> {
        if self.layout.has_scale() { RowScale::Stored } else { RowScale::Given(self.given) }
    }
}

/// Sums have the same bits for any number of rows at a time and whether they are staged or not, and
/// are near those of `f64`.
#[test]
fn scores_and_sums_of_all_row_counts_agree() {
    let mut random = Random::new(3);
    for dim in [1_usize, 7, 8, 15, 16, 17, 31, 32, 33, 40, 48, 64, 80, 96, 100, 128, 192, 256] {
        for format in KvFormat::all() {
            let tile = Tiled::new(&mut random, format, dim);
            let stride = dim.next_multiple_of(LANES_MAX);
            let q: Vec<_> = (0..QUERIES * stride)
                .map(|i| if i % stride < dim { random.unit() } else { 0.0 })
                .collect();
            for (name, kernels) in all() {
                check_tile(&format!("{name} {format} {dim}"), kernels, &tile, (&q, stride));
            }
        }
    }
}

/// Tiles of E4M3 without NaN have loops of their own, and which tiles are such is looked for.
#[test]
fn a_nan_of_e4m3_reaches_its_token_and_its_value_alone() {
    let mut random = Random::new(13);
    for dim in [1_usize, 7, 31, 32, 64, 80, 100, 128] {
        let mut tile = Tiled::new(&mut random, KvFormat::Fp8E4m3(Scaling::Tensor), dim);
        let stride = dim.next_multiple_of(LANES_MAX);
        let q = vec![1.0; QUERIES * stride];
        let range = (3, TILE - 4);
        for (token, value, code) in
            [(2, 0, 0x7f), (3, 0, 0xff), (40, dim / 2, 0x7f), (70, dim - 1, 0xff)]
        {
            let clean = std::mem::replace(&mut tile.bytes[token][value], code);
            let rows = TileRows::of(tile.bytes.iter().map(Vec::as_slice), tile.layout.bytes());
            let seen = (range.0..range.1).contains(&token);
            for (name, kernels) in all() {
                let name = format!("{name} {dim} {token} {value}");
                let runs = Runs::new();
                let mut ahead = Ahead::of(&runs);
                let mut scores = vec![0.0; TILE];
                let mut args = Scores {
                    rows: 1,
                    q: &q,
                    stride,
                    k: &rows,
                    layout: &tile.layout,
                    scale: tile.scale(),
                    range,
                    out: &mut scores,
                };
                kernels.scores(&mut args, &mut ahead);
                let expected: Vec<_> = (0..TILE).map(|i| seen && i == token).collect();
                assert_eq!(
                    scores.iter().map(|x| x.is_nan()).collect::<Vec<_>>(),
                    expected,
                    "{name}"
                );
                let mut out = vec![0.0; stride];
                let mut args = Sums {
                    rows: 1,
                    weights: &mut [0.5; TILE],
                    v: &rows,
                    layout: &tile.layout,
                    scale: tile.scale(),
                    range,
                    out: &mut out,
                    stride,
                };
                kernels.sums(&mut args, &mut ahead);
                let expected: Vec<_> = (0..stride).map(|i| seen && i == value).collect();
                assert_eq!(out.iter().map(|x| x.is_nan()).collect::<Vec<_>>(), expected, "{name}");
            }
            tile.bytes[token][value] = clean;
        }
    }
}

/// As many as ask for kernels of four rows, two and one.
const QUERIES: usize = 7;

/// Scores the tokens of a range and adds them with the scores as weights, `rows` at a time.
fn scores_and_sums(
    kernels: Kernels,
    (q, stride): (&[f32], usize),
    (k, layout, scale): (&[&[u8]], &RowLayout, RowScale<'_>),
    (rows, range): (usize, (usize, usize)),
) -> [Vec<f32>; 2] {
    let mut scores = vec![f32::NAN; QUERIES * TILE];
    let mut out = vec![0.25; QUERIES * stride];
    let mut runs = Runs::new();
    for row in k {
        runs.push(row);
    }
    let k = &TileRows::of(k.iter().copied(), layout.bytes());
    for first in (0..QUERIES).step_by(rows) {
        let rows = rows.min(QUERIES - first);
        let mut ahead = Ahead::of(&runs);
        let mut args = Scores {
            rows,
            q: &q[first * stride..],
            stride,
            k,
            layout,
            scale,
            range,
            out: &mut scores[first * TILE..],
        };
        kernels.scores(&mut args, &mut ahead);
        let mut args = Sums {
            rows,
            weights: &mut scores[first * TILE..].to_vec(),
            v: k,
            layout,
            scale,
            range,
            out: &mut out[first * stride..],
            stride,
        };
        kernels.sums(&mut args, &mut ahead);
    }
    [scores, out]
}

fn check_tile(name: &str, kernels: Kernels, tile: &Tiled, (q, stride): (&[f32], usize)) {
    let (dim, layout) = (tile.layout.dim(), &tile.layout);
    let k: Vec<&[u8]> = tile.bytes.iter().map(Vec::as_slice).collect();
    let range = (3, TILE - 4);
    let stored = (k.as_slice(), layout, tile.scale());
    let [scores, out] = scores_and_sums(kernels, (q, stride), stored, (1, range));
    for rows in [2, ROWS, QUERIES] {
        let again = scores_and_sums(kernels, (q, stride), stored, (rows, range));
        assert_eq!(bits(&again[0]), bits(&scores), "{name} {rows}");
        assert_eq!(bits(&again[1]), bits(&out), "{name} {rows}");
    }
    let staged: Vec<Vec<u8>> = k.iter().map(|row| staged(kernels, layout, row)).collect();
    let staged: Vec<&[u8]> = staged.iter().map(Vec::as_slice).collect();
    let scales = if layout.has_scale() {
        kernels.row_scales(&TileRows::of(k.iter().copied(), layout.bytes()), layout)
    } else {
        [tile.given; TILE]
    };
    let plain = RowLayout::plain(Element::F32, dim);
    let again = (staged.as_slice(), &plain, RowScale::Each(&scales));
    let again = scores_and_sums(kernels, (q, stride), again, (ROWS, range));
    assert_eq!(bits(&again[0]), bits(&scores), "{name} staged");
    assert_eq!(bits(&again[1]), bits(&out), "{name} staged");

    let mut expected_out = vec![0.25_f64; dim];
    let tokens = scores.iter().zip(&tile.values).take(range.1).skip(range.0);
    for (score, key) in tokens {
        let exact: f64 = q.iter().zip(key).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
        let error = (f64::from(*score) - exact).abs();
        assert!(error < 2e-5 * (dim as f64).sqrt(), "{name}: {score} {exact}");
        for (out, key) in expected_out.iter_mut().zip(key) {
            *out += f64::from(*score) * f64::from(*key);
        }
    }
    for (a, b) in out.iter().zip(&expected_out) {
        assert!((f64::from(*a) - b).abs() < 1e-3 * (1.0 + b.abs()), "{name}: {a} {b}");
    }
}

#[test]
fn pairs_of_bf16_are_its_values_in_another_order() {
    let mut random = Random::new(11);
    for dim in [1_usize, 16, 31, 32, 33, 48, 64, 80, 100, 128, 256] {
        let tile = Tiled::new(&mut random, KvFormat::Bf16, dim);
        let stride = dim.next_multiple_of(LANES_MAX);
        let q: Vec<_> = (0..QUERIES * stride)
            .map(|i| if i % stride < dim { random.unit() } else { 0.0 })
            .collect();
        let pairs = tile.layout.in_pairs();
        let k: Vec<&[u8]> = tile.bytes.iter().map(Vec::as_slice).collect();
        for (name, kernels) in all() {
            let name = format!("{name} {dim}");
            let mut split = q.clone();
            split.chunks_mut(stride).for_each(|row| kernels.split_pairs(&mut row[..dim]));
            for (row, values) in tile.bytes.iter().zip(&tile.values) {
                let mut decoded = vec![0.0; dim];
                kernels.decode(&pairs, row, &mut decoded);
                kernels.join_pairs(&mut decoded);
                assert_eq!(&decoded, values, "{name}");
                kernels.split_pairs(&mut decoded);
                let mut again = vec![0.0; dim];
                kernels.decode(&pairs, row, &mut again);
                assert_eq!(decoded, again, "{name}");
            }
            let range = (3, TILE - 4);
            let given = RowScale::Given(1.0);
            let natural =
                scores_and_sums(kernels, (&q, stride), (&k, &tile.layout, given), (4, range));
            let mut taken =
                scores_and_sums(kernels, (&split, stride), (&k, &pairs, given), (4, range));
            // Staged, as rows that many queries share are.
            let rows: Vec<Vec<u8>> = k.iter().map(|row| staged(kernels, &pairs, row)).collect();
            let rows: Vec<&[u8]> = rows.iter().map(Vec::as_slice).collect();
            let plain = RowLayout::plain(Element::F32, dim);
            let again =
                scores_and_sums(kernels, (&split, stride), (&rows, &plain, given), (4, range));
            assert_eq!(bits(&again[0]), bits(&taken[0]), "{name} staged");
            assert_eq!(bits(&again[1]), bits(&taken[1]), "{name} staged");
            taken[1].chunks_mut(stride).for_each(|row| kernels.join_pairs(&mut row[..dim]));
            for (natural, taken) in natural.iter().flatten().zip(taken.iter().flatten()) {
                let near = (natural - taken).abs() <= 2e-4 * (1.0 + natural.abs());
                assert!(near || natural.is_nan(), "{name}: {natural} {taken}");
            }
        }
    }
}

fn staged(kernels: Kernels, layout: &RowLayout, row: &[u8]) -> Vec<u8> {
    let mut values = vec![0.0; layout.dim()];
    kernels.decode(layout, row, &mut values);
    values.iter().flat_map(|x| x.to_ne_bytes()).collect()
}

#[test]
fn every_format_has_a_kernel_of_its_own() {
    let mut seen = Vec::new();
    for format in KvFormat::all() {
        let layout = layout(format, 64);
        let scaled = matches!(
            format,
            KvFormat::L6(ScaleGroup::Row)
                | KvFormat::L4(ScaleGroup::Row)
                | KvFormat::L3(ScaleGroup::Row)
        ) || format.to_string().ends_with("-row")
            || format.to_string() == "int8";
        assert_eq!(layout.has_scale(), scaled, "{format}");
        seen.push(layout.encoding().index());
    }
    seen.push(RowLayout::plain(Element::Bf16, 64).in_pairs().encoding().index());
    seen.sort_unstable();
    seen.dedup();
    assert_eq!(seen, (0..Encoding::COUNT).collect::<Vec<_>>());
}
