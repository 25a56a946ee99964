//! Rules about whole crates: which crate may depend on which.
//!
//! `cargo deny` could check a part of the table (`bans.deny` with `wrappers`) where it is
//! installed. It does not distinguish dev-dependencies, and a new crate would have no rules.
use super::Problem;
use crate::workspace::{Package, Workspace};

/// Crates of the workspace that a crate may depend on. Dependencies point down only: a crate is
/// listed before those that may use it.
const MAY_DEPEND_ON: &[(&str, &[&str])] = &[
    ("kv-format", &[]),
    ("kv-core", &["kv-format"]),
    ("kv-compat", &["kv-core"]),
    ("kv-events", &["kv-core"]),
    ("kv-quant", &["kv-core", "kv-format"]),
    ("kv-cpu-kernels", &["kv-format"]),
    ("kv-cpu", &["kv-core", "kv-quant", "kv-cpu-kernels"]),
    ("kv-wgpu", &["kv-core", "kv-quant"]),
    ("kv-cuda", &["kv-core", "kv-quant"]),
    ("kv-tier", &["kv-core"]),
    ("kv-engine", &["kv-core", "kv-tier"]),
    ("kv-testkit", &["kv-core", "kv-compat", "kv-quant", "kv-tier"]),
    ("kv", &["kv-core", "kv-quant", "kv-cpu", "kv-wgpu", "kv-cuda", "kv-tier", "kv-engine"]),
    ("kv-candle", &["kv"]),
    ("kv-python", &["kv", "kv-compat"]),
    ("kv-runner", &["kv", "kv-candle"]),
    ("kv-bench", &["kv"]),
    ("kv-cli", &["kv", "kv-events", "kv-runner", "kv-bench"]),
    ("xtask", &[]),
];

/// Crates that tests of any crate may use: the kit, and the facade, which examples in documentation
/// name.
const TESTS_MAY_USE: &[&str] = &["kv-testkit", "kv"];
/// Crates that tests of a crate may use besides: a backend that runs everywhere, the events that an
/// indexer follows, and the kernels that benches time.
const TESTS_MAY_USE_TOO: &[(&str, &str)] = &[
    ("kv-tier", "kv-cpu"),
    ("kv-tier", "kv-events"),
    ("kv-engine", "kv-cpu"),
    ("kv-bench", "kv-cpu-kernels"),
];

/// All external crates of kv-core: every user of the project compiles them.
const KV_CORE_EXTERNAL: &[&str] = &["bytemuck", "half", "hashbrown", "thiserror", "xxhash-rust"];

/// All external crates of kv-format, for the same reason.
const KV_FORMAT_EXTERNAL: &[&str] = &["bytemuck", "half", "thiserror"];

/// All external crates of kv-events: its own wire is what it exists for.
const KV_EVENTS_EXTERNAL: &[&str] = &["thiserror"];

/// External crates of those that may have no others.
const EXTERNAL: [(&str, &[&str]); 3] = [
    ("kv-core", KV_CORE_EXTERNAL),
    ("kv-format", KV_FORMAT_EXTERNAL),
    ("kv-events", KV_EVENTS_EXTERNAL),
];

/// Checks the dependencies between crates.
pub(super) fn check(workspace: &Workspace) -> Vec<Problem> {
    let mut problems = Vec::new();
    for package in &workspace.packages {
        match MAY_DEPEND_ON.iter().find(|(name, _)| *name == package.name) {
            Some((_, allowed)) => problems.extend(check_internal(package, allowed)),
            None => problems.push(Problem::new(
                &package.name,
                0,
                "is not in the dependency table of xtask/src/tidy/crates.rs",
            )),
        }
    }
    for (name, external) in EXTERNAL {
        if let Some(package) = workspace.package(name) {
            problems.extend(check_external(package, external));
        }
    }
    problems
}

fn check_internal(package: &Package, allowed: &[&str]) -> Vec<Problem> {
    let mut problems = Vec::new();
    for dependency in package.dependencies.iter().filter(|dependency| dependency.is_ours) {
        let name = dependency.name.as_str();
        let for_tests =
            dependency.is_dev && TESTS_MAY_USE.contains(&name) && !allowed.contains(&name);
        // A crate names itself to enable a feature for its tests.
        let itself = dependency.is_dev && name == package.name;
        let too = dependency.is_dev && TESTS_MAY_USE_TOO.contains(&(package.name.as_str(), name));
        if !(for_tests || itself || too || allowed.contains(&name)) {
            let rule = format!("may not depend on {name}: dependencies point down only");
            problems.push(Problem::new(&package.name, 0, rule));
        }
        if for_tests && dependency.version != "*" {
            let rule = format!("dev-dependency {name} has a version: publishing would need it");
            problems.push(Problem::new(&package.name, 0, rule));
        }
    }
    problems
}

fn check_external(package: &Package, allowed: &[&str]) -> Vec<Problem> {
    let external = || package.dependencies.iter().filter(|d| !d.is_ours && !d.is_dev);
    let more = external().filter(|d| !allowed.contains(&d.name.as_str())).map(|d| {
        let rule = format!("depends on {}, which is not on its list of external crates", d.name);
        Problem::new(&package.name, 0, rule)
    });
    let gone = allowed.iter().filter(|name| external().all(|d| d.name != **name)).map(|name| {
        let rule =
            format!("no longer depends on {name}: remove it from its list of external crates");
        Problem::new(&package.name, 0, rule)
    });
    more.chain(gone).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workspace::tests::workspace;

    fn rules(problems: &[Problem]) -> Vec<String> {
        problems.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn dependencies_point_down() {
        let external: Vec<_> = KV_CORE_EXTERNAL.iter().map(|name| format!("ext:{name}")).collect();
        let external: Vec<_> = external.iter().map(String::as_str).collect();
        let core = ("kv-core", external.as_slice());
        let fine = workspace(&[core, ("kv-cpu", &["kv-core", "ext:rayon", "dev:kv-testkit"])]);
        assert_eq!(check(&fine), []);
        let up = workspace(&[core, ("kv-cpu", &["kv"]), ("kv-new", &[])]);
        let problems = rules(&check(&up));
        assert_eq!(problems.len(), 2, "{problems:?}");
        assert!(problems[0].starts_with("kv-cpu: may not depend on kv:"));
        assert!(problems[1].starts_with("kv-new: is not in the dependency table"));
    }

    #[test]
    fn the_kit_is_for_tests_and_has_no_version() {
        let mut used = workspace(&[("kv-cpu", &["kv-testkit"])]);
        assert_eq!(check(&used).len(), 1);
        used.packages[0].dependencies[0].is_dev = true;
        assert_eq!(check(&used), []);
        used.packages[0].dependencies[0].version = "^0.1.0".into();
        assert_eq!(check(&used).len(), 1);
    }

    #[test]
    fn the_core_may_not_grow() {
        let grown = workspace(&[(
            "kv-core",
            &["ext:bytemuck", "ext:half", "ext:hashbrown", "ext:xxhash-rust", "ext:tokio"],
        )]);
        let problems = rules(&check(&grown));
        assert_eq!(problems.len(), 2, "{problems:?}");
        assert!(problems[0].contains("depends on tokio"));
        assert!(problems[1].contains("no longer depends on thiserror"));
    }
}
