//! Memory of the emulated GPU: host memory, and a list of what there is of it.
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::{Mutex, PoisonError};

use kv_core::{DeviceError, DeviceErrorKind};

use crate::gpu::Pinned;
use crate::params::Address;

/// What device memory is aligned to.
const ALIGN: usize = 256;

/// Zeroed host memory of a length above 0, freed when dropped.
#[derive(Debug)]
pub(super) struct HostMemory {
    base: NonNull<u8>,
    layout: Layout,
}

// SAFETY: it owns its bytes, as a `Box` does; who reads and writes through `base` answers for that.
unsafe impl Send for HostMemory {}
// SAFETY: it hands out nothing but a pointer and a length.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    /// Reserves it; `None` where the host has none, or for 0 bytes.
    pub(super) fn new(bytes: usize) -> Option<Self> {
        let layout =
            Layout::from_size_align(bytes, ALIGN).ok().filter(|layout| layout.size() > 0)?;
        // SAFETY: the size is above 0, by the filter above.
        let base = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        Some(Self { base, layout })
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        // SAFETY: `new` reserved `base` with this layout, and nothing else frees it.
        unsafe { dealloc(self.base.as_ptr(), self.layout) };
    }
}

impl Pinned for HostMemory {
    fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    fn len(&self) -> usize {
        self.layout.size()
    }
}

/// All allocations of one device.
#[derive(Debug)]
pub(super) struct Memory {
    bytes_max: u64,
    by_address: Mutex<BTreeMap<Address, HostMemory>>,
}

impl Memory {
    pub(super) fn new(bytes_max: u64) -> Self {
        Self { bytes_max, by_address: Mutex::default() }
    }

    /// Reserves zeroed memory.
    pub(super) fn alloc(&self, bytes: u64) -> Result<Address, DeviceError> {
        let full = || {
            let detail = format!("{bytes} bytes of {}", self.bytes_max);
            DeviceError::new(DeviceErrorKind::OutOfMemory, "alloc").with_detail(detail)
        };
        let mut by_address = self.by_address.lock().unwrap_or_else(PoisonError::into_inner);
        let used = total(&by_address);
        if used.checked_add(bytes).is_none_or(|sum| sum > self.bytes_max) {
            return Err(full());
        }
        let memory = usize::try_from(bytes).ok().and_then(HostMemory::new).ok_or_else(full)?;
        let address = memory.base().expose_provenance();
        let address = Address::try_from(address).map_err(|_| full())?;
        by_address.insert(address, memory);
        Ok(address)
    }

    /// Gives memory back. An address that is none is our bug, but no reason to stop a drop.
    pub(super) fn free(&self, address: Address) {
        let mut by_address = self.by_address.lock().unwrap_or_else(PoisonError::into_inner);
        let freed = by_address.remove(&address);
        debug_assert!(freed.is_some(), "address {address:#x} is not that of an allocation");
    }

    /// The first of `bytes` bytes at `at`, which all lie in one allocation.
    pub(super) fn find(
        &self,
        at: Address,
        bytes: u64,
        operation: &'static str,
    ) -> Result<*mut u8, DeviceError> {
        let by_address = self.by_address.lock().unwrap_or_else(PoisonError::into_inner);
        let found = by_address.range(..=at).next_back();
        let inside = found.is_some_and(|(begin, memory)| {
            let end = begin.checked_add(byte_count(memory));
            at.checked_add(bytes).is_some_and(|last| end.is_some_and(|end| last <= end))
        });
        match usize::try_from(at) {
            Ok(at) if inside => Ok(std::ptr::with_exposed_provenance_mut(at)),
            _ => {
                let detail = format!("{bytes} bytes at {at:#x} are not memory of the device");
                Err(DeviceError::new(DeviceErrorKind::OutOfRange, operation).with_detail(detail))
            }
        }
    }

    /// Allocations that were not freed, and their bytes.
    #[cfg(test)]
    pub(super) fn allocated(&self) -> (usize, u64) {
        let by_address = self.by_address.lock().unwrap_or_else(PoisonError::into_inner);
        (by_address.len(), total(&by_address))
    }
}

fn total(by_address: &BTreeMap<Address, HostMemory>) -> u64 {
    by_address.values().map(byte_count).fold(0, u64::saturating_add)
}

fn byte_count(memory: &HostMemory) -> u64 {
    u64::try_from(memory.len()).unwrap_or(u64::MAX)
}
