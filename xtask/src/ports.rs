//! Examples of `kv-candle`: how much of candle's own models they change, and what they print.
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};

use crate::{programs, shell, workspace};

/// A port changes fewer lines, added and removed, than this.
const CHANGED_END: usize = 150;

/// Prompts that both programs continue.
const PROMPTS: [&str; 3] = ["Once upon a time", "Lily and Ben", "One day, a"];

/// Checks the size of every port, and the text of the first against that of `kv generate`.
pub(crate) fn run() -> Result<()> {
    let manifest = shell::root().join("Cargo.toml");
    let (originals, _) = workspace::source_of(&manifest, "candle-transformers")?;
    let sizes = sizes(&shell::root().join("kv-candle/examples"), &originals.join("src/models"))?;
    for (name, changed) in &sizes {
        println!("{name}: {changed} lines differ from candle-transformers");
    }
    let large: Vec<_> = sizes.iter().filter(|(_, changed)| **changed >= CHANGED_END).collect();
    ensure!(large.is_empty(), "ports with {CHANGED_END} changed lines or more: {large:?}");
    let (kv, llama) = (programs::plain("bin", "kv")?, programs::plain("example", "llama")?);
    for prompt in PROMPTS {
        let [generated, text] = [(&kv, Some("generate")), (&llama, None)].map(|(path, command)| {
            let mut program = shell::program(path);
            program.args(command).args(["--model", "models/stories260K", "--prompt", prompt]);
            program.args(["--max-new-tokens", "64"]);
            let output = program.output().with_context(|| shell::line(&program))?;
            ensure!(output.status.success(), "`{}` failed", shell::line(&program));
            ensure!(output.stderr.is_empty(), "`{}` writes errors", shell::line(&program));
            Ok(String::from_utf8_lossy(&output.stdout).into_owned())
        });
        // A blank line and the report follow the text of `kv generate`.
        let (generated, text) = (generated?, text?);
        if !generated.starts_with(&format!("{text}\n")) || text.len() < 150 {
            bail!("example llama writes {text:?}, `kv generate` {generated:?}");
        }
    }
    println!("example llama writes what `kv generate` does");
    Ok(())
}

/// Returns the changed lines of every port below a folder, by the name of its model.
fn sizes(ports: &Path, originals: &Path) -> Result<BTreeMap<String, usize>> {
    let mut sizes = BTreeMap::new();
    let entries =
        fs::read_dir(ports).with_context(|| format!("cannot list {}", ports.display()))?;
    for entry in entries {
        let entry = entry?;
        let port = entry.path().join("model.rs");
        if port.is_file() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let original = read(&originals.join(format!("{name}.rs")))?;
            sizes.insert(name, changed_lines(&original, &read(&port)?));
        }
    }
    ensure!(!sizes.is_empty(), "there are no ports below {}", ports.display());
    Ok(sizes)
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

/// Counts the lines that a smallest diff removes and adds.
fn changed_lines(from: &str, to: &str) -> usize {
    let to: Vec<_> = to.lines().collect();
    // From the lines of `from` so far to the first lines of `to`, by their number.
    let mut above: Vec<usize> = (0..=to.len()).collect();
    for (removed, old) in (1..).zip(from.lines()) {
        let mut row = vec![removed];
        let mut left = removed;
        for (new, pair) in to.iter().zip(above.windows(2)) {
            let &[diagonal, up] = pair else { continue };
            left = if *new == old { diagonal } else { left.min(up) + 1 };
            row.push(left);
        }
        above = row;
    }
    above.last().copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn removed_and_added_lines_count() {
        for (from, to, changed) in [
            ("", "", 0),
            ("a\nb\nc", "a\nb\nc\n", 0),
            ("a\nb\nc", "a\nc", 1),
            ("a\nc", "a\nb\nb\nc", 2),
            ("a\nb\nc", "a\nx\nc", 2),
            ("a\nb\nc\nd", "c\nd\na\nb", 4),
            ("", "a\nb", 2),
            ("a\nb", "", 2),
            ("a\n\nb", "a\n \nb", 2),
        ] {
            assert_eq!(changed_lines(from, to), changed, "{from:?} to {to:?}");
            assert_eq!(changed_lines(to, from), changed, "{to:?} to {from:?}");
        }
    }

    #[test]
    fn a_folder_without_ports_is_an_error() {
        let error = sizes(&shell::root().join("xtask"), &shell::root()).unwrap_err();
        assert!(error.to_string().contains("no ports"), "{error}");
    }
}
