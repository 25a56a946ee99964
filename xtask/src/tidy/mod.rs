//! `cargo xtask tidy`: the rules of CONTRIBUTING.md that neither rustc nor clippy checks.
//!
//! Each rule is a function from text to problems, so that it can be tested on small strings.
mod crates;
mod imports;
mod markdown;
mod source;

use std::collections::BTreeMap;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::shell;
use crate::workspace::Workspace;

/// One broken rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Problem {
    /// Path from the root, or the name of a crate.
    place: String,
    /// Line, counted from 1; 0 for the whole file.
    line: usize,
    rule: String,
}

impl Problem {
    fn new(place: &str, line: usize, rule: impl Into<String>) -> Self {
        Self { place: place.to_owned(), line, rule: rule.into() }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            0 => write!(f, "{}: {}", self.place, self.rule),
            line => write!(f, "{}:{line}: {}", self.place, self.rule),
        }
    }
}

/// Checks every rule; prints warnings too.
pub(crate) fn run() -> Result<()> {
    let root = shell::root();
    let workspace = Workspace::load()?;
    let mut problems = crates::check(&workspace);
    let mut warnings = Vec::new();
    let mut files = 0_usize;
    let mut sources: BTreeMap<String, Vec<(String, String)>> = BTreeMap::new();
    for path in files_below(&root)? {
        let bytes = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let place = place(&root, &path);
        let Ok(text) = String::from_utf8(bytes) else {
            problems.push(Problem::new(&place, 0, "is not UTF-8"));
            continue;
        };
        files += 1;
        problems.extend(source::check_whitespace(&place, &text));
        match path.extension().and_then(|extension| extension.to_str()) {
            Some("rs") => {
                problems.extend(source::check(&place, &text));
                warnings.extend(source::check_expected_length(&place, &text));
                if let Some((package, path)) = place.split_once('/') {
                    sources.entry(package.to_owned()).or_default().push((path.to_owned(), text));
                }
            }
            Some("md") => {
                let folder = path.parent().unwrap_or(&root);
                problems.extend(markdown::check(&place, &text, |link| folder.join(link).exists()));
            }
            _ => {}
        }
    }
    let architecture = fs::read_to_string(root.join("ARCHITECTURE.md"))?;
    for (package, sources) in sources.iter().filter(|(name, _)| workspace.package(name).is_some()) {
        let sources = sources.iter().map(|(path, text)| (path.as_str(), text.as_str()));
        problems.extend(imports::Imports::new(package, sources).check(&architecture));
    }
    for warning in &warnings {
        println!("warning: {warning}");
    }
    for problem in &problems {
        println!("problem: {problem}");
    }
    if !problems.is_empty() {
        bail!("tidy found {} problems", problems.len());
    }
    println!("tidy: {files} files, {} crates, no problem", workspace.packages.len());
    Ok(())
}

fn place(root: &Path, path: &Path) -> String {
    path.strip_prefix(root).unwrap_or(path).to_string_lossy().replace('\\', "/")
}

/// Returns every text file of the repository: no build output, version control, models or test
/// data.
fn files_below(root: &Path) -> Result<Vec<PathBuf>> {
    const EXTENSIONS: [&str; 5] = ["rs", "md", "toml", "yml", "sh"];
    const HIDDEN: [&str; 3] = [".cargo", ".ci", ".github"];
    const SKIPPED: [&str; 3] = ["target", "models", "testdata"];
    let mut files = Vec::new();
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        let entries =
            fs::read_dir(&folder).with_context(|| format!("cannot list {}", folder.display()))?;
        for entry in entries {
            let entry = entry?;
            let (path, name) = (entry.path(), entry.file_name());
            let name = name.to_string_lossy();
            if entry.file_type()?.is_dir() {
                let hidden = name.starts_with('.') && !HIDDEN.contains(&&*name);
                if !hidden && !SKIPPED.contains(&&*name) {
                    folders.push(path);
                }
            } else if path
                .extension()
                .is_some_and(|e| EXTENSIONS.contains(&e.to_string_lossy().as_ref()))
                || folder.ends_with(".ci")
            {
                files.push(path);
            }
        }
    }
    files.sort();
    Ok(files)
}
