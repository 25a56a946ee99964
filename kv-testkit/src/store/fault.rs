//! A store that fails on purpose, by a seeded schedule.
use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use kv_core::events::Tier;
use kv_tier::{BlockStore, ChunkAddress, Put, Scope, StoreError, StoreErrorKind};

use crate::rng::Rng;

/// One thing that goes wrong in one call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Fault {
    /// The call takes this much longer, deadline or not; past it the answer is `Timeout`, though
    /// the work was done.
    Delay(Duration),
    /// The call fails, and does nothing.
    Fail(StoreErrorKind),
    /// A read returns the beginning of the chunk; a write keeps that alone.
    Cut,
    /// One bit is flipped, in the read bytes or in the stored ones.
    Flip,
    /// A read returns the bytes of another chunk; a write keeps them in this one's place. Any chunk
    /// that was written before will do; without one, nothing goes wrong.
    Swap,
    /// A read returns the answer to the read before; a lookup that to the lookup before, as long as
    /// it has as many answers.
    Repeat,
    /// The chunk is gone before a read; of a lookup, the first one.
    Lose,
    /// A read returns no bytes, as success.
    Empty,
    /// A write reports success, and keeps nothing; a removal removes nothing.
    Forget,
}

impl Fault {
    /// One of each kind that [`FaultSchedule::seeded`] chooses from.
    pub const ALL: [Self; 13] = [
        Self::Delay(Duration::from_micros(200)),
        Self::Fail(StoreErrorKind::Unavailable),
        Self::Fail(StoreErrorKind::Timeout),
        Self::Fail(StoreErrorKind::Full),
        Self::Fail(StoreErrorKind::Denied),
        Self::Fail(StoreErrorKind::Other),
        Self::Cut,
        Self::Flip,
        Self::Swap,
        Self::Repeat,
        Self::Lose,
        Self::Empty,
        Self::Forget,
    ];
}

/// A schedule of faults. The same seed and the same calls, in the same order, give the same faults.
#[derive(Debug, Clone)]
pub struct FaultSchedule {
    rng: Rng,
    one_in: u32,
    kinds: Vec<Fault>,
    /// Faults of the next calls, which come before those of the seed.
    next: Vec<Option<Fault>>,
}

impl FaultSchedule {
    /// Gives one call in `one_in` on average one of the faults of `kinds`; none if `one_in` is 0.
    pub fn seeded(seed: u64, one_in: u32, kinds: &[Fault]) -> Self {
        Self { rng: Rng::new(seed), one_in, kinds: kinds.to_vec(), next: Vec::new() }
    }

    /// Gives the next calls these faults, in order, and later calls none.
    pub fn listed(faults: &[Option<Fault>]) -> Self {
        let next = faults.iter().rev().copied().collect();
        Self { next, ..Self::seeded(0, 0, &[]) }
    }

    fn next(&mut self) -> Option<Fault> {
        if let Some(fault) = self.next.pop() {
            return fault;
        }
        let happens = self.one_in > 0 && !self.kinds.is_empty() && self.rng.one_in(self.one_in);
        happens.then(|| self.rng.pick(&self.kinds))
    }
}

/// Number of injected faults, by fault.
pub type FaultCounts = HashMap<Fault, u64>;

/// A store with faults around another one.
#[derive(Debug)]
pub struct FaultStore<S> {
    store: S,
    state: Mutex<State>,
}

impl<S: BlockStore> FaultStore<S> {
    /// Puts faults around a store.
    pub fn new(store: S, schedule: FaultSchedule) -> Self {
        let state = State {
            schedule,
            counts: FaultCounts::new(),
            written: Vec::new(),
            last_read: None,
            last_lookup: None,
        };
        Self { store, state: Mutex::new(state) }
    }

    /// Returns the store within.
    pub const fn inner(&self) -> &S {
        &self.store
    }

    /// Replaces the schedule.
    pub fn set_schedule(&self, schedule: FaultSchedule) {
        self.state().schedule = schedule;
    }

    /// Returns which faults had an effect, and how often.
    pub fn counts(&self) -> FaultCounts {
        self.state().counts.clone()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Chooses the fault of a call; delays and failures happen here.
    fn begin(&self, chunk: Option<&ChunkAddress>) -> Result<Option<Fault>, StoreError> {
        let fault = self.state().schedule.next();
        match fault {
            Some(Fault::Delay(time)) => {
                self.count(Fault::Delay(time));
                thread::sleep(time);
            }
            Some(Fault::Fail(kind)) => {
                self.count(Fault::Fail(kind));
                return Err(StoreError::new(kind, "a fault on purpose"));
            }
            Some(Fault::Lose) => {
                if let Some(chunk) = chunk {
                    self.count(Fault::Lose);
                    self.store.remove(&[*chunk], super::soon())?;
                }
            }
            _ => {}
        }
        Ok(fault)
    }

    /// Returns the answer of a call, or a timeout if a fault has delayed the answer past its
    /// deadline. The work was done.
    fn end<T>(fault: Option<Fault>, answer: T, deadline: Instant) -> Result<T, StoreError> {
        let is_late = matches!(fault, Some(Fault::Delay(_))) && Instant::now() >= deadline;
        if is_late {
            return Err(StoreError::new(StoreErrorKind::Timeout, "a delay on purpose"));
        }
        Ok(answer)
    }

    /// Returns the deadline of the inner store, which is not shortened by a delay.
    fn patience(fault: Option<Fault>, deadline: Instant) -> Instant {
        if matches!(fault, Some(Fault::Delay(_))) { deadline.max(super::soon()) } else { deadline }
    }

    fn count(&self, fault: Fault) {
        *self.state().counts.entry(fault).or_default() += 1;
    }

    /// Returns some other chunk that was written.
    fn other_than(&self, chunk: &ChunkAddress) -> Option<ChunkAddress> {
        let mut state = self.state();
        let others: Vec<_> =
            state.written.iter().filter(|other| *other != chunk).copied().collect();
        (!others.is_empty()).then(|| state.schedule.rng.pick(&others))
    }

    fn read(&self, chunk: &ChunkAddress, into: &mut [u8], deadline: Instant) -> ReadResult {
        self.store.get(chunk, into, deadline)
    }

    fn damage(&self, fault: Fault, bytes: &mut Vec<u8>) {
        let place = self.state().schedule.rng.below(bytes.len() as u32) as usize;
        match fault {
            Fault::Cut => bytes.truncate(place),
            _ => bytes[place] ^= 1 << self.state().schedule.rng.below(8),
        }
        self.count(fault);
    }
}

impl<S: BlockStore> BlockStore for FaultStore<S> {
    fn tier(&self) -> Tier {
        self.store.tier()
    }

