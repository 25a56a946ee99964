//! `cargo xtask bench`: the benches of `kv-bench`.
use std::ffi::OsString;

use anyhow::Result;

use crate::shell;

/// Runs every bench; `args` go to criterion.
pub(crate) fn run(args: &[OsString]) -> Result<()> {
    // `--benches` leaves out the unit tests of the library, which do not know criterion's
    // arguments.
    let mut command = shell::cargo(["bench", "--package", "kv-bench", "--benches", "--"]);
    shell::run(command.args(args))
}
