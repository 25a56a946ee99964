//! Nemotron-H: a layer is a recurrence, attention without RoPE, or a network, which the cache knows
//! nothing of.
use candle_core::{Result, Tensor};
use kv_candle::CandleStep;

use crate::hybrids::Family;
use crate::recorded::Recorded;
use crate::ssm::Extents;

pub(crate) const FAMILY: Family = Family {
    name: "nemotron_h",
    states: &[0, 2],
    rows: &[1],
    shapes: |recorded| EXTENTS.shapes(recorded),
    heads: |recorded| {
        let dim = recorded.field("head_dim");
        Some([recorded.field("num_key_value_heads"), dim, dim])
    },
    logits,
};

const EXTENTS: Extents = Extents {
    heads: "mamba_num_heads",
    head_dim: "mamba_head_dim",
    groups: "n_groups",
    state: "ssm_state_size",
    kernel: "conv_kernel",
    epsilon: "layer_norm_epsilon",
};

fn logits(recorded: &Recorded, tokens: &[u32], step: &CandleStep<'_>) -> Result<Tensor> {
    let kinds: Vec<String> = recorded.field("layers_block_type");
    let mut x = recorded.embed("model.embeddings.weight", tokens)?;
    // The layer of the cache.
    let mut at = 0;
    for (layer, kind) in kinds.iter().enumerate() {
        let name = |part: &str| format!("model.layers.{layer}.{part}");
        let h = recorded.norm(&name("norm"), EXTENTS.epsilon, &x)?;
        let h = match kind.as_str() {
            "linear_attention" => {
                let h = recorded.linear(&name("mixer.in_proj"), &h)?;
                let h = EXTENTS.mix(recorded, &name("mixer"), (step, at), &h)?;
                recorded.linear(&name("mixer.out_proj"), &h)?
            }
            "full_attention" => recorded.attend(&name("mixer"), (step, at), (None, 1.0), &h)?,
            "mlp" => {
                let h = recorded.linear(&name("mixer.up_proj"), &h)?.relu()?.sqr()?;
                recorded.linear(&name("mixer.down_proj"), &h)?
            }
            other => panic!("{other}"),
        };
        at += usize::from(kind != "mlp");
        x = (x + h)?;
    }
    let x = recorded.norm("model.norm_f", EXTENTS.epsilon, &x)?;
    recorded.linear("lm_head", &x)
}
