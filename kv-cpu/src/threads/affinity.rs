//! CPU affinity of a worker that is woken, an option that is off by default.
//!
//! Linux may run a woken thread on the CPU of the thread that woke it though others are idle: seen
//! in one virtual machine, whose idle CPUs probably look busy to the scheduler. There the worker
//! waits until its caller's work is done. With the option it wakes on any CPU but its caller's. On
//! other systems nothing is done.
#[cfg(target_os = "linux")]
use rustix::thread::{CpuSet, Pid, gettid, sched_getaffinity, sched_getcpu, sched_setaffinity};

/// A thread, and the CPUs that it may run on.
#[derive(Debug)]
pub(super) struct Affinity {
    #[cfg(target_os = "linux")]
    thread: Pid,
    #[cfg(target_os = "linux")]
    cpus: CpuSet,
}

#[cfg(target_os = "linux")]
impl Affinity {
    /// Reads the calling thread's affinity; `None` if it is one CPU, or more than a set holds.
    pub(super) fn of_current_thread() -> Option<Self> {
        let cpus = sched_getaffinity(None).ok().filter(|cpus| cpus.count() > 1)?;
        Some(Self { thread: gettid(), cpus })
    }

    /// Takes the CPU that the calling thread runs on out of the thread's affinity. A refusal of the
    /// system changes nothing.
    pub(super) fn avoid_current_cpu(&self) {
        let (mut others, own) = (self.cpus, sched_getcpu());
        if own < CpuSet::MAX_CPU {
            others.unset(own);
            let _refused = sched_setaffinity(Some(self.thread), &others);
        }
    }

    /// Gives the thread back the CPUs it had at first.
    pub(super) fn restore(&self) {
        let _refused = sched_setaffinity(Some(self.thread), &self.cpus);
    }
}

#[cfg(not(target_os = "linux"))]
impl Affinity {
    pub(super) fn of_current_thread() -> Option<Self> {
        None
    }
    pub(super) fn avoid_current_cpu(&self) {}
    pub(super) fn restore(&self) {}
}

#[cfg(all(test, not(loom), target_os = "linux"))]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use super::*;

    #[test]
    fn a_thread_avoids_the_callers_cpu_until_it_is_restored() {
        let (send, affinity) = mpsc::channel();
        let (stop, wait) = mpsc::channel::<()>();
        // At its end the closure drops `stop`, which ends the thread.
        thread::scope(move |scope| {
            scope.spawn(move || {
                send.send(Affinity::of_current_thread()).unwrap();
                wait.recv().unwrap_err();
            });
            let all = sched_getaffinity(None).unwrap();
            let affinity = affinity.recv().unwrap();
            assert_eq!(affinity.is_some(), all.count() > 1);
            let (Some(affinity), _held) = (affinity, stop) else { return };
            let cpus = || sched_getaffinity(Some(affinity.thread)).unwrap();
            // On one CPU, so that it is known.
            let (mut one, own) = (CpuSet::new(), sched_getcpu());
            one.set(own);
            sched_setaffinity(None, &one).unwrap();
            affinity.avoid_current_cpu();
            assert!(!cpus().is_set(own) && cpus().count() == all.count() - 1);
            affinity.restore();
            assert_eq!(cpus(), all);
        });
    }
}
