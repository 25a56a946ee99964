//! The recurrences of hybrid models, and their mixtures of experts.
// Reads files that may be anything.
#![warn(clippy::arithmetic_side_effects, clippy::indexing_slicing)]
use serde_json::Value;

use super::{Architecture, ConfigError};
use crate::geometry::{COUNT_MAX, bounded, divide, non_zero, per_layer};
use crate::num::to_usize;
use crate::object::{Object, field_error, wrong};

/// The recurrence of all layers that do not attend.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Recurrence {
    Delta(DeltaConfig),
    ShortConv(ConvConfig),
    Mamba2(MambaConfig),
}

/// A gated delta rule behind a convolution.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DeltaConfig {
    pub(crate) k_heads: u32,
    pub(crate) v_heads: u32,
    pub(crate) k_dim: u32,
    pub(crate) v_dim: u32,
    pub(crate) kernel: u32,
    /// Values of all heads of K, and of V.
    pub(crate) k_width: u32,
    pub(crate) v_width: u32,
    /// Channels of the convolution: Q, K and V.
    pub(crate) channels: u32,
    /// Whether the projections of each head of K lie together in two matrices.
    pub(crate) is_fused: bool,
}

/// A gated convolution.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ConvConfig {
    pub(crate) channels: u32,
    pub(crate) kernel: u32,
    pub(crate) has_bias: bool,
}

/// A state space model (Mamba 2) behind a convolution.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct MambaConfig {
    pub(crate) heads: u32,
    pub(crate) head_dim: u32,
    /// Groups of heads that share B and C.
    pub(crate) groups: u32,
    /// Values of a group of B or C.
    pub(crate) state: u32,
    pub(crate) kernel: u32,
    /// Values of all heads.
    pub(crate) width: u32,
    /// Values of B, and of C.
    pub(crate) group_width: u32,
    /// Channels of the convolution: the heads, B and C.
    pub(crate) channels: u32,
    pub(crate) has_conv_bias: bool,
    pub(crate) has_bias: bool,
    /// Limits of a time step.
    pub(crate) step_limits: [f32; 2],
}

impl Recurrence {
    /// Reads the recurrence of an architecture, `None` if all its layers attend.
    pub(super) fn read(
        text: &Object<'_>,
        architecture: Architecture,
        hidden: u32,
    ) -> Result<Option<Self>, ConfigError> {
        Ok(match architecture {
            Architecture::Qwen35 | Architecture::Qwen3Next => {
                Some(Self::Delta(DeltaConfig::read(text, architecture)?))
            }
            Architecture::Lfm2 => Some(Self::ShortConv(ConvConfig {
                channels: hidden,
                kernel: kernel(text, "conv_L_cache", 3)?,
                has_bias: text.get("conv_bias")?.unwrap_or(false),
            })),
            Architecture::GraniteHybrid => Some(Self::Mamba2(MambaConfig::read(text, hidden)?)),
            _ => None,
        })
    }
}

impl DeltaConfig {
    fn read(text: &Object<'_>, architecture: Architecture) -> Result<Self, ConfigError> {
        let [k_heads, v_heads] =
            [count(text, "linear_num_key_heads", 16)?, count(text, "linear_num_value_heads", 32)?];
        let [k_dim, v_dim] =
            [count(text, "linear_key_head_dim", 128)?, count(text, "linear_value_head_dim", 128)?];
        divide(("linear_num_value_heads", v_heads), ("linear_num_key_heads", k_heads))?;
        let k_width = product("linear_key_head_dim", k_heads, k_dim)?;
        let v_width = product("linear_value_head_dim", v_heads, v_dim)?;
        let channels = sum("linear_value_head_dim", [k_width, k_width, v_width])?;
        Ok(Self {
            k_heads,
            v_heads,
            k_dim,
            v_dim,
            kernel: kernel(text, "linear_conv_kernel_dim", 4)?,
            k_width,
            v_width,
            channels,
            is_fused: architecture == Architecture::Qwen3Next,
        })
    }
}

