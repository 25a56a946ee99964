//! `quant-decode-tables/1` and the CSV files of codes: the value of every code.
use kv_core::backend::AnyBackend;
use kv_core::{KvFormat, Scaling};
use kv_quant::minifloat;
use serde_json::Value;

use super::csv::Table;
use super::planes::decoded;
use super::{Content, Quant, Trial, hex, members};
use crate::case::{At, CaseError, CaseResult, Outcome, ensure};

/// The type that codes belong to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    E4m3,
    E5m2,
    E2m1,
    E8m0,
    /// E4M3 without its sign: the block scales of NVFP4.
    Ue4m3,
}

/// The value of every code of one kind.
#[derive(Debug)]
pub(in crate::vectors) struct Codes {
    kind: Kind,
    values: Vec<f64>,
}

impl Kind {
    const NAMES: [(&'static str, Self); 5] = [
        ("ue4m3", Self::Ue4m3),
        ("e4m3fn", Self::E4m3),
        ("e5m2", Self::E5m2),
        ("e2m1", Self::E2m1),
        ("e8m0", Self::E8m0),
    ];

    fn of(name: &str) -> Result<Self, String> {
        let found = Self::NAMES.iter().find(|(known, _)| *known == name);
        found.map(|(_, kind)| *kind).ok_or_else(|| format!("codes of an unknown kind {name:?}"))
    }

    /// Returns the number of codes.
    fn count(self) -> usize {
        match self {
            Self::E2m1 => 16,
            Self::Ue4m3 => 128,
            _ => 256,
        }
    }

    fn decode(self, code: u8) -> f32 {
        match self {
            Self::E4m3 | Self::Ue4m3 => minifloat::e4m3_decode(code),
            Self::E5m2 => minifloat::e5m2_decode(code),
            Self::E2m1 => minifloat::e2m1_decode(code),
            Self::E8m0 => minifloat::e8m0_decode(code),
        }
    }
}

impl Codes {
    fn new(kind: Kind, values: Vec<f64>) -> Result<Self, String> {
        if values.len() == kind.count() {
            return Ok(Self { kind, values });
        }
        Err(format!("{} codes of {kind:?}, which has {}", values.len(), kind.count()))
    }
}

/// Reads every table of a JSON file: numbers, `null` for NaN, infinities as text.
pub(super) fn of_json(value: &Value) -> Result<Vec<Trial>, String> {
    // Every value of a code is an f32; reading JSON may be off by an ulp of f64.
    let nearest = |x: f64| f64::from(x as f32);
    let number = |value: &Value| match value {
        Value::Null => Ok(f64::NAN),
        Value::String(text) => special(text),
        other => {
            other.as_f64().map(nearest).ok_or_else(|| format!("{other} is not a value of a code"))
        }
    };
    let table = |name: &str, list: &Value| {
        let list = list.as_array().ok_or("does not fit its schema: no list of values")?;
        let values = list.iter().map(number).collect::<Result<_, _>>()?;
        Codes::new(Kind::of(name)?, values).map(Quant::Decode)
    };
    let one =
        |(name, list): (&String, &Value)| (Some(name.clone()), Content::from(table(name, list)));
    Ok(members(value, "tables")?.map(one).collect())
}

fn special(text: &str) -> Result<f64, String> {
    match text {
        "inf" => Ok(f64::INFINITY),
        "-inf" => Ok(f64::NEG_INFINITY),
        "nan" => Ok(f64::NAN),
        _ => Err(format!("{text:?} is not a value of a code")),
    }
}

/// Reads a CSV file: `code_hex`, and its value as text and as bits; or the two values of a UE4M3
/// code.
pub(super) fn of_csv(file: &str, table: &Table) -> Result<Codes, String> {
    let columns: Vec<_> = table.columns().iter().map(String::as_str).collect();
    let codes = table.each(0, |text| hex(text, 2))?;
    if !codes.iter().copied().eq(0..codes.len() as u32) {
        return Err("the codes are not all codes in ascending order".to_owned());
    }
    let decimal = |text: &str| match text.parse::<f64>() {
        Ok(value) if value.is_finite() => Ok(value),
        _ => special(text),
    };
    let (kind, values) = match columns[1..] {
        ["class", "f32_bits_hex", "value"] => {
            let name = file.split('_').next().unwrap_or_default();
            let values = table.each(3, decimal)?;
            check_bits(&values, &table.each(2, |text| hex(text, 8))?)?;
            check_classes(&values, &table.each(1, |text| Ok(text.to_owned()))?)?;
            (Kind::of(name)?, values)
        }
        ["ocp_value", "ggml_value_times_half"] => {
            let values = table.each(1, decimal)?;
            check_ggml(&values, &table.each(2, decimal)?)?;
            (Kind::Ue4m3, values)
        }
        _ => return Err(format!("columns unknown among {}", columns.join(","))),
    };
    Codes::new(kind, values)
}

/// Checks that the value as text and as bits is the same.
fn check_bits(values: &[f64], bits: &[u32]) -> Result<(), String> {
    for ((value, bits), code) in values.iter().zip(bits).zip(0..) {
        let written = f64::from(f32::from_bits(*bits));
        if value.to_bits() != written.to_bits() && !(value.is_nan() && written.is_nan()) {
            return Err(format!("code {code:#04x} is {value} and has the bits {bits:#010x}"));
        }
    }
    Ok(())
}

fn check_classes(values: &[f64], classes: &[String]) -> Result<(), String> {
    for ((value, class), code) in values.iter().zip(classes).zip(0..) {
        let fits = match class.as_str() {
            "nan" => value.is_nan(),
            "inf" => value.is_infinite(),
            "zero" => *value == 0.0,
            "finite" | "subnormal" => value.is_finite() && *value != 0.0,
            _ => false,
        };
        if !fits {
            return Err(format!("code {code:#04x} is {value} and of class {class:?}"));
        }
    }
    Ok(())
}

/// Checks ggml's values: it halves the scale, because it doubles the values, and reads NaN as 0.
fn check_ggml(values: &[f64], halves: &[f64]) -> Result<(), String> {
    for ((value, half), code) in values.iter().zip(halves).zip(0..) {
        let expected = if value.is_nan() { 0.0 } else { value / 2.0 };
        if *half != expected {
            return Err(format!("code {code:#04x} is {value}, and {half} in ggml"));
        }
    }
    Ok(())
}

/// Checks that every code decodes to its value, bit by bit; on the device too, if a format stores
/// the code.
pub(super) fn run(backend: &AnyBackend, codes: &Codes) -> CaseResult {
    let ours = |code: u8| codes.kind.decode(code);
    let host: Vec<_> = (0..=u8::MAX).take(codes.values.len()).map(ours).collect();
    codes.compare(&host, |got, expected| got.to_bits() == expected.to_bits())?;
    if let Some(got) = codes.on_device(backend)? {
        // The scale was multiplied in.
        codes.compare(&got, |got, expected| got == expected).at("on the device")?;
    }
    Ok(Outcome::Holds)
}

impl Codes {
    fn compare(&self, got: &[f32], same: fn(f64, f64) -> bool) -> Result<(), CaseError> {
        crate::case::same("codes", got.len(), self.values.len())?;
        for ((expected, got), code) in self.values.iter().zip(got).zip(0..) {
            let got = f64::from(*got);
            ensure(same(got, *expected) || (got.is_nan() && expected.is_nan()), || {
                format!("{:?} code {code:#04x}: expected {expected:e}, got {got:e}", self.kind)
            })?;
        }
        Ok(())
    }

