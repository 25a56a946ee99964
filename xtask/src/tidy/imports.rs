//! Rules about imports inside a crate: no large circles, and layers where ARCHITECTURE.md says so.
//!
//! The unit is a file. Imports come from `use` declarations and from paths that begin with `crate`
//! or `super`; tests and imports for documentation alone do not count. An item that a module
//! re-exports counts as an import of the file that defines it.
use std::collections::{BTreeMap, BTreeSet};

use super::Problem;

/// Largest number of files that may import each other in a circle: enough for a type and its parts.
const CIRCLE_MAX: usize = 4;

/// The crate whose modules ARCHITECTURE.md lists in layers.
const LAYERED: &str = "kv-core";
/// The line of ARCHITECTURE.md before the table of layers, lowest first.
const LAYERS_TITLE: &str = "Inside `kv-core`, from the bottom up:";

/// The path of a module from the root of its crate.
type Module = Vec<String>;

/// One file of a crate, without comments and tests.
struct File {
    place: String,
    code: String,
    /// Names that the file re-exports, with the path of each.
    exports: BTreeMap<String, Vec<String>>,
}

/// The files of one crate and their imports.
pub(super) struct Imports {
    name: String,
    files: BTreeMap<Module, File>,
}

impl Imports {
    /// Reads the sources of a crate: paths from its folder, such as `src/lib.rs`, and texts.
    pub(super) fn new<'a>(
        name: &str,
        sources: impl IntoIterator<Item = (&'a str, &'a str)>,
    ) -> Self {
        let mut files = BTreeMap::new();
        for (path, text) in sources {
            let Some(module) = module_of(path) else { continue };
            let code = without_tests(text);
            let mut exports = BTreeMap::new();
            for path in
                declarations(&code).filter(|use_| use_.is_public).flat_map(|use_| use_.paths())
            {
                if let Some(last) = path.last() {
                    exports.insert(last.clone(), path);
                }
            }
            let place = format!("{name}/{path}");
            files.insert(module, File { place, code, exports });
        }
        Self { name: name.to_owned(), files }
    }

    /// Checks circles, and layers if the crate has some, which `architecture` lists.
    pub(super) fn check(&self, architecture: &str) -> Vec<Problem> {
        let edges: BTreeMap<_, _> =
            self.files.iter().map(|(module, file)| (module, self.imports(module, file))).collect();
        let mut problems = self.check_circles(&edges);
        if self.name == LAYERED {
            problems.extend(self.check_layers(&edges, &layers(architecture)));
        }
        problems
    }

    fn check_circles(&self, edges: &Edges<'_>) -> Vec<Problem> {
        let large = circles(edges).into_iter().filter(|circle| circle.len() > CIRCLE_MAX);
        large
            .map(|circle| {
                let names: Vec<_> = circle.iter().map(|module| module.join("::")).collect();
                let rule = format!(
                    "{} files import each other in a circle, at most {CIRCLE_MAX} may: {}",
                    names.len(),
                    names.join(", ")
                );
                Problem::new(&self.name, 0, rule)
            })
            .collect()
    }

    fn check_layers(&self, edges: &Edges<'_>, layers: &[Vec<Module>]) -> Vec<Problem> {
        let layer_of = |module: &Module| {
            let rows = layers.iter().enumerate().flat_map(|(row, names)| {
                names
                    .iter()
                    .map(move |name| (row, name))
                    .filter(|(_, name)| module.starts_with(name))
            });
            rows.max_by_key(|(_, name)| name.len()).map(|(row, _)| row)
        };
        let mut problems = Vec::new();
        for (module, imports) in edges.iter().filter(|(module, _)| !module.is_empty()) {
            let place = self.files.get(*module).map_or("", |file| file.place.as_str());
            let Some(layer) = layer_of(module) else {
                let rule = "is in no row of ARCHITECTURE.md's table of layers";
                problems.push(Problem::new(place, 0, rule));
                continue;
            };
            for import in
                imports.iter().filter(|import| layer_of(import).is_some_and(|row| row > layer))
            {
                let rule = format!(
                    "imports `{}`, which ARCHITECTURE.md lists in a higher layer",
                    import.join("::")
                );
                problems.push(Problem::new(place, 0, rule));
            }
        }
        if layers.is_empty() {
            let rule = format!("has no table after {LAYERS_TITLE:?}");
            problems.push(Problem::new("ARCHITECTURE.md", 0, rule));
        }
        problems
    }

    /// Returns the modules that a file imports from, other than itself and the root.
    fn imports(&self, module: &Module, file: &File) -> BTreeSet<&Module> {
        let named = declarations(&file.code).filter(|use_| !use_.is_public);
        let paths = named.flat_map(|use_| use_.paths()).chain(inline_paths(&file.code));
        paths
            .filter_map(|path| self.definition(module, &path, 0))
            .filter(|found| *found != module && !found.is_empty())
            .collect()
    }

    /// Returns the file that defines the item of a path from `module`.
    fn definition(&self, module: &Module, path: &[String], depth: usize) -> Option<&Module> {
        let absolute = absolute(module, path)?;
        let (found, rest) = (0..=absolute.len()).rev().find_map(|len| {
            let (module, rest) = absolute.split_at(len);
            self.files.get_key_value(module).map(|(module, file)| ((module, file), rest))
        })?;
        let ((found, file), name) = (found, rest.first());
        let export = name.and_then(|name| file.exports.get(name)).filter(|_| depth < 8);
        let target = export.and_then(|path| {
            let inside = match path.first().map(String::as_str) {
                Some("crate" | "super" | "self") => path.clone(),
                _ => std::iter::once("self".to_owned()).chain(path.iter().cloned()).collect(),
            };
            self.definition(found, &inside, depth + 1)
        });
        target.or(Some(found))
    }
}

