//! The recurrent states that layers keep for a sequence, by architecture.
use kv::DType;

use super::parts::{Found, Layers, StatePart};
use super::{bounded, divide};
use crate::error::ConfigError;
use crate::gguf::Metadata;
use crate::object::{Object, field_error};

/// A recurrence of a known kind, with its sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Recurrence {
    /// A gated delta rule, or Kimi's delta attention, behind one convolution of Q, K and V.
    Delta { kernel: u32, keys: (u32, u32), values: (u32, u32) },
    /// Mamba: a state for every channel.
    Mamba { kernel: u32, inner: u32, state: u32 },
    /// Mamba 2: a matrix for every head; the convolution has B and C of every group too.
    Mamba2 { kernel: u32, inner: u32, heads: u32, groups: u32, state: u32 },
    /// A gated short convolution.
    ShortConv { kernel: u32, width: u32 },
    /// A gated linear recurrence of single values behind a convolution.
    Linear { kernel: u32, width: u32 },
    /// Lightning attention: a sum of products of K and V for every head.
    Lightning { heads: u32, dim: u32 },
}

/// Element types of recurrences in files that name one.
const TYPES: [(&str, DType); 3] =
    [("float32", DType::F32), ("float16", DType::F16), ("bfloat16", DType::Bf16)];

impl Recurrence {
    /// Returns the tensors of a layer; recurrences are kept in `dtype`.
    fn parts(self, dtype: DType) -> Result<Vec<StatePart>, ConfigError> {
        let window = |channels: u64, kernel: u32| {
            // A convolution of one column keeps nothing.
            let columns = kernel.saturating_sub(1);
            let channels = bounded("channels of a convolution", channels, u32::MAX)?;
            let part = StatePart { name: "window", shape: vec![channels, columns], dtype: None };
            Ok::<_, ConfigError>((columns > 0).then_some(part))
        };
        let sum = |name, shape: &[u32]| {
            Some(StatePart { name, shape: shape.to_vec(), dtype: Some(dtype) })
        };
        let product = |a: u32, b: u32| u64::from(a) * u64::from(b);
        let parts = match self {
            Self::Delta { kernel, keys: (key_heads, key_dim), values: (heads, dim) } => [
                window(2 * product(key_heads, key_dim) + product(heads, dim), kernel)?,
                sum("matrix", &[heads, key_dim, dim]),
            ],
            Self::Mamba { kernel, inner, state } => {
                [window(inner.into(), kernel)?, sum("matrix", &[inner, state])]
            }
            Self::Mamba2 { kernel, inner, heads, groups, state } => {
                let dim = divide(("inner channels of Mamba 2", inner), ("its heads", heads))?;
                let channels = u64::from(inner) + 2 * product(groups, state);
                [window(channels, kernel)?, sum("matrix", &[heads, dim, state])]
            }
            Self::ShortConv { kernel, width } => [window(width.into(), kernel)?, None],
            Self::Linear { kernel, width } => {
                [window(width.into(), kernel)?, sum("vector", &[width])]
            }
            Self::Lightning { heads, dim } => [sum("matrix", &[heads, dim, dim]), None],
        };
        Ok(parts.into_iter().flatten().collect())
    }
}

