//! Worker threads that help callers with their jobs: they spin for the next job, then park.
//!
//! A parked thread takes 20 us and more to wake, as long as a whole short job. So a caller never
//! waits for a worker that has not begun, and a worker that has helped spins for the next job
//! before it parks ([`IDLE_SPIN`]). A spinning worker yields its core and parks as soon as another
//! thread took the core, so that it delays no other work.
//!
//! Knows nothing of work items: a worker runs the caller's closure once.
use std::io;
use std::sync::{OnceLock, PoisonError};
use std::time::Duration;

use super::affinity::Affinity;
use super::job::Job;
use super::sync::atomic::{AtomicBool, AtomicU8, AtomicUsize, Ordering, fence};
use super::sync::thread::{self, JoinHandle};
use super::sync::{Arc, Instant, RwLock, SpinLimit, spin};

/// Longest time that a worker spins after it has helped, for jobs that follow each other at once,
/// such as a write and attention.
const IDLE_SPIN: SpinLimit =
    SpinLimit { total: Duration::from_micros(200), yield_max: Duration::from_micros(20) };

/// A set of worker threads. Dropping it ends them.
#[derive(Debug)]
pub(crate) struct Pool {
    threads: Vec<JoinHandle<()>>,
    shared: Arc<Shared>,
}

/// State that callers and workers share.
#[derive(Debug)]
struct Shared {
    /// Number of the latest job, which workers watch.
    latest: AtomicUsize,
    /// The latest job, and its number.
    job: RwLock<(usize, Option<Arc<Job>>)>,
    workers: Box<[Worker]>,
    is_shut_down: AtomicBool,
}

/// State of a worker that callers read.
#[derive(Debug)]
struct Worker {
    /// One of [`state`].
    state: AtomicU8,
    affinity: OnceLock<Option<Affinity>>,
    /// Set when a caller has narrowed the affinity.
    is_moved: AtomicBool,
}

/// States of a worker.
mod state {
    pub(super) const BUSY: u8 = 0;
    pub(super) const SPINNING: u8 = 1;
    pub(super) const PARKED: u8 = 2;
}

/// The CPU on which a parked worker wakes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wake {
    /// The scheduler picks any CPU.
    Anywhere,
    /// The caller's CPU is taken out of the worker's affinity until it parks again.
    OffCaller,
}

impl Pool {
    /// Starts a pool of `workers` threads.
    pub(crate) fn new(workers: usize) -> io::Result<Self> {
        let worker = || Worker {
            state: AtomicU8::new(state::BUSY),
            affinity: OnceLock::new(),
            is_moved: AtomicBool::new(false),
        };
        let shared = Arc::new(Shared {
            latest: AtomicUsize::new(0),
            job: RwLock::new((0, None)),
            workers: std::iter::repeat_with(worker).take(workers).collect(),
            is_shut_down: AtomicBool::new(false),
        });
        let mut pool = Self { threads: Vec::new(), shared: Arc::clone(&shared) };
        for index in 0..workers {
            let shared = Arc::clone(&shared);
            let thread = thread::Builder::new().name(format!("kv-cpu-{index}"));
            pool.threads.push(thread.spawn(move || shared.work(index))?);
        }
        Ok(pool)
    }

    /// Counts the worker threads.
    pub(crate) fn workers(&self) -> usize {
        self.threads.len()
    }

    /// Runs `own` on the calling thread and `help` on at most `helpers_max` workers, once each, as
    /// far as they begin before `own` ends. Returns when all of them have ended.
    ///
    /// # Panics
    /// If a helper or `help` panics, once all have ended.
    pub(crate) fn run<H: Fn() + Sync>(
        &self,
        helpers_max: usize,
        wake: Wake,
        own: impl FnOnce(),
        help: &H,
    ) {
        Job::open(help, helpers_max, |job| {
            self.shared.publish(Arc::clone(job));
            self.wake(helpers_max, wake);
            own();
        });
    }

