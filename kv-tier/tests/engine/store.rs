//! A store that hangs in chosen operations until it is let go.
use std::sync::{Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use kv_core::events::Tier;
use kv_tier::{BlockStore, ChunkAddress, MemoryStore, Put, StoreError};

/// An operation of a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Operation {
    Contains,
    Get,
    Put,
}

impl Operation {
    pub(crate) const ALL: [Self; 3] = [Self::Contains, Self::Get, Self::Put];
}

/// A store in memory whose calls do not return while they hang, whatever their deadline.
#[derive(Debug)]
pub(crate) struct HangStore {
    pub(crate) within: MemoryStore,
    state: Mutex<State>,
    wake: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// Calls that will hang, by operation.
    hang: [u64; 3],
    calls: [u64; 3],
    /// Calls that hang now.
    hanging: u64,
    /// Raised by every release.
    generation: u64,
    removals: u64,
}

impl HangStore {
    pub(crate) fn new() -> Self {
        let within = MemoryStore::new(64 << 20);
        Self { within, state: Mutex::default(), wake: Condvar::new() }
    }

    /// Lets the next calls of an operation hang.
    pub(crate) fn hang(&self, operation: Operation, calls: u64) {
        self.lock().hang[operation as usize] = calls;
    }

    /// Lets go of every call, and of those to come.
    pub(crate) fn release(&self) {
        let mut state = self.lock();
        state.hang = [0; 3];
        state.generation += 1;
        self.wake.notify_all();
    }

    /// Returns how many calls of an operation have begun.
    pub(crate) fn calls(&self, operation: Operation) -> u64 {
        self.lock().calls[operation as usize]
    }

    /// Waits until some number of calls hang.
    pub(crate) fn wait_hanging(&self, calls: u64) {
        let state = self.lock();
        let long = Duration::from_secs(20);
        let until = |state: &mut State| state.hanging < calls;
        let (_state, waited) = self.wake.wait_timeout_while(state, long, until).unwrap();
        assert!(!waited.timed_out(), "no call came");
    }

    /// Waits until something was removed.
    pub(crate) fn wait_removal(&self) {
        let state = self.lock();
        let until = |state: &mut State| state.removals == 0;
        let long = Duration::from_secs(20);
        let (_state, waited) = self.wake.wait_timeout_while(state, long, until).unwrap();
        assert!(!waited.timed_out(), "nothing was removed");
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    fn call(&self, operation: Operation) {
        let mut state = self.lock();
        state.calls[operation as usize] += 1;
        if state.hang[operation as usize] == 0 {
            return;
        }
        state.hang[operation as usize] -= 1;
        state.hanging += 1;
        self.wake.notify_all();
        let generation = state.generation;
        let until = |state: &mut State| state.generation == generation;
        // Ends some day, so that a failed test ends too.
        let long = Duration::from_mins(1);
        let (mut state, _) = self.wake.wait_timeout_while(state, long, until).unwrap();
        state.hanging -= 1;
    }
}

impl BlockStore for HangStore {
    fn tier(&self) -> Tier {
        Tier::Disk
    }
    fn contains(
        &self,
        chunks: &[ChunkAddress],
        _deadline: Instant,
    ) -> Result<Vec<bool>, StoreError> {
        self.call(Operation::Contains);
        self.within.contains(chunks, soon())
    }
    fn get(
        &self,
        chunk: &ChunkAddress,
        into: &mut [u8],
        _deadline: Instant,
    ) -> Result<Option<usize>, StoreError> {
        self.call(Operation::Get);
        self.within.get(chunk, into, soon())
    }
    fn put(
        &self,
        chunk: &ChunkAddress,
        bytes: &[u8],
        _deadline: Instant,
    ) -> Result<Put, StoreError> {
        self.call(Operation::Put);
        self.within.put(chunk, bytes, soon())
    }
    fn remove(&self, chunks: &[ChunkAddress], _deadline: Instant) -> Result<(), StoreError> {
        self.within.remove(chunks, soon())?;
        self.lock().removals += 1;
        self.wake.notify_all();
        Ok(())
    }
}

pub(crate) fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}
