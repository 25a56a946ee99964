//! The text form of a stored format: `int8/l4,full-precision-prefix=8`.
use std::fmt;
use std::str::FromStr;

use kv_core::KvFormat;
use kv_core::error::UnknownName;
use kv_core::spec::KeyMean;

use super::{Source, Stored};

/// A text that is not a stored format.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum StoredError {
    /// An unknown format.
    #[error(transparent)]
    Format(#[from] UnknownName),
    /// An option that is given twice.
    #[error("{name} is given twice")]
    Twice {
        /// The option.
        name: &'static str,
    },
    /// An unknown option.
    #[error(
        "{got:?} is not an option of a format, expected V=, calib=, full-precision-prefix=, \
         transform=, tail= or mean="
    )]
    Option {
        /// The text instead of an option.
        got: String,
    },
    /// An option with an invalid value.
    #[error("{name}={got}: expected {expected}")]
    Value {
        /// The option.
        name: &'static str,
        /// Its value.
        got: String,
        /// The expected values.
        expected: &'static str,
    },
}

impl Stored {
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
                let full_precision_prefix = value
                    .parse()
                    .map_err(|_| wrong("full-precision-prefix", "a number of tokens"))?;
                once(
                    "full-precision-prefix",
                    &mut self.full_precision_prefix,
                    full_precision_prefix,
                )
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

fn on_or_off(text: &str) -> Option<bool> {
    match text {
        "on" => Some(true),
        "off" => Some(false),
        _ => None,
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
    use kv::quant::ScaleGroup;

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
    fn invalid_formats_are_refused_with_a_reason() {
        for (text, words) in [
            ("", "unknown stored format \"\""),
            ("l5", "unknown stored format \"l5\""),
            ("l4/", "unknown stored format \"\""),
            ("l4/l3/l3", "unknown stored format \"l3/l3\""),
            ("l4,", "\"\" is not an option of a format"),
            ("l4,int8", "\"int8\" is not an option of a format"),
            ("l4,K=int8", "\"K=int8\" is not an option"),
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
}
