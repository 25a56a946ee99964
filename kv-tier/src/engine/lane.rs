//! The threads of one store.
use std::collections::VecDeque;
use std::fmt;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

type Job = Box<dyn FnOnce() + Send>;

/// Threads that run jobs in the order of their arrival, urgent ones first.
///
/// Half of the threads, at least one, take other than urgent jobs, so that a read finds a thread
/// while writes are slow. A job that runs past its limit hangs; [`Self::sweep`] finds it. Dropping
/// the lane discards jobs that have not begun.
pub(super) struct Lane {
    shared: Arc<Shared>,
}

struct Shared {
    queue: Mutex<Queue>,
    /// Jobs that wait or run.
    busy: AtomicUsize,
    /// A job came, or the lane closes.
    wake: Condvar,
    /// A job ended.
    ended: Condvar,
}

#[derive(Default)]
struct Queue {
    urgent: VecDeque<Waiting>,
    other: VecDeque<Waiting>,
    running: Vec<Running>,
    /// Number of the next job to run.
    next: u64,
    threads: usize,
    other_max: usize,
    closed_at: Option<Instant>,
}

struct Waiting {
    job: Job,
    /// Longest time that the job may run.
    limit: Duration,
}

#[derive(Debug)]
struct Running {
    number: u64,
    is_urgent: bool,
    until: Option<Instant>,
    /// Whether a sweep has counted it as late.
    is_counted: bool,
}

/// Jobs of a lane that hang.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Hung {
    /// Urgent jobs, and others, whose limit passed since the sweep before.
    pub(super) urgent: usize,
    pub(super) other: usize,
    /// No thread is left for urgent jobs, or for others.
    pub(super) blocks_urgent: bool,
    pub(super) blocks_other: bool,
    /// Jobs that were discarded because no thread was left for them, without the urgent ones.
    pub(super) discarded: usize,
}

impl Lane {
    /// Starts the threads.
    pub(super) fn new(name: &str, threads: usize) -> io::Result<Self> {
        let threads = threads.max(1);
        let other_max = threads.div_euclid(2).max(1);
        let queue = Mutex::new(Queue { threads, other_max, ..Queue::default() });
        let (wake, ended) = (Condvar::new(), Condvar::new());
        let shared = Arc::new(Shared { queue, busy: AtomicUsize::new(0), wake, ended });
        let lane = Self { shared };
        for _ in 0..threads {
            let shared = Arc::clone(&lane.shared);
            thread::Builder::new().name(name.to_owned()).spawn(move || shared.run())?;
        }
        Ok(lane)
    }

    /// Appends a job with a waiting caller. It hangs if it runs longer than `limit`.
    pub(super) fn push_urgent(&self, limit: Duration, job: impl FnOnce() + Send + 'static) {
        self.shared.busy.fetch_add(1, Ordering::Relaxed);
        self.shared.lock().urgent.push_back(Waiting { job: Box::new(job), limit });
        self.shared.wake.notify_one();
    }
    /// Appends a job. It hangs if it runs longer than `limit`.
    pub(super) fn push(&self, limit: Duration, job: impl FnOnce() + Send + 'static) {
        self.shared.busy.fetch_add(1, Ordering::Relaxed);
        self.shared.lock().other.push_back(Waiting { job: Box::new(job), limit });
        // Any thread may be one that has to leave this job to others.
        self.shared.wake.notify_all();
    }

    /// Looks for jobs that hang. If no thread is left for the jobs that wait, they are dropped
    /// before the call returns.
    pub(super) fn sweep(&self) -> Hung {
        if self.shared.busy.load(Ordering::Relaxed) == 0 {
            return Hung::default();
        }
        let mut queue = self.shared.lock();
        let (hung, discarded) = queue.sweep(Instant::now());
        drop(queue);
        self.shared.busy.fetch_sub(discarded.len(), Ordering::Relaxed);
        hung
    }

    /// Discards all jobs that have not begun; no job begins any more.
    pub(super) fn close(&self) {
        let mut queue = self.shared.lock();
        queue.closed_at.get_or_insert_with(Instant::now);
        let discarded = (std::mem::take(&mut queue.urgent), std::mem::take(&mut queue.other));
        self.shared.wake.notify_all();
        drop(queue);
        drop(discarded);
    }
}

