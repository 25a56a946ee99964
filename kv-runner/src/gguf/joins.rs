//! Tensors that GGUF files have in other parts than files of Hugging Face.
use candle_core::Tensor;

use crate::config::{Architecture, DeltaConfig, ExpertsConfig, ModelConfig, Recurrence};
use crate::error::{Error, WeightError};
use crate::num::to_usize;
use crate::weights::Weights;

/// The weights of one layer.
struct Layer<'w> {
    weights: &'w mut Weights,
    index: u16,
    hidden: u32,
}

/// Joins and splits tensors of all layers, so that they are those of Hugging Face.
pub(super) fn restore(config: &ModelConfig, weights: &mut Weights) -> Result<(), Error> {
    let architecture = config.architecture;
    for (kind, layer) in config.layer_kinds.iter().zip(0_u16..) {
        let mut part = Layer { weights, index: layer, hidden: config.hidden };
        part.join_gates(config)?;
        match &config.recurrence {
            Some(Recurrence::Delta(of)) if of.is_fused && !kind.attends => part.fuse_delta(of)?,
            _ => {}
        }
        let has = |of: &&ExpertsConfig| of.layers.get(usize::from(layer)) == Some(&true);
        match config.experts.as_ref().filter(has) {
            Some(of) if architecture == Architecture::GraniteHybrid => part.join_experts(of)?,
            Some(of) => part.split_experts(of)?,
            None => {}
        }
    }
    Ok(())
}

impl Layer<'_> {
    fn name(&self, part: &str) -> String {
        format!("model.layers.{}.{part}.weight", self.index)
    }

    fn contains(&self, part: &str) -> bool {
        self.weights.contains(&self.name(part))
    }

    fn take(&mut self, part: &str, shape: &[u32]) -> Result<Tensor, WeightError> {
        self.weights.take(&self.name(part), shape)
    }

    fn insert(&mut self, part: &str, tensor: Tensor) {
        self.weights.insert(self.name(part), tensor);
    }

    /// Puts gate and up of the MLP into one matrix, where files of Hugging Face have one.
    fn join_gates(&mut self, config: &ModelConfig) -> Result<(), Error> {
        let architecture = config.architecture;
        let names = architecture.weights();
        if let Some(joined) = names.gate_up.filter(|_| !architecture.fuses_projections()) {
            let shape = [config.intermediate, config.hidden];
            let gate = self.take(names.gate, &shape)?;
            let up = self.take(names.up, &shape)?;
            self.insert(joined, Tensor::cat(&[gate, up], 0)?);
        }
        Ok(())
    }

    /// Puts Q, K, V and the gates of a gated delta rule into one matrix, with those of a head of K
    /// beside each other.
    fn fuse_delta(&mut self, of: &DeltaConfig) -> Result<(), Error> {
        const FUSED: &str = "linear_attn.in_proj_qkvz";
        if self.contains(FUSED) {
            return Ok(());
        }
        let qkv = self.take("linear_attn.in_proj_qkv", &[of.channels, self.hidden])?;
        let z = self.take("linear_attn.in_proj_z", &[of.v_width, self.hidden])?;
        let [heads, hidden] = [of.k_heads, self.hidden].map(to_usize);
        let [k_width, v_width] = [of.k_width, of.v_width].map(to_usize);
        let mut begin = 0_usize;
        let mut parts = Vec::new();
        for width in [k_width, k_width, v_width] {
            parts.push(qkv.narrow(0, begin, width)?.reshape((heads, (), hidden))?);
            begin = begin.saturating_add(width);
        }
        parts.push(z.reshape((heads, (), hidden))?);
        self.insert(FUSED, Tensor::cat(&parts, 1)?.reshape(((), hidden))?);
        Ok(())
    }

    /// Takes gate and up of all experts, which some files have in one tensor.
    fn gates_of_experts(
        &mut self,
        of: &ExpertsConfig,
        [gate, up, both]: [&str; 3],
    ) -> Result<[Tensor; 2], Error> {
        if self.contains(both) {
            let wide = WeightError::FusedTooWide { rows: vec![of.width; 2] };
            let rows = of.width.checked_mul(2).ok_or(wide)?;
            let both = self.take(both, &[of.count, rows, self.hidden])?;
            let width = to_usize(of.width);
            return Ok([both.narrow(1, 0, width)?, both.narrow(1, width, width)?]);
        }
        let shape = [of.count, of.width, self.hidden];
        Ok([self.take(gate, &shape)?, self.take(up, &shape)?])
    }

    /// Gives each expert tensors of its own.
    fn split_experts(&mut self, of: &ExpertsConfig) -> Result<(), Error> {
        let names =
            ["gate_proj", "up_proj", "gate_up_proj"].map(|part| format!("mlp.experts.{part}"));
        let [gate, up] = self.gates_of_experts(of, names.each_ref().map(String::as_str))?;
        let down = self.take("mlp.experts.down_proj", &[of.count, self.hidden, of.width])?;
        for (part, all) in [("gate_proj", gate), ("up_proj", up), ("down_proj", down)] {
            for index in 0..of.count {
                let own = all.get(to_usize(index))?.contiguous()?;
                self.insert(&format!("mlp.experts.{index}.{part}"), own);
            }
        }
        Ok(())
    }

    /// Puts gate and up of all experts into one tensor.
    fn join_experts(&mut self, of: &ExpertsConfig) -> Result<(), Error> {
        const BOTH: &str = "block_sparse_moe.input_linear";
        if !self.contains(BOTH) {
            let names = ["block_sparse_moe.gate", "block_sparse_moe.up", BOTH];
            let gates = self.gates_of_experts(of, names)?;
            self.insert(BOTH, Tensor::cat(&gates, 1)?);
        }
        Ok(())
    }
}
