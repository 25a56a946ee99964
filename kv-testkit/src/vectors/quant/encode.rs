//! `f32_to_*_encode.csv`: what an f32 becomes in each small type.
//!
//! Implementations differ where a value is too large or not a number, so a file has a column for
//! each. Ours are those of CUDA's saturating conversions: round to nearest even, the largest finite
//! value for what is beyond it and for infinities, one canonical NaN. Of the 16-bit types every
//! column is ours, a NaN being a NaN. E8M0 is rounded as PyTorch does, but saturates too.
use kv_quant::minifloat;

use super::csv::Table;
use super::hex;
use crate::case::{CaseResult, Outcome, ensure};
use crate::device::Device;

/// A type of few bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Small {
    E4m3,
    E5m2,
    E2m1,
    E8m0,
    F16,
    Bf16,
}

/// What a column holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Column {
    /// The numbers.
    Input,
    /// A word about the number.
    Words,
    /// Codes under our convention.
    Ours(Small),
    /// Codes under another one, of so many digits.
    Theirs(usize),
}

/// Numbers, and their codes by type.
#[derive(Debug)]
pub(in crate::vectors) struct Inputs {
    values: Vec<f32>,
    codes: Vec<(Small, String, Vec<u32>)>,
}

impl Column {
    fn of(name: &str) -> Option<Self> {
        Some(match name {
            "f32_bits" => Self::Input,
            "category" => Self::Words,
            "e4m3_cuda_satfinite" => Self::Ours(Small::E4m3),
            "e5m2_cuda_satfinite" => Self::Ours(Small::E5m2),
            "e2m1_cuda_satfinite" => Self::Ours(Small::E2m1),
            "e8m0_torch" => Self::Ours(Small::E8m0),
            "f16_numpy" | "f16_torch" | "f16_cuda" => Self::Ours(Small::F16),
            "bf16_ml_dtypes" | "bf16_torch" | "bf16_cuda" => Self::Ours(Small::Bf16),
            "e4m3_ml_dtypes"
            | "e4m3_torch"
            | "e4m3_cuda_nosat"
            | "e5m2_ml_dtypes"
            | "e5m2_torch"
            | "e5m2_cuda_nosat"
            | "e2m1_ml_dtypes"
            | "e8m0_ml_dtypes"
            | "e8m0_cuda_roundup"
            | "e8m0_cuda_roundzero" => Self::Theirs(2),
            _ => return None,
        })
    }
}

impl Small {
    fn digits(self) -> usize {
        if matches!(self, Self::F16 | Self::Bf16) { 4 } else { 2 }
    }

    fn encode(self, x: f32) -> u32 {
        match self {
            Self::E4m3 => minifloat::e4m3_encode(x).into(),
            Self::E5m2 => minifloat::e5m2_encode(x).into(),
            Self::E2m1 => minifloat::e2m1_encode(x).into(),
            Self::E8m0 => minifloat::e8m0_encode(x).into(),
            Self::F16 => half::f16::from_f32(x).to_bits().into(),
            Self::Bf16 => half::bf16::from_f32(x).to_bits().into(),
        }
    }

    /// The code under our convention, where a column has another one for numbers too large.
    fn ours(self, x: f32, code: u32) -> u32 {
        let beyond = x.abs() >= 1.5 * 2_f32.powi(127);
        if self == Self::E8m0 && beyond && code == 0xFF { 0xFE } else { code }
    }

    /// Whether two codes mean the same: only the 16-bit types have NaNs to choose from.
    fn same(self, a: u32, b: u32) -> bool {
        let nan = |code: u32| {
            let code = u16::try_from(code).unwrap_or(0);
            match self {
                Self::F16 => half::f16::from_bits(code).is_nan(),
                Self::Bf16 => half::bf16::from_bits(code).is_nan(),
                _ => false,
            }
        };
        a == b || (nan(a) && nan(b))
    }
}

/// Reads a file whose every column is known, and one of them ours.
pub(super) fn of_csv(table: &Table) -> Result<Inputs, String> {
    let mut inputs = Inputs { values: Vec::new(), codes: Vec::new() };
    for (name, index) in table.columns().iter().zip(0..) {
        match Column::of(name).ok_or_else(|| format!("an unknown column {name}"))? {
            Column::Input => {
                inputs.values = table.each(index, |text| hex(text, 8).map(f32::from_bits))?;
            }
            Column::Words => {}
            Column::Ours(small) => {
                let codes = table.each(index, |text| hex(text, small.digits()))?;
                inputs.codes.push((small, name.clone(), codes));
            }
            Column::Theirs(digits) => {
                table.each(index, |text| hex(text, digits))?;
            }
        }
    }
    if inputs.codes.is_empty() {
        return Err("no column of a convention that is ours".to_owned());
    }
    Ok(inputs)
}

/// Every number must become its code.
pub(super) fn run<B: Device>(_backend: &B, inputs: &Inputs) -> CaseResult {
    for (small, column, codes) in &inputs.codes {
        for ((x, code), line) in inputs.values.iter().zip(codes).zip(2..) {
            let (got, expected) = (small.encode(*x), small.ours(*x, *code));
            ensure(small.same(got, expected), || {
                format!("line {line}, {column}: {x:e} is {expected:#x} there, {got:#x} here")
            })?;
        }
    }
    Ok(Outcome::Holds)
}
