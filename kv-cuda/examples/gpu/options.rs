//! Arguments of the program.
use std::path::PathBuf;

use crate::bench::Result;

const USAGE: &str = "gpu [--device N | --emulated] [--tiny] [--facts] [--out FILE]";

/// What to run.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Options {
    /// Ordinal of the card.
    pub(crate) device: u32,
    /// The CPU instead of a card.
    pub(crate) emulated: bool,
    /// Sizes that show that the program works, and nothing else.
    pub(crate) tiny: bool,
    /// Says what the device is, and ends.
    pub(crate) facts_only: bool,
    /// Where records go instead of standard output.
    pub(crate) out: Option<PathBuf>,
}

impl Options {
    pub(crate) fn parse(args: impl IntoIterator<Item = String>) -> Result<Self> {
        let mut options = Self::default();
        let mut args = args.into_iter();
        while let Some(arg) = args.next() {
            match arg.as_str() {
                "--device" => options.device = args.next().ok_or(USAGE)?.parse()?,
                "--out" => options.out = Some(args.next().ok_or(USAGE)?.into()),
                "--emulated" => options.emulated = true,
                "--tiny" => options.tiny = true,
                "--facts" => options.facts_only = true,
                _ => return Err(USAGE.into()),
            }
        }
        Ok(options)
    }
}
