//! Falcon-H1: every layer has a state and attends, on one input; numbers of the configuration are
//! factors of most values.
use candle_core::{Device, Result, Tensor};
use kv_candle::CandleStep;

use crate::hybrids::Family;
use crate::recorded::Recorded;
use crate::ssm::MAMBA;

pub(crate) const FAMILY: Family = Family {
    name: "falcon_h1",
    states: &[0, 1, 2],
    rows: &[0, 1, 2],
    shapes: |recorded| MAMBA.shapes(recorded),
    heads: |recorded| {
        let dim = recorded.field("head_dim");
        Some([recorded.field("num_key_value_heads"), dim, dim])
    },
    logits,
};

fn logits(recorded: &Recorded, tokens: &[u32], step: &CandleStep<'_>) -> Result<Tensor> {
    let angles = recorded.angles(step.positions())?;
    let [gate_factor, down_factor]: [f64; 2] = recorded.field("mlp_multipliers");
    let factor = |name: &str| recorded.field::<f64>(&format!("{name}_multiplier"));
    let of_projection = factors(recorded)?;
    let mut x = (recorded.embed("model.embed_tokens.weight", tokens)? * factor("embedding"))?;
    for layer in 0..usize::from(recorded.layers()) {
        let name = |part: &str| format!("model.layers.{layer}.{part}");
        let at = (step, layer);
        let input = recorded.norm(&name("input_layernorm"), MAMBA.epsilon, &x)?;

        let h = recorded.linear(&name("mamba.in_proj"), &(&input * factor("ssm_in"))?)?;
        let h = h.broadcast_mul(&of_projection)?;
        let h = MAMBA.mix(recorded, &name("mamba"), at, &h)?;
        let mixed = (recorded.linear(&name("mamba.out_proj"), &h)? * factor("ssm_out"))?;

        let h = (&input * factor("attention_in"))?;
        let rotation = (Some(&angles), factor("key"));
        let attended = recorded.attend(&name("self_attn"), at, rotation, &h)?;
        x = ((x + mixed)? + (attended * factor("attention_out"))?)?;

        let h = recorded.norm(&name("pre_ff_layernorm"), MAMBA.epsilon, &x)?;
        x = (x + (recorded.swiglu(&name("feed_forward"), gate_factor, &h)? * down_factor)?)?;
    }
    let x = recorded.norm("model.final_layernorm", MAMBA.epsilon, &x)?;
    recorded.linear("lm_head", &x)? * factor("lm_head")
}

/// Returns the factors of what the first projection of a state space model computes: the gates, the
/// inputs, B, C and the time steps have one each.
fn factors(recorded: &Recorded) -> Result<Tensor> {
    let of_groups = recorded.field::<usize>(MAMBA.groups) * recorded.field::<usize>(MAMBA.state);
    let (width, heads) = (recorded.field("mamba_d_ssm"), recorded.field(MAMBA.heads));
    let widths: [usize; 5] = [width, width, of_groups, of_groups, heads];
    let factors: [f32; 5] = recorded.field("ssm_multipliers");
    let factors = factors.iter().zip(widths);
    let factors: Vec<_> = factors.flat_map(|(x, width)| std::iter::repeat_n(*x, width)).collect();
    Tensor::from_slice(&factors, factors.len(), &Device::Cpu)
}
