//! `cargo xtask soak`: tests that `cargo xtask test` shortens, at their full length.
use std::env;
use std::ffi::OsString;

use anyhow::{Result, bail};

use crate::{conformance, shell};

/// A test program, and the variables that make it long. `docs/testing.md` explains them.
struct Run {
    args: &'static [&'static str],
    variables: &'static [(&'static str, &'static str)],
}

const RUNS: &[Run] = &[Run {
    args: &["--package", "kv-cli", "--features", "serve", "--test", "serve"],
    variables: &[
        ("KV_SERVE_CONNECTIONS", "1000"),
        ("KV_SERVE_REQUESTS", "10000"),
        ("KV_SERVE_BODIES", "5000"),
        ("KV_SERVE_SECONDS", "3600"),
        ("KV_SERVE_BROWSER", "chromium"),
    ],
}];

/// Runs everything: the programs optimised, and the suite on the emulator with every combination.
/// Variables that are set already stay as they are.
pub(crate) fn run(args: &[OsString]) -> Result<()> {
    for run in RUNS {
        let mut command = shell::cargo(["test", "--release"]);
        command.args(run.args).arg("--").args(args);
        let unset = run.variables.iter().filter(|(name, _)| env::var_os(name).is_none());
        command.envs(unset.map(|(name, value)| (name, value)));
        shell::run(&mut command)?;
    }
    let suite = conformance::Options {
        backends: vec![conformance::EMULATED.to_owned()],
        args: args.to_vec(),
        ..conformance::Options::default()
    };
    let total = conformance::run(&suite)?;
    if !total.is_clean() {
        bail!("{}: {total}", conformance::EMULATED);
    }
    Ok(())
}