impl MambaConfig {
    fn read(text: &Object<'_>, hidden: u32) -> Result<Self, ConfigError> {
        let heads = count(text, "mamba_n_heads", 128)?;
        let expand = count(text, "mamba_expand", 2)?;
        let width = product("mamba_expand", hidden, expand)?;
        let share = divide(("mamba_expand * hidden_size", width), ("mamba_n_heads", heads))?;
        let is_auto = text.text("mamba_d_head") == Some("auto");
        let head_dim = if is_auto { share } else { count(text, "mamba_d_head", share)? };
        if head_dim != share {
            let problem = format!("is {head_dim}, but {heads} heads share {width} values");
            return Err(field_error(text.name("mamba_d_head"), problem));
        }
        let groups = count(text, "mamba_n_groups", 1)?;
        divide(("mamba_n_heads", heads), ("mamba_n_groups", groups))?;
        let state = count(text, "mamba_d_state", 256)?;
        let group_width = product("mamba_d_state", groups, state)?;
        Ok(Self {
            heads,
            head_dim,
            groups,
            state,
            kernel: kernel(text, "mamba_d_conv", 4)?,
            width,
            group_width,
            channels: sum("mamba_d_state", [width, group_width, group_width])?,
            has_conv_bias: text.get("mamba_conv_bias")?.unwrap_or(true),
            has_bias: text.get("mamba_proj_bias")?.unwrap_or(false),
            step_limits: step_limits(text)?,
        })
    }
}

/// Reads the limits of a time step. Infinity has no number in JSON.
fn step_limits(text: &Object<'_>) -> Result<[f32; 2], ConfigError> {
    const KEY: &str = "time_step_limit";
    let none = [0.0, f32::INFINITY];
    let Some(value) = text.value(KEY) else { return Ok(none) };
    let refuse = || wrong(text.name(KEY), value, "two numbers from 0, the second infinite");
    let Some([low, high]) = value.as_array().map(Vec::as_slice) else { return Err(refuse()) };
    let is_infinite = match high {
        Value::Object(named) => named.get("__float__").and_then(Value::as_str) == Some("Infinity"),
        Value::String(name) => ["inf", "Infinity"].contains(&name.as_str()),
        _ => false,
    };
    // transformers applies limits to prompts alone, not to the tokens after them.
    if low.as_f64() == Some(0.0) && is_infinite { Ok(none) } else { Err(refuse()) }
}

/// A mixture of experts beside one that all tokens share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ExpertsConfig {
    pub(crate) count: u32,
    /// Experts of a token.
    pub(crate) per_token: u32,
    pub(crate) width: u32,
    pub(crate) shared_width: u32,
    /// Whether the weights of a token's experts add up to 1.
    pub(crate) is_normalised: bool,
    /// Whether each layer has experts; the others have an MLP.
    pub(crate) layers: Vec<bool>,
}

impl ExpertsConfig {
    /// Reads the experts of an architecture that can have some, `None` without any.
    pub(super) fn read(
        text: &Object<'_>,
        architecture: Architecture,
        num_layers: u32,
    ) -> Result<Option<Self>, ConfigError> {
        let (field, default) = match architecture {
            Architecture::GraniteHybrid => ("num_local_experts", 8),
            Architecture::Qwen3Next => ("num_experts", 512),
            _ => return Ok(None),
        };
        match text.number(field)?.unwrap_or(default) {
            0 => Ok(None),
            all if architecture == Architecture::GraniteHybrid => {
                Self::of_granite(text, all, num_layers).map(Some)
            }
            all => Self::of_qwen(text, all, num_layers).map(Some),
        }
    }

    fn of_granite(text: &Object<'_>, all: u32, num_layers: u32) -> Result<Self, ConfigError> {
        Ok(Self {
            count: bounded("num_local_experts", all.into(), COUNT_MAX)?,
            per_token: per_token(text, all, 2)?,
            width: non_zero("intermediate_size", text.required("intermediate_size")?)?,
            shared_width: intermediate(text, Architecture::GraniteHybrid)?,
            is_normalised: true,
            layers: vec![true; to_usize(num_layers)],
        })
    }

