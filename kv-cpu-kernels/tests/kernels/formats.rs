//! Rows of every stored format: decoded and encoded as the definitions in `kv-format` say.
use half::f16;
use kv_format::Scaling;

use super::*;

fn layout(format: KvFormat, dim: usize) -> RowLayout {
    RowLayout::of(format, dim as u32).unwrap()
}

fn bits(values: &[f32]) -> Vec<u32> {
    // All NaN are equal here: the payload of a result is unspecified.
    values.iter().map(|x| if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() }).collect()
}

/// Bytes that may be a row: all codes, group scales of any kind, a row scale of a common size.
fn random_row(random: &mut Random, layout: &RowLayout) -> Box<[u8]> {
    let mut row: Vec<u8> = (0..layout.bytes()).map(|_| random.bits() as u8).collect();
    if layout.has_scale() {
        let scale = f16::from_f32(random.unit().abs() + 0.01).to_le_bytes();
        row[layout.scales()..][..2].copy_from_slice(&scale);
    }
    row.into()
}

fn given(format: KvFormat) -> f32 {
    if format.given_scales().is_some() { 0.37 } else { 1.0 }
}

#[test]
fn rows_decode_to_the_bits_of_the_definition() {
    let mut random = Random::new(11);
    for format in KvFormat::all() {
        for dim in (1..=130).chain([576]) {
            let layout = layout(format, dim);
            let row = random_row(&mut random, &layout);
            let mut expected = vec![0.0; dim];
            kv_format::row::decode_row(format, given(format), &row, &mut expected);
            let mut unscaled = vec![0.0; dim];
            kv_format::row::decode_row(format, 1.0, &row, &mut unscaled);
            for kernels in all_kernels() {
                let mut values = vec![f32::NAN; dim];
                kernels.decode_scaled(&layout, given(format), &row, &mut values);
                assert_eq!(bits(&values), bits(&expected), "{kernels:?} {format} {dim}");
                if !layout.has_scale() {
                    kernels.decode(&layout, &row, &mut values);
                    assert_eq!(bits(&values), bits(&unscaled), "{kernels:?} {format} {dim}");
                }
            }
        }
    }
}

/// Compiled for any instruction set, as vector code or not.
#[test]
fn rows_encode_to_the_bytes_of_the_definition() {
    const ODD: [f32; 6] = [f32::NAN, f32::INFINITY, -0.0, 1e-42, -3e38, 65504.0];
    let mut random = Random::new(12);
    for format in KvFormat::all() {
        for dim in (1..=130).chain([576]) {
            let size = [1e-3, 1.0, 300.0][dim % 3];
            let mut values: Vec<_> = random.units(dim).iter().map(|x| x * size).collect();
            if dim % 2 == 0 {
                values[dim / 2] = ODD[dim / 2 % ODD.len()];
            }
            let mut expected = vec![0; layout(format, dim).bytes()];
            kv_format::row::encode_row(format, given(format), &values, &mut expected);
            for kernels in all_kernels() {
                let mut row = vec![0xa5; expected.len()];
                kernels.encode_row(format, given(format), &values, &mut row);
                assert_eq!(row, expected, "{kernels:?} {format} {dim}");
            }
        }
    }
}

#[test]
fn every_code_of_a_byte_decodes() {
    let codes: Vec<u8> = (0..=255).collect();
    for format in [KvFormat::Fp8E4m3, KvFormat::Fp8E5m2, KvFormat::Int8].map(|of| of(Scaling::Head))
    {
        let mut expected = vec![0.0; 256];
        kv_format::row::decode_row(format, 1.0, &codes, &mut expected);
        for kernels in all_kernels() {
            let mut values = vec![0.0; 256];
            kernels.decode(&layout(format, 256), &codes, &mut values);
            assert_eq!(bits(&values), bits(&expected), "{kernels:?} {format}");
        }
    }
}

/// Any number of rows at any stride, in memory that ends with the last scale or after it.
#[test]
fn scales_of_rows_are_read() {
    let mut random = Random::new(13);
    for format in KvFormat::all().filter(|format| layout(*format, 32).has_scale()) {
        for (dim, count) in DIMS.into_iter().flat_map(|dim| TOKENS.map(|count| (dim, count))) {
            let layout = layout(format, dim);
            let stride = layout.bytes() + count % 3;
            let mut bytes: Vec<u8> = (0..count * stride).map(|_| random.bits() as u8).collect();
            let mut expected = vec![1.0; count.next_multiple_of(16)];
            for (row, expected) in bytes.chunks_mut(stride).zip(&mut expected) {
                let scale = f16::from_f32(random.unit());
                row[layout.scales()..][..2].copy_from_slice(&scale.to_le_bytes());
                *expected = scale.to_f32();
            }
            bytes.truncate((count - 1) * stride + layout.bytes());
            let bytes = bytes.into_boxed_slice();
            let rows = KeyRows::new(&bytes, stride, count, &layout);
            for kernels in all_kernels() {
                let mut scales = vec![f32::NAN; expected.len()];
                kernels.row_scales(&rows, &mut scales);
                assert_eq!(bits(&scales), bits(&expected), "{kernels:?} {format} {dim} {count}");
            }
        }
    }
}

#[test]
fn pairs_of_bf16_are_its_values_in_another_order() {
    let mut random = Random::new(14);
    for dim in (1..=130).chain([576]) {
        let row = Stored::new(&mut random, (KvFormat::Bf16, true), dim, 1);
        let mut natural = vec![0.0; dim];
        kv_format::row::decode_row(KvFormat::Bf16, 1.0, &row.bytes, &mut natural);
        for kernels in all_kernels() {
            let mut values = vec![0.0; dim];
            kernels.decode(&row.layout, &row.bytes, &mut values);
            assert_eq!(values, row.values[0], "{kernels:?} {dim}");
            kernels.join_pairs(&mut values);
            assert_eq!(values, natural, "{kernels:?} {dim}: joined");
            kernels.split_pairs(&mut values);
            assert_eq!(values, row.values[0], "{kernels:?} {dim}: split");
        }
    }
}
