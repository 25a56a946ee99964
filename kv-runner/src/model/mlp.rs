//! The part of a layer behind its mixer: a gated MLP, or a mixture of such.
use candle_core::{Device, Module, Tensor};
use candle_nn::Linear;

use super::part::Part;
use crate::config::{ExpertsConfig, ModelConfig};
use crate::error::{Error, WeightError};
use crate::num::{to_u32, to_usize};

/// A gated MLP, or a mixture of experts.
#[derive(Debug)]
pub(super) enum Mlp {
    Dense(Gated),
    Experts(Box<Experts>),
}

/// A gated MLP.
#[derive(Debug)]
pub(super) struct Gated {
    gate: Linear,
    up: Linear,
    down: Linear,
}

/// Experts of which each token has a few, and one that all tokens share.
#[derive(Debug)]
pub(super) struct Experts {
    router: Linear,
    each: Vec<Gated>,
    shared: Gated,
    shared_gate: Option<Linear>,
    per_token: usize,
    is_normalised: bool,
}

impl Mlp {
    pub(super) fn build(config: &ModelConfig, part: &mut Part<'_>) -> Result<Self, Error> {
        let has = |of: &&ExpertsConfig| of.layers.get(usize::from(part.layer)) == Some(&true);
        let experts = match config.experts.as_ref().filter(has) {
            None => return Ok(Self::Dense(Gated::dense(config, part)?)),
            Some(of) if config.architecture.stacks_experts() => Experts::stacked(config, of, part),
            Some(of) => Experts::build(of, part, config.hidden),
        };
        Ok(Self::Experts(Box::new(experts?)))
    }

    pub(super) fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        match self {
            Self::Dense(mlp) => mlp.forward(x),
            Self::Experts(experts) => experts.forward(x),
        }
    }
}

impl Gated {
    /// Takes the MLP of an architecture without experts.
    fn dense(config: &ModelConfig, part: &mut Part<'_>) -> Result<Self, Error> {
        let (hidden, inner) = (config.hidden, config.intermediate);
        let names = config.architecture.weights();
        let has_bias = config.biases.mlp;
        let [gate, up] = match names.gate_up {
            Some(both) => part.split(both, (1, [inner; 2]), hidden, false)?,
            None => [
                part.linear(names.gate, inner, hidden, has_bias)?,
                part.linear(names.up, inner, hidden, has_bias)?,
            ],
        };
        Ok(Self { gate, up, down: part.linear(names.down, hidden, inner, has_bias)? })
    }

    fn of(part: &mut Part<'_>, name: &str, inner: u32, hidden: u32) -> Result<Self, Error> {
        Ok(Self {
            gate: part.linear(&format!("{name}.gate_proj"), inner, hidden, false)?,
            up: part.linear(&format!("{name}.up_proj"), inner, hidden, false)?,
            down: part.linear(&format!("{name}.down_proj"), hidden, inner, false)?,
        })
    }

    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let gate = self.gate.forward(x)?.silu()?;
        self.down.forward(&gate.mul(&self.up.forward(x)?)?)
    }
}

impl Experts {
    fn build(of: &ExpertsConfig, part: &mut Part<'_>, hidden: u32) -> Result<Self, Error> {
        let expert = |index| Gated::of(part, &format!("mlp.experts.{index}"), of.width, hidden);
        let each = (0..of.count).map(expert).collect::<Result<_, _>>()?;
        Ok(Self {
            router: part.linear("mlp.gate", of.count, hidden, false)?,
            each,
            shared: Gated::of(part, "mlp.shared_expert", of.shared_width, hidden)?,
            shared_gate: Some(part.linear("mlp.shared_expert_gate", 1, hidden, false)?),
            per_token: to_usize(of.per_token),
            is_normalised: of.is_normalised,
        })
    }

    /// Takes experts whose matrices are stacked.
    fn stacked(
        config: &ModelConfig,
        of: &ExpertsConfig,
        part: &mut Part<'_>,
    ) -> Result<Self, Error> {
        let hidden = config.hidden;
        let wide = WeightError::FusedTooWide { rows: vec![of.width; 2] };
        let rows = of.width.checked_mul(2).ok_or(wide)?;
        let input =
            part.tensor("block_sparse_moe.input_linear.weight", &[of.count, rows, hidden])?;
        let output = [of.count, hidden, of.width];
        let output = part.tensor("block_sparse_moe.output_linear.weight", &output)?;
        let width = to_usize(of.width);
        let expert = |index: u32| {
            let (input, output) = (input.get(to_usize(index))?, output.get(to_usize(index))?);
            let rows = |begin| -> candle_core::Result<Linear> {
                Ok(Linear::new(input.narrow(0, begin, width)?.copy()?, None))
            };
            let down = Linear::new(output.copy()?, None);
            Ok(Gated { gate: rows(0)?, up: rows(width)?, down })
        };
        let each = (0..of.count).map(expert).collect::<candle_core::Result<_>>()?;
        Ok(Self {
            router: part.linear("block_sparse_moe.router.layer", of.count, hidden, false)?,
            each,
            shared: Gated::dense(config, part)?,
            shared_gate: None,
            per_token: to_usize(of.per_token),
            is_normalised: of.is_normalised,
        })
    }

    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let mut out = self.shared.forward(x)?;
        if let Some(gate) = &self.shared_gate {
            out = out.broadcast_mul(&candle_nn::ops::sigmoid(&gate.forward(x)?)?)?;
        }
        let shares = candle_nn::ops::softmax_last_dim(&self.router.forward(x)?)?;
        // The rows of each expert, and their shares of the sum.
        let mut chosen = vec![(Vec::new(), Vec::new()); self.each.len()];
        for (row, shares) in shares.to_vec2::<f32>()?.into_iter().enumerate() {
            for (expert, share) in self.largest(&shares) {
                if let Some((rows, of_rows)) = chosen.get_mut(expert) {
                    rows.push(to_u32(row));
                    of_rows.push(share);
                }
            }
        }
        for (expert, (rows, shares)) in self.each.iter().zip(chosen) {
            let count = rows.len();
            if count == 0 {
                continue;
            }
            let rows = Tensor::from_vec(rows, count, &Device::Cpu)?;
            let shares = Tensor::from_vec(shares, (count, 1), &Device::Cpu)?;
            let part = expert.forward(&x.index_select(&rows, 0)?)?.broadcast_mul(&shares)?;
            out = out.index_add(&rows, &part, 0)?;
        }
        Ok(out)
    }

    /// Returns the experts of a token with their shares.
    fn largest(&self, shares: &[f32]) -> Vec<(usize, f32)> {
        let mut all: Vec<_> = shares.iter().copied().enumerate().collect();
        all.sort_by(|(_, a), (_, b)| b.total_cmp(a));
        all.truncate(self.per_token);
        if self.is_normalised {
            let sum: f32 = all.iter().map(|(_, share)| share).sum();
            for (_, share) in &mut all {
                *share /= sum;
            }
        }
        all
    }
}
