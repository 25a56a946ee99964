//! The same prompt again and again, as in health checks.
use kv_core::CacheError;
use kv_core::error::PlanError;

use super::choices::{Choices, Options};
use super::step::StepOutcome;
use super::{Behaviour, StatefulTest};
use crate::case::{At, CaseError, ensure};

impl StatefulTest {
    /// Computes an earlier prompt several times: from the second time on nothing more is cached
    /// than before, unless the pool had to evict a part of it.
    pub(super) fn repeat(&mut self, choices: &mut Choices<'_>) -> Result<(), CaseError> {
        if self.prompts.is_empty() {
            return Ok(());
        }
        let (prompt, options) = self.prompts[choices.index(self.prompts.len())].clone();
        let options = Options { reserve: 0, ..options };
        let times = 2 + choices.below(3);
        self.record(|| format!("repeat {prompt:?}, {options:?}, {times} times"));
        let mut before = None;
        for _ in 0..times {
            let evictions = self.cache.state().stats().evictions;
            if !self.compute_once(&prompt, &options)? {
                return Ok(());
            }
            self.check().at("repeated")?;
            if self.cache.state().stats().evictions != evictions {
                before = None;
                continue;
            }
            let cached: Vec<_> = self.groups().map(|(_, pool)| pool.index().len()).collect();
            if let Some(before) = before.replace(cached.clone()) {
                let is_more = cached.iter().zip(&before).any(|(now, before)| now > before);
                ensure(!is_more, || format!("{cached:?} blocks are cached, earlier {before:?}"))?;
                self.coverage.add(Behaviour::Repeated);
            }
        }
        Ok(())
    }

    /// Starts a sequence, computes its whole prompt in one step and releases it; returns false if
    /// the prompt does not fit.
    fn compute_once(&mut self, prompt: &[u32], options: &Options) -> Result<bool, CaseError> {
        let id = self.new_id();
        let reused = match self.cache.start(id, prompt, options.start_options()) {
            Ok(reused) => reused,
            Err(CacheError::Plan(
                PlanError::TooMany { .. } | PlanError::SequenceTooLong { .. },
            )) => {
                return Ok(false);
            }
            Err(other) => return Err(other.into()),
        };
        let sequence = self.started(id, (prompt.to_vec(), options.clone()), reused);
        let rest = sequence.prompt.len();
        self.sequences.push(sequence);
        let fits = rest == 0 || self.next_chunk(rest, 0)? == StepOutcome::Committed;
        self.sequences.pop();
        self.cache.release(id)?;
        Ok(fits && rest > 0)
    }
}
