//! Element types of tensors, with and without non-temporal stores, and loops over rows of `f32`.
use half::{bf16, f16};

use super::*;
use kv_cpu_kernels::Element;

fn encoded(element: Element, values: &[f32]) -> Vec<u8> {
    let two =
        |narrow: fn(f32) -> u16| values.iter().flat_map(|x| narrow(*x).to_ne_bytes()).collect();
    match element {
        Element::F32 => values.iter().flat_map(|x| x.to_ne_bytes()).collect(),
        Element::F16 => two(|x| f16::from_f32(x).to_bits()),
        Element::Bf16 => two(|x| bf16::from_f32(x).to_bits()),
        other => panic!("no encoding of {other:?} here"),
    }
}

/// Values around every rounding boundary and special.
fn awkward(random: &mut Random) -> Vec<f32> {
    let mut values = vec![
        0.0,
        -0.0,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::MAX,
        f32::MIN_POSITIVE,
        1e-45,
        65504.0,
        65519.9,
        65520.0,
        -65520.0,
        5.96e-8,
        2.98e-8,
        2.99e-8,
        6.1e-5,
        1.0 + 1.0 / 256.0,
        1.0 + 3.0 / 256.0,
        1.0 + 1.0 / 2048.0,
        1.0 + 3.0 / 2048.0,
        f32::from_bits(0x7f7f_8000),
        f32::from_bits(0x3f80_8000),
        f32::from_bits(0x3f80_8001),
        f32::from_bits(0x3f81_8000),
    ];
    values.extend((0..500).map(|_| f32::from_bits(random.bits() as u32)));
    values.retain(|x| !x.is_nan());
    values
}

#[test]
fn encoding_rounds_to_nearest_even_and_decodes_back() {
    let values = awkward(&mut Random::new(15));
    for kernels in all_kernels() {
        for element in Element::ALL {
            let expected = encoded(element, &values);
            let mut bytes = vec![0xab; expected.len() + 3];
            kernels.encode(element, &values, &mut bytes);
            assert_eq!(bytes[..expected.len()], expected, "{kernels:?} {element:?}");
            assert_eq!(bytes[expected.len()..], [0xab; 3], "{kernels:?} {element:?}");
            let mut back = vec![0.0; values.len()];
            kernels.decode(&RowLayout::plain(element, back.len()), &expected, &mut back);
            assert_eq!(encoded(element, &back), expected, "{kernels:?} {element:?}");
        }
    }
}

#[test]
fn nan_stays_nan_in_every_element() {
    let values = [0x7f80_0001, 0xffff_ffff, 0x7fc0_0000, 0x7fff_8000].map(f32::from_bits);
    let values: Vec<_> = values.iter().copied().cycle().take(23).collect();
    for kernels in all_kernels() {
        for element in Element::ALL {
            let mut bytes = vec![0; values.len() * element.size()];
            kernels.encode(element, &values, &mut bytes);
            let mut back = vec![0.0; values.len()];
            kernels.decode(&RowLayout::plain(element, back.len()), &bytes, &mut back);
            assert!(back.iter().all(|x| x.is_nan()), "{kernels:?} {element:?}");
        }
    }
}

#[test]
fn rows_are_scaled_and_combined() {
    for kernels in all_kernels() {
        for len in [0, 1, 8, 13, 40] {
            let (mut a, b) = (vec![2.0; len], vec![3.0; len]);
            kernels.combine(&mut a, 0.5, &b, 2.0);
            assert_eq!(a, vec![7.0; len], "{kernels:?}");
            kernels.scale(&mut a, 3.0);
            assert_eq!(a, vec![21.0; len], "{kernels:?}");
        }
    }
}

#[test]
fn non_temporal_stores_write_the_same_bytes() {
    #[repr(align(64))]
    struct Lines([u8; 4096]);
    let values: Vec<_> = awkward(&mut Random::new(16)).into_iter().take(500).collect();
    let pairs = || Element::ALL.into_iter().flat_map(|from| Element::ALL.map(|to| (from, to)));
    for (kernels, (from, to)) in all_kernels().flat_map(|k| pairs().map(move |pair| (k, pair))) {
        for (len, begin) in [(0, 0), (1, 0), (64, 0), (64, 4), (96, 64), (256, 0), (500, 128)] {
            let source = encoded(from, &values[..len]);
            let (bytes, mut lines) = (len * to.size(), Lines([0xab; 4096]));
            let stores = kernels.non_temporal();
            stores.convert((from, &source), (to, &mut lines.0[begin..][..bytes]), &source);
            drop(stores);
            let mut expected = vec![0; bytes];
            kernels.convert((from, &source), (to, &mut expected));
            let mut plain = vec![0.0; len];
            kernels.decode(&RowLayout::plain(from, len), &source, &mut plain);
            assert_eq!(expected, encoded(to, &plain), "{kernels:?} {from:?} {to:?} {len}");
            let (before, written) = lines.0.split_at(begin);
            let (written, after) = written.split_at(bytes);
            assert_eq!(written, expected, "{kernels:?} {from:?} {to:?} {len}");
            let kept = before.iter().chain(after).all(|byte| *byte == 0xab);
            assert!(kept, "{kernels:?} {from:?} {to:?} {len}: bytes beside the row");
        }
    }
}
