//! Steps: planned, grown one by one, committed whole or in part, or dropped.
use kv_core::{CacheError, GroupId, KvCache, PublishAt, SequenceId, Step, StepInput};

use super::choose::Bytes;
use super::join::{Begun, Late, join};
use super::{Happened, Life, Sequence};
use crate::case::{At, CaseError, ensure};
use crate::device::Device;
use crate::erratic::Erratic;
use crate::named::{self, Name};

/// What one sequence brings.
#[derive(Debug, Clone)]
pub(super) struct Entry {
    /// Index among the sequences; behind them for those that begin in the step.
    pub(super) at: usize,
    pub(super) tokens: Vec<u32>,
    /// Nobody tells the ids.
    pub(super) is_unknown: bool,
    pub(super) drafts: u32,
    pub(super) lookahead: u32,
    pub(super) names: Vec<Name>,
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

/// How a step ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Finish {
    Commit,
    Accept,
    Drop,
}

/// The sequences that began in a step and how many tokens of each entry stay; or why the step never
/// happened.
type Ran = Result<(Vec<Begun>, Vec<u32>), Happened>;

/// What became of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Taken {
    Committed,
    /// There are not enough blocks.
    Refused,
    /// It never happened: dropped, or the device failed.
    Undone,
}

impl<B: Device> Life<B> {
    /// The last sequence brings the next `chunk` tokens of its prompt, on a device that works.
    pub(super) fn next_chunk(&mut self, chunk: usize, ahead: u32) -> Result<Taken, CaseError> {
        let at = self.sequences.len() - 1;
        let tokens = self.sequences[at].prompt[..chunk].to_vec();
        let names = self.name(&self.sequences[at], &tokens, false);
        let entry = Entry { at, tokens, is_unknown: false, drafts: 0, lookahead: ahead, names };
        self.take_alone(entry)
    }

    /// A step of one entry, on a device that works.
    pub(super) fn take_alone(&mut self, entry: Entry) -> Result<Taken, CaseError> {
        self.take(vec![entry], &mut Bytes::new(&[]), Finish::Commit)
    }

    pub(super) fn step(&mut self, bytes: &mut Bytes<'_>) -> Result<(), CaseError> {
        let mut entries: Vec<Entry> = Vec::new();
        for _ in 0..=bytes.below(3) {
            let at = bytes.index(self.sequences.len());
            if entries.iter().all(|entry| entry.at != at) {
                entries.extend(self.entry(at, bytes));
            }
        }
        if entries.is_empty() {
            return Ok(());
        }
        let finish = bytes.pick(&[Finish::Commit, Finish::Commit, Finish::Accept, Finish::Drop]);
        self.take(entries, bytes, finish).map(drop)
    }

    /// What a sequence brings next, if there is room for it.
    pub(super) fn entry(&self, at: usize, bytes: &mut Bytes<'_>) -> Option<Entry> {
        let sequence = &self.sequences[at];
        let room = (self.spec.max_seq_len() as usize).saturating_sub(sequence.names.len());
        let wanted = 1 + bytes.index(5);
        let kind = bytes.next();
        let mut tokens: Vec<_> = sequence.prompt.iter().copied().take(wanted).collect();
        while tokens.len() < wanted {
            tokens.push(bytes.token());
        }
        tokens.truncate(room);
        let is_unknown = kind >= 250;
        let drafts = if kind.is_multiple_of(4) { u32::from((kind >> 2) & 3) } else { 0 };
        let drafts = drafts.min(tokens.len() as u32);
        let lookahead = if kind >> 4 == 7 { 3 } else { 0 };
        let names = self.name(sequence, &tokens, is_unknown);
        let entry = Entry { at, tokens, is_unknown, drafts, lookahead, names };
        (!entry.tokens.is_empty()).then_some(entry)
    }

    /// Names of new tokens of a sequence.
    pub(super) fn name(&self, sequence: &Sequence, tokens: &[u32], is_unknown: bool) -> Vec<Name> {
        let (options, len) = (&sequence.options, sequence.names.len() as u32);
        let last = sequence.names.last().copied();
        let mut name = last.unwrap_or_else(|| named::root(&options.naming()));
        let unknown = (u128::from(self.operations()) << 32) | (1 << 31);
        let next = |(token, at): (&u32, u32)| {
            let behind = if is_unknown { Some(unknown) } else { options.behind(at) };
            name = named::then(name, *token, behind);
            name
        };
        tokens.iter().zip(len..).map(next).collect()
    }

