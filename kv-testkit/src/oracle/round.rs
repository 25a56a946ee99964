//! Rounding to the element types, written from their definitions.
use kv_core::DType;

/// Precision in bits (the implicit one included), exponent of the smallest normal number, largest
/// finite value.
fn parameters(dtype: DType) -> (i32, i32, f64) {
    match dtype {
        DType::F16 => (11, -14, 65504.0),
        DType::Bf16 => (8, -126, 255.0 * 2_f64.powi(120)),
        _ => (24, -126, f64::from(f32::MAX)),
    }
}

/// Returns the distance between neighbours of `x` in `dtype`.
pub fn ulp(dtype: DType, x: f64) -> f64 {
    let (precision, exponent_min, _) = parameters(dtype);
    let exponent = ((x.abs().to_bits() >> 52) as i32 - 1023).clamp(exponent_min, 1023);
    2_f64.powi(exponent - precision + 1)
}

/// Rounds `x` to `dtype`: to nearest, ties to even, to infinity beyond the largest value.
pub fn round(dtype: DType, x: f64) -> f64 {
    if x == 0.0 || !x.is_finite() {
        return x;
    }
    if dtype == DType::F32 {
        return f64::from(x as f32);
    }
    let quantum = ulp(dtype, x);
    let rounded = (x / quantum).round_ties_even() * quantum;
    let (_, _, max) = parameters(dtype);
    if rounded.abs() > max { f64::INFINITY.copysign(x) } else { rounded }
}

/// Rounds an f32, see [`round`].
pub fn round_f32(dtype: DType, x: f32) -> f32 {
    round(dtype, f64::from(x)) as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_by_hand_worked_examples() {
        // 1 + 2^-11 lies halfway between two f16: the even one is 1.
        assert_eq!(round(DType::F16, 1.0 + 2_f64.powi(-11)), 1.0);
        assert_eq!(round(DType::F16, 1.0 + 3.0 * 2_f64.powi(-11)), 1.0 + 2_f64.powi(-9));
        assert_eq!(round(DType::F16, 65519.0), 65504.0);
        assert_eq!(round(DType::F16, -65520.0), f64::NEG_INFINITY);
        assert_eq!(round(DType::F16, 2_f64.powi(-25)), 0.0);
        assert_eq!(round(DType::F16, 3.0 * 2_f64.powi(-25)), 2_f64.powi(-23));
        assert_eq!(round(DType::Bf16, 1.0 + 2_f64.powi(-8)), 1.0);
        assert_eq!(round(DType::F32, 0.1), f64::from(0.1_f32));
        assert_eq!(ulp(DType::F32, 1.5), f64::from(f32::EPSILON));
    }

    #[test]
    fn agrees_with_the_crate_that_backends_use() {
        let mut rng = crate::rng::Rng::new(7);
        for _ in 0..20_000 {
            let x = f32::from_bits(rng.bits() as u32);
            if x.is_nan() {
                continue;
            }
            let f16 = half::f16::from_f32(x).to_f32();
            let bf16 = half::bf16::from_f32(x).to_f32();
            assert_eq!(round_f32(DType::F16, x).to_bits(), f16.to_bits(), "f16 of {x:e}");
            assert_eq!(round_f32(DType::Bf16, x).to_bits(), bf16.to_bits(), "bf16 of {x:e}");
        }
    }
}
