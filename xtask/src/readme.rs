//! Runs the commands of README.md and docs/cli.md as they are written.
//!
//! A fence marked `sh` holds commands that work on a fresh checkout, one per line; anything else,
//! such as a command that takes long, is in a fence marked `text`. The server that one line starts
//! serves the lines after it, and is ended with its document.
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail};

use crate::{programs, shell};

/// Commands that would start this command again.
const RUNNING: [&str; 1] = ["cargo xtask test"];

/// Documents whose commands run.
const DOCUMENTS: [&str; 2] = ["README.md", "docs/cli.md"];

/// The command by which the documents start the program `kv`. The tests start their own build of
/// it: the same source with overflow checks, and with every backend.
const RUN: &str = "cargo run --release -- ";

/// The command that goes on until it is ended, and the address that the lines after it name. The
/// tests let the system choose a port, because a program of the user may have this one.
const SERVE: &str = "serve";
const ADDRESS: &str = "127.0.0.1:8080";

/// Runs every command; a failure names the command.
pub(crate) fn run() -> Result<()> {
    let program = programs::plain("bin", "kv")?;
    let [readme, _] = DOCUMENTS;
    for document in DOCUMENTS {
        let path = shell::root().join(document);
        let text = std::fs::read_to_string(&path)
            .with_context(|| format!("cannot read {}", path.display()))?;
        let commands = commands(&text);
        if commands.is_empty() {
            bail!("{document} has no fence marked `sh`");
        }
        for needed in RUNNING {
            if document == readme && !commands.contains(&needed) {
                bail!("{document} no longer says `{needed}` in a fence marked `sh`");
            }
        }
        let mut server = None;
        for line in commands {
            if line.strip_prefix(RUN) == Some(SERVE) {
                server = Some(Server::start(&program)?);
                continue;
            }
            let address = server.as_ref().map_or(ADDRESS, |server| &server.address);
            run_line(line, &line.replace(ADDRESS, address), &program)?;
        }
    }
    Ok(())
}

/// A running `kv serve`; dropped, it is killed.
struct Server {
    child: Child,
    address: String,
}

impl Server {
    /// Starts the program, and waits until it says where it listens.
    fn start(program: &Path) -> Result<Self> {
        let mut command = Command::new(program);
        command.args([SERVE, "--addr", "127.0.0.1:0"]).stdin(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().context("cannot start the server")?;
        let mut line = String::new();
        if let Some(stderr) = child.stderr.take() {
            BufReader::new(stderr).read_line(&mut line)?;
        }
        let mut server = Self { child, address: String::new() };
        let address = line.split_once("http://").and_then(|(_, rest)| rest.split_once(','));
        let Some((address, _)) = address else { bail!("the server does not listen: {line}") };
        address.clone_into(&mut server.address);
        Ok(server)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended itself; then the line that needed it has failed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs a command; `line` is how the document has it.
fn run_line(line: &str, command: &str, program: &Path) -> Result<()> {
    if RUNNING.contains(&line) {
        println!("$ {line}   (running already)");
        return Ok(());
    }
    if line.starts_with("curl ") && Command::new("curl").arg("--version").output().is_err() {
        println!("$ {line}   (curl is not installed)");
        return Ok(());
    }
    let start = Instant::now();
    match command.strip_prefix(RUN) {
        Some(args) => {
            let script = format!("\"$KV\" {args}");
            shell::run(shell::program("sh").args(["-c", &script]).env("KV", program))?;
        }
        None => shell::run(shell::program("sh").args(["-c", command]))?,
    }
    shell::note(line, start.elapsed());
    Ok(())
}

/// Returns the lines of all fences marked `sh`, without comments.
fn commands(text: &str) -> Vec<&str> {
    let mut commands = Vec::new();
    let mut fence = None;
    for line in text.lines().map(str::trim) {
        match (line.strip_prefix("```"), fence) {
            (Some(_), Some(_)) => fence = None,
            (Some(language), None) => fence = Some(language),
            (None, Some("sh")) if !line.is_empty() && !line.starts_with('#') => {
                commands.push(line);
            }
            (None, _) => {}
        }
    }
    commands
}

#[cfg(test)]
mod tests {
    use super::commands;

    #[test]
    fn only_sh_fences_hold_commands() {
        let text = "\
```sh
# a comment
cargo run

cargo xtask test
```
```text
rm -r everything
```
cargo nothing
```rust
let x = 1;
```
";
        assert_eq!(commands(text), ["cargo run", "cargo xtask test"]);
    }
}
