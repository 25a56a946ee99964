//! The start of sequences: probe, admission check, start, prefill.
use kv_core::CacheError;
use kv_core::error::PlanError;
use kv_core::scheduling::Admission;

use super::choices::{Choices, Options};
use super::step::StepOutcome;
use super::{Behaviour, StatefulTest, lock};
use crate::case::{At, CaseError, ensure, same};

/// Terms of computing a prompt.
#[derive(Debug, Clone, Copy)]
struct PrefillTerms {
    chunk: u32,
    lookahead: u32,
    /// The whole prompt, because the admission check said that it fits.
    whole: bool,
}

impl StatefulTest {
    /// Starts a sequence or checks why it cannot start; then computes some or all of its prompt.
    pub(super) fn start(&mut self, choices: &mut Choices<'_>) -> Result<(), CaseError> {
        let (prompt, options) = self.prompt(choices);
        let (id, before) = (self.new_id(), self.visible_state());
        self.record(|| format!("start {id}, {prompt:?}, {options:?}"));
        let probed = self.cache.state().probe(&prompt, options.start_options());
        let len = prompt.len() as u32;
        // The last token is always computed, and no more tokens than the prompt has can be found.
        ensure(probed <= len.saturating_sub(1), || format!("{probed} tokens were found"))?;
        let (chunk, lookahead) = (1 + choices.below(9), choices.pick(&[0, 0, 0, 3]));
        let rest = len - probed.min(len);
        let terms = PrefillTerms { chunk: chunk.min(rest), lookahead, whole: choices.one_in(4) };
        let admitted = self.admit(&prompt, &options, terms);
        self.unchanged(&before).at("check_admission")?;
        self.arm_fault(choices);
        let started = self.cache.start(id, &prompt, options.start_options());
        let has_failed = self.faults.clear();
        let reused = match started {
            Ok(_) if has_failed => return Err("a device failure was not reported".into()),
            Ok(reused) => reused,
            Err(CacheError::Device(_)) if has_failed => {
                self.coverage.add(Behaviour::FailedStart);
                return self.unchanged(&before).at("start");
            }
            Err(CacheError::Exhausted(_)) => {
                ensure(admitted.is_err(), || "admitted but refused by start".to_owned())?;
                self.coverage.add(Behaviour::RefusedStart);
                return self.unchanged(&before).at("start");
            }
            Err(CacheError::Plan(error)) => {
                self.refused_by_plan(&error, prompt.len().max(options.reserve as usize))?;
                return self.unchanged(&before).at("start");
            }
            Err(other) => return Err(other.into()),
        };
        same("start and probe", reused, probed)?;
        self.count_reuse(&prompt, &options, reused, false);
        self.remember(&prompt, &options);
        let sequence = self.started(id, (prompt, options), reused);
        self.sequences.push(sequence);
        self.check_retention()?;
        if terms.chunk == 0 || (!terms.whole && choices.one_in(6)) {
            return Ok(());
        }
        self.check().at("started")?;
        let fits = self.compute(terms).at(format!("{terms:?}, after {reused}"))?;
        // If another sequence cached the same content meanwhile, blocks are shared at commit; the
        // admission check does not count the blocks that this frees.
        let is_shared = self.cache.state().stats().duplicate_blocks > before.duplicates();
        ensure(fits == admitted.is_ok() || (fits && is_shared), || {
            format!("{terms:?} after {reused}: fits: {fits}, but {admitted:?}")
        })?;
        if let Ok(tokens) = admitted {
            same("check_admission and start", tokens, reused)?;
        }
        Ok(())
    }

    fn admit(
        &self,
        prompt: &[u32],
        options: &Options,
        terms: PrefillTerms,
    ) -> Result<u32, CacheError> {
        let admission =
            Admission::default().with_chunk(terms.chunk).with_lookahead(terms.lookahead);
        let admission = admission.with_must_fit(terms.whole);
        self.cache.state().check_admission(prompt, options.start_options(), &admission)
    }

