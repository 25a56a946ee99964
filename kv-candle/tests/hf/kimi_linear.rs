//! Kimi Linear: one layer has latent attention without RoPE, whose keys are longer than its values;
//! the others have a delta rule in which every channel of a key decays by itself.
use candle_core::{D, Result, Tensor};
use candle_nn::ops::rms_norm;
use kv_candle::CandleStep;
use kv_candle::kv::AttentionOptions;

use crate::hybrids::Family;
use crate::recorded::Recorded;
use crate::recurrence::{convolve, inverse_rms, run, sigmoid, softplus};

pub(crate) const FAMILY: Family = Family {
    name: "kimi_linear",
    states: &[0, 1, 3],
    rows: &[2],
    shapes,
    heads: |recorded| {
        let k_dim = recorded.field::<u32>("qk_nope_head_dim") + recorded.field::<u32>(ROPE);
        Some([recorded.field("num_key_value_heads"), k_dim, recorded.field("v_head_dim")])
    },
    logits,
};

const EPSILON: &str = "rms_norm_eps";
/// Values of a key that all heads share, and that other models rotate.
const ROPE: &str = "qk_rope_head_dim";
/// Added to the squares of a row of Q or K before it is normalised, and in the norm of latents.
const SMALL: f32 = 1e-6;

/// Returns the shapes of a state: the windows of Q, K and V, and a matrix for every head.
fn shapes(recorded: &Recorded) -> Vec<Vec<u32>> {
    let [heads, dim, kernel] = ["linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim"]
        .map(|name| recorded.field(name));
    vec![vec![3 * heads * dim, kernel - 1], vec![heads, dim, dim]]
}

fn logits(recorded: &Recorded, tokens: &[u32], step: &CandleStep<'_>) -> Result<Tensor> {
    let kinds: Vec<String> = recorded.field("layer_types");
    let mut x = recorded.embed("model.embed_tokens.weight", tokens)?;
    for (layer, kind) in kinds.iter().enumerate() {
        let name = |part: &str| format!("model.layers.{layer}.{part}");
        let at = (step, layer);
        let h = recorded.norm(&name("input_layernorm"), EPSILON, &x)?;
        let h = match kind.as_str() {
            "linear_attention" => delta(recorded, &name("self_attn"), at, &h)?,
            "full_attention" => latent(recorded, &name("self_attn"), at, &h)?,
            other => panic!("{other}"),
        };
        x = (x + h)?;
        let h = recorded.norm(&name("post_attention_layernorm"), EPSILON, &x)?;
        x = (x + recorded.swiglu(&name("mlp"), 1.0, &h)?)?;
    }
    let x = recorded.norm("model.norm", EPSILON, &x)?;
    recorded.linear("lm_head", &x)
}

