//! Reads the recurrence of a hybrid model from the metadata of its GGUF file.
// Reads files that may be anything.
#![warn(clippy::arithmetic_side_effects, clippy::indexing_slicing)]
use super::metadata::Metadata;
use crate::config::{Architecture, ConvConfig, DeltaConfig, MambaConfig, Recurrence};
use crate::error::ConfigError;
use crate::geometry::{COUNT_MAX, bounded, divide};

/// Returns the recurrence, `None` if all layers of the architecture attend. `has` says whether the
/// file has a tensor whose name has a certain end.
pub(super) fn read(
    metadata: &Metadata<'_>,
    architecture: Architecture,
    hidden: u32,
    has: impl Fn(&str) -> bool,
) -> Result<Option<Recurrence>, ConfigError> {
    Ok(match architecture {
        Architecture::Lfm2 => Some(Recurrence::ShortConv(ConvConfig {
            channels: hidden,
            kernel: kernel(metadata, "shortconv.l_cache")?,
            has_bias: has(".shortconv.conv.bias"),
        })),
        Architecture::GraniteHybrid => {
            let mamba = mamba2(metadata, has(".ssm_conv1d.bias"), has(".ssm_in.bias"))?;
            Some(Recurrence::Mamba2(mamba))
        }
        Architecture::Qwen35 | Architecture::Qwen3Next => {
            let is_fused = architecture == Architecture::Qwen3Next;
            Some(Recurrence::Delta(delta(metadata, is_fused)?))
        }
        _ => None,
    })
}

fn delta(metadata: &Metadata<'_>, is_fused: bool) -> Result<DeltaConfig, ConfigError> {
    let count = |key| bounded(&metadata.key(key), metadata.required(key)?.into(), COUNT_MAX);
    let (v_width, v_heads) = (count("ssm.inner_size")?, count("ssm.time_step_rank")?);
    let v_dim = divide(("ssm.inner_size", v_width), ("ssm.time_step_rank", v_heads))?;
    let (k_heads, k_dim) = (count("ssm.group_count")?, count("ssm.state_size")?);
    divide(("ssm.time_step_rank", v_heads), ("ssm.group_count", k_heads))?;
    let size = metadata.key("ssm.state_size");
    let k_width = u64::from(k_heads).saturating_mul(k_dim.into());
    let channels = k_width.saturating_mul(2).saturating_add(v_width.into());
    Ok(DeltaConfig {
        k_heads,
        v_heads,
        k_dim,
        v_dim,
        kernel: kernel(metadata, "ssm.conv_kernel")?,
        k_width: bounded(&size, k_width, u32::MAX)?,
        v_width,
        channels: bounded(&size, channels, u32::MAX)?,
        is_fused,
    })
}

fn mamba2(
    metadata: &Metadata<'_>,
    has_conv_bias: bool,
    has_bias: bool,
) -> Result<MambaConfig, ConfigError> {
    let count = |key| bounded(&metadata.key(key), metadata.required(key)?.into(), COUNT_MAX);
    let (width, heads) = (count("ssm.inner_size")?, count("ssm.time_step_rank")?);
    let head_dim = divide(("ssm.inner_size", width), ("ssm.time_step_rank", heads))?;
    let (groups, state) = (count("ssm.group_count")?, count("ssm.state_size")?);
    divide(("ssm.time_step_rank", heads), ("ssm.group_count", groups))?;
    let size = metadata.key("ssm.state_size");
    let group_width = u64::from(groups).saturating_mul(state.into());
    let channels = group_width.saturating_mul(2).saturating_add(width.into());
    Ok(MambaConfig {
        heads,
        head_dim,
        groups,
        state,
        kernel: kernel(metadata, "ssm.conv_kernel")?,
        width,
        group_width: bounded(&size, group_width, u32::MAX)?,
        channels: bounded(&size, channels, u32::MAX)?,
        has_conv_bias,
        has_bias,
        // No key has limits.
        step_limits: [0.0, f32::INFINITY],
    })
}

/// Reads the number of tokens that a convolution sees.
fn kernel(metadata: &Metadata<'_>, key: &str) -> Result<u32, ConfigError> {
    match bounded(&metadata.key(key), metadata.required(key)?.into(), COUNT_MAX)? {
        1 => Err(metadata.wrong(key, "is 1: a convolution sees at least 2".to_owned())),
        kernel => Ok(kernel),
    }
}
