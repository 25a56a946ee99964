//! What every operation gets: threads and kernels.
use kv_cpu_kernels::Kernels;

use crate::threads::Threads;

/// Who computes, and with which kernels.
#[derive(Debug, Clone)]
pub(crate) struct Cpu {
    pub(crate) threads: Threads,
    pub(crate) kernels: Kernels,
}
