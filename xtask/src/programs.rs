//! Test programs of the workspace: built by cargo, started here.
//!
//! `cargo test` builds and runs at once and holds its lock while it builds. Started directly, a
//! program runs beside a build, and one command builds all of them.
use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::shell;
use crate::workspace::FEATURES;

/// Variable with the path of cargo's messages: programs are read from that file instead of built.
const BUILT: &str = "KV_XTASK_PROGRAMS";

/// A test program, as cargo describes it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Program {
    /// Name of the crate.
    pub(crate) package: String,
    pub(crate) target: String,
    /// `lib`, `bin`, `test`, `bench`, `example`.
    pub(crate) kind: String,
    path: PathBuf,
    /// Folder of the crate, in which cargo starts the program.
    folder: PathBuf,
}

impl Program {
    /// Makes the command, as `cargo test` does.
    pub(crate) fn command(&self) -> Command {
        self.run_by(None)
    }

    /// Makes the command through another program, an emulator of its CPU.
    pub(crate) fn run_by(&self, runner: Option<&str>) -> Command {
        let mut command = match runner {
            None => shell::program(&self.path),
            Some(runner) => {
                let mut command = shell::program(runner);
                command.arg(&self.path);
                command
            }
        };
        command.current_dir(&self.folder).env("CARGO_MANIFEST_DIR", &self.folder);
        command
    }

    /// Parses one line of cargo's messages; `None` for other messages.
    fn parse(line: &str) -> Option<Self> {
        let message: Value = serde_json::from_str(line).ok()?;
        let path = message.get("executable")?.as_str()?;
        let kind = message.pointer("/target/kind/0")?.as_str()?;
        // A test or bench with its own `main` is built without the harness.
        let is_test = message.pointer("/profile/test")?.as_bool()?;
        if !is_test && !["test", "bench"].contains(&kind) {
            return None;
        }
        let folder = Path::new(message.get("manifest_path")?.as_str()?).parent()?;
        Some(Self {
            package: folder.file_name()?.to_str()?.to_owned(),
            target: message.pointer("/target/name")?.as_str()?.to_owned(),
            kind: kind.to_owned(),
            path: path.into(),
            folder: folder.to_owned(),
        })
    }
}

/// Builds these targets of the workspace, without the given crates.
pub(crate) fn of_workspace<S: AsRef<str>>(without: &[S], targets: &[&str]) -> Result<Vec<Program>> {
    match built()? {
        Some(text) => Ok(parse(&text)),
        None => Ok(parse(&messages(&selection(without, targets), &[])?)),
    }
}

/// Returns the path of a program that is not a test, of kind `bin` or `example`, built with the
/// tests' profile and features.
pub(crate) fn plain(kind: &str, name: &str) -> Result<PathBuf> {
    let text = built()?.map_or_else(messages_of_all, Ok)?;
    let found = text.lines().find_map(|line| parse_plain(line, (kind, name)));
    found.with_context(|| format!("cargo built no {kind} {name}"))
}

/// Returns the path of such a program if [`build_all`] has listed it, and builds nothing.
pub(crate) fn listed(kind: &str, name: &str) -> Result<Option<PathBuf>> {
    let text = built()?.unwrap_or_default();
    Ok(text.lines().find_map(|line| parse_plain(line, (kind, name))))
}

/// Returns the messages that [`build_all`] has listed, if it ran before this process.
fn built() -> Result<Option<String>> {
    let Some(file) = env::var_os(BUILT) else { return Ok(None) };
    let path = Path::new(&file);
    let text =
        fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    Ok(Some(text))
}

fn parse_plain(line: &str, (kind, name): (&str, &str)) -> Option<PathBuf> {
    let message: Value = serde_json::from_str(line).ok()?;
    let path = message.get("executable")?.as_str()?;
    let is_plain = message.pointer("/target/kind/0")?.as_str()? == kind
        && message.pointer("/target/name")?.as_str()? == name
        && !message.pointer("/profile/test")?.as_bool()?;
    is_plain.then(|| path.into())
}

