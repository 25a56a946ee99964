//! Page-locked host memory, and checks of callers' memory and streams.
use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUcontext, CUpointer_attribute as PointerAttribute, CUresult};
use kv_core::error::{DeviceError, DeviceErrorKind};
use kv_core::num::to_u64;

use super::context::Context;
use super::error::refuse;
use crate::gpu::Pinned;
use crate::params::Address;

const WRAP: &str = "wrap device memory";

/// Checks that a caller's memory belongs to this device and has the given length.
///
/// Memory that an allocator maps in several ranges, such as PyTorch's expandable segments, is one
/// range of addresses and several allocations of the driver.
pub(super) fn check_foreign(
    context: &Context,
    address: Address,
    bytes: u64,
) -> Result<(), DeviceError> {
    let _current = context.enter(WRAP)?.relax();
    require_range(address, bytes, |at| {
        let Some(ordinal) = ordinal_of(context, at)? else { return Ok(None) };
        if ordinal != context.device() {
            return Err(foreign(format!("it belongs to device {ordinal}")));
        }
        let (mut base, mut size) = (0, 0);
        // SAFETY: both out-pointers are valid; the driver knows the memory, see above.
        let code = unsafe { sys::cuMemGetAddressRange_v2(&raw mut base, &raw mut size, at) };
        context.check(WRAP, code)?;
        Ok(Some((base, to_u64(size))))
    })
}

fn foreign(reason: String) -> DeviceError {
    refuse(DeviceErrorKind::ForeignHandle, WRAP, reason)
}

/// Returns the device of some memory, `None` if the driver does not know the address.
fn ordinal_of(context: &Context, address: Address) -> Result<Option<i32>, DeviceError> {
    let mut ordinal = -1;
    // SAFETY: any address is allowed; `ordinal` has the type of this attribute.
    let code = unsafe {
        sys::cuPointerGetAttribute(
            (&raw mut ordinal).cast(),
            PointerAttribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
            address,
        )
    };
    if code == CUresult::CUDA_ERROR_INVALID_VALUE {
        return Ok(None);
    }
    context.check(WRAP, code)?;
    Ok(Some(ordinal))
}

/// Refuses a range that is not covered by adjacent allocations. `allocation` returns base and size
/// of the allocation at an address.
fn require_range(
    address: u64,
    bytes: u64,
    mut allocation: impl FnMut(u64) -> Result<Option<(u64, u64)>, DeviceError>,
) -> Result<(), DeviceError> {
    let mut room = 0_u64;
    loop {
        // An address past all others is in no allocation.
        let found = match address.checked_add(room) {
            Some(at) => allocation(at)?.map(|found| (at, found)),
            None => None,
        };
        let Some((at, (base, size))) = found else {
            if room == 0 {
                return Err(foreign("the driver knows no memory there".to_owned()));
            }
            let reason = format!("{bytes} bytes, and {room} to the end of the allocation");
            return Err(refuse(DeviceErrorKind::OutOfRange, WRAP, reason));
        };
        let more = at.checked_sub(base).and_then(|begin| size.checked_sub(begin));
        let more = more.filter(|more| *more > 0);
        let more =
            more.ok_or_else(|| foreign("the driver reports inconsistent allocations".to_owned()))?;
        room += more;
        if bytes <= room {
            return Ok(());
        }
    }
}

/// Checks that a stream belongs to this context.
///
/// # Safety
/// 1. `stream` is a live stream.
pub(super) unsafe fn check_stream(
    context: &Context,
    stream: sys::CUstream,
) -> Result<(), DeviceError> {
    const WRAP: &str = "wrap a stream";
    let _current = context.enter(WRAP)?.relax();
    let mut owner: CUcontext = std::ptr::null_mut();
    // SAFETY: an out-pointer for a context, and condition 1.
    context.check(WRAP, unsafe { sys::cuStreamGetCtx(stream, &raw mut owner) })?;
    if owner == context.raw() {
        return Ok(());
    }
    let reason = "its context is not the device's primary context";
    Err(refuse(DeviceErrorKind::ForeignHandle, WRAP, reason))
}

/// Page-locked memory.
#[derive(Debug)]
pub(super) struct PinnedMemory {
    context: Arc<Context>,
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: plain memory; the users of its address are bound by the conditions under which they got
// it.
unsafe impl Send for PinnedMemory {}
// SAFETY: as above.
unsafe impl Sync for PinnedMemory {}

impl PinnedMemory {
    /// Allocates memory without flags: write-combined memory would be slow to read.
    pub(super) fn new(context: &Arc<Context>, bytes: usize) -> Result<Self, DeviceError> {
        const ALLOC: &str = "allocate page-locked memory";
        let _current = context.enter(ALLOC)?.relax();
        let mut base = std::ptr::null_mut();
        // SAFETY: an out-pointer for an address; the context is current.
        let code = unsafe { sys::cuMemHostAlloc(&raw mut base, bytes, 0) };
        context.check(ALLOC, code)?;
        let base = NonNull::new(base.cast()).ok_or_else(|| {
            refuse(DeviceErrorKind::OutOfMemory, ALLOC, "the driver gave no address")
        })?;
        Ok(Self { context: Arc::clone(context), base, bytes })
    }
}

impl Pinned for PinnedMemory {
    fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    fn len(&self) -> usize {
        self.bytes
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        let Ok(current) = self.context.enter("free page-locked memory") else { return };
        let _current = current.relax();
        // SAFETY: allocated by `new`, and freed only here.
        let code = unsafe { sys::cuMemFreeHost(self.base.as_ptr().cast()) };
        let _ = self.context.check("free page-locked memory", code);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Checks a range against these allocations, each a base and a size.
    fn checked(
        address: u64,
        bytes: u64,
        allocations: &[(u64, u64)],
    ) -> Result<(), DeviceErrorKind> {
        let holds = |at: u64, (base, size)| at.checked_sub(base).is_some_and(|begin| begin < size);
        require_range(address, bytes, |at| {
            Ok(allocations.iter().copied().find(|allocation| holds(at, *allocation)))
        })
        .map_err(|error| error.kind())
    }

    #[test]
    fn ranges_end_at_allocations() {
        let one = [(1000, 24)];
        for (address, bytes) in [(1000, 24), (1010, 14), (1023, 1), (1023, 0)] {
            assert_eq!(checked(address, bytes, &one), Ok(()), "{address} {bytes}");
        }
        for (address, bytes) in [(1000, 25), (1010, 15), (1010, u64::MAX)] {
            let refused = Err(DeviceErrorKind::OutOfRange);
            assert_eq!(checked(address, bytes, &one), refused, "{address} {bytes}");
        }
        for address in [999, 1024, u64::MAX] {
            assert_eq!(checked(address, 1, &one), Err(DeviceErrorKind::ForeignHandle), "{address}");
        }
    }

    #[test]
    fn ranges_may_span_adjacent_allocations() {
        let allocations = [(1000, 24), (1024, 100), (2000, 50), (u64::MAX - 9, 9)];
        for (address, bytes) in [(1000, 124), (1010, 20), (1024, 100), (1010, 114)] {
            assert_eq!(checked(address, bytes, &allocations), Ok(()), "{address} {bytes}");
        }
        // Ranges past a gap, and at the end of all addresses.
        for (address, bytes) in [(1000, 125), (1010, 1000), (u64::MAX - 9, 100)] {
            let refused = Err(DeviceErrorKind::OutOfRange);
            assert_eq!(checked(address, bytes, &allocations), refused, "{address} {bytes}");
        }
    }
}
