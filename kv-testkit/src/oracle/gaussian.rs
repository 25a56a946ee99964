//! How near to normal rows the formats must be.
use kv_core::{KvFormat, ScaleGroup, Scaling};

/// Relative squared error that each format's definition may have on independent normal values,
/// rows of 128: what others measured of the same codes, or what is asked of ours. Formats that one
/// scale serves many rows of are here where their values bring exponents of their own.
pub const ERRORS: &[(KvFormat, f64)] = &[
    (KvFormat::Fp8E4m3(Scaling::Tensor), 7.1e-4),
    (KvFormat::Fp8E4m3(Scaling::Head), 7.1e-4),
    (KvFormat::Fp8E4m3(Scaling::Row), 7.1e-4),
    (KvFormat::Fp8E5m2(Scaling::Tensor), 2.85e-3),
    (KvFormat::Fp8E5m2(Scaling::Head), 2.85e-3),
    (KvFormat::Fp8E5m2(Scaling::Row), 2.85e-3),
    (KvFormat::Int8(Scaling::Row), 4.2e-5),
    (KvFormat::L6(ScaleGroup::Row), 6.4e-4),
    (KvFormat::L6(ScaleGroup::Group32), 6.4e-4),
    (KvFormat::L4(ScaleGroup::Row), 8.0e-3),
    (KvFormat::L4(ScaleGroup::Group32), 6.7e-3),
    (KvFormat::L3(ScaleGroup::Row), 3.2e-2),
    (KvFormat::L3(ScaleGroup::Group32), 3.2e-2),
    (KvFormat::Q8_0, 2.93e-5),
    (KvFormat::Q4_0, 7.54e-3),
    (KvFormat::Nvfp4, 9.22e-3),
];

/// Squared error over energy.
pub fn relative_error(exact: &[f32], got: &[f32]) -> f64 {
    let square = |x: f64| x * x;
    let energy: f64 = exact.iter().map(|x| square(f64::from(*x))).sum();
    let pairs = exact.iter().zip(got);
    pairs.map(|(exact, got)| square(f64::from(*exact) - f64::from(*got))).sum::<f64>() / energy
}
