//! The public API of `kv`, compared with the list in the repository.
//!
//! `kv` mostly re-exports, so the list also has the items of the re-exported crates. The list comes
//! from rustdoc's JSON, which the stable compiler writes when a setting permits it: for rustdoc
//! alone, because build scripts would take the setting for a change and run again.
use std::env;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result, bail};

use crate::lanes::Outcome;
use crate::shell;
use crate::workspace::{FEATURES, Workspace};

/// Set for this program when cargo runs it in place of rustdoc: the rustdoc to run.
const RUSTDOC: &str = "XTASK_RUSTDOC";

/// The crates, by the names of their files.
const CRATES: [&str; 6] = ["kv", "kv_core", "kv_engine", "kv_format", "kv_quant", "kv_tier"];

/// Path of the list.
const LIST: &str = "kv/public-api.txt";

const UPDATE: &str = "cargo xtask public-api --update";

/// Exit code of the program `public-api` where another compiler's JSON is of another format.
const OTHER_FORMAT: i32 = 3;

/// Stands in for rustdoc when cargo runs this program as such, `None` otherwise: pages of every
/// crate, and the JSON of those in the list.
pub(crate) fn stand_in() -> Option<Result<ExitCode>> {
    let rustdoc = env::var_os(RUSTDOC)?;
    let args: Vec<OsString> = env::args_os().skip(1).collect();
    let name = args.iter().skip_while(|arg| *arg != "--crate-name").nth(1);
    let is_listed = name.is_some_and(|name| CRATES.iter().any(|known| name == known));
    let mut pages = Command::new(&rustdoc);
    pages.args(&args);
    let mut json = Command::new(&rustdoc);
    json.args(&args).args(["-Z", "unstable-options", "--output-format", "json"]);
    json.env("RUSTC_BOOTSTRAP", "1");
    let has_passed = |command: &mut Command| {
        let status = command.env_remove(RUSTDOC).status();
        status.map(|status| status.success()).context("cannot start rustdoc")
    };
    let all =
        has_passed(&mut pages).and_then(|ok| Ok(ok && (!is_listed || has_passed(&mut json)?)));
    Some(all.map(|ok| if ok { ExitCode::SUCCESS } else { ExitCode::FAILURE }))
}

/// Documents all libraries, and writes the JSON of those in the list beside the pages.
///
/// Programs are left out: `kv` the program and `kv` the library would share a page. The choice of
/// crates and features is clippy's, so that crates which clippy checked are not checked again.
pub(crate) fn document() -> Result<()> {
    let mut command = shell::cargo(["doc", "--workspace", "--no-deps", "--lib"]);
    command.args(FEATURES);
    command.env(RUSTDOC, env::var_os("RUSTDOC").unwrap_or_else(|| OsString::from("rustdoc")));
    command.env("RUSTDOC", env::current_exe()?);
    // Without a flag of our own, pages of a plain `cargo doc` would count as fresh, without JSON.
    command.env("RUSTDOCFLAGS", "--deny warnings --cfg public_api");
    shell::run(&mut command)
}

/// Runs `cargo xtask public-api`.
pub(crate) fn run(update: bool) -> Result<()> {
    let workspace = Workspace::load()?;
    if update {
        return write(&workspace);
    }
    match compare(&workspace)? {
        Outcome::Passed => Ok(()),
        Outcome::Skipped(why) => bail!("{why}"),
    }
}

/// Compares the list with the crates as they are.
pub(crate) fn compare(workspace: &Workspace) -> Result<Outcome> {
    let now = match list(workspace)? {
        Listed::Items(text) => text,
        Listed::OtherFormat(why) => return Ok(Outcome::Skipped(why)),
    };
    let path = shell::root().join(LIST);
    let before = std::fs::read_to_string(&path)
        .with_context(|| format!("cannot read {}: `{UPDATE}` makes it", path.display()))?;
    let changes = changes(&before, &now);
    if changes.is_empty() {
        return Ok(Outcome::Passed);
    }
    for change in &changes {
        println!("{change}");
    }
    bail!("the public API is not that of {LIST}: if it is meant to be so, run `{UPDATE}`");
}

/// Writes the list.
fn write(workspace: &Workspace) -> Result<()> {
    match list(workspace)? {
        Listed::Items(text) => {
            let path = shell::root().join(LIST);
            std::fs::write(&path, text)
                .with_context(|| format!("cannot write {}", path.display()))?;
            println!("{LIST} is written");
            Ok(())
        }
        Listed::OtherFormat(why) => bail!("{why}"),
    }
}

enum Listed {
    Items(String),
    OtherFormat(String),
}

fn list(workspace: &Workspace) -> Result<Listed> {
    document()?;
    // The selection of crates and features is that of the tests, so that their builds of shared
    // dependencies are used again.
    let mut build = shell::cargo(["build", "--quiet", "--workspace"]);
    build.args(FEATURES);
    build.args(["--features", "xtask/public-api", "--bin", "public-api"]);
    shell::run(&mut build)?;
    let program = workspace.target_dir.join("debug").join("public-api");
    let mut text = String::new();
    for name in CRATES {
        let file = json(workspace, name);
        let output = Command::new(&program)
            .arg(&file)
            .output()
            .with_context(|| format!("cannot start {}", program.display()))?;
        let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        match output.status.code() {
            Some(0) => {}
            Some(OTHER_FORMAT) => return Ok(Listed::OtherFormat(said)),
            _ => bail!("{said}"),
        }
        text.push_str(&String::from_utf8(output.stdout)?);
    }
    Ok(Listed::Items(text))
}

fn json(workspace: &Workspace, name: &str) -> PathBuf {
    Path::new(&workspace.target_dir).join("doc").join(format!("{name}.json"))
}

/// Returns the removed lines, then the added lines, in order. Every item is a line of its own, so
/// this suffices to read the change.
fn changes(before: &str, now: &str) -> Vec<String> {
    let missing = |from: &str, others: &str, mark: &str| {
        let others: std::collections::HashSet<_> = others.lines().collect();
        let lines = from.lines().filter(|line| !others.contains(line));
        lines.map(|line| format!("{mark} {line}")).collect::<Vec<_>>()
    };
    [missing(before, now, "-"), missing(now, before, "+")].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_name_what_went_and_what_came() {
        let (before, now) = ("pub fn a()\npub fn b()\n", "pub fn b()\npub fn c()\n");
        assert_eq!(changes(before, now), ["- pub fn a()", "+ pub fn c()"]);
        assert!(changes(now, now).is_empty());
    }
}
