//! Reads the mixture of experts of a GGUF file from its metadata.
use candle_core::quantized::gguf_file::Value;

use super::metadata::Metadata;
use crate::config::{Architecture, ExpertsConfig};
use crate::error::ConfigError;
use crate::geometry::{COUNT_MAX, bounded};
use crate::num::to_usize;

/// Whether models of an architecture have experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mixture {
    /// Not in this program.
    Refused,
    Possible,
    Required,
}

/// Keys of mixtures of other kinds, with the numbers that mean the usual one.
const USUAL: [(&str, &[f64], &str); 3] = [
    // Softmax is 1.
    ("expert_gating_func", &[0.0, 1.0], "the softmax of all experts"),
    ("expert_group_count", &[0.0, 1.0], "one group of experts"),
    ("expert_weights_scale", &[0.0, 1.0], "shares that are not scaled"),
];

/// Returns the experts, `None` without any. `has` says whether the file has a tensor.
pub(super) fn read(
    metadata: &Metadata<'_>,
    (architecture, mixture): (Architecture, Mixture),
    num_layers: u32,
    has: impl Fn(&str) -> bool,
) -> Result<Option<ExpertsConfig>, ConfigError> {
    const COUNT: &str = "expert_count";
    let all = match (mixture, metadata.count(COUNT)?.unwrap_or(0)) {
        (Mixture::Required, _) => metadata.required(COUNT)?,
        (_, 0) => return Ok(None),
        (Mixture::Possible, all) => all,
        (Mixture::Refused, all) => {
            let problem = format!(
                "is {all}: a mixture of experts, such as Mixtral, which this program does not run"
            );
            return Err(metadata.wrong(COUNT, problem));
        }
    };
    for (key, usual, expected) in USUAL {
        if let Some(got) = metadata.number(key)?
            && !usual.contains(&got)
        {
            return Err(metadata.wrong(key, format!("is {got}, this program runs {expected}")));
        }
    }
    let is_normalised = match metadata.value("expert_weights_norm") {
        None => true,
        Some(Value::Bool(is_normalised)) => *is_normalised,
        Some(_) => {
            let problem = "is neither true nor false".to_owned();
            return Err(metadata.wrong("expert_weights_norm", problem));
        }
    };
    let count = |key, max| bounded(&metadata.key(key), metadata.required(key)?.into(), max);
    let layers = match architecture {
        Architecture::GraniteHybrid => vec![true; to_usize(num_layers)],
        _ => {
            (0..num_layers).map(|layer| has(&format!("blk.{layer}.ffn_gate_inp.weight"))).collect()
        }
    };
    let width = match architecture {
        Architecture::GraniteHybrid => "feed_forward_length",
        _ => "expert_feed_forward_length",
    };
    let all = bounded(&metadata.key(COUNT), all.into(), COUNT_MAX)?;
    Ok(Some(ExpertsConfig {
        count: all,
        per_token: count("expert_used_count", all)?,
        width: count(width, u32::MAX)?,
        shared_width: count("expert_shared_feed_forward_length", u32::MAX)?,
        is_normalised,
        layers,
    }))
}
