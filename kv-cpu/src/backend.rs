//! Opening the CPU as a device.
//!
//! Reads the settings once, for every queue.
use std::fmt;
use std::sync::Arc;

use kv_core::backend::{
    Backend, Capabilities, ChunkLayout, ChunkShape, QueueHostPool, Reserved, StorageView,
};
use kv_core::error::DeviceError;
use kv_core::num;
use kv_cpu_kernels::{Isa, Kernels, PrefetchTarget};

use crate::attend::{self, AttendShape};
use crate::buffer::CpuBuffer;
use crate::context::Cpu;
use crate::host_memory::HostMemory;
use crate::layout::unsupported;
use crate::queue::CpuQueue;
use crate::threads::{Threads, Workers};

/// Options for opening the CPU. Options that are not set come from the environment (`KV_CPU_ISA`,
/// `KV_CPU_THREADS`, `KV_CPU_OVERCOMMIT`), else from the machine.
///
/// `KV_CPU_ISA` pins an instruction set with its optional parts, such as `avx512+bf16` ([`Isa`]).
/// `KV_CPU_PREFETCH` overrides the software-prefetch target, for experiments: `l2`, `l2-twice`
/// or `none`. `KV_CPU_OVERCOMMIT=1` makes caches that the machine cannot hold once they are filled.
#[derive(Clone, Default)]
pub struct CpuOptions {
    threads: Option<usize>,
    workers: Option<Arc<dyn Workers>>,
    helper_affinity: bool,
    isa: Option<Isa>,
    host_memory: Option<HostMemory>,
}

impl fmt::Debug for CpuOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { threads, workers, helper_affinity, isa, host_memory } = self;
        f.debug_struct("CpuOptions")
            .field("threads", threads)
            .field("workers", &workers.as_ref().map(|workers| workers.count()))
            .field("helper_affinity", helper_affinity)
            .field("isa", isa)
            .field("host_memory", host_memory)
            .finish()
    }
}

impl CpuOptions {
    /// Uses `threads` threads: the calling one, and a pool of the backend's own. Without it there
    /// is one thread per core, and all backends of a process share the pool.
    #[must_use]
    pub fn with_threads(self, threads: usize) -> Self {
        Self { threads: Some(threads), ..self }
    }
    /// Uses threads of the embedding program instead of a pool of the backend's own, such as those
    /// of a rayon pool: [`Workers`] says how. Setting [`with_threads`](Self::with_threads) too is
    /// refused; `KV_CPU_THREADS` is not read.
    ///
    /// # Panics
    /// Operations panic when the workers break their contract.
    #[must_use]
    pub fn with_workers(self, workers: Arc<dyn Workers>) -> Self {
        Self { workers: Some(workers), ..self }
    }
    /// Keeps threads of the backend's own pool off the CPU of the thread that wakes them, by their
    /// affinity (Linux). Off by default; helps where the scheduler puts a woken thread on its
    /// caller's CPU though others are idle, as was seen in a virtual machine.
    #[must_use]
    pub fn with_helper_affinity(self, helper_affinity: bool) -> Self {
        Self { helper_affinity, ..self }
    }
    /// Uses this instruction set instead of the most capable one.
    #[must_use]
    pub fn with_isa(self, isa: Isa) -> Self {
        Self { isa: Some(isa), ..self }
    }
    /// Takes caches and host pools from this memory instead of all available memory. A cache or
    /// pool that does not fit is refused when it is made.
    #[must_use]
    pub fn with_host_memory(self, host_memory: HostMemory) -> Self {
        Self { host_memory: Some(host_memory), ..self }
    }
}

/// The CPU as a device: buffers are host memory, and an operation is done when its call returns.
#[derive(Debug)]
pub struct CpuBackend {
    capabilities: Capabilities,
    isa: Isa,
    cpu: Cpu,
    host_memory: HostMemory,
}