/// Reads the state of an architecture from a `config.json`; `None` for an architecture whose layers
/// have none, or one that is not known.
#[expect(clippy::too_many_lines, reason = "one entry for every architecture")]
pub(super) fn of_config(
    keys: &Object<'_>,
    architecture: &str,
    notes: &mut Vec<String>,
) -> Result<Option<Found>, ConfigError> {
    let keys = keys.with_defaults(defaults(architecture));
    let mut count = |names: &[&'static str]| keys.required_count(names, notes);
    let recurrence = match architecture {
        "qwen3_next" | "qwen3_5" | "qwen3_5_text" | "qwen3_5_moe" | "qwen3_5_moe_text" => {
            Recurrence::Delta {
                kernel: count(&["linear_conv_kernel_dim"])?,
                keys: (count(&["linear_num_key_heads"])?, count(&["linear_key_head_dim"])?),
                values: (count(&["linear_num_value_heads"])?, count(&["linear_value_head_dim"])?),
            }
        }
        "olmo_hybrid" => {
            let heads = count(&["num_attention_heads"])?;
            let hidden = count(&["hidden_size"])?;
            let mut or = |name, default| match keys.value(name) {
                Some(_) => count(&[name]),
                None => bounded(name, default, u32::MAX),
            };
            let key_heads = or("linear_num_key_heads", heads.into())?;
            // Three quarters of the hidden size, over all heads.
            let usual = (3 * u64::from(hidden)).checked_div(4 * u64::from(key_heads)).unwrap_or(0);
            let key_dim = or("linear_key_head_dim", usual)?;
            Recurrence::Delta {
                values: (
                    or("linear_num_value_heads", heads.into())?,
                    or("linear_value_head_dim", 2 * u64::from(key_dim))?,
                ),
                keys: (key_heads, key_dim),
                kernel: count(&["linear_conv_kernel_dim"])?,
            }
        }
        "kimi_linear" => {
            let inner = keys.object("linear_attn_config")?;
            let mut either = |own, name| match inner.filter(|inner| inner.value(own).is_some()) {
                Some(inner) => inner.required_count(&[own], &mut Vec::new()),
                None => count(&[name]),
            };
            let heads = either("num_heads", "linear_num_heads")?;
            let dim = either("head_dim", "linear_head_dim")?;
            let kernel = either("short_conv_kernel_size", "linear_conv_kernel_dim")?;
            Recurrence::Delta { kernel, keys: (heads, dim), values: (heads, dim) }
        }
        "granitemoehybrid" | "bamba" => Recurrence::Mamba2 {
            kernel: count(&["mamba_d_conv"])?,
            inner: expanded(count(&["mamba_expand"])?, count(&HIDDEN)?)?,
            heads: count(&["mamba_n_heads"])?,
            groups: count(&["mamba_n_groups"])?,
            state: count(&["mamba_d_state"])?,
        },
        "falcon_h1" => Recurrence::Mamba2 {
            kernel: count(&["mamba_d_conv"])?,
            // Null means the usual size.
            inner: if keys.has("mamba_d_ssm") && keys.value("mamba_d_ssm").is_none() {
                expanded(count(&["mamba_expand"])?, count(&HIDDEN)?)?
            } else {
                count(&["mamba_d_ssm"])?
            },
            heads: count(&["mamba_n_heads"])?,
            groups: count(&["mamba_n_groups"])?,
            state: count(&["mamba_d_state"])?,
        },
        "zamba2" => Recurrence::Mamba2 {
            kernel: count(&["mamba_d_conv"])?,
            inner: expanded(count(&["mamba_expand"])?, count(&HIDDEN)?)?,
            heads: count(&["n_mamba_heads"])?,
            groups: count(&["mamba_ngroups"])?,
            state: count(&["mamba_d_state"])?,
        },
        "nemotron_h" => {
            let heads = count(&["mamba_num_heads"])?;
            Recurrence::Mamba2 {
                kernel: count(&["conv_kernel", "mamba_d_conv"])?,
                inner: expanded(count(&["mamba_head_dim"])?, heads)?,
                heads,
                groups: count(&["n_groups", "mamba_n_groups"])?,
                state: count(&["ssm_state_size"])?,
            }
        }
        "mamba2" => Recurrence::Mamba2 {
            kernel: count(&["conv_kernel"])?,
            inner: expanded(count(&["expand"])?, count(&HIDDEN)?)?,
            heads: count(&["num_heads"])?,
            groups: count(&["n_groups"])?,
            state: count(&["state_size"])?,
        },
        "mamba" | "falcon_mamba" => Recurrence::Mamba {
            kernel: count(&["conv_kernel"])?,
            inner: expanded(count(&["expand"])?, count(&HIDDEN)?)?,
            state: count(&["state_size"])?,
        },
        "jamba" => Recurrence::Mamba {
            kernel: count(&["mamba_d_conv"])?,
            inner: expanded(count(&["mamba_expand"])?, count(&HIDDEN)?)?,
            state: count(&["mamba_d_state"])?,
        },
        "lfm2" | "lfm2_moe" => {
            Recurrence::ShortConv { kernel: count(&["conv_L_cache"])?, width: count(&HIDDEN)? }
        }
        "recurrent_gemma" => Recurrence::Linear {
            kernel: count(&["conv1d_width"])?,
            width: if keys.value("lru_width").is_some() {
                count(&["lru_width"])?
            } else {
                count(&HIDDEN)?
            },
        },
        "minimax" | "minimax_text_01" => {
            let heads = count(&["num_attention_heads"])?;
            let dim = match keys.value("head_dim") {
                Some(_) => count(&["head_dim"])?,
                None => divide(("hidden_size", count(&HIDDEN)?), ("num_attention_heads", heads))?,
            };
            Recurrence::Lightning { heads, dim }
        }
        _ => return Ok(None),
    };
    Ok(Some((recurrence.parts(dtype(&keys)?)?, layers(architecture))))
}

/// Field names of the hidden size.
const HIDDEN: [&str; 2] = ["hidden_size", "d_model"];

/// Multiplies two sizes.
fn expanded(factor: u32, size: u32) -> Result<u32, ConfigError> {
    bounded("inner channels", u64::from(factor) * u64::from(size), u32::MAX)
}

/// Reads the element type of recurrences, f32 unless the file says otherwise.
fn dtype(keys: &Object<'_>) -> Result<DType, ConfigError> {
    for field in ["mamba_ssm_dtype", "mamba_ssm_cache_dtype"] {
        if let Some(name) = keys.get::<&str>(field)? {
            let known = TYPES.iter().find(|(known, _)| *known == name);
            return known.map(|(_, dtype)| *dtype).ok_or_else(|| {
                let problem = format!("is {name:?}, expected float32, float16 or bfloat16");
                field_error(keys.name(field), problem)
            });
        }
    }
    Ok(DType::F32)
}

/// Returns which layers of an architecture have its state.
fn layers(architecture: &str) -> Layers {
    match architecture {
        "falcon_h1" | "falcon-h1" | "zamba2" => Layers::All,
        _ => Layers::Recurrent,
    }
}

/// Returns transformers' defaults of the fields of states.
fn defaults(architecture: &str) -> &'static [(&'static str, u32)] {
    match architecture {
        "qwen3_next" | "qwen3_5" | "qwen3_5_text" | "qwen3_5_moe" | "qwen3_5_moe_text" => &[
            ("linear_conv_kernel_dim", 4),
            ("linear_num_key_heads", 16),
            ("linear_key_head_dim", 128),
            ("linear_num_value_heads", 32),
            ("linear_value_head_dim", 128),
        ],
        "olmo_hybrid" => &[("linear_conv_kernel_dim", 4)],
        "kimi_linear" => {
            &[("linear_num_heads", 32), ("linear_head_dim", 128), ("linear_conv_kernel_dim", 4)]
        }
        "granitemoehybrid" | "bamba" => &[
            ("mamba_d_conv", 4),
            ("mamba_expand", 2),
            ("mamba_n_heads", 128),
            ("mamba_n_groups", 1),
            ("mamba_d_state", 256),
        ],
        "falcon_h1" => &[
            ("mamba_d_conv", 4),
            ("mamba_expand", 2),
            ("mamba_d_ssm", 1024),
            ("mamba_n_heads", 128),
            ("mamba_n_groups", 1),
            ("mamba_d_state", 256),
        ],
        "zamba2" => &[
            ("mamba_d_conv", 4),
            ("mamba_expand", 2),
            ("n_mamba_heads", 8),
            ("mamba_ngroups", 1),
            ("mamba_d_state", 64),
        ],
        "nemotron_h" => &[
            ("conv_kernel", 4),
            ("mamba_num_heads", 128),
            ("mamba_head_dim", 64),
            ("n_groups", 8),
            ("ssm_state_size", 128),
        ],
        "mamba2" => &[
            ("conv_kernel", 4),
            ("expand", 2),
            ("num_heads", 128),
            ("n_groups", 8),
            ("state_size", 128),
        ],
        "mamba" | "falcon_mamba" => &[("conv_kernel", 4), ("expand", 2), ("state_size", 16)],
        "jamba" => &[("mamba_d_conv", 4), ("mamba_expand", 2), ("mamba_d_state", 16)],
        "lfm2" | "lfm2_moe" => &[("conv_L_cache", 3)],
        "recurrent_gemma" => &[("conv1d_width", 4)],
        _ => &[],
    }
}

