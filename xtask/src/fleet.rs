//! `cargo xtask fleet`: events read by routers and indexers that nobody here wrote.
use std::path::PathBuf;

use anyhow::Result;

use crate::shell;

/// The folder of the virtual environments, from the repository's root.
const FOLDER: &str = "target/fleet";
/// What runs the proofs and the router, in versions that were tried: they differ in what they
/// accept, and are released weekly.
const ROUTER: [&str; 4] =
    ["vllm-router==0.1.17", "pyzmq==27.3.0", "msgspec==0.22.0", "requests==2.34.2"];
/// What has the indexer; its dependencies are its own.
const INDEXER: [&str; 1] = ["ai-dynamo-runtime==1.6.1"];
const PROOFS: &str = "kv-cli/tests/fleet/proofs.py";

/// Builds the program, installs the consumers where they are missing, and runs the proofs.
pub(crate) fn run() -> Result<()> {
    if shell::output(shell::program("python3").args(["-m", "venv", "-h"])).is_none() {
        println!("no proof was run: `python3` with the module venv is needed");
        return Ok(());
    }
    shell::run(&mut shell::cargo(["build", "--quiet", "--release", "--package", "kv-cli"]))?;
    let [router, indexer] = [environment("router", &ROUTER)?, environment("indexer", &INDEXER)?];
    let kv = shell::root().join("target/release/kv");
    let mut proofs = shell::program(router);
    proofs.arg(PROOFS).env("KV", kv).env("DYNAMO", indexer);
    shell::run(&mut proofs)
}

/// Makes a virtual environment with these packages; returns its Python.
fn environment(name: &str, packages: &[&str]) -> Result<PathBuf> {
    let folder = shell::root().join(FOLDER).join(name);
    let python = folder.join("bin/python");
    if !python.exists() {
        shell::run(shell::program("python3").args(["-m", "venv"]).arg(&folder))?;
    }
    let mut pip = shell::program(&python);
    pip.args(["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]).args(packages);
    shell::run(&mut pip)?;
    Ok(python)
}