impl CpuBackend {
    /// Says which attention strategy runs a shape, and for each faster one why it does not; `None`
    /// for a format without kernels.
    ///
    /// ```
    /// use kv::KvFormat;
    /// use kv::cpu::{AttendShape, CpuBackend, CpuOptions, Isa};
    ///
    /// let backend = CpuBackend::open(CpuOptions::default().with_isa(Isa::SCALAR))?;
    /// let drafts = AttendShape {
    ///     formats: [KvFormat::Bf16; 2],
    ///     head_dims: [128; 2],
    ///     group: 1,
    ///     queries: 3,
    /// };
    /// let why = backend.explain(&drafts).ok_or("bf16 has kernels")?;
    /// assert!(why.starts_with("tiled; ") && why.ends_with("3 queries see different keys"));
    /// # Ok::<_, Box<dyn std::error::Error>>(())
    /// ```
    pub fn explain(&self, shape: &AttendShape) -> Option<String> {
        attend::explain(self.cpu.kernels, shape)
    }

    /// Opens the CPU.
    ///
    /// # Errors
    /// `Unsupported` for an instruction set that is unknown or that this CPU lacks, for a number of
    /// threads or workers that is 0 or above 4096, for threads and workers at once, and for
    /// settings that cannot be read; `Driver` when the threads cannot be started.
    pub fn open(options: CpuOptions) -> Result<Self, DeviceError> {
        let setting =
            |name| std::env::var_os(name).map(|value| value.to_string_lossy().into_owned());
        let isa = match options.isa {
            Some(isa) => isa,
            None => isa_of_setting(setting("KV_CPU_ISA").as_deref())?,
        };
        let prefetch = prefetch_of_setting(setting("KV_CPU_PREFETCH").as_deref())?;
        let kernels = Kernels::new(isa, prefetch).ok_or_else(|| {
            let possible = possible();
            unsupported("open cpu", format!("this CPU has no {isa}, possible are {possible}"))
        })?;
        let host_memory = match options.host_memory {
            Some(host_memory) => host_memory,
            None => host_memory_of_setting(setting("KV_CPU_OVERCOMMIT").as_deref())?,
        };
        let threads = match (options.workers, options.threads) {
            (Some(_), Some(count)) => {
                let both = format!("workers and {count} threads given, only one of both may be");
                return Err(unsupported("open cpu", both));
            }
            (Some(workers), None) => Threads::given(workers)?,
            (None, Some(count)) => Threads::new(Some(count), options.helper_affinity)?,
            (None, None) => {
                let count = Threads::parse_count(setting("KV_CPU_THREADS").as_deref())?;
                Threads::new(count, options.helper_affinity)?
            }
        };
        let capabilities = Capabilities::minimal()
            .with_buffer_bytes_max(u64::MAX)
            .with_binding_bytes_max(u64::MAX)
            .with_blocking_wait()
            .with_workers(num::to_u32(threads.count()))
            .with_heads_together()
            .with_host_outputs();
        Ok(Self { capabilities, isa, cpu: Cpu { threads, kernels }, host_memory })
    }

    /// Returns the instruction set in use.
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// The same with these kernels, such as emulated ones.
    #[cfg(test)]
    pub(crate) fn with_kernels(mut self, kernels: Kernels) -> Self {
        (self.isa, self.cpu.kernels) = (kernels.isa(), kernels);
        self
    }
}

/// Parses the value of `KV_CPU_ISA`; absent or empty means the most capable set.
fn isa_of_setting(setting: Option<&str>) -> Result<Isa, DeviceError> {
    match setting.map(str::trim) {
        None | Some("") => Ok(Isa::detect()),
        Some(name) => name.parse().map_err(|unknown| {
            unsupported("open cpu", format!("{unknown}; possible on this CPU are {}", possible()))
        }),
    }
}

/// Parses the value of `KV_CPU_PREFETCH`; absent or empty means the best target on this CPU.
fn prefetch_of_setting(setting: Option<&str>) -> Result<PrefetchTarget, DeviceError> {
    match setting.map(str::trim) {
        None | Some("") => Ok(PrefetchTarget::detect()),
        Some(name) => name.parse().map_err(|unknown: kv_core::UnknownName| {
            unsupported("open cpu", format!("{unknown} in KV_CPU_PREFETCH"))
        }),
    }
}

