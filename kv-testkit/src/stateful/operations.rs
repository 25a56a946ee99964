//! Operations outside a step.
use std::io::Write;
use std::time::Duration;

use kv_core::error::PlanError;
use kv_core::spec::PrefixReuse;
use kv_core::{CacheError, SequenceId};

use super::choices::{Choices, Options, hint};
use super::{Behaviour, Sequence, StatefulTest};
use crate::case::{CaseError, ensure, same};
use crate::fault::FaultKind;
use crate::provenance;

/// Number of prompts that are remembered.
const PROMPTS: usize = 6;

impl StatefulTest {
    /// Runs the next operation.
    pub(super) fn operate(&mut self, choices: &mut Choices<'_>) -> Result<(), CaseError> {
        let kind = choices.below(31);
        if self.sequences.is_empty() && ((5..16).contains(&kind) || (23..27).contains(&kind)) {
            return self.start(choices);
        }
        match kind {
            0..=4 => self.start(choices),
            5..=10 => self.step(choices),
            11 => self.fork(choices),
            12 | 13 => self.truncate(choices),
            14 | 15 => self.end_sequence(choices),
            16 => self.pin(choices),
            17 => self.unpin(choices),
            18 => self.forget(choices),
            19 | 20 => {
                self.pass_time(choices);
                Ok(())
            }
            21 => self.reset(choices),
            22 => self.recalibrate(choices),
            23 => self.query(choices),
            24 => self.leak(choices),
            25 => self.add_layer(choices),
            26 => self.grow_long(choices),
            27 | 28 => self.export(choices),
            _ => self.import(choices),
        }
    }

    /// Advances the clock, so that some priorities expire.
    fn pass_time(&mut self, choices: &mut Choices<'_>) {
        let seconds = u64::from(choices.below(40));
        self.record(|| format!("{seconds} s pass"));
        self.clock.advance(Duration::from_secs(seconds));
        self.coverage.add(Behaviour::ClockStep);
    }

    /// Arms a fault in one of the device's next operations, once in a while.
    pub(super) fn arm_fault(&mut self, choices: &mut Choices<'_>) {
        let kind = choices.next();
        // Without bytes, nothing fails.
        if kind.is_multiple_of(6) && kind > 0 {
            let (more, is_late) = (u64::from(choices.below(7)), kind > 127);
            self.record(|| format!("the device fails after {more} operations, late: {is_late}"));
            let fault = if is_late { FaultKind::Late } else { FaultKind::Early };
            self.faults.fail(more, fault);
        }
    }

    /// Zeroes released blocks, or leaves them to the next call that hands out blocks.
    pub(super) fn wipe(&mut self, choices: &mut Choices<'_>) -> Result<(), CaseError> {
        if choices.one_in(2) {
            return Ok(());
        }
        self.arm_fault(choices);
        let wiped = self.cache.wipe();
        let has_failed = self.faults.clear();
        same("a device failure was reported", wiped.is_err(), has_failed)?;
        self.coverage.add_many(Behaviour::FailedWipe, u64::from(has_failed));
        Ok(())
    }

    /// Records the operation that comes next.
    pub(super) fn record(&mut self, what: impl FnOnce() -> String) {
        let number = self.operations();
        if let Some(trace) = &mut self.trace {
            let line = format!("{number}: {}", what());
            if std::env::var_os(super::TRACE).is_some() {
                let _ = writeln!(std::io::stderr(), "{line}");
            }
            trace.push(line);
        }
    }

    /// Returns a prompt: a new one, an earlier one, or the tokens of a sequence and one more.
    pub(super) fn prompt(&mut self, choices: &mut Choices<'_>) -> (Vec<u32>, Options) {
        let kind = choices.below(5);
        if kind == 3 && !self.prompts.is_empty() {
            return self.prompts[choices.index(self.prompts.len())].clone();
        }
        if kind == 4 && !self.sequences.is_empty() {
            let sequence = &self.sequences[choices.index(self.sequences.len())];
            let mut prompt: Vec<_> = sequence.tokens.iter().map_while(|token| *token).collect();
            prompt.push(choices.token());
            return (
                prompt,
                Options { reserve: 0, retention: None, hint: None, ..sequence.options.clone() },
            );
        }
        (choices.prompt(), choices.options())
    }