/// Builds all test programs of the workspace, and lists them for [`use_built`].
pub(crate) fn build_all(file: &Path) -> Result<()> {
    let text = messages_of_all()?;
    fs::write(file, text).with_context(|| format!("cannot write {}", file.display()))
}

/// Builds the programs that these arguments of `cargo test` select.
pub(crate) fn build(args: &[&str], variables: &[(String, &str)]) -> Result<Vec<Program>> {
    Ok(parse(&messages(args, variables)?))
}

/// Passes the list of [`build_all`] to another process of this tool.
pub(crate) fn use_built(command: &mut Command, file: &Path) {
    command.env(BUILT, file);
}

fn selection<'a, S: AsRef<str>>(without: &'a [S], targets: &[&'a str]) -> Vec<&'a str> {
    let mut args = vec!["--workspace"];
    for package in without {
        args.extend(["--exclude", package.as_ref()]);
    }
    args.extend(FEATURES);
    args.extend(targets);
    args
}

/// Returns cargo's messages of a build of every target with `test = true`, and of examples as
/// programs: `--examples` would build all of them as tests, most of which have none.
fn messages_of_all() -> Result<String> {
    messages(&selection::<&str>(&[], &[]), &[])
}

/// Returns cargo's messages of a build, one per line.
fn messages(args: &[&str], variables: &[(String, &str)]) -> Result<String> {
    let mut command = shell::cargo(["test", "--no-run"]);
    command.args(args).envs(variables.iter().map(|(name, value)| (name, value)));
    println!("$ {}", shell::line(&command));
    command.arg("--message-format=json-render-diagnostics").stderr(Stdio::inherit());
    let output = command.output().context("cannot start cargo")?;
    if !output.status.success() {
        bail!("`{}` failed ({})", shell::line(&command), output.status);
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

fn parse(messages: &str) -> Vec<Program> {
    messages.lines().filter_map(Program::parse).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plain_program_is_found_among_tests_of_its_name() {
        let line = |kind: &str, is_test: bool, path: &str| {
            serde_json::json!({
                "target": { "name": "kv", "kind": [kind] },
                "profile": { "test": is_test },
                "executable": path,
            })
            .to_string()
        };
        let lines = [line("bin", true, "/t/kv-1"), line("test", false, "/t/it"), "no JSON".into()];
        assert!(lines.iter().all(|line| parse_plain(line, ("bin", "kv")).is_none()));
        let found = line("bin", false, "/t/kv");
        assert_eq!(parse_plain(&found, ("bin", "kv")), Some("/t/kv".into()));
        assert_eq!(parse_plain(&found, ("bin", "xtask")), None);
        assert_eq!(parse_plain(&found, ("example", "kv")), None);
    }

    #[test]
    fn tests_and_benches_are_programs_and_plain_binaries_are_not() {
        let message = |name: &str, kind: &str, is_test: bool, executable: Option<&str>| {
            serde_json::json!({
                "reason": "compiler-artifact",
                "manifest_path": "/w/kv-cpu/Cargo.toml",
                "target": {"name": name, "kind": [kind]},
                "profile": {"test": is_test},
                "executable": executable,
            })
            .to_string()
        };
        let text = [
            message("kv_cpu", "lib", false, None),
            message("kv_cpu", "lib", true, Some("/t/kv_cpu-1")),
            message("conformance", "test", false, Some("/t/conformance-1")),
            message("steps", "bench", false, Some("/t/steps-1")),
            message("xtask", "bin", false, Some("/t/xtask")),
            message("kernels", "example", false, Some("/t/kernels-1")),
            "{\"reason\":\"build-finished\",\"success\":true}".to_owned(),
            "no JSON".to_owned(),
        ];
        let found = parse(&text.join("\n"));
        let targets: Vec<_> = found.iter().map(|program| &*program.target).collect();
        assert_eq!(targets, ["kv_cpu", "conformance", "steps"]);
        assert!(found.iter().all(|program| program.package == "kv-cpu"));
        assert_eq!(found[0].command().get_current_dir(), Some(Path::new("/w/kv-cpu")));
        let emulated = found[0].run_by(Some("qemu-aarch64"));
        assert_eq!(emulated.get_args().collect::<Vec<_>>(), ["/t/kv_cpu-1"]);
    }
}
