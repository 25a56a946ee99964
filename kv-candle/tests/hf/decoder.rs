//! A decoder of three families, which leaves attention to the cache.
use candle_core::{D, Device, Result, Tensor};
use candle_nn::ops::{rms_norm, sigmoid};
use candle_nn::rotary_emb::rope_thd;
use kv_candle::CandleStep;
use kv_candle::kv::AttentionOptions;

use crate::recorded::Recorded;

/// A family of models.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Family {
    Mistral,
    Gemma2,
    GptOss,
}

/// What the decoder tells the cache about attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reading {
    /// What the configuration means.
    Right,
    /// A window of one token more.
    WiderWindow,
    NoWindow,
    NoSoftCap,
    NoSinkLogits,
}

/// A model of some family with its weights.
pub(crate) struct Decoder<'a> {
    recorded: &'a Recorded,
    family: Family,
    /// Logits of the sinks of every layer.
    sink_logits: Vec<Vec<f32>>,
}

impl<'a> Decoder<'a> {
    pub(crate) fn new(recorded: &'a Recorded) -> Result<Self> {
        let family = match recorded.config["model_type"].as_str().unwrap() {
            "mistral" => Family::Mistral,
            "gemma2" => Family::Gemma2,
            "gpt_oss" => Family::GptOss,
            other => panic!("{other}"),
        };
        let mut decoder = Self { recorded, family, sink_logits: Vec::new() };
        if family == Family::GptOss {
            let sinks = |layer| recorded.weight(&format!("model.layers.{layer}.self_attn.sinks"));
            let sinks = (0..recorded.layers()).map(|layer| sinks(layer).to_vec1());
            decoder.sink_logits = sinks.collect::<Result<_>>()?;
        }
        Ok(decoder)
    }

    /// Returns the logits after every token of a step, `[t, vocabulary]`.
    pub(crate) fn logits(
        &self,
        tokens: &[u32],
        step: &CandleStep<'_>,
        reading: Reading,
    ) -> Result<Tensor> {
        let angles = self.recorded.angles(step.positions())?;
        let embedding = self.recorded.weight("model.embed_tokens.weight");
        let mut x = embedding.index_select(&Tensor::new(tokens, &Device::Cpu)?, 0)?;
        if self.family == Family::Gemma2 {
            x = (x * self.recorded.field::<f64>("hidden_size").sqrt())?;
        }
        for layer in 0..self.recorded.layers() {
            let name = |part: &str| format!("model.layers.{layer}.{part}");
            let h = self.norm(&name("input_layernorm"), &x)?;
            let h = self.attention(layer, &h, &angles, step, reading)?;
            if self.family == Family::Gemma2 {
                x = (x + self.norm(&name("post_attention_layernorm"), &h)?)?;
                let h = self.norm(&name("pre_feedforward_layernorm"), &x)?;
                let h = self.gated(&name("mlp"), &h)?;
                x = (x + self.norm(&name("post_feedforward_layernorm"), &h)?)?;
            } else {
                x = (x + h)?;
                let h = self.norm(&name("post_attention_layernorm"), &x)?;
                let is_mistral = self.family == Family::Mistral;
                let h =
                    if is_mistral { self.gated(&name("mlp"), &h) } else { self.expert(layer, &h) };
                x = (x + h?)?;
            }
        }
        let x = self.norm("model.norm", &x)?;
        if self.family == Family::Gemma2 {
            let cap: f64 = self.recorded.field("final_logit_softcapping");
            return (x.matmul(&embedding.t()?)? / cap)?.tanh()? * cap;
        }
        self.recorded.linear("lm_head", &x)
    }

