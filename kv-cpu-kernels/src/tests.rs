//! Exponentials and hyperbolic tangents over dense grids.
#![expect(
    clippy::as_conversions,
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::float_cmp,
    reason = "tests: numbers are small, and what is compared is exact"
)]
use crate::simd::Simd;

/// Runs a test on every vector type of this CPU, and the emulated one. Primitives are not inlined
/// here, which only costs time.
macro_rules! on_all {
    ($test:ident) => {
        $test("scalar", crate::scalar::Scalar);
        $test("emulated", crate::testing::wide::Wide);
        #[cfg(target_arch = "x86_64")]
        if crate::Isa::AVX2.is_available() {
            $test("avx2", crate::avx2::Avx2::witness());
        }
        #[cfg(target_arch = "x86_64")]
        if crate::Isa::AVX512.is_available() {
            $test("avx512", crate::avx512::Avx512::witness());
        }
        #[cfg(target_arch = "aarch64")]
        $test("neon", crate::neon::Neon::witness());
    };
}

/// Returns the units in the last place between a vector function's result and the exact one.
fn error<S: Simd>(s: S, x: f32, apply: impl Fn(S, S::F) -> S::F, exact: fn(f64) -> f64) -> f64 {
    let mut lanes = [0.0; 16];
    // SAFETY: an array of the widest vector.
    unsafe { s.store(lanes.as_mut_ptr(), 0, apply(s, s.splat(x))) };
    assert!(lanes[..S::LANES].iter().all(|lane| lane.to_bits() == lanes[0].to_bits()), "{x}");
    let exact = exact(f64::from(x));
    let unit = f64::from((exact.abs() as f32).max(f32::MIN_POSITIVE).next_up())
        - f64::from((exact.abs() as f32).max(f32::MIN_POSITIVE));
    (f64::from(lanes[0]) - exact).abs() / unit
}

/// One value of each vector.
fn value<S: Simd>(s: S, v: S::F) -> f32 {
    let mut lanes = [0.0; 16];
    // SAFETY: an array of the widest vector.
    unsafe { s.store(lanes.as_mut_ptr(), 0, v) };
    lanes[0]
}

/// From zero down to the least normal result, not in step with any power of two.
fn exponents() -> impl Iterator<Item = f32> {
    (0..60_000).map(|i| -1.455_3e-3 * i as f32)
}

fn exponential<S: Simd>(name: &str, s: S) {
    for x in exponents().filter(|x| *x >= crate::simd::exp::LEAST) {
        let ulp = error(s, x, S::exp, f64::exp);
        assert!(ulp <= 1.5, "{name}: exp({x}) is off by {ulp} ulp");
        // 2^-17 of the result, which is 2^6 ulp to 2^7 ulp.
        let ulp = error(s, x, S::exp_short, f64::exp);
        assert!(ulp <= 128.0, "{name}: exp_short({x}) is off by {ulp} ulp");
    }
    for apply in [S::exp, S::exp_short] {
        let of = |x: f32| value(s, apply(s, s.splat(x)));
        assert_eq!([of(0.0), of(-0.0), of(f32::NEG_INFINITY), of(-1e9)], [1.0, 1.0, 0.0, 0.0]);
        assert!(of(f32::NAN).is_nan(), "{name}");
        assert!(of(-88.0) <= f32::MIN_POSITIVE, "{name}");
    }
}

#[test]
fn exponentials_are_exact_to_one_ulp_or_17_bits() {
    on_all!(exponential);
}

fn tangent<S: Simd>(name: &str, s: S) {
    // Ends where the tangent is 1, and begins where it is its argument.
    let large = (-30_000..30_000_i16).map(|i| f32::from(i) * 3.7e-4);
    let small = (0..20_000_i16).map(|i| 1e-9 * (f32::from(i) * 1.2e-3).exp());
    for x in large.chain(small) {
        let ulp = error(s, x, S::tanh, f64::tanh);
        assert!(ulp <= 2.5, "{name}: tanh({x}) is off by {ulp} ulp");
    }
    let of = |x: f32| value(s, s.tanh(s.splat(x)));
    assert_eq!(
        [of(0.0), of(f32::INFINITY), of(f32::NEG_INFINITY), of(-50.0)],
        [0.0, 1.0, -1.0, -1.0]
    );
    assert!(of(f32::NAN).is_nan(), "{name}");
}

#[test]
fn tangents_are_exact_to_two_ulp() {
    on_all!(tangent);
}