    fn refused_by_plan(&mut self, error: &PlanError, requested: usize) -> Result<(), CaseError> {
        let is_long = requested > self.spec.max_seq_len() as usize;
        let (is_right, what) = match error {
            PlanError::TooMany { .. } => (self.sequences.len() == 6, Behaviour::RefusedSequence),
            PlanError::SequenceTooLong { .. } => (is_long, Behaviour::RefusedLength),
            _ => (false, Behaviour::RefusedLength),
        };
        self.coverage.add(what);
        ensure(is_right, || format!("refused without a reason: {error}"))
    }

    /// Computes the first chunk of the last sequence's prompt, or all of it; returns whether it
    /// fits.
    fn compute(&mut self, terms: PrefillTerms) -> Result<bool, CaseError> {
        let mut lookahead = terms.lookahead;
        let mut chunks = 0;
        while let Some(last) = self.sequences.last().filter(|last| !last.prompt.is_empty()) {
            let chunk = (terms.chunk as usize).min(last.prompt.len());
            if self.next_chunk(chunk, lookahead)? == StepOutcome::Refused {
                self.coverage.add_many(Behaviour::UnfitWhole, u64::from(chunks > 0));
                return Ok(false);
            }
            if !terms.whole {
                return Ok(true);
            }
            // Lookahead is reserved once.
            lookahead = 0;
            chunks += 1;
            self.check().at(format!("chunk {chunks}"))?;
        }
        self.coverage.add_many(Behaviour::FitWhole, u64::from(chunks > 1));
        Ok(true)
    }

    /// Counts the tokens that a sequence reuses.
    pub(super) fn count_reuse(
        &mut self,
        prompt: &[u32],
        options: &Options,
        reused: u32,
        in_step: bool,
    ) {
        self.coverage.add_many(Behaviour::Reused, reused.into());
        self.coverage.add_many(Behaviour::WithRetention, u64::from(options.retention.is_some()));
        if in_step {
            self.coverage.add_many(Behaviour::ReusedInStep, reused.into());
        }
        let ends = |group: &kv_core::spec::GroupSpec| {
            let map = group.slot_map();
            map.tokens(map.full_blocks(reused)) == reused
        };
        let is_part = !self.spec.groups().iter().all(ends);
        self.coverage.add_many(Behaviour::ReusedPart, u64::from(is_part));
        if options.backoff > 0 {
            let all = Options { backoff: 0, ..options.clone() };
            if self.cache.state().probe(prompt, all.start_options()) > reused {
                self.coverage.add(Behaviour::BackedOff);
                let has_window = self.spec.groups().iter().any(|group| group.window().is_some());
                self.coverage.add_many(Behaviour::BackedOffWindow, u64::from(has_window));
            }
        }
    }

    /// Checks that the blocks which the last sequence reuses have the priorities of its retention.
    pub(super) fn check_retention(&self) -> Result<(), CaseError> {
        let Some(last) = self.sequences.last() else {
            return Ok(());
        };
        let Some(retention) = &last.options.retention else {
            return Ok(());
        };
        let prompt_len = (last.hashes.len() + last.prompt.len()) as u32;
        let groups = self.spec.groups().iter().zip(&self.observed).zip(0..);
        for ((group, observed), id) in groups {
            let (map, id) = (group.slot_map(), kv_core::GroupId(id));
            let table = self.cache.state().block_table(last.id, id).unwrap_or_default();
            let vacant = self.cache.state().vacant_entries(last.id, id).unwrap_or_default();
            let taken = map.blocks(last.hashes.len() as u32);
            for (at, block) in (0..taken).zip(table).filter(|(at, _)| !vacant.contains(at)) {
                let expected = retention.priority_at(map.tokens(at), prompt_len);
                let known = lock(observed).of(*block).map(|(priority, _)| priority);
                same(format!("priority of entry {at}"), known, Some(expected))?;
            }
        }
        Ok(())
    }
}
