//! Predictions of a model of the machine code, so that the report shows surprises.
//!
//! The model counts the instructions of each kernel's main loop in the machine code for `sm_90a`,
//! issues them to the pipes of a multiprocessor at 1.98 GHz, and compares that time with the bytes
//! over the rate of a copy (3.0 TB/s on an H100, 4.3 on an H200). It has no instruction cache and
//! no address arithmetic. An H200 has run the kernels since: where the model was wrong, or kernels
//! were made faster for it, its column has the measurement. Faster kernels should change these
//! numbers.
use super::record::Measure;

/// Relative difference from its prediction above which a measurement is marked.
const NEAR: f64 = 0.15;

/// The unit of a prediction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unit {
    /// Fraction of the rate of the driver's copy.
    OfCopy,
    TflopPerS,
}

/// The expected value.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Prediction {
    pub(super) value: f64,
    pub(super) unit: Unit,
    /// The measurement over the prediction, if there is one.
    pub(super) ratio: Option<f64>,
}

impl Prediction {
    /// Returns whether the measurement differs from the prediction, in either direction.
    pub(super) fn is_missed(&self) -> bool {
        self.ratio.is_some_and(|ratio| (ratio - 1.0).abs() > NEAR)
    }
}

/// Fractions of copy on an H200 and an H100 for decode steps with 8 query heads per kv head, 8 kv
/// heads, head dim 128, blocks of 16.
type Decode = (&'static str, [(f64, f64); 6]);

/// Batch and context of the columns.
const SHAPES: [(&str, &str); 6] = [
    ("b1", "c8192"),
    ("b1", "c131072"),
    ("b4", "c131072"),
    ("b16", "c32768"),
    ("b64", "c8192"),
    ("b256", "c1024"),
];
const DECODE: [Decode; 5] = [
    ("bf16", [(0.32, 0.44), (0.85, 0.91), (0.95, 0.98), (0.96, 0.98), (0.96, 0.98), (0.90, 0.95)]),
    (
        "fp8-e4m3",
        [(0.18, 0.25), (0.71, 0.78), (0.91, 0.91), (0.91, 0.92), (0.91, 0.91), (0.64, 0.84)],
    ),
    (
        "int8-tensor",
        [(0.18, 0.24), (0.69, 0.76), (0.85, 0.89), (0.85, 0.89), (0.84, 0.88), (0.61, 0.81)],
    ),
    ("int8", [(0.12, 0.22), (0.47, 0.72), (0.60, 0.83), (0.59, 0.83), (0.56, 0.82), (0.36, 0.75)]),
    ("l4", [(0.06, 0.12), (0.24, 0.43), (0.30, 0.51), (0.30, 0.51), (0.28, 0.51), (0.19, 0.45)]),
];

/// Other measurements by a part of their names: H200, H100. Ranges are given by their middle.
const OTHERS: [(&str, Unit, f64, f64); 4] = [
    ("prefill/bf16/gqa4/t4096", Unit::TflopPerS, 307.0, 309.0),
    ("prefill/bf16/gqa4/t16384", Unit::TflopPerS, 351.0, 355.0),
    ("append/bf16/b1/t16384", Unit::OfCopy, 0.77, 0.85),
    ("append/fp8-e4m3/b1/t16384", Unit::OfCopy, 0.67, 0.80),
];

/// Returns the prediction for a decode step.
fn decode(name: &str) -> Option<(f64, f64)> {
    let parts: Vec<&str> = name.split('/').collect();
    let ["decode", format, "block16", "gqa8", batch, context] = parts.as_slice() else {
        return None;
    };
    let column = SHAPES.iter().position(|shape| *shape == (*batch, *context))?;
    let (_, row) = DECODE.iter().find(|(name, _)| name == format)?;
    row.get(column).copied()
}

/// Returns the prediction for a measurement on a card, if there is one.
pub(super) fn prediction(card: &str, measure: &Measure) -> Option<Prediction> {
    let of_card = |(h200, h100): (f64, f64)| match card {
        _ if card.contains("H200") => Some(h200),
        _ if card.contains("H100") => Some(h100),
        _ => None,
    };
    let (unit, both) = decode(&measure.name).map(|both| (Unit::OfCopy, both)).or_else(|| {
        let other = OTHERS.iter().find(|(name, ..)| measure.name == *name);
        other.map(|(_, unit, h200, h100)| (*unit, (*h200, *h100)))
    })?;
    let value = of_card(both)?;
    let measured = match unit {
        Unit::OfCopy => measure.of_copy,
        Unit::TflopPerS => measure.tflop_per_s,
    };
    Some(Prediction { value, unit, ratio: measured.map(|measured| measured / value) })
}
