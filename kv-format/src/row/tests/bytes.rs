//! Rows written by hand, as `docs/formats.md` draws them.
use super::*;

#[test]
fn unquantised_rows_are_little_endian_and_round_to_even() {
    let values = [1.0, -2.0, 1.0 + 1.0 / 2048.0];
    assert_eq!(encode(format("f32"), 1.0, &values[..1]), 1.0_f32.to_le_bytes());
    assert_eq!(encode(format("f16"), 1.0, &values), [0x00, 0x3C, 0x00, 0xC0, 0x00, 0x3C]);
    let values = [1.0, 1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0];
    assert_eq!(encode(format("bf16"), 1.0, &values), [0x80, 0x3F, 0x80, 0x3F, 0x82, 0x3F]);
}

#[test]
fn bytes_with_a_given_scale() {
    let values = [1.0, -448.0, 0.5, 1e9, -0.0];
    let codes = [0x38, 0xFE, 0x30, 0x7E, 0x80, 0];
    assert_eq!(encode(format("fp8-e4m3"), 1.0, &values), codes);
    let halved: Vec<f32> = values.iter().map(|value| value * 0.5).collect();
    assert_eq!(encode(format("fp8-e4m3-head"), 0.5, &halved), codes);
    let decoded = decode(format("fp8-e4m3-head"), 0.5, &codes, 5);
    assert_eq!(decoded, [0.5, -224.0, 0.25, 224.0, 0.0]);
    assert_eq!(encode(format("fp8-e5m2"), 1.0, &[1.0, -1e9]), [0x3C, 0xFB]);
    // Halves round to the even code; the range is symmetric.
    let values = [0.5, 1.5, -2.5, 127.4, -128.0, 300.0];
    assert_eq!(encode(format("int8-tensor"), 1.0, &values), [0, 2, 0xFE, 127, 0x81, 127]);
}

#[test]
fn bytes_with_a_scale_of_the_row() {
    // The largest is 254: the scale is 2, in f16 0x4000, after a byte of padding.
    let row = encode(format("int8"), 1.0, &[254.0, -2.0, 1.0, 3.0, 5.0]);
    assert_eq!(row, [127, 0xFF, 0, 2, 2, 0, 0x00, 0x40]);
    assert_eq!(decode(format("int8"), 9.0, &row, 5), [254.0, -2.0, 0.0, 4.0, 4.0]);
    assert_eq!(encode(format("fp8-e4m3-row"), 1.0, &[896.0, 2.0]), [0x7E, 0x38, 0x00, 0x40]);
    assert_eq!(encode(format("fp8-e5m2-row"), 1.0, &[28672.0, 0.5]), [0x7B, 0x3C, 0x00, 0x38]);
}

/// Returns levels times 1, whose codes are known and whose best scale is 1.
fn levels(bits: u32, codes: &[u8]) -> Vec<f32> {
    let magnitudes = crate::lloyd::magnitudes(bits).unwrap();
    let sign = 1 << (bits - 1);
    let value = |code: u8| {
        let magnitude = magnitudes[usize::from(code & (sign - 1))];
        if code & sign == 0 { magnitude } else { -magnitude }
    };
    codes.iter().map(|code| value(*code)).collect()
}

/// Returns 128 codes whose magnitudes are as frequent as in a normal row, so that the search finds
/// scale 1; every group of 32 has a pattern.
fn likely_codes(bits: u32) -> Vec<u8> {
    let mut normal = Normal(3);
    let bounds = crate::lloyd::thresholds(bits).unwrap();
    let code = |value: f32| {
        let index = bounds.iter().filter(|bound| value.abs() > **bound).count();
        u8::try_from(index).unwrap() | if value < 0.0 { 1 << (bits - 1) } else { 0 }
    };
    (0..128).map(|_| code(normal.next())).collect()
}

#[test]
fn lloyd_codes_lie_in_planes() {
    for (name, code_bits) in [("l3", 3), ("l4", 4), ("l6", 6)] {
        let codes = likely_codes(code_bits);
        let values = levels(code_bits, &codes);
        let row = encode(format(name), 1.0, &values);
        let bytes = usize::try_from(code_bits).unwrap() * 4;
        assert_eq!(row.len(), 4 * bytes + 2);
        let scale = half::f16::from_le_bytes([row[4 * bytes], row[4 * bytes + 1]]).to_f32();
        let mut found = Vec::new();
        for row in row.chunks(bytes).take(4) {
            let plane = |index: usize, from: usize, m: usize, width: usize| {
                row[from + index % m] >> (index / m * width) & ((1 << width) - 1)
            };
            found.extend((0..32).map(|index| match code_bits {
                3 => plane(index, 0, 8, 2) | plane(index, 8, 4, 1) << 2,
                4 => plane(index, 0, 16, 4),
                _ => plane(index, 0, 16, 4) | plane(index, 16, 8, 2) << 4,
            }));
        }
        if code_bits < 6 {
            assert_eq!(found, codes, "{name}");
            assert!((scale - 1.0).abs() < 1e-3, "{name}: {scale}");
        }
        // Levels of l6 are so close that another scale may fit as well: allow half a step.
        for (value, found) in values.iter().zip(levels(code_bits, &found)) {
            let error = (found * scale - value).abs();
            assert!(error < 0.04 + 0.06 * value.abs(), "{name}: {value} {found} {scale}");
        }
    }
}

