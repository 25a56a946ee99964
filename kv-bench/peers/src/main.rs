//! Block management, attention, models and chunks on a disk beside other libraries, in one run:
//! `cargo xtask bench peers`.
//!
//! The modules list the peers and say how they are timed. Peers that are Python packages run if
//! `--python` names an interpreter that has them.
mod attention;
mod blocks;
#[cfg(target_os = "linux")]
mod disk;
mod models;

use std::path::PathBuf;

#[cfg(target_os = "linux")]
use anyhow::Context as _;
use anyhow::Result;
use lexopt::{Arg, Parser, ValueExt};
use serde::Serialize;

const HELP: &str = "\
Usage: kv-bench-peers [OPTIONS] [blocks|attention [FILTER...]|models [FILTER...]|disk]

Without a name, blocks and attention are measured; the others only by name: models because they
take most of the memory, disk because it writes some GiB, and on Linux only. FILTER is a part of a
case's name, such as decode, bf16, c4096 or prefill, of models smollm2, wide or b16; a case runs if
its name contains all filters.

  --full          every case of attention or models, not only a cross through the grid
  --python PATH   a Python interpreter with torch or llama_cpp
  --dir PATH      of disk: an existing folder on the disk to measure; default: target
  --mib N         of disk: MiB of all chunks together; default: 512
  --rounds N      of disk: rounds after the warm-up; default: 7
  --json          one JSON object on standard output instead of text
  --help          print this help
";

/// The parts that can be measured.
const PARTS: &[&str] = if cfg!(target_os = "linux") {
    &["blocks", "attention", "models", "disk"]
} else {
    &["blocks", "attention", "models"]
};

/// The parsed command line.
#[derive(Debug, Default)]
struct Options {
    /// One of [`PARTS`]; `blocks` and `attention` when absent.
    only: Option<String>,
    filters: Vec<String>,
    python: Option<PathBuf>,
    is_full: bool,
    json: bool,
    #[cfg(target_os = "linux")]
    disk: disk::Options,
}

#[derive(Default, Serialize)]
struct Output {
    #[serde(skip_serializing_if = "Option::is_none")]
    blocks: Option<Vec<blocks::Compared>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    attention: Option<attention::Report>,
    #[serde(skip_serializing_if = "Option::is_none")]
    models: Option<models::Report>,
    #[cfg(target_os = "linux")]
    #[serde(skip_serializing_if = "Option::is_none")]
    disk: Option<disk::Report>,
}

fn main() -> Result<()> {
    let Some(options) = parse(Parser::from_env())? else {
        print!("{HELP}");
        return Ok(());
    };
    let wants = |part: &str| options.only.as_deref().is_none_or(|only| only == part);
    let mut output = Output::default();
    if wants("blocks") {
        let compared = blocks::run()?;
        if !options.json {
            compared.iter().for_each(|compared| print!("{}", compared.text()));
        }
        output.blocks = Some(compared);
    }
    if wants("attention") {
        let report = attention::run(&options)?;
        if !options.json {
            print!("{}", report.table());
        }
        output.attention = Some(report);
    }
    if options.only.as_deref() == Some("models") {
        let report = models::run(&options)?;
        if !options.json {
            print!("{}", report.goals());
        }
        output.models = Some(report);
    }
    #[cfg(target_os = "linux")]
    if options.only.as_deref() == Some("disk") {
        let report = disk::run(&options.disk)?;
        if !options.json {
            print!("{}", report.text());
        }
        output.disk = Some(report);
    }
    if options.json {
        println!("{}", serde_json::to_string(&output)?);
    }
    Ok(())
}

/// Returns the version of candle that this program was built with.
fn candle_version() -> &'static str {
    const LOCK: &str = include_str!("../Cargo.lock");
    let after = LOCK.split_once("name = \"candle-core\"\nversion = \"");
    after.and_then(|(_, rest)| rest.split('"').next()).unwrap_or("of no known version")
}

/// Parses the command line; `None` for help.
fn parse(mut parser: Parser) -> Result<Option<Options>> {
    let mut options = Options::default();
    while let Some(arg) = parser.next()? {
        match arg {
            Arg::Long("full") => options.is_full = true,
            #[cfg(target_os = "linux")]
            Arg::Long("dir") => options.disk.dir = parser.value()?.into(),
            #[cfg(target_os = "linux")]
            Arg::Long("mib") => options.disk.bytes = parser.value()?.parse_with(mib)?,
            #[cfg(target_os = "linux")]
            Arg::Long("rounds") => options.disk.rounds = parser.value()?.parse()?,
            Arg::Long("json") => options.json = true,
            Arg::Long("python") => options.python = Some(parser.value()?.into()),
            Arg::Short('h') | Arg::Long("help") => return Ok(None),
            Arg::Value(word) => {
                let word = word.string()?;
                match &options.only {
                    None if PARTS.contains(&&*word) => options.only = Some(word),
                    Some(only) if only == "attention" || only == "models" => {
                        options.filters.push(word)
                    }
                    _ => anyhow::bail!("unknown name {word:?}\n\n{HELP}"),
                }
            }
            other => return Err(other.unexpected().into()),
        }
    }
    Ok(Some(options))
}

/// Parses a number of MiB; returns bytes.
#[cfg(target_os = "linux")]
fn mib(text: &str) -> Result<u64> {
    let mib: u64 = text.parse()?;
    mib.checked_mul(1 << 20).context("more bytes than there are")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Result<Option<Options>> {
        parse(Parser::from_args(line.split_whitespace()))
    }

    #[test]
    fn filters_follow_attention_and_models() {
        let options = parsed("attention decode bf16 --full --json").unwrap().unwrap();
        assert_eq!(options.only.as_deref(), Some("attention"));
        assert_eq!(options.filters, ["decode", "bf16"]);
        assert!(options.is_full && options.json && options.python.is_none());
        let options = parsed("models wide b16").unwrap().unwrap();
        assert_eq!(options.only.as_deref(), Some("models"));
        assert_eq!(options.filters, ["wide", "b16"]);
        assert!(parsed("--help").unwrap().is_none());
        for wrong in ["decode", "blocks decode", "--fast", "--python"] {
            assert!(parsed(wrong).is_err(), "{wrong}");
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn disk_has_options_of_its_own() {
        let options = parsed("disk --mib 24 --rounds 3 --dir /var").unwrap().unwrap();
        assert_eq!(options.only.as_deref(), Some("disk"));
        let disk = options.disk;
        assert_eq!((disk.bytes, disk.rounds, disk.dir.to_str()), (24 << 20, 3, Some("/var")));
        for wrong in
            ["disk decode", "disk --mib", "disk --mib 99999999999999999", "disk --rounds x"]
        {
            assert!(parsed(wrong).is_err(), "{wrong}");
        }
    }
}
