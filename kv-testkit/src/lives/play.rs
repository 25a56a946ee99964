//! Operations outside a step.
use std::io::Write;
use std::time::Duration;

use kv_core::{CacheError, PlanError, PrefixReuse, SequenceId};

use super::choose::{Bytes, Options};
use super::{Happened, Life, Sequence};
use crate::case::{CaseError, ensure, same};
use crate::device::Device;
use crate::erratic::Failing;
use crate::named;

/// Prompts that are remembered.
const PROMPTS: usize = 6;

impl<B: Device> Life<B> {
    /// Runs the next operation.
    pub(super) fn operate(&mut self, bytes: &mut Bytes<'_>) -> Result<(), CaseError> {
        let kind = bytes.below(27);
        if self.sequences.is_empty() && ((5..16).contains(&kind) || kind > 22) {
            return self.start(bytes);
        }
        match kind {
            0..=4 => self.start(bytes),
            5..=10 => self.step(bytes),
            11 => self.fork(bytes),
            12 | 13 => self.truncate(bytes),
            14 | 15 => self.leave(bytes),
            16 => self.pin(bytes),
            17 => self.unpin(bytes),
            18 => self.forget(bytes),
            19 | 20 => {
                self.pass_time(bytes);
                Ok(())
            }
            21 => self.reset(bytes),
            22 => self.exchange(bytes),
            23 => self.query(bytes),
            24 => self.leak(bytes),
            25 => self.add_layer(bytes),
            _ => self.wander(bytes),
        }
    }

    /// Levels that were given for a while run out, some of them.
    fn pass_time(&mut self, bytes: &mut Bytes<'_>) {
        let seconds = u64::from(bytes.below(40));
        self.tell(|| format!("{seconds} s pass"));
        self.clock.advance(Duration::from_secs(seconds));
        self.lived.add(Happened::ClockStep);
    }

    /// Lets the device fail at one of its next operations, once in a while.
    pub(super) fn threaten(&mut self, bytes: &mut Bytes<'_>) {
        let kind = bytes.next();
        // With no bytes left, nothing fails.
        if kind.is_multiple_of(6) && kind > 0 {
            let (more, is_late) = (u64::from(bytes.below(7)), kind > 127);
            self.tell(|| format!("the device fails after {more} operations, late: {is_late}"));
            let failing = if is_late { Failing::Late } else { Failing::Early };
            self.backend.fail(more, failing);
        }
    }

    /// What a call answered that stands though the device failed: `None` where it did.
    fn stands<T>(&mut self, answer: Result<T, CacheError>) -> Result<Option<T>, CaseError> {
        let has_failed = self.backend.calm();
        match answer {
            Err(CacheError::Device(_)) if has_failed => {
                self.lived.add(Happened::FailedWipe);
                Ok(None)
            }
            Ok(_) if has_failed => Err("a failure of the device was kept quiet".into()),
            Ok(done) => Ok(Some(done)),
            Err(other) => Err(other.into()),
        }
    }

    /// Notes what is about to happen.
    pub(super) fn tell(&mut self, what: impl FnOnce() -> String) {
        let number = self.operations();
        if let Some(trace) = &mut self.trace {
            let line = format!("{number}: {}", what());
            if std::env::var_os(super::TRACE).is_some() {
                let _ = writeln!(std::io::stderr(), "{line}");
            }
            trace.push(line);
        }
    }

