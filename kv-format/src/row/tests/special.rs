//! NaN, infinities, zeros, and numbers at either end of f32.
use super::*;

/// Returns the range of values that share a scale with value `at`.
fn scale_group(format: KvFormat, head_dim: usize, at: usize) -> std::ops::Range<usize> {
    let name = format.to_string();
    let group = match name.as_str() {
        "nvfp4" => 16,
        "q8_0" | "q4_0" => 32,
        name if name.ends_with("g32") => 32,
        _ if is_self_scaled(format) => return 0..head_dim,
        _ => 1,
    };
    let begin = at / group * group;
    begin..(begin + group).min(head_dim)
}

#[test]
fn a_nan_affects_only_values_that_share_its_scale() {
    for format in KvFormat::all() {
        for head_dim in HEAD_DIMS {
            let clean = Normal(11).row(head_dim);
            let expected = round(format, 1.0, &clean);
            for at in [0, head_dim / 2, head_dim - 1] {
                for nan in [f32::NAN, -f32::NAN, f32::from_bits(0x7F80_0001)] {
                    let mut values = clean.clone();
                    values[at] = nan;
                    let decoded = round(format, 1.0, &values);
                    let scale_group = scale_group(format, head_dim, at);
                    for (index, value) in decoded.iter().enumerate() {
                        let what = format!("{format}, {head_dim}: value {index}, NaN at {at}");
                        if !scale_group.contains(&index) {
                            // Groups compensate earlier ones, so a code may differ.
                            let near = (value - expected[index]).abs() <= 0.9;
                            assert!(near, "{what}: {value} {}", expected[index]);
                        } else if matches!(format.to_string().as_str(), "int8-tensor" | "int8-head")
                        {
                            assert_eq!(value.to_bits(), 0, "{what}");
                        } else {
                            assert!(value.is_nan(), "{what}: {value}");
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn infinities_and_huge_numbers_saturate() {
    for format in KvFormat::all().filter(|format| format.is_quantised()) {
        for head_dim in HEAD_DIMS {
            for huge in [f32::INFINITY, f32::MAX, 1e30, 1e12] {
                let mut values = Normal(13).row(head_dim);
                values[head_dim - 1] = -huge;
                let decoded = round(format, 1.0, &values);
                assert!(decoded.iter().all(|value| value.is_finite()), "{format}: {decoded:?}");
                // The largest value of the format, with a sign.
                let least = match format.to_string().as_str() {
                    "int8-tensor" | "int8-head" => 127.0,
                    "fp8-e4m3" | "fp8-e4m3-head" => 448.0,
                    "nvfp4" => 6.0 * 448.0,
                    name if name.ends_with("g32") => 448.0 * 2.1,
                    "fp8-e5m2" | "fp8-e5m2-head" => 57344.0,
                    _ => 65504.0 * 2.1,
                };
                let found = decoded[head_dim - 1];
                assert!(found <= -least, "{format}, {head_dim}, {huge:e}: {found}");
            }
        }
    }
    for value in round(format("f16"), 1.0, &[1e6, f32::INFINITY]) {
        assert_eq!(value.to_bits(), f32::INFINITY.to_bits());
    }
}

#[test]
fn rows_of_zeros_are_zeros() {
    for format in KvFormat::all() {
        for head_dim in HEAD_DIMS {
            for zero in [0.0, -0.0] {
                let decoded = round(format, 1.0, &vec![zero; head_dim]);
                assert!(decoded.iter().all(|value| *value == 0.0), "{format}: {decoded:?}");
            }
        }
    }
}

#[test]
fn a_group_of_zeros_stays_zero_beside_others() {
    for name in ["l6-g32", "l4-g32", "l3-g32", "q8_0", "q4_0", "nvfp4"] {
        let mut values = Normal(17).row(96);
        values[32..64].fill(0.0);
        let decoded = round(format(name), 1.0, &values);
        assert!(decoded[32..64].iter().all(|value| *value == 0.0), "{name}");
        assert!(decoded[..32].iter().chain(&decoded[64..]).any(|value| *value != 0.0), "{name}");
    }
}

#[test]
fn equal_values_are_kept() {
    // One level fits all values: only the scale is rounded, to f16 or to E4M3.
    for format in KvFormat::all().filter(|format| format.is_quantised()) {
        for value in [0.37_f32, -1.0, 3.1] {
            for head_dim in HEAD_DIMS {
                let name = format.to_string();
                let given = if name.starts_with("int8") { 0.03125 } else { 1.0 };
                for decoded in round(format, given, &vec![value; head_dim]) {
                    let coarse = name.contains("e5m2") || name.contains("g32");
                    let bound = match format {
                        KvFormat::Nvfp4 => 0.0625,
                        KvFormat::Fp8E4m3(_) | KvFormat::Int8(_) => 0.07,
                        _ if coarse => 0.13,
                        _ => 0.005,
                    };
                    let error = ((decoded - value) / value).abs();
                    assert!(error <= bound, "{format}, {head_dim}: {value} {decoded}");
                }
            }
        }
    }
}

#[test]
fn small_rows_are_as_accurate_as_their_scale() {
    for format in KvFormat::all().filter(|format| is_self_scaled(*format)) {
        let is_e4m3 = format.to_string().contains("g32");
        for exponent in [-149, -140, -120, -60, -40, -30, -24, -20, -16, -12, -8] {
            let unit = 2_f64.powi(exponent);
            #[expect(clippy::cast_possible_truncation, clippy::as_conversions, reason = "rounding")]
            let values: Vec<f32> =
                Normal(19).row(96).iter().map(|v| (f64::from(*v) * unit) as f32).collect();
            let decoded = round(format, 1.0, &values);
            let energy = dot(&values, &values);
            let error: f64 =
                values.iter().zip(&decoded).map(|(x, y)| f64::from(x - y).powi(2)).sum();
            assert!(error.is_finite());
            // The error is at most that of zeros, plus half a step of the smallest scale.
            assert!(error <= energy * 1.0001 + 96.0 * 2_f64.powi(-48), "{format}, 2^{exponent}");
            // Scales of f16 have all their bits above 2^-14, those of E4M3 above 2^-6.
            if exponent >= if is_e4m3 { -4 } else { -8 } {
                assert!(error <= energy * 0.04, "{format}, 2^{exponent}: {error} of {energy}");
            }
        }
    }
}

#[test]
fn a_scale_from_the_largest_never_clips() {
    // Below 2^-14 f16 is subnormal; a scale rounded down there would clip the largest value.
    for name in ["int8", "fp8-e4m3-row", "fp8-e5m2-row"] {
        let largest_code = match name {
            "int8" => 127.0,
            "fp8-e4m3-row" => 448.0,
            _ => 57344.0,
        };
        for step in 1..400_u16 {
            let amax = f32::from(step) * 1.3e-7 * largest_code / 7.0;
            let row = encode(format(name), 1.0, &[amax, -amax, amax * 0.5]);
            let scale = half::f16::from_le_bytes([row[row.len() - 2], row[row.len() - 1]]);
            let is_exact = scale >= half::f16::MIN_POSITIVE;
            let reach = scale.to_f32() * largest_code;
            assert!(reach >= amax * if is_exact { 0.9995 } else { 1.0 }, "{name} {amax:e}");
        }
    }
}

#[test]
fn a_group_that_saturates_does_not_spoil_the_next() {
    for (name, share) in [("l6-g32", 0.002), ("l4-g32", 0.015), ("l3-g32", 0.05)] {
        let mut values = Normal(23).row(128);
        values[3] = 1e9;
        let decoded = round(format(name), 1.0, &values);
        let mut error = crate::quality::RowError::default();
        error.add(&values[32..], &decoded[32..]);
        assert!(error.relative_mse() < share, "{name}: {:e}", error.relative_mse());
    }
}
