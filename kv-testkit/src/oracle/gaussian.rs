//! Error limits of the formats on normally distributed rows.
use kv_core::{KvFormat, ScaleGroup, Scaling};

/// Upper limits of the relative squared error of each format on independent normal values in rows
/// of 128: the error of the host's definition over two million values, plus 2 % for chance and for
/// other roundings. Given scales are 1. INT8 with one scale for many rows is not listed, because
/// its error depends on the largest row.
pub const ERRORS: &[(KvFormat, f64)] = &[
    (KvFormat::Fp8E4m3(Scaling::Tensor), 7.18e-4),
    (KvFormat::Fp8E4m3(Scaling::Head), 7.18e-4),
    (KvFormat::Fp8E4m3(Scaling::Row), 6.74e-4),
    (KvFormat::Fp8E5m2(Scaling::Tensor), 2.84e-3),
    (KvFormat::Fp8E5m2(Scaling::Head), 2.84e-3),
    (KvFormat::Fp8E5m2(Scaling::Row), 2.69e-3),
    (KvFormat::Int8(Scaling::Row), 4.27e-5),
    (KvFormat::L6(ScaleGroup::Row), 5.15e-4),
    (KvFormat::L6(ScaleGroup::Group32), 4.68e-4),
    (KvFormat::L4(ScaleGroup::Row), 8.0e-3),
    (KvFormat::L4(ScaleGroup::Group32), 6.62e-3),
    (KvFormat::L3(ScaleGroup::Row), 3.35e-2),
    (KvFormat::L3(ScaleGroup::Group32), 2.88e-2),
    (KvFormat::Q8_0, 2.93e-5),
    (KvFormat::Q4_0, 7.54e-3),
    (KvFormat::Nvfp4, 7.71e-3),
];

/// Returns the squared error divided by the energy.
pub fn relative_error(exact: &[f32], got: &[f32]) -> f64 {
    let square = |x: f64| x * x;
    let energy: f64 = exact.iter().map(|x| square(f64::from(*x))).sum();
    let pairs = exact.iter().zip(got);
    pairs.map(|(exact, got)| square(f64::from(*exact) - f64::from(*got))).sum::<f64>() / energy
}
