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
