//! Reads the rotary embedding of a GGUF file, from old and new keys as llama.cpp does.
use super::metadata::Metadata;
use crate::error::ConfigError;
use crate::num::to_usize;
use crate::rope::{Scaling, Yarn};

/// Returns the scaling for rows with `rotary_dim` rotated values; `short` are the factors per pair
/// of the file for sequences up to the original context, whatever the scaling type is called.
///
/// Without a type, a factor means linear scaling; a factor of 0 means none. An older key of the
/// factor is `rope.scale_linear`.
pub(super) fn scaling(
    metadata: &Metadata<'_>,
    rotary_dim: u32,
    context: u32,
    short: Option<Vec<f64>>,
) -> Result<Scaling, ConfigError> {
    let factor = match metadata.positive("rope.scaling.factor")? {
        Some(factor) => Some(factor),
        // A factor that exists, even as 0, takes precedence over the older key.
        None if metadata.value("rope.scaling.factor").is_some() => None,
        None => metadata.positive("rope.scale_linear")?,
    };
    let factor = factor.unwrap_or(1.0);
    let attention = metadata.positive("rope.scaling.attn_factor")?.unwrap_or(1.0);
    let pairs = to_usize(rotary_dim.checked_div(2).unwrap_or(0));
    let name = match metadata.value("rope.scaling.type") {
        None => "linear",
        Some(_) => metadata
            .text("rope.scaling.type")
            .ok_or_else(|| metadata.wrong("rope.scaling.type", "is not a text".to_owned()))?,
    };
    let divided = |factor: f64, short: Option<Vec<f64>>| match short {
        Some(short) => Scaling::LongRope {
            short: short.into_iter().map(|by_pair| by_pair * factor).collect(),
            attention_factor: attention,
        },
        None => with_magnitude(factor, attention, pairs),
    };
    let tensor = |problem: &str| ConfigError::Field {
        field: "tensor rope_factors_short.weight".to_owned(),
        problem: problem.to_owned(),
    };
    match name {
        "none" => Ok(divided(1.0, short)),
        "longrope" if short.is_none() => {
            Err(tensor("is missing, rope.scaling.type longrope needs it"))
        }
        "linear" | "longrope" => Ok(divided(factor, short)),
        "yarn" if short.is_some() => {
            Err(tensor("is there beside rope.scaling.type yarn, which is not supported"))
        }
        "yarn" => yarn(metadata, factor, attention, context, pairs),
        other => {
            let problem =
                format!("{other:?} is not supported, expected none, linear, yarn or longrope");
            Err(metadata.wrong("rope.scaling.type", problem))
        }
    }
}

/// Refuses a division of pairs among the axes of an image in which a pair has no axis.
///
/// Pairs belong to the axes in turns, as long as the sections of these have room; the axes of a
/// text all have the position of the token, and what is beyond the three has none.
pub(super) fn check_sections(metadata: &Metadata<'_>, rotary_dim: u32) -> Result<(), ConfigError> {
    const KEY: &str = "rope.dimension_sections";
    let Some(sections) = metadata.counts(KEY)? else {
        return Ok(());
    };
    let wrong = |problem: String| Err(metadata.wrong(KEY, problem));
    let ([first, second, third] | [first, second, third, _]) = *sections.as_slice() else {
        return wrong(format!("has {} entries, 3 or 4 are expected", sections.len()));
    };
    let period = sections.iter().fold(0_u64, |sum, section| sum.saturating_add((*section).into()));
    let pairs = u64::from(rotary_dim).checked_div(2).unwrap_or(0);
    let has_axis = |pair: &u64| {
        let place = pair.checked_rem(period)?;
        let section = match place.checked_rem(3)? {
            0 => first,
            1 => second,
            _ => third,
        };
        Some(place < u64::from(section).saturating_mul(3))
    };
    match (0..pairs.min(period.max(1))).find(|pair| has_axis(pair) != Some(true)) {
        None => Ok(()),
        Some(pair) => wrong(format!("is {sections:?}: pair {pair} of {pairs} has no axis")),
    }
}

/// Makes the scaling that divides positions by `factor` and multiplies rotated rows by `attention`.
fn with_magnitude(factor: f64, attention: f64, pairs: usize) -> Scaling {
    let is_one = |number: f64| number.total_cmp(&1.0).is_eq();
    match (is_one(factor), is_one(attention)) {
        (true, true) => Scaling::None,
        (false, true) => Scaling::Linear { factor },
        // The same factor for every pair.
        (_, false) => Scaling::LongRope { short: vec![factor; pairs], attention_factor: attention },
    }
}

fn yarn(
    metadata: &Metadata<'_>,
    factor: f64,
    attention: f64,
    context: u32,
    pairs: usize,
) -> Result<Scaling, ConfigError> {
    let attention = attention * metadata.positive("rope.scaling.yarn_attn_factor")?.unwrap_or(1.0);
    let mix = metadata.number("rope.scaling.yarn_ext_factor")?.unwrap_or(1.0);
    if mix.total_cmp(&0.0).is_eq() {
        return Ok(with_magnitude(factor, attention, pairs));
    }
    if mix.total_cmp(&1.0).is_ne() {
        let problem = format!("is {mix}, expected 0 or 1");
        return Err(metadata.wrong("rope.scaling.yarn_ext_factor", problem));
    }
    let original = metadata.count("rope.scaling.original_context_length")?;
    let original_context = original.filter(|original| *original > 0).unwrap_or(context);
    // The file's softmax is sharpened by the logarithm of the factor.
    let log = metadata.number("rope.scaling.yarn_log_multiplier")?;
    let sharpened = match log {
        Some(log) if log > 0.0 => 1.0,
        _ => 1.0 + 0.1 * factor.ln(),
    };
    Ok(Scaling::Yarn(Yarn {
        factor,
        original_context,
        beta_fast: metadata.positive("rope.scaling.yarn_beta_fast")?.unwrap_or(32.0),
        beta_slow: metadata.positive("rope.scaling.yarn_beta_slow")?.unwrap_or(1.0),
        truncate: true,
        attention_factor: attention * sharpened,
    }))
}