    fn attention(
        &self,
        layer: u16,
        hidden: &Tensor,
        (cos, sin): &(Tensor, Tensor),
        step: &CandleStep<'_>,
        reading: Reading,
    ) -> Result<Tensor> {
        let (tokens, dim) = (hidden.dim(0)?, self.recorded.field::<usize>("head_dim"));
        let name = |part: &str| format!("model.layers.{layer}.self_attn.{part}_proj");
        let heads =
            |part: &str| self.recorded.linear(&name(part), hidden)?.reshape((tokens, (), dim));
        let rotated = |part: &str| rope_thd(&heads(part)?.unsqueeze(0)?, cos, sin)?.squeeze(0);
        let (q, k, v) = (rotated("q")?, rotated("k")?, heads("v")?);
        let (layer_id, options) = (layer.into(), self.options(layer, reading));
        let out = if step.last_rows().dim(0)? == 1 {
            // One sequence: heads before tokens, as in most of candle's models.
            let batched = |tensor: Tensor| tensor.unsqueeze(0)?.transpose(1, 2);
            let (q, k, v) = (batched(q)?, batched(k)?, batched(v)?);
            step.attend_bhsd(layer_id, &q, &k, &v, &options)?
        } else {
            step.attend(layer_id, &q, &k, &v, &options)?
        };
        self.recorded.linear(&name("o"), &out.reshape((tokens, ()))?)
    }

    /// Reads what the configuration says about the attention of a layer.
    fn options(&self, layer: u16, reading: Reading) -> AttentionOptions<'_> {
        let over = if self.family == Family::Gemma2 { "query_pre_attn_scalar" } else { "head_dim" };
        let mut options = AttentionOptions::causal(self.recorded.field::<f32>(over).sqrt().recip());
        options = match (self.recorded.window_left(layer), reading) {
            (None, _) | (_, Reading::NoWindow) => options,
            (Some(left), Reading::WiderWindow) => options.with_window_left(left + 1),
            (Some(left), _) => options.with_window_left(left),
        };
        if self.family == Family::Gemma2 && reading != Reading::NoSoftCap {
            options = options.with_soft_cap(self.recorded.field("attn_logit_softcapping"));
        }
        match self.sink_logits.get(usize::from(layer)) {
            Some(logits) if reading != Reading::NoSinkLogits => options.with_sink_logits(logits),
            _ => options,
        }
    }

    fn norm(&self, name: &str, x: &Tensor) -> Result<Tensor> {
        let weight = self.recorded.weight(&format!("{name}.weight"));
        let epsilon = self.recorded.field("rms_norm_eps");
        let is_gemma = self.family == Family::Gemma2;
        rms_norm(x, &if is_gemma { (weight + 1.0)? } else { weight.clone() }, epsilon)
    }

    fn gated(&self, name: &str, x: &Tensor) -> Result<Tensor> {
        let gate = self.recorded.linear(&format!("{name}.gate_proj"), x)?;
        let gate = if self.family == Family::Gemma2 { gate.gelu()? } else { gate.silu()? };
        let up = self.recorded.linear(&format!("{name}.up_proj"), x)?;
        self.recorded.linear(&format!("{name}.down_proj"), &(gate * up)?)
    }

    /// Computes the only expert of a layer: values of gate and up alternate.
    fn expert(&self, layer: u16, x: &Tensor) -> Result<Tensor> {
        let (alpha, limit): (f64, f64) =
            (self.recorded.field("swiglu_alpha"), self.recorded.field("swiglu_limit"));
        let apply = |part: &str, x: &Tensor| -> Result<Tensor> {
            let name = format!("model.layers.{layer}.mlp.experts.{part}_proj");
            let y = x.matmul(&self.recorded.weight(&name).squeeze(0)?)?;
            y.broadcast_add(self.recorded.weight(&format!("{name}_bias")))
        };
        let pairs = apply("gate_up", x)?.reshape((x.dim(0)?, (), 2))?;
        let gate = pairs.narrow(D::Minus1, 0, 1)?.squeeze(D::Minus1)?.minimum(limit)?;
        let up = pairs.narrow(D::Minus1, 1, 1)?.squeeze(D::Minus1)?.clamp(-limit, limit)?;
        let gate = (&gate * sigmoid(&(&gate * alpha)?)?)?;
        apply("down", &(gate * (up + 1.0)?)?)
    }
}
