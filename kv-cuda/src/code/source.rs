//! Kernel sources as input of the compiler: a unit, the headers it includes, options.
//!
//! A unit's key covers everything that affects the compiler's output: equal keys mean equal machine
//! code.
use std::fmt;

use kv_core::num::to_u64;
use xxhash_rust::xxh3::Xxh3;

use super::Arch;

/// One source file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Source<'a> {
    /// Name in `#include` lines.
    pub name: &'a str,
    /// Its text.
    pub text: &'a str,
}

impl<'a> Source<'a> {
    /// Returns whether it is compiled by itself.
    pub fn is_unit(&self) -> bool {
        std::path::Path::new(self.name).extension().is_some_and(|extension| extension == "cu")
    }

    /// Iterates over the names in `#include "name"` lines.
    fn includes(&self) -> impl Iterator<Item = &'a str> {
        self.text.lines().filter_map(|line| {
            let rest = line.trim_start().strip_prefix('#')?.trim_start();
            let name = rest.strip_prefix("include")?.trim_start().strip_prefix('"')?;
            name.split_once('"').map(|(name, _)| name)
        })
    }
}

/// A unit and everything that it includes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unit<'a> {
    source: Source<'a>,
    /// Sorted by name, whatever the order of includes.
    headers: Vec<Source<'a>>,
}

impl<'a> Unit<'a> {
    /// Collects the includes of a unit from `all`; other names are left to the compiler.
    pub fn new(source: Source<'a>, all: &[Source<'a>]) -> Self {
        let mut headers: Vec<Source<'a>> = Vec::new();
        let mut open = vec![source];
        while let Some(next) = open.pop() {
            for name in next.includes() {
                let found = all.iter().find(|header| header.name == name);
                if let Some(header) = found.filter(|header| !headers.contains(header)) {
                    headers.push(*header);
                    open.push(*header);
                }
            }
        }
        headers.sort_by_key(|header| header.name);
        Self { source, headers }
    }

    /// Returns the file name, such as `attend.cu`.
    pub fn name(&self) -> &'a str {
        self.source.name
    }

    /// Returns the unit's own text.
    pub(crate) fn text(&self) -> &'a str {
        self.source.text
    }

    /// Returns the included headers, sorted by name.
    pub(crate) fn headers(&self) -> &[Source<'a>] {
        &self.headers
    }

    /// Returns how well this unit's text matches an exported kernel of this name, `None` for no
    /// match.
    ///
    /// The text has a kernel's name, or its beginning up to a `_`, as a macro's first argument:
    /// `(name,`. The longest match is the best.
    pub(crate) fn fit(&self, kernel: &str) -> Option<usize> {
        let arguments = self.text().split('(').skip(1).filter_map(|rest| rest.split_once(','));
        let names = arguments.map(|(name, _)| name.trim()).filter(|name| !name.is_empty());
        let fitting = names.filter(|name| {
            kernel.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('_'))
        });
        fitting.map(str::len).max()
    }

    /// Returns the compiler's options. A unit adds options in its first line: `// nvrtc: ...`.
    pub fn options(&self, arch: Arch) -> Vec<String> {
        let mut options = vec![format!("--gpu-architecture={arch}")];
        options.extend(OPTIONS.iter().map(|option| (*option).to_owned()));
        let first = self.text().lines().next().unwrap_or_default();
        let own = first.strip_prefix("// nvrtc:").unwrap_or_default();
        options.extend(own.split_whitespace().map(str::to_owned));
        options
    }

    /// Returns the key of the compiled unit; `version` is the compiler's.
    pub fn key(&self, arch: Arch, version: u32) -> Key {
        let mut hash = Xxh3::new();
        // Lengths are hashed too, so that texts cannot be shifted between files.
        let mut add = |text: &str| {
            hash.update(&to_u64(text.len()).to_le_bytes());
            hash.update(text.as_bytes());
        };
        add(KEY_FORM);
        add(&version.to_string());
        for option in self.options(arch) {
            add(&option);
        }
        for file in std::iter::once(&self.source).chain(&self.headers) {
            add(file.name);
            add(file.text);
        }
        Key(hash.digest128().to_le_bytes())
    }
}

/// Identifies the result of a compilation by all of its inputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Key(pub(crate) [u8; 16]);

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", u128::from_be_bytes(self.0))
    }
}

/// Options for every unit. The report of registers and spills goes to the log.
const OPTIONS: [&str; 3] = ["--std=c++17", "-default-device", "--ptxas-options=-v"];
/// Changes when the inputs that a key covers change.
const KEY_FORM: &str = "kv-cuda code 1";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::code;

    const ALL: [Source<'_>; 4] = [
        Source { name: "b.h", text: "#pragma once\n#include \"a.h\"\n" },
        Source { name: "a.h", text: "#include \"b.h\"\n // #include \"c.h\"\n" },
        Source { name: "c.h", text: "" },
        Source { name: "u.cu", text: "// nvrtc: --fmad=false -DX=1\n # include \"b.h\"\n" },
    ];

    fn unit(all: &[Source<'static>; 4]) -> Unit<'static> {
        Unit::new(all[3], all)
    }

    #[test]
    fn headers_are_collected_transitively() {
        let names: Vec<_> = unit(&ALL).headers().iter().map(|header| header.name).collect();
        assert_eq!(names, ["a.h", "b.h"]);
        // Every unit of this crate includes the device layer.
        assert!(code::sources().any(|source| source.name == "dev.h"));
    }

    #[test]
    fn options_are_read_from_the_first_line() {
        let options = unit(&ALL).options("sm_90a".parse().unwrap());
        assert_eq!(options[0], "--gpu-architecture=sm_90a");
        assert_eq!(options[options.len() - 2..], ["--fmad=false", "-DX=1"]);
        let plain = Unit::new(Source { name: "x.cu", text: "\n// nvrtc: -G" }, &ALL);
        assert_eq!(plain.options(Arch::PTX).len(), 4);
    }

    #[test]
    fn a_key_changes_with_every_input() {
        let (arch, key) = (Arch::PTX, unit(&ALL).key(Arch::PTX, 13000));
        assert_eq!(unit(&ALL).key(arch, 13000), key);
        assert_eq!(key.to_string().len(), 32);
        let change = |index: usize, text| {
            let mut all = ALL;
            all[index].text = text;
            unit(&all).key(arch, 13000)
        };
        assert_ne!(unit(&ALL).key(arch, 12090), key);
        assert_ne!(unit(&ALL).key("sm_80".parse().unwrap(), 13000), key);
        assert_ne!(change(1, "int x;"), key, "a header that is included by another");
        assert_ne!(change(3, "#include \"b.h\"\n"), key);
        assert_eq!(change(2, "int y;"), key, "a header that is not included");
    }

    #[test]
    fn kernels_are_found_by_name() {
        let text = "KV_KERNEL(attend_8, P, 128, 1, attend<8>)\nKV_MORE( row ,2) f(rows_2)";
        let unit = Unit::new(Source { name: "k.cu", text }, &[]);
        for (kernel, fit) in [("attend_8", Some(8)), ("row", Some(3)), ("row_64", Some(3))] {
            assert_eq!(unit.fit(kernel), fit, "{kernel}");
        }
        for other in ["attend", "ttend_8", "attend_80", "rows_2", "P", "none"] {
            assert_eq!(unit.fit(other), None, "{other}");
        }
    }
}
