//! Records the inputs that a stage has passed with, so that it does not run on the same ones again.
//!
//! `target/stages/passed.txt` is the record of this checkout. `xtask/passed.txt` is part of the
//! tree, for stages that take minutes and whose inputs rarely change: `cargo xtask test --record`
//! writes it, and a checkout elsewhere trusts it like the compiled CUDA kernels. `--all` ignores
//! both records.
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use xxhash_rust::xxh3::Xxh3;

use crate::shell;
use crate::workspace::Workspace;

/// The inputs that decide the outcome of a stage, besides the compiler.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Inputs {
    /// So much that something has always changed: the stage always runs.
    All,
    /// These crates, and the crates of the workspace that they use.
    Crates(&'static [&'static str]),
    /// The files below these paths. The record of the tree counts.
    Files(&'static [&'static str]),
}

/// Read by every stage: features, versions and levels of optimisation, and the stages themselves.
const COMMON: [&str; 4] = ["Cargo.toml", "Cargo.lock", ".cargo", "xtask/src"];

/// Folders below inputs that a test does not read: compiled CUDA kernels, and leftovers of builds.
const IGNORED: [&str; 2] = ["compiled", "target"];

/// The record of the tree.
const OF_TREE: &str = "xtask/passed.txt";

/// The first line of the record, which tells its purpose.
const HEAD: &str =
    "# Inputs with which these stages have passed: written by `cargo xtask test --record`.\n";

/// Digests of inputs by stage, with which the stage has passed.
#[derive(Debug)]
pub(crate) struct Stamps {
    of_tree: BTreeMap<String, String>,
    of_checkout: BTreeMap<String, String>,
    file: PathBuf,
    record: bool,
}

impl Stamps {
    /// Reads both records.
    pub(crate) fn load(folder: &Path, record: bool) -> Self {
        let file = folder.join("passed.txt");
        let of_tree = parse(&text_of(&shell::root().join(OF_TREE)));
        Self { of_tree, of_checkout: parse(&text_of(&file)), file, record }
    }

    /// Returns whether the stage has passed with these inputs.
    pub(crate) fn has(&self, stage: &str, digest: &str) -> bool {
        let is_in = |record: &BTreeMap<String, String>| {
            record.get(stage).is_some_and(|known| known == digest)
        };
        is_in(&self.of_tree) || is_in(&self.of_checkout)
    }

    /// Notes that a stage has passed.
    pub(crate) fn add(&mut self, stage: &str, inputs: Inputs, digest: &str) -> Result<()> {
        self.of_checkout.insert(stage.to_owned(), digest.to_owned());
        write(&self.file, &self.of_checkout)?;
        if self.record && matches!(inputs, Inputs::Files(_)) {
            self.of_tree.insert(stage.to_owned(), digest.to_owned());
            write(&shell::root().join(OF_TREE), &self.of_tree)?;
        }
        Ok(())
    }
}

fn text_of(path: &Path) -> String {
    // Without a record every stage runs.
    fs::read_to_string(path).unwrap_or_default()
}

/// Parses lines `DIGEST STAGE`.
fn parse(text: &str) -> BTreeMap<String, String> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    let pairs = lines.filter_map(|line| line.split_once(' '));
    pairs.map(|(digest, stage)| (stage.to_owned(), digest.to_owned())).collect()
}

