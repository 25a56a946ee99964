//! Runs the examples of `kv` on every device that a test machine has.
//!
//! An example asserts its own results and takes the name of a device.
use std::time::Instant;

use anyhow::{Result, bail};

use crate::workspace::Workspace;
use crate::{shell, suite};

/// Names of devices, as `kv::Device::open` takes them.
const DEVICES: [&str; 1] = ["cpu"];

/// Builds the examples with the crates and features of the tests, to use their builds again.
pub(crate) fn build() -> Result<()> {
    let mut build = shell::cargo(["build", "--workspace", "--examples"]);
    shell::run(build.args(suite::FEATURES))
}

/// Runs each example on each device.
pub(crate) fn run(workspace: &Workspace) -> Result<()> {
    let folder = workspace.target_dir.join("debug").join("examples");
    let examples: Vec<_> =
        workspace.package("kv").into_iter().flat_map(|kv| kv.targets_of("example")).collect();
    if examples.is_empty() {
        bail!("crate kv has no examples");
    }
    let start = Instant::now();
    for device in DEVICES {
        for example in &examples {
            shell::run(shell::program(folder.join(&example.name)).arg(device))?;
        }
    }
    suite::note(&format!("{} examples on {}", examples.len(), DEVICES.join(", ")), start.elapsed());
    Ok(())
}
