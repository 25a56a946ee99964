//! How a cache stores K and V, and how that is written: `int8/l4,full-precision-prefix=8`.
use std::collections::BTreeSet;
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use kv::error::{SpecError, UnknownName};
use kv::quant::{ScaleGroup, Scaling};
use kv::spec::{CacheSpecBuilder, KeyMean, Transform};
use kv::{CacheSpec, KvFormat};

use crate::config::ModelConfig;
use crate::num::to_f64;

/// Blocks that hold a tail, whatever their size: a row in 16 bits takes six slots at most, so a
/// block of `n` slots holds `n / 6` of them, and eleven blocks of eleven slots are the most one
/// tail takes.
const TAIL_FITS: u32 = 16;

/// First tokens of a sequence that stay in 16 bits, in formats whose rows are transformed, unless
/// another number is given.
pub const FULL_PRECISION_PREFIX: u32 = 4;

/// How a cache stores K and V. As text `K[/V]`, then options after commas: `V=NAME`,
/// `calib=FILE|online`, `full-precision-prefix=N`, `transform=on|off`, `tail=on|off`,
/// `mean=calib|block`.
///
/// ```
/// use kv::KvFormat;
/// use kv_runner::stored::Stored;
/// let stored: Stored = "int8/l4,full-precision-prefix=8".parse()?;
/// assert_eq!((stored.formats(), stored.full_precision_prefix()), ("int8/l4".to_owned(), 8));
/// assert_eq!("bf16".parse::<Stored>()?, Stored::plain(KvFormat::Bf16));
/// # Ok::<(), kv_runner::stored::StoredError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stored {
    /// Format of K.
    pub k: KvFormat,
    /// Format of V.
    pub v: KvFormat,
    /// Where the constants come from, `None` for no constants.
    pub calibration: Option<Source>,
    /// First tokens of a sequence in 16 bits; unless given, as many as suit the format.
    pub full_precision_prefix: Option<u32>,
    /// Whether rows are transformed; unless given, where it suits the format.
    pub transform: Option<bool>,
    /// Whether the block that a sequence is filling stays in 16 bits; unless given, where the mean
    /// of a block needs it.
    pub tail: Option<bool>,
    /// Which mean is taken off the keys; unless given, the calibration's.
    pub mean: Option<KeyMean>,
}

/// Where the constants of quantised storage come from.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "a caller handles each of them")]
pub enum Source {
    /// What `kv calibrate` wrote.
    File(PathBuf),
    /// The first tokens of the run itself.
    Online,
}

/// A text that describes no stored format.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum StoredError {
    /// A format of an unknown name.
    #[error(transparent)]
    Format(#[from] UnknownName),
    /// An option that is there twice.
    #[error("{name} is given twice")]
    Twice {
        /// The option.
        name: &'static str,
    },
    /// An option of an unknown name.
    #[error(
        "{got:?} is no option of a format, expected V=, calib=, full-precision-prefix=, \
         transform=, tail= or mean="
    )]
    Option {
        /// What is there in place of an option.
        got: String,
    },
    /// An option whose value cannot be used.
    #[error("{name}={got}: expected {expected}")]
    Value {
        /// The option.
        name: &'static str,
        /// Its value.
        got: String,
        /// What would do.
        expected: &'static str,
    },
}

/// A format whose scales must be given, where there is nothing to take them from.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{format} needs scales from a calibration: give {give}, or use a format whose rows bring their \
     own, such as {instead}"
)]
pub struct NoScales {
    format: KvFormat,
    give: &'static str,
    instead: KvFormat,
}

impl Stored {
    /// One format for K and V, the rest as suits it.
    pub fn plain(format: KvFormat) -> Self {
        let (calibration, full_precision_prefix, transform, tail, mean) =
            (None, None, None, None, None);
        Self { k: format, v: format, calibration, full_precision_prefix, transform, tail, mean }
    }

