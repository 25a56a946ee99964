//! How a cache stores K and V, as the command line says it.
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use kv::{CacheSpec, CacheSpecBuilder, KvFormat, ScaleGroup, Scaling, Transform, UnknownName};

use crate::config::ModelConfig;

/// Sinks of a format whose rows are transformed.
pub(crate) const SINKS: u32 = 4;

/// The argument of `--format`: `K[/V][,V=NAME][,calib=FILE|online][,sinks=N][,transform=on|off]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Stored {
    pub(crate) k: KvFormat,
    pub(crate) v: KvFormat,
    /// Where the constants come from, `None` for no constants.
    pub(crate) calibration: Option<Source>,
    /// First tokens of a sequence in 16 bits; unless given, as many as suit the format.
    pub(crate) sinks: Option<u32>,
    /// Whether rows are transformed; unless given, where it suits the format.
    pub(crate) transform: Option<bool>,
}

/// Where the constants of quantised storage come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Source {
    /// What `kv calibrate` wrote.
    File(PathBuf),
    /// The first tokens of the run itself.
    Online,
}

/// Why an argument of `--format` is none.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub(crate) enum StoredError {
    #[error(transparent)]
    Format(#[from] UnknownName),
    #[error("{name} is given twice")]
    Twice { name: &'static str },
    #[error("{got:?} is no option of a format, expected V=, calib=, sinks= or transform=")]
    Option { got: String },
    #[error("{name}={got}: expected {expected}")]
    Value { name: &'static str, got: String, expected: &'static str },
}

/// A format whose scales must be given, where there is nothing to take them from.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{format} needs scales from a calibration: give {give}, or use a format whose rows bring their \
     own, such as {instead}"
)]
pub(crate) struct NoScales {
    format: KvFormat,
    give: &'static str,
    instead: KvFormat,
}

impl Stored {
    /// One format for K and V, the rest as suits it.
    pub(crate) fn plain(format: KvFormat) -> Self {
        Self { k: format, v: format, calibration: None, sinks: None, transform: None }
    }

    /// Settings of a cache for this model; how its memory is cut is left open.
    pub(crate) fn cache(&self, config: &ModelConfig) -> CacheSpecBuilder {
        CacheSpec::builder()
            .layers(config.layers)
            .kv_heads(config.kv_heads)
            .head_dim(config.head_dim)
            .formats(self.k, self.v)
            .transform(match self.transform {
                None => Transform::Auto,
                Some(true) => Transform::On,
                Some(false) => Transform::Off,
            })
            .sinks(self.sinks())
    }

    /// First tokens of a sequence that stay in 16 bits.
    pub(crate) fn sinks(&self) -> u32 {
        let transforms = |format: KvFormat| match self.transform {
            None => format.is_for_transformed(),
            Some(transform) => transform && format.is_quantised(),
        };
        let suits = transforms(self.k) || transforms(self.v);
        self.sinks.unwrap_or(if suits { SINKS } else { 0 })
    }

    /// Stored bits a value, scales included; the mean of K and V.
    pub(crate) fn bits_per_value(&self, head_dim: u32) -> f64 {
        f64::midpoint(self.k.bits_per_value(head_dim), self.v.bits_per_value(head_dim))
    }

    /// Refuses formats whose scales must be given, where no calibration is; `give` says how one is
    /// given.
    pub(crate) fn check_scales(&self, give: &'static str) -> Result<(), NoScales> {
        let needs = |format: &KvFormat| format.given_scales().is_some();
        match [self.k, self.v].into_iter().find(needs) {
            None => Ok(()),
            Some(format) => Err(NoScales { format, give, instead: with_row_scales(format) }),
        }
    }

    /// The formats alone: `K`, or `K/V` where they differ.
    pub(crate) fn formats(&self) -> String {
        let Self { k, v, .. } = self;
        if k == v { k.to_string() } else { format!("{k}/{v}") }
    }

    fn set(&mut self, option: &str, v: &mut Option<KvFormat>) -> Result<(), StoredError> {
        let unknown = || StoredError::Option { got: option.to_owned() };
        let (name, value) = option.split_once('=').ok_or_else(unknown)?;
        let (name, value) = (name.trim(), value.trim());
        let wrong = |name, expected| StoredError::Value { name, got: value.to_owned(), expected };
        match name {
            "V" | "v" => once("V", v, value.parse()?),
            "calib" => {
                let source = match value {
                    "" => return Err(wrong("calib", "a file, or online")),
                    "online" => Source::Online,
                    file => Source::File(file.into()),
                };
                once("calib", &mut self.calibration, source)
            }
            "sinks" => {
                let sinks = value.parse().map_err(|_| wrong("sinks", "a number of tokens"))?;
                once("sinks", &mut self.sinks, sinks)
            }
            "transform" => {
                let transform = match value {
                    "on" => true,
                    "off" => false,
                    _ => return Err(wrong("transform", "on or off")),
                };
                once("transform", &mut self.transform, transform)
            }
            _ => Err(unknown()),
        }
    }
}

