//! Recurrences over the tokens of a step, whose states are in the cache.
use candle_core::{Device, Result, Tensor};
use kv_candle::CandleStep;

/// A part of a layer's state of all entries of a step.
struct Part {
    shape: Vec<usize>,
    values: Vec<f32>,
}

impl Part {
    fn read(step: &CandleStep<'_>, layer: usize, part: usize) -> Result<Self> {
        let state = step.state(layer, part)?;
        Ok(Self { shape: state.dims().to_vec(), values: state.flatten_all()?.to_vec1()? })
    }

    /// Returns the values of one entry.
    fn of(&mut self, entry: usize) -> &mut [f32] {
        let len = self.values.len() / self.shape[0];
        &mut self.values[entry * len..][..len]
    }

    fn tensor(&self) -> Result<Tensor> {
        Tensor::from_slice(&self.values, self.shape.as_slice(), &Device::Cpu)
    }
}

/// Calls `advance` for every token in order: with its row, the parts of the state of its sequence,
/// and `width` values for the output. Returns the output of all rows; the states behind the tokens,
/// and in front of each draft, are in the cache.
pub(crate) fn run(
    (step, layer): (&CandleStep<'_>, usize),
    parts: usize,
    width: usize,
    mut advance: impl FnMut(usize, &mut [&mut [f32]], &mut [f32]),
) -> Result<Tensor> {
    let parts = (0..parts).map(|part| Part::read(step, layer, part));
    let mut parts = parts.collect::<Result<Vec<_>>>()?;
    let entries = step.entries();
    let rows = entries.iter().map(|rows| rows.end).max().unwrap_or(0);
    let most = entries.iter().map(ExactSizeIterator::len).max().unwrap_or(0);
    let mut out = vec![0.0; rows * width];
    for tokens in 1..=most {
        let mut is_kept = false;
        for (entry, rows) in entries.iter().enumerate() {
            let Some(row) = rows.clone().nth(tokens - 1) else { continue };
            let mut state: Vec<_> = parts.iter_mut().map(|part| part.of(entry)).collect();
            advance(row, &mut state, &mut out[row * width..][..width]);
            is_kept |= tokens < rows.len() && step.keeps_state_after(layer, entry, tokens)?;
        }
        for (at, part) in parts.iter().enumerate().filter(|_| is_kept) {
            step.set_state_after(layer, at, tokens, &part.tensor()?)?;
        }
    }
    for (at, part) in parts.iter().enumerate() {
        step.set_state(layer, at, &part.tensor()?)?;
    }
    Tensor::from_vec(out, (rows, width), &Device::Cpu)
}

/// Moves a token's inputs into the windows of a convolution, `[channels, kernel - 1]`, and returns
/// its outputs, activated. `weight` is `[channels, kernel]`.
pub(crate) fn convolve(
    windows: &mut [f32],
    inputs: &[f32],
    weight: &[f32],
    bias: &[f32],
) -> Vec<f32> {
    let kernel = weight.len() / inputs.len();
    let mut out = Vec::new();
    for (channel, input) in inputs.iter().enumerate() {
        let window = &mut windows[channel * (kernel - 1)..][..kernel - 1];
        let weight = &weight[channel * kernel..][..kernel];
        let mut sum = bias.get(channel).copied().unwrap_or(0.0) + input * weight[kernel - 1];
        for (x, weight) in window.iter().zip(weight) {
            sum += x * weight;
        }
        window.rotate_left(1);
        window[kernel - 2] = *input;
        out.push(silu(sum));
    }
    out
}

pub(crate) fn silu(x: f32) -> f32 {
    x * sigmoid(x)
}

pub(crate) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}

/// Returns `ln(1 + e^x)`.
pub(crate) fn softplus(x: f32) -> f32 {
    x.exp().ln_1p()
}

/// Returns a factor that gives some values a mean square of one.
pub(crate) fn inverse_rms(values: &[f32], epsilon: f32) -> f32 {
    let squares: f32 = values.iter().map(|x| x * x).sum();
    let count = f32::from(u16::try_from(values.len()).unwrap());
    (squares / count + epsilon).sqrt().recip()
}