    /// A prompt: a new one, one from before, or what a sequence has, and a token more.
    pub(super) fn prompt(&mut self, bytes: &mut Bytes<'_>) -> (Vec<u32>, Options) {
        let kind = bytes.below(5);
        if kind == 3 && !self.prompts.is_empty() {
            return self.prompts[bytes.index(self.prompts.len())].clone();
        }
        if kind == 4 && !self.sequences.is_empty() {
            let sequence = &self.sequences[bytes.index(self.sequences.len())];
            let mut prompt: Vec<_> = sequence.tokens.iter().map_while(|token| *token).collect();
            prompt.push(bytes.token());
            return (prompt, Options { reserve: 0, retention: None, ..sequence.options.clone() });
        }
        (bytes.prompt(), bytes.options())
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

    /// The model of a sequence that began and took `reused` tokens over.
    pub(super) fn begun(
        &self,
        id: SequenceId,
        (prompt, options): (Vec<u32>, Options),
        reused: u32,
    ) -> Sequence {
        let reused = reused as usize;
        let names = named::names(&prompt[..reused], &options.naming());
        let offers = !options.no_reuse && self.spec.prefix_reuse() != PrefixReuse::Off;
        Sequence {
            id,
            tokens: prompt[..reused].iter().copied().map(Some).collect(),
            prompt: prompt[reused..].to_vec(),
            names,
            // What was taken over can be found, but for a part of a block.
            offered: 0,
            offers,
            options,
            cut: u32::MAX,
            // It took over no more than the windows of its last token.
            floor: reused,
            lacks: Vec::new(),
        }
    }

    fn fork(&mut self, bytes: &mut Bytes<'_>) -> Result<(), CaseError> {
        let parent = self.sequences[bytes.index(self.sequences.len())].clone();
        let (id, before) = (self.new_id(), self.see());
        self.tell(|| format!("fork {} to {id}", parent.id));
        match self.cache.fork(parent.id, id) {
            Ok(()) => {
                self.lived.add(Happened::Forked);
                let prompt = Vec::new();
                self.sequences.push(Sequence { id, prompt, ..parent });
                Ok(())
            }
            Err(CacheError::Plan(PlanError::TooMany { .. })) => {
                same("sequences when a fork is one too many", self.sequences.len(), 6)?;
                self.lived.add(Happened::RefusedSequence);
                self.unchanged(&before)
            }
            Err(other) => Err(other.into()),
        }
    }

    fn truncate(&mut self, bytes: &mut Bytes<'_>) -> Result<(), CaseError> {
        let at = bytes.index(self.sequences.len());
        let before = self.see();
        let has_window = self.spec.groups().iter().any(|group| group.window().is_some());
        let (id, len) = (self.sequences[at].id, bytes.index(self.sequences[at].names.len() + 1));
        self.tell(|| format!("truncate {id} to {len}"));
        self.threaten(bytes);
        match self.cache.truncate(id, len as u32) {
            Err(CacheError::Plan(PlanError::OutOfWindow { .. })) if has_window => {
                self.backend.calm();
                self.lived.add(Happened::RefusedWindow);
                let floor = self.sequences[at].floor;
                ensure(len < floor, || format!("cut to {len} refused, {floor} was kept"))?;
                return self.unchanged(&before);
            }
            answer => self.stands(answer)?,
        };
        self.lived.add(Happened::Truncated);
        let is_slack = self.slack() > 0 && len + 1 < self.sequences[at].names.len();
        self.lived.add_many(Happened::CutIntoSlack, u64::from(is_slack));
        self.sequences[at].prompt.clear();
        self.cut(at, len);
        Ok(())
    }

    /// Notes that a sequence has fewer tokens now.
    pub(super) fn cut(&mut self, at: usize, len: usize) {
        let sequence = &mut self.sequences[at];
        if len == sequence.names.len() {
            return;
        }
        sequence.tokens.truncate(len);
        sequence.names.truncate(len);
        sequence.offered = sequence.offered.min(len as u32);
        sequence.floor = sequence.floor.min(len);
        sequence.lacks.iter_mut().for_each(|(_, lacks)| *lacks = len.min(*lacks));
        // A block of a tail that was codes is filled with what may be other codes, and not offered.
        let maps = self.spec.groups().iter().map(kv_core::GroupSpec::slot_map);
        let begin = |map: &kv_core::SlotMap| map.tokens(map.full_blocks(len as u32));
        let cut = maps.filter(|map| map.has_tail()).map(begin).min().unwrap_or(u32::MAX);
        sequence.cut = sequence.cut.min(cut);
    }

    /// Releases a sequence or preempts it; what it offered stays to be found.
    fn leave(&mut self, bytes: &mut Bytes<'_>) -> Result<(), CaseError> {
        let sequence = self.sequences.remove(bytes.index(self.sequences.len()));
        self.tell(|| format!("end {}", sequence.id));
        let is_preempted = bytes.one_in(3);
        self.threaten(bytes);
        let answer = if is_preempted {
            self.lived.add(Happened::Preempted);
            self.cache.preempt(sequence.id)
        } else {
            self.cache.release(sequence.id)
        };
        self.stands(answer)?;
        if bytes.one_in(3) { self.repeat(bytes) } else { Ok(()) }
    }

    fn pin(&mut self, bytes: &mut Bytes<'_>) -> Result<(), CaseError> {
        let (prompt, options) = self.prompt(bytes);
        if self.pins.len() < 3 {
            self.tell(|| format!("pin {prompt:?}, {options:?}"));
            let pin = self.cache.pin_prefix(&prompt, options.naming());
            ensure(pin.tokens as usize <= prompt.len(), || format!("{pin:?}"))?;
            self.lived.add_many(Happened::Pinned, u64::from(pin.tokens > 0));
            self.pins.push(pin);
            self.remember(&prompt, &options);
        }
        Ok(())
    }

    fn unpin(&mut self, bytes: &mut Bytes<'_>) -> Result<(), CaseError> {
        if self.pins.is_empty() {
            return Ok(());
        }
        let pin = self.pins.remove(bytes.index(self.pins.len()));
        self.tell(|| format!("unpin {pin:?}"));
        self.threaten(bytes);
        let answer = self.cache.unpin(pin.id);
        let was_there = self.stands(answer)?.unwrap_or(true);
        ensure(was_there, || format!("{pin:?} was not pinned"))?;
        ensure(!self.cache.unpin(pin.id)?, || format!("{pin:?} was pinned twice"))
    }

    fn forget(&mut self, bytes: &mut Bytes<'_>) -> Result<(), CaseError> {
        let kind = bytes.below(3);
        self.tell(|| format!("forget in way {kind}"));
        if kind == 0 && !self.sequences.is_empty() {
            let at = bytes.index(self.sequences.len());
            let sequence = &mut self.sequences[at];
            sequence.offers = false;
            let forgotten = self.cache.forget_sequence(sequence.id)?;
            self.lived.add_many(Happened::Forgotten, u64::from(forgotten));
            return Ok(());
        }
        let (prompt, options) = self.prompt(bytes);
        if kind == 1 {
            let priority = bytes.priority();
            self.cache.prioritise_prefix(&prompt, options.naming(), priority);
        } else {
            let keep = bytes.below(9);
            self.threaten(bytes);
            let answer = self.cache.forget_prefix(&prompt, options.naming(), keep);
            let forgotten = self.stands(answer)?.unwrap_or(0);
            self.lived.add_many(Happened::Forgotten, u64::from(forgotten));
        }
        Ok(())
    }

    /// Gives up what is cached, which nobody may hold.
    fn reset(&mut self, bytes: &mut Bytes<'_>) -> Result<(), CaseError> {
        self.tell(|| "reset".to_owned());
        if bytes.one_in(4) {
            for sequence in std::mem::take(&mut self.sequences) {
                self.cache.release(sequence.id)?;
            }
        }
        let is_held = self.groups().any(|(_, pool)| pool.num_used() > 0);
        self.threaten(bytes);
        let answer = self.cache.reset_prefixes();
        let is_done = self.stands(answer)?.unwrap_or(true);
        self.lived.add_many(Happened::Reset, u64::from(is_done));
        same("a reset is done", is_done, !is_held)
    }
}
