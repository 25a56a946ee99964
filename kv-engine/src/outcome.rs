//! The tokens of a step: chosen from its logits, or taken from the caller, before the commit.
//!
//! Everything about the output is checked here and nothing changes, so that a step whose output is
//! refused can be rolled back and repeated.
use kv_core::invariant::Invariant;

use crate::error::OutputError;
use crate::model::{Batch, Chosen, Chunk, Logits, Output};
use crate::num::{to_u32, to_usize};
use crate::queues::Queues;
use crate::request::Limits;
use crate::sampler::{Sampler, check_logits};
use crate::task::{Search, Task};

/// The result of one chunk.
#[derive(Debug, Default)]
pub(crate) struct Outcome<'o> {
    /// Accepted tokens of the chunk.
    pub(crate) kept: u32,
    pub(crate) new: Vec<u32>,
    /// The sampler after these tokens.
    pub(crate) sampler: Option<Sampler>,
    /// Logits after the prompt, for other texts after it.
    pub(crate) after_prompt: Option<&'o [f32]>,
    /// Logits that are kept until all beams have theirs.
    pub(crate) row: Option<&'o [f32]>,
}

/// Chooses the tokens of each chunk. Draft tokens are accepted up to the first that differs from
/// the sampler's choice.
///
/// The sampler draws once per generated token, as without drafts. So a draft token `x` is accepted
/// with probability `p(x)`, any other token is chosen with its own probability, and a seed gives
/// the same text with and without drafts.
pub(crate) fn outcomes<'o>(
    output: &'o Output,
    batch: &Batch,
    queues: &Queues,
    limits: &Limits,
) -> Result<Vec<Outcome<'o>>, OutputError> {
    match output {
        Output::Logits(logits) => check_shape(logits, batch, limits)?,
        Output::Tokens(tokens) => check_chunks(tokens, batch)?,
    }
    let (mut row, mut entry) = (0, 0);
    let mut outcomes = Vec::with_capacity(batch.chunks.len());
    for (chunk, tokens) in batch.iter() {
        let drafts = &tokens[to_usize(chunk.tokens - chunk.drafts)..];
        let task = queues.position(chunk.sequence).map(|at| &queues.running()[at]);
        let source = match output {
            Output::Logits(logits) => {
                let rows = row..row + chunk.logits;
                row = rows.end;
                Source::Rows(rows.map(|row| logits.row(row).invariant(ROWS)).collect())
            }
            Output::Tokens(chosen) if chunk.logits > 0 => {
                entry += 1;
                Source::Chosen(&chosen[entry - 1].tokens)
            }
            Output::Tokens(_) => Source::Rows(Vec::new()),
        };
        if let Source::Chosen(tokens) = source {
            check_tokens(tokens, &chunk, drafts, limits)?;
        }
        // A request that was cancelled meanwhile has no task, and its drafts are not accepted.
        let mut outcome = Outcome { kept: chunk.tokens - chunk.drafts, ..Outcome::default() };
        if let Some(task) = task {
            choose(task, &source, drafts, limits, &mut outcome)?;
        }
        outcomes.push(outcome);
    }
    Ok(outcomes)
}

