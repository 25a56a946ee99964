//! The workspace as cargo describes it: packages, targets, dependencies.
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use serde_json::Value;

use crate::shell;

/// Features of every build of the workspace: all backends, the CUDA backend also on the emulator,
/// the CPU also on rayon, and all stores. All crates are always selected together with the same
/// features, because cargo builds a dependency again for every selection with other features of it.
pub(crate) const FEATURES: [&str; 2] = [
    "--features",
    concat!(
        "kv-cuda/emulated,kv/emulated,kv/engine,kv/wgpu,kv/rayon,kv-cli/wgpu,kv-cli/cuda,",
        "kv-cli/object,kv-cli/redis,kv-cli/serve,kv-python/emulated,kv-tier/redis,kv-tier/object"
    ),
];

/// The workspace from `cargo metadata`.
#[derive(Debug)]
pub(crate) struct Workspace {
    pub(crate) packages: Vec<Package>,
    pub(crate) target_dir: PathBuf,
}

/// One crate of the workspace.
#[derive(Debug)]
pub(crate) struct Package {
    pub(crate) name: String,
    pub(crate) dependencies: Vec<Dependency>,
    pub(crate) targets: Vec<Target>,
}

/// One line of a crate's dependency tables.
#[derive(Debug)]
pub(crate) struct Dependency {
    pub(crate) name: String,
    pub(crate) is_dev: bool,
    /// Whether it is a crate of this workspace.
    pub(crate) is_ours: bool,
    /// Version requirement, `*` for none.
    pub(crate) version: String,
}

/// One target that cargo builds from a crate.
#[derive(Debug)]
pub(crate) struct Target {
    pub(crate) name: String,
    pub(crate) kind: String,
}

impl Workspace {
    /// Runs `cargo metadata`; needs no network.
    pub(crate) fn load() -> Result<Self> {
        let mut command = shell::cargo(["metadata", "--format-version=1", "--no-deps"]);
        let output = command.output().context("cannot start `cargo metadata`")?;
        if !output.status.success() {
            bail!("cargo metadata: {}", String::from_utf8_lossy(&output.stderr).trim());
        }
        Self::parse(&serde_json::from_slice(&output.stdout)?)
    }

    fn parse(metadata: &Value) -> Result<Self> {
        let packages = list(metadata, "packages").map(package).collect::<Result<_>>()?;
        Ok(Self { packages, target_dir: text(metadata, "target_directory")?.into() })
    }

    /// Returns these crates and all crates of the workspace that they use, also for their tests.
    /// The facade, which examples in their documentation name, does not count.
    pub(crate) fn used_by(&self, names: &[&str]) -> Result<BTreeSet<String>> {
        let mut used = BTreeSet::new();
        let mut open: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        while let Some(name) = open.pop() {
            let package = self.package(&name).with_context(|| format!("no crate {name}"))?;
            if used.insert(name) {
                let counts = |of: &&Dependency| of.is_ours && !(of.is_dev && of.name == "kv");
                let ours = package.dependencies.iter().filter(counts);
                open.extend(ours.map(|dependency| dependency.name.clone()));
            }
        }
        Ok(used)
    }

    /// Returns the crate with this name.
    pub(crate) fn package(&self, name: &str) -> Option<&Package> {
        self.packages.iter().find(|package| package.name == name)
    }
}

impl Package {
    /// Returns targets of one kind: `lib`, `bin`, `test`, `bench`, `example`.
    pub(crate) fn targets_of(&self, kind: &str) -> impl Iterator<Item = &Target> {
        self.targets.iter().filter(move |target| target.kind == kind)
    }
}

fn package(value: &Value) -> Result<Package> {
    Ok(Package {
        name: text(value, "name")?,
        dependencies: list(value, "dependencies").map(dependency).collect::<Result<_>>()?,
        targets: list(value, "targets").map(target).collect::<Result<_>>()?,
    })
}

fn dependency(value: &Value) -> Result<Dependency> {
    Ok(Dependency {
        name: text(value, "name")?,
        is_dev: value.get("kind").and_then(Value::as_str) == Some("dev"),
        is_ours: value.get("path").is_some_and(Value::is_string),
        version: text(value, "req")?,
    })
}

fn target(value: &Value) -> Result<Target> {
    let kind = list(value, "kind").next().and_then(Value::as_str).unwrap_or_default();
    Ok(Target { name: text(value, "name")?, kind: kind.to_owned() })
}

/// Returns folder and version of a package that a manifest depends on, directly or not; it is
/// downloaded if it has to be.
pub(crate) fn source_of(manifest: &Path, name: &str) -> Result<(PathBuf, String)> {
    let mut command = shell::cargo(["metadata", "--format-version=1", "--manifest-path"]);
    let output = command.arg(manifest).output().context("cannot start `cargo metadata`")?;
    if !output.status.success() {
        bail!("cargo metadata: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    let metadata: Value = serde_json::from_slice(&output.stdout)?;
    for package in list(&metadata, "packages") {
        if text(package, "name")? == name {
            let mut folder = PathBuf::from(text(package, "manifest_path")?);
            folder.pop();
            return Ok((folder, text(package, "version")?));
        }
    }
    bail!("{} does not depend on {name}", manifest.display())
}

fn list<'a>(value: &'a Value, key: &str) -> impl Iterator<Item = &'a Value> {
    value.get(key).and_then(Value::as_array).into_iter().flatten()
}

fn text(value: &Value, key: &str) -> Result<String> {
    let text = value.get(key).and_then(Value::as_str);
    Ok(text.with_context(|| format!("cargo metadata has no {key}"))?.to_owned())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Makes a workspace of the given crates and dependencies; `dev:` marks a dev-dependency and
    /// `ext:` an external crate.
    pub(crate) fn workspace(crates: &[(&str, &[&str])]) -> Workspace {
        let dependency = |word: &&str| {
            let (is_dev, word) = word.strip_prefix("dev:").map_or((false, *word), |w| (true, w));
            let (is_ours, name) = word.strip_prefix("ext:").map_or((true, word), |w| (false, w));
            Dependency { name: name.into(), is_dev, is_ours, version: "*".into() }
        };
        let package = |(name, dependencies): &(&str, &[&str])| Package {
            name: (*name).into(),
            dependencies: dependencies.iter().map(dependency).collect(),
            targets: Vec::new(),
        };
        Workspace {
            packages: crates.iter().map(package).collect(),
            target_dir: PathBuf::from("target"),
        }
    }

    #[test]
    fn reads_what_cargo_writes() {
        let metadata = serde_json::json!({
            "target_directory": "/t",
            "packages": [{
                "name": "a",
                "dependencies": [
                    {"name": "b", "kind": null, "path": "/b", "req": "^0.1.0"},
                    {"name": "serde", "kind": "dev", "req": "*"},
                ],
                "targets": [{"name": "it", "kind": ["test"]}],
            }],
        });
        let workspace = Workspace::parse(&metadata).unwrap();
        let package = workspace.package("a").unwrap();
        let [b, serde] = package.dependencies.as_slice() else { panic!("{package:?}") };
        assert!(b.is_ours && !b.is_dev && serde.is_dev && !serde.is_ours);
        assert_eq!(package.targets_of("test").map(|t| t.name.as_str()).collect::<Vec<_>>(), ["it"]);
    }
}
