//! Threads that the embedding program hands over, and the check that they keep their contract.
use std::any::Any;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kv_core::error::DeviceError;

use super::{THREADS_MAX, unsupported};

/// Provides the threads that a backend computes on, instead of a pool of the backend's own.
///
/// A program that has threads already hands them over with
/// [`CpuOptions::with_workers`](crate::CpuOptions::with_workers). Three ways to get an
/// implementation:
///
/// - `RayonWorkers` (feature `rayon`) runs operations on a rayon pool.
/// - [`SpawnWorkers`](crate::SpawnWorkers) needs only a function that starts a `'static` closure on
///   another thread, as every executor has.
/// - This trait is implemented directly where threads can borrow from their caller, as those of
///   [`std::thread::scope`] can.
///
/// # Contract
///
/// [`run`](Self::run) calls `task(worker)` exactly once for each `worker` in `0..workers`, in any
/// order, on any threads, at once or one after the other, and returns when all of these calls have
/// returned.
///
/// Each call of `task` claims work items until none is left. So the first calls do the work, and a
/// call that begins late returns at once: it may as well be made on the calling thread. An
/// implementation should therefore never wait for a thread that is busy with something else.
///
/// `task` does not unwind: a panic inside is kept, and resumed by the operation after `run` has
/// returned. `task` neither blocks nor calls `run`.
///
/// `run` is called on the thread that calls an operation, by several threads at once where several
/// queues are in use. The operation holds locks on its buffers meanwhile. **A thread that waits
/// inside `run` must not run other work that uses the same buffers**: it would wait for itself. The
/// scopes of work-stealing pools do this (`rayon::scope`, `rayon::broadcast`), so on such a pool
/// use `RayonWorkers` or `SpawnWorkers`, which never run other work while they wait.
///
/// An implementation that breaks the contract never causes undefined behaviour: the operation
/// checks the calls it gets, and panics.
///
/// # Examples
///
/// ```
/// use std::sync::Arc;
///
/// use kv::backend::Backend;
/// use kv::cpu::{CpuBackend, CpuOptions, Workers};
///
/// /// Starts threads anew for each operation.
/// struct Scoped(usize);
///
/// impl Workers for Scoped {
///     fn count(&self) -> usize {
///         self.0
///     }
///     fn run(&self, workers: usize, task: &(dyn Fn(usize) + Sync)) {
///         std::thread::scope(|scope| {
///             for worker in 1..workers {
///                 scope.spawn(move || task(worker));
///             }
///             task(0);
///         });
///     }
/// }
///
/// let backend = CpuBackend::open(CpuOptions::default().with_workers(Arc::new(Scoped(2))))?;
/// assert_eq!(backend.capabilities().workers, 2);
/// # Ok::<_, kv::error::DeviceError>(())
/// ```
pub trait Workers: Send + Sync {
    /// Returns how many calls of a task can run at once, the calling thread's included: 1 to 4096.
    ///
    /// A backend reads it once, when it is opened, and keeps memory for that many workers per
    /// queue.
    fn count(&self) -> usize;

    /// Calls `task(worker)` once for each `worker` in `0..workers`, and returns when all calls have
    /// returned. See the [contract](Self#contract).
    ///
    /// `workers` is at least 2 and at most [`count`](Self::count): operations too small to be
    /// divided run on the calling thread, without this call.
    fn run(&self, workers: usize, task: &(dyn Fn(usize) + Sync));
}

/// Workers of the embedding program, with the count they had when the backend was opened.
#[derive(Clone)]
pub(crate) struct GivenWorkers {
    workers: Arc<dyn Workers>,
    count: usize,
}

impl fmt::Debug for GivenWorkers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GivenWorkers").field("count", &self.count).finish_non_exhaustive()
    }
}

impl GivenWorkers {
    /// Takes workers whose count is possible.
    pub(super) fn new(workers: Arc<dyn Workers>) -> Result<Self, DeviceError> {
        match workers.count() {
            0 => Err(unsupported("open cpu", "0 workers given, at least 1 is needed")),
            count if count > THREADS_MAX => Err(unsupported(
                "open cpu",
                format!("{count} workers given, at most {THREADS_MAX} are possible"),
            )),
            count => Ok(Self { workers, count }),
        }
    }

    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// Calls `work` once with each of `locals`, of which there are at most [`Self::count`].
    ///
    /// Locals are handed out under a lock, so no two calls share one whatever the workers do.
    ///
    /// # Panics
    /// If `work` panics, or the workers break their contract: at the end of the run.
    pub(super) fn run<T: Send>(&self, locals: &mut [T], work: impl Fn(&mut T) + Sync) {
        let calls = Calls::new(locals.len());
        let locals = Mutex::new(locals.iter_mut());
        let panic: Mutex<Option<Box<dyn Any + Send>>> = Mutex::new(None);
        self.workers.run(calls.workers, &|worker| {
            if !calls.begin(worker) {
                return;
            }
            let local = lock(&locals).next();
            if let Some(local) = local
                && let Err(payload) = catch_unwind(AssertUnwindSafe(|| work(local)))
            {
                *lock(&panic) = Some(payload);
            }
        });
        if let Some(payload) = lock(&panic).take() {
            resume_unwind(payload);
        }
        calls.assert_kept();
    }
}

/// Bits of a set of workers, in words.
const WORDS: usize = THREADS_MAX.div_ceil(64);

/// The workers that a run has called. On the stack, so that a run allocates nothing.
struct Calls {
    workers: usize,
    called: [AtomicU64; WORDS],
    violation: Mutex<Option<Violation>>,
}

/// A call that broke the contract.
#[derive(Debug, Clone, Copy)]
enum Violation {
    Twice(usize),
    OutOfRange(usize),
}

impl Calls {
    fn new(workers: usize) -> Self {
        let called = [const { AtomicU64::new(0) }; WORDS];
        Self { workers, called, violation: Mutex::new(None) }
    }

    /// Notes a call. Returns whether the contract allows it.
    fn begin(&self, worker: usize) -> bool {
        let violation = match self.word(worker) {
            Some((word, bit)) if word.fetch_or(bit, Ordering::Relaxed) & bit == 0 => return true,
            Some(_) => Violation::Twice(worker),
            None => Violation::OutOfRange(worker),
        };
        *lock(&self.violation) = Some(violation);
        false
    }

    /// Returns the word that holds a worker's bit, and the bit.
    fn word(&self, worker: usize) -> Option<(&AtomicU64, u64)> {
        let word = self.called.get(worker / 64).filter(|_| worker < self.workers)?;
        Some((word, 1 << (worker % 64)))
    }

    /// Panics if a call broke the contract, or if one was left out.
    fn assert_kept(&self) {
        let workers = self.workers;
        let broken = lock(&self.violation).map(|violation| match violation {
            Violation::Twice(worker) => format!("called worker {worker} twice"),
            Violation::OutOfRange(worker) => format!("called worker {worker} of {workers}"),
        });
        let is_left_out = |worker: &usize| {
            self.word(*worker).is_none_or(|(word, bit)| word.load(Ordering::Relaxed) & bit == 0)
        };
        let broken = broken.or_else(|| {
            let left_out = (0..workers).find(is_left_out)?;
            Some(format!("returned without a call of worker {left_out} of {workers}"))
        });
        assert!(broken.is_none(), "Workers::run {}", broken.unwrap_or_default());
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
