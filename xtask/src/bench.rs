//! `cargo xtask bench`: the benches of `kv-bench`.
use std::ffi::OsString;

use anyhow::Result;

use crate::shell;

/// Runs every bench; `args` go to criterion. `peers` alone: the workspace that compares with other
/// crates, which nothing else builds.
pub(crate) fn run(args: &[OsString]) -> Result<()> {
    if let [only] = args
        && only == "peers"
    {
        let manifest = ["--manifest-path", "kv-bench/peers/Cargo.toml"];
        return shell::run(shell::cargo(["run", "--release"]).args(manifest));
    }
    // `--benches` leaves out the unit tests of the library, which do not know criterion's
    // arguments.
    let mut command = shell::cargo(["bench", "--package", "kv-bench", "--benches", "--"]);
    shell::run(command.args(args))
}