/// The source of a chunk's tokens.
enum Source<'o> {
    Rows(Vec<&'o [f32]>),
    Chosen(&'o [u32]),
}

/// Chooses tokens for one chunk, whose last tokens are drafts.
fn choose<'o>(
    task: &Task,
    source: &Source<'o>,
    drafts: &[u32],
    limits: &Limits,
    outcome: &mut Outcome<'o>,
) -> Result<(), OutputError> {
    let request = task.index;
    let not_finite = |_| OutputError::NotFinite { request };
    let needs_logits = matches!(task.search, Search::Beams(_)) || !task.choices.is_empty();
    match (&task.search, source) {
        (_, Source::Chosen(_)) if needs_logits => Err(OutputError::LogitsNeeded { request }),
        (Search::Beams(_), Source::Rows(rows)) => {
            outcome.row = rows.first().copied();
            outcome.row.map_or(Ok(()), |row| check_logits(row).map(drop).map_err(not_finite))
        }
        (Search::Sample(sampler), Source::Rows(rows)) => {
            let mut sampler = sampler.clone();
            // A request with other choices has no drafts: its only row follows the prompt.
            outcome.after_prompt = rows.first().copied().filter(|_| !task.choices.is_empty());
            let sample = |at: usize| match rows.get(at) {
                Some(row) => sampler.sample(row).map(Some).map_err(not_finite),
                None => Ok(None),
            };
            accept(task, drafts, limits, sample, outcome)?;
            outcome.sampler = Some(sampler);
            Ok(())
        }
        (_, Source::Chosen(tokens)) => {
            accept(task, drafts, limits, |at| Ok(tokens.get(at).copied()), outcome)
        }
    }
}

/// Takes tokens while they equal the drafts, and the token after them. The cache keeps every taken
/// token but the last.
fn accept(
    task: &Task,
    drafts: &[u32],
    limits: &Limits,
    mut next: impl FnMut(usize) -> Result<Option<u32>, OutputError>,
    outcome: &mut Outcome<'_>,
) -> Result<(), OutputError> {
    let mut drafts = drafts.iter();
    while let Some(token) = next(outcome.new.len())? {
        outcome.new.push(token);
        if task.stops_at(token, &limits.stop) || drafts.next() != Some(&token) {
            break;
        }
    }
    outcome.kept += to_u32(outcome.new.len()).saturating_sub(1);
    Ok(())
}

fn check_shape(logits: &Logits, batch: &Batch, limits: &Limits) -> Result<(), OutputError> {
    let (values, width) = (logits.values().len(), logits.width());
    let expected = batch.num_logits();
    if values == 0 && expected == 0 {
        return Ok(());
    }
    if let Some(vocab) = limits.vocab.filter(|vocab| *vocab != width) {
        return Err(OutputError::Width { got: width, expected: vocab });
    }
    let rows =
        values.checked_div(to_usize(width)).filter(|_| values.is_multiple_of(to_usize(width)));
    match rows {
        None => Err(OutputError::Ragged { values, width }),
        Some(got) if got != to_usize(expected) => Err(OutputError::Rows { got, expected }),
        Some(_) => Ok(()),
    }
}

fn check_chunks(chosen: &[Chosen], batch: &Batch) -> Result<(), OutputError> {
    let chunks = || batch.chunks.iter().filter(|chunk| chunk.logits > 0);
    let (got, expected) = (chosen.len(), chunks().count());
    if got != expected {
        return Err(OutputError::Chunks { got, expected });
    }
    for (chosen, chunk) in chosen.iter().zip(chunks()) {
        let (got, expected) = (chosen.sequence, chunk.sequence);
        if got != expected {
            return Err(OutputError::Sequence { got, expected });
        }
    }
    Ok(())
}

fn check_tokens(
    tokens: &[u32],
    chunk: &Chunk,
    drafts: &[u32],
    limits: &Limits,
) -> Result<(), OutputError> {
    let (sequence, got, max) = (chunk.sequence, tokens.len(), chunk.logits);
    let Some((_, accepted)) = tokens.split_last().filter(|_| got <= to_usize(max)) else {
        return Err(OutputError::NumTokens { sequence, got, max });
    };
    if let Some((got, draft)) = accepted.iter().zip(drafts).find(|(got, draft)| got != draft) {
        return Err(OutputError::NotTheDraft { sequence, got: *got, draft: *draft });
    }
    let outside = |vocab: &u32| tokens.iter().find(|token| *token >= vocab);
    match limits.vocab.and_then(|vocab| Some((vocab, *outside(&vocab)?))) {
        Some((vocab, token)) => Err(OutputError::Vocabulary { sequence, token, vocab }),
        None => Ok(()),
    }
}

const ROWS: &str = "rows of logits are counted before they are read";
