//! The stored format of K and V as a user writes it: formats, and the options of their rows.
// Reads files that may be anything.
#![warn(clippy::arithmetic_side_effects, clippy::indexing_slicing)]
mod text;

use std::path::PathBuf;

use kv_core::num::to_f64;
use kv_core::spec::{CacheSpecBuilder, KeyMean, Transform};
use kv_core::{CacheSpec, KvFormat, ScaleGroup, Scaling};

pub use text::StoredError;

/// Number of blocks that hold a tail of any block size: a row in 16 bits takes at most six slots,
/// so a block of `n` slots holds `n / 6` rows, and eleven blocks of eleven slots are the most that
/// one tail takes.
const TAIL_FITS: u32 = 16;

/// Default number of tokens in the full-precision prefix, for formats whose rows are transformed.
pub const FULL_PRECISION_PREFIX: u32 = 4;

/// The stored format of K and V. As text `K[/V]`, then options after commas: `V=NAME`,
/// `calib=FILE|online`, `full-precision-prefix=N`, `transform=on|off`, `tail=on|off`,
/// `mean=calib|block`.
///
/// ```
/// use kv::KvFormat;
/// use kv::quant::Stored;
/// let stored: Stored = "int8/l4,full-precision-prefix=8".parse()?;
/// assert_eq!((stored.formats(), stored.full_precision_prefix()), ("int8/l4".to_owned(), 8));
/// assert_eq!("bf16".parse::<Stored>()?, Stored::plain(KvFormat::Bf16));
/// # Ok::<(), kv::quant::StoredError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stored {
    /// Format of K.
    pub k: KvFormat,
    /// Format of V.
    pub v: KvFormat,
    /// The source of the constants, `None` for no constants.
    pub calibration: Option<Source>,
    /// Tokens in the full-precision prefix; `None` for the format's default.
    pub full_precision_prefix: Option<u32>,
    /// Whether rows are transformed; `None` for the format's default.
    pub transform: Option<bool>,
    /// Whether a tail stays in 16 bits until its block is full; `None` for yes if a block mean
    /// needs it.
    pub tail: Option<bool>,
    /// The mean that is subtracted from keys; `None` for the calibration's.
    pub mean: Option<KeyMean>,
}

/// The source of the constants of quantised storage.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "a caller handles each of them")]
pub enum Source {
    /// A file that `kv calibrate` wrote.
    File(PathBuf),
    /// The first tokens of the run itself.
    Online,
}

/// A format that needs given scales, without a calibration.
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
    /// Makes one format for K and V, with default options.
    pub fn plain(format: KvFormat) -> Self {
        let (calibration, full_precision_prefix, transform, tail, mean) =
            (None, None, None, None, None);
        Self { k: format, v: format, calibration, full_precision_prefix, transform, tail, mean }
    }

    /// Sets the storage of rows of any shape.
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

    /// Returns the number of blocks of the smallest cache.
    pub fn blocks_min(&self) -> u32 {
        if self.has_tail() { TAIL_FITS } else { 1 }
    }

    fn has_tail(&self) -> bool {
        self.tail.unwrap_or(self.mean == Some(KeyMean::PerBlock))
    }

    /// Returns the number of tokens in the full-precision prefix.
    pub fn full_precision_prefix(&self) -> u32 {
        let transforms = |format: KvFormat| match self.transform {
            None => format.is_for_transformed(),
            Some(transform) => transform && format.is_quantised(),
        };
        let suits = transforms(self.k) || transforms(self.v);
        self.full_precision_prefix.unwrap_or(if suits { FULL_PRECISION_PREFIX } else { 0 })
    }

    /// Refuses formats that need given scales if there is no calibration; the message contains
    /// `give`, which says how to pass one.
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

    /// Returns the formats as text: `K`, or `K/V` if they differ.
    pub fn formats(&self) -> String {
        let Self { k, v, .. } = self;
        if k == v { k.to_string() } else { format!("{k}/{v}") }
    }
}

/// Returns the stored bits per value, with scales and block means; the mean of K and V.
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

/// Returns the nearest format with a scale per row.
fn with_row_scales(format: KvFormat) -> KvFormat {
    match format {
        KvFormat::Fp8E4m3(_) => KvFormat::Fp8E4m3(Scaling::Row),
        KvFormat::Fp8E5m2(_) => KvFormat::Fp8E5m2(Scaling::Row),
        KvFormat::Nvfp4 => KvFormat::L4(ScaleGroup::Group32),
        _ => KvFormat::Int8(Scaling::Row),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Stored {
        text.parse().expect(text)
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
