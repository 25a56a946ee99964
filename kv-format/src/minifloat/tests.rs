//! Every code, every tie, and every neighbour of a tie, against a search of the decode table.
use super::*;

type Encode = fn(f32) -> u8;
type Decode = fn(u8) -> f32;

/// Name, encoder, decoder, number of codes, the largest finite code.
const KINDS: [(&str, Encode, Decode, u16, u8); 3] = [
    ("e4m3", e4m3_encode, e4m3_decode, 256, 0x7E),
    ("e5m2", e5m2_encode, e5m2_decode, 256, 0x7B),
    ("e2m1", e2m1_encode, e2m1_decode, 16, 0x7),
];

fn codes(count: u16) -> impl Iterator<Item = u8> {
    (0..count).map(|code| u8::try_from(code).unwrap())
}

/// Finds the nearest finite code by search in f64; of two, the even one.
fn nearest(value: f32, decode: Decode, last: u8) -> u8 {
    let distance = |code: u8| (f64::from(decode(code)) - f64::from(value.abs())).abs();
    let mut best = 0;
    for code in 1..=last {
        let (new, old) = (distance(code), distance(best));
        if new < old || (new.total_cmp(&old).is_eq() && code % 2 == 0) {
            best = code;
        }
    }
    best
}

#[test]
fn codes_round_trip() {
    for (name, encode, decode, count, _) in KINDS {
        for code in codes(count) {
            let value = decode(code);
            if value.is_finite() {
                assert_eq!(encode(value), code, "{name} {code:#x} = {value}");
            }
        }
    }
}

#[test]
fn tables_hold_the_values_of_the_specification() {
    for (code, value) in
        [(0x00, 0.0), (0x01, 0.001_953_125), (0x08, 0.015_625), (0x38, 1.0), (0x7E, 448.0)]
    {
        assert_eq!(e4m3_decode(code).to_bits(), f32::to_bits(value));
        assert_eq!(e4m3_decode(code | 0x80).to_bits(), f32::to_bits(-value));
    }
    for (code, value) in
        [(0x01, 1.525_878_9e-5), (0x04, 6.103_515_6e-5), (0x3C, 1.0), (0x7B, 57344.0)]
    {
        assert_eq!(e5m2_decode(code).to_bits(), f32::to_bits(value));
    }
    assert!(e4m3_decode(0x7F).is_nan() && e4m3_decode(0xFF).is_nan());
    assert_eq!(codes(256).filter(|code| !e4m3_decode(*code).is_finite()).count(), 2);
    assert_eq!(e5m2_decode(0x7C).to_bits(), f32::INFINITY.to_bits());
    assert_eq!(e5m2_decode(0xFC).to_bits(), f32::NEG_INFINITY.to_bits());
    assert_eq!(codes(256).filter(|code| e5m2_decode(*code).is_nan()).count(), 6);
    assert_eq!(E2M1[..8], [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]);
    assert_eq!(e2m1_decode(0xFB).to_bits(), f32::to_bits(-1.5), "high bits are ignored");
}

#[test]
fn ties_round_to_even_and_neighbours_to_the_nearest() {
    for (name, encode, decode, _, last) in KINDS {
        for code in 0..last {
            let middle = f32::midpoint(decode(code), decode(code + 1));
            let even = code + code % 2;
            for (value, expected) in
                [(middle, even), (middle.next_down(), code), (middle.next_up(), code + 1)]
            {
                assert_eq!(encode(value), expected, "{name} {value}");
                let negative = if name == "e2m1" { expected | 8 } else { expected | 0x80 };
                assert_eq!(encode(-value), negative, "{name} -{value}");
            }
        }
    }
}

#[test]
fn any_number_rounds_to_the_nearest_code() {
    // Every 2^13-th positive float up to infinity: 9 bits of mantissa at every exponent.
    for bits in (0..=f32::INFINITY.to_bits()).step_by(1 << 13) {
        let value = f32::from_bits(bits);
        for (name, encode, decode, _, last) in KINDS {
            let bound = decode(last);
            let expected = nearest(value.min(bound), decode, last);
            assert_eq!(encode(value), expected, "{name} {value:e}");
        }
        for value in [value, -value] {
            let expected = e2m1_decode(e2m1_encode(value));
            assert_eq!(e2m1_round(value).to_bits(), expected.to_bits(), "{value:e}");
        }
    }
}

#[test]
fn large_numbers_saturate_and_nan_is_canonical() {
    for (name, encode, _, _, last) in KINDS {
        let sign = if name == "e2m1" { 8 } else { 0x80 };
        for value in [f32::INFINITY, f32::MAX, 1e30] {
            assert_eq!((encode(value), encode(-value)), (last, last | sign), "{name}");
        }
        assert_eq!((encode(0.0), encode(-0.0)), (0, sign), "{name}");
        let nan = if name == "e2m1" { 0x7 } else { 0x7F };
        for bits in [0x7F80_0001, 0x7FC0_0000, 0x7FFF_FFFF, 0xFF80_0001, 0xFFC1_2345] {
            assert_eq!(encode(f32::from_bits(bits)), nan, "{name} {bits:#x}");
        }
    }
    assert_eq!((e4m3_encode(464.0), e4m3_encode(480.0)), (0x7E, 0x7E));
    assert_eq!(e5m2_encode(61440.0), 0x7B);
}

#[test]
fn powers_of_two_round_in_value_and_halves_go_up() {
    for code in 0..=0xFE {
        let power = e8m0_decode(code);
        assert_eq!((e8m0_encode(power), e8m0_encode(-power)), (code, code), "{power:e}");
        let middle = power * 1.5;
        let up = (code + 1).min(0xFE);
        assert_eq!((e8m0_encode(middle), e8m0_encode(middle.next_down())), (up, code), "{code}");
    }
    assert_eq!(e8m0_decode(0).log2().to_bits(), f32::to_bits(-127.0));
    assert_eq!(e8m0_decode(0xFE).log2().to_bits(), f32::to_bits(127.0));
    assert!(e8m0_decode(0xFF).is_nan());
    assert_eq!((e8m0_encode(0.0), e8m0_encode(f32::from_bits(1))), (0, 0));
    assert_eq!((e8m0_encode(f32::MAX), e8m0_encode(f32::NEG_INFINITY)), (0xFE, 0xFE));
    assert_eq!(e8m0_encode(f32::NAN), 0xFF);
}
