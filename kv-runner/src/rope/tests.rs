//! Rotations against recorded ones, and frequencies against their definitions.
use super::*;
use serde::Deserialize;

/// Cases recorded from TransformerEngine's rotary embedding, f32.
const CASES: &str = include_str!("../../tests/data/rope.json");

#[derive(Deserialize)]
struct File {
    schema: String,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    dim: u32,
    rotary_percent: f64,
    interleaved: bool,
    interpolation_factor: Option<f64>,
    pretrained_max: Option<f64>,
    base: f64,
    max_seq: f64,
    start_positions: Vec<u32>,
    shape: [u32; 4],
    y: Vec<f32>,
}

/// Returns an input of the recording: a hash of sequence, position and dimension, in 1/64 steps.
fn value(sequence: u32, position: u32, dim: u32) -> f32 {
    let mut x = sequence
        .wrapping_mul(0x9E37_79B1)
        .wrapping_add(position.wrapping_mul(0x85EB_CA6B))
        .wrapping_add(dim.wrapping_mul(0x27D4_EB2F))
        .wrapping_add(0xD3A2_646C)
        .wrapping_add(0x5BD1_E995);
    x = (x ^ (x >> 16)).wrapping_mul(0x7FEB_352D);
    x = (x ^ (x >> 15)).wrapping_mul(0x846C_A68B);
    x ^= x >> 16;
    to_f32((f64::from(x >> 24) - 128.0) / 64.0)
}

fn rope(case: &Case) -> Rope {
    let stretched = case.interpolation_factor.zip(case.pretrained_max);
    let scaling = match stretched {
        Some((factor, max)) if case.max_seq <= max * factor => Scaling::Linear { factor },
        _ => Scaling::None,
    };
    let rotary_dim =
        (1..=case.dim).rev().find(|d| f64::from(*d) <= f64::from(case.dim) * case.rotary_percent);
    Rope::new(&RopeConfig {
        theta: case.base,
        head_dim: case.dim,
        rotary_dim: rotary_dim.expect("some of the row turns"),
        pairing: if case.interleaved { Pairing::Interleaved } else { Pairing::Half },
        scaling,
    })
}

#[test]
fn agrees_with_recorded_rotations() {
    let file: File = serde_json::from_str(CASES).expect("rope.json");
    assert_eq!(file.schema, "te-rope/1");
    assert!(!file.cases.is_empty());
    for (index, case) in file.cases.iter().enumerate() {
        let [batch, tokens, heads, dim] = case.shape;
        assert_eq!((heads, dim), (1, case.dim));
        let (mut positions, mut rows) = (Vec::new(), Vec::new());
        for (sequence, start) in (0..batch).zip(&case.start_positions) {
            for position in (0..tokens).map(|i| start + i) {
                positions.push(position);
                rows.extend((0..dim).map(|d| value(sequence, position, d)));
            }
        }
        let rope = rope(case);
        let rotated = rope.rotate(&rope.rotation(&positions), &rows, 1);
        assert_eq!(rotated.len(), case.y.len(), "case {index}");
        for (got, expected) in rotated.iter().zip(&case.y) {
            assert!((got - expected).abs() <= 1e-6, "case {index}: {got} {expected}");
        }
    }
}

#[test]
fn heads_of_a_token_have_one_rotation() {
    let config = RopeConfig {
        theta: 10000.0,
        head_dim: 4,
        rotary_dim: 4,
        pairing: Pairing::Half,
        scaling: Scaling::None,
    };
    let rope = Rope::new(&config);
    let row = [1.0, 2.0, 3.0, 4.0];
    let rotated = rope.rotate(&rope.rotation(&[0, 3]), &row.repeat(4), 2);
    let heads: Vec<_> = rotated.chunks(4).collect();
    assert_eq!(heads[0], row);
    assert_eq!(heads[1], row);
    assert_eq!(heads[2], heads[3]);
    assert_ne!(heads[2], row);
}

#[test]
fn llama3_keeps_high_and_divides_low_frequencies() {
    let scaling =
        Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_context: 8192 };
    assert!((scaling.scale(1.0) - 1.0).abs() < 1e-15);
    assert!((scaling.scale(1e-5) - 1e-5 / 8.0).abs() < 1e-20);
    let wavelength = 8192.0 / 2.5; // in the middle of the ramp
    let between = scaling.scale(TAU / wavelength);
    let expected = TAU / wavelength * (0.5 + 0.5 / 8.0);
    assert!((between - expected).abs() < 1e-15);
}