impl Drop for Lane {
    /// Lets running jobs end, for a short time after the lane was closed: a thread that hangs in a
    /// store is left behind.
    fn drop(&mut self) {
        const PATIENCE: Duration = Duration::from_millis(250);
        self.close();
        let mut queue = self.shared.lock();
        while !queue.running.is_empty() {
            let waited = queue.closed_at.map_or(PATIENCE, |at| at.elapsed());
            let Some(left) = PATIENCE.checked_sub(waited) else { break };
            let waited = self.shared.ended.wait_timeout(queue, left);
            queue = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) {
        let mut queue = self.lock();
        loop {
            let Some((job, number)) = queue.next() else {
                if queue.closed_at.is_some() {
                    return;
                }
                queue = self.wake.wait(queue).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            drop(queue);
            job();
            self.busy.fetch_sub(1, Ordering::Relaxed);
            queue = self.lock();
            queue.running.retain(|running| running.number != number);
            self.ended.notify_all();
        }
    }
}

impl Queue {
    /// Takes the next job, and returns the number that it runs under.
    fn next(&mut self) -> Option<(Job, u64)> {
        let others = self.running.iter().filter(|running| !running.is_urgent).count();
        let (Waiting { job, limit }, is_urgent) = match self.urgent.pop_front() {
            Some(job) => (job, true),
            None if others < self.other_max => (self.other.pop_front()?, false),
            None => return None,
        };
        let number = self.next;
        self.next = number + 1;
        let until = Instant::now().checked_add(limit);
        self.running.push(Running { number, is_urgent, until, is_counted: false });
        Some((job, number))
    }

    /// Finds jobs that hang; returns them and the jobs that no thread is left for.
    fn sweep(&mut self, now: Instant) -> (Hung, Vec<Waiting>) {
        let mut hung = Hung::default();
        let (mut late, mut late_other) = (0_usize, 0_usize);
        let is_late = |running: &&mut Running| running.until.is_some_and(|until| now >= until);
        for running in self.running.iter_mut().filter(is_late) {
            late += 1;
            let new = usize::from(!std::mem::replace(&mut running.is_counted, true));
            if running.is_urgent {
                hung.urgent += new;
            } else {
                late_other += 1;
                hung.other += new;
            }
        }
        hung.blocks_urgent = late >= self.threads;
        hung.blocks_other = hung.blocks_urgent || late_other >= self.other_max;
        let mut discarded = Vec::new();
        if hung.blocks_other {
            hung.discarded = self.other.len();
            discarded.extend(self.other.drain(..));
        }
        if hung.blocks_urgent {
            discarded.extend(self.urgent.drain(..));
        }
        (hung, discarded)
    }
}

impl fmt::Debug for Lane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let queue = self.shared.lock();
        f.debug_struct("Lane")
            .field("waiting", &(queue.urgent.len() + queue.other.len()))
            .field("running", &queue.running.len())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    const LONG: Duration = Duration::from_mins(1);

    #[test]
    fn urgent_jobs_pass_others() {
        let lane = Lane::new("test", 1).unwrap();
        let (send, receive) = mpsc::channel();
        let (go, wait) = mpsc::channel::<()>();
        // The one thread is busy until all jobs are there.
        lane.push(LONG, move || wait.recv().unwrap());
        for (name, is_urgent) in [("a", false), ("b", true), ("c", false), ("d", true)] {
            let send = send.clone();
            let job = move || send.send(name).unwrap();
            if is_urgent { lane.push_urgent(LONG, job) } else { lane.push(LONG, job) }
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
            lane.push(LONG, move || assert!(wait.recv().is_err()));
            hanging.push(go);
        }
        lane.push_urgent(LONG, move || send.send(7).unwrap());
        assert_eq!(receive.recv_timeout(Duration::from_secs(10)), Ok(7));
        drop(hanging);
    }

    #[test]
    fn a_dropped_lane_discards_what_has_not_begun_and_leaves_what_hangs() {
        let lane = Lane::new("test", 1).unwrap();
        let (began, runs) = mpsc::channel();
        let (go, wait) = mpsc::channel::<()>();
        lane.push(LONG, move || {
            began.send(()).unwrap();
            assert!(wait.recv().is_err());
        });
        runs.recv().unwrap();
        let (send, receive) = mpsc::channel::<()>();
        lane.push(LONG, move || send.send(()).unwrap());
        let start = Instant::now();
        drop(lane);
        assert!(start.elapsed() < Duration::from_secs(5));
        assert_eq!(receive.try_recv(), Err(mpsc::TryRecvError::Disconnected));
        drop(go);
    }

    #[test]
    fn jobs_that_no_thread_is_left_for_are_discarded() {
        struct Dropped(mpsc::Sender<&'static str>);
        impl Drop for Dropped {
            fn drop(&mut self) {
                self.0.send("dropped").unwrap();
            }
        }
        let lane = Lane::new("test", 2).unwrap();
        let (go, wait) = mpsc::channel::<()>();
        let wait = Arc::new(Mutex::new(wait));
        let (send, receive) = mpsc::channel();
        let hang = |began: mpsc::Sender<&'static str>| {
            let wait = Arc::clone(&wait);
            move || {
                began.send("began").unwrap();
                assert!(wait.lock().unwrap().recv().is_err());
            }
        };
        let waiting = |send: &mpsc::Sender<&'static str>| {
            let dropped = Dropped(send.clone());
            move || drop(dropped)
        };
        lane.push(Duration::ZERO, hang(send.clone()));
        assert_eq!(receive.recv(), Ok("began"));
        lane.push(LONG, waiting(&send));
        let expected = Hung { other: 1, blocks_other: true, discarded: 1, ..Hung::default() };
        assert_eq!(lane.sweep(), expected);
        assert_eq!(receive.try_recv(), Ok("dropped"));
        lane.push_urgent(Duration::ZERO, hang(send.clone()));
        assert_eq!(receive.recv(), Ok("began"));
        lane.push_urgent(LONG, waiting(&send));
        let both = Hung { urgent: 1, blocks_urgent: true, blocks_other: true, ..Hung::default() };
        assert_eq!(lane.sweep(), both);
        assert_eq!(receive.try_recv(), Ok("dropped"));
        assert_eq!(lane.sweep(), Hung { urgent: 0, ..both }, "each job is counted once");
        drop(go);
    }
}
