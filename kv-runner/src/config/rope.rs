//! Reads the rotary embedding of a `config.json`, from old keys, new keys, or both.
//!
//! Up to transformers 4 the base is `rope_theta` and the scaling is `rope_scaling`, with its type
//! under `type` or `rope_type`; from 5 on both are in `rope_parameters`. Files saved in between
//! have several of these.
use std::fmt;

use serde::Deserialize;

use super::{Architecture, ConfigError, PAIR, positive};
use crate::geometry::{divide, non_zero};
use crate::num::to_count;
use crate::object::{Agreed, Object, field_error};
use crate::rope::{Dynamic, Llama3, Pairing, RopeConfig, Scaling, Yarn};

/// Returns the rotary embedding, and the longest sequence that it supports.
pub(super) fn read(
    file: &Object<'_>,
    architecture: Architecture,
    head_dim: u32,
) -> Result<(RopeConfig, u32), ConfigError> {
    let keys = Keys::new(file)?;
    let theta = match architecture {
        Architecture::SmolLm3 => 2e6,
        Architecture::Lfm2 => 1e6,
        _ => 1e4,
    };
    let part = match architecture {
        Architecture::Qwen35 | Architecture::Qwen3Next => 0.25,
        _ => 1.0,
    };
    let theta = keys.get_anywhere("rope_theta")?.unwrap_or(theta);
    let part = keys.get_anywhere("partial_rotary_factor")?.unwrap_or(part);
    let rotary_dim = rotary_dim(head_dim, part)?;
    let context: u32 = file.required("max_position_embeddings")?;
    let context = non_zero("max_position_embeddings", context)?;
    let (scaling, context) = keys.scaling(architecture, context)?;
    let pairing = Pairing::Half;
    Ok((RopeConfig { theta, head_dim, rotary_dim, pairing, scaling }, context))
}

/// Returns the number of values of a row that are rotated.
fn rotary_dim(head_dim: u32, part: f64) -> Result<u32, ConfigError> {
    positive("partial_rotary_factor", part)?;
    let dim = to_count(f64::from(head_dim) * part).min(head_dim);
    divide(("rotary_dim", dim), PAIR)?;
    non_zero("rotary_dim", dim)
}

/// The objects that hold parameters of the embedding.
struct Keys<'a> {
    file: Object<'a>,
    /// `rope_scaling` and `rope_parameters`, if they exist.
    objects: Vec<Object<'a>>,
}

impl<'a> Keys<'a> {
    fn new(file: &Object<'a>) -> Result<Self, ConfigError> {
        let mut objects = Vec::new();
        for key in ["rope_scaling", "rope_parameters"] {
            let Some(object) = file.object(key)? else {
                continue;
            };
            for by_layer in ["full_attention", "sliding_attention"] {
                if object.has(by_layer) {
                    let problem = "gives layers parameters of their own, which is not supported";
                    return Err(field_error(object.name(by_layer), problem.to_owned()));
                }
            }
            objects.push(object);
        }
        Ok(Self { file: *file, objects })
    }

    /// Returns a value of the objects, `None` if none of them has it.
    fn get<T>(&self, key: &str) -> Result<Option<T>, ConfigError>
    where
        T: Deserialize<'a> + PartialEq + fmt::Display,
    {
        self.get_and(None, key)
    }

    /// Returns a value of the objects or of the file itself.
    fn get_anywhere<T>(&self, key: &str) -> Result<Option<T>, ConfigError>
    where
        T: Deserialize<'a> + PartialEq + fmt::Display,
    {
        self.get_and(Some(&self.file), key)
    }

