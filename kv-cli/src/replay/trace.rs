//! A request trace, held as ids: the blocks that each request needs, in the file's order.
// Numbers of traces may be anything.
#![warn(clippy::arithmetic_side_effects, clippy::indexing_slicing)]
use std::collections::HashMap;
use std::io;
use std::num::NonZeroU32;
use std::path::Path;
use std::time::Duration;

use anyhow::Context;
use kv::error::UnknownName;
use kv::eviction::Return;

use super::csv::{self, Columns};
use super::json;
use super::source::Lines;
use crate::num::{to_u32, to_usize};

/// Upper limit of the tokens of one request, far more than any model reads.
pub(super) const INPUT_TOKENS_MAX: u32 = 1 << 24;
/// Upper limit of the blocks of all requests, which bounds the memory of a replay.
const BLOCKS_MAX: u64 = 1 << 25;
/// No id.
const NONE: u32 = u32::MAX;

/// The public trace that a file has the format of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Format {
    /// JSON lines with ids of 512 tokens each.
    Mooncake,
    /// JSON lines of conversations with ids of 16 tokens each (Bailian).
    Qwen,
    /// CSV with lengths only.
    Azure,
    /// The same with seconds, models and totals.
    BurstGpt,
}

/// The command line's sizes of blocks and ids.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Sizes {
    /// Tokens per block.
    pub(crate) block: Option<NonZeroU32>,
    /// Tokens per id.
    pub(crate) id: Option<NonZeroU32>,
}

impl Format {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Mooncake => "Mooncake",
            Self::Qwen => "Qwen",
            Self::Azure => "Azure",
            Self::BurstGpt => "BurstGPT",
        }
    }
}

/// An error in a line of a trace, or in the trace up to it.
#[derive(Debug, thiserror::Error)]
pub(super) enum TraceError {
    #[error("cannot be read")]
    Read(#[source] io::Error),
    #[error("no request up to here, the trace is empty")]
    Empty,
    #[error(
        "neither a JSON object (Mooncake) nor the header {} (Azure), and no trace of Qwen or \
         BurstGPT",
        csv::AZURE
    )]
    UnknownFormat,
    #[error("a pointer of Git LFS, which stands for the trace: download the file itself")]
    Pointer,
    #[error(
        "no request of a {} trace, column {}: {}",
        .format.name(), .error.column(), without_place(.error)
    )]
    Json { format: Format, error: serde_json::Error },
    #[error("{field} is {got}, at least 0 is needed")]
    Negative { field: &'static str, got: f64 },
    #[error("return: {0}")]
    Hint(UnknownName),
    #[error("the header is {got:?}, expected {} or {}", csv::AZURE, csv::BURST_GPT)]
    Header { got: String },
    #[error("{got} fields, expected the {expected} of {header}")]
    Fields { got: usize, expected: usize, header: String },
    #[error("{field} is {got:?}, expected {expected}")]
    Field { field: &'static str, got: String, expected: &'static str },
    #[error("{got} input tokens, a request has at most {max}")]
    TooLong { got: u64, max: u32 },
    #[error(
        "{got} ids for {tokens} input tokens, {expected} are needed: one for every {id_tokens} \
         begun, unless --tokens-per-id says otherwise"
    )]
    Ids { got: u64, expected: u64, tokens: u64, id_tokens: u32 },
    #[error("--tokens-per-id: a trace of {} has no ids", .format.name())]
    NoIds { format: Format },
    #[error(
        "--block-size {got}: an id stands for {id_tokens} tokens, which must be a multiple of the \
         block size or divide it"
    )]
    BlockSize { got: u32, id_tokens: u32 },
    #[error(
        "more than {max} blocks of {block_size} tokens are requested up to here; larger blocks or \
         a part of the trace can be replayed"
    )]
    TooManyBlocks { max: u64, block_size: u32 },
}

/// Returns the parser's message without its line number, because it sees only one line.
fn without_place(error: &serde_json::Error) -> String {
    let text = error.to_string();
    text.rsplit_once(" at line ").map_or(text.as_str(), |(what, _)| what).to_owned()
}