/// Reads the state of an architecture from the metadata of a GGUF file; `None` for an architecture
/// whose layers have none, or one that is not known.
pub(super) fn of_gguf(metadata: &Metadata<'_>) -> Result<Option<Found>, ConfigError> {
    let count = |key| {
        let count = metadata.required(key)?;
        bounded(&metadata.key(key), count.into(), super::COUNT_MAX)
    };
    let architecture = metadata.architecture();
    let kernel = match architecture {
        "lfm2" | "lfm2moe" => "shortconv.l_cache",
        _ => "ssm.conv_kernel",
    };
    // Older files do not describe the states.
    if !metadata.has(kernel) {
        return Ok(None);
    }
    let kernel = count(kernel)?;
    let recurrence = match architecture {
        "qwen3next" | "qwen35" | "qwen35moe" => {
            let heads = count("ssm.time_step_rank")?;
            let names = (("ssm.inner_size", count("ssm.inner_size")?), ("value heads", heads));
            Recurrence::Delta {
                kernel,
                keys: (count("ssm.group_count")?, count("ssm.state_size")?),
                values: (heads, divide(names.0, names.1)?),
            }
        }
        "kimi-linear" => {
            let (heads, dim) = (most(metadata, "attention.head_count")?, count("kda.head_dim")?);
            Recurrence::Delta { kernel, keys: (heads, dim), values: (heads, dim) }
        }
        "mamba2" | "falcon-h1" | "granitehybrid" | "nemotron_h" | "nemotron_h_moe" => {
            Recurrence::Mamba2 {
                kernel,
                inner: count("ssm.inner_size")?,
                heads: count("ssm.time_step_rank")?,
                groups: count("ssm.group_count")?,
                state: count("ssm.state_size")?,
            }
        }
        "mamba" | "jamba" => Recurrence::Mamba {
            kernel,
            inner: count("ssm.inner_size")?,
            state: count("ssm.state_size")?,
        },
        "lfm2" | "lfm2moe" => Recurrence::ShortConv { kernel, width: count("embedding_length")? },
        _ => return Ok(None),
    };
    Ok(Some((recurrence.parts(DType::F32)?, layers(architecture))))
}

/// Returns the largest number of a list with one per layer.
fn most(metadata: &Metadata<'_>, key: &str) -> Result<u32, ConfigError> {
    let list = metadata.counts(key)?.unwrap_or_default();
    let most = list.into_iter().max().unwrap_or(0);
    bounded(&metadata.key(key), most.into(), super::COUNT_MAX)
}
