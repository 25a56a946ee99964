//! Runs the commands of README.md and docs/cli.md as they are written.
//!
//! A fence marked `sh` holds commands that work on a fresh checkout, one per line; anything else,
//! such as a command that takes long, is in a fence marked `text`.
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result, bail};

use crate::{programs, shell, suite};

/// Commands that would start this command again.
const RUNNING: [&str; 1] = ["cargo xtask test"];

/// Documents whose commands run.
const DOCUMENTS: [&str; 2] = ["README.md", "docs/cli.md"];

/// How the documents start the program `kv`. The tests start the one that they have built: the same
/// source with overflow checks, and with every backend.
const RUN: &str = "cargo run --release -- ";

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
        for line in commands {
            run_line(line, &program)?;
        }
    }
    Ok(())
}

fn run_line(line: &str, program: &Path) -> Result<()> {
    if RUNNING.contains(&line) {
        println!("$ {line}   (running already)");
        return Ok(());
    }
    let start = Instant::now();
    match line.strip_prefix(RUN) {
        Some(args) => {
            let script = format!("\"$KV\" {args}");
            shell::run(shell::program("sh").args(["-c", &script]).env("KV", program))?;
        }
        None => shell::run(shell::program("sh").args(["-c", line]))?,
    }
    suite::note(line, start.elapsed());
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
