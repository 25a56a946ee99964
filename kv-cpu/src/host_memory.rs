//! Host memory that caches and host pools may still take.
//!
//! The system maps memory at once and takes a page when it is first written. A cache that the
//! machine cannot hold is therefore made without an error, and the process is ended when its blocks
//! are filled, in the middle of traffic. So a new cache is compared with the available memory,
//! together with memory that others have reserved and not yet written. Only Linux reports the
//! available memory; elsewhere nothing is refused here. Swap does not count: every step reads all K
//! and V of its sequences.
mod available;

use std::fmt;
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

use kv_core::backend::Reserved;
use kv_core::error::{DeviceError, MemoryShortage};
use kv_core::invariant::Invariant;

use available::Available;

/// The host memory of a backend's caches and host pools: that of this machine, or less, or without
/// a limit.
///
/// ```
/// use kv::{CacheSpec, KvCache};
/// use kv::cpu::{CpuBackend, CpuOptions, HostMemory};
///
/// let memory = HostMemory::with_limit(1 << 20); // all caches of this backend together
/// let backend = CpuBackend::open(CpuOptions::default().with_host_memory(memory))?;
/// let spec = CacheSpec::builder().layers(32).kv_heads(8).head_dim(128).paged(16, 1024).build()?;
/// assert!(KvCache::new(backend, spec).is_err()); // 2 GiB
/// # Ok::<(), kv::CacheError>(())
/// ```
#[derive(Clone)]
pub struct HostMemory(Arc<Ledger>);

struct Ledger {
    limit: Limit,
    /// Bytes reserved and not given back.
    reserved: Mutex<u64>,
}

enum Limit {
    /// The limits of the machine, and of the control groups of this process.
    Machine(fn() -> Option<Available>),
    Bytes(u64),
    None,
}

/// One for all backends of the process: they take from the same memory.
static MACHINE: LazyLock<HostMemory> =
    LazyLock::new(|| HostMemory::of(Limit::Machine(available::of_this_process)));

impl HostMemory {
    /// Returns the memory of this machine, within the limits of the process's control groups.
    pub fn machine() -> Self {
        MACHINE.clone()
    }
    /// Makes a limit of this many bytes, for everything that takes from it or from a clone.
    pub fn with_limit(bytes: u64) -> Self {
        Self::of(Limit::Bytes(bytes))
    }
    /// Refuses nothing: for caches that are larger than they are ever filled.
    pub fn unchecked() -> Self {
        Self::of(Limit::None)
    }

    fn of(limit: Limit) -> Self {
        Self(Arc::new(Ledger { limit, reserved: Mutex::default() }))
    }

    /// Reserves bytes until the result is dropped.
    pub(crate) fn reserve(
        &self,
        operation: &'static str,
        bytes: u64,
    ) -> Result<Reserved, DeviceError> {
        let mut reserved = self.0.reserved();
        // An overflow is refused as any excess.
        let sum = reserved.saturating_add(bytes);
        let shortage = match &self.0.limit {
            Limit::None => None,
            // Looking it up takes longer than making such a cache.
            Limit::Machine(_) if sum < LOOKED_UP => None,
            Limit::Machine(available) => available().map(|there| {
                // Pages of earlier reservations that were written are not available any more.
                let unwritten = reserved.saturating_sub(there.written);
                let available = there.bytes.saturating_sub(unwritten);
                let limit = if there.is_machine { OF_MACHINE } else { OF_CONTROL_GROUP };
                MemoryShortage { needed: bytes, available, limit }
            }),
            Limit::Bytes(limit) => {
                let available = limit.saturating_sub(*reserved);
                Some(MemoryShortage { needed: bytes, available, limit: OF_OPTION })
            }
        };
        if let Some(shortage) = shortage.filter(|shortage| shortage.needed > shortage.available) {
            return Err(DeviceError::out_of_memory(operation, shortage));
        }
        *reserved = sum;
        Ok(Reserved::new(Share { of: self.clone(), bytes }))
    }
}

impl fmt::Debug for HostMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let limit = match self.0.limit {
            Limit::Machine(_) => "machine".to_owned(),
            Limit::Bytes(bytes) => format!("{bytes} bytes"),
            Limit::None => "unchecked".to_owned(),
        };
        let reserved = *self.0.reserved();
        f.debug_struct("HostMemory").field("limit", &limit).field("reserved", &reserved).finish()
    }
}