    /// Describes a cache for a model; `set` sets how its memory is divided and what else holds for
    /// all its layers.
    ///
    /// Layers with one window form a group, which keeps no more than that window. Those without
    /// come first.
    ///
    /// # Errors
    /// As the builder's.
    pub fn spec(
        &self,
        config: &ModelConfig,
        set: impl FnOnce(CacheSpecBuilder) -> CacheSpecBuilder,
    ) -> Result<CacheSpec, SpecError> {
        let mut builder = set(self.settings(config));
        let windows: BTreeSet<_> =
            config.layer_kinds.iter().filter_map(|kind| kind.window_left).collect();
        for left in windows {
            let kinds = (0..).zip(&config.layer_kinds);
            let layers = kinds.filter(|(_, kind)| kind.window_left == Some(left));
            builder =
                builder.group(layers.map(|(layer, _)| layer), |group| group.window_left(left));
        }
        builder.build()
    }

    fn settings(&self, config: &ModelConfig) -> CacheSpecBuilder {
        let builder = CacheSpec::builder().layers(config.layers());
        self.apply(builder.kv_heads(config.kv_heads).head_dim(config.head_dim))
    }

    /// Sets how rows are stored, whatever their shape.
    pub fn apply(&self, builder: CacheSpecBuilder) -> CacheSpecBuilder {
        builder
            .formats(self.k, self.v)
            .transform(match self.transform {
                None => Transform::Auto,
                Some(true) => Transform::On,
                Some(false) => Transform::Off,
            })
            .full_precision_prefix(self.full_precision_prefix())
            .tail(self.has_tail())
            .key_mean(self.mean.unwrap_or_default())
    }

    /// Describes the smallest cache for a model in blocks of `block_size` tokens, to ask it what a
    /// block holds.
    ///
    /// # Errors
    /// As the builder's.
    pub fn few_blocks(
        &self,
        config: &ModelConfig,
        block_size: u32,
    ) -> Result<CacheSpec, SpecError> {
        self.spec(config, |cache| cache.paged(block_size, self.blocks_min()))
    }

    /// Returns the blocks of the smallest cache that can be built.
    pub fn blocks_min(&self) -> u32 {
        if self.has_tail() { TAIL_FITS } else { 1 }
    }

    fn has_tail(&self) -> bool {
        self.tail.unwrap_or(self.mean == Some(KeyMean::PerBlock))
    }

    /// Returns how many first tokens of a sequence stay in 16 bits.
    pub fn full_precision_prefix(&self) -> u32 {
        let transforms = |format: KvFormat| match self.transform {
            None => format.is_for_transformed(),
            Some(transform) => transform && format.is_quantised(),
        };
        let suits = transforms(self.k) || transforms(self.v);
        self.full_precision_prefix.unwrap_or(if suits { FULL_PRECISION_PREFIX } else { 0 })
    }

    /// Refuses formats whose scales must be given, where no calibration is; `give` says in the
    /// message how one is given.
    ///
    /// # Errors
    /// [`NoScales`] for such a format.
    pub fn check_scales(&self, give: &'static str) -> Result<(), NoScales> {
        let needs = |format: &KvFormat| format.given_scales().is_some();
        match [self.k, self.v].into_iter().find(needs) {
            None => Ok(()),
            Some(format) => Err(NoScales { format, give, instead: with_row_scales(format) }),
        }
    }

    /// Returns the formats alone: `K`, or `K/V` where they differ.
    pub fn formats(&self) -> String {
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
            "full-precision-prefix" => {
                let prefix = value
                    .parse()
                    .map_err(|_| wrong("full-precision-prefix", "a number of tokens"))?;
                once("full-precision-prefix", &mut self.full_precision_prefix, prefix)
            }
            "transform" => {
                let on = on_or_off(value).ok_or_else(|| wrong("transform", "on or off"))?;
                once("transform", &mut self.transform, on)
            }
            "tail" => {
                let on = on_or_off(value).ok_or_else(|| wrong("tail", "on or off"))?;
                once("tail", &mut self.tail, on)
            }
            "mean" => {
                let mean = match value {
                    "calib" => KeyMean::Calibrated,
                    "block" => KeyMean::PerBlock,
                    _ => return Err(wrong("mean", "calib or block")),
                };
                once("mean", &mut self.mean, mean)
            }
            _ => Err(unknown()),
        }
    }
}

