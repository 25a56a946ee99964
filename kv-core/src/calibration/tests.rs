//! Folded constants, and refusals.
use kv_format::{KvFormat, Scaling};

use super::*;
use crate::geometry::{BlockOrder, PlaneLayout, PlaneShape};
use crate::ids::Plane;

fn layout(format: KvFormat, transforms: bool) -> PlaneLayout {
    let shape = PlaneShape {
        num_blocks: 4,
        block_size: 8,
        num_kv_heads: 2,
        head_dim: 4,
        order: BlockOrder::Hnd,
        format,
    };
    PlaneLayout::new(shape).unwrap().with_transform(transforms)
}

fn constants(
    format: KvFormat,
    transforms: bool,
    given: &PlaneCalibration,
) -> Result<Option<PlaneConstants>, CalibrationError> {
    PlaneConstants::new(LayerId(3), Plane::Key, &layout(format, transforms), Some(given))
}

const TENSOR: KvFormat = KvFormat::Fp8E4m3(Scaling::Tensor);
const HEAD: KvFormat = KvFormat::Fp8E4m3(Scaling::Head);
const ROW: KvFormat = KvFormat::Int8(Scaling::Row);

#[test]
fn planes_without_constants_have_none() {
    assert_eq!(constants(ROW, false, &PlaneCalibration::default()), Ok(None));
    assert_eq!(constants(KvFormat::F16, false, &PlaneCalibration::default()), Ok(None));
}

#[test]
fn absent_lists_are_the_identity() {
    let all = constants(ROW, true, &PlaneCalibration::default()).unwrap().unwrap();
    let signs: Vec<_> = (0..4).map(sign).collect();
    for head in 0..2 {
        let head = all.head(head).unwrap();
        assert_eq!((head.scale, head.inv_scale, head.mean), (1.0, 1.0, [0.0; 4].as_slice()));
        assert_eq!((head.into, head.back), (signs.as_slice(), signs.as_slice()));
    }
    assert_eq!(all.head(2), None);
    assert_eq!(all.values().len(), PlaneConstants::len_of(2, 4));
}

#[test]
fn scales_come_from_the_caller_or_from_magnitudes() {
    let given = PlaneCalibration { scales: vec![0.5], amax: vec![9.0; 2], ..Default::default() };
    let one = constants(TENSOR, false, &given).unwrap().unwrap();
    assert_eq!(one.values().get(..4), Some([0.5, 0.5, 2.0, 2.0].as_slice()));
    let measured = PlaneCalibration { amax: vec![224.0, 448.0], ..Default::default() };
    let tensor = constants(TENSOR, false, &measured).unwrap().unwrap();
    let head = constants(HEAD, false, &measured).unwrap().unwrap();
    assert_eq!(tensor.values().get(..2), Some([2.0, 2.0].as_slice()));
    assert_eq!(head.values().get(..2), Some([1.0, 2.0].as_slice()));
    // Magnitudes of raw rows do not bound rotated ones.
    assert!(matches!(
        constants(TENSOR, true, &measured),
        Err(CalibrationError::MissingScale { layer: LayerId(3), plane: Plane::Key, .. })
    ));
}

#[test]
fn a_missing_scale_is_never_one() {
    for format in KvFormat::all().filter(|format| format.given_scales().is_some()) {
        let refused = constants(format, false, &PlaneCalibration::default()).unwrap_err();
        assert!(matches!(refused, CalibrationError::MissingScale { .. }), "{format}: {refused}");
    }
}

#[test]
fn impossible_numbers_and_shapes_are_refused() {
    let none = PlaneCalibration::default;
    for bad in [0.0, -1.0, f32::NAN, f32::INFINITY, 1e-45] {
        for given in [
            PlaneCalibration { scales: vec![bad], ..none() },
            PlaneCalibration { balance: vec![bad; 8], ..none() },
        ] {
            let refused = constants(TENSOR, true, &given).unwrap_err();
            assert!(matches!(refused, CalibrationError::Value { .. }), "{bad}: {refused}");
        }
    }
    for given in [
        PlaneCalibration { mean: vec![0.0; 7], ..none() },
        PlaneCalibration { balance: vec![1.0; 16], ..none() },
        PlaneCalibration { amax: vec![1.0; 3], ..none() },
        PlaneCalibration { scales: vec![1.0; 2], ..none() },
    ] {
        let refused = constants(TENSOR, true, &given).unwrap_err();
        assert!(matches!(refused, CalibrationError::Shape { .. }), "{refused}");
    }
    let mean = PlaneCalibration { mean: vec![1.0; 8], ..none() };
    let refused = PlaneConstants::new(LayerId(0), Plane::Value, &layout(ROW, true), Some(&mean));
    assert!(matches!(refused, Err(CalibrationError::NotForValues { .. })));
    assert!(Calibration::new(Vec::new()).check_layers(1).is_err());
}

#[test]
fn signs_are_those_of_the_documented_generator() {
    // First output of SplitMix64 with seed 0.
    let word = 0xE220_A839_7B1D_CDAF_u64;
    for index in 0..64 {
        assert_eq!(sign(index) < 0.0, word >> index & 1 == 1);
        assert_eq!(sign(index).abs().to_bits(), 1.0_f32.to_bits());
    }
    assert!((64..128).filter(|i| sign(*i) < 0.0).count().abs_diff(32) < 16);
}
