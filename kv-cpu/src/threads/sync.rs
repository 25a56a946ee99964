//! Shared-state types of the threads: from std, or from loom in its model test.
//!
//! Time is here too: loom has none, so there a thread parks after a single poll.
use std::time::Duration;

#[cfg(not(all(loom, test)))]
pub(super) use std::{
    sync::atomic,
    sync::{Arc, Mutex, MutexGuard, RwLock},
    thread,
    time::Instant,
};

#[cfg(all(loom, test))]
pub(super) use loom::{
    sync::atomic,
    sync::{Arc, Mutex, MutexGuard, RwLock},
    thread,
};

/// Polls of a condition between two yields of the core.
#[cfg(not(all(loom, test)))]
const SPINS_PER_YIELD: usize = 16;

/// Limits of a thread's spin before it parks.
#[derive(Debug, Clone, Copy)]
pub(super) struct SpinLimit {
    /// Time since the start of the spin.
    pub(super) total: Duration,
    /// A yield that takes longer shows that another thread wants the core.
    pub(super) yield_max: Duration,
}

/// Spins until `is_ready` or until the limit, counted from `since`. Returns whether it is ready.
#[cfg(not(all(loom, test)))]
pub(super) fn spin(since: Instant, limit: SpinLimit, is_ready: impl Fn() -> bool) -> bool {
    let mut now = Instant::now();
    while now.duration_since(since) < limit.total {
        for _ in 0..SPINS_PER_YIELD {
            std::hint::spin_loop();
            if is_ready() {
                return true;
            }
        }
        let yielded = Instant::now();
        thread::yield_now();
        now = Instant::now();
        if now.duration_since(yielded) > limit.yield_max {
            return false;
        }
    }
    false
}

/// Polls once, so that the model covers both threads that spin and threads that park.
#[cfg(all(loom, test))]
pub(super) fn spin(_since: Instant, limit: SpinLimit, is_ready: impl Fn() -> bool) -> bool {
    let SpinLimit { total: _total, yield_max: _yield_max } = limit;
    is_ready()
}

/// A point in time, of which a model has one.
#[cfg(all(loom, test))]
#[derive(Debug, Clone, Copy)]
pub(super) struct Instant;

#[cfg(all(loom, test))]
impl Instant {
    pub(super) fn now() -> Self {
        Self
    }
}

/// Locks a mutex, also after a panic of another holder.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
