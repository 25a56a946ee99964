//! Operations outside a step.
use std::io::Write;

use kv_core::eviction::Priority;
use kv_core::{CacheError, PlanError, PrefixReuse, SequenceId};

use super::choose::{Bytes, Options};
use super::{Life, Sequence};
use crate::case::{At, CaseError, ensure, same};
use crate::device::Device;
use crate::named;

/// Prompts that are remembered.
const PROMPTS: usize = 6;

impl<B: Device> Life<B> {
    /// Runs the next operation.
    pub(super) fn operate(&mut self, bytes: &mut Bytes<'_>) -> Result<(), CaseError> {
        let kind = bytes.below(20);
        if self.sequences.is_empty() && kind > 4 && kind < 16 {
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
            _ => self.reset(bytes),
        }
    }

    /// Notes what is about to happen.
    pub(super) fn tell(&mut self, what: impl FnOnce() -> String) {
        let number = self.lived.operations;
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
            return (prompt, Options { reserve: 0, ..sequence.options.clone() });
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
        reused: usize,
    ) -> Sequence {
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
        }
    }

    fn start(&mut self, bytes: &mut Bytes<'_>) -> Result<(), CaseError> {
        let (prompt, options) = self.prompt(bytes);
        let (id, before) = (self.new_id(), self.see());
        self.tell(|| format!("start {id}, {prompt:?}, {options:?}"));
        let probed = self.cache.probe(&prompt, options.all());
        // The last token is computed, and a pool of that many blocks can hold no more.
        ensure(probed <= prompt.len().saturating_sub(1), || format!("{probed} tokens found"))?;
        let (chunk, ahead) = (1 + bytes.below(9), bytes.pick(&[0, 0, 0, 3]));
        let admission = kv_core::Admission::default().chunk(chunk).lookahead(ahead);
        let rest = prompt.len() - probed.min(prompt.len());
        let chunk = (chunk as usize).min(rest);
        let admission = admission.chunk(chunk as u32);
        let admitted = self.cache.check_admission(&prompt, options.all(), &admission);
        self.unchanged(&before).at("check_admission")?;
        let started = self.cache.start(id, &prompt, options.all());
        let reused = match started {
            Ok(reused) => reused,
            Err(CacheError::Exhausted(_)) => {
                ensure(admitted.is_err(), || "admitted, and refused by start".to_owned())?;
                self.lived.refused += 1;
                return self.unchanged(&before).at("start");
            }
            Err(CacheError::Plan(
                PlanError::TooMany { .. } | PlanError::SequenceTooLong { .. },
            )) => {
                let max = self.spec.max_seq_len() as usize;
                let fits = prompt.len().max(options.reserve as usize) <= max;
                ensure(!fits || self.sequences.len() == 6, || "refused without need".to_owned())?;
                return self.unchanged(&before).at("start");
            }
            Err(other) => return Err(other.into()),
        };
        same("start and probe", reused, probed)?;
        self.lived.reused += reused as u64;
        self.remember(&prompt, &options);
        let sequence = self.begun(id, (prompt, options), reused);
        self.sequences.push(sequence);
        if chunk == 0 || bytes.one_in(6) {
            return Ok(());
        }
        self.check().at("started")?;
        let fits = self.first_step(chunk, ahead)?;
        ensure(fits == admitted.is_ok(), || {
            format!("a first step of {chunk} fits: {fits}, behind {reused}: {admitted:?}")
        })?;
        if let Ok(tokens) = admitted {
            same("check_admission and start", tokens, reused)?;
        }
        Ok(())
    }

    fn fork(&mut self, bytes: &mut Bytes<'_>) -> Result<(), CaseError> {
        let parent = self.sequences[bytes.index(self.sequences.len())].clone();
        let (id, before) = (self.new_id(), self.see());
        self.tell(|| format!("fork {} to {id}", parent.id));
        match self.cache.fork(parent.id, id) {
            Ok(()) => {
                let prompt = Vec::new();
                self.sequences.push(Sequence { id, prompt, ..parent });
                Ok(())
            }
            Err(CacheError::Plan(PlanError::TooMany { .. })) => {
                same("sequences when a fork is one too many", self.sequences.len(), 6)?;
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
        let sequence = &mut self.sequences[at];
        match self.cache.truncate(sequence.id, len as u32) {
            Ok(()) => {
                sequence.tokens.truncate(len);
                sequence.names.truncate(len);
                sequence.offered = sequence.offered.min(len as u32);
                sequence.prompt.clear();
                Ok(())
            }
            Err(CacheError::Plan(PlanError::OutOfWindow { .. })) if has_window => {
                self.unchanged(&before)
            }
            Err(other) => Err(other.into()),
        }
    }

    /// Releases a sequence or preempts it; what it offered stays to be found.
    fn leave(&mut self, bytes: &mut Bytes<'_>) -> Result<(), CaseError> {
        let sequence = self.sequences.remove(bytes.index(self.sequences.len()));
        self.tell(|| format!("end {}", sequence.id));
        if bytes.one_in(3) {
            Ok(self.cache.preempt(sequence.id)?)
        } else {
            Ok(self.cache.release(sequence.id)?)
        }
    }

    fn pin(&mut self, bytes: &mut Bytes<'_>) -> Result<(), CaseError> {
        let (prompt, options) = self.prompt(bytes);
        if self.pins.len() < 3 {
            self.tell(|| format!("pin {prompt:?}, {options:?}"));
            let pin = self.cache.pin_prefix(&prompt, options.naming());
            ensure(pin.tokens as usize <= prompt.len(), || format!("{pin:?}"))?;
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
        ensure(self.cache.unpin(pin.id)?, || format!("{pin:?} was not pinned"))?;
        ensure(!self.cache.unpin(pin.id)?, || format!("{pin:?} was pinned twice"))
    }

    fn forget(&mut self, bytes: &mut Bytes<'_>) -> Result<(), CaseError> {
        let kind = bytes.below(3);
        self.tell(|| format!("forget in way {kind}"));
        if kind == 0 && !self.sequences.is_empty() {
            let at = bytes.index(self.sequences.len());
            let sequence = &mut self.sequences[at];
            sequence.offers = false;
            self.cache.forget_sequence(sequence.id)?;
            return Ok(());
        }
        let (prompt, options) = self.prompt(bytes);
        if kind == 1 {
            let priority = Priority { level: bytes.next() % 101, duration: None };
            self.cache.prioritise_prefix(&prompt, options.naming(), priority);
        } else {
            let keep = bytes.below(9);
            self.cache.forget_prefix(&prompt, options.naming(), keep)?;
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
        same("a reset is done", self.cache.reset_prefixes()?, !is_held)
    }
}
