//! Memory of the emulated GPU: host memory, and a list of allocations.
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard, PoisonError};

use kv_core::error::{DeviceError, DeviceErrorKind};
use kv_core::num::to_u64;

use crate::gpu::Pinned;
use crate::params::Address;

/// Alignment of device memory.
const ALIGN: usize = 256;

/// Zeroed host memory of a length above 0, freed when dropped.
#[derive(Debug)]
pub(super) struct HostMemory {
    base: NonNull<u8>,
    layout: Layout,
}

// SAFETY: it owns its bytes, as a `Box` does; users of `base` are responsible for their accesses.
unsafe impl Send for HostMemory {}
// SAFETY: it hands out only a pointer and a length.
unsafe impl Sync for HostMemory {}

impl HostMemory {
    /// Allocates memory; `None` if the host has none, or for 0 bytes.
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
        // SAFETY: `new` allocated `base` with this layout, and nothing else frees it.
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
///
/// Bytes are counted as in the driver's pool: once taken from the device they stay in the pool,
/// used or not. The memory itself is returned to the host, so that late accesses are detected.
#[derive(Debug)]
pub(super) struct Memory {
    bytes_max: u64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    by_address: BTreeMap<Address, HostMemory>,
    /// Bytes of the device that the pool holds, used or not.
    held: u64,
    /// Bytes of the device that another program holds.
    #[cfg(test)]
    elsewhere: u64,
}

impl State {
    /// Grows the pool to `bytes` bytes, if the device has them.
    fn hold(&mut self, bytes: u64, bytes_max: u64) -> bool {
        #[cfg(test)]
        let bytes_max = bytes_max.saturating_sub(self.elsewhere);
        let held = self.held.max(bytes);
        if held > bytes_max {
            return false;
        }
        self.held = held;
        true
    }
}

impl Memory {
    /// Creates the memory of a device and its reserve.
    pub(super) fn new(bytes_max: u64, reserved_bytes: u64) -> Result<Self, DeviceError> {
        let mut state = State::default();
        if !state.hold(reserved_bytes, bytes_max) {
            let detail = format!("{reserved_bytes} bytes of {bytes_max}");
            let error = DeviceError::new(DeviceErrorKind::OutOfMemory, "reserve memory");
            return Err(error.with_detail(detail));
        }
        Ok(Self { bytes_max, state: Mutex::new(state) })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives `bytes` bytes to another program, if the device has them left.
    #[cfg(test)]
    pub(super) fn take_elsewhere(&self, bytes: u64) -> bool {
        let mut state = self.lock();
        let taken = state.elsewhere + bytes;
        let is_left = state.held + taken <= self.bytes_max;
        state.elsewhere = if is_left { taken } else { state.elsewhere };
        is_left
    }

    /// Allocates zeroed memory.
    pub(super) fn alloc(&self, bytes: u64) -> Result<Address, DeviceError> {
        let full = || {
            let detail = format!("{bytes} bytes of {}", self.bytes_max);
            DeviceError::new(DeviceErrorKind::OutOfMemory, "alloc").with_detail(detail)
        };
        let mut state = self.lock();
        let used = total(&state.by_address).checked_add(bytes).ok_or_else(full)?;
        if !state.hold(used, self.bytes_max) {
            return Err(full());
        }
        let memory = usize::try_from(bytes).ok().and_then(HostMemory::new).ok_or_else(full)?;
        let address = memory.base().expose_provenance();
        let address = Address::try_from(address).map_err(|_| full())?;
        state.by_address.insert(address, memory);
        Ok(address)
    }

    /// Frees memory. An unknown address is a bug, but not a reason to abort a drop.
    pub(super) fn free(&self, address: Address) {
        let freed = self.lock().by_address.remove(&address);
        debug_assert!(freed.is_some(), "address {address:#x} is not an allocation");
    }

    /// Returns the first of `bytes` bytes at `at`, which must lie in one allocation.
    pub(super) fn find(
        &self,
        at: Address,
        bytes: u64,
        operation: &'static str,
    ) -> Result<*mut u8, DeviceError> {
        let state = self.lock();
        let found = state.by_address.range(..=at).next_back();
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

    /// Returns the number of allocations that were not freed, and their bytes.
    #[cfg(test)]
    pub(super) fn allocated(&self) -> (usize, u64) {
        let state = self.lock();
        (state.by_address.len(), total(&state.by_address))
    }
}

fn total(by_address: &BTreeMap<Address, HostMemory>) -> u64 {
    by_address.values().map(byte_count).sum()
}

fn byte_count(memory: &HostMemory) -> u64 {
    to_u64(memory.len())
}
