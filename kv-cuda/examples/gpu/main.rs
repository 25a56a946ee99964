//! Checks and measures the kernels on a card; `cargo xtask gpu` runs it and writes the report.
//!
//! Prints one JSON object per line as results arrive: facts, checks, then measures. A run that
//! breaks off keeps what it had. Each part runs alone with `--part`.
//!
//! Times are wall clock: launches are submitted one after another and waited for together, so a
//! call that the host submits more slowly than the device runs it shows the host's time. Every rate
//! is also given as a fraction of the driver's own copy within device memory, which is measured
//! first.
#![expect(clippy::print_stderr, reason = "a program for a terminal")]
#![expect(
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
use kv_core::error::{DeviceError, DeviceErrorKind};
use options::{Options, Part};

/// Exit code for a missing device, known to `cargo xtask gpu`.
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

/// Returns whether every check passed. Only then are the measures valid.
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
    // First, because everything else is a fraction of it; it is in the report once.
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