    fn get_and<T>(&self, file: Option<&Object<'a>>, key: &str) -> Result<Option<T>, ConfigError>
    where
        T: Deserialize<'a> + PartialEq + fmt::Display,
    {
        let mut agreed = Agreed::none();
        for object in file.into_iter().chain(&self.objects) {
            agreed = agreed.with(object.name(key), object.get(key)?)?;
        }
        Ok(agreed.value())
    }

    /// Returns a number above 0, `None` if it is absent.
    fn positive(&self, key: &'static str) -> Result<Option<f64>, ConfigError> {
        let Some(got) = self.get::<f64>(key)? else {
            return Ok(None);
        };
        if got > 0.0 {
            return Ok(Some(got));
        }
        Err(field_error(self.name(key), format!("is {got}, a number above 0 is needed")))
    }

    fn required<T>(&self, key: &str, value: Option<T>) -> Result<T, ConfigError> {
        value.ok_or_else(|| field_error(self.name(key), "is missing".to_owned()))
    }

    /// Returns the name of a parameter for messages.
    fn name(&self, key: &str) -> String {
        self.objects.last().map_or_else(|| self.file.name(key), |object| object.name(key))
    }

    /// Returns the scaling type under its current name.
    fn scaling_type(&self) -> Result<Option<String>, ConfigError> {
        let mut agreed = Agreed::none();
        for object in &self.objects {
            for key in ["rope_type", "type"] {
                let name = object.get::<String>(key)?;
                // The first name of longrope.
                let name = name.map(|name| if name == "su" { "longrope".to_owned() } else { name });
                agreed = agreed.with(object.name(key), name)?;
            }
        }
        Ok(agreed.value())
    }

    /// Returns the scaling, and the context that it gives.
    fn scaling(
        &self,
        architecture: Architecture,
        context: u32,
    ) -> Result<(Scaling, u32), ConfigError> {
        let mut name = self.scaling_type()?.unwrap_or_default();
        // Early files of phi3 use this name for factors per pair.
        let has_factors = self.objects.iter().any(|object| object.has("short_factor"));
        if architecture == Architecture::Phi3 && name == "yarn" && has_factors {
            "longrope".clone_into(&mut name);
        }
        match name.as_str() {
            "" | "default" => Ok((Scaling::None, context)),
            "linear" => {
                let factor = self.required("factor", self.positive("factor")?)?;
                Ok((Scaling::Linear { factor }, context))
            }
            "dynamic" => {
                let factor = self.required("factor", self.positive("factor")?)?;
                let stretched = to_count(f64::from(context) * factor).max(context);
                let dynamic = Dynamic { factor, original_context: context };
                Ok((Scaling::Dynamic(dynamic), stretched))
            }
            "yarn" => self.yarn(context),
            "llama3" => Ok((Scaling::Llama3(self.llama3(context)?), context)),
            "longrope" => self.longrope(context),
            other => Err(ConfigError::Unsupported {
                field: "rope_scaling type",
                got: other.to_owned(),
                expected: "default, linear, dynamic, yarn, llama3 or longrope",
            }),
        }
    }

    /// Returns the context of the first training, if the file has it.
    fn original_context(&self) -> Result<Option<u32>, ConfigError> {
        let field = "original_max_position_embeddings";
        let original = self.get_anywhere::<u32>(field)?;
        original.map(|original| non_zero(field, original)).transpose()
    }

    fn yarn(&self, context: u32) -> Result<(Scaling, u32), ConfigError> {
        let original = self.original_context()?;
        let ratio = original.map(|original| f64::from(context) / f64::from(original));
        let factor = self.required("factor", self.positive("factor")?.or(ratio))?;
        let original_context = original.unwrap_or(context);
        let magnitude =
            |scale: f64| if factor > 1.0 { 0.1 * scale * factor.ln() + 1.0 } else { 1.0 };
        let scales = self.nonzero("mscale")?.zip(self.nonzero("mscale_all_dim")?);
        let attention_factor = match (self.positive("attention_factor")?, scales) {
            (Some(given), _) => given,
            (None, Some((scale, all_dim))) => magnitude(scale) / magnitude(all_dim),
            (None, None) => magnitude(1.0),
        };
        let yarn = Yarn {
            factor,
            original_context,
            beta_fast: self.nonzero("beta_fast")?.unwrap_or(32.0),
            beta_slow: self.nonzero("beta_slow")?.unwrap_or(1.0),
            truncate: self.get("truncate")?.unwrap_or(true),
            attention_factor,
        };
        let stretched = to_count(f64::from(original_context) * factor).max(context);
        Ok((Scaling::Yarn(yarn), stretched))
    }

    /// Returns a number above 0, `None` if it is absent or 0.
    fn nonzero(&self, key: &'static str) -> Result<Option<f64>, ConfigError> {
        match self.get::<f64>(key)? {
            Some(0.0) => Ok(None),
            _ => self.positive(key),
        }
    }

    fn llama3(&self, context: u32) -> Result<Llama3, ConfigError> {
        let number = |key: &'static str| self.required(key, self.positive(key)?);
        let (low, high) = (number("low_freq_factor")?, number("high_freq_factor")?);
        if high <= low {
            let problem = format!("is {high}, it must be above low_freq_factor, {low}");
            return Err(field_error(self.name("high_freq_factor"), problem));
        }
        Ok(Llama3 {
            factor: number("factor")?,
            low_freq_factor: low,
            high_freq_factor: high,
            original_context: self.original_context()?.unwrap_or(context),
        })
    }

    /// Returns the short factors, which apply up to the original context. Sequences end there: the
    /// long factors would rotate all rows again, cached ones included.
    fn longrope(&self, context: u32) -> Result<(Scaling, u32), ConfigError> {
        let factors = |key: &'static str| {
            let lists = self.objects.iter().map(|object| object.get::<Vec<f64>>(key));
            let lists = lists.collect::<Result<Vec<_>, _>>()?;
            self.required(key, lists.into_iter().flatten().next())
        };
        let short = factors("short_factor")?;
        let original = self.original_context()?;
        let original = self.required("original_max_position_embeddings", original)?;
        let ratio = f64::from(context) / f64::from(original);
        let factor = self.positive("factor")?.unwrap_or(ratio);
        let grown = || (1.0 + factor.ln() / f64::from(original).ln()).sqrt();
        let attention_factor = match self.positive("attention_factor")? {
            Some(given) => given,
            None if factor > 1.0 => grown(),
            None => 1.0,
        };
        Ok((Scaling::LongRope { short, attention_factor }, context.min(original)))
    }
}
