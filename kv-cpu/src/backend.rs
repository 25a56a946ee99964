//! Opening the CPU as a device.
//!
//! Reads the settings once; what was found holds for every queue. Knows nothing of the operations.
use kv_core::DeviceError;
use kv_core::backend::{Backend, Capabilities};

use crate::buffer::CpuBuffer;
use crate::encoding::unsupported;
use crate::isa::Isa;
use crate::kernel::Kernels;
use crate::queue::CpuQueue;
use crate::read_ahead::ReadAhead;
use crate::threads::Threads;

/// How to open the CPU. What is not set here comes from the environment (`KV_CPU_ISA`,
/// `KV_CPU_THREADS`), and else from the machine.
///
/// `KV_CPU_READ_AHEAD` is for trying what suits a CPU that was not measured: into which cache lines
/// are brought that are wanted soon, `first`, `second`, `near` (into the second, shortly before),
/// `twice` (into the second, asked for again when nearer) or `none`; or one of these for one query
/// head a kv head over rows of f32, f16 or bf16 and one for all else, as in `near/twice`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CpuOptions {
    threads: Option<usize>,
    isa: Option<Isa>,
}

impl CpuOptions {
    /// Uses so many threads: the calling one, and others of its own. Without it there is one for
    /// each core, and all backends of a process share those beside the calling one.
    #[must_use]
    pub fn threads(self, threads: usize) -> Self {
        Self { threads: Some(threads), ..self }
    }
    /// Uses this instruction set instead of the best there is.
    #[must_use]
    pub fn isa(self, isa: Isa) -> Self {
        Self { isa: Some(isa), ..self }
    }
}

/// The CPU as a device: buffers are host memory, and an operation is done when its call returns.
#[derive(Debug)]
pub struct CpuBackend {
    capabilities: Capabilities,
    isa: Isa,
    cpu: Cpu,
}

/// What every operation needs: who computes, and with which kernels.
#[derive(Debug, Clone)]
pub(crate) struct Cpu {
    pub(crate) threads: Threads,
    pub(crate) kernels: Kernels,
}

impl CpuBackend {
    /// Opens the CPU.
    ///
    /// # Errors
    /// `Unsupported` for an instruction set that is unknown or that this CPU lacks, for 0 threads,
    /// and for settings that are no such thing; `Driver` when the threads cannot be started.
    pub fn open(options: CpuOptions) -> Result<Self, DeviceError> {
        let setting =
            |name| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned());
        let isa = match options.isa {
            Some(isa) => isa.require()?,
            None => Isa::from_setting(setting("KV_CPU_ISA").as_deref())?,
        };
        let count = match options.threads {
            Some(count) => Some(count),
            None => Threads::parse_count(setting("KV_CPU_THREADS").as_deref())?,
        };
        let read_ahead = ReadAhead::from_setting(setting("KV_CPU_READ_AHEAD").as_deref())?;
        let kernels = Kernels::of(isa, read_ahead)
            .ok_or_else(|| unsupported("open cpu", format!("no kernels for {isa}")))?;
        let threads = Threads::new(count)?;
        let capabilities = Capabilities::minimal()
            .with_buffer_bytes_max(u64::MAX)
            .with_binding_bytes_max(u64::MAX)
            .with_blocking_wait()
            .with_workers(u32::try_from(threads.count()).unwrap_or(u32::MAX))
            .with_heads_together()
            .with_host_outputs();
        Ok(Self { capabilities, isa, cpu: Cpu { threads, kernels } })
    }

    /// The instruction set in use.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// A device with another table of kernels, for kernels that no CPU here runs by itself.
    #[cfg(test)]
    pub(crate) fn with_kernels(mut self, kernels: Kernels) -> Self {
        self.cpu.kernels = kernels;
        self
    }
}

impl Backend for CpuBackend {
    type Buffer = CpuBuffer;
    type Queue = CpuQueue;

    fn name(&self) -> &'static str {
        "cpu"
    }
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }
    fn alloc(&self, bytes: u64) -> Result<CpuBuffer, DeviceError> {
        CpuBuffer::alloc(bytes)
    }
    fn queue(&self) -> Result<CpuQueue, DeviceError> {
        Ok(CpuQueue::new(self.cpu.clone()))
    }
}