/// Returns the blocks that one sequence needs to grow to `tokens` tokens in steps of any size, what
/// it keeps in 16 bits included.
pub fn blocks_of(spec: &CacheSpec, tokens: u32) -> u32 {
    spec.groups().iter().map(|group| group.slot_map().blocks_reserved(tokens)).max().unwrap_or(0)
}

/// Returns the stored bits a value, with scales and means of blocks; the mean of K and V.
pub fn bits_per_value(spec: &CacheSpec) -> f64 {
    let Some(group) = spec.groups().first() else {
        return 0.0;
    };
    let [k, v] = group.layouts().map(|plane| {
        let rows = f64::from(plane.block_size()) * f64::from(plane.num_kv_heads());
        to_f64(plane.block_bytes()) * 8.0 / (rows * f64::from(plane.head_dim()))
    });
    f64::midpoint(k, v)
}

fn on_or_off(text: &str) -> Option<bool> {
    match text {
        "on" => Some(true),
        "off" => Some(false),
        _ => None,
    }
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
        if let Some(full_precision_prefix) = self.full_precision_prefix {
            write!(f, ",full-precision-prefix={full_precision_prefix}")?;
        }
        for (name, on) in [("transform", self.transform), ("tail", self.tail)] {
            if let Some(on) = on {
                write!(f, ",{name}={}", if on { "on" } else { "off" })?;
            }
        }
        match self.mean {
            Some(KeyMean::PerBlock) => f.write_str(",mean=block"),
            Some(KeyMean::Calibrated) => f.write_str(",mean=calib"),
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
            "l4,calib=a b/c.safetensors,full-precision-prefix=0,transform=off",
            "fp8-e4m3/nvfp4,calib=online",
            "l3-g32,full-precision-prefix=12,transform=on",
            "l4,tail=on",
            "l4,full-precision-prefix=4,tail=off,mean=block",
            "l4,mean=calib",
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
            (
                "l4,full-precision-prefix=4,full-precision-prefix=4",
                "full-precision-prefix is given twice",
            ),
            (
                "l4,full-precision-prefix=-1",
                "full-precision-prefix=-1: expected a number of tokens",
            ),
            ("l4,full-precision-prefix=4294967296", "expected a number of tokens"),
            ("l4,transform=maybe", "transform=maybe: expected on or off"),
            ("l4,tail=yes", "tail=yes: expected on or off"),
            ("l4,mean=none", "mean=none: expected calib or block"),
            ("l4,mean=block,mean=block", "mean is given twice"),
            ("l4,calib=", "expected a file, or online"),
        ] {
            let error = text.parse::<Stored>().expect_err(text).to_string();
            assert!(error.contains(words), "{text}: {error}");
        }
    }

    #[test]
    fn bits_are_the_mean_of_both_planes_and_what_a_block_adds() {
        let bits = |text: &str, head_dim| {
            let stored = read(text);
            let cache = CacheSpec::builder().layers(3).kv_heads(2).head_dim(head_dim);
            let cache = cache.formats(stored.k, stored.v).tail(stored.has_tail());
            let cache = cache.key_mean(stored.mean.unwrap_or_default()).paged(16, 16);
            bits_per_value(&cache.build().expect(text))
        };
        for (text, head_dim, expected) in [
            ("bf16", 8, 16.0),
            ("l4", 128, 4.125),
            ("int8/l4", 128, 6.125),
            ("l4", 64, 4.25),
            // 16 bits for each channel of K, in blocks of 16.
            ("l4,mean=block", 64, 4.75),
        ] {
            assert_eq!(bits(text, head_dim).to_bits(), f64::to_bits(expected), "{text}");
        }
        for format in KvFormat::all() {
            let expected = format.bits_per_value(80);
            assert!((bits(&format.to_string(), 80) - expected).abs() < 1e-12, "{format}");
        }
    }
}