#[test]
fn a_short_group_is_packed_by_its_own_length() {
    // Codes 1, 2, 3, sign 0, sign 1 of l3: magnitudes in 2 bytes (values 0, 2, 4 and 1, 3), signs
    // in one; then padding and the scale.
    let row = [0b00_01_11_01, 0b00_00_00_10, 0b0001_1000, 0, 0x00, 0x3C];
    let expected = levels(3, &[1, 2, 3, 4, 5]);
    assert_eq!(bits(&decode(format("l3"), 1.0, &row, 5)), bits(&expected));
    // l4, 5 values: 3 bytes, bytes 0 to 2 low, then high. A scale of 2 in f16, or in E4M3.
    let expected: Vec<f32> = levels(4, &[1, 2, 15, 4, 8]).iter().map(|v| v * 2.0).collect();
    let row = [0x41, 0x82, 0x0F, 0, 0x00, 0x40];
    assert_eq!(bits(&decode(format("l4"), 1.0, &row, 5)), bits(&expected));
    let row = [0x41, 0x82, 0x0F, 0x40];
    assert_eq!(bits(&decode(format("l4-g32"), 1.0, &row, 5)), bits(&expected));
    // l6, 3 values: low nibbles in 2 bytes (0, 2 and 1), high pairs in 1.
    let row = [0xF1, 0x02, 0b00_10_01_11, 0, 0x00, 0x3C];
    let expected = levels(6, &[0x31, 0x12, 0x2F]);
    assert_eq!(bits(&decode(format("l6"), 1.0, &row, 3)), bits(&expected));
}

#[test]
fn every_code_of_every_plane_decodes() {
    // Random bytes: each is some code, and packing gives the bytes back.
    for (name, code_bits) in [("l3-g32", 3), ("l4-g32", 4), ("l6-g32", 6)] {
        let format = format(name);
        for head_dim in HEAD_DIMS {
            let codes: Vec<u8> =
                (0..head_dim).map(|i| u8::try_from(i * 37 % (1 << code_bits)).unwrap()).collect();
            let mut row = Vec::new();
            for group in codes.chunks(32) {
                let planes: &[(u32, u32)] = match code_bits {
                    3 => &[(2, 0), (1, 2)],
                    4 => &[(4, 0)],
                    _ => &[(4, 0), (2, 4)],
                };
                for (width, from) in planes {
                    let per_byte = usize::try_from(8 / width).unwrap();
                    let m = group.len().div_ceil(per_byte);
                    let mut plane = vec![0_u8; m];
                    for (index, code) in group.iter().enumerate() {
                        let at = u32::try_from(index / m).unwrap() * width;
                        plane[index % m] |= (code >> from & ((1 << width) - 1)) << at;
                    }
                    row.extend(plane);
                }
            }
            row.extend(codes.chunks(32).map(|_| 0x38));
            row.resize(row.len().next_multiple_of(2), 0);
            let decoded = decode(format, 1.0, &row, head_dim);
            assert_eq!(bits(&decoded), bits(&levels(code_bits, &codes)), "{name} {head_dim}");
        }
    }
}

#[test]
fn nvfp4_packs_pairs_and_appends_scales() {
    // 17 values: a block of 16 with the largest 6 (scale 1), a block of one with 3 (6 * 0.5).
    let mut values = [0.0; 17];
    values[..6].copy_from_slice(&[6.0, -1.0, 0.5, 4.0, -3.0, 1.5]);
    values[16] = 3.0;
    let row = encode(format("nvfp4"), 1.0, &values);
    assert_eq!(row.len(), 12, "9 bytes of codes, 2 scales, even");
    assert_eq!(row[..4], [0xA7, 0x61, 0x3D, 0x00]);
    assert_eq!(row[8..], [0x07, 0x38, 0x30, 0]);
    assert_eq!(bits(&decode(format("nvfp4"), 1.0, &row, 17)), bits(&values));
    let doubled: Vec<f32> = values.iter().map(|value| value * 2.0).collect();
    assert_eq!(encode(format("nvfp4"), 2.0, &doubled), row);
    // Four over six: 4, 3, 2, 1.5 fit codes with scale 1; with the largest at 6 they would not.
    let mut values = [0.0; 16];
    values[..4].copy_from_slice(&[4.0, 3.0, 2.0, 1.5]);
    let row = encode(format("nvfp4"), 1.0, &values);
    assert_eq!((row[0], row[1], row[8]), (0x56, 0x34, 0x38));
}

#[test]
fn padding_is_zero() {
    for format in KvFormat::all().filter(|format| format.is_quantised()) {
        for head_dim in HEAD_DIMS {
            let row = encode(format, 1.0, &Normal(1).row(head_dim));
            let size = |bytes: u64| usize::try_from(bytes).unwrap();
            let head_dim = u32::try_from(head_dim).unwrap();
            let gap = size(format.code_bytes(head_dim))..size(format.scales_begin(head_dim));
            assert!(row[gap].iter().all(|byte| *byte == 0), "{format}, {head_dim}");
            let scales = match format.to_string().as_str() {
                "nvfp4" => head_dim.div_ceil(16),
                name if name.ends_with("g32") => head_dim.div_ceil(32),
                _ => continue,
            };
            let end = size(format.scales_begin(head_dim) + u64::from(scales));
            assert!(row[end..].iter().all(|byte| *byte == 0), "{format}, {head_dim}");
        }
    }
}