fn write(path: &Path, stamps: &BTreeMap<String, String>) -> Result<()> {
    let mut text = HEAD.to_owned();
    for (stage, digest) in stamps {
        let _ = writeln!(text, "{digest} {stage}");
    }
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

/// Returns the digest of a stage's inputs, `None` if the stage always runs.
pub(crate) fn digest(workspace: &Workspace, inputs: Inputs) -> Result<Option<String>> {
    let root = shell::root();
    let places: BTreeSet<PathBuf> = match inputs {
        Inputs::All => return Ok(None),
        Inputs::Files(paths) => paths.iter().map(PathBuf::from).collect(),
        Inputs::Crates(names) => {
            let crates = workspace.used_by(names)?;
            crates.into_iter().map(PathBuf::from).chain(COMMON.map(PathBuf::from)).collect()
        }
    };
    let mut hasher = Xxh3::new();
    for place in places {
        add_file_or_folder(&mut hasher, &root, &place)?;
    }
    Ok(Some(format!("{:032x}", hasher.digest128())))
}

/// Adds names and contents, in the order of names; a place that does not exist adds its name.
fn add_file_or_folder(hasher: &mut Xxh3, root: &Path, place: &Path) -> Result<()> {
    let path = root.join(place);
    let mut add = |bytes: &[u8]| {
        hasher.update(&u64::try_from(bytes.len()).unwrap_or(u64::MAX).to_le_bytes());
        hasher.update(bytes);
    };
    add(place.to_string_lossy().replace('\\', "/").as_bytes());
    if path.is_file() {
        add(&fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?);
    } else if path.is_dir() {
        let entries =
            fs::read_dir(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let names = entries.map(|entry| Ok(entry?.file_name())).collect::<Result<BTreeSet<_>>>()?;
        for name in names.iter().filter(|name| IGNORED.iter().all(|ignored| *name != *ignored)) {
            add_file_or_folder(hasher, root, &place.join(name))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digest_of(root: &Path, place: &str) -> u128 {
        let mut hasher = Xxh3::new();
        add_file_or_folder(&mut hasher, root, Path::new(place)).unwrap();
        hasher.digest128()
    }

    #[test]
    fn a_digest_changes_with_names_and_contents_alone() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        fs::create_dir_all(root.join("a/b")).unwrap();
        fs::create_dir_all(root.join("a/compiled")).unwrap();
        fs::write(root.join("a/b/c"), "one").unwrap();
        let first = digest_of(root, "a");
        fs::write(root.join("a/compiled/d"), "ignored").unwrap();
        assert_eq!(digest_of(root, "a"), first);
        fs::write(root.join("a/b/c"), "two").unwrap();
        assert_ne!(digest_of(root, "a"), first);
        fs::write(root.join("a/b/c"), "one").unwrap();
        assert_eq!(digest_of(root, "a"), first);
        fs::rename(root.join("a/b/c"), root.join("a/b/e")).unwrap();
        assert_ne!(digest_of(root, "a"), first);
        fs::write(root.join("a/b/f"), "").unwrap();
        let with_empty = digest_of(root, "a");
        fs::remove_file(root.join("a/b/f")).unwrap();
        assert_ne!(digest_of(root, "a"), with_empty);
        assert_ne!(digest_of(root, "missing"), digest_of(root, "also missing"));
    }

    #[test]
    fn a_stage_is_known_until_its_inputs_change() {
        let folder = tempfile::tempdir().unwrap();
        let mut stamps = Stamps::load(folder.path(), false);
        assert!(!stamps.has("a stage", "1f"));
        stamps.add("a stage", Inputs::Crates(&["kv-core"]), "1f").unwrap();
        let again = Stamps::load(folder.path(), false);
        assert!(
            again.has("a stage", "1f") && !again.has("a stage", "20") && !again.has("stage", "1f")
        );
    }

    /// The crates of a stage decide with everything below them.
    #[test]
    fn inputs_of_a_crate_include_what_it_uses() {
        let workspace = Workspace::load().unwrap();
        let used = workspace.used_by(&["kv-wgpu"]).unwrap();
        for name in ["kv-wgpu", "kv-core", "kv-format", "kv-testkit"] {
            assert!(used.contains(name), "{name} of {used:?}");
        }
        assert!(!used.contains("kv-cli") && !used.contains("kv-cuda"), "{used:?}");
        assert!(workspace.used_by(&["kv-unknown"]).is_err());
        let of = |inputs| digest(&workspace, inputs).unwrap();
        assert_eq!(of(Inputs::All), None);
        assert_ne!(of(Inputs::Files(&["README.md"])), of(Inputs::Files(&["CHANGELOG.md"])));
        assert_eq!(of(Inputs::Files(&["README.md"])), of(Inputs::Files(&["README.md"])));
    }
}
