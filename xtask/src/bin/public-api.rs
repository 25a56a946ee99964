//! Prints the public items of crates from rustdoc's JSON, one a line: `public-api FILE.json...`.
//!
//! `cargo xtask public-api` builds and runs this program. It is separate, with a feature of its
//! own, because no other command of xtask needs the dependency.
#![forbid(unsafe_code)]
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a program for a terminal")]

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::{env, fs};

use anyhow::{Context, Result};
use public_api::Builder;

/// The format that rustdoc of Rust 1.95 writes and the used version of `public-api` reads.
const FORMAT: u64 = 57;

/// Tells a compiler with another format from a failure.
const OTHER_FORMAT: u8 = 3;

fn main() -> ExitCode {
    match run() {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<ExitCode> {
    let files: Vec<PathBuf> = env::args_os().skip(1).map(PathBuf::from).collect();
    for file in &files {
        let format = format(file)?;
        if format != FORMAT {
            eprintln!("rustdoc of this compiler writes format {format}, {FORMAT} is read here");
            return Ok(ExitCode::from(OTHER_FORMAT));
        }
    }
    for file in &files {
        // Impls that follow from the compiler or a derive say little and are many.
        let builder = Builder::from_rustdoc_json(file)
            .omit_auto_derived_impls(true)
            .omit_auto_trait_impls(true)
            .omit_blanket_impls(true);
        let api = builder.build().with_context(|| format!("cannot read {}", file.display()))?;
        print!("{api}");
    }
    Ok(ExitCode::SUCCESS)
}

/// Returns the version of the format, which stands at the end of a file.
fn format(file: &Path) -> Result<u64> {
    let text =
        fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
    let (_, rest) = text.rsplit_once("\"format_version\":").context("no JSON of rustdoc")?;
    let number: String = rest.trim_start().chars().take_while(char::is_ascii_digit).collect();
    Ok(number.parse()?)
}