    /// Returns the values of all codes as a device reads them, `None` if no format stores them
    /// alone.
    fn on_device(&self, backend: &AnyBackend) -> Result<Option<Vec<f32>>, CaseError> {
        // The code of 1 in E4M3 and in E2M1.
        const ONE: u8 = 0x38;
        const ONE_E2M1: u8 = 0x22;
        let bytes: Vec<u8> = (0..=u8::MAX).collect();
        let values = match self.kind {
            Kind::E8m0 => return Ok(None),
            Kind::E4m3 => decoded(backend, KvFormat::Fp8E4m3(Scaling::Tensor), 64, &bytes)?,
            Kind::E5m2 => decoded(backend, KvFormat::Fp8E5m2(Scaling::Tensor), 64, &bytes)?,
            Kind::E2m1 => {
                let pairs = (0..8).map(|pair| (2 * pair) | (2 * pair + 1) << 4);
                let row: Vec<u8> = pairs.chain([ONE]).collect();
                decoded(backend, KvFormat::Nvfp4, 16, &padded(&row))?
            }
            Kind::Ue4m3 => {
                let row = |code: u8| padded(&[&[ONE_E2M1; 8][..], &[code]].concat());
                let rows: Vec<u8> = (0..128).flat_map(row).collect();
                let all = decoded(backend, KvFormat::Nvfp4, 16, &rows)?;
                all.chunks(16).map(|row| row[0]).collect()
            }
        };
        Ok(Some(values))
    }
}

/// Pads a row of 16 values of NVFP4 to its aligned size.
fn padded(row: &[u8]) -> Vec<u8> {
    let mut row = row.to_vec();
    row.resize(KvFormat::Nvfp4.row_bytes(16) as usize, 0);
    row
}
