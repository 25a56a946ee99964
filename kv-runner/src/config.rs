//! The configuration of a model, read from its `config.json` and checked before anything is built.
mod file;
mod rope;

use std::fmt;
use std::path::Path;

use kv::engine::Limits;

use crate::error::{ConfigError, Error, InFile};
use crate::geometry::{LayerGeometry, ModelGeometry, divide, non_zero};
use crate::num::to_u64;
use crate::object::Object;
use crate::rope::{RopeConfig, Scaling};
use crate::text_file::read_text;

/// Architectures that [`Decoder`](crate::Decoder) runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Architecture {
    Llama,
    Mistral,
    Qwen2,
    Qwen3,
    Phi3,
    Olmo2,
    Granite,
    SmolLm3,
}

impl Architecture {
    /// All architectures, with their `model_type` and the class that an entry of `architectures`
    /// names.
    const ALL: [(Self, &str, &str); 8] = [
        (Self::Llama, "llama", "LlamaForCausalLM"),
        (Self::Mistral, "mistral", "MistralForCausalLM"),
        (Self::Qwen2, "qwen2", "Qwen2ForCausalLM"),
        (Self::Qwen3, "qwen3", "Qwen3ForCausalLM"),
        (Self::Phi3, "phi3", "Phi3ForCausalLM"),
        (Self::Olmo2, "olmo2", "Olmo2ForCausalLM"),
        (Self::Granite, "granite", "GraniteForCausalLM"),
        (Self::SmolLm3, "smollm3", "SmolLM3ForCausalLM"),
    ];

    /// The supported architectures, for errors.
    const NAMES: &str = "llama, mistral, qwen2, qwen3, phi3, olmo2, granite or smollm3";

    /// Returns the architecture of a `model_type`.
    pub(crate) fn of_model_type(name: &str) -> Option<Self> {
        Self::ALL.iter().find(|(_, model_type, _)| *model_type == name).map(|(known, ..)| *known)
    }

    /// Returns the architecture of an entry of `architectures`.
    fn of_class(name: &str) -> Option<Self> {
        Self::ALL.iter().find(|(.., class)| *class == name).map(|(known, ..)| *known)
    }

    /// Returns its `model_type`.
    pub(crate) fn name(self) -> &'static str {
        let known = Self::ALL.iter().find(|(known, ..)| *known == self);
        known.map_or("", |(_, model_type, _)| model_type)
    }

    /// Returns whether norms follow attention and MLP instead of preceding them.
    pub(crate) fn norms_outputs(self) -> bool {
        self == Self::Olmo2
    }

    /// Returns whether Q, K and V come from one matrix, and gate and up from another.
    pub(crate) fn fuses_projections(self) -> bool {
        self == Self::Phi3
    }

    /// Returns the norm of Q and K before their rotation.
    pub(crate) fn qk_norm(self) -> Option<QkNorm> {
        match self {
            Self::Qwen3 => Some(QkNorm::Head),
            Self::Olmo2 => Some(QkNorm::Projection),
            _ => None,
        }
    }
}

impl fmt::Display for Architecture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The extent of a norm of Q or K.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum QkNorm {
    /// The row of one head, with weights that all heads share.
    Head,
    /// The rows of all heads.
    Projection,
}

/// The projections that have a bias.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Biases {
    pub(crate) qkv: bool,
    pub(crate) out: bool,
    pub(crate) mlp: bool,
}

/// Constant factors between the parts of a model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Multipliers {
    /// Factor of the embedding.
    pub(crate) embedding: f64,
    /// Factor of the products of Q and K; `None` for one over the root of the head dim.
    pub(crate) attention: Option<f64>,
    /// Factor of the outputs of attention and MLP.
    pub(crate) residual: f64,
    /// Divisor of the logits.
    pub(crate) logits: f64,
}

impl Default for Multipliers {
    fn default() -> Self {
        Self { embedding: 1.0, attention: None, residual: 1.0, logits: 1.0 }
    }
}

/// Settings that differ between layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LayerKind {
    /// Keys before its own position that a query sees, `None` for all.
    pub(crate) window_left: Option<u32>,
    /// Whether Q and K are rotated by their positions.
    pub(crate) rotates: bool,
}

impl ModelGeometry {
    /// Returns the settings of all layers, with their rotations.
    pub(crate) fn layer_kinds(&self, rotates: impl IntoIterator<Item = bool>) -> Vec<LayerKind> {
        let kind = |(layer, rotates): (&LayerGeometry, bool)| LayerKind {
            // Both readers take a window of 0 for none.
            window_left: layer.window.map(|window| window - 1),
            rotates,
        };
        self.layers.iter().zip(rotates).map(kind).collect()
    }
}

