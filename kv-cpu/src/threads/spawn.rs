//! Workers on threads of any executor, which has only to start `'static` closures.
use std::fmt;

use super::job::Job;
use super::sync::atomic::{AtomicUsize, Ordering};
use super::sync::{Arc, Mutex, lock};
use super::workers::Workers;

type Spawn = dyn Fn(Box<dyn FnOnce() + Send>) + Send + Sync;

/// Runs operations on the calling thread, and on threads that a function of the embedding program
/// starts closures on.
///
/// The calling thread takes part, and never waits for a closure that has not begun: it makes the
/// remaining calls itself. So operations end also when all threads of the executor are busy, and
/// when it drops closures without running them; and an operation may be called on a thread of the
/// executor. Closures that begin late help with the operation that is under way then, or return at
/// once. No more than `count - 1` of them are queued at a time.
///
/// # Examples
///
/// Threads of an executor; for tokio the function is
/// `move |help| drop(handle.spawn_blocking(help))`.
///
/// ```
/// use std::sync::{Arc, mpsc};
///
/// use kv::cpu::{CpuBackend, CpuOptions, SpawnWorkers};
///
/// let (send, receive) = mpsc::channel::<Box<dyn FnOnce() + Send>>();
/// std::thread::spawn(move || receive.into_iter().for_each(|closure| closure()));
///
/// let workers = SpawnWorkers::new(2, move |help| _ = send.send(help));
/// let backend = CpuBackend::open(CpuOptions::default().with_workers(Arc::new(workers)))?;
/// # drop(backend);
/// # Ok::<_, kv::error::DeviceError>(())
/// ```
pub struct SpawnWorkers {
    count: usize,
    spawn: Box<Spawn>,
    queue: Arc<Mutex<Queued>>,
}

/// State that a closure reads when it begins.
#[derive(Debug)]
struct Queued {
    /// Closures that were handed to the executor and have not begun.
    closures: usize,
    /// The latest job.
    job: Option<Arc<Job>>,
}

impl fmt::Debug for SpawnWorkers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SpawnWorkers").field("count", &self.count).finish_non_exhaustive()
    }
}

impl SpawnWorkers {
    /// Makes `count` workers: the calling thread, and `count - 1` closures given to `spawn`, which
    /// starts them on other threads and returns.
    ///
    /// A closure neither unwinds nor blocks, and ends with the operation it helps with.
    pub fn new(
        count: usize,
        spawn: impl Fn(Box<dyn FnOnce() + Send>) + Send + Sync + 'static,
    ) -> Self {
        let queue = Arc::new(Mutex::new(Queued { closures: 0, job: None }));
        Self { count, spawn: Box::new(spawn), queue }
    }

    /// Hands closures to the executor until `helpers` of them are queued.
    fn spawn(&self, helpers: usize) {
        for _ in 0..helpers {
            let Some(ticket) = Ticket::new(&self.queue, helpers) else {
                return;
            };
            (self.spawn)(Box::new(move || {
                if let Some(job) = ticket.begin() {
                    job.help();
                }
            }));
        }
    }
}

impl Workers for SpawnWorkers {
    fn count(&self) -> usize {
        self.count
    }

    fn run(&self, workers: usize, task: &(dyn Fn(usize) + Sync)) {
        let next = AtomicUsize::new(0);
        let call_next = || {
            let worker = next.fetch_add(1, Ordering::Relaxed);
            let is_left = worker < workers;
            if is_left {
                task(worker);
            }
            is_left
        };
        let help = || _ = call_next();
        let helpers = workers.saturating_sub(1);
        Job::open(&help, helpers, |job| {
            lock(&self.queue).job = Some(Arc::clone(job));
            self.spawn(helpers);
            while call_next() {}
        });
    }
}

/// The place of one queued closure, released when the closure begins or is dropped.
struct Ticket {
    queue: Arc<Mutex<Queued>>,
    is_queued: bool,
}

impl Ticket {
    /// Takes a place if fewer than `max` are taken.
    fn new(queue: &Arc<Mutex<Queued>>, max: usize) -> Option<Self> {
        let mut queued = lock(queue);
        if queued.closures >= max {
            return None;
        }
        queued.closures += 1;
        Some(Self { queue: Arc::clone(queue), is_queued: true })
    }

    /// Gives the place up, and takes the latest job in the same moment: a caller that counts this
    /// closure as queued has published its job.
    fn begin(mut self) -> Option<Arc<Job>> {
        self.is_queued = false;
        let mut queued = lock(&self.queue);
        queued.closures -= 1;
        queued.job.clone()
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if self.is_queued {
            let mut queued = lock(&self.queue);
            queued.closures -= 1;
        }
    }
}