    /// Unparks workers until `helpers` of them are awake and idle.
    fn wake(&self, mut helpers: usize, wake: Wake) {
        for (thread, worker) in self.threads.iter().zip(&self.shared.workers) {
            if helpers == 0 {
                return;
            }
            match worker.state.load(Ordering::Relaxed) {
                state::BUSY => continue,
                state::PARKED => {
                    if wake == Wake::OffCaller {
                        worker.move_off_caller();
                    }
                    thread.thread().unpark();
                }
                _ => {}
            }
            helpers -= 1;
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.is_shut_down.store(true, Ordering::Release);
        self.shared.latest.fetch_add(1, Ordering::Release);
        for thread in self.threads.drain(..) {
            thread.thread().unpark();
            // A worker never unwinds: a job keeps panics for its caller.
            let _ended = thread.join();
        }
    }
}

impl Shared {
    /// Makes a job the latest one. The caller's later reads of workers' states are ordered against
    /// [`Self::wait`].
    fn publish(&self, job: Arc<Job>) {
        let mut latest = self.job.write().unwrap_or_else(PoisonError::into_inner);
        let number = self.latest.load(Ordering::Relaxed).wrapping_add(1);
        *latest = (number, Some(job));
        self.latest.store(number, Ordering::Release);
        drop(latest);
        fence(Ordering::SeqCst);
    }

    /// Runs a worker thread: helps with jobs until the pool is dropped.
    fn work(&self, index: usize) {
        let worker = &self.workers[index];
        worker.affinity.get_or_init(Affinity::of_current_thread);
        let (mut seen, mut since) = (0, Instant::now());
        loop {
            self.wait(worker, seen, since);
            if self.is_shut_down.load(Ordering::Acquire) {
                return;
            }
            let latest = self.job.read().unwrap_or_else(PoisonError::into_inner);
            let (number, job) = (latest.0, latest.1.clone());
            drop(latest);
            seen = number;
            worker.state.store(state::BUSY, Ordering::Relaxed);
            if job.is_some_and(|job| job.help()) {
                since = Instant::now();
            }
        }
    }

    /// Waits for a job after number `seen`: spins, for a time that starts at `since`, then parks.
    fn wait(&self, worker: &Worker, seen: usize, since: Instant) {
        let has_come = || self.latest.load(Ordering::Acquire) != seen;
        worker.state.store(state::SPINNING, Ordering::Relaxed);
        if spin(since, IDLE_SPIN, has_come) {
            return;
        }
        worker.restore_affinity();
        worker.state.store(state::PARKED, Ordering::Relaxed);
        // A caller stores the number of its job, then loads this state; a worker stores its state,
        // then loads the number. With a fence between each pair one of both sees the other's store.
        fence(Ordering::SeqCst);
        while !has_come() {
            thread::park();
        }
    }
}

impl Worker {
    fn affinity(&self) -> Option<&Affinity> {
        self.affinity.get().and_then(Option::as_ref)
    }

    /// Takes the CPU of the calling thread out of the worker's affinity.
    fn move_off_caller(&self) {
        if let Some(affinity) = self.affinity() {
            affinity.avoid_current_cpu();
            self.is_moved.store(true, Ordering::Relaxed);
        }
    }

