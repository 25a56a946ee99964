//! One call that helpers may take part in: how they enter it, and how it ends with none inside.
//!
//! Knows nothing of who helps, or how they learn of it.
#![expect(clippy::arithmetic_side_effects, reason = "counts of threads, and one bit above them")]
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

/// How long a caller looks out for the last helper to end before it sleeps.
const WAITS_FOR: Duration = Duration::from_micros(200);
/// How often one looks before other threads may have the core.
const LOOKS: usize = 16;

/// What a caller wants help with.
#[derive(Debug)]
pub(super) struct Call {
    /// A `&H` of the caller's, which is valid while helpers are inside.
    help: *const (),
    run: unsafe fn(*const ()),
    /// Helpers inside, and [`CLOSED`] once no more may enter.
    inside: AtomicUsize,
    /// How many more may help.
    wanted: AtomicUsize,
    caller: Thread,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

const CLOSED: usize = 1 << (usize::BITS - 1);

// SAFETY: `help` is a `&H` with `H: Sync`, by `Call::open`, and is used as nothing else.
unsafe impl Send for Call {}
// SAFETY: as above.
unsafe impl Sync for Call {}

impl Call {
    /// Opens a call for `wanted` others to run `help`, once each, does `meanwhile`, which may show
    /// it to them, and closes it. Returns when all have left it.
    ///
    /// # Panics
    /// When one of them does, once all have left.
    pub(super) fn open<H: Fn() + Sync>(
        help: &H,
        wanted: usize,
        meanwhile: impl FnOnce(&Arc<Self>),
    ) {
        let call = Arc::new(Self {
            help: std::ptr::from_ref(help).cast(),
            run: run::<H>,
            inside: AtomicUsize::new(0),
            wanted: AtomicUsize::new(wanted),
            caller: thread::current(),
            panic: Mutex::new(None),
        });
        let ended = Ended(&call);
        meanwhile(&call);
        drop(ended);
        if let Some(panic) = lock(&call.panic).take() {
            resume_unwind(panic);
        }
    }

    /// Helps if that is wanted and not too late. Whether it did.
    pub(super) fn help(&self) -> bool {
        let enter = |inside| (inside & CLOSED == 0).then_some(inside + 1);
        if self.inside.fetch_update(Ordering::AcqRel, Ordering::Acquire, enter).is_err() {
            return false;
        }
        let take = |wanted: usize| wanted.checked_sub(1);
        let wanted = self.wanted.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).is_ok();
        if wanted {
            // SAFETY: `help` is what `run` was made for, and is valid: `Ended` does not let the
            // caller go before this thread has left.
            let result = catch_unwind(AssertUnwindSafe(|| unsafe { (self.run)(self.help) }));
            if let Err(panic) = result {
                *lock(&self.panic) = Some(panic);
            }
        }
        if self.inside.fetch_sub(1, Ordering::AcqRel) == CLOSED + 1 {
            self.caller.unpark();
        }
        wanted
    }
}

/// # Safety
/// 1. `help` is a `&H` that is valid as long as this runs.
unsafe fn run<H: Fn()>(help: *const ()) {
    // SAFETY: condition 1.
    let help = unsafe { &*help.cast::<H>() };
    help();
}

/// Closes a call when it is dropped, and waits until all have left it.
struct Ended<'a>(&'a Call);

impl Drop for Ended<'_> {
    fn drop(&mut self) {
        let Self(call) = self;
        if call.inside.fetch_or(CLOSED, Ordering::AcqRel) == 0 {
            return;
        }
        let since = Instant::now();
        while call.inside.load(Ordering::Acquire) != CLOSED {
            let is_empty = || call.inside.load(Ordering::Acquire) == CLOSED;
            if since.elapsed() < WAITS_FOR {
                if !looks(is_empty) {
                    thread::yield_now();
                }
            } else {
                // The last one to leave sees that it is closed, and ends this.
                thread::park();
            }
        }
    }
}

/// Looks a few times whether something has come.
pub(super) fn looks(has_come: impl Fn() -> bool) -> bool {
    (0..LOOKS).any(|_| {
        std::hint::spin_loop();
        has_come()
    })
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
