//! The configuration of a model, read from its `config.json` and checked before anything is built.
mod architecture;
mod file;
mod recurrent;
mod rope;

use std::path::Path;

use kv::engine::Limits;

use crate::error::{ConfigError, Error, InFile};
use crate::geometry::{LayerGeometry, LayerStates, ModelGeometry, divide, non_zero};
use crate::num::to_u64;
use crate::object::Object;
use crate::rope::{RopeConfig, Scaling};
use crate::text_file::read_text;
pub(crate) use architecture::{Architecture, QkNorm};
pub(crate) use recurrent::{ConvConfig, DeltaConfig, ExpertsConfig, MambaConfig, Recurrence};

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
    /// Whether the layer attends; the others have the recurrence of the model.
    pub(crate) attends: bool,
    /// Keys before its own position that a query sees, `None` for all.
    pub(crate) window_left: Option<u32>,
    /// Whether Q and K are rotated by their positions.
    pub(crate) rotates: bool,
}

impl LayerKind {
    /// A layer that has a recurrence.
    pub(crate) const RECURRENT: Self = Self { attends: false, window_left: None, rotates: false };

    fn attending(layer: &LayerGeometry, rotates: bool) -> Self {
        // Both readers take a window of 0 for none.
        Self { attends: true, window_left: layer.window.map(|window| window - 1), rotates }
    }
}

impl ModelGeometry {
    /// Returns the settings of all layers, all of which attend, with their rotations.
    pub(crate) fn layer_kinds(&self, rotates: impl IntoIterator<Item = bool>) -> Vec<LayerKind> {
        let layers = self.layers.iter().zip(rotates);
        layers.map(|(layer, rotates)| LayerKind::attending(layer, rotates)).collect()
    }

    /// Returns the settings of the layers of a hybrid model: those that keep rows attend.
    pub(crate) fn hybrid_kinds(&self, rotates: bool) -> Vec<LayerKind> {
        let mut rows = self.layer_indices.iter().zip(&self.layers).peekable();
        let kind = |index: u32| match rows.next_if(|(own, _)| **own == index) {
            Some((_, layer)) => LayerKind::attending(layer, rotates),
            None => LayerKind::RECURRENT,
        };
        (0..self.num_layers).map(kind).collect()
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
    /// The recurrence of the layers that do not attend.
    pub(crate) recurrence: Option<Recurrence>,
    /// What these layers keep of a sequence.
    pub(crate) states: Vec<LayerStates>,
    pub(crate) experts: Option<ExpertsConfig>,
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
