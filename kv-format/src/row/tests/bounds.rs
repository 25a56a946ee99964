//! Properties of any row: proptest over every format and head dim.
use proptest::prelude::*;

use super::*;

/// Generates rows of any shape: normal, with outliers, sparse; at scales that f16 and E4M3
/// represent.
fn rows() -> impl Strategy<Value = Vec<f32>> {
    let value = prop_oneof![
        6 => -3.0_f32..3.0,
        1 => -60.0_f32..60.0,
        1 => Just(0.0_f32),
    ];
    (prop::sample::select(HEAD_DIMS.to_vec()), 0..6_u8).prop_flat_map(move |(head_dim, shift)| {
        let scale = f32::from(1_u8 << shift);
        prop::collection::vec(value.clone().prop_map(move |value| value * scale), head_dim)
    })
}

fn formats() -> impl Strategy<Value = KvFormat> {
    prop::sample::select(KvFormat::all().collect::<Vec<_>>())
}

/// Returns the largest error of value `x` in a row whose group has the largest magnitude `amax`.
fn bound(format: KvFormat, given: f32, x: f32, amax: f32) -> Option<f32> {
    let rounding = 1.001;
    let f16 = 1.0 / 2048.0;
    Some(match format.to_string().as_str() {
        "f32" => 0.0,
        "f16" => x.abs() * f16 + 3.0e-8,
        "bf16" => x.abs() / 256.0,
        "fp8-e4m3" | "fp8-e4m3-head" => (x.abs() / 16.0).max(given / 1024.0) * rounding,
        "fp8-e5m2" | "fp8-e5m2-head" => (x.abs() / 8.0).max(given / 131_072.0) * rounding,
        // The code of 448 or 57344 may decode to a little less than the largest value.
        "fp8-e4m3-row" => (x.abs() / 16.0).max(amax / 448.0 / 1024.0) * rounding,
        "fp8-e5m2-row" => (x.abs() / 8.0).max(amax / 57344.0 / 131_072.0) * rounding,
        "int8-tensor" | "int8-head" => given * 0.5 * rounding,
        "int8" | "q8_0" => amax / 127.0 * (0.5 + 127.0 * f16),
        "q4_0" => amax / 8.0 * (1.0 + 8.0 * f16),
        // Codes are at most 2 apart, and the scale may be 1/16 off.
        "nvfp4" => amax / 4.0,
        _ => return None,
    })
}

/// Returns a scale at which a given-scale format holds such rows without saturating.
fn given_scale(format: KvFormat, values: &[f32]) -> f32 {
    match format.to_string().as_str() {
        "int8-tensor" | "int8-head" => (amax(values) / 127.0).max(1e-6),
        "fp8-e4m3" | "fp8-e4m3-head" => (amax(values) / 448.0).max(1e-6),
        _ => 1.0,
    }
}

fn group(format: KvFormat) -> usize {
    match format.to_string().as_str() {
        "nvfp4" => 16,
        "q8_0" | "q4_0" => 32,
        _ => usize::MAX,
    }
}

proptest! {
    #[test]
    fn values_come_back_within_the_step_of_the_format(format in formats(), values in rows()) {
        let given = given_scale(format, &values);
        let decoded = round(format, given, &values);
        for (values, decoded) in values.chunks(group(format)).zip(decoded.chunks(group(format))) {
            let amax = amax(values);
            for (x, y) in values.iter().zip(decoded) {
                if let Some(bound) = bound(format, given, *x, amax) {
                    prop_assert!((x - y).abs() <= bound, "{format}: {x} {y}, largest {amax}");
                }
            }
        }
    }

    #[test]
    fn a_searched_row_keeps_its_own_inner_product(values in rows(), bits in 0..3_usize) {
        let format = format(["l3", "l4", "l6"][bits]);
        let energy = dot(&values, &values);
        prop_assume!(energy > 0.0);
        let product = dot(&values, &round(format, 1.0, &values));
        // The scale is rounded to 11 bits.
        prop_assert!((product / energy - 1.0).abs() < 6e-4, "{format}: {product} {energy}");
    }

    #[test]
    fn a_searched_group_is_no_worse_than_zeros(values in rows(), bits in 0..3_usize) {
        let format = format(["l3-g32", "l4-g32", "l6-g32"][bits]);
        let decoded = round(format, 1.0, &values);
        for (values, decoded) in values.chunks(32).zip(decoded.chunks(32)) {
            let error: f64 =
                values.iter().zip(decoded).map(|(x, y)| f64::from(x - y).powi(2)).sum();
            prop_assert!(error <= dot(values, values) * 1.0001, "{format}: {error}");
        }
    }

    #[test]
    fn decoded_rows_encode_to_themselves(format in formats(), values in rows()) {
        // Not for searched scales: another scale may fit the decoded row.
        prop_assume!(!format.to_string().starts_with('l'));
        let given = 0.5;
        let once = round(format, given, &values);
        let twice = round(format, given, &once);
        prop_assert_eq!(bits(&once), bits(&twice), "{}", format);
    }

    #[test]
    fn signs_are_kept_apart_from_magnitudes(format in formats(), values in rows()) {
        // q4_0 has one more negative code than positive ones.
        prop_assume!(format != KvFormat::Q4_0);
        let negated: Vec<f32> = values.iter().map(|value| -value).collect();
        let mirrored = round(format, 1.0, &negated);
        for (y, z) in round(format, 1.0, &values).iter().zip(mirrored) {
            // A zero may have lost its sign.
            prop_assert_eq!((y + 0.0).to_bits(), (0.0 - z).to_bits(), "{}", format);
        }
    }

    #[test]
    fn searched_scales_commute_with_powers_of_two(values in rows(), bits in 0..3_usize) {
        let format = format(["l3", "l4", "l6"][bits]);
        let quartered: Vec<f32> = values.iter().map(|value| value * 0.25).collect();
        let smaller = round(format, 1.0, &quartered);
        for (y, z) in round(format, 1.0, &values).iter().zip(smaller) {
            prop_assert_eq!(y.to_bits(), (z * 4.0).to_bits(), "{}", format);
        }
    }

    #[test]
    fn any_bits_encode_and_decode_without_a_panic(
        format in formats(),
        raw in prop::collection::vec(any::<u32>(), 1..70),
    ) {
        let values: Vec<f32> = raw.iter().map(|bits| f32::from_bits(*bits)).collect();
        let decoded = round(format, 1.0, &values);
        if format.is_quantised() && values.iter().all(|value| !value.is_nan()) {
            prop_assert!(decoded.iter().all(|value| value.is_finite()), "{format}: {decoded:?}");
        }
    }
}
