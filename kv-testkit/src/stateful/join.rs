//! Sequences that join an open step.
use kv_core::backend::AnyBackend;
use kv_core::error::PlanError;
use kv_core::{CacheError, SequenceId, Step};

use super::choices::{Choices, Options};
use super::step::Entry;
use super::{Behaviour, Coverage, StatefulTest};
use crate::case::{CaseError, same};
use crate::fault::FaultInjector;
use crate::provenance;

impl StatefulTest {
    /// Chooses the sequences that join a step after its begin.
    pub(super) fn joins(&mut self, choices: &mut Choices<'_>, entries: &[Entry]) -> Vec<Join> {
        let mut joins = Vec::new();
        if choices.one_in(3) {
            let at = choices.index(self.sequences.len());
            if entries.iter().all(|entry| entry.at != at) {
                joins.extend(self.entry(at, choices).map(Join::Add));
            }
        }
        while joins.len() < 3 && choices.one_in(3) {
            let (prompt, options) = self.prompt(choices);
            // One with a reserve may be refused; an empty prompt has no tokens to add.
            joins.push(Join::Start(self.new_id(), prompt, options));
        }
        joins
    }
}

/// A sequence that joins an open step.
#[derive(Debug)]
pub(super) enum Join {
    Add(Entry),
    Start(SequenceId, Vec<u32>, Options),
}

/// A sequence that started in a step.
pub(super) struct StartedSequence {
    pub(super) id: SequenceId,
    pub(super) prompt: Vec<u32>,
    pub(super) options: Options,
    pub(super) reused: u32,
}

/// The sequences that joined, and the behaviours seen.
#[derive(Default)]
pub(super) struct Joined {
    pub(super) started: Vec<StartedSequence>,
    pub(super) coverage: Coverage,
}

/// Adds sequences to an open step, as far as there are blocks. `ids` are the sequences that existed
/// before.
pub(super) fn join(
    (step, faults): (&mut Step<'_>, &FaultInjector<AnyBackend>),
    joins: Vec<Join>,
    ids: &[SequenceId],
    entries: &mut Vec<Entry>,
) -> Result<Joined, CaseError> {
    let mut joined = Joined::default();
    for join in joins {
        let (id, entry) = match join {
            Join::Add(entry) => (ids[entry.at], entry),
            Join::Start(id, prompt, options) => {
                let probed = step.cache().state().probe(&prompt, options.start_options());
                let reused = match step.start(id, &prompt, options.start_options()) {
                    Ok(reused) => reused,
                    Err(CacheError::Exhausted(_)) => {
                        joined.coverage.add(Behaviour::RefusedJoin);
                        continue;
                    }
                    Err(CacheError::Device(_)) if faults.clear() => {
                        joined.coverage.add(Behaviour::FailedJoin);
                        continue;
                    }
                    Err(CacheError::Plan(
                        PlanError::TooMany { .. } | PlanError::SequenceTooLong { .. },
                    )) => continue,
                    Err(other) => return Err(other.into()),
                };
                same("start and probe in a step", reused, probed)?;
                let hashes = provenance::prefix_hashes(&prompt, &options.key_options())
                    [reused as usize..]
                    .to_vec();
                let (at, tokens) =
                    (ids.len() + joined.started.len(), prompt[reused as usize..].to_vec());
                joined.started.push(StartedSequence { id, prompt, options, reused });
                let (is_unknown, drafts, lookahead) = (false, 0, 0);
                (id, Entry { at, tokens, is_unknown, drafts, lookahead, hashes })
            }
        };
        match step.add(entry.input(id)) {
            Ok(()) => entries.push(entry),
            Err(CacheError::Exhausted(_)) => joined.coverage.add(Behaviour::RefusedJoin),
            Err(CacheError::Device(_)) if faults.clear() => {
                joined.coverage.add(Behaviour::FailedJoin);
            }
            // An empty prompt adds nothing.
            Err(CacheError::Plan(PlanError::ZeroTokens { .. })) => {}
            Err(other) => return Err(other.into()),
        }
    }
    Ok(joined)
}