type Edges<'a> = BTreeMap<&'a Module, BTreeSet<&'a Module>>;

/// Returns the module of a source file; `None` for tests and files outside `src`.
fn module_of(path: &str) -> Option<Module> {
    let path = path.strip_prefix("src/")?.strip_suffix(".rs")?;
    let mut module: Module = path.split('/').map(str::to_owned).collect();
    if module.iter().any(|part| part == "tests" || part.ends_with("_tests")) {
        return None;
    }
    if module.last().is_some_and(|last| last == "mod") || path == "lib" || path == "main" {
        module.pop();
    }
    Some(module)
}

/// Removes comments, the test module at the end, and items for documentation alone.
fn without_tests(text: &str) -> String {
    let mut code = String::new();
    let mut is_doc = false;
    for line in text.lines() {
        let line = line.split("//").next().unwrap_or_default();
        if line.ends_with("mod tests {") {
            break;
        }
        // A declaration for documentation ends with its semicolon.
        is_doc |= line.trim() == "#[cfg(doc)]";
        if !is_doc {
            code.push_str(line);
            code.push('\n');
        }
        is_doc &= !line.contains(';');
    }
    code
}

/// A `use` declaration.
struct Use<'a> {
    tree: &'a str,
    is_public: bool,
}

impl Use<'_> {
    /// Returns the paths of the declaration, one for each name.
    fn paths(&self) -> Vec<Vec<String>> {
        let mut paths = Vec::new();
        expand(&mut Vec::new(), self.tree, &mut paths);
        paths
    }
}

/// Returns the `use` declarations of a file.
fn declarations(code: &str) -> impl Iterator<Item = Use<'_>> {
    code.match_indices("use ").filter_map(|(at, word)| {
        let before = code.get(..at)?.rsplit('\n').next()?.trim();
        let is_public = before.starts_with("pub");
        if !(before.is_empty() || is_public) {
            return None;
        }
        let tree = code.get(at..)?.strip_prefix(word)?.split(';').next()?;
        Some(Use { tree, is_public })
    })
}

/// Appends the paths of a tree of imports, each after `prefix`.
fn expand(prefix: &mut Vec<String>, tree: &str, paths: &mut Vec<Vec<String>>) {
    let tree = tree.trim();
    let (head, group) = match tree.split_once('{') {
        Some((head, group)) => (head, group.strip_suffix('}')),
        None => (tree, None),
    };
    let len = prefix.len();
    let head = head.split(" as ").next().unwrap_or_default();
    prefix
        .extend(head.split("::").map(str::trim).filter(|part| !part.is_empty()).map(str::to_owned));
    match group {
        None => paths.push(prefix.clone()),
        Some(group) => split_list(group).for_each(|tree| expand(prefix, tree, paths)),
    }
    prefix.truncate(len);
}

/// Splits at commas that are in no braces.
fn split_list(list: &str) -> impl Iterator<Item = &str> {
    let mut depth = 0_u32;
    list.split(move |c| {
        match c {
            '{' => depth += 1,
            '}' => depth = depth.saturating_sub(1),
            _ => {}
        }
        c == ',' && depth == 0
    })
    .filter(|tree| !tree.trim().is_empty())
}

/// Returns paths in the code that begin with `crate` or `super`, outside of declarations.
fn inline_paths(code: &str) -> impl Iterator<Item = Vec<String>> {
    let is_name = |c: char| c.is_alphanumeric() || c == '_';
    ["crate::", "super::"].into_iter().flat_map(move |start| {
        code.match_indices(start).filter_map(move |(at, _)| {
            let (before, after) = code.split_at_checked(at)?;
            let statement = before.rsplit([';', '}']).next()?;
            let is_declared = statement.split_whitespace().any(|word| word == "use")
                || before.ends_with("pub(in ");
            let is_whole =
                !before.ends_with(|c: char| is_name(c) || c == ':' || c == '$') && !is_declared;
            let end = after.find(|c: char| !(is_name(c) || c == ':')).unwrap_or(after.len());
            let path = after.get(..end)?.split("::").filter(|part| !part.is_empty());
            is_whole.then(|| path.map(str::to_owned).collect())
        })
    })
}

