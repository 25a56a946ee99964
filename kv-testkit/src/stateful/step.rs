//! Steps: planned, grown one by one, committed whole or in part, or dropped.
use kv_core::backend::AnyBackend;
use kv_core::spec::PublishAt;
use kv_core::{CacheError, GroupId, KvCache, SequenceId, Step, StepInput};

use super::choices::Choices;
use super::join::{Join, StartedSequence, join};
use super::{Behaviour, Sequence, StatefulTest};
use crate::case::{At, CaseError, ensure};
use crate::fault::{FaultInjector, FaultKind};
use crate::provenance::{self, PrefixHash};

/// One sequence of a step.
#[derive(Debug, Clone)]
pub(super) struct Entry {
    /// Index among the sequences; those that start in the step come after the others.
    pub(super) at: usize,
    pub(super) tokens: Vec<u32>,
    /// Whether only the number of tokens is passed to the cache, not their ids.
    pub(super) is_unknown: bool,
    pub(super) drafts: u32,
    pub(super) lookahead: u32,
    pub(super) hashes: Vec<PrefixHash>,
}

impl Entry {
    pub(super) fn input(&self, id: SequenceId) -> StepInput<'_> {
        let input = if self.is_unknown {
            StepInput::count(id, self.tokens.len() as u32)
        } else {
            StepInput::tokens(id, &self.tokens)
        };
        input.with_drafts(self.drafts).with_lookahead(self.lookahead)
    }
}

/// The end of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Finish {
    Commit,
    Accept,
    Drop,
}

/// The sequences that started in a step and the number of accepted tokens of each entry; or why the
/// step was undone.
type StepResult = Result<(Vec<StartedSequence>, Vec<u32>), Behaviour>;

/// The outcome of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum StepOutcome {
    Committed,
    /// There are not enough blocks.
    Refused,
    /// The step was undone: dropped, or the device failed.
    Undone,
}

impl StatefulTest {
    /// Computes the next `chunk` tokens of the last sequence's prompt, without faults.
    pub(super) fn next_chunk(
        &mut self,
        chunk: usize,
        ahead: u32,
    ) -> Result<StepOutcome, CaseError> {
        let at = self.sequences.len() - 1;
        let tokens = self.sequences[at].prompt[..chunk].to_vec();
        let hashes = self.hash_tokens(&self.sequences[at], &tokens, false);
        let entry = Entry { at, tokens, is_unknown: false, drafts: 0, lookahead: ahead, hashes };
        self.run_alone(entry)
    }

    /// Runs a step of one entry, without faults.
    pub(super) fn run_alone(&mut self, entry: Entry) -> Result<StepOutcome, CaseError> {
        self.run_step(vec![entry], &mut Choices::new(&[]), Finish::Commit)
    }

    pub(super) fn step(&mut self, choices: &mut Choices<'_>) -> Result<(), CaseError> {
        let mut entries: Vec<Entry> = Vec::new();
        for _ in 0..=choices.below(3) {
            let at = choices.index(self.sequences.len());
            if entries.iter().all(|entry| entry.at != at) {
                entries.extend(self.entry(at, choices));
            }
        }
        if entries.is_empty() {
            return Ok(());
        }
        let finish = choices.pick(&[Finish::Commit, Finish::Commit, Finish::Accept, Finish::Drop]);
        self.run_step(entries, choices, finish).map(drop)
    }

    /// Chooses the next tokens of a sequence, if there is room for any.
    pub(super) fn entry(&self, at: usize, choices: &mut Choices<'_>) -> Option<Entry> {
        let sequence = &self.sequences[at];
        let room = (self.spec.max_seq_len() as usize).saturating_sub(sequence.hashes.len());
        let wanted = 1 + choices.index(5);
        let kind = choices.next();
        let mut tokens: Vec<_> = sequence.prompt.iter().copied().take(wanted).collect();
        while tokens.len() < wanted {
            tokens.push(choices.token());
        }
        tokens.truncate(room);
        let is_unknown = kind >= 250;
        let drafts = if kind.is_multiple_of(4) { u32::from((kind >> 2) & 3) } else { 0 };
        let drafts = drafts.min(tokens.len() as u32);
        let lookahead = if kind >> 4 == 7 { 3 } else { 0 };
        let hashes = self.hash_tokens(sequence, &tokens, is_unknown);
        let entry = Entry { at, tokens, is_unknown, drafts, lookahead, hashes };
        (!entry.tokens.is_empty()).then_some(entry)
    }

