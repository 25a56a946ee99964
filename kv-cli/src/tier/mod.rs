//! `kv tier`: chunks of lower tiers, listed, counted, checked and removed.
//!
//! A listing streams: its report bounds its memory, not the size of the store.
mod address;
mod age;
mod argument;
mod facts;
mod ls;
mod rm;
mod stat;
mod verify;

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use kv::tier::{ChunkAddress, ListChunks, Listed, ListedChunk};

pub(crate) use address::Place;
pub(crate) use age::Age;
pub(crate) use argument::AddressParser;

use crate::args::{RootDigits, TierArgs, TierCommand};

pub(crate) fn run(args: &TierArgs) -> anyhow::Result<()> {
    match &args.command {
        TierCommand::Ls(args) => ls::run(args),
        TierCommand::Stat(args) => stat::run(args),
        TierCommand::Verify(args) => verify::run(args),
        TierCommand::Rm(args) => rm::run(args),
    }
}

/// Calls `each` with everything at the store's place, and ends at its first error.
fn for_each(
    store: &dyn ListChunks,
    mut each: impl FnMut(Listed) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let mut outcome = Ok(());
    store.list(LIMIT, &mut |listed| {
        outcome = each(listed);
        if outcome.is_ok() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    })?;
    outcome
}

/// Chunks that are removed many at a time.
struct Removal<'a> {
    store: &'a dyn ListChunks,
    chunks: Vec<ChunkAddress>,
}

impl<'a> Removal<'a> {
    fn new(store: &'a dyn ListChunks) -> Self {
        Self { store, chunks: Vec::new() }
    }

    fn add(&mut self, chunk: ChunkAddress) -> anyhow::Result<()> {
        self.chunks.push(chunk);
        if self.chunks.len() >= BATCH { self.finish() } else { Ok(()) }
    }

    fn finish(&mut self) -> anyhow::Result<()> {
        self.store.remove(&self.chunks, soon())?;
        self.chunks.clear();
        Ok(())
    }
}

/// Returns whether a chunk is of a root, as far as the store tells its root.
fn is_of(chunk: &ListedChunk, root: Option<&RootDigits>) -> bool {
    let Some(RootDigits(digits)) = root else { return true };
    root_digits(chunk).chars().zip(digits.chars()).all(|(known, given)| known == given)
}

/// Returns the digits of a chunk's root that the store tells: all, or the first 16.
fn root_digits(chunk: &ListedChunk) -> String {
    let mut digits = chunk.address.root.to_string();
    if is_root_part(&chunk.address) {
        digits.truncate(SHOWN);
    }
    digits
}

/// Returns whether the store keeps only the first 8 bytes of roots in its paths.
fn is_root_part(chunk: &ChunkAddress) -> bool {
    let (_, rest) = chunk.root.as_bytes().split_at(SHOWN.div_euclid(2));
    rest.iter().all(|byte| *byte == 0)
}

/// Returns the part of a name that is shown.
fn short(name: &str) -> &str {
    name.get(..SHOWN).unwrap_or(name)
}

/// Formats a count with its noun: `1 chunk`, `2 chunks`.
fn count(number: u64, what: &str) -> String {
    format!("{number} {what}{}", if number == 1 { "" } else { "s" })
}

/// Returns the deadline of a call that begins now.
fn soon() -> Instant {
    let now = Instant::now();
    now.checked_add(LIMIT).unwrap_or(now)
}

/// Longest time for an answer of a store.
const LIMIT: Duration = Duration::from_secs(30);
/// Chunks that are removed together.
const BATCH: usize = 256;
/// Digits of a name that are shown.
const SHOWN: usize = 16;
