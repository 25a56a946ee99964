//! Checks and measures the kernels on a card; `cargo xtask gpu` runs it and writes the report.
//!
//! Prints one JSON object a line: facts, checks, then measures, as they come, so that a run that
//! breaks off leaves what it had. Each part runs alone with `--part`.
//!
//! Times are wall clock: launches are submitted one behind the other and waited for together, so
//! that a call that the host submits slower than the device runs it shows what the host takes.
//! Every rate is also a fraction of the driver's own copy from device memory to device memory,
//! measured first.
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
mod headline;
mod input;
mod moves;
mod options;
mod prefill;
mod record;
mod steps;

use std::process::ExitCode;

use bench::{Bench, Result};
use kv_core::{DeviceError, DeviceErrorKind};
use options::{Options, Part};

/// Exit code where there is no device to open, as `cargo xtask gpu` knows it.
const NO_DEVICE: u8 = 3;

fn main() -> ExitCode {
    match Options::parse(std::env::args().skip(1)).and_then(|options| run(&options)) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error}");
            let device = error.downcast_ref::<DeviceError>();
            let is_absent = device.is_some_and(|it| it.kind() == DeviceErrorKind::Unsupported);
            if is_absent { ExitCode::from(NO_DEVICE) } else { ExitCode::FAILURE }
        }
    }
}

/// Whether every check passed. What was measured is right only then.
fn run(options: &Options) -> Result<bool> {
    let mut bench = Bench::open(options)?;
    let part = options.part;
    if matches!(part, Part::All | Part::Facts) {
        bench.facts()?;
    }
    let mut is_right = true;
    if matches!(part, Part::All | Part::Oracle) {
        is_right = check::run(&mut bench)?;
    }
    if matches!(part, Part::Facts | Part::Oracle) {
        return Ok(is_right);
    }
    // First, as everything else is a fraction of it; in the report once.
    moves::copy(&mut bench, matches!(part, Part::All | Part::Headline))?;
    if matches!(part, Part::All | Part::Headline) {
        headline::run(&mut bench)?;
    }
    if matches!(part, Part::All | Part::Decode) {
        decode::run(&mut bench)?;
    }
    if matches!(part, Part::All | Part::Prefill) {
        prefill::run(&mut bench)?;
    }
    if matches!(part, Part::All | Part::Moves) {
        moves::run(&mut bench)?;
    }
    if matches!(part, Part::All | Part::Steps) {
        steps::run(&mut bench)?;
    }
    Ok(is_right)
}

#[cfg(test)]
#[cfg(feature = "emulated")]
mod tests;
