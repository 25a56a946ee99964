//! How sequences begin: looked up, admitted, started, and their prompts computed.
use kv_core::{Admission, CacheError, PlanError};

use super::choose::{Bytes, Options};
use super::step::Taken;
use super::{Happened, Life, lock};
use crate::case::{At, CaseError, ensure, same};
use crate::device::Device;

/// How a prompt is to be computed.
#[derive(Debug, Clone, Copy)]
struct Terms {
    chunk: u32,
    lookahead: u32,
    /// To its end, by an admission that said it fits.
    whole: bool,
}

impl<B: Device> Life<B> {
    /// Starts a sequence, or finds that it cannot start; computes its prompt, some or all of it.
    pub(super) fn start(&mut self, bytes: &mut Bytes<'_>) -> Result<(), CaseError> {
        let (prompt, options) = self.prompt(bytes);
        let (id, before) = (self.new_id(), self.see());
        self.tell(|| format!("start {id}, {prompt:?}, {options:?}"));
        let probed = self.cache.probe(&prompt, options.all());
        let len = prompt.len() as u32;
        // The last token is computed, and a pool of that many blocks can hold no more.
        ensure(probed <= len.saturating_sub(1), || format!("{probed} tokens found"))?;
        let (chunk, lookahead) = (1 + bytes.below(9), bytes.pick(&[0, 0, 0, 3]));
        let rest = len - probed.min(len);
        let terms = Terms { chunk: chunk.min(rest), lookahead, whole: bytes.one_in(4) };
        let admitted = self.admit(&prompt, &options, terms);
        self.unchanged(&before).at("check_admission")?;
        self.threaten(bytes);
        let started = self.cache.start(id, &prompt, options.all());
        let has_failed = self.backend.calm();
        let reused = match started {
            Ok(_) if has_failed => return Err("a failure was kept quiet".into()),
            Ok(reused) => reused,
            Err(CacheError::Device(_)) if has_failed => {
                self.lived.add(Happened::FailedStart);
                return self.unchanged(&before).at("start");
            }
            Err(CacheError::Exhausted(_)) => {
                ensure(admitted.is_err(), || "admitted, and refused by start".to_owned())?;
                self.lived.add(Happened::RefusedStart);
                return self.unchanged(&before).at("start");
            }
            Err(CacheError::Plan(error)) => {
                self.refused_by_plan(&error, prompt.len().max(options.reserve as usize))?;
                return self.unchanged(&before).at("start");
            }
            Err(other) => return Err(other.into()),
        };
        same("start and probe", reused, probed)?;
        self.note_reuse(&prompt, &options, reused, false);
        self.remember(&prompt, &options);
        let sequence = self.begun(id, (prompt, options), reused);
        self.sequences.push(sequence);
        self.check_retention()?;
        if terms.chunk == 0 || (!terms.whole && bytes.one_in(6)) {
            return Ok(());
        }
        self.check().at("started")?;
        let fits = self.compute(terms).at(format!("{terms:?}, behind {reused}"))?;
        // What others have cached with the same content is shared when it is computed, and
        // nobody counts on the blocks that this gives back.
        let is_shared = self.cache.stats().duplicate_blocks > before.duplicates();
        ensure(fits == admitted.is_ok() || (fits && is_shared), || {
            format!("{terms:?} behind {reused}: fits: {fits}, but {admitted:?}")
        })?;
        if let Ok(tokens) = admitted {
            same("check_admission and start", tokens, reused)?;
        }
        Ok(())
    }

    fn admit(&self, prompt: &[u32], options: &Options, terms: Terms) -> Result<u32, CacheError> {
        let admission =
            Admission::default().with_chunk(terms.chunk).with_lookahead(terms.lookahead);
        let admission = admission.with_must_fit(terms.whole);
        self.cache.check_admission(prompt, options.all(), &admission)
    }

    fn refused_by_plan(&mut self, error: &PlanError, asked: usize) -> Result<(), CaseError> {
        let is_long = asked > self.spec.max_seq_len() as usize;
        let (is_right, what) = match error {
            PlanError::TooMany { .. } => (self.sequences.len() == 6, Happened::RefusedSequence),
            PlanError::SequenceTooLong { .. } => (is_long, Happened::RefusedLength),
            _ => (false, Happened::RefusedLength),
        };
        self.lived.add(what);
        ensure(is_right, || format!("refused without need: {error}"))
    }

    /// Computes the first chunk of the last sequence's prompt, or all of it; whether it fits.
    fn compute(&mut self, terms: Terms) -> Result<bool, CaseError> {
        let mut lookahead = terms.lookahead;
        let mut chunks = 0;
        while let Some(last) = self.sequences.last().filter(|last| !last.prompt.is_empty()) {
            let chunk = (terms.chunk as usize).min(last.prompt.len());
            if self.next_chunk(chunk, lookahead)? == Taken::Refused {
                self.lived.add_many(Happened::UnfitWhole, u64::from(chunks > 0));
                return Ok(false);
            }
            if !terms.whole {
                return Ok(true);
            }
            // What is reserved ahead is asked for once.
            lookahead = 0;
            chunks += 1;
            self.check().at(format!("chunk {chunks}"))?;
        }
        self.lived.add_many(Happened::FitWhole, u64::from(chunks > 1));
        Ok(true)
    }

    /// Counts what a sequence took over.
    pub(super) fn note_reuse(
        &mut self,
        prompt: &[u32],
        options: &Options,
        reused: u32,
        in_step: bool,
    ) {
        self.lived.add_many(Happened::Reused, reused.into());
        self.lived.add_many(Happened::Retained, u64::from(options.retention.is_some()));
        if in_step {
            self.lived.add_many(Happened::ReusedInStep, reused.into());
        }
        let ends = |group: &kv_core::GroupSpec| {
            let map = group.slot_map();
            map.tokens(map.full_blocks(reused)) == reused
        };
        let is_part = !self.spec.groups().iter().all(ends);
        self.lived.add_many(Happened::ReusedPart, u64::from(is_part));
        if options.backoff > 0 {
            let all = Options { backoff: 0, ..options.clone() };
            if self.cache.probe(prompt, all.all()) > reused {
                self.lived.add(Happened::BackedOff);
                let has_window = self.spec.groups().iter().any(|group| group.window().is_some());
                self.lived.add_many(Happened::BackedOffWindow, u64::from(has_window));
            }
        }
    }

    /// Blocks that the last sequence took over have the priorities that it asks for.
    fn check_retention(&self) -> Result<(), CaseError> {
        let Some(last) = self.sequences.last() else {
            return Ok(());
        };
        let Some(retention) = &last.options.retention else {
            return Ok(());
        };
        let prompt_len = (last.names.len() + last.prompt.len()) as u32;
        let groups = self.spec.groups().iter().zip(&self.watched).zip(0..);
        for ((group, watched), id) in groups {
            let (map, id) = (group.slot_map(), kv_core::GroupId(id));
            let table = self.cache.block_table(last.id, id).unwrap_or_default();
            let vacant = self.cache.vacant_entries(last.id, id).unwrap_or_default();
            let taken = map.blocks(last.names.len() as u32);
            for (at, block) in (0..taken).zip(table).filter(|(at, _)| !vacant.contains(at)) {
                let expected = retention.priority_at(map.tokens(at), prompt_len);
                let known = lock(watched).of(*block).map(|(priority, _)| priority);
                same(format!("priority of entry {at}"), known, Some(expected))?;
            }
        }
        Ok(())
    }
}
