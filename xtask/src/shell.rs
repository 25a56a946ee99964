//! Runs other programs from the repository's root and prints their commands.
use std::env;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};

/// Returns the repository's root.
pub(crate) fn root() -> PathBuf {
    // Cargo sets the variable for programs that it runs; the built-in value is for a binary that is
    // started by hand.
    let here = env::var("CARGO_MANIFEST_DIR").unwrap_or_else(|_| env!("CARGO_MANIFEST_DIR").into());
    Path::new(&here).parent().unwrap_or_else(|| Path::new(".")).to_owned()
}

/// Makes a command of the cargo that runs this program.
pub(crate) fn cargo<S: AsRef<OsStr>>(args: impl IntoIterator<Item = S>) -> Command {
    let mut command = program(env::var("CARGO").unwrap_or_else(|_| "cargo".into()));
    command.args(args);
    command
}

/// Makes a command that runs in the root, without the variables that cargo set for this program:
/// some build scripts would run again because of them.
pub(crate) fn program(name: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(name);
    command.current_dir(root());
    for (key, _) in env::vars_os() {
        let ours = key.to_str().is_some_and(|key| {
            key.starts_with("CARGO_PKG_")
                || key.starts_with("CARGO_MANIFEST_")
                || key.starts_with("CARGO_BIN_")
                || key == "CARGO_CRATE_NAME"
        });
        if ours {
            command.env_remove(key);
        }
    }
    command
}

/// Prints and runs a command.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let line = line(command);
    println!("$ {line}");
    let status = command.status().with_context(|| format!("cannot start `{line}`"))?;
    if !status.success() {
        bail!("`{line}` failed ({status})");
    }
    Ok(())
}

/// Returns the standard output of a command, `None` if it cannot be started or fails.
pub(crate) fn output(command: &mut Command) -> Option<String> {
    let output = command.stderr(Stdio::null()).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Formats a command as one would type it.
pub(crate) fn line(command: &Command) -> String {
    let name = Path::new(command.get_program()).file_stem().unwrap_or(command.get_program());
    let mut words = vec![name.to_string_lossy()];
    words.extend(command.get_args().map(OsStr::to_string_lossy));
    words.join(" ")
}

/// Prints the time of a part of a stage.
pub(crate) fn note(what: &str, took: Duration) {
    println!("{:>7.1} s  {what}", took.as_secs_f64());
}