    /// Returns the prefix hashes of new tokens of a sequence.
    pub(super) fn hash_tokens(
        &self,
        sequence: &Sequence,
        tokens: &[u32],
        is_unknown: bool,
    ) -> Vec<PrefixHash> {
        let (options, len) = (&sequence.options, sequence.hashes.len() as u32);
        let last = sequence.hashes.last().copied();
        let mut hash = last.unwrap_or_else(|| provenance::root(&options.key_options()));
        let unknown = (u128::from(self.operations()) << 32) | (1 << 31);
        let next = |(token, at): (&u32, u32)| {
            let content_id = if is_unknown { Some(unknown) } else { options.content_id(at) };
            hash = provenance::extend(hash, *token, content_id);
            hash
        };
        tokens.iter().zip(len..).map(next).collect()
    }

    /// Returns whether every group has enough blocks, and how many would be left in each.
    pub(super) fn demand(&self, inputs: &[StepInput<'_>]) -> Result<(bool, Vec<u32>), CaseError> {
        let (mut fits, mut left) = (true, Vec::new());
        for id in 0..self.spec.groups().len() as u8 {
            let demand = self.cache.state().blocks_for_step(GroupId(id), inputs)?;
            fits &= demand.fits();
            left.push(demand.free.saturating_sub(demand.needed));
        }
        Ok((fits, left))
    }

    /// Runs a step.
    fn run_step(
        &mut self,
        mut entries: Vec<Entry>,
        choices: &mut Choices<'_>,
        finish: Finish,
    ) -> Result<StepOutcome, CaseError> {
        let inputs: Vec<_> = entries.iter().map(|e| e.input(self.sequences[e.at].id)).collect();
        let (fits, left) = self.demand(&inputs)?;
        let before = self.visible_state();
        let joins = self.joins(choices, &entries);
        if self.trace.is_some() {
            let what = format!("step {inputs:?}, then {joins:?}, {finish:?}, fits: {fits}");
            self.record(|| what);
        }
        if !fits {
            let refused = self.cache.begin_step(&inputs).map(drop);
            let is_full = matches!(refused, Err(CacheError::Exhausted(_)));
            ensure(is_full, || format!("it does not fit, but begin_step returned {refused:?}"))?;
            self.coverage.add(Behaviour::RefusedStep);
            self.unchanged(&before).at("begin_step")?;
            return Ok(StepOutcome::Refused);
        }
        self.update_floors(&entries, &joins);
        let is_alone = joins.is_empty();
        let duplicates = before.duplicates();
        self.arm_fault(choices);
        let (started, accepted) = match self.run_open(&mut entries, joins, choices, finish)? {
            Ok(ran) => ran,
            Err(why) => {
                self.coverage.add(why);
                return self.visible_state().check_undone(&before).map(|()| StepOutcome::Undone);
            }
        };
        for StartedSequence { id, prompt, options, reused } in started {
            self.count_reuse(&prompt, &options, reused, true);
            self.remember(&prompt, &options);
            let sequence = self.started(id, (prompt, options), reused);
            self.sequences.push(sequence);
        }
        for (entry, accepted) in entries.iter().zip(accepted) {
            self.apply_commit(entry, accepted, finish);
        }
        if is_alone {
            let shared = self.cache.state().stats().duplicate_blocks - duplicates;
            self.check_left(&left, entries.len() as u32 + shared as u32)?;
        }
        Ok(StepOutcome::Committed)
    }

    /// Begins a step that fits, lets other sequences join, writes and ends it.
    fn run_open(
        &mut self,
        entries: &mut Vec<Entry>,
        joins: Vec<Join>,
        choices: &mut Choices<'_>,
        finish: Finish,
    ) -> Result<StepResult, CaseError> {
        let ids = self.sequences.iter().map(|sequence| sequence.id).collect::<Vec<_>>();
        let faults = self.faults.clone();
        let inputs: Vec<_> = entries.iter().map(|entry| entry.input(ids[entry.at])).collect();
        let is_held = self.operations().is_multiple_of(3);
        let mut step = match begin(&mut self.cache, &inputs, is_held) {
            Ok(step) => step,
            Err(CacheError::Device(_)) if faults.clear() => return Ok(Err(Behaviour::FailedBegin)),
            Err(other) => return Err(CaseError::from(other).at("a step predicted to fit")),
        };
        // Hardly anything but this makes a join fail.
        if !joins.is_empty() && choices.one_in(4) {
            faults.fail(0, FaultKind::Early);
        }
        let joined = join((&mut step, &faults), joins, &ids, entries)?;
        self.coverage = self.coverage.and(joined.coverage);
        let provenance: Vec<_> = entries.iter().flat_map(|entry| entry.hashes.clone()).collect();
        if write((&mut step, &faults), (&self.spec, &self.layers), &provenance)? {
            self.coverage.add(Behaviour::FailedWrite);
        }
        let mut accepted: Vec<_> = entries.iter().map(|e| e.tokens.len() as u32).collect();
        let done = match finish {
            Finish::Commit => step.commit(),
            Finish::Accept => {
                for n in &mut accepted {
                    *n -= choices.below(*n + 1).min(choices.below(4));
                }
                step.commit_accepted(&accepted)
            }
            Finish::Drop => {
                if is_held {
                    step.roll_back();
                } else {
                    drop(step);
                }
                faults.clear();
                return Ok(Err(Behaviour::Dropped));
            }
        };
        let has_failed = faults.clear();
        match done {
            Ok(()) if has_failed => Err("a device failure was not reported".into()),
            Ok(()) => Ok(Ok((joined.started, accepted))),
            Err(CacheError::Device(_)) if has_failed => Ok(Err(Behaviour::FailedCommit)),
            Err(other) => Err(other.into()),
        }
    }

    /// Updates the lengths that sequences can be truncated to: all but the slack may leave the
    /// windows.
    pub(super) fn update_floors(&mut self, entries: &[Entry], joins: &[Join]) {
        let slack = self.slack();
        let added = joins.iter().filter_map(|joins| match joins {
            Join::Add(entry) => Some(entry.at),
            Join::Start(..) => None,
        });
        for at in entries.iter().map(|entry| entry.at).chain(added) {
            let sequence = &mut self.sequences[at];
            sequence.floor = sequence.floor.max(sequence.hashes.len().saturating_sub(slack));
        }
    }

    /// Returns the smallest slack of all windows.
    pub(super) fn slack(&self) -> usize {
        let windows = self.spec.groups().iter().filter_map(kv_core::spec::GroupSpec::window);
        windows.map(|window| window.slack as usize).min().unwrap_or(0)
    }

    /// Checks that a step took the predicted number of blocks.
    fn check_left(&self, left: &[u32], entries: u32) -> Result<(), CaseError> {
        let has_tail = self.spec.groups().iter().any(|group| group.slot_map().has_tail());
        for (id, left) in (0..).zip(left) {
            // Blocks may be free again after the step: a block that its last holder copied for a
            // rollback, a block that was replaced by one with the same content, and, with a tail,
            // blocks that became codes or held drafts.
            let given_back = if has_tail { self.spec.max_seq_len() } else { entries - 1 };
            let free = self.cache.state().free_blocks(GroupId(id));
            let is_right = (*left..=left + given_back).contains(&free);
            ensure(is_right, || format!("{free} free blocks after the step, not {left}"))?;
        }
        Ok(())
    }

    /// Updates the model after a committed step.
    fn apply_commit(&mut self, entry: &Entry, accepted: u32, finish: Finish) {
        let at_commit = self.spec.publish_at() == PublishAt::Commit;
        let sequence = &mut self.sequences[entry.at];
        let brought = entry.tokens.len();
        let stays = accepted as usize;
        let tokens = entry.tokens.iter().map(|token| (!entry.is_unknown).then_some(*token));
        sequence.tokens.extend(tokens);
        sequence.hashes.extend(&entry.hashes);
        let used = brought.min(sequence.prompt.len());
        let follows = sequence.prompt[..used] == entry.tokens[..used] && stays == brought;
        sequence.prompt.drain(..used);
        if !follows {
            sequence.prompt.clear();
        }
        let len = (sequence.hashes.len() - brought + stays) as u32;
        let before = (len + (brought - stays) as u32 - entry.drafts).min(len);
        sequence.certain = if finish == Finish::Accept { len } else { before };
        let published = if at_commit { sequence.certain } else { before };
        sequence.published = sequence.published.max(published);
        if stays < brought {
            self.coverage.add(Behaviour::AcceptedPart);
            self.cut(entry.at, len as usize);
        }
    }
}

/// Begins a step, borrowed or held.
fn begin<'c>(
    cache: &'c mut KvCache,
    inputs: &[StepInput<'_>],
    is_held: bool,
) -> Result<Step<'c>, CacheError> {
    if !is_held {
        return cache.begin_step(inputs);
    }
    cache.begin_step(inputs)?.hold();
    let step = cache.held();
    Ok(step.unwrap_or_else(|| unreachable!("the step was held")))
}

/// Writes every layer and repeats a write as long as the device fails; returns whether it failed.
fn write(
    (step, faults): (&mut Step<'_>, &FaultInjector<AnyBackend>),
    (spec, layers): (&kv_core::CacheSpec, &[u16]),
    hashes: &[PrefixHash],
) -> Result<bool, CaseError> {
    let mut has_failed = false;
    loop {
        let mut layers = layers.iter();
        match layers.try_for_each(|layer| provenance::write_layer(step, spec, *layer, hashes)) {
            Err(CaseError::Cache(CacheError::Device(_))) if faults.clear() => has_failed = true,
            other => return other.map(|()| has_failed),
        }
    }
}