/// Shape and constants of a decoder. Every count is at least 1, and heads divide evenly.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    pub(crate) architecture: Architecture,
    /// One entry per layer.
    pub(crate) layer_kinds: Vec<LayerKind>,
    pub(crate) hidden: u32,
    pub(crate) intermediate: u32,
    pub(crate) heads: u32,
    pub(crate) kv_heads: u32,
    pub(crate) head_dim: u32,
    pub(crate) vocab: u32,
    pub(crate) context: u32,
    pub(crate) norm_eps: f64,
    /// Whether the embedding is also the output matrix.
    pub(crate) tied: bool,
    pub(crate) biases: Biases,
    pub(crate) multipliers: Multipliers,
    pub(crate) rope: RopeConfig,
    pub(crate) bos: Option<u32>,
    pub(crate) eos: Vec<u32>,
}

impl ModelConfig {
    /// Reads `config.json` of a model directory, and `generation_config.json` if it exists.
    ///
    /// # Errors
    /// [`Error::File`] with the cause: [`Error::Io`], [`Error::Text`], [`Error::Json`],
    /// [`Error::Config`].
    pub fn read(dir: &Path) -> Result<Self, Error> {
        let path = dir.join("config.json");
        let text = read_text(&path)?;
        let mut config = Self::parse(&text).in_file(&path)?;
        let path = dir.join("generation_config.json");
        if path.is_file() {
            let text = read_text(&path)?;
            let eos = Self::parse_generation(&text).in_file(&path)?;
            config.eos = eos.unwrap_or(config.eos);
        }
        Ok(config)
    }

    pub(crate) fn parse(text: &str) -> Result<Self, Error> {
        let value = serde_json::from_str(text)?;
        Ok(file::model(&Object::new("", &value)?)?)
    }

    /// Returns the stop tokens of `generation_config.json`, if it has any.
    fn parse_generation(text: &str) -> Result<Option<Vec<u32>>, Error> {
        let value = serde_json::from_str(text)?;
        Ok(Object::new("", &value)?.ids("eos_token_id")?)
    }

    /// Returns the number of kv heads.
    pub fn kv_heads(&self) -> u32 {
        self.kv_heads
    }

    /// Returns the head dim.
    pub fn head_dim(&self) -> u32 {
        self.head_dim
    }

    /// Returns the longest sequence, in tokens.
    pub fn context(&self) -> u32 {
        self.context
    }

    /// Returns the token that begins a text, if the model has one.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// Returns the tokens that end a text.
    pub fn eos(&self) -> &[u32] {
        &self.eos
    }

    /// Returns the limits of an engine for the model: its context, vocabulary and stop tokens, and
    /// otherwise those of [`Limits::new`].
    pub fn limits(&self) -> Limits {
        Limits { vocab: Some(self.vocab), stop: self.eos.clone(), ..Limits::new(self.context) }
    }

    /// Returns the number of layers.
    pub fn layers(&self) -> u16 {
        // A geometry has no more layers.
        u16::try_from(self.layer_kinds.len()).unwrap_or(u16::MAX)
    }

    /// Returns the factor of the products of Q and K.
    pub(crate) fn attention_scale(&self) -> f64 {
        self.multipliers.attention.unwrap_or_else(|| 1.0 / f64::from(self.head_dim).sqrt())
    }

    /// Checks a configuration from any file format.
    pub(crate) fn check(self) -> Result<Self, ConfigError> {
        divide(("rotary_dim", self.rope.rotary_dim), PAIR)?;
        non_zero("rotary_dim", self.rope.rotary_dim)?;
        non_zero("max_position_embeddings", self.context)?;
        positive("rms_norm_eps", self.norm_eps)?;
        positive("rope_theta", self.rope.theta)?;
        if matches!(self.rope.scaling, Scaling::Yarn(_)) && self.rope.theta <= 1.0 {
            let problem = format!("is {}, yarn needs a base above 1", self.rope.theta);
            return Err(ConfigError::Field { field: "rope_theta".to_owned(), problem });
        }
        if let Scaling::LongRope { short, .. } = &self.rope.scaling {
            let field = "rope_scaling short_factor";
            for factor in short {
                positive(field, *factor)?;
            }
            if to_u64(short.len()) * 2 != u64::from(self.rope.rotary_dim) {
                let (got, dim) = (short.len(), self.rope.rotary_dim);
                let problem = format!("{got} factors for a rotary dimension of {dim}");
                return Err(ConfigError::Field { field: field.to_owned(), problem });
            }
        }
        Ok(self)
    }
}

fn positive(field: &'static str, got: f64) -> Result<f64, ConfigError> {
    if got.is_finite() && got > 0.0 {
        Ok(got)
    } else {
        Err(ConfigError::NotPositive { field, got })
    }
}

/// The divisor of a rotary dimension, for errors.
const PAIR: (&str, u32) = ("the number of a pair,", 2);

#[cfg(test)]
mod tests;