/// Parses the value of `KV_CPU_OVERCOMMIT`; absent or empty means no.
fn host_memory_of_setting(setting: Option<&str>) -> Result<HostMemory, DeviceError> {
    match setting.map(str::trim) {
        None | Some("" | "0") => Ok(HostMemory::machine()),
        Some("1") => Ok(HostMemory::unchecked()),
        Some(other) => {
            let words = format!("{other:?} in KV_CPU_OVERCOMMIT, 0 and 1 are possible");
            Err(unsupported("open cpu", words))
        }
    }
}

fn possible() -> String {
    let names: Vec<_> = Isa::available().map(|isa| isa.to_string()).collect();
    names.join(", ")
}

impl Backend for CpuBackend {
    type Buffer = CpuBuffer;
    type Queue = CpuQueue;
    type HostPool = QueueHostPool<Self::Queue>;

    fn name(&self) -> &'static str {
        "cpu"
    }
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }
    fn reserve_planes(&self, bytes: u64) -> Result<Reserved, DeviceError> {
        self.host_memory.reserve("reserve the planes of a cache", bytes)
    }
    fn alloc(&self, bytes: u64) -> Result<CpuBuffer, DeviceError> {
        CpuBuffer::alloc(bytes)
    }
    fn queue(&self) -> Result<CpuQueue, DeviceError> {
        Ok(CpuQueue::new(self.cpu.clone()))
    }
    fn host_pool(
        &self,
        storage: StorageView<'_, CpuBuffer>,
        shape: ChunkShape,
        chunks: u32,
    ) -> Result<Self::HostPool, DeviceError> {
        let layout = ChunkLayout::of(storage, shape)?;
        // An overflow is refused as any excess.
        let bytes = num::to_u64(layout.bytes()).saturating_mul(chunks.into());
        let reserved = self.host_memory.reserve("reserve a host pool", bytes)?;
        Ok(QueueHostPool::new(self.queue()?, layout, chunks).with_reserved(reserved))
    }
}

#[cfg(test)]
mod tests {
    use kv_core::error::DeviceErrorKind;

    use super::*;

    #[test]
    fn an_instruction_set_is_obeyed_or_refused_in_words() {
        assert_eq!(isa_of_setting(None).unwrap(), Isa::detect());
        assert_eq!(isa_of_setting(Some("")).unwrap(), Isa::detect());
        assert_eq!(isa_of_setting(Some(" scalar ")).unwrap(), Isa::SCALAR);
        let refused = isa_of_setting(Some("sse9")).unwrap_err();
        assert_eq!(refused.kind(), DeviceErrorKind::Unsupported);
        let text = refused.to_string();
        assert!(text.contains("sse9") && text.contains("scalar"), "{text}");
        for isa in Isa::ALL.iter().filter(|isa| !isa.is_available()) {
            let refused = CpuBackend::open(CpuOptions::default().with_isa(*isa)).unwrap_err();
            assert_eq!(refused.kind(), DeviceErrorKind::Unsupported);
            assert!(refused.to_string().contains(&isa.to_string()), "{refused}");
        }
    }

    #[test]
    fn a_prefetch_target_is_obeyed_or_refused_in_words() {
        assert_eq!(prefetch_of_setting(Some(" none ")).unwrap(), PrefetchTarget::None);
        assert_eq!(prefetch_of_setting(Some("")).unwrap(), PrefetchTarget::detect());
        let refused = prefetch_of_setting(Some("l3")).unwrap_err().to_string();
        assert!(refused.contains("l3") && refused.contains("KV_CPU_PREFETCH"), "{refused}");
    }
    #[test]
    fn overcommit_is_obeyed_or_refused_in_words() {
        let limit = |setting| format!("{:?}", host_memory_of_setting(setting).unwrap());
        for setting in [None, Some(""), Some(" 0 ")] {
            assert!(limit(setting).contains("machine"));
        }
        assert!(limit(Some("1")).contains("unchecked"));
        let refused = host_memory_of_setting(Some("yes")).unwrap_err();
        assert_eq!(refused.kind(), DeviceErrorKind::Unsupported);
        assert!(refused.to_string().contains("yes"), "{refused}");
    }
}
