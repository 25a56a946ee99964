//! Sequences that come late to a step.
use kv_core::{CacheError, PlanError, SequenceId, Step};

use super::choose::{Bytes, Options};
use super::step::Entry;
use super::{Happened, Life, Lived};
use crate::case::{CaseError, same};
use crate::device::Device;
use crate::erratic::Erratic;
use crate::named;

impl<B: Device> Life<B> {
    /// What joins a step after it began.
    pub(super) fn late(&mut self, bytes: &mut Bytes<'_>, entries: &[Entry]) -> Vec<Late> {
        let mut late = Vec::new();
        if bytes.one_in(3) {
            let at = bytes.index(self.sequences.len());
            if entries.iter().all(|entry| entry.at != at) {
                late.extend(self.entry(at, bytes).map(Late::Add));
            }
        }
        while late.len() < 3 && bytes.one_in(3) {
            let (prompt, options) = self.prompt(bytes);
            // With a reserve it may be refused; without tokens it may bring none.
            late.push(Late::Start(self.new_id(), prompt, options));
        }
        late
    }
}

/// Joins an open step.
#[derive(Debug)]
pub(super) enum Late {
    Add(Entry),
    Start(SequenceId, Vec<u32>, Options),
}

/// A sequence that began in a step.
pub(super) struct Begun {
    pub(super) id: SequenceId,
    pub(super) prompt: Vec<u32>,
    pub(super) options: Options,
    pub(super) reused: u32,
}

/// What became of those who came late.
#[derive(Default)]
pub(super) struct Joined {
    pub(super) begun: Vec<Begun>,
    pub(super) lived: Lived,
}

/// Adds what comes late to a step, as far as there are blocks. `ids`: sequences from before.
pub(super) fn join<B: Device>(
    (step, device): (&mut Step<'_, Erratic<B>>, &Erratic<B>),
    late: Vec<Late>,
    ids: &[SequenceId],
    entries: &mut Vec<Entry>,
) -> Result<Joined, CaseError> {
    let mut joined = Joined::default();
    for late in late {
        let (id, entry) = match late {
            Late::Add(entry) => (ids[entry.at], entry),
            Late::Start(id, prompt, options) => {
                let probed = step.cache().probe(&prompt, options.all());
                let reused = match step.start(id, &prompt, options.all()) {
                    Ok(reused) => reused,
                    Err(CacheError::Exhausted(_)) => {
                        joined.lived.add(Happened::RefusedLate);
                        continue;
                    }
                    Err(CacheError::Device(_)) if device.calm() => {
                        joined.lived.add(Happened::FailedJoin);
                        continue;
                    }
                    Err(CacheError::Plan(
                        PlanError::TooMany { .. } | PlanError::SequenceTooLong { .. },
                    )) => continue,
                    Err(other) => return Err(other.into()),
                };
                same("start and probe in a step", reused, probed)?;
                let names = named::names(&prompt, &options.naming())[reused as usize..].to_vec();
                let (at, tokens) =
                    (ids.len() + joined.begun.len(), prompt[reused as usize..].to_vec());
                joined.begun.push(Begun { id, prompt, options, reused });
                let (is_unknown, drafts, lookahead) = (false, 0, 0);
                (id, Entry { at, tokens, is_unknown, drafts, lookahead, names })
            }
        };
        match step.add(entry.input(id)) {
            Ok(()) => entries.push(entry),
            Err(CacheError::Exhausted(_)) => joined.lived.add(Happened::RefusedLate),
            Err(CacheError::Device(_)) if device.calm() => joined.lived.add(Happened::FailedJoin),
            // An empty prompt brings nothing.
            Err(CacheError::Plan(PlanError::ZeroTokens { .. })) => {}
            Err(other) => return Err(other.into()),
        }
    }
    Ok(joined)
}
