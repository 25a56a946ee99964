//! `kv tier rm`.
use anyhow::bail;
use kv::tier::{Bytes, ListChunks, Listed, ListedChunk};
use serde::Serialize;

use super::facts::{Front, read_front};
use super::{Age, Removal, count, for_each, is_of};
use crate::args::RmArgs;
use crate::output;

pub(super) fn run(args: &RmArgs) -> anyhow::Result<()> {
    let store = args.place.open()?;
    let mut report = Report { chunks: 0, bytes: 0, removed: args.yes };
    let mut removal = Removal::new(&*store);
    for_each(&*store, |listed| {
        let Listed::Chunk(chunk) = listed else { return Ok(()) };
        if !is_of(&chunk, args.root.as_ref()) || !is_older(&*store, &chunk, args.older_than)? {
            return Ok(());
        }
        report.chunks += 1;
        // A store may report any lengths.
        report.bytes = report.bytes.saturating_add(chunk.bytes);
        if args.yes { removal.add(chunk.address) } else { Ok(()) }
    })?;
    removal.finish()?;
    let Report { chunks, bytes, .. } = report;
    let found = format!("{}, {}", count(chunks, "chunk"), Bytes(bytes));
    if args.json {
        output::json(&report)?;
    } else if args.yes {
        output::text(&format!("removed: {found}\n"))?;
    }
    if !args.yes && chunks > 0 {
        bail!("nothing is removed without --yes: {found}");
    }
    if !args.yes && !args.json {
        output::text("there is nothing to remove\n")?;
    }
    Ok(())
}

/// Returns whether a chunk was written longer ago than `age`.
fn is_older(store: &dyn ListChunks, chunk: &ListedChunk, age: Option<Age>) -> anyhow::Result<bool> {
    let Some(Age(age)) = age else { return Ok(true) };
    match read_front(store, chunk)? {
        Front::Read { facts, .. } => Ok(facts.age_s > age.as_secs()),
        Front::Refused(_) | Front::Gone => Ok(false),
    }
}

#[derive(Debug, Serialize)]
struct Report {
    chunks: u64,
    bytes: u64,
    removed: bool,
}