/// An error with its place in the file.
#[derive(Debug, thiserror::Error)]
#[error("line {line}")]
pub(super) struct AtLine {
    line: u64,
    #[source]
    pub(super) error: TraceError,
}

/// When a request came, and what was generated for it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Arrival {
    /// Its time, from any fixed moment.
    pub(crate) seconds: f64,
    /// At most [`INPUT_TOKENS_MAX`], whatever the file says.
    #[cfg_attr(not(feature = "serve"), allow(dead_code, reason = "`kv load` asks for it"))]
    pub(crate) output_tokens: u32,
}

/// One request of a trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Request {
    /// Tokens of its input.
    pub(crate) tokens: u32,
    /// Blocks of its input; the last one may be partial.
    pub(super) num_blocks: u32,
    /// Index of its first id or, without ids, of its first block.
    first: u32,
    num_ids: u32,
}

/// The source of block numbers.
#[derive(Debug)]
enum Names {
    /// Every block is new.
    Fresh {
        num_blocks: u32,
    },
    Ids(Ids),
}

/// Ids, numbered in the order of their first occurrence.
#[derive(Debug)]
struct Ids {
    /// Ids of all requests, one after another.
    requested: Vec<u32>,
    /// Ids as the file has them.
    values: Vec<u64>,
    /// The id before each id at its first occurrence.
    parents: Vec<u32>,
    /// Whether each id was always after the same ids, as those are that name their whole prefixes.
    are_prefixes: bool,
    numbers: HashMap<u64, u32>,
    /// Blocks per id.
    split: NonZeroU32,
}

/// The requests of a trace, in the file's order.
#[derive(Debug)]
pub(crate) struct Trace {
    pub(super) format: Format,
    pub(crate) block_size: NonZeroU32,
    pub(super) total_tokens: u64,
    requests: Vec<Request>,
    /// One for each request.
    arrivals: Vec<Arrival>,
    /// What each request says of the return of its conversation.
    hints: Vec<Option<Return>>,
    names: Names,
    total_blocks: u64,
    /// Tokens per id, if there are ids.
    id_tokens: Option<NonZeroU32>,
    /// Ids per block.
    ids_per_block: NonZeroU32,
}

impl Trace {
    /// Reads a file; [`Self::new`] has the default sizes.
    pub(crate) fn read(path: &Path, sizes: Sizes) -> anyhow::Result<Self> {
        let read = || -> anyhow::Result<Self> {
            let lines = Lines::open(path)?;
            Ok(Self::from_lines(lines, Format::of_name(path), sizes)?)
        };
        read().with_context(|| path.display().to_string())
    }

    /// Reads lines; their content or the file's name determines the format.
    pub(super) fn from_lines(
        mut lines: Lines,
        named: Option<Format>,
        sizes: Sizes,
    ) -> Result<Self, AtLine> {
        let read = Self::try_from_lines(&mut lines, named, sizes);
        read.map_err(|error| AtLine { line: lines.number(), error })
    }

