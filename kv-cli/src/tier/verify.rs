//! `kv tier verify`.
use anyhow::bail;
use kv::events::Tier;
use kv::tier::chunk::read_header;
use kv::tier::{Bytes, ChunkError, ListChunks, Listed, ListedChunk, StoreErrorKind};
use serde::Serialize;

use super::facts::{Front, read_front, unusable};
use super::{Removal, count, for_each, is_root_part, root_digits, short, soon};
use crate::args::VerifyArgs;
use crate::{failure, output};

pub(super) fn run(args: &VerifyArgs) -> anyhow::Result<()> {
    let store = args.place.open()?;
    let mut report = Report::default();
    let mut removal = Removal::new(&*store);
    let mut bytes = Vec::new();
    for_each(&*store, |listed| {
        let chunk = match listed {
            Listed::Chunk(chunk) => chunk,
            Listed::Other { path } => {
                report.others.push(path);
                return Ok(());
            }
        };
        let finding = match check(&*store, &chunk, &mut bytes)? {
            Checked::Good => {
                report.good += 1;
                // A store may report any lengths.
                report.bytes = report.bytes.saturating_add(chunk.bytes);
                return Ok(());
            }
            Checked::Gone => return Ok(()),
            Checked::Foreign(why) => {
                report.foreign.push(Finding::new(&chunk, why));
                return Ok(());
            }
            Checked::Broken(why) => Finding::new(&chunk, why),
        };
        if args.remove {
            removal.add(chunk.address)?;
        }
        if !args.json {
            output::text(&finding.text())?;
        }
        report.broken.push(finding);
        Ok(())
    })?;
    removal.finish()?;
    report.removed = args.remove && !report.broken.is_empty();
    if args.json {
        output::json(&report)?;
    } else {
        output::text(&report.text())?;
    }
    if !report.broken.is_empty() {
        bail!("{}", report.verdict());
    }
    Ok(())
}

/// The result for one chunk.
enum Checked {
    Good,
    /// Another process removed it meanwhile.
    Gone,
    /// Not for this program: a newer version, encrypted.
    Foreign(String),
    Broken(String),
}

impl From<ChunkError> for Checked {
    fn from(error: ChunkError) -> Self {
        if error.kind().is_foreign() {
            return Self::Foreign(error.to_string());
        }
        Self::Broken(error.to_string())
    }
}

/// Reads a chunk and checks it against its checksums and its name.
fn check(
    store: &dyn ListChunks,
    chunk: &ListedChunk,
    bytes: &mut Vec<u8>,
) -> anyhow::Result<Checked> {
    if chunk.bytes > LARGE {
        // Perhaps no chunk, and not worth the memory.
        match read_front(store, chunk)? {
            Front::Gone => return Ok(Checked::Gone),
            Front::Refused(why) => return Ok(Checked::Broken(why)),
            Front::Read { .. } => {}
        }
    }
    bytes.resize(usize::try_from(chunk.bytes)?, 0);
    let read = match store.get(&chunk.address, bytes, soon()) {
        Ok(Some(read)) => read,
        Ok(None) => return Ok(Checked::Gone),
        Err(error) if error.kind() == StoreErrorKind::Corrupt => {
            return Ok(Checked::Broken(unusable(chunk, &error)));
        }
        // A bad sector.
        Err(error) if store.tier() == Tier::Disk && error.kind() == StoreErrorKind::Unavailable => {
            return Ok(Checked::Broken(failure::chain(&error)));
        }
        Err(error) => return Err(error.into()),
    };
    let bytes = bytes.get(..read).unwrap_or_default();
    let header = match read_header(bytes) {
        Ok(header) => header,
        Err(error) => return Ok(error.into()),
    };
    let (expected, got) = (chunk.address.name, header.name());
    if expected != got {
        return Ok(ChunkError::Name { expected, got }.into());
    }
    let (expected, got) = (chunk.address.root, header.root());
    let known = if is_root_part(&chunk.address) { 8 } else { 32 };
    if expected.as_bytes().get(..known) != got.as_bytes().get(..known) {
        return Ok(ChunkError::Root { expected, got }.into());
    }
    match header.check_payload(bytes) {
        Ok(()) => Ok(Checked::Good),
        Err(error) => Ok(error.into()),
    }
}

#[derive(Debug, Default, Serialize)]
struct Report {
    good: u64,
    /// Bytes of the good chunks.
    bytes: u64,
    broken: Vec<Finding>,
    /// Whether the broken chunks were removed.
    removed: bool,
    /// Chunks that this program cannot check.
    foreign: Vec<Finding>,
    /// Paths that name no chunk.
    others: Vec<String>,
}

/// A chunk, and its fault.
#[derive(Debug, Serialize)]
struct Finding {
    root: String,
    name: String,
    bytes: u64,
    why: String,
}

impl Finding {
    fn new(chunk: &ListedChunk, why: String) -> Self {
        let (root, name) = (root_digits(chunk), chunk.address.name.to_string());
        Self { root, name, bytes: chunk.bytes, why }
    }

    fn text(&self) -> String {
        let Self { root, name, bytes, why } = self;
        let (root, name, bytes) = (short(root), short(name), Bytes(*bytes));
        format!("broken: {name} of root {root}, {bytes}: {why}\n")
    }
}

impl Report {
    fn text(&self) -> String {
        let foreign = self.foreign.iter().map(|Finding { root, name, why, .. }| {
            format!("not checked: {} of root {}: {why}\n", short(name), short(root))
        });
        let others = self.others.iter().map(|path| format!("other: {path}\n"));
        let text: String = foreign.chain(others).collect();
        let (good, bytes) = (count(self.good, "good chunk"), Bytes(self.bytes));
        format!("{text}{good}, {bytes}\n")
    }

    fn verdict(&self) -> String {
        let number = self.broken.len();
        let is = if number == 1 { "chunk is" } else { "chunks are" };
        let then = if self.removed { " and removed" } else { "; --remove removes them" };
        format!("{number} {is} broken{then}")
    }
}

/// A chunk of more bytes is read only if its header is a chunk's.
const LARGE: u64 = 64 << 20;
