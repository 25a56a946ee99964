//! The context of every operation: threads and kernels.
use kv_cpu_kernels::Kernels;

use crate::threads::Threads;

/// The threads that compute, and their kernels.
#[derive(Debug, Clone)]
pub(crate) struct Cpu {
    pub(crate) threads: Threads,
    pub(crate) kernels: Kernels,
}
