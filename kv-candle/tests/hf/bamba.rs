//! Bamba: one layer attends, with RoPE on half of every head; the others have a state.
use candle_core::{Result, Tensor};
use kv_candle::CandleStep;

use crate::hybrids::Family;
use crate::recorded::Recorded;
use crate::ssm::MAMBA;

pub(crate) const FAMILY: Family = Family {
    name: "bamba",
    states: &[0, 1, 3],
    rows: &[2],
    shapes: |recorded| MAMBA.shapes(recorded),
    heads: |recorded| {
        let dim = recorded.field("head_dim");
        Some([recorded.field("num_key_value_heads"), dim, dim])
    },
    logits,
};

fn logits(recorded: &Recorded, tokens: &[u32], step: &CandleStep<'_>) -> Result<Tensor> {
    let angles = recorded.angles(step.positions())?;
    let attends: Vec<u16> = recorded.field("attn_layer_indices");
    let mut x = recorded.embed("model.embed_tokens.weight", tokens)?;
    for layer in 0..recorded.layers() {
        let name = |part: &str| format!("model.layers.{layer}.{part}");
        let at = (step, usize::from(layer));
        let h = recorded.norm(&name("input_layernorm"), MAMBA.epsilon, &x)?;
        let h = if attends.contains(&layer) {
            recorded.attend(&name("self_attn"), at, (Some(&angles), 1.0), &h)?
        } else {
            let h = recorded.linear(&name("mamba.in_proj"), &h)?;
            let h = MAMBA.mix(recorded, &name("mamba"), at, &h)?;
            recorded.linear(&name("mamba.out_proj"), &h)?
        };
        x = (x + h)?;
        let h = recorded.norm(&name("pre_ff_layernorm"), MAMBA.epsilon, &x)?;
        x = (x + recorded.swiglu(&name("feed_forward"), 1.0, &h)?)?;
    }
    let x = recorded.norm("model.final_layernorm", MAMBA.epsilon, &x)?;
    recorded.linear("lm_head", &x)
}
