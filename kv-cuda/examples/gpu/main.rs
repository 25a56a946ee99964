//! Checks and measures the kernels on a card; `cargo xtask gpu` runs it and writes the report.
//!
//! Prints one JSON object a line: facts, checks, then measures, as they come, so that a run that
//! breaks off leaves what it had. Times are wall clock: launches are submitted one behind the other
//! and waited for together, so that a call that the host submits slower than the device runs it
//! shows what the host takes. Every rate is also a fraction of the driver's own copy from device
//! memory to device memory, measured first.
#![expect(clippy::print_stderr, reason = "a program for a terminal")]
#![expect(
    clippy::arithmetic_side_effects,
    clippy::as_conversions,
    clippy::cast_precision_loss,
    reason = "sizes of a bench; a rate needs no more than the 52 bits of a double"
)]

mod bench;
mod check;
mod decode;
mod input;
mod moves;
mod options;
mod prefill;
mod record;
mod steps;

use std::process::ExitCode;

use bench::{Bench, Result};
use options::Options;

fn main() -> ExitCode {
    match Options::parse(std::env::args().skip(1)).and_then(|options| run(&options)) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Whether every check passed. What was measured is right only then.
fn run(options: &Options) -> Result<bool> {
    let mut bench = Bench::open(options)?;
    bench.facts()?;
    if options.facts_only {
        return Ok(true);
    }
    let is_right = check::run(&mut bench)?;
    // First, as everything else is a fraction of it.
    moves::copy(&mut bench)?;
    decode::run(&mut bench)?;
    prefill::run(&mut bench)?;
    moves::run(&mut bench)?;
    steps::run(&mut bench)?;
    Ok(is_right)
}

#[cfg(test)]
#[cfg(feature = "emulated")]
mod tests;
