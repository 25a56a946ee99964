//! What sequences bring to a step, and the bounds of its counts.
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

/// What one sequence brings to a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StepInput<'a> {
    pub(in crate::cache) sequence: SequenceId,
    brings: Brings<'a>,
    drafts: u32,
    lookahead: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Brings<'a> {
    Tokens(&'a [u32]),
    Count(u32),
    Query(u32),
    Nothing,
}

impl<'a> StepInput<'a> {
    fn new(sequence: SequenceId, brings: Brings<'a>) -> Self {
        Self { sequence, brings, drafts: 0, lookahead: 0 }
    }
    /// New tokens, whose K and V the step writes and whose queries attend.
    pub fn tokens(sequence: SequenceId, tokens: &'a [u32]) -> Self {
        Self::new(sequence, Brings::Tokens(tokens))
    }
    /// The tokens of a prompt after its first `reused`: those that
    /// [`KvCache::start`](crate::KvCache::start) left to compute. A step refuses an input without
    /// tokens ([`PlanError::ZeroTokens`]).
    pub fn prompt(sequence: SequenceId, prompt: &'a [u32], reused: u32) -> Self {
        Self::tokens(sequence, prompt.get(to_usize(reused)..).unwrap_or_default())
    }
    /// A number of new tokens, from a caller without token ids; such tokens are never reused.
    pub fn count(sequence: SequenceId, tokens: u32) -> Self {
        Self::new(sequence, Brings::Count(tokens))
    }
    /// Queries over what is cached, writing nothing: cross-attention over an encoder's K and V.
    /// All of one step are at most [`max_queries`](crate::CacheSpec::max_queries).
    pub fn query(sequence: SequenceId, queries: u32) -> Self {
        Self::new(sequence, Brings::Query(queries))
    }
    /// A batch row that neither writes nor attends, so that rows keep their places.
    pub fn idle(sequence: SequenceId) -> Self {
        Self::new(sequence, Brings::Nothing)
    }

    /// The last `drafts` new tokens, which may be all of them, are guesses of a draft model: blocks
    /// that hold one are not reusable before a later step. [`Step::commit_accepted`] or
    /// [`KvCache::truncate`] takes back what was not accepted.
    #[must_use]
    pub fn with_drafts(self, drafts: u32) -> Self {
        Self { drafts, ..self }
    }
    /// Takes the slots of `tokens` tokens behind the new ones too, for the steps to come. No effect
    /// for groups with a tail. The pools are the bound: a lookahead beyond them is
    /// [exhausted](CacheError::Exhausted).
    #[must_use]
    pub fn with_lookahead(self, tokens: u32) -> Self {
        Self { lookahead: tokens, ..self }
    }

    /// Ids of the new tokens, if known.
    pub(super) fn ids(&self) -> Option<&'a [u32]> {
        match self.brings {
            Brings::Tokens(tokens) => Some(tokens),
            _ => None,
        }
    }
    pub(super) fn details(&self) -> OpenEntry {
        OpenEntry { drafts: self.drafts, lookahead: self.lookahead }
    }

    /// New tokens and queries of a sequence that has `len` tokens and may have `max`: every count
    /// that the input gives is within bounds but that of its queries, see [`check_queries`].
    #[inline]
    pub(super) fn counts(&self, len: u32, max: u32) -> Result<(u32, u32), PlanError> {
        let sequence = self.sequence;
        let (new, queries) = match self.brings {
            Brings::Tokens(tokens) => (to_u64(tokens.len()), 0),
            Brings::Count(n) => (u64::from(n), 0),
            Brings::Query(n) => (0, n),
            Brings::Nothing => (0, 0),
        };
        if new == 0 && queries == 0 && self.brings != Brings::Nothing {
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
pub(in crate::cache) fn bounded(what: &'static str, got: u32, max: u32) -> Result<(), PlanError> {
    if got <= max {
        return Ok(());
    }
    Err(PlanError::TooMany { what, got: got.into(), max: max.into() })
}

/// Refuses more queries without tokens of their own than a step of the cache may ask.
pub(super) fn check_queries(batch: &[BatchEntry], spec: &CacheSpec) -> Result<(), PlanError> {
    let only_asks = batch.iter().filter(|entry| entry.new_tokens == 0);
    let got = only_asks.fold(0_u64, |n, entry| n.saturating_add(entry.queries.into()));
    // Nearly every step brings tokens alone.
    let max = if got == 0 { 0 } else { u64::from(spec.max_queries()) };
    if got <= max {
        return Ok(());
    }
    Err(PlanError::TooMany { what: "queries in a step", got, max })
}