/// Computes latent attention; the cache has keys and values of every head.
fn latent(
    recorded: &Recorded,
    name: &str,
    (step, layer): (&CandleStep<'_>, usize),
    x: &Tensor,
) -> Result<Tensor> {
    let tokens = x.dim(0)?;
    let [heads, shared, rank, nope, v_dim] =
        ["num_attention_heads", ROPE, "kv_lora_rank", "qk_nope_head_dim", "v_head_dim"]
            .map(|name| recorded.field::<usize>(name));
    let part = |part: &str| format!("{name}.{part}");
    let q = recorded.linear(&part("q_proj"), x)?.reshape((tokens, heads, nope + shared))?;
    let latents = recorded.linear(&part("kv_a_proj_with_mqa"), x)?;
    let kv = latents.narrow(D::Minus1, 0, rank)?.contiguous()?;
    let kv = rms_norm(&kv, recorded.weight(&part("kv_a_layernorm.weight")), SMALL)?;
    let kv = recorded.linear(&part("kv_b_proj"), &kv)?.reshape((tokens, heads, nope + v_dim))?;
    let of_all = latents.narrow(D::Minus1, rank, shared)?.unsqueeze(1)?;
    let of_all = of_all.broadcast_as((tokens, heads, shared))?;
    let k = Tensor::cat(&[kv.narrow(2, 0, nope)?, of_all], 2)?.contiguous()?;
    let v = kv.narrow(2, nope, v_dim)?.contiguous()?;
    let dim = f32::from(u16::try_from(nope + shared).unwrap());
    let options = AttentionOptions::causal(dim.sqrt().recip());
    recorded.linear(&part("o_proj"), &step.attend(layer, &q, &k, &v, &options)?)
}

/// Computes the delta rule, one token at a time.
fn delta(
    recorded: &Recorded,
    name: &str,
    at: (&CandleStep<'_>, usize),
    x: &Tensor,
) -> Result<Tensor> {
    let [heads, dim] =
        ["linear_num_heads", "linear_head_dim"].map(|name| recorded.field::<usize>(name));
    let width = heads * dim;
    let part = |part: &str| format!("{name}.{part}");
    let project = |parts: &[&str]| -> Result<Vec<Vec<f32>>> {
        let project = |x: Tensor, of: &&str| recorded.linear(&part(of), &x);
        parts.iter().try_fold(x.clone(), project)?.to_vec2()
    };
    let qkv = [project(&["q_proj"])?, project(&["k_proj"])?, project(&["v_proj"])?];
    let decays = project(&["forget_gate.f_a_proj", "forget_gate.f_b_proj"])?;
    let (rates, gates) = (project(&["b_proj"])?, project(&["g_a_proj", "g_b_proj"])?);
    let conv = recorded.values(&part("conv1d.weight"))?;
    let logs = recorded.values(&part("forget_gate.A_log"))?;
    let biases = recorded.values(&part("forget_gate.dt_bias"))?;
    let norm = recorded.values(&part("o_norm.weight"))?;
    let epsilon = recorded.field(EPSILON);
    let scale = f32::from(u16::try_from(dim).unwrap()).sqrt().recip();
    let mixed = run(at, 2, width, |row, state, out| {
        let [windows, matrices] = state else { panic!("two parts") };
        let inputs: Vec<_> = qkv.iter().flat_map(|part| part[row].iter().copied()).collect();
        let mixed = convolve(windows, &inputs, &conv, &[]);
        for head in 0..heads {
            let begin = head * dim;
            let of_head = |part: usize| &mixed[part * width + begin..][..dim];
            let (q, k, v) = (unit(of_head(0), scale), unit(of_head(1), 1.0), of_head(2));
            let matrix = &mut matrices[begin * dim..][..dim * dim];
            for (channel, row_of_key) in matrix.chunks_mut(dim).enumerate() {
                let at = begin + channel;
                let decay = (-logs[head].exp() * softplus(decays[row][at] + biases[at])).exp();
                for kept in row_of_key {
                    *kept *= decay;
                }
            }
            let rate = sigmoid(rates[row][head]);
            let out = &mut out[begin..][..dim];
            for value in 0..dim {
                let mut known = 0.0;
                for channel in 0..dim {
                    known += matrix[channel * dim + value] * k[channel];
                }
                let learned = (v[value] - known) * rate;
                for channel in 0..dim {
                    let kept = &mut matrix[channel * dim + value];
                    *kept += k[channel] * learned;
                    out[value] += *kept * q[channel];
                }
            }
            let factor = inverse_rms(out, epsilon);
            for (value, x) in out.iter_mut().enumerate() {
                *x *= factor * norm[value] * sigmoid(gates[row][begin + value]);
            }
        }
    })?;
    recorded.linear(&part("o_proj"), &mixed)
}

/// Returns a row of the length `scale`.
fn unit(row: &[f32], scale: f32) -> Vec<f32> {
    let squares: f32 = row.iter().map(|x| x * x).sum();
    row.iter().map(|x| x * scale / (squares + SMALL).sqrt()).collect()
}
