//! The state space model of Mamba 2, one token at a time.
use candle_core::{Result, Tensor};
use kv_candle::CandleStep;

use crate::recorded::Recorded;
use crate::recurrence::{convolve, inverse_rms, run, silu, softplus};

/// Names of the extents in the configuration of a family.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Extents {
    pub(crate) heads: &'static str,
    pub(crate) head_dim: &'static str,
    pub(crate) groups: &'static str,
    pub(crate) state: &'static str,
    pub(crate) kernel: &'static str,
    pub(crate) epsilon: &'static str,
}

/// The extents of Bamba and of Falcon-H1.
pub(crate) const MAMBA: Extents = Extents {
    heads: "mamba_n_heads",
    head_dim: "mamba_d_head",
    groups: "mamba_n_groups",
    state: "mamba_d_state",
    kernel: "mamba_d_conv",
    epsilon: "rms_norm_eps",
};

impl Extents {
    /// Returns the shapes of a state: the windows of the convolution, and a matrix for every head.
    pub(crate) fn shapes(&self, recorded: &Recorded) -> Vec<Vec<u32>> {
        let [heads, dim, groups, state, kernel] =
            [self.heads, self.head_dim, self.groups, self.state, self.kernel]
                .map(|name| recorded.field(name));
        vec![vec![heads * dim + 2 * groups * state, kernel - 1], vec![heads, dim, state]]
    }

    /// Computes a layer behind its first projection, `projected`, and in front of its last one.
    pub(crate) fn mix(
        &self,
        recorded: &Recorded,
        name: &str,
        at: (&CandleStep<'_>, usize),
        projected: &Tensor,
    ) -> Result<Tensor> {
        // Falcon-H1 may have none.
        let weight = format!("{name}.norm.weight");
        let has_norm = recorded.weights.contains_key(&weight);
        let norm = if has_norm { Some(recorded.values(&weight)?) } else { None };
        self.mix_with(recorded, name, at, projected, norm.as_deref())
    }

    /// Does what [`Self::mix`] does up to the norm of a group.
    pub(crate) fn mix_without_norm(
        &self,
        recorded: &Recorded,
        name: &str,
        at: (&CandleStep<'_>, usize),
        projected: &Tensor,
    ) -> Result<Tensor> {
        self.mix_with(recorded, name, at, projected, None)
    }

    fn mix_with(
        &self,
        recorded: &Recorded,
        name: &str,
        at: (&CandleStep<'_>, usize),
        projected: &Tensor,
        norm: Option<&[f32]>,
    ) -> Result<Tensor> {
        let [heads, dim, groups, state_dim] = [self.heads, self.head_dim, self.groups, self.state]
            .map(|name| recorded.field::<usize>(name));
        let (width, shared) = (heads * dim, heads / groups);
        let values = |part: &str| recorded.values(&format!("{name}.{part}"));
        let [conv, conv_bias] = [values("conv1d.weight")?, values("conv1d.bias")?];
        let [logs, skips, biases] = [values("A_log")?, values("D")?, values("dt_bias")?];
        let epsilon = recorded.field(self.epsilon);
        let rows: Vec<Vec<f32>> = projected.to_vec2()?;
        run(at, 2, width, |row, state, out| {
            let [windows, matrices] = state else { panic!("two parts") };
            let (gates, rest) = rows[row].split_at(width);
            let (inputs, steps) = rest.split_at(rest.len() - heads);
            let mixed = convolve(windows, inputs, &conv, &conv_bias);
            let (x, rest) = mixed.split_at(width);
            let (b, c) = rest.split_at(groups * state_dim);
            for head in 0..heads {
                let step = softplus(steps[head] + biases[head]);
                let decay = (-logs[head].exp() * step).exp();
                let group = head / shared * state_dim;
                for at in head * dim..(head + 1) * dim {
                    let mut sum = x[at] * skips[head];
                    for value in 0..state_dim {
                        let kept = &mut matrices[at * state_dim + value];
                        *kept = *kept * decay + step * b[group + value] * x[at];
                        sum += *kept * c[group + value];
                    }
                    out[at] = sum * silu(gates[at]);
                }
            }
            if let Some(norm) = norm {
                for (out, norm) in out.chunks_mut(width / groups).zip(norm.chunks(width / groups)) {
                    let factor = inverse_rms(out, epsilon);
                    out.iter_mut().zip(norm).for_each(|(x, weight)| *x *= factor * weight);
                }
            }
        })
    }
}
