//! The gated delta rule behind a convolution (Yang et al., "Gated Delta Networks", 2024), in its
//! recurrent form.
use candle_core::{Module, Tensor};
use candle_nn::Linear;
use kv::backend::Backend;
use kv_candle::CandleStep;

use super::conv::CausalConv;
use super::part::Part;
use super::recurrent::{State, inverse_rms, row, run, sigmoid, silu, softplus, values};
use crate::config::{DeltaConfig, ModelConfig};
use crate::error::Error;
use crate::num::{to_f32, to_usize};

/// Added to the squares of a row of Q or K before it is normalised.
const EPS: f32 = 1e-6;

/// The weights of a gated delta rule.
#[derive(Debug)]
pub(super) struct Delta {
    of: DeltaConfig,
    /// Q, K and V; the gates of the output; the decays; the rates.
    pub(super) qkv: Vec<Linear>,
    pub(super) z: Linear,
    pub(super) a: Linear,
    pub(super) b: Linear,
    pub(super) conv: CausalConv,
    /// Logarithms of decays, biases of their exponents, and the norm of a head.
    pub(super) decay_log: Vec<f32>,
    pub(super) decay_bias: Vec<f32>,
    pub(super) norm: Vec<f32>,
    pub(super) out: Linear,
    norm_eps: f32,
}

/// Projections of the tokens of a step.
struct Inputs {
    qkv: Vec<Vec<f32>>,
    z: Vec<f32>,
    a: Vec<f32>,
    b: Vec<f32>,
}

impl Delta {
    pub(super) fn build(
        config: &ModelConfig,
        part: &mut Part<'_>,
        of: DeltaConfig,
    ) -> Result<Self, Error> {
        let hidden = config.hidden;
        let DeltaConfig { k_heads, v_heads, k_dim, v_dim, v_width, .. } = of;
        let (qkv, z, a, b) = if of.is_fused {
            // The heads of V that a head of K serves lie beside it.
            let [shared, values] = [v_heads / k_heads, v_width / k_heads];
            let widths = (k_heads, [k_dim, k_dim, values, values]);
            let [qkv @ .., z] =
                part.split::<4>("linear_attn.in_proj_qkvz", widths, hidden, false)?;
            let widths = (k_heads, [shared; 2]);
            let [b, a] = part.split("linear_attn.in_proj_ba", widths, hidden, false)?;
            (Vec::from(qkv), z, a, b)
        } else {
            let mut linear = |name, out| part.linear(name, out, hidden, false);
            let qkv = linear("linear_attn.in_proj_qkv", of.channels)?;
            let z = linear("linear_attn.in_proj_z", v_width)?;
            let a = linear("linear_attn.in_proj_a", v_heads)?;
            (vec![qkv], z, a, linear("linear_attn.in_proj_b", v_heads)?)
        };
        let conv = (of.channels, of.kernel);
        Ok(Self {
            of,
            qkv,
            z,
            a,
            b,
            conv: CausalConv::build(part, "linear_attn.conv1d", conv, false)?,
            decay_log: part.values("linear_attn.A_log", &[v_heads])?,
            decay_bias: part.values("linear_attn.dt_bias", &[v_heads])?,
            norm: part.values("linear_attn.norm.weight", &[v_dim])?,
            out: part.linear("linear_attn.out_proj", hidden, v_width, false)?,
            norm_eps: to_f32(config.norm_eps),
        })
    }

    pub(super) fn forward<B: Backend>(
        &self,
        step: &CandleStep<'_, B>,
        layer: u16,
        h: &Tensor,
    ) -> Result<Tensor, Error> {
        let project = |linear: &Linear| values(&linear.forward(h)?);
        let inputs = Inputs {
            qkv: self.qkv.iter().map(project).collect::<candle_core::Result<_>>()?,
            z: project(&self.z)?,
            a: project(&self.a)?,
            b: project(&self.b)?,
        };
        let width = to_usize(self.of.v_width);
        let mixed = run(step, layer, 2, width, |at, state, out| {
            self.advance(&inputs, at, state, out);
        })?;
        Ok(self.out.forward(&mixed)?)
    }