impl Ledger {
    fn reserved(&self) -> MutexGuard<'_, u64> {
        self.reserved.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A reservation, given back when it is dropped.
struct Share {
    of: HostMemory,
    bytes: u64,
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut reserved = self.of.0.reserved();
        *reserved = reserved.checked_sub(self.bytes).invariant("a reservation is part of the sum");
    }
}

/// Reservations below this sum are not compared with the available memory.
const LOOKED_UP: u64 = 16 << 20;

const OF_MACHINE: &str = "this machine has no more; KV_CPU_OVERCOMMIT=1 goes on anyway";
const OF_CONTROL_GROUP: &str =
    "the control group of this process may have no more; KV_CPU_OVERCOMMIT=1 goes on anyway";
const OF_OPTION: &str = "the limit that CpuOptions::with_host_memory set";

#[cfg(test)]
mod tests {
    use kv_core::error::DeviceErrorKind;

    use super::*;

    /// Returns a machine with 100 MiB, of which 10 MiB were written by this process.
    fn machine() -> HostMemory {
        HostMemory::of(Limit::Machine(|| {
            Some(Available { bytes: 100 << 20, is_machine: true, written: 10 << 20 })
        }))
    }

    fn reserve(memory: &HostMemory, bytes: u64) -> Result<Reserved, DeviceError> {
        memory.reserve("reserve a cache", bytes)
    }

    #[test]
    fn a_limit_is_shared_and_given_back() {
        let memory = HostMemory::with_limit(1000);
        let first = reserve(&memory, 600).unwrap();
        let refused = reserve(&memory.clone(), 401).unwrap_err();
        assert_eq!(refused.kind(), DeviceErrorKind::OutOfMemory);
        let shortage = refused.shortage().unwrap();
        assert_eq!((shortage.needed, shortage.available), (401, 400));
        let second = reserve(&memory, 400).unwrap();
        assert!(reserve(&memory, 1).is_err());
        assert!(reserve(&memory, 0).is_ok());
        drop((first, second));
        reserve(&memory, 1000).unwrap();
        assert!(reserve(&memory, u64::MAX).is_err());
    }

    /// Two caches that fit alone, and not together: the first has written nothing yet.
    #[test]
    fn what_is_reserved_and_not_written_counts() {
        let memory = machine();
        let first = reserve(&memory, 70 << 20).unwrap();
        let refused = reserve(&memory, 41 << 20).unwrap_err();
        // 100 - (70 - 10), in MiB.
        assert_eq!(refused.shortage().unwrap().available, 40 << 20);
        assert!(
            refused.to_string().contains("41.00 MiB needed, 40.00 MiB available: this machine")
        );
        assert!(refused.to_string().contains("KV_CPU_OVERCOMMIT=1"));
        let second = reserve(&memory, 40 << 20).unwrap();
        drop(first);
        assert!(reserve(&memory, 71 << 20).is_err());
        drop(second);
        reserve(&memory, 100 << 20).unwrap();
    }

    #[test]
    fn what_is_small_unknown_or_unchecked_is_not_refused() {
        let memory = HostMemory::of(Limit::Machine(|| panic!("looked up")));
        let small = reserve(&memory, LOOKED_UP - 1).unwrap();
        drop(small);
        let unknown = HostMemory::of(Limit::Machine(|| None));
        reserve(&unknown, 1 << 50).unwrap();
        reserve(&HostMemory::unchecked(), u64::MAX).unwrap();
    }

    /// Many small ones are as much as a large one.
    #[test]
    fn the_sum_is_looked_up_and_not_each_reservation() {
        let memory = machine();
        let many: Vec<_> = (0..200).map_while(|_| reserve(&memory, 1 << 20).ok()).collect();
        assert_eq!(many.len(), 110, "100 available, and 10 that were written");
    }

    #[test]
    fn this_machine_holds_a_small_cache_and_no_exabyte() {
        let memory = HostMemory::machine();
        reserve(&memory, LOOKED_UP).unwrap();
        if cfg!(target_os = "linux") {
            let refused = reserve(&memory, 1 << 60).unwrap_err();
            assert!(refused.shortage().unwrap().available < 1 << 60, "{refused}");
        }
    }
}