    fn try_from_lines(
        lines: &mut Lines,
        named: Option<Format>,
        sizes: Sizes,
    ) -> Result<Self, TraceError> {
        let mut is_line = lines.advance().map_err(TraceError::Read)?;
        if !is_line {
            return Err(TraceError::Empty);
        }
        let columns = match lines.text() {
            [b'{', ..] => None,
            line if line.starts_with(b"version https://git-lfs.") => {
                return Err(TraceError::Pointer);
            }
            line => match (Columns::of_header(line), named) {
                (Some(columns), _) => Some(columns),
                (None, Some(Format::Azure | Format::BurstGpt)) => {
                    Some(Columns::check_header(line)?)
                }
                // The parser's error describes the line.
                (None, Some(Format::Mooncake | Format::Qwen)) => None,
                (None, None) => return Err(TraceError::UnknownFormat),
            },
        };
        let format = match &columns {
            Some(columns) => columns.format,
            None => json::format_of(lines.text()),
        };
        let mut trace = Self::new(format, sizes)?;
        if columns.is_some() {
            is_line = lines.advance().map_err(TraceError::Read)?;
        }
        while is_line {
            match &columns {
                None => {
                    let line = json::parse(format, lines.text())?;
                    trace.push(line.input_length, Some(&line.hash_ids))?;
                    trace.note_arrival(line.seconds(format), line.output_length);
                    trace.hints.push(line.hint()?);
                }
                Some(columns) => {
                    let row = columns.parse(lines.text())?;
                    trace.push(row.tokens, None)?;
                    trace.note_arrival(row.seconds, row.output_tokens);
                }
            }
            is_line = lines.advance().map_err(TraceError::Read)?;
        }
        if trace.requests.is_empty() {
            return Err(TraceError::Empty);
        }
        Ok(trace)
    }

    /// Makes an empty trace. By default, ids have as many tokens as in the published traces, and
    /// blocks the tokens per id, or 16 without ids.
    fn new(format: Format, sizes: Sizes) -> Result<Self, TraceError> {
        let one = NonZeroU32::MIN;
        let id_tokens = match format {
            Format::Mooncake => Some(sizes.id.unwrap_or(json::MOONCAKE_ID_TOKENS)),
            Format::Qwen => Some(sizes.id.unwrap_or(json::QWEN_ID_TOKENS)),
            Format::Azure | Format::BurstGpt if sizes.id.is_some() => {
                return Err(TraceError::NoIds { format });
            }
            Format::Azure | Format::BurstGpt => None,
        };
        let block_size = sizes.block.or(id_tokens).unwrap_or(csv::BLOCK_SIZE);
        let (names, ids_per_block) = match id_tokens {
            None => (Names::Fresh { num_blocks: 0 }, one),
            Some(tokens) => {
                let quotient = |a: NonZeroU32, b: NonZeroU32| {
                    let is_whole = a.get().checked_rem(b.get()) == Some(0);
                    NonZeroU32::new(a.get().checked_div(b.get())?).filter(|_| is_whole)
                };
                let (split, joined) = (quotient(tokens, block_size), quotient(block_size, tokens));
                if split.or(joined).is_none() {
                    let (got, id_tokens) = (block_size.get(), tokens.get());
                    return Err(TraceError::BlockSize { got, id_tokens });
                }
                (Names::Ids(Ids::new(split.unwrap_or(one))), joined.unwrap_or(one))
            }
        };
        Ok(Self {
            format,
            block_size,
            total_tokens: 0,
            requests: Vec::new(),
            arrivals: Vec::new(),
            hints: Vec::new(),
            names,
            total_blocks: 0,
            id_tokens,
            ids_per_block,
        })
    }

    /// Adds a request; a refused request changes nothing.
    fn push(&mut self, tokens: u64, ids: Option<&[u64]>) -> Result<(), TraceError> {
        let Some(len) = u32::try_from(tokens).ok().filter(|len| *len <= INPUT_TOKENS_MAX) else {
            return Err(TraceError::TooLong { got: tokens, max: INPUT_TOKENS_MAX });
        };
        if let (Some(ids), Some(id_tokens)) = (ids, self.id_tokens) {
            let id_tokens = id_tokens.get();
            let expected = tokens.div_ceil(id_tokens.into());
            let got = u64::try_from(ids.len()).unwrap_or(u64::MAX);
            if got != expected {
                return Err(TraceError::Ids { got, expected, tokens, id_tokens });
            }
        }
        let num_blocks = len.div_ceil(self.block_size.get());
        // A partial id counts whole: all its blocks have numbers.
        let split = u64::from(self.blocks_per_id().get());
        let numbered = u64::from(num_blocks).checked_next_multiple_of(split).unwrap_or(u64::MAX);
        let total_blocks = self.total_blocks.saturating_add(numbered);
        if total_blocks > BLOCKS_MAX {
            let (max, block_size) = (BLOCKS_MAX, self.block_size.get());
            return Err(TraceError::TooManyBlocks { max, block_size });
        }
        self.total_blocks = total_blocks;
        self.total_tokens = self.total_tokens.saturating_add(tokens);
        let (first, num_ids) = match &mut self.names {
            Names::Fresh { num_blocks: first } => {
                let next = first.saturating_add(num_blocks);
                (std::mem::replace(first, next), 0)
            }
            Names::Ids(names) => {
                // The last id of a block names everything before it, and so the block.
                let size = to_usize(self.ids_per_block.get());
                let ids = ids.unwrap_or_default().chunks(size).filter_map(|ids| ids.last());
                names.push(ids.copied())
            }
        };
        self.requests.push(Request { tokens: len, num_blocks, first, num_ids });
        Ok(())
    }

