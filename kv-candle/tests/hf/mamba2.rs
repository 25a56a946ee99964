//! Mamba 2: every layer has a state, and none attends.
use candle_core::{Result, Tensor};
use kv_candle::CandleStep;

use crate::hybrids::Family;
use crate::recorded::Recorded;
use crate::ssm::Extents;

pub(crate) const FAMILY: Family = Family {
    name: "mamba2",
    states: &[0, 1, 2, 3],
    rows: &[],
    shapes: |recorded| EXTENTS.shapes(recorded),
    heads: |_| None,
    logits: |recorded, tokens, step| logits(recorded, tokens, step, Reading::Transformers),
};

const EXTENTS: Extents = Extents {
    heads: "num_heads",
    head_dim: "head_dim",
    groups: "n_groups",
    state: "state_size",
    kernel: "conv_kernel",
    epsilon: "layer_norm_epsilon",
};

/// Whose model the weights are read as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reading {
    Transformers,
    /// One norm for the channels of all groups, and the embeddings as the last projection.
    Candle,
}

pub(crate) fn logits(
    recorded: &Recorded,
    tokens: &[u32],
    step: &CandleStep<'_>,
    reading: Reading,
) -> Result<Tensor> {
    let embeddings = "backbone.embeddings.weight";
    let mut x = recorded.embed(embeddings, tokens)?;
    for layer in 0..usize::from(recorded.layers()) {
        let name = |part: &str| format!("backbone.layers.{layer}.{part}");
        let h = recorded.norm(&name("norm"), EXTENTS.epsilon, &x)?;
        let h = recorded.linear(&name("mixer.in_proj"), &h)?;
        let at = (step, layer);
        let h = match reading {
            Reading::Transformers => EXTENTS.mix(recorded, &name("mixer"), at, &h)?,
            Reading::Candle => {
                let h = EXTENTS.mix_without_norm(recorded, &name("mixer"), at, &h)?;
                recorded.norm(&name("mixer.norm"), EXTENTS.epsilon, &h)?
            }
        };
        x = (x + recorded.linear(&name("mixer.out_proj"), &h)?)?;
    }
    let x = recorded.norm("backbone.norm_f", EXTENTS.epsilon, &x)?;
    match reading {
        Reading::Transformers => recorded.linear("lm_head", &x),
        Reading::Candle => x.matmul(&recorded.weights[embeddings].t()?),
    }
}
