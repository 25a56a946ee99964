//! The program `kv`: generates text with a KV cache, plans its memory, measures formats, reuse and
//! devices, looks after lower tiers, lists devices.
//!
//! Results go to standard output, errors as one line to standard error. Exit codes: 0 done, 1
//! failed, 2 wrong usage.
#![forbid(unsafe_code)]

mod args;
mod bench;
mod bundled;
mod calibrate;
mod chart;
mod compare;
mod devices;
mod eval;
mod failure;
mod generate;
mod job;
#[cfg(feature = "serve")]
mod load;
mod loaded;
mod mix;
mod output;
mod percentile;
mod plan;
mod progress;
mod prompts;
mod replay;
mod report;
#[cfg(feature = "serve")]
mod serve;
mod session;
mod snapshot_pool;
mod threads;
mod tier;
mod tiers;

use std::io::Write;
use std::panic::{self, AssertUnwindSafe};
use std::process::ExitCode;

use clap::Parser;
use clap::error::ErrorKind;
use kv::num;

use args::{Cli, Command};

const FAILED: u8 = 1;
const WRONG_USAGE: u8 = 2;

fn main() -> ExitCode {
    // A panic is a bug, ours or a dependency's; it too ends in one line and an exit code.
    panic::set_hook(Box::new(|info| complain(&format!("internal error: {info}"))));
    let cli = match Cli::try_parse().and_then(Cli::checked) {
        Ok(cli) => cli,
        Err(error) => return usage(&error),
    };
    if let Err(error) = threads::check() {
        complain(&failure::describe(&error));
        return ExitCode::from(FAILED);
    }
    if has_model(&cli.command) {
        threads::settle();
    }
    // Inside the pool that candle and the CPU backend use: a step of a small model has a hundred
    // operations, and passing each from an outside thread would cost more than running it.
    match panic::catch_unwind(AssertUnwindSafe(|| rayon::scope(|_| run(&cli)))) {
        Ok(Ok(())) => ExitCode::SUCCESS,
        Ok(Err(error)) if error.is::<output::OutputClosed>() => ExitCode::SUCCESS,
        Ok(Err(error)) => {
            complain(&failure::describe(&error));
            ExitCode::from(FAILED)
        }
        Err(_) => ExitCode::from(FAILED),
    }
}

/// Returns whether a command computes with candle.
fn has_model(command: &Command) -> bool {
    match command {
        #[cfg(feature = "serve")]
        Command::Serve(_) => true,
        #[cfg(feature = "serve")]
        Command::Load(_) => false,
        Command::Generate(_) | Command::Eval(_) | Command::Calibrate(_) => true,
        Command::Plan(_)
        | Command::Replay(_)
        | Command::Bench(_)
        | Command::Tier(_)
        | Command::Devices(_) => false,
    }
}

fn run(cli: &Cli) -> anyhow::Result<()> {
    match &cli.command {
        Command::Generate(args) => generate::run(args),
        #[cfg(feature = "serve")]
        Command::Serve(args) => serve::run(args),
        #[cfg(feature = "serve")]
        Command::Load(args) => load::run(args),
        Command::Plan(args) => plan::run(args),
        Command::Replay(args) => replay::run(args),
        Command::Eval(args) => eval::run(args),
        Command::Calibrate(args) => calibrate::run(args),
        Command::Bench(args) => bench::run(args),
        Command::Tier(args) => tier::run(args),
        Command::Devices(args) => devices::run(args),
    }
}

/// Prints help to standard output, and any other message as one line.
fn usage(error: &clap::Error) -> ExitCode {
    let text = error.render().to_string();
    match error.kind() {
        ErrorKind::DisplayHelp | ErrorKind::DisplayVersion => match output::text(&text) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) if error.is::<output::OutputClosed>() => ExitCode::SUCCESS,
            Err(_) => ExitCode::from(FAILED),
        },
        ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand => {
            write_stderr(&text);
            ExitCode::from(WRONG_USAGE)
        }
        _ => {
            let message = text.split("\n\nUsage:").next().unwrap_or_default();
            let message = message.split("\n\nFor more information").next().unwrap_or_default();
            let message = message.strip_prefix("error: ").unwrap_or(message);
            complain(&format!("{message} (see --help)"));
            ExitCode::from(WRONG_USAGE)
        }
    }
}

/// Prints one line, whatever the message contains.
fn complain(message: &str) {
    write_stderr(&format!("kv: {}\n", failure::one_line(message)));
}

fn write_stderr(text: &str) {
    // If standard error is closed, nothing can be reported.
    let _ = std::io::stderr().lock().write_all(text.as_bytes());
}