    pub(super) fn remember(&mut self, prompt: &[u32], options: &Options) {
        if self.prompts.len() == PROMPTS {
            self.prompts.remove(0);
        }
        self.prompts.push((prompt.to_vec(), options.clone()));
    }

    pub(super) fn new_id(&mut self) -> SequenceId {
        self.next_id += 1;
        SequenceId(self.next_id)
    }

    /// Makes the model of a sequence that started and reuses `reused` tokens.
    pub(super) fn started(
        &self,
        id: SequenceId,
        (prompt, options): (Vec<u32>, Options),
        reused: u32,
    ) -> Sequence {
        let reused = reused as usize;
        let hashes = provenance::prefix_hashes(&prompt[..reused], &options.key_options());
        let publishes = !options.no_reuse && self.spec.prefix_reuse() != PrefixReuse::Off;
        Sequence {
            id,
            tokens: prompt[..reused].iter().copied().map(Some).collect(),
            prompt: prompt[reused..].to_vec(),
            hashes,
            // The reused tokens are published already, except in a partly filled block.
            published: 0,
            certain: reused as u32,
            publishes,
            options,
            cut: u32::MAX,
            // It holds no more than the windows of its last token.
            floor: reused,
            missing_rows: Vec::new(),
        }
    }

    fn fork(&mut self, choices: &mut Choices<'_>) -> Result<(), CaseError> {
        let parent = self.sequences[choices.index(self.sequences.len())].clone();
        let (id, before) = (self.new_id(), self.visible_state());
        self.record(|| format!("fork {} to {id}", parent.id));
        match self.cache.fork(parent.id, id) {
            Ok(()) => {
                self.coverage.add(Behaviour::Forked);
                let prompt = Vec::new();
                self.sequences.push(Sequence { id, prompt, ..parent });
                Ok(())
            }
            Err(CacheError::Plan(PlanError::TooMany { .. })) => {
                same("sequences when a fork is one too many", self.sequences.len(), 6)?;
                self.coverage.add(Behaviour::RefusedSequence);
                self.unchanged(&before)
            }
            Err(other) => Err(other.into()),
        }
    }

    fn truncate(&mut self, choices: &mut Choices<'_>) -> Result<(), CaseError> {
        let at = choices.index(self.sequences.len());
        let before = self.visible_state();
        let has_window = self.spec.groups().iter().any(|group| group.window().is_some());
        let (id, len) = (self.sequences[at].id, choices.index(self.sequences[at].hashes.len() + 1));
        self.record(|| format!("truncate {id} to {len}"));
        match self.cache.truncate(id, len as u32) {
            Err(CacheError::Plan(PlanError::OutOfWindow { .. })) if has_window => {
                self.coverage.add(Behaviour::RefusedWindow);
                let floor = self.sequences[at].floor;
                ensure(len < floor, || {
                    format!("truncation to {len} refused, {floor} is possible")
                })?;
                return self.unchanged(&before);
            }
            answer => answer?,
        }
        self.coverage.add(Behaviour::Truncated);
        let is_slack = self.slack() > 0 && len + 1 < self.sequences[at].hashes.len();
        self.coverage.add_many(Behaviour::CutIntoSlack, u64::from(is_slack));
        self.sequences[at].prompt.clear();
        self.cut(at, len);
        self.wipe(choices)
    }

    /// Truncates a sequence of the model.
    pub(super) fn cut(&mut self, at: usize, len: usize) {
        let sequence = &mut self.sequences[at];
        if len == sequence.hashes.len() {
            return;
        }
        sequence.tokens.truncate(len);
        sequence.hashes.truncate(len);
        sequence.published = sequence.published.min(len as u32);
        sequence.certain = sequence.certain.min(len as u32);
        sequence.floor = sequence.floor.min(len);
        sequence
            .missing_rows
            .iter_mut()
            .for_each(|(_, missing_rows)| *missing_rows = len.min(*missing_rows));
        // A block of a tail that held codes is filled again, perhaps with other codes, and is not
        // published.
        let maps = self.spec.groups().iter().map(kv_core::spec::GroupSpec::slot_map);
        let begin = |map: &kv_core::backend::SlotMap| map.tokens(map.full_blocks(len as u32));
        let cut = maps.filter(|map| map.has_tail()).map(begin).min().unwrap_or(u32::MAX);
        sequence.cut = sequence.cut.min(cut);
    }

