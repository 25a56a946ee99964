//! `kv tier stat`.
use std::collections::BTreeMap;

use kv::tier::{Bytes, Listed};
use serde::Serialize;

use super::facts::{Facts, Front, read_front};
use super::{count, for_each, root_digits, short};
use crate::args::StatArgs;
use crate::num::to_u64;
use crate::output;

pub(super) fn run(args: &StatArgs) -> anyhow::Result<()> {
    let store = args.place.open()?;
    let (mut roots, mut others) = (BTreeMap::<String, Root>::new(), 0_u64);
    for_each(&*store, |listed| {
        let chunk = match listed {
            Listed::Chunk(chunk) => chunk,
            Listed::Other { .. } => {
                others += 1;
                return Ok(());
            }
        };
        let root = roots.entry(root_digits(&chunk)).or_default();
        root.chunks += 1;
        // A store may report any lengths.
        root.bytes = root.bytes.saturating_add(chunk.bytes);
        if root.facts.is_none()
            && root.chunks <= ATTEMPTS
            && let Front::Read { root: name, facts } = read_front(&*store, &chunk)?
        {
            (root.name, root.facts) = (Some(name), Some(*facts));
        }
        Ok(())
    })?;
    let sum = |of: fn(&Root) -> u64| roots.values().map(of).fold(0, u64::saturating_add);
    let (chunks, bytes) = (sum(|root| root.chunks), sum(|root| root.bytes));
    let place = args.place.to_string();
    for (digits, root) in &mut roots {
        root.name.get_or_insert_with(|| digits.clone());
    }
    let report = Report { place, chunks, bytes, others, roots: roots.into_values().collect() };
    if args.json { output::json(&report) } else { output::text(&report.text()) }
}

#[derive(Debug, Serialize)]
struct Report {
    place: String,
    chunks: u64,
    bytes: u64,
    /// Entries under other names than those of chunks.
    others: u64,
    roots: Vec<Root>,
}

/// The chunks of one root.
#[derive(Debug, Default, Serialize)]
struct Root {
    #[serde(rename = "root")]
    name: Option<String>,
    chunks: u64,
    bytes: u64,
    /// Of one chunk; `None` if no header of the first few can be read.
    #[serde(rename = "example")]
    facts: Option<Facts>,
}

impl Report {
    fn text(&self) -> String {
        let mut rows = vec![HEADING.map(str::to_owned).to_vec()];
        rows.extend(self.roots.iter().map(Root::cells));
        let table = if self.roots.is_empty() { String::new() } else { output::table(&rows) };
        let (chunks, roots) = (count(self.chunks, "chunk"), self.roots.len());
        let roots = count(to_u64(roots), "root");
        let others = match self.others {
            0 => String::new(),
            others => format!(
                ", and {} under no name of a chunk",
                if others == 1 { "1 entry".to_owned() } else { format!("{others} entries") }
            ),
        };
        let (place, bytes) = (&self.place, Bytes(self.bytes));
        format!("{table}{place}: {chunks} of {roots}, {bytes}{others}\n")
    }
}

const HEADING: [&str; 9] =
    ["root", "model", "group", "format", "layers", "tokens", "blocks", "chunks", "bytes"];

impl Root {
    fn cells(&self) -> Vec<String> {
        let fact =
            |of: &dyn Fn(&Facts) -> String| self.facts.as_ref().map_or_else(|| "?".to_owned(), of);
        vec![
            short(self.name.as_deref().unwrap_or_default()).to_owned(),
            fact(&|facts| short(&facts.model).to_owned()),
            fact(&Facts::group),
            fact(&Facts::formats),
            fact(&|facts| facts.layers.to_string()),
            fact(&|facts| facts.tokens.to_string()),
            fact(&|facts| facts.blocks.to_string()),
            self.chunks.to_string(),
            Bytes(self.bytes).to_string(),
        ]
    }
}

/// Chunks of a root whose headers are tried.
const ATTEMPTS: u64 = 4;
