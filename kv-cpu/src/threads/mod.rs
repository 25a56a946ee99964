//! The threads that compute: the calling thread, and helpers.
//!
//! | file | what |
//! |---|---|
//! | `pool` | own worker threads: spin, then park |
//! | `workers` | threads of the embedding program, and the check of their contract |
//! | `spawn`, `rayon` | such threads from any executor, and from rayon |
//! | `job` | one closure of a caller that helpers may run |
//! | `affinity` | keeps a woken worker off its caller's CPU |
//! | `sync` | types of std, or of loom |
//!
//! Work items are claimed from a counter, so any thread may run any item, and results must not
//! depend on the assignment. Knows nothing of the content of work items.
mod affinity;
mod job;
mod pool;
#[cfg(feature = "rayon")]
mod rayon;
mod spawn;
mod sync;
mod workers;

#[cfg(test)]
mod loom_tests;
#[cfg(test)]
mod tests;

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use kv_core::error::{DeviceError, DeviceErrorKind};
use kv_core::invariant::Invariant;

use self::pool::{Pool, Wake};
#[cfg(feature = "rayon")]
pub use self::rayon::RayonWorkers;
pub use self::spawn::SpawnWorkers;
use self::workers::GivenWorkers;
pub use self::workers::Workers;
use crate::layout::unsupported;

/// A source of parallelism.
#[derive(Debug, Clone)]
pub(crate) enum Threads {
    /// The calling thread alone.
    One,
    /// The calling thread and workers of a pool.
    Pool(Arc<Pool>, Wake),
    /// Threads of the embedding program.
    Given(GivenWorkers),
}

/// The most threads of one backend. Beyond it, starting them fails in ways that end the process:
/// each takes several mappings of memory, of which Linux allows 65,530.
pub(crate) const THREADS_MAX: usize = 4096;

/// The pool of all backends that set no number of threads: one worker fewer than cores, or none.
static SHARED: OnceLock<Option<Arc<Pool>>> = OnceLock::new();

impl Threads {
    /// Uses `count` threads, with a separate pool; or one per core, with the shared pool.
    pub(crate) fn new(count: Option<usize>, helper_affinity: bool) -> Result<Self, DeviceError> {
        let pool = match count {
            Some(0) => {
                return Err(unsupported("open cpu", "0 threads given, at least 1 is needed"));
            }
            Some(count) if count > THREADS_MAX => {
                return Err(unsupported(
                    "open cpu",
                    format!("{count} threads given, at most {THREADS_MAX} are possible"),
                ));
            }
            Some(count) => Self::start_pool(count)?,
            None => Self::shared_pool()?,
        };
        let wake = if helper_affinity { Wake::OffCaller } else { Wake::Anywhere };
        Ok(pool.map_or(Self::One, |pool| Self::Pool(pool, wake)))
    }

    /// Uses threads of the embedding program.
    pub(crate) fn given(workers: Arc<dyn Workers>) -> Result<Self, DeviceError> {
        GivenWorkers::new(workers).map(Self::Given)
    }

    /// Returns the shared pool, `None` on one core.
    fn shared_pool() -> Result<Option<Arc<Pool>>, DeviceError> {
        if let Some(pool) = SHARED.get() {
            return Ok(pool.clone());
        }
        let cores = std::thread::available_parallelism().map_or(1, NonZeroUsize::get);
        let pool = Self::start_pool(cores.min(THREADS_MAX))?;
        Ok(SHARED.get_or_init(|| pool).clone())
    }

    /// Starts a pool of one worker fewer than `threads`; `None` without workers.
    fn start_pool(threads: usize) -> Result<Option<Arc<Pool>>, DeviceError> {
        let workers = threads.saturating_sub(1);
        if workers == 0 {
            return Ok(None);
        }
        Pool::new(workers).map(|pool| Some(Arc::new(pool))).map_err(|error| {
            DeviceError::new(DeviceErrorKind::Driver, "open cpu").with_source(error)
        })
    }

    /// Parses the value of `KV_CPU_THREADS`; absent or empty means one per core.
    pub(crate) fn parse_count(setting: Option<&str>) -> Result<Option<usize>, DeviceError> {
        match setting.map(str::trim) {
            None | Some("") => Ok(None),
            Some(number) => match number.parse::<NonZeroUsize>() {
                Ok(count) if count.get() <= THREADS_MAX => Ok(Some(count.get())),
                _ => Err(unsupported(
                    "open cpu",
                    format!(
                        "thread count {number:?} in KV_CPU_THREADS, expected a number of at least \
                         1 and at most {THREADS_MAX}"
                    ),
                )),
            },
        }
    }

    /// Counts the threads that work in parallel.
    pub(crate) fn count(&self) -> usize {
        match self {
            Self::One => 1,
            Self::Pool(pool, _) => pool.workers() + 1,
            Self::Given(workers) => workers.count(),
        }
    }

    /// Runs work items `0..items`, each once, with one of `locals` for the time of the item.
    ///
    /// At most `locals.len()` run in parallel; if not `parallel`, all run on the calling thread.
    ///
    /// # Panics
    /// If `work` panics, once no thread runs it any more, or if threads of the embedding program
    /// break the contract of [`Workers`].
    pub(crate) fn run<T: Send>(
        &self,
        items: usize,
        parallel: bool,
        locals: &mut [T],
        work: impl Fn(&mut T, usize) + Sync,
    ) {
        let workers = if parallel { locals.len().min(items).min(self.count()) } else { 1 };
        if items == 0 {
            return;
        }
        let split = locals[..workers].split_first_mut();
        let (own, others) = split.invariant("the calling thread has memory of its own");
        let next = AtomicUsize::new(0);
        let claim_all = |local: &mut T| claim_all(&next, items, local, &work);
        match self {
            Self::Pool(pool, wake) if workers > 1 => {
                let helpers = others.len();
                let others = Mutex::new(others.iter_mut());
                let help = || {
                    let local = others.lock().unwrap_or_else(PoisonError::into_inner).next();
                    if let Some(local) = local {
                        claim_all(local);
                    }
                };
                pool.run(helpers, *wake, || claim_all(own), &help);
            }
            Self::Given(given) if workers > 1 => {
                given.run(&mut locals[..workers], claim_all);
            }
            _ => (0..items).for_each(|item| work(own, item)),
        }
    }
}

/// Claims and runs work items until none is left.
fn claim_all<T>(next: &AtomicUsize, items: usize, local: &mut T, work: &impl Fn(&mut T, usize)) {
    loop {
        let item = next.fetch_add(1, Ordering::Relaxed);
        if item >= items {
            return;
        }
        work(local, item);
    }
}