    fn contains(
        &self,
        chunks: &[ChunkAddress],
        deadline: Instant,
    ) -> Result<Vec<bool>, StoreError> {
        let fault = self.begin(chunks.first())?;
        let answers = self.store.contains(chunks, Self::patience(fault, deadline))?;
        let last = self.state().last_lookup.replace(answers.clone());
        let repeated = last.filter(|last| last.len() == chunks.len());
        if let Some((last, Fault::Repeat)) = repeated.zip(fault) {
            self.count(Fault::Repeat);
            return Ok(last);
        }
        Self::end(fault, answers, deadline)
    }

    fn get(&self, chunk: &ChunkAddress, into: &mut [u8], deadline: Instant) -> ReadResult {
        let fault = self.begin(Some(chunk))?;
        let other = match fault {
            Some(Fault::Swap) => self.other_than(chunk),
            _ => None,
        };
        if other.is_some() {
            self.count(Fault::Swap);
        }
        let read = self.read(&other.unwrap_or(*chunk), into, Self::patience(fault, deadline))?;
        let mut bytes = read.map(|length| into[..length].to_vec());
        let last = std::mem::replace(&mut self.state().last_read, bytes.clone());
        match (fault, &mut bytes) {
            (Some(fault @ (Fault::Cut | Fault::Flip)), Some(bytes)) if !bytes.is_empty() => {
                self.damage(fault, bytes);
            }
            (Some(Fault::Empty), Some(bytes)) => {
                bytes.clear();
                self.count(Fault::Empty);
            }
            (Some(Fault::Repeat), bytes) => {
                if let Some(last) = last.filter(|last| last.len() <= into.len()) {
                    *bytes = Some(last);
                    self.count(Fault::Repeat);
                }
            }
            _ => {}
        }
        if let Some(bytes) = &bytes {
            into[..bytes.len()].copy_from_slice(bytes);
        }
        Self::end(fault, bytes.map(|bytes| bytes.len()), deadline)
    }

    fn put(
        &self,
        chunk: &ChunkAddress,
        bytes: &[u8],
        deadline: Instant,
    ) -> Result<Put, StoreError> {
        let fault = self.begin(None)?;
        let deadline_within = Self::patience(fault, deadline);
        let mut kept = bytes.to_vec();
        match fault {
            Some(Fault::Forget) => {
                self.count(Fault::Forget);
                return Ok(Put::New);
            }
            Some(fault @ (Fault::Cut | Fault::Flip)) if !kept.is_empty() => {
                self.damage(fault, &mut kept);
            }
            Some(Fault::Swap) => {
                if let Some(other) = self.other_than(chunk) {
                    let mut into = vec![0; SWAPPED_BYTES_MAX];
                    if let Some(length) = self.read(&other, &mut into, deadline_within)? {
                        kept = into[..length].to_vec();
                        self.count(Fault::Swap);
                    }
                }
            }
            _ => {}
        }
        if kept.is_empty() && !bytes.is_empty() {
            // Cut off whole: it is as if nothing had been kept.
            return Ok(Put::New);
        }
        let put = self.store.put(chunk, &kept, deadline_within)?;
        let mut state = self.state();
        if !state.written.contains(chunk) {
            state.written.push(*chunk);
        }
        let excess = state.written.len().saturating_sub(WRITTEN_MAX);
        state.written.drain(..excess);
        drop(state);
        Self::end(fault, put, deadline)
    }

    fn remove(&self, chunks: &[ChunkAddress], deadline: Instant) -> Result<(), StoreError> {
        let fault = self.begin(None)?;
        if fault == Some(Fault::Forget) {
            self.count(Fault::Forget);
            return Ok(());
        }
        self.store.remove(chunks, Self::patience(fault, deadline))?;
        Self::end(fault, (), deadline)
    }

    fn remove_all(&self, scope: &Scope, deadline: Instant) -> Result<u64, StoreError> {
        let fault = self.begin(None)?;
        if fault == Some(Fault::Forget) {
            self.count(Fault::Forget);
            return Ok(0);
        }
        let removed = self.store.remove_all(scope, Self::patience(fault, deadline))?;
        Self::end(fault, removed, deadline)
    }
}

type ReadResult = Result<Option<usize>, StoreError>;

#[derive(Debug)]
struct State {
    schedule: FaultSchedule,
    counts: FaultCounts,
    /// Chunks that were written lately, to swap with.
    written: Vec<ChunkAddress>,
    last_read: Option<Vec<u8>>,
    last_lookup: Option<Vec<bool>>,
}

const WRITTEN_MAX: usize = 64;
/// Larger chunks are not written in the place of others.
const SWAPPED_BYTES_MAX: usize = 4 << 20;

#[cfg(test)]
mod tests;