    /// Whether every group has the blocks for it, and how many it would have left.
    pub(super) fn demand(&self, inputs: &[StepInput<'_>]) -> Result<(bool, Vec<u32>), CaseError> {
        let (mut fits, mut left) = (true, Vec::new());
        for id in 0..self.spec.groups().len() as u8 {
            let demand = self.cache.blocks_for_step(GroupId(id), inputs)?;
            fits &= demand.fits();
            left.push(demand.free.saturating_sub(demand.needed));
        }
        Ok((fits, left))
    }

    /// Runs a step.
    fn take(
        &mut self,
        mut entries: Vec<Entry>,
        bytes: &mut Bytes<'_>,
        finish: Finish,
    ) -> Result<Taken, CaseError> {
        let inputs: Vec<_> = entries.iter().map(|e| e.input(self.sequences[e.at].id)).collect();
        let (fits, left) = self.demand(&inputs)?;
        let before = self.see();
        let late = self.late(bytes, &entries);
        if self.trace.is_some() {
            let what = format!("step {inputs:?}, then {late:?}, {finish:?}, fits: {fits}");
            self.tell(|| what);
        }
        if !fits {
            let refused = self.cache.begin_step(&inputs).map(drop);
            let is_full = matches!(refused, Err(CacheError::Exhausted(_)));
            ensure(is_full, || format!("it does not fit, but begin_step says {refused:?}"))?;
            self.lived.add(Happened::RefusedStep);
            self.unchanged(&before).at("begin_step")?;
            return Ok(Taken::Refused);
        }
        self.leave_windows(&entries, &late);
        let is_alone = late.is_empty();
        let duplicates = before.duplicates();
        self.threaten(bytes);
        let (begun, accepted) = match self.run(&mut entries, late, bytes, finish)? {
            Ok(ran) => ran,
            Err(why) => {
                self.lived.add(why);
                return self.see().undone(&before).map(|()| Taken::Undone);
            }
        };
        for Begun { id, prompt, options, reused } in begun {
            self.note_reuse(&prompt, &options, reused, true);
            self.remember(&prompt, &options);
            let sequence = self.begun(id, (prompt, options), reused);
            self.sequences.push(sequence);
        }
        for (entry, accepted) in entries.iter().zip(accepted) {
            self.committed(entry, accepted, finish);
        }
        if is_alone {
            let shared = self.cache.stats().duplicate_blocks - duplicates;
            self.check_left(&left, entries.len() as u32 + shared as u32)?;
        }
        Ok(Taken::Committed)
    }

    /// Begins a step that fits, lets others join, writes and ends it.
    fn run(
        &mut self,
        entries: &mut Vec<Entry>,
        late: Vec<Late>,
        bytes: &mut Bytes<'_>,
        finish: Finish,
    ) -> Result<Ran, CaseError> {
        let ids = self.sequences.iter().map(|sequence| sequence.id).collect::<Vec<_>>();
        let device = self.backend.clone();
        let inputs: Vec<_> = entries.iter().map(|entry| entry.input(ids[entry.at])).collect();
        let is_held = self.operations().is_multiple_of(3);
        let mut step = match begin(&mut self.cache, &inputs, is_held) {
            Ok(step) => step,
            Err(CacheError::Device(_)) if device.calm() => return Ok(Err(Happened::FailedBegin)),
            Err(other) => return Err(CaseError::from(other).at("a step that was said to fit")),
        };
        let joined = join((&mut step, &device), late, &ids, entries)?;
        self.lived = self.lived.and(joined.lived);
        let named: Vec<_> = entries.iter().flat_map(|entry| entry.names.clone()).collect();
        if write((&mut step, &device), (&self.spec, &self.layers), &named)? {
            self.lived.add(Happened::FailedWrite);
        }
        let mut accepted: Vec<_> = entries.iter().map(|e| e.tokens.len() as u32).collect();
        let done = match finish {
            Finish::Commit => step.commit(),
            Finish::Accept => {
                for n in &mut accepted {
                    *n -= bytes.below(*n + 1).min(bytes.below(4));
                }
                step.commit_accepted(&accepted)
            }
            Finish::Drop => {
                if is_held {
                    step.roll_back();
                } else {
                    drop(step);
                }
                device.calm();
                return Ok(Err(Happened::Dropped));
            }
        };
        let has_failed = device.calm();
        match done {
            Ok(()) if has_failed => Err("a failure was kept quiet".into()),
            Ok(()) => Ok(Ok((joined.begun, accepted))),
            Err(CacheError::Device(_)) if has_failed => Ok(Err(Happened::FailedCommit)),
            Err(other) => Err(other.into()),
        }
    }

    /// Notes what may leave windows when sequences come to a step: all that is there but for the
    /// slack.
    pub(super) fn leave_windows(&mut self, entries: &[Entry], late: &[Late]) {
        let slack = self.slack();
        let added = late.iter().filter_map(|late| match late {
            Late::Add(entry) => Some(entry.at),
            Late::Start(..) => None,
        });
        for at in entries.iter().map(|entry| entry.at).chain(added) {
            let sequence = &mut self.sequences[at];
            sequence.floor = sequence.floor.max(sequence.names.len().saturating_sub(slack));
        }
    }

    /// Tokens that every window keeps besides.
    pub(super) fn slack(&self) -> usize {
        let windows = self.spec.groups().iter().filter_map(kv_core::GroupSpec::window);
        windows.map(|window| window.slack as usize).min().unwrap_or(0)
    }

    /// A step took as many blocks as it was said to.
    fn check_left(&self, left: &[u32], entries: u32) -> Result<(), CaseError> {
        let has_tail = self.spec.groups().iter().any(|group| group.slot_map().has_tail());
        for (id, left) in (0..).zip(left) {
            // A block that its last holder copied, not to write over what the step might have had
            // to give back, is free again at the end, and one that gave way to another with the
            // same content; with a tail, so is one that became codes, and what held drafts.
            let given_back = if has_tail { self.spec.max_seq_len() } else { entries - 1 };
            let free = self.cache.free_blocks(GroupId(id));
            let is_right = (*left..=left + given_back).contains(&free);
            ensure(is_right, || format!("{free} free blocks after the step, not {left}"))?;
        }
        Ok(())
    }

    /// Notes what a committed step left.
    fn committed(&mut self, entry: &Entry, accepted: u32, finish: Finish) {
        let at_commit = self.spec.publish_at() == PublishAt::Commit;
        let sequence = &mut self.sequences[entry.at];
        let brought = entry.tokens.len();
        let stays = accepted as usize;
        let tokens = entry.tokens.iter().map(|token| (!entry.is_unknown).then_some(*token));
        sequence.tokens.extend(tokens);
        sequence.names.extend(&entry.names);
        let used = brought.min(sequence.prompt.len());
        let follows = sequence.prompt[..used] == entry.tokens[..used] && stays == brought;
        sequence.prompt.drain(..used);
        if !follows {
            sequence.prompt.clear();
        }
        let len = (sequence.names.len() - brought + stays) as u32;
        let certain = if at_commit && finish == Finish::Accept {
            len
        } else {
            (len + (brought - stays) as u32 - entry.drafts).min(len)
        };
        sequence.offered = sequence.offered.max(certain);
        if stays < brought {
            self.lived.add(Happened::AcceptedPart);
            self.cut(entry.at, len as usize);
        }
    }
}

/// Begins a step for the length of a borrow, or one that is held.
fn begin<'c, B: Device>(
    cache: &'c mut KvCache<Erratic<B>>,
    inputs: &[StepInput<'_>],
    is_held: bool,
) -> Result<Step<'c, Erratic<B>>, CacheError> {
    if !is_held {
        return cache.begin_step(inputs);
    }
    cache.open_step(inputs)?;
    // It stays open without its `Step`.
    drop(cache.step());
    let step = cache.step();
    Ok(step.unwrap_or_else(|| unreachable!("a step that was opened is held")))
}

/// Writes every layer; a write that fails is repeated, as often as the device fails. Says whether
/// it did.
fn write<B: Device>(
    (step, device): (&mut Step<'_, Erratic<B>>, &Erratic<B>),
    (spec, layers): (&kv_core::CacheSpec, &[u16]),
    names: &[Name],
) -> Result<bool, CaseError> {
    let mut has_failed = false;
    loop {
        let mut layers = layers.iter();
        match layers.try_for_each(|layer| named::write_layer(step, spec, *layer, names)) {
            Err(CaseError::Cache(CacheError::Device(_))) if device.calm() => has_failed = true,
            other => return other.map(|()| has_failed),
        }
    }
}
