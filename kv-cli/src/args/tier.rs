//! Arguments of `kv tier`.
use std::str::FromStr;

use clap::{ArgGroup, Args, Subcommand};

use crate::tier::{AddressParser, Age, Place};

/// Show, check and clean what lower tiers keep: a folder, Redis or Valkey, or S3.
///
/// PLACE is a folder, or an address as --tier takes it: disk=DIR:SIZE, redis://.., s3://... Others
/// may use it meanwhile. Nothing is created. Age is the time since a chunk was written, by its
/// header.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  kv tier ls cache
  kv tier stat redis://127.0.0.1/?prefix=llama:
  kv tier verify cache --remove --json
  kv tier rm cache --older-than 30d --yes
  kv tier rm cache --root 0123456789abcdef --yes")]
pub(crate) struct TierArgs {
    #[command(subcommand)]
    pub(crate) command: TierCommand,
}

#[derive(Debug, Subcommand)]
pub(crate) enum TierCommand {
    Ls(LsArgs),
    Stat(StatArgs),
    Verify(VerifyArgs),
    Rm(RmArgs),
}

/// List chunks, a line each, with what their headers say.
///
/// A line has the first 16 digits of names, the formats of K and V, tokens, blocks of the prompt,
/// bytes and age; a chunk without a readable header has the reason. With --json each line is an
/// object.
#[derive(Debug, Args)]
pub(crate) struct LsArgs {
    /// The folder or store
    #[arg(value_name = "PLACE", value_parser = AddressParser::<Place>::new())]
    pub(crate) place: Place,

    /// Only chunks of this root: 16 to 64 hexadecimal digits
    #[arg(long, value_name = "HEX")]
    pub(crate) root: Option<RootDigits>,

    /// Print one JSON object per chunk
    #[arg(long)]
    pub(crate) json: bool,
}

/// Count chunks and bytes by root: one root for each model, format, tenant and adapter.
///
/// What a root is comes from the header of one of its chunks; all of them agree on it.
#[derive(Debug, Args)]
pub(crate) struct StatArgs {
    /// The folder or store
    #[arg(value_name = "PLACE", value_parser = AddressParser::<Place>::new())]
    pub(crate) place: Place,

    /// Print one JSON object instead of a table
    #[arg(long)]
    pub(crate) json: bool,
}

/// Read every chunk, check it against its checksums and its name, and list those that are broken.
///
/// The exit code is 1 if there are any. Chunks of a newer version, and files under other names, are
/// counted and left alone. Whether a chunk is right for a prompt is checked whenever it is used.
#[derive(Debug, Args)]
pub(crate) struct VerifyArgs {
    /// The folder or store
    #[arg(value_name = "PLACE", value_parser = AddressParser::<Place>::new())]
    pub(crate) place: Place,

    /// Remove the broken chunks
    #[arg(long)]
    pub(crate) remove: bool,

    /// Print one JSON object instead of text
    #[arg(long)]
    pub(crate) json: bool,
}

/// Remove chunks: a root, those older than an age, both together, or all.
///
/// Without --yes, chunks are counted and not removed. A chunk without a readable header has no age:
/// `kv tier verify --remove` removes it. Files under other names stay.
#[derive(Debug, Args)]
#[command(group(
    ArgGroup::new("which").args(["root", "older_than", "all"]).multiple(true).required(true)
))]
pub(crate) struct RmArgs {
    /// The folder or store
    #[arg(value_name = "PLACE", value_parser = AddressParser::<Place>::new())]
    pub(crate) place: Place,

    /// Chunks of this root: 16 to 64 hexadecimal digits
    #[arg(long, value_name = "HEX")]
    pub(crate) root: Option<RootDigits>,

    /// Chunks that were written longer ago, such as 90m, 12h or 30d
    #[arg(long, value_name = "AGE")]
    pub(crate) older_than: Option<Age>,

    /// Every chunk
    #[arg(long, conflicts_with_all = ["root", "older_than"])]
    pub(crate) all: bool,

    /// Remove them
    #[arg(long)]
    pub(crate) yes: bool,

    /// Print one JSON object instead of text
    #[arg(long)]
    pub(crate) json: bool,
}

/// The beginning of a root's name, in lower-case hexadecimal digits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RootDigits(pub(crate) String);

impl FromStr for RootDigits {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let is_digit = |byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
        if (16..=64).contains(&text.len()) && text.bytes().all(is_digit) {
            return Ok(Self(text.to_owned()));
        }
        Err("expected 16 to 64 lower-case hexadecimal digits".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn roots_are_digits() {
        for length in [16, 40, 64] {
            let text = "0f".repeat(length / 2);
            assert_eq!(text.parse(), Ok(RootDigits(text)));
        }
        for text in ["", "0123456789abcde", "0123456789ABCDEF", &"0".repeat(65), "0123456789abcdeg"]
        {
            assert!(text.parse::<RootDigits>().is_err(), "{text}");
        }
    }
}
