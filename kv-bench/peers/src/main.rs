//! Block management and attention beside other libraries, in one run: `cargo xtask bench peers`.
//!
//! The modules list the peers and say how they are timed. Peers that are Python packages run if
//! `--python` names an interpreter that has them.
mod attention;
mod blocks;

use std::path::PathBuf;

use anyhow::Result;
use lexopt::{Arg, Parser, ValueExt};
use serde::Serialize;

const HELP: &str = "\
Usage: kv-bench-peers [OPTIONS] [blocks|attention [FILTER...]]

Without a name, both are measured. FILTER is a part of a case's name, such as decode, bf16, c4096 or
prefill; a case runs if its name contains all filters.

  --full          every case of attention, not only a cross through the grid
  --python PATH   a Python interpreter with torch or llama_cpp
  --json          one JSON object on standard output instead of text
  --help          print this help
";

/// The parsed command line.
#[derive(Debug, Default)]
struct Options {
    /// `blocks` or `attention`; both when absent.
    only: Option<String>,
    filters: Vec<String>,
    python: Option<PathBuf>,
    is_full: bool,
    json: bool,
}

#[derive(Serialize)]
struct Output {
    #[serde(skip_serializing_if = "Option::is_none")]
    blocks: Option<Vec<blocks::Compared>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    attention: Option<attention::Report>,
}

fn main() -> Result<()> {
    let Some(options) = parse(Parser::from_env())? else {
        print!("{HELP}");
        return Ok(());
    };
    let wants = |part: &str| options.only.as_deref().is_none_or(|only| only == part);
    let mut output = Output { blocks: None, attention: None };
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
    if options.json {
        println!("{}", serde_json::to_string(&output)?);
    }
    Ok(())
}

/// Parses the command line; `None` for help.
fn parse(mut parser: Parser) -> Result<Option<Options>> {
    let mut options = Options::default();
    while let Some(arg) = parser.next()? {
        match arg {
            Arg::Long("full") => options.is_full = true,
            Arg::Long("json") => options.json = true,
            Arg::Long("python") => options.python = Some(parser.value()?.into()),
            Arg::Short('h') | Arg::Long("help") => return Ok(None),
            Arg::Value(word) => {
                let word = word.string()?;
                match &options.only {
                    None if word == "blocks" || word == "attention" => options.only = Some(word),
                    Some(only) if only == "attention" => options.filters.push(word),
                    _ => anyhow::bail!("unknown name {word:?}\n\n{HELP}"),
                }
            }
            other => return Err(other.unexpected().into()),
        }
    }
    Ok(Some(options))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Result<Option<Options>> {
        parse(Parser::from_args(line.split_whitespace()))
    }

    #[test]
    fn filters_follow_attention() {
        let options = parsed("attention decode bf16 --full --json").unwrap().unwrap();
        assert_eq!(options.only.as_deref(), Some("attention"));
        assert_eq!(options.filters, ["decode", "bf16"]);
        assert!(options.is_full && options.json && options.python.is_none());
        assert!(parsed("--help").unwrap().is_none());
        for wrong in ["decode", "blocks decode", "--fast", "--python"] {
            assert!(parsed(wrong).is_err(), "{wrong}");
        }
    }
}