/// Blocks that one sequence of `tokens` tokens takes, its sinks included.
pub(crate) fn blocks_of(spec: &CacheSpec, tokens: u32) -> u32 {
    spec.groups().iter().map(|group| group.slot_map().blocks(tokens)).max().unwrap_or(0)
}

/// The nearest format whose rows bring their own scales.
fn with_row_scales(format: KvFormat) -> KvFormat {
    match format {
        KvFormat::Fp8E4m3(_) => KvFormat::Fp8E4m3(Scaling::Row),
        KvFormat::Fp8E5m2(_) => KvFormat::Fp8E5m2(Scaling::Row),
        KvFormat::Nvfp4 => KvFormat::L4(ScaleGroup::Group32),
        _ => KvFormat::Int8(Scaling::Row),
    }
}

fn once<T>(name: &'static str, place: &mut Option<T>, value: T) -> Result<(), StoredError> {
    match place.replace(value) {
        None => Ok(()),
        Some(_) => Err(StoredError::Twice { name }),
    }
}

impl FromStr for Stored {
    type Err = StoredError;

    fn from_str(text: &str) -> Result<Self, StoredError> {
        let mut parts = text.split(',').map(str::trim);
        let first = parts.next().unwrap_or_default();
        let (k, mut v) = match first.split_once('/') {
            Some((k, v)) => (k.parse()?, Some(v.parse()?)),
            None => (first.parse()?, None),
        };
        let mut stored = Self::plain(k);
        for option in parts {
            stored.set(option, &mut v)?;
        }
        stored.v = v.unwrap_or(k);
        Ok(stored)
    }
}

impl fmt::Display for Stored {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.formats())?;
        match &self.calibration {
            Some(Source::File(path)) => write!(f, ",calib={}", path.display())?,
            Some(Source::Online) => f.write_str(",calib=online")?,
            None => {}
        }
        if let Some(sinks) = self.sinks {
            write!(f, ",sinks={sinks}")?;
        }
        match self.transform {
            Some(true) => f.write_str(",transform=on"),
            Some(false) => f.write_str(",transform=off"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Stored {
        text.parse().expect(text)
    }

    #[test]
    fn a_format_is_read_back_as_it_was_written() {
        for text in [
            "l4",
            "int8/l4",
            "f32",
            "l4,calib=a b/c.safetensors,sinks=0,transform=off",
            "fp8-e4m3/nvfp4,calib=online",
            "l3-g32,sinks=12,transform=on",
        ] {
            assert_eq!(read(text).to_string(), text);
        }
        assert_eq!(read("int8,V=l4"), read("int8/l4"));
        assert_eq!(read("int8 , V = l4"), read("int8/l4"));
        assert_eq!(read("l4/l4").to_string(), "l4");
        assert_eq!(read("l4"), Stored::plain(KvFormat::L4(ScaleGroup::Row)));
    }

    #[test]
    fn what_is_no_format_says_why() {
        for (text, words) in [
            ("", "unknown stored format \"\""),
            ("l5", "unknown stored format \"l5\""),
            ("l4/", "unknown stored format \"\""),
            ("l4/l3/l3", "unknown stored format \"l3/l3\""),
            ("l4,", "\"\" is no option of a format"),
            ("l4,int8", "\"int8\" is no option of a format"),
            ("l4,K=int8", "\"K=int8\" is no option"),
            ("l4,V=int7", "unknown stored format \"int7\""),
            ("int8/l4,V=l4", "V is given twice"),
            ("l4,sinks=4,sinks=4", "sinks is given twice"),
            ("l4,sinks=-1", "sinks=-1: expected a number of tokens"),
            ("l4,sinks=4294967296", "expected a number of tokens"),
            ("l4,transform=maybe", "transform=maybe: expected on or off"),
            ("l4,calib=", "expected a file, or online"),
        ] {
            let error = text.parse::<Stored>().expect_err(text).to_string();
            assert!(error.contains(words), "{text}: {error}");
        }
    }

    #[test]
    fn bits_are_the_mean_of_both_planes() {
        assert_eq!(read("int8/l4").bits_per_value(128).to_bits(), 6.125_f64.to_bits());
        assert_eq!(read("bf16").bits_per_value(8).to_bits(), 16.0_f64.to_bits());
    }
}
