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
    logits,
};

const EXTENTS: Extents = Extents {
    heads: "num_heads",
    head_dim: "head_dim",
    groups: "n_groups",
    state: "state_size",
    kernel: "conv_kernel",
    epsilon: "layer_norm_epsilon",
};

fn logits(recorded: &Recorded, tokens: &[u32], step: &CandleStep<'_>) -> Result<Tensor> {
    let mut x = recorded.embed("backbone.embeddings.weight", tokens)?;
    for layer in 0..usize::from(recorded.layers()) {
        let name = |part: &str| format!("backbone.layers.{layer}.{part}");
        let h = recorded.norm(&name("norm"), EXTENTS.epsilon, &x)?;
        let h = recorded.linear(&name("mixer.in_proj"), &h)?;
        let h = EXTENTS.mix(recorded, &name("mixer"), (step, layer), &h)?;
        x = (x + recorded.linear(&name("mixer.out_proj"), &h)?)?;
    }
    let x = recorded.norm("backbone.norm_f", EXTENTS.epsilon, &x)?;
    recorded.linear("lm_head", &x)
}
