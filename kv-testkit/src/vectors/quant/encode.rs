//! `f32_to_*_encode.csv`: the code of an f32 in each small type.
//!
//! Implementations differ for values that are too large and for NaN, so a file has a column for
//! each. This library follows CUDA's saturating conversions: round to nearest even, the largest
//! finite value for larger ones and infinities, one canonical NaN. For the 16-bit types every
//! column must agree, with any NaN equal to any other. E8M0 is rounded as in PyTorch, but saturates
//! too.
use kv_core::backend::AnyBackend;
use kv_core::{KvFormat, Scaling};
use kv_quant::minifloat;

use super::csv::Table;
use super::hex;
use super::planes::encoded;
use crate::case::{At, CaseError, CaseResult, Outcome, ensure};

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

/// The content of a column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Column {
    /// The f32 numbers.
    Input,
    /// A word about the number.
    Words,
    /// Codes in this library's convention.
    Ours(Small),
    /// Codes in another convention, with this number of digits.
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

    /// Returns the code in this library's convention, if a column has another one for values out of
    /// range.
    fn ours(self, x: f32, code: u32) -> u32 {
        let beyond = x.abs() >= 1.5 * 2_f32.powi(127);
        if self == Self::E8m0 && beyond && code == 0xFF { 0xFE } else { code }
    }

    /// Returns whether two codes mean the same: only the 16-bit types have several NaNs.
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

/// Reads a file whose columns are all known, one of them in this library's convention.
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
        return Err("no column in this library's convention".to_owned());
    }
    Ok(inputs)
}

/// Checks that every number gets its code; on the device too, if a format stores the type.
pub(super) fn run(backend: &AnyBackend, inputs: &Inputs) -> CaseResult {
    for list in &inputs.codes {
        let host: Vec<_> = inputs.values.iter().map(|x| list.0.encode(*x)).collect();
        inputs.compare(list, &host)?;
        if let Some(got) = inputs.on_device(backend, list.0)? {
            inputs.compare(list, &got).at("on the device")?;
        }
    }
    Ok(Outcome::Holds)
}

/// Values of a row on the device.
const DIM: usize = 64;

impl Inputs {
    fn compare(&self, list: &(Small, String, Vec<u32>), got: &[u32]) -> Result<(), CaseError> {
        let (small, column, codes) = list;
        for (((x, code), got), line) in self.values.iter().zip(codes).zip(got).zip(2..) {
            let expected = small.ours(*x, *code);
            ensure(small.same(*got, expected), || {
                format!("line {line}, {column}: {x:e} is {expected:#x} there, {got:#x} here")
            })?;
        }
        Ok(())
    }

    /// Returns the codes that a device stores, `None` for a type that no format stores alone.
    fn on_device(&self, backend: &AnyBackend, small: Small) -> Result<Option<Vec<u32>>, CaseError> {
        let format = match small {
            Small::E4m3 => KvFormat::Fp8E4m3(Scaling::Tensor),
            Small::E5m2 => KvFormat::Fp8E5m2(Scaling::Tensor),
            Small::F16 => KvFormat::F16,
            Small::Bf16 => KvFormat::Bf16,
            Small::E2m1 | Small::E8m0 => return Ok(None),
        };
        let mut values = self.values.clone();
        values.resize(values.len().next_multiple_of(DIM), 0.0);
        let bytes = encoded(backend, format, DIM, &values)?;
        let code =
            |bytes: &[u8]| bytes.iter().rev().fold(0, |all, byte| all << 8 | u32::from(*byte));
        Ok(Some(bytes.chunks(small.digits() / 2).map(code).collect()))
    }
}
