//! Arguments of the program.
use std::path::PathBuf;

use kv_core::KvFormat;

use crate::bench::Result;

const USAGE: &str = "gpu [--device N | --emulated] [--tiny] [--part PART] [--format FORMAT] \
                     [--only NAME] [--out FILE]; PART: all, facts, oracle, headline, decode, \
                     prefill, moves, steps";

/// The part that is checked or measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Part {
    #[default]
    All,
    /// Facts about the device.
    Facts,
    /// Correctness checks.
    Oracle,
    /// The most important cases of each family; other parts leave them out.
    Headline,
    Decode,
    Prefill,
    /// Copies, appends and gathers.
    Moves,
    Steps,
}

/// Options of a run.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Options {
    /// Ordinal of the card.
    pub(crate) device: u32,
    /// Use the emulator instead of a card.
    pub(crate) emulated: bool,
    /// Tiny sizes, which only show that the program works.
    pub(crate) tiny: bool,
    pub(crate) part: Part,
    /// Only this stored format.
    pub(crate) format: Option<KvFormat>,
    /// Only this measure.
    pub(crate) only: Option<String>,
    /// File for records instead of standard output.
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
                "--part" => options.part = part(&args.next().ok_or(USAGE)?).ok_or(USAGE)?,
                "--format" => options.format = Some(args.next().ok_or(USAGE)?.parse()?),
                "--only" => options.only = Some(args.next().ok_or(USAGE)?),
                _ => return Err(USAGE.into()),
            }
        }
        Ok(options)
    }
}

fn part(name: &str) -> Option<Part> {
    Some(match name {
        "all" => Part::All,
        "facts" => Part::Facts,
        "oracle" => Part::Oracle,
        "headline" => Part::Headline,
        "decode" => Part::Decode,
        "prefill" => Part::Prefill,
        "moves" => Part::Moves,
        "steps" => Part::Steps,
        _ => return None,
    })
}