    fn of_qwen(text: &Object<'_>, all: u32, num_layers: u32) -> Result<Self, ConfigError> {
        let step = count(text, "decoder_sparse_step", 1)?;
        let dense = text.numbers("mlp_only_layers")?.unwrap_or_default();
        let has =
            |layer: u32| !dense.contains(&layer) && layer.saturating_add(1).is_multiple_of(step);
        Ok(Self {
            count: bounded("num_experts", all.into(), COUNT_MAX)?,
            per_token: per_token(text, all, 10)?,
            width: count(text, "moe_intermediate_size", 512)?,
            shared_width: count(text, "shared_expert_intermediate_size", 512)?,
            is_normalised: text.get("norm_topk_prob")?.unwrap_or(true),
            layers: (0..num_layers).map(has).collect(),
        })
    }
}

/// Reads the number of experts of a token, of `all`.
fn per_token(text: &Object<'_>, all: u32, default: u32) -> Result<u32, ConfigError> {
    const FIELD: &str = "num_experts_per_tok";
    bounded(&text.name(FIELD), count(text, FIELD, default)?.into(), all)
}

/// Returns the width of the MLP.
pub(super) fn intermediate(
    text: &Object<'_>,
    architecture: Architecture,
) -> Result<u32, ConfigError> {
    let given = |field: &'static str| bounded(&text.name(field), text.required(field)?, u32::MAX);
    match architecture {
        Architecture::GraniteHybrid => count(text, "shared_intermediate_size", 1024),
        Architecture::Lfm2 => {
            let is_old = text.has("block_ff_dim");
            let width = given(if is_old { "block_ff_dim" } else { "intermediate_size" })?;
            adjusted(text, width)
        }
        _ => given("intermediate_size"),
    }
}

const FACTOR: &str = "block_ffn_dim_multiplier";

/// Returns two thirds of a width, times a factor, rounded up to a multiple.
fn adjusted(text: &Object<'_>, width: u32) -> Result<u32, ConfigError> {
    if !text.get("block_auto_adjust_ff_dim")?.unwrap_or(true) {
        return Ok(width);
    }
    let field = text.name("intermediate_size");
    let part = u64::from(width).saturating_mul(2).checked_div(3).unwrap_or(0);
    let factor = match text.get::<f64>(FACTOR)? {
        Some(factor) => super::positive(FACTOR, factor)?,
        // Null means neither a factor nor a multiple.
        None if text.has(FACTOR) => return bounded(&field, part, u32::MAX),
        None => 1.0,
    };
    let scaled = f64::from(bounded(&field, part, u32::MAX)?) * factor;
    let multiple = count(text, "block_multiple_of", 256)?;
    let scaled = crate::num::to_count(scaled);
    let rounded = scaled.checked_next_multiple_of(multiple).map_or(u64::MAX, u64::from);
    bounded(&field, rounded, u32::MAX)
}

/// Returns the names of the kinds of layers, `None` without a list.
pub(super) fn layer_names<'a>(
    text: &Object<'a>,
    num_layers: u32,
) -> Result<Option<(&'static str, Vec<&'a str>)>, ConfigError> {
    for key in ["layer_types", "layers_block_type"] {
        if let Some(names) = text.get::<Vec<&str>>(key)? {
            return Ok(Some((key, per_layer(text.name(key), names, num_layers)?)));
        }
    }
    Ok(None)
}

fn count(text: &Object<'_>, field: &'static str, default: u32) -> Result<u32, ConfigError> {
    Ok(text.count(&[field], &mut Vec::new())?.unwrap_or(default))
}

/// Reads the number of tokens that a convolution sees.
fn kernel(text: &Object<'_>, field: &'static str, default: u32) -> Result<u32, ConfigError> {
    match count(text, field, default)? {
        1 => Err(field_error(text.name(field), "is 1: a convolution sees at least 2".to_owned())),
        kernel => Ok(kernel),
    }
}

fn product(field: &str, a: u32, b: u32) -> Result<u32, ConfigError> {
    bounded(field, u64::from(a).saturating_mul(b.into()), u32::MAX)
}

fn sum(field: &str, parts: [u32; 3]) -> Result<u32, ConfigError> {
    let sum = parts.into_iter().fold(0_u64, |sum, part| sum.saturating_add(part.into()));
    bounded(field, sum, u32::MAX)
}