    /// Adds when the last pushed request came, and what was generated for it.
    fn note_arrival(&mut self, seconds: f64, output_tokens: u64) {
        let output_tokens = u32::try_from(output_tokens).unwrap_or(u32::MAX).min(INPUT_TOKENS_MAX);
        self.arrivals.push(Arrival { seconds, output_tokens });
    }

    /// Returns the time from the first request to the last by the trace's clock; `None` if all have
    /// the same one.
    pub(super) fn span(&self) -> Option<Duration> {
        let times = || self.arrivals.iter().map(|arrival| arrival.seconds);
        let (first, last) = (times().reduce(f64::min)?, times().reduce(f64::max)?);
        Duration::try_from_secs_f64(last - first).ok().filter(|span| !span.is_zero())
    }

    /// Returns what each request says of the return of its conversation, in the order of
    /// [`Self::requests`]; nothing for traces that cannot say it.
    pub(super) fn hints(&self) -> &[Option<Return>] {
        &self.hints
    }

    /// Returns whether the last id of a request stands for as many tokens as the others.
    pub(super) fn ends_whole(&self, request: &Request) -> bool {
        request.tokens.checked_rem(self.named_tokens()) == Some(0)
    }

    pub(crate) fn requests(&self) -> &[Request] {
        &self.requests
    }

    /// Returns when each request came, in the order of [`Self::requests`].
    #[cfg_attr(not(feature = "serve"), allow(dead_code, reason = "`kv load` sends them then"))]
    pub(crate) fn arrivals(&self) -> &[Arrival] {
        &self.arrivals
    }

    /// Returns the upper limit of block numbers; a few numbers below it may be unused.
    pub(super) fn num_blocks(&self) -> u32 {
        match &self.names {
            Names::Fresh { num_blocks } => *num_blocks,
            Names::Ids(ids) => to_u32(ids.values.len()).saturating_mul(ids.split.get()),
        }
    }

    /// Returns the upper limit of the contents that a cache ever has of the trace. A block after
    /// other blocks has other content.
    pub(super) fn contents_max(&self) -> u32 {
        match &self.names {
            Names::Ids(ids) if !ids.are_prefixes => {
                u32::try_from(self.total_blocks).unwrap_or(u32::MAX)
            }
            _ => self.num_blocks(),
        }
    }

    /// Returns the tokens that prompts share or not as a whole: those of an id or of a block,
    /// whichever is more.
    pub(super) fn named_tokens(&self) -> u32 {
        self.block_size.get().saturating_mul(self.blocks_per_id().get())
    }

    /// Returns the blocks of the longest request.
    pub(super) fn longest_blocks(&self) -> u32 {
        self.requests.iter().map(|request| request.num_blocks).max().unwrap_or(0)
    }

    /// Returns when a request came, from the arrival of the first in the file; nothing before it.
    pub(super) fn arrives(&self, request: usize) -> Duration {
        let seconds = |index: usize| self.arrivals.get(index).map_or(0.0, |at| at.seconds);
        Duration::try_from_secs_f64(seconds(request) - seconds(0)).unwrap_or_default()
    }

