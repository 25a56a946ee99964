//! Steps: planned, grown one by one, committed whole or in part, or dropped.
use kv_core::{CacheError, GroupId, PlanError, PublishAt, SequenceId, Step, StepInput};

use super::choose::{Bytes, Options};
use super::{Life, Sequence};
use crate::case::{At, CaseError, ensure, same};
use crate::device::Device;
use crate::named::{self, Name};

/// What one sequence brings.
#[derive(Debug, Clone)]
struct Entry {
    /// Index among the sequences; behind them for those that begin in the step.
    at: usize,
    tokens: Vec<u32>,
    /// Nobody tells the ids.
    is_unknown: bool,
    drafts: u32,
    lookahead: u32,
    names: Vec<Name>,
}

impl Entry {
    fn input(&self, id: SequenceId) -> StepInput<'_> {
        let input = if self.is_unknown {
            StepInput::count(id, self.tokens.len() as u32)
        } else {
            StepInput::tokens(id, &self.tokens)
        };
        input.drafts(self.drafts).lookahead(self.lookahead)
    }
}

/// How a step ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Finish {
    Commit,
    Accept,
    Drop,
}

impl<B: Device> Life<B> {
    /// The last sequence brings the next `chunk` tokens of its prompt; false where it is refused.
    pub(super) fn first_step(&mut self, chunk: usize, ahead: u32) -> Result<bool, CaseError> {
        let at = self.sequences.len() - 1;
        let tokens = self.sequences[at].prompt[..chunk].to_vec();
        let names = self.name(&self.sequences[at], &tokens, false);
        let entry = Entry { at, tokens, is_unknown: false, drafts: 0, lookahead: ahead, names };
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
    fn entry(&self, at: usize, bytes: &mut Bytes<'_>) -> Option<Entry> {
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
    fn name(&self, sequence: &Sequence, tokens: &[u32], is_unknown: bool) -> Vec<Name> {
        let (options, len) = (&sequence.options, sequence.names.len() as u32);
        let last = sequence.names.last().copied();
        let mut name = last.unwrap_or_else(|| named::root(&options.naming()));
        let unknown = (u128::from(self.lived.operations) << 32) | (1 << 31);
        let next = |(token, at): (&u32, u32)| {
            let behind = if is_unknown { Some(unknown) } else { options.behind(at) };
            name = named::then(name, *token, behind);
            name
        };
        tokens.iter().zip(len..).map(next).collect()
    }

    /// Whether every group has the blocks for it, and how many it would have left.
    fn demand(&self, inputs: &[StepInput<'_>]) -> Result<(bool, Vec<u32>), CaseError> {
        let (mut fits, mut left) = (true, Vec::new());
        for id in 0..self.spec.groups().len() as u8 {
            let demand = self.cache.blocks_for_step(GroupId(id), inputs)?;
            fits &= demand.fits();
            left.push(demand.free.saturating_sub(demand.needed));
        }
        Ok((fits, left))
    }

    /// Runs a step; false where the blocks are exhausted.
    fn take(
        &mut self,
        mut entries: Vec<Entry>,
        bytes: &mut Bytes<'_>,
        finish: Finish,
    ) -> Result<bool, CaseError> {
        let inputs: Vec<_> = entries.iter().map(|e| e.input(self.sequences[e.at].id)).collect();
        let (fits, left) = self.demand(&inputs)?;
        let before = self.see();
        let late = self.late(bytes, &entries);
        if self.trace.is_some() {
            let what = format!("step {inputs:?}, then {late:?}, {finish:?}, fits: {fits}");
            self.tell(|| what);
        }
        let spec = self.spec.clone();
        if !fits {
            let refused = self.cache.begin_step(&inputs).map(drop);
            let is_full = matches!(refused, Err(CacheError::Exhausted(_)));
            ensure(is_full, || format!("it does not fit, but begin_step says {refused:?}"))?;
            self.lived.refused += 1;
            self.unchanged(&before).at("begin_step")?;
            return Ok(false);
        }
        let is_alone = late.is_empty();
        let mut step = self.cache.begin_step(&inputs).at("a step that was said to fit")?;
        let ids = self.sequences.iter().map(|sequence| sequence.id).collect::<Vec<_>>();
        let joined = join(&mut step, late, &ids, &mut entries)?;
        let named: Vec<_> = entries.iter().flat_map(|entry| entry.names.clone()).collect();
        named::write(&mut step, &spec, &named)?;
        let mut accepted: Vec<_> = entries.iter().map(|e| e.tokens.len() as u32).collect();
        match finish {
            Finish::Commit => step.commit()?,
            Finish::Accept => {
                for n in &mut accepted {
                    *n -= bytes.below(*n + 1).min(bytes.below(4));
                }
                step.commit_accepted(&accepted)?;
            }
            Finish::Drop => drop(step),
        }
        if finish == Finish::Drop {
            return self.unchanged_but_cached(&before).map(|()| true);
        }
        self.lived.refused += joined.refused;
        for Begun { id, prompt, options, reused } in joined.begun {
            self.lived.reused += reused as u64;
            self.remember(&prompt, &options);
            let sequence = self.begun(id, (prompt, options), reused);
            self.sequences.push(sequence);
        }
        for (entry, accepted) in entries.iter().zip(accepted) {
            self.committed(entry, accepted, finish);
        }
        if is_alone {
            // A block that its last holder copied, not to write over what the step might have had
            // to give back, is free again at the end.
            let given_back = entries.len() as u32 - 1;
            for (id, left) in (0..).zip(left) {
                let free = self.cache.free_blocks(GroupId(id));
                let is_right = (left..=left + given_back).contains(&free);
                ensure(is_right, || format!("{free} free blocks after the step, not {left}"))?;
            }
        }
        Ok(true)
    }

    /// What joins a step after it began.
    fn late(&mut self, bytes: &mut Bytes<'_>, entries: &[Entry]) -> Vec<Late> {
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

    /// Notes what a committed step left.
    fn committed(&mut self, entry: &Entry, accepted: u32, finish: Finish) {
        let at_commit = self.spec.publish_at() == PublishAt::Commit;
        let sequence = &mut self.sequences[entry.at];
        let brought = entry.tokens.len();
        let stays = accepted as usize;
        let tokens = entry.tokens.iter().map(|token| (!entry.is_unknown).then_some(*token));
        sequence.tokens.extend(tokens.take(stays));
        sequence.names.extend(&entry.names[..stays]);
        let used = brought.min(sequence.prompt.len());
        let follows = sequence.prompt[..used] == entry.tokens[..used] && stays == brought;
        sequence.prompt.drain(..used);
        if !follows {
            sequence.prompt.clear();
        }
        let len = sequence.names.len() as u32;
        let certain = if at_commit && finish == Finish::Accept {
            len
        } else {
            (len + (brought - stays) as u32 - entry.drafts).min(len)
        };
        sequence.offered = sequence.offered.max(certain);
    }

    /// A step that was dropped: what was given up for it is gone, all else is there.
    fn unchanged_but_cached(&mut self, before: &super::check::Seen) -> Result<(), CaseError> {
        self.see().same_lives(before)
    }
}

/// Joins an open step.
#[derive(Debug)]
enum Late {
    Add(Entry),
    Start(SequenceId, Vec<u32>, Options),
}

/// A sequence that began in a step.
struct Begun {
    id: SequenceId,
    prompt: Vec<u32>,
    options: Options,
    reused: usize,
}

#[derive(Default)]
struct Joined {
    begun: Vec<Begun>,
    refused: u64,
}

/// Adds what comes late to a step, as far as there are blocks. `ids`: sequences from before.
fn join<B: Device>(
    step: &mut Step<'_, B>,
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
                        joined.refused += 1;
                        continue;
                    }
                    Err(CacheError::Plan(
                        PlanError::TooMany { .. } | PlanError::SequenceTooLong { .. },
                    )) => continue,
                    Err(other) => return Err(other.into()),
                };
                same("start and probe in a step", reused, probed)?;
                let names = named::names(&prompt, &options.naming())[reused..].to_vec();
                let (at, tokens) = (ids.len() + joined.begun.len(), prompt[reused..].to_vec());
                joined.begun.push(Begun { id, prompt, options, reused });
                let (is_unknown, drafts, lookahead) = (false, 0, 0);
                (id, Entry { at, tokens, is_unknown, drafts, lookahead, names })
            }
        };
        match step.add(entry.input(id)) {
            Ok(()) => entries.push(entry),
            Err(CacheError::Exhausted(_)) => joined.refused += 1,
            // An empty prompt brings nothing.
            Err(CacheError::Plan(PlanError::ZeroTokens { .. })) => {}
            Err(other) => return Err(other.into()),
        }
    }
    Ok(joined)
}
