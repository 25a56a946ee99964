//! Runs a recurrence over the tokens of a step, token by token, on states in the cache.
use candle_core::{Device, Tensor};
use kv::backend::Backend;
use kv_candle::CandleStep;

use crate::error::Error;
use crate::num::{to_f32, to_f64, to_u64};

/// The state of one sequence in one layer.
#[derive(Debug)]
pub(super) struct State<'a> {
    /// The last inputs of the convolution, `[channels, kernel - 1]`.
    pub(super) window: &'a mut [f32],
    /// What the recurrence keeps behind the convolution; empty if it keeps nothing.
    pub(super) matrix: &'a mut [f32],
}

/// A part of a layer's state, of all entries of a step.
struct Part {
    shape: Vec<usize>,
    values: Vec<f32>,
}

impl Part {
    fn read<B: Backend>(step: &CandleStep<'_, B>, layer: u16, part: usize) -> Result<Self, Error> {
        let state = step.state(layer.into(), part)?;
        Ok(Self { shape: state.dims().to_vec(), values: state.flatten_all()?.to_vec1()? })
    }

    /// Returns the values of one entry.
    fn of(&mut self, entry: usize) -> &mut [f32] {
        let values = self.shape.iter().skip(1).product::<usize>().max(1);
        self.values.chunks_exact_mut(values).nth(entry).unwrap_or_default()
    }
}

/// Calls `advance` for the tokens of every entry in order, with the row of the token, the state of
/// its sequence, and the row of the output, `width` values. Returns all rows; the states behind the
/// tokens, and in front of each draft, are in the cache.
pub(super) fn run<B: Backend>(
    step: &CandleStep<'_, B>,
    layer: u16,
    parts: usize,
    width: usize,
    mut advance: impl FnMut(usize, &mut State<'_>, &mut [f32]),
) -> Result<Tensor, Error> {
    let entries = step.entries();
    let parts = 0..parts;
    let parts = parts.map(|part| Part::read(step, layer, part));
    let mut parts = parts.collect::<Result<Vec<_>, _>>()?;
    let rows = entries.iter().map(|rows| rows.end).max().unwrap_or(0);
    let mut out = vec![0.0_f32; rows * width];
    let most = entries.iter().map(ExactSizeIterator::len).max().unwrap_or(0);
    for tokens in 1..=most {
        let mut is_kept = false;
        for (entry, rows) in entries.iter().enumerate() {
            let Some(row) = rows.clone().nth(tokens - 1) else { continue };
            let (window, matrix) = match parts.as_mut_slice() {
                [window, matrix] => (window.of(entry), matrix.of(entry)),
                [window] => (window.of(entry), Default::default()),
                _ => unreachable!("a state has one part or two"),
            };
            let Some(out) = out.chunks_exact_mut(width).nth(row) else {
                unreachable!("the output has all rows")
            };
            advance(row, &mut State { window, matrix }, out);
            let is_last = tokens == rows.len();
            is_kept |= !is_last && step.keeps_state_after(layer.into(), entry, tokens)?;
        }
        if is_kept {
            write(step, layer, &parts, Some(tokens))?;
        }
    }
    if most > 0 {
        write(step, layer, &parts, None)?;
    }
    Ok(Tensor::from_vec(out, (rows, width), &Device::Cpu)?)
}

/// Writes all parts behind some of the tokens, or behind all.
fn write<B: Backend>(
    step: &CandleStep<'_, B>,
    layer: u16,
    parts: &[Part],
    tokens: Option<usize>,
) -> Result<(), Error> {
    for (index, Part { shape, values }) in parts.iter().enumerate() {
        let state = Tensor::from_slice(values, shape.as_slice(), &Device::Cpu)?;
        match tokens {
            Some(tokens) => step.set_state_after(layer.into(), index, tokens, &state)?,
            None => step.set_state(layer.into(), index, &state)?,
        }
    }
    Ok(())
}

/// Returns the values of an activation.
pub(super) fn values(x: &Tensor) -> candle_core::Result<Vec<f32>> {
    x.flatten_all()?.to_vec1()
}

/// Returns one row of an activation of `width` values.
pub(super) fn row(values: &[f32], row: usize, width: usize) -> &[f32] {
    values.chunks_exact(width).nth(row).unwrap_or_default()
}

/// Returns `x / (1 + e^-x)`.
pub(super) fn silu(x: f32) -> f32 {
    x * sigmoid(x)
}

/// Returns `1 / (1 + e^-x)`.
pub(super) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// Returns `ln(1 + e^x)`.
pub(super) fn softplus(x: f32) -> f32 {
    // Beyond, the two are equal in f32.
    if x > 20.0 { x } else { x.exp().ln_1p() }
}

/// Returns one over the root of the mean square of some values.
pub(super) fn inverse_rms(values: &[f32], eps: f32) -> f32 {
    let squares: f32 = values.iter().map(|x| x * x).sum();
    1.0 / (squares / to_f32(to_f64(to_u64(values.len()))) + eps).sqrt()
}
