//! One closure of a caller that other threads may run too, and its end when all have left it.
//!
//! Knows neither which threads join nor how they learn of the job.
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::Duration;

use super::sync::atomic::{AtomicUsize, Ordering};
use super::sync::thread::{self, Thread};
use super::sync::{Arc, Instant, Mutex, SpinLimit, lock, spin};

/// Longest time that a caller spins for the last helper to leave before it parks.
const COMPLETION_SPIN: SpinLimit =
    SpinLimit { total: Duration::from_micros(200), yield_max: Duration::MAX };

/// A closure on the caller's stack that helpers run while the job is open.
#[derive(Debug)]
pub(super) struct Job {
    /// A `&H` of the caller's, valid while helpers are inside.
    help: *const (),
    run: unsafe fn(*const ()),
    /// Number of helpers inside, and [`CLOSED`] after the last one may enter.
    inside: AtomicUsize,
    /// Number of helpers that may still join.
    vacancies: AtomicUsize,
    caller: Thread,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

const CLOSED: usize = 1 << (usize::BITS - 1);

// SAFETY: `help` is a `&H` with `H: Sync`, by `Job::open`, and is used as nothing else.
unsafe impl Send for Job {}
// SAFETY: as for `Send`: `Job::open` takes `H: Sync`; all other fields are `Sync`.
unsafe impl Sync for Job {}

impl Job {
    /// Opens a job for at most `helpers_max` helpers that run `help` once each, calls `body`, which
    /// may publish the job to them, and closes it. Returns when all helpers inside have left.
    ///
    /// # Panics
    /// If `body` or a helper panics, once all have left.
    pub(super) fn open<H: Fn() + Sync>(
        help: &H,
        helpers_max: usize,
        body: impl FnOnce(&Arc<Self>),
    ) {
        let job = Arc::new(Self {
            help: std::ptr::from_ref(help).cast(),
            run: run::<H>,
            inside: AtomicUsize::new(0),
            vacancies: AtomicUsize::new(helpers_max),
            caller: thread::current(),
            panic: Mutex::new(None),
        });
        let completion = Completion(&job);
        body(&job);
        drop(completion);
        let panic = lock(&job.panic).take();
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }

    /// Runs the closure if the job is open and has a vacancy. Returns whether it did.
    pub(super) fn help(&self) -> bool {
        let enter = |inside| (inside & CLOSED == 0).then_some(inside + 1);
        if self.inside.fetch_update(Ordering::AcqRel, Ordering::Acquire, enter).is_err() {
            return false;
        }
        let take = |vacancies: usize| vacancies.checked_sub(1);
        let taken = self.vacancies.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok();
        if taken {
            // SAFETY: `run` was instantiated for the type of `help`, by `Job::open`, and `help` is
            // valid: `Completion` keeps the caller until this thread has left.
            let result = catch_unwind(AssertUnwindSafe(|| unsafe { (self.run)(self.help) }));
            if let Err(panic) = result {
                *lock(&self.panic) = Some(panic);
            }
        }
        if self.inside.fetch_sub(1, Ordering::AcqRel) == CLOSED + 1 {
            self.caller.unpark();
        }
        taken
    }
}

/// Calls the closure of a [`Job`].
///
/// # Safety
/// 1. `help` is a `&H` that is valid as long as this runs.
unsafe fn run<H: Fn()>(help: *const ()) {
    // SAFETY: condition 1.
    let help = unsafe { &*help.cast::<H>() };
    help();
}

/// Closes a job when dropped, and waits until all helpers have left it.
struct Completion<'a>(&'a Job);

impl Drop for Completion<'_> {
    fn drop(&mut self) {
        let Self(job) = self;
        if job.inside.fetch_or(CLOSED, Ordering::AcqRel) == 0 {
            return;
        }
        let is_empty = || job.inside.load(Ordering::Acquire) == CLOSED;
        spin(Instant::now(), COMPLETION_SPIN, is_empty);
        while !is_empty() {
            // The last helper to leave sees that the job is closed, and unparks the caller.
            thread::park();
        }
    }
}
