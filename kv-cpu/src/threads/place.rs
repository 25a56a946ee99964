//! On which CPU a helper wakes.
//!
//! Linux may put a thread that wakes onto the CPU of whoever woke it though others are free. That
//! was seen in a virtual machine, where a sleeping CPU probably looks taken to it. There the helper
//! waits for its caller, who wants help. So it wakes on any CPU but its caller's. On other systems
//! nothing is done.
#[cfg(target_os = "linux")]
use rustix::thread::{CpuSet, Pid, gettid, sched_getaffinity, sched_getcpu, sched_setaffinity};

/// A thread that may be told where to wake.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    #[cfg(target_os = "linux")]
    thread: Pid,
    /// Where it may run.
    #[cfg(target_os = "linux")]
    cpus: CpuSet,
}

#[cfg(target_os = "linux")]
impl Place {
    /// That of the thread that asks; none where it has one CPU only, or more than can be named.
    pub(super) fn own() -> Option<Self> {
        let cpus = sched_getaffinity(None).ok().filter(|cpus| cpus.count() > 1)?;
        Some(Self { thread: gettid(), cpus })
    }

    /// Keeps it off the CPU of the thread that asks. What it may not do is left as it is.
    pub(super) fn leave_to_caller(&self) {
        let (mut others, own) = (self.cpus, sched_getcpu());
        if own < CpuSet::MAX_CPU {
            others.unset(own);
            let _as_it_was = sched_setaffinity(Some(self.thread), &others);
        }
    }

    /// Lets it run everywhere again.
    pub(super) fn leave_free(&self) {
        let _as_it_was = sched_setaffinity(Some(self.thread), &self.cpus);
    }
}

#[cfg(not(target_os = "linux"))]
impl Place {
    pub(super) fn own() -> Option<Self> {
        None
    }
    pub(super) fn leave_to_caller(&self) {}
    pub(super) fn leave_free(&self) {}
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use super::*;

    #[test]
    fn a_thread_stays_off_its_callers_cpu_until_it_is_free_again() {
        let (send, place) = mpsc::channel();
        let (stop, wait) = mpsc::channel::<()>();
        // At its end the closure drops `stop`, which ends the thread.
        thread::scope(move |scope| {
            scope.spawn(move || {
                send.send(Place::own()).unwrap();
                wait.recv().unwrap_err();
            });
            let all = sched_getaffinity(None).unwrap();
            let place = place.recv().unwrap();
            assert_eq!(place.is_some(), all.count() > 1);
            let (Some(place), _held) = (place, stop) else { return };
            let cpus = || sched_getaffinity(Some(place.thread)).unwrap();
            // On one CPU, so that it is known.
            let (mut one, own) = (CpuSet::new(), sched_getcpu());
            one.set(own);
            sched_setaffinity(None, &one).unwrap();
            place.leave_to_caller();
            assert!(!cpus().is_set(own) && cpus().count() == all.count() - 1);
            place.leave_free();
            assert_eq!(cpus(), all);
        });
    }
}
