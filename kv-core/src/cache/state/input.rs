//! Inputs of a step, and the bounds of their counts.
use crate::cache::state::step_state::OpenEntry;
#[cfg(doc)]
use crate::error::CacheError;
use crate::error::PlanError;
use crate::ids::SequenceId;
use crate::num::{to_u64, to_usize};
use crate::plan::BatchEntry;
use crate::spec::CacheSpec;
#[cfg(doc)]
use crate::{KvCache, Step};

/// The input of one sequence in a step: its new tokens, or queries over cached ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepInput<'a> {
    pub(in crate::cache) sequence: SequenceId,
    kind: InputKind<'a>,
    drafts: u32,
    lookahead: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum InputKind<'a> {
    Tokens(&'a [u32]),
    /// All tokens of the sequence, with those that it has.
    Prompt(&'a [u32]),
    Count(u32),
    Query(u32),
    Nothing,
}

impl<'a> StepInput<'a> {
    fn new(sequence: SequenceId, kind: InputKind<'a>) -> Self {
        Self { sequence, kind, drafts: 0, lookahead: 0 }
    }
    /// Creates new tokens: the step writes their K and V, and their queries attend.
    pub fn tokens(sequence: SequenceId, tokens: &'a [u32]) -> Self {
        Self::new(sequence, InputKind::Tokens(tokens))
    }
    /// Creates the tokens of a prompt that the sequence does not have yet: those that
    /// [`KvCache::start`](crate::KvCache::start) and earlier steps left to compute. A part from the
    /// beginning, `&prompt[..end]`, is a chunk that ends at `end`. The sequence's tokens are taken
    /// to be the first ones of `prompt`. A step refuses a prompt that has no more than them
    /// ([`PlanError::ZeroTokens`]).
    pub fn prompt(sequence: SequenceId, prompt: &'a [u32]) -> Self {
        Self::new(sequence, InputKind::Prompt(prompt))
    }
    /// Creates `tokens` new tokens without ids. They are never reused for another prompt.
    pub fn count(sequence: SequenceId, tokens: u32) -> Self {
        Self::new(sequence, InputKind::Count(tokens))
    }
    /// Creates queries over cached tokens without writing any: cross-attention over an encoder's K
    /// and V. Their total in a step is at most [`max_queries`](crate::CacheSpec::max_queries).
    pub fn query(sequence: SequenceId, queries: u32) -> Self {
        Self::new(sequence, InputKind::Query(queries))
    }
    /// Creates a batch row that neither writes nor attends, so that other rows keep their indices.
    pub fn idle(sequence: SequenceId) -> Self {
        Self::new(sequence, InputKind::Nothing)
    }

    /// Marks the last `drafts` new tokens, possibly all, as guesses of a draft model: blocks that
    /// hold one are not reusable before a later step. [`Step::commit_accepted`] or
    /// [`KvCache::truncate`] removes those that were not accepted.
    #[must_use]
    pub fn with_drafts(self, drafts: u32) -> Self {
        Self { drafts, ..self }
    }
    /// Also allocates the slots of the next `tokens` tokens, for later steps. Has no effect in
    /// groups with a tail. A step whose lookahead exceeds the pools is refused as
    /// [exhausted](CacheError::Exhausted).
    #[must_use]
    pub fn with_lookahead(self, tokens: u32) -> Self {
        Self { lookahead: tokens, ..self }
    }

    /// Returns the ids of the new tokens of a sequence that has `len` tokens, if known.
    pub(super) fn ids(&self, len: u32) -> Option<&'a [u32]> {
        match self.kind {
            InputKind::Tokens(tokens) => Some(tokens),
            InputKind::Prompt(prompt) => Some(prompt.get(to_usize(len)..).unwrap_or_default()),
            _ => None,
        }
    }
    pub(super) fn details(&self) -> OpenEntry {
        OpenEntry { drafts: self.drafts, lookahead: self.lookahead }
    }

    /// Returns the new tokens and the queries of a sequence that has `len` tokens and may have
    /// `max`. Checks every count except that of the queries, see [`check_queries`].
    #[inline]
    pub(super) fn counts(&self, len: u32, max: u32) -> Result<(u32, u32), PlanError> {
        let sequence = self.sequence;
        let (new, queries) = match self.kind {
            InputKind::Tokens(tokens) => (to_u64(tokens.len()), 0),
            InputKind::Prompt(prompt) => (to_u64(prompt.len()).saturating_sub(len.into()), 0),
            InputKind::Count(n) => (u64::from(n), 0),
            InputKind::Query(n) => (0, n),
            InputKind::Nothing => (0, 0),
        };
        if new == 0 && queries == 0 && self.kind != InputKind::Nothing {
            return Err(PlanError::ZeroTokens { sequence });
        }
        let new_tokens = u32::try_from(new).ok();
        let Some(new_tokens) = new_tokens.filter(|new| *new <= max.saturating_sub(len)) else {
            return Err(PlanError::SequenceTooLong { sequence, len, new, max });
        };
        bounded("drafts", self.drafts, new_tokens)?;
        // All new tokens attend.
        Ok((new_tokens, queries.max(new_tokens)))
    }
}

/// Refuses a count above its limit.
#[inline]
pub(super) fn bounded(what: &'static str, got: u32, max: u32) -> Result<(), PlanError> {
    if got <= max {
        return Ok(());
    }
    Err(PlanError::TooMany { what, got: got.into(), max: max.into() })
}

/// Refuses more queries without tokens than a step may have.
pub(super) fn check_queries(batch: &[BatchEntry], spec: &CacheSpec) -> Result<(), PlanError> {
    let only_asks = batch.iter().filter(|entry| entry.new_tokens == 0);
    let got: u64 = only_asks.map(|entry| u64::from(entry.queries)).sum();
    // Nearly every step has only new tokens.
    let max = if got == 0 { 0 } else { u64::from(spec.max_queries()) };
    if got <= max {
        return Ok(());
    }
    Err(PlanError::TooMany { what: "queries in a step", got, max })
}