    /// Releases or preempts a sequence; its published tokens stay cached.
    fn end_sequence(&mut self, choices: &mut Choices<'_>) -> Result<(), CaseError> {
        let sequence = self.sequences.remove(choices.index(self.sequences.len()));
        let kind = choices.next();
        let hint = hint(kind / 3);
        self.record(|| format!("end {}, {hint:?}", sequence.id));
        if kind > 127 {
            self.cache.hint(sequence.id, hint)?;
        }
        if kind % 3 == 2 {
            self.coverage.add(Behaviour::Preempted);
            self.cache.preempt(sequence.id)?;
        } else {
            self.cache.release(sequence.id)?;
        }
        self.wipe(choices)?;
        if choices.one_in(3) { self.repeat(choices) } else { Ok(()) }
    }

    fn pin(&mut self, choices: &mut Choices<'_>) -> Result<(), CaseError> {
        let (prompt, options) = self.prompt(choices);
        if self.pins.len() < 3 {
            self.record(|| format!("pin {prompt:?}, {options:?}"));
            let pin = self.cache.pin_prefix(&prompt, options.key_options());
            ensure(pin.tokens as usize <= prompt.len(), || format!("{pin:?}"))?;
            self.coverage.add_many(Behaviour::Pinned, u64::from(pin.tokens > 0));
            self.pins.push(pin);
            self.remember(&prompt, &options);
        }
        Ok(())
    }

    fn unpin(&mut self, choices: &mut Choices<'_>) -> Result<(), CaseError> {
        if self.pins.is_empty() {
            return Ok(());
        }
        let pin = self.pins.remove(choices.index(self.pins.len()));
        self.record(|| format!("unpin {pin:?}"));
        ensure(self.cache.unpin(pin.id)?, || format!("{pin:?} was not pinned"))?;
        ensure(!self.cache.unpin(pin.id)?, || format!("{pin:?} was pinned twice"))
    }

    fn forget(&mut self, choices: &mut Choices<'_>) -> Result<(), CaseError> {
        let kind = choices.below(3);
        self.record(|| format!("forget, variant {kind}"));
        if kind == 0 && !self.sequences.is_empty() {
            let at = choices.index(self.sequences.len());
            let sequence = &mut self.sequences[at];
            sequence.publishes = false;
            let forgotten = self.cache.forget_sequence(sequence.id)?;
            self.coverage.add_many(Behaviour::Forgotten, u64::from(forgotten));
            return Ok(());
        }
        let (prompt, options) = self.prompt(choices);
        if kind == 1 {
            let priority = choices.priority();
            self.cache.prioritise_prefix(&prompt, options.key_options(), priority);
        } else {
            let keep = choices.below(9);
            let forgotten = self.cache.forget_prefix(&prompt, options.key_options(), keep)?;
            self.coverage.add_many(Behaviour::Forgotten, u64::from(forgotten));
        }
        self.wipe(choices)
    }

    /// Resets the prefix index, which is refused while blocks are held.
    fn reset(&mut self, choices: &mut Choices<'_>) -> Result<(), CaseError> {
        self.record(|| "reset".to_owned());
        if choices.one_in(4) {
            for sequence in std::mem::take(&mut self.sequences) {
                self.cache.release(sequence.id)?;
            }
        }
        let is_held = self.groups().any(|(_, pool)| pool.num_used() > 0);
        let is_done = self.cache.reset_prefixes()?;
        self.coverage.add_many(Behaviour::Reset, u64::from(is_done));
        same("a reset is done", is_done, !is_held)?;
        self.wipe(choices)
    }
}
