//! llama.cpp's blocks, compared with blocks that its own code encoded.
use super::*;

/// Iterates over names, values and bytes of `ggml_blocks.txt`.
fn blocks() -> impl Iterator<Item = (&'static str, Vec<f32>, Vec<u8>, Vec<u8>)> {
    let hex = |text: &str| -> Vec<u8> {
        let digits: Vec<u8> =
            text.chars().map(|c| u8::try_from(c.to_digit(16).unwrap()).unwrap()).collect();
        digits.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect()
    };
    let lines = include_str!("ggml_blocks.txt").lines().filter(|line| !line.starts_with('#'));
    lines.map(move |line| {
        let mut fields = line.split(' ');
        let name = fields.next().unwrap();
        let [values, q8_0, q4_0] = [(); 3].map(|()| hex(fields.next().unwrap()));
        let values = values.as_chunks().0.iter().map(|bits| f32::from_be_bytes(*bits));
        (name, values.collect(), q8_0, q4_0)
    })
}

#[test]
fn blocks_are_those_of_llama_cpp() {
    let mut seen = 0;
    for (name, values, q8_0, q4_0) in blocks() {
        for (format, expected) in [("q8_0", q8_0), ("q4_0", q4_0)] {
            let scale = half::f16::from_le_bytes([expected[0], expected[1]]);
            let row = encode(super::format(format), 1.0, &values);
            if scale.is_finite() {
                assert_eq!(row, expected, "{format} of {name}");
            } else {
                // This crate saturates: see `scales_beyond_f16_saturate`.
                assert!(
                    ["large_scale", "scale_overflow_f16"].contains(&name),
                    "{format} of {name}"
                );
                assert_eq!(row[..2], if row[1] < 0x80 { [0xFF, 0x7B] } else { [0xFF, 0xFB] });
            }
            seen += 1;
        }
    }
    assert_eq!(seen, 32);
}

#[test]
fn blocks_decode_as_code_times_scale() {
    let mut row = [0_u8; 34];
    row[1] = 0x40;
    row[2..6].copy_from_slice(&[127, 0x80, 1, 0xFF]);
    let decoded = decode(format("q8_0"), 1.0, &row, 32);
    assert_eq!(decoded[..5], [254.0, -256.0, 2.0, -2.0, 0.0]);
    let mut row = [0x88_u8; 18];
    row[..3].copy_from_slice(&[0x00, 0x40, 0xF0]);
    let decoded = decode(format("q4_0"), 1.0, &row, 32);
    assert_eq!((decoded[0], decoded[16], decoded[1]), (-16.0, 14.0, 0.0));
}

#[test]
fn scales_beyond_f16_saturate() {
    // llama.cpp's q8_0 has an infinite scale above 127 * 65520 and decodes to NaN.
    for (name, largest) in [("q8_0", 127.0), ("q4_0", 7.0)] {
        for value in [1e7, 1e30, f32::MAX, f32::INFINITY] {
            let decoded = round(format(name), 1.0, &[value, -1.0, 0.0]);
            let expected = value.min(largest * 65504.0);
            let error = (decoded[0] - expected).abs();
            assert!(error <= expected * 0.5, "{name} {value:e}: {decoded:?}");
            assert!(decoded.iter().all(|value| value.is_finite()), "{name} {value:e}: {decoded:?}");
            let negative = round(format(name), 1.0, &[-value, 1.0, 0.0]);
            assert!(negative[0] < -1e5 && negative[0].is_finite(), "{name}: {negative:?}");
        }
    }
    let decoded = round(format("q8_0"), 1.0, &[1e7, 4e6]);
    assert_eq!(decoded, [127.0 * 65504.0, 61.0 * 65504.0]);
    let scale = half::f16::from_f32(1e6 / 127.0).to_f32();
    assert_eq!(round(format("q8_0"), 1.0, &[1e6])[0].to_bits(), (127.0 * scale).to_bits());
}

#[test]
fn halves_round_away_from_zero() {
    // The scale is 1 if the largest value is 127. A value just below a half rounds down.
    let below = 0.5_f32.next_down();
    let values = [127.0, 0.5, -0.5, 1.5, 2.5, -2.5, below, 126.5];
    let row = encode(format("q8_0"), 1.0, &values);
    assert_eq!(row[2..10], [127, 1, 0xFF, 2, 3, 0xFD, 0, 127]);
}

#[test]
fn the_last_block_is_padded_with_zeros() {
    for name in ["q8_0", "q4_0"] {
        for head_dim in [1, 31, 33, 80, 100] {
            let values = Normal(5).row(head_dim);
            let mut padded = values.clone();
            padded.resize(head_dim.next_multiple_of(32), 0.0);
            let row = encode(format(name), 1.0, &values);
            assert_eq!(row, encode(format(name), 1.0, &padded), "{name}, {head_dim}");
            let full = decode(format(name), 1.0, &row, padded.len());
            assert_eq!(bits(&decode(format(name), 1.0, &row, head_dim)), bits(&full[..head_dim]));
        }
    }
}
