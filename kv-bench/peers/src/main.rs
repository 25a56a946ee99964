//! Block life and attention beside other libraries, in one run: `cargo xtask bench peers`.
//!
//! What the peers are and how they are timed is at the top of the modules. Peers that are Python
//! packages run where `--python` names an interpreter that has them.
mod attention;
mod life;

use std::path::PathBuf;

use anyhow::Result;
use lexopt::{Arg, Parser, ValueExt};
use serde::Serialize;

const HELP: &str = "\
Usage: kv-bench-peers [OPTIONS] [life|attention [FILTER...]]

Without a name, both. FILTER is a part of a case's name, such as decode, bf16, c4096 or prefill; a
case is run when its name has all of them in it.

  --full          every case of attention, not a cross through their middle
  --python PATH   the interpreter that has torch, or llama_cpp
  --json          one object on the standard output instead of lines
  --help          this text
";

/// What is asked for.
#[derive(Debug, Default)]
struct Options {
    /// `life` or `attention`; both when absent.
    only: Option<String>,
    filters: Vec<String>,
    python: Option<PathBuf>,
    is_full: bool,
    json: bool,
}

#[derive(Serialize)]
struct Output {
    #[serde(skip_serializing_if = "Option::is_none")]
    life: Option<Vec<life::Compared>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    attention: Option<attention::Report>,
}

fn main() -> Result<()> {
    let Some(options) = parse(Parser::from_env())? else {
        print!("{HELP}");
        return Ok(());
    };
    let wants = |part: &str| options.only.as_deref().is_none_or(|only| only == part);
    let mut output = Output { life: None, attention: None };
    if wants("life") {
        let compared = life::run()?;
        if !options.json {
            compared.iter().for_each(|compared| print!("{}", compared.text()));
        }
        output.life = Some(compared);
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

/// `None` where help is asked for.
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
                    None if word == "life" || word == "attention" => options.only = Some(word),
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
        for wrong in ["decode", "life decode", "--fast", "--python"] {
            assert!(parsed(wrong).is_err(), "{wrong}");
        }
    }
}