    /// Undoes [`Self::move_off_caller`].
    fn restore_affinity(&self) {
        if self.is_moved.swap(false, Ordering::Relaxed)
            && let Some(affinity) = self.affinity()
        {
            affinity.restore();
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::sync::Barrier;

    use super::*;

    /// Waits until all workers are parked. Returns whether they are before long.
    fn all_park(pool: &Pool) -> bool {
        let since = Instant::now();
        let is_parked = |worker: &Worker| worker.state.load(Ordering::SeqCst) == state::PARKED;
        while !pool.shared.workers.iter().all(is_parked) {
            if since.elapsed() > Duration::from_mins(1) {
                return false;
            }
            thread::yield_now();
        }
        true
    }

    #[test]
    fn the_requested_number_of_workers_helps_parked_or_spinning() {
        let pool = Pool::new(3).unwrap();
        for (parked, wake) in
            [(false, Wake::Anywhere), (true, Wake::Anywhere), (true, Wake::OffCaller)]
        {
            for helpers in 0..=3 {
                assert!(!parked || all_park(&pool), "workers spin for a while only");
                let begun = AtomicUsize::new(0);
                let all = Barrier::new(helpers + 1);
                let help = || {
                    begun.fetch_add(1, Ordering::SeqCst);
                    all.wait();
                };
                pool.run(helpers, wake, || _ = all.wait(), &help);
                assert_eq!(begun.into_inner(), helpers);
            }
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_worker_is_moved_only_on_request_and_restored_before_it_parks() {
        use rustix::thread::sched_getaffinity;
        let pool = Pool::new(1).unwrap();
        let all = sched_getaffinity(None).unwrap();
        for wake in [Wake::Anywhere, Wake::OffCaller, Wake::Anywhere] {
            assert!(all_park(&pool));
            let both = Barrier::new(2);
            let cpus = std::sync::Mutex::new(None);
            let help = || {
                *cpus.lock().unwrap() = Some(sched_getaffinity(None).unwrap());
                both.wait();
            };
            pool.run(1, wake, || _ = both.wait(), &help);
            let count = cpus.into_inner().unwrap().unwrap().count();
            let fewer = u32::from(wake == Wake::OffCaller && all.count() > 1);
            assert_eq!(count, all.count() - fewer, "{wake:?}");
        }
    }

    #[test]
    fn no_worker_enters_a_closed_job() {
        let pool = Pool::new(1).unwrap();
        for round in 0..2000 {
            let is_over = AtomicBool::new(false);
            let (mut begun, late) = (0, AtomicUsize::new(0));
            let help = || {
                late.fetch_add(usize::from(is_over.load(Ordering::SeqCst)), Ordering::SeqCst);
            };
            pool.run(1, Wake::Anywhere, || begun += 1, &help);
            is_over.store(true, Ordering::SeqCst);
            if round % 100 == 0 {
                assert!(all_park(&pool), "a job leaves no worker waiting");
            }
            assert_eq!((begun, late.into_inner()), (1, 0));
        }
    }

    #[test]
    fn callers_that_share_a_pool_each_get_their_work_done() {
        let pool = Pool::new(2).unwrap();
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..500 {
                        let left = AtomicUsize::new(50);
                        let work = || {
                            let take = |left: usize| left.checked_sub(1);
                            let taken = Ordering::SeqCst;
                            while left.fetch_update(taken, taken, take).is_ok() {}
                        };
                        pool.run(2, Wake::Anywhere, work, &work);
                        assert_eq!(left.into_inner(), 0);
                    }
                });
            }
        });
    }

    #[test]
    fn panics_reach_the_caller_and_workers_survive() {
        let pool = Pool::new(1).unwrap();
        let both = Barrier::new(2);
        let help = || {
            both.wait();
            panic!("in a worker");
        };
        let run = || pool.run(1, Wake::Anywhere, || _ = both.wait(), &help);
        let panic = catch_unwind(AssertUnwindSafe(run)).unwrap_err();
        assert_eq!(panic.downcast_ref(), Some(&"in a worker"));

        let ended = AtomicBool::new(false);
        let help = || {
            both.wait();
            thread::sleep(Duration::from_millis(20));
            ended.store(true, Ordering::SeqCst);
        };
        let own = || {
            both.wait();
            panic!("in the caller");
        };
        let run = || pool.run(1, Wake::Anywhere, own, &help);
        catch_unwind(AssertUnwindSafe(run)).unwrap_err();
        assert!(ended.into_inner(), "the worker was waited for, though the caller panicked");
    }
}
