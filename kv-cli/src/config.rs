//! What a model is, read from its `config.json` and checked before anything is built from it.
use std::fs;
use std::path::Path;

use anyhow::Context;
use serde::Deserialize;

use crate::rope::{Pairing, RopeConfig, Scaling};

/// Shape and constants of a Llama-family model. Every count is at least 1, and heads divide.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ModelConfig {
    pub(crate) layers: u16,
    pub(crate) hidden: u32,
    pub(crate) intermediate: u32,
    pub(crate) heads: u32,
    pub(crate) kv_heads: u32,
    pub(crate) head_dim: u32,
    pub(crate) vocab: u32,
    /// The most tokens one sequence may have.
    pub(crate) context: u32,
    pub(crate) norm_eps: f64,
    /// Whether the embedding is also the output matrix.
    pub(crate) tied: bool,
    pub(crate) attention_bias: bool,
    pub(crate) mlp_bias: bool,
    /// Keys before its own position that a query sees, `None` for all.
    pub(crate) window_left: Option<u32>,
    pub(crate) rope: RopeConfig,
    pub(crate) bos: Option<u32>,
    pub(crate) eos: Vec<u32>,
}

/// A model that is described wrongly, or that this program cannot run.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub(crate) enum ConfigError {
    #[error("{field} is 0, at least 1 is needed")]
    Zero { field: &'static str },
    #[error("{field} is {got}, at most {max} is possible")]
    TooLarge { field: &'static str, got: u32, max: u32 },
    #[error("{field} {got} is not a multiple of {of} {divisor}")]
    NotDivisible { field: &'static str, got: u32, of: &'static str, divisor: u32 },
    #[error("{field} is {got}, a finite number above 0 is needed")]
    NotPositive { field: &'static str, got: f64 },
    #[error("{field} is missing")]
    Missing { field: &'static str },
    #[error("{field} {got:?} is not supported, expected {expected}")]
    Unsupported { field: &'static str, got: String, expected: &'static str },
}

/// `config.json` as it stands in a file.
#[derive(Debug, Deserialize)]
struct Raw {
    model_type: Option<String>,
    hidden_act: Option<String>,
    hidden_size: u32,
    intermediate_size: u32,
    num_hidden_layers: u32,
    num_attention_heads: u32,
    num_key_value_heads: Option<u32>,
    head_dim: Option<u32>,
    vocab_size: u32,
    max_position_embeddings: u32,
    rms_norm_eps: Option<f64>,
    rope_theta: Option<f64>,
    #[serde(alias = "rope_parameters")]
    rope_scaling: Option<RawScaling>,
    partial_rotary_factor: Option<f64>,
    tie_word_embeddings: Option<bool>,
    attention_bias: Option<bool>,
    mlp_bias: Option<bool>,
    sliding_window: Option<u32>,
    bos_token_id: Option<Ids>,
    eos_token_id: Option<Ids>,
}

#[derive(Debug, Deserialize)]
struct RawScaling {
    #[serde(alias = "type")]
    rope_type: Option<String>,
    rope_theta: Option<f64>,
    factor: Option<f64>,
    low_freq_factor: Option<f64>,
    high_freq_factor: Option<f64>,
    original_max_position_embeddings: Option<u32>,
}

/// `generation_config.json`, of which only the stop tokens matter here.
#[derive(Debug, Deserialize)]
struct RawGeneration {
    eos_token_id: Option<Ids>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(untagged)]
enum Ids {
    One(u32),
    Many(Vec<u32>),
}

impl Ids {
    fn into_vec(self) -> Vec<u32> {
        match self {
            Self::One(id) => vec![id],
            Self::Many(ids) => ids,
        }
    }
}

impl ModelConfig {
    /// Reads `config.json` of a model directory, and `generation_config.json` where there is one.
    pub(crate) fn read(dir: &Path) -> anyhow::Result<Self> {
        let path = dir.join("config.json");
        let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        let mut config = Self::parse(&text).with_context(|| path.display().to_string())?;
        let path = dir.join("generation_config.json");
        if path.is_file() {
            let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
            let raw: RawGeneration =
                serde_json::from_str(&text).with_context(|| path.display().to_string())?;
            if let Some(ids) = raw.eos_token_id {
                config.eos = ids.into_vec();
            }
        }
        Ok(config)
    }

    fn parse(text: &str) -> anyhow::Result<Self> {
        let raw: Raw = serde_json::from_str(text)?;
        Ok(raw.check()?)
    }
}

impl Raw {
    fn check(self) -> Result<ModelConfig, ConfigError> {
        expect_one_of("model_type", self.model_type.as_deref(), &["llama", "mistral"])?;
        expect_one_of("hidden_act", self.hidden_act.as_deref(), &["silu", "swish"])?;
        let kv_heads = self.num_key_value_heads.unwrap_or(self.num_attention_heads);
        for (field, n) in [
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_hidden_layers", self.num_hidden_layers),
            ("num_attention_heads", self.num_attention_heads),
            ("num_key_value_heads", kv_heads),
            ("vocab_size", self.vocab_size),
            ("max_position_embeddings", self.max_position_embeddings),
        ] {
            non_zero(field, n)?;
        }
        let head_dim = match self.head_dim {
            Some(dim) => dim,
            None => divide("hidden_size", self.hidden_size, self.num_attention_heads)?,
        };
        bounded("head_dim", head_dim)?;
        divide("num_attention_heads", self.num_attention_heads, kv_heads)?;
        let theta = self.rope_theta.or(self.rope_scaling.as_ref().and_then(|s| s.rope_theta));
        let rope = RopeConfig {
            theta: theta.unwrap_or(10000.0),
            head_dim,
            rotary_dim: rotary_dim(head_dim, self.partial_rotary_factor.unwrap_or(1.0))?,
            pairing: Pairing::Half,
            scaling: self.rope_scaling.as_ref().map_or(Ok(Scaling::None), RawScaling::check)?,
        };
        let window_left = match self.sliding_window {
            Some(window) => Some(non_zero("sliding_window", window)?.saturating_sub(1)),
            None => None,
        };
        ModelConfig {
            layers: layers("num_hidden_layers", self.num_hidden_layers)?,
            hidden: self.hidden_size,
            intermediate: self.intermediate_size,
            heads: self.num_attention_heads,
            kv_heads,
            head_dim,
            vocab: self.vocab_size,
            context: self.max_position_embeddings,
            norm_eps: self.rms_norm_eps.unwrap_or(1e-6),
            tied: self.tie_word_embeddings.unwrap_or(false),
            attention_bias: self.attention_bias.unwrap_or(false),
            mlp_bias: self.mlp_bias.unwrap_or(false),
            window_left,
            rope,
            bos: self.bos_token_id.and_then(|ids| ids.into_vec().first().copied()),
            eos: self.eos_token_id.map(Ids::into_vec).unwrap_or_default(),
        }
        .check()
    }
}

impl ModelConfig {
    /// The checks that hold wherever a configuration came from.
    pub(crate) fn check(self) -> Result<Self, ConfigError> {
        bounded("head_dim", self.head_dim)?;
        divide("rotary_dim", self.rope.rotary_dim, 2)?;
        non_zero("rotary_dim", self.rope.rotary_dim)?;
        positive("rms_norm_eps", self.norm_eps)?;
        positive("rope_theta", self.rope.theta)?;
        Ok(self)
    }
}

impl RawScaling {
    fn check(&self) -> Result<Scaling, ConfigError> {
        let factor = || positive_field("rope_scaling factor", self.factor);
        match self.rope_type.as_deref() {
            None | Some("default") => Ok(Scaling::None),
            Some("linear") => Ok(Scaling::Linear { factor: factor()? }),
            Some("llama3") => {
                let low = positive_field("rope_scaling low_freq_factor", self.low_freq_factor)?;
                let high = positive_field("rope_scaling high_freq_factor", self.high_freq_factor)?;
                let field = "rope_scaling high_freq_factor - low_freq_factor";
                positive(field, high - low)?;
                let field = "rope_scaling original_max_position_embeddings";
                let original = self.original_max_position_embeddings;
                Ok(Scaling::Llama3 {
                    factor: factor()?,
                    low_freq_factor: low,
                    high_freq_factor: high,
                    original_context: non_zero(field, required(field, original)?)?,
                })
            }
            Some(other) => Err(ConfigError::Unsupported {
                field: "rope_scaling type",
                got: other.to_owned(),
                expected: "default, linear or llama3",
            }),
        }
    }
}

fn expect_one_of(
    field: &'static str,
    got: Option<&str>,
    known: &[&str],
) -> Result<(), ConfigError> {
    match got {
        Some(got) if !known.contains(&got) => {
            let expected = if field == "model_type" { "llama or mistral" } else { "silu" };
            Err(ConfigError::Unsupported { field, got: got.to_owned(), expected })
        }
        _ => Ok(()),
    }
}

fn required<T>(field: &'static str, value: Option<T>) -> Result<T, ConfigError> {
    value.ok_or(ConfigError::Missing { field })
}

fn positive_field(field: &'static str, value: Option<f64>) -> Result<f64, ConfigError> {
    positive(field, required(field, value)?)
}

fn positive(field: &'static str, got: f64) -> Result<f64, ConfigError> {
    if got.is_finite() && got > 0.0 {
        Ok(got)
    } else {
        Err(ConfigError::NotPositive { field, got })
    }
}

/// The number, when it is at least 1.
pub(crate) fn non_zero(field: &'static str, n: u32) -> Result<u32, ConfigError> {
    if n == 0 { Err(ConfigError::Zero { field }) } else { Ok(n) }
}

/// The number, when it is at least 1 and small enough that products of a few fit `u64`.
fn bounded(field: &'static str, n: u32) -> Result<u32, ConfigError> {
    let max = 1 << 20;
    if n > max { Err(ConfigError::TooLarge { field, got: n, max }) } else { non_zero(field, n) }
}

/// The number of layers in the type the cache counts them in.
pub(crate) fn layers(field: &'static str, got: u32) -> Result<u16, ConfigError> {
    let max = u32::from(u16::MAX);
    u16::try_from(got).map_err(|_| ConfigError::TooLarge { field, got, max })
}

/// `got / divisor` without a rest; heads are what everything is divided by.
pub(crate) fn divide(field: &'static str, got: u32, divisor: u32) -> Result<u32, ConfigError> {
    let of = match field {
        "hidden_size" => "num_attention_heads",
        "num_attention_heads" => "num_key_value_heads",
        _ => "the number of a pair,",
    };
    match (got.checked_div(divisor), got.checked_rem(divisor)) {
        (Some(quotient), Some(0)) => Ok(quotient),
        _ => Err(ConfigError::NotDivisible { field, got, of, divisor }),
    }
}

/// The part of a row that turns.
fn rotary_dim(head_dim: u32, part: f64) -> Result<u32, ConfigError> {
    positive("partial_rotary_factor", part)?;
    let turning = f64::from(head_dim) * part;
    (0..=head_dim)
        .rev()
        .find(|dim| f64::from(*dim) <= turning)
        .ok_or(ConfigError::NotPositive { field: "partial_rotary_factor", got: part })
}

#[cfg(test)]
mod tests;
