//! Workers on the threads of a rayon pool.
use std::sync::Arc;

use ::rayon::ThreadPool;

use super::spawn::SpawnWorkers;
use super::workers::Workers;

/// Runs operations on the calling thread and on threads of a rayon pool, with the feature `rayon`.
///
/// An operation may be called on any thread, one of the pool's included. The calling thread is one
/// of the workers. It never waits for a thread of the pool that has not begun to help, so on a busy
/// pool an operation takes at most as long as on one thread. While it waits for threads that have
/// begun it runs no other job of the pool, as a thread inside `rayon::scope` does: a job that uses
/// the same buffers would wait for the operation that it interrupts.
///
/// # Examples
///
/// ```
/// use std::sync::Arc;
///
/// use kv::backend::Backend;
/// use kv::cpu::{CpuBackend, CpuOptions, RayonWorkers};
///
/// let pool = Arc::new(rayon::ThreadPoolBuilder::new().num_threads(2).build()?);
/// let workers = Arc::new(RayonWorkers::new(pool));
/// let backend = CpuBackend::open(CpuOptions::default().with_workers(workers))?;
/// assert_eq!(backend.capabilities().workers, 2);
/// # Ok::<_, Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct RayonWorkers(SpawnWorkers);

impl RayonWorkers {
    /// Uses a pool: as many workers as it has threads.
    pub fn new(pool: Arc<ThreadPool>) -> Self {
        let count = pool.current_num_threads();
        Self(SpawnWorkers::new(count, move |help| pool.spawn(help)))
    }

    /// Uses rayon's global pool, which this starts if nothing has used it. An operation called on a
    /// thread of another pool uses that one, as `rayon::spawn` does.
    pub fn global() -> Self {
        Self(SpawnWorkers::new(::rayon::current_num_threads(), ::rayon::spawn))
    }
}

impl Workers for RayonWorkers {
    fn count(&self) -> usize {
        self.0.count()
    }
    fn run(&self, workers: usize, task: &(dyn Fn(usize) + Sync)) {
        self.0.run(workers, task);
    }
}
