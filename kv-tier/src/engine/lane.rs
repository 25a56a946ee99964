//! The threads of one store.
use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

type Job = Box<dyn FnOnce() + Send>;

/// Threads that run jobs in the order of their arrival, urgent ones first.
///
/// Half of the threads, at least one, take other than urgent jobs, so that a read finds a thread
/// while writes are slow. Dropping the lane discards jobs that have not begun.
pub(super) struct Lane {
    shared: Arc<Shared>,
}

struct Shared {
    queue: Mutex<Queue>,
    /// A job came, or the lane closes.
    wake: Condvar,
    /// A job ended.
    ended: Condvar,
}

#[derive(Default)]
struct Queue {
    urgent: VecDeque<Job>,
    other: VecDeque<Job>,
    running: usize,
    running_other: usize,
    other_max: usize,
    is_closed: bool,
}

impl Lane {
    /// Starts the threads.
    pub(super) fn new(name: &str, threads: usize) -> io::Result<Self> {
        let threads = threads.max(1);
        let other_max = threads.div_euclid(2).max(1);
        let queue = Mutex::new(Queue { other_max, ..Queue::default() });
        let shared = Arc::new(Shared { queue, wake: Condvar::new(), ended: Condvar::new() });
        let lane = Self { shared };
        for _ in 0..threads {
            let shared = Arc::clone(&lane.shared);
            thread::Builder::new().name(name.to_owned()).spawn(move || shared.run())?;
        }
        Ok(lane)
    }

    /// Appends a job that somebody waits for.
    pub(super) fn push_urgent(&self, job: impl FnOnce() + Send + 'static) {
        self.shared.lock().urgent.push_back(Box::new(job));
        self.shared.wake.notify_one();
    }
    /// Appends a job.
    pub(super) fn push(&self, job: impl FnOnce() + Send + 'static) {
        self.shared.lock().other.push_back(Box::new(job));
        // Any thread may be one that has to leave this job to others.
        self.shared.wake.notify_all();
    }
}

impl Drop for Lane {
    /// Lets running jobs end, for a short time: a thread that hangs in a store is left behind.
    fn drop(&mut self) {
        const PATIENCE: Duration = Duration::from_millis(250);
        let start = Instant::now();
        let mut queue = self.shared.lock();
        queue.is_closed = true;
        let discarded = (std::mem::take(&mut queue.urgent), std::mem::take(&mut queue.other));
        self.shared.wake.notify_all();
        while queue.running > 0 {
            let Some(left) = PATIENCE.checked_sub(start.elapsed()) else { break };
            let waited = self.shared.ended.wait_timeout(queue, left);
            queue = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(queue);
        drop(discarded);
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        let mut queue = self.lock();
        loop {
            let Some((job, is_urgent)) = queue.next() else {
                if queue.is_closed {
                    return;
                }
                queue = self.wake.wait(queue).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            drop(queue);
            job();
            queue = self.lock();
            queue.running = queue.running.saturating_sub(1);
            if !is_urgent {
                queue.running_other = queue.running_other.saturating_sub(1);
            }
            self.ended.notify_all();
        }
    }
}

impl Queue {
    /// Takes the next job, and says whether it is urgent.
    fn next(&mut self) -> Option<(Job, bool)> {
        let (job, is_urgent) = match self.urgent.pop_front() {
            Some(job) => (job, true),
            None if self.running_other < self.other_max => (self.other.pop_front()?, false),
            None => return None,
        };
        self.running = self.running.saturating_add(1);
        if !is_urgent {
            self.running_other = self.running_other.saturating_add(1);
        }
        Some((job, is_urgent))
    }
}

impl fmt::Debug for Lane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let queue = self.shared.lock();
        f.debug_struct("Lane")
            .field("waiting", &queue.urgent.len().saturating_add(queue.other.len()))
            .field("running", &queue.running)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn urgent_jobs_pass_others() {
        let lane = Lane::new("test", 1).unwrap();
        let (send, receive) = mpsc::channel();
        let (go, wait) = mpsc::channel::<()>();
        // The one thread is busy until all jobs are there.
        lane.push(move || wait.recv().unwrap());
        for (name, is_urgent) in [("a", false), ("b", true), ("c", false), ("d", true)] {
            let send = send.clone();
            let job = move || send.send(name).unwrap();
            if is_urgent { lane.push_urgent(job) } else { lane.push(job) }
        }
        go.send(()).unwrap();
        let order: Vec<_> = (0..4).map(|_| receive.recv().unwrap()).collect();
        assert_eq!(order, ["b", "d", "a", "c"]);
    }

    #[test]
    fn reads_find_a_thread_while_writes_hang() {
        let lane = Lane::new("test", 2).unwrap();
        let (send, receive) = mpsc::channel();
        let mut hanging = Vec::new();
        for _ in 0..3 {
            let (go, wait) = mpsc::channel::<()>();
            lane.push(move || assert!(wait.recv().is_err()));
            hanging.push(go);
        }
        lane.push_urgent(move || send.send(7).unwrap());
        assert_eq!(receive.recv_timeout(Duration::from_secs(10)), Ok(7));
        drop(hanging);
    }

    #[test]
    fn a_dropped_lane_discards_what_has_not_begun_and_leaves_what_hangs() {
        let lane = Lane::new("test", 1).unwrap();
        let (began, runs) = mpsc::channel();
        let (go, wait) = mpsc::channel::<()>();
        lane.push(move || {
            began.send(()).unwrap();
            assert!(wait.recv().is_err());
        });
        runs.recv().unwrap();
        let (send, receive) = mpsc::channel::<()>();
        lane.push(move || send.send(()).unwrap());
        let start = Instant::now();
        drop(lane);
        assert!(start.elapsed() < Duration::from_secs(5));
        assert_eq!(receive.try_recv(), Err(mpsc::TryRecvError::Disconnected));
        drop(go);
    }
}
