//! A bounded number of connections, each used by one call at a time.
use std::io;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::connection::{Connection, Fault};

/// Connections that no call uses, and the number of those in use.
#[derive(Debug)]
pub(super) struct Pool {
    state: Mutex<State>,
    freed: Condvar,
    size: usize,
}

#[derive(Debug)]
struct State {
    idle: Vec<Connection>,
    in_use: usize,
}

impl Pool {
    /// Creates a pool of at most `size` connections.
    pub(super) fn new(size: usize) -> Self {
        let state = Mutex::new(State { idle: Vec::new(), in_use: 0 });
        Self { state, freed: Condvar::new(), size }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until a connection may be used.
    pub(super) fn take(&self, deadline: Instant) -> Result<Lease<'_>, Fault> {
        let mut state = self.lock();
        while state.in_use >= self.size {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Fault::Io(io::ErrorKind::TimedOut.into()));
            }
            let waited = self.freed.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        state.in_use += 1;
        let idle = state.idle.pop();
        Ok(Lease { pool: self, idle, kept: None })
    }
}

/// The right to use one connection of the pool.
#[derive(Debug)]
pub(super) struct Lease<'a> {
    pool: &'a Pool,
    idle: Option<Connection>,
    kept: Option<Connection>,
}

impl Lease<'_> {
    /// Takes the connection of an earlier call, if the server has neither closed it nor sent
    /// anything unrequested. Other idle connections are checked when they are taken.
    pub(super) fn idle(&mut self) -> Option<Connection> {
        self.idle.take().filter(Connection::is_quiet)
    }

    /// Keeps a connection for later calls.
    pub(super) fn keep(&mut self, connection: Connection) {
        self.kept = Some(connection);
    }
}

impl Drop for Lease<'_> {
    fn drop(&mut self) {
        let mut state = self.pool.lock();
        let in_use = state.in_use.checked_sub(1);
        debug_assert!(in_use.is_some(), "a lease is counted until it is dropped");
        state.in_use = in_use.unwrap_or(0);
        state.idle.extend(self.kept.take());
        drop(state);
        self.pool.freed.notify_one();
    }
}