    /// Writes the numbers of a request's blocks to `out`, in order.
    pub(crate) fn blocks(&self, request: &Request, out: &mut Vec<u32>) {
        out.clear();
        let num_blocks = to_usize(request.num_blocks);
        match &self.names {
            Names::Fresh { .. } => out.extend((request.first..).take(num_blocks)),
            Names::Ids(ids) => {
                let split = ids.split.get();
                let blocks = ids.ids_of_request(request).iter().flat_map(|id| {
                    let first = id.saturating_mul(split);
                    first..first.saturating_add(split)
                });
                out.extend(blocks.take(num_blocks));
            }
        }
    }

    /// Returns what names a block: the id as two numbers, and the part of it.
    #[cfg_attr(not(feature = "serve"), allow(dead_code, reason = "`kv load` asks for it"))]
    pub(crate) fn tokens(&self, block: u32) -> [u32; 3] {
        let Names::Ids(ids) = &self.names else {
            return [block, 0, 0];
        };
        let id = ids.values.get(to_usize(ids.id_of(block))).copied().unwrap_or(0);
        let part = block.checked_rem(ids.split.get()).unwrap_or(0);
        let half = |n: u64| u32::try_from(n & u64::from(u32::MAX)).unwrap_or(0);
        [half(id), half(id >> 32), part]
    }

    /// Returns the ids of a request and the index of the first one; empty without ids.
    pub(super) fn ids(&self, request: &Request) -> (u32, &[u32]) {
        match &self.names {
            Names::Fresh { .. } => (0, &[]),
            Names::Ids(ids) => (request.first, ids.ids_of_request(request)),
        }
    }

    /// Returns all requested ids, in order; `None` without ids.
    pub(super) fn all_ids(&self) -> Option<&[u32]> {
        match &self.names {
            Names::Fresh { .. } => None,
            Names::Ids(ids) => Some(&ids.requested),
        }
    }

    /// Returns the blocks per id.
    pub(super) fn blocks_per_id(&self) -> NonZeroU32 {
        match &self.names {
            Names::Fresh { .. } => NonZeroU32::MIN,
            Names::Ids(ids) => ids.split,
        }
    }
}

impl Ids {
    fn new(split: NonZeroU32) -> Self {
        let (requested, values, parents) = (Vec::new(), Vec::new(), Vec::new());
        Self { requested, values, parents, are_prefixes: true, numbers: HashMap::new(), split }
    }

    /// Adds the ids of a request; returns the index of the first one, and their number.
    fn push(&mut self, ids: impl Iterator<Item = u64>) -> (u32, u32) {
        let first = to_u32(self.requested.len());
        let mut parent = NONE;
        for id in ids {
            let next = to_u32(self.values.len());
            let number = *self.numbers.entry(id).or_insert(next);
            if number == next {
                self.values.push(id);
                self.parents.push(parent);
            }
            self.are_prefixes &= self.parents.get(to_usize(number)) == Some(&parent);
            self.requested.push(number);
            parent = number;
        }
        (first, to_u32(self.requested.len()).saturating_sub(first))
    }

    fn ids_of_request(&self, request: &Request) -> &[u32] {
        let first = to_usize(request.first);
        let end = first.saturating_add(to_usize(request.num_ids));
        self.requested.get(first..end).unwrap_or_default()
    }

    fn id_of(&self, block: u32) -> u32 {
        block.checked_div(self.split.get()).unwrap_or(block)
    }
}

impl Format {
    /// Returns the format that a file's name suggests, without the extension of its compression.
    fn of_name(path: &Path) -> Option<Self> {
        let is_zst = path.extension().is_some_and(|ext| ext.eq_ignore_ascii_case("zst"));
        let stem = if is_zst { path.file_stem() } else { path.file_name() };
        let extension = Path::new(stem?).extension()?.to_str()?.to_ascii_lowercase();
        match extension.as_str() {
            "json" | "jsonl" => Some(Self::Mooncake),
            "csv" => Some(Self::Azure),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests;