    /// Computes one token.
    fn advance(&self, inputs: &Inputs, at: usize, state: &mut State<'_>, out: &mut [f32]) {
        let DeltaConfig { k_heads, v_heads, k_dim, v_dim, k_width, v_width, channels, .. } =
            self.of;
        let shared = to_usize(v_heads / k_heads);
        let [k_dim, v_dim, k_width] = [k_dim, v_dim, k_width].map(to_usize);
        let [heads, channels, v_width] = [v_heads, channels, v_width].map(to_usize);
        let widths: &[usize] =
            if self.of.is_fused { &[k_width, k_width, v_width] } else { &[channels] };
        let qkv = inputs.qkv.iter().zip(widths);
        let qkv = qkv.flat_map(|(values, width)| row(values, at, *width)).copied();
        let mut mixed = self.conv.advance(state.window, qkv);
        for x in &mut mixed {
            *x = silu(*x);
        }
        let (q, rest) = mixed.split_at(k_width);
        let (k, v) = rest.split_at(k_width);
        let scale = 1.0 / to_f32(f64::from(self.of.k_dim)).sqrt();
        let unit = |rows: &[f32], scale: f32| -> Vec<Vec<f32>> {
            let unit = |row: &[f32]| {
                let squares: f32 = row.iter().map(|x| x * x).sum();
                let factor = scale / (squares + EPS).sqrt();
                row.iter().map(|x| x * factor).collect()
            };
            rows.chunks_exact(k_dim).map(unit).collect()
        };
        // Each head of Q and K serves several of V, one after another.
        let keys = unit(k, 1.0);
        let queries = unit(q, scale);
        let keys = queries.iter().zip(&keys);
        let keys = keys.flat_map(|pair| std::iter::repeat_n(pair, shared));
        let rates = row(&inputs.b, at, heads).iter().map(|b| sigmoid(*b));
        let exponents = row(&inputs.a, at, heads).iter().zip(&self.decay_bias);
        let decays = exponents
            .zip(&self.decay_log)
            .map(|((a, bias), log)| (-log.exp() * softplus(a + bias)).exp());
        let matrices = state.matrix.chunks_exact_mut(k_dim * v_dim);
        let heads = matrices.zip(v.chunks_exact(v_dim)).zip(keys).zip(decays.zip(rates));
        for ((((matrix, v), (q, k)), (decay, rate)), out) in heads.zip(out.chunks_exact_mut(v_dim))
        {
            step_of_head(matrix, (q, k, v), (decay, rate), out);
        }
        let gates = row(&inputs.z, at, v_width).chunks_exact(v_dim);
        for (out, gates) in out.chunks_exact_mut(v_dim).zip(gates) {
            let scale = inverse_rms(out, self.norm_eps);
            for ((x, weight), gate) in out.iter_mut().zip(&self.norm).zip(gates) {
                *x *= scale * weight * silu(*gate);
            }
        }
    }
}

/// Updates the matrix of a head, `[k_dim, v_dim]`: it forgets, then learns the difference between V
/// and what it has under K. Writes what it has under Q.
fn step_of_head(
    matrix: &mut [f32],
    (q, k, v): (&[f32], &[f32], &[f32]),
    (decay, rate): (f32, f32),
    out: &mut [f32],
) {
    for x in &mut *matrix {
        *x *= decay;
    }
    let mut known = vec![0.0_f32; v.len()];
    for (row, k) in matrix.chunks_exact(v.len()).zip(k) {
        known.iter_mut().zip(row).for_each(|(sum, x)| *sum += x * k);
    }
    let learned: Vec<_> = v.iter().zip(&known).map(|(v, known)| (v - known) * rate).collect();
    out.fill(0.0);
    for (row, (k, q)) in matrix.chunks_exact_mut(v.len()).zip(k.iter().zip(q)) {
        for ((x, learned), out) in row.iter_mut().zip(&learned).zip(&mut *out) {
            *x += k * learned;
            *out += *x * q;
        }
    }
}