/// Returns a path from the root of the crate; `None` for a path to another crate.
fn absolute(module: &Module, path: &[String]) -> Option<Module> {
    let (first, mut rest) = path.split_first()?;
    let mut base = match first.as_str() {
        "crate" => Module::new(),
        "self" => module.clone(),
        "super" => module.split_last().map(|(_, parent)| parent.to_vec())?,
        _ => return None,
    };
    while let Some(("super", more)) = rest.split_first().map(|(part, more)| (part.as_str(), more)) {
        base.pop()?;
        rest = more;
    }
    base.extend_from_slice(rest);
    Some(base)
}

/// Returns the circles of a graph: files of which each reaches every other.
fn circles<'a>(edges: &Edges<'a>) -> Vec<Vec<&'a Module>> {
    let reached: BTreeMap<_, _> =
        edges.keys().map(|start| (*start, reachable(edges, start))).collect();
    let mut seen = BTreeSet::new();
    let mut circles = Vec::new();
    for (start, to) in &reached {
        let back = |other: &&Module| reached.get(*other).is_some_and(|to| to.contains(start));
        let circle: Vec<_> = to.iter().copied().filter(back).collect();
        if circle.len() > 1 && circle.iter().all(|module| seen.insert(*module)) {
            circles.push(circle);
        }
    }
    circles
}

fn reachable<'a>(edges: &Edges<'a>, start: &'a Module) -> BTreeSet<&'a Module> {
    let mut reached = BTreeSet::new();
    let mut open = vec![start];
    while let Some(module) = open.pop() {
        let next = edges.get(module).into_iter().flatten().copied();
        open.extend(next.filter(|next| reached.insert(*next)));
    }
    reached
}

/// Reads the rows of the table of layers, lowest first: the modules of each row.
fn layers(architecture: &str) -> Vec<Vec<Module>> {
    let after = architecture.split_once(LAYERS_TITLE).map_or("", |(_, after)| after);
    let rows = after.lines().skip_while(|line| !line.starts_with('|')).skip(2);
    rows.take_while(|line| line.starts_with('|'))
        .filter_map(|line| line.split('|').nth(1))
        .map(|names| {
            let names = names.split(',').map(|name| name.trim().trim_matches('`'));
            names.map(|name| name.split('/').map(str::to_owned).collect()).collect()
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &str = "Inside `kv-core`, from the bottom up:\n\n| module | what |\n|---|---|\n\
        | `ids`, `num` | small |\n| `plan` | work |\n| `plan/late` | more |\n\nEnd\n";

    fn rules(sources: &[(&str, &str)]) -> Vec<String> {
        let imports = Imports::new("kv-core", sources.iter().copied());
        imports.check(TABLE).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn layers_import_downwards() {
        let plan = ("src/plan.rs", "use crate::{ids::{A, B}, num};\nmod late;\n");
        let fine = [
            ("src/lib.rs", "pub use plan::Plan;\n"),
            ("src/ids.rs", "#[cfg(doc)]\nuse crate::plan::P;\nmod tests {\nuse crate::plan::P;\n"),
            plan,
            ("src/plan/late.rs", "use super::Plan;\nfn f() -> crate::num::N {}\n"),
            ("src/num.rs", "// as crate::plan::Plan has it\n"),
            ("src/num/tests.rs", "use crate::plan::Plan;\n"),
        ];
        assert_eq!(rules(&fine), [""; 0]);
        let up = [plan, ("src/plan/late.rs", ""), ("src/ids.rs", "use crate::plan::late::Late;\n")];
        let [rule] = rules(&up).try_into().unwrap();
        assert!(rule.starts_with("kv-core/src/ids.rs: imports `plan::late`"), "{rule}");
        let [rule] = rules(&[("src/more.rs", "")]).try_into().unwrap();
        assert!(rule.starts_with("kv-core/src/more.rs: is in no row"), "{rule}");
    }

    #[test]
    fn a_table_without_rows_is_a_problem() {
        assert_eq!(Imports::new("kv-core", []).check("").len(), 1);
        assert_eq!(Imports::new("kv-other", [("src/a.rs", "")]).check("").len(), 0);
    }

    #[test]
    fn large_circles_are_found_through_exports() {
        let circle = |n: usize| -> Vec<Problem> {
            let files: Vec<_> = (0..n)
                .map(|i| {
                    let next = (i + 1) % n;
                    (format!("src/m{i}.rs"), format!("use crate::T{next} as Other;\n"))
                })
                .collect();
            let exports: Vec<_> = (0..n).map(|i| format!("pub use m{i}::T{i};")).collect();
            let exports = exports.join("\n");
            let root = ("src/lib.rs", exports.as_str());
            let files = files.iter().map(|(path, text)| (path.as_str(), text.as_str()));
            Imports::new("kv-other", files.chain([root])).check("")
        };
        assert_eq!(circle(CIRCLE_MAX), []);
        let problems = circle(CIRCLE_MAX + 1);
        assert!(problems[0].to_string().contains("m0, m1, m2, m3, m4"), "{problems:?}");
    }
}
