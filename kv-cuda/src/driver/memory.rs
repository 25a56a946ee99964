//! Page-locked memory of the host, and memory and streams of callers.
use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUcontext, CUpointer_attribute as PointerAttribute, CUresult};
use kv_core::{DeviceError, DeviceErrorKind};

use super::context::Context;
use super::error::refuse;
use crate::gpu::Pinned;
use crate::params::Address;

const WRAP: &str = "wrap device memory";

/// Whether a caller's memory is of this device, and reaches as far as is said.
///
/// Memory that an allocator has mapped piece by piece is one range of addresses and several of the
/// driver's: PyTorch's segments that grow, for one.
pub(super) fn check_foreign(
    context: &Context,
    address: Address,
    bytes: u64,
) -> Result<(), DeviceError> {
    let _current = context.enter(WRAP)?.relax();
    require_range(address, bytes, |at| {
        let Some(ordinal) = ordinal_of(context, at)? else { return Ok(None) };
        if ordinal != context.device() {
            return Err(foreign(format!("it is memory of device {ordinal}")));
        }
        let (mut base, mut size) = (0, 0);
        // SAFETY: places for an address and a size; the driver knows the memory, see above.
        let code = unsafe { sys::cuMemGetAddressRange_v2(&raw mut base, &raw mut size, at) };
        context.check(WRAP, code)?;
        Ok(Some((base, u64::try_from(size).unwrap_or(u64::MAX))))
    })
}

fn foreign(reason: String) -> DeviceError {
    refuse(DeviceErrorKind::ForeignHandle, WRAP, reason)
}

/// The device of some memory, `None` where the driver knows none.
fn ordinal_of(context: &Context, address: Address) -> Result<Option<i32>, DeviceError> {
    let mut ordinal = -1;
    // SAFETY: any number may be asked for; `ordinal` is the place that this attribute takes.
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

/// Refuses a range that does not lie in pieces of memory, side by side. `piece` gives the base and
/// the size of that at an address.
fn require_range(
    address: u64,
    bytes: u64,
    mut piece: impl FnMut(u64) -> Result<Option<(u64, u64)>, DeviceError>,
) -> Result<(), DeviceError> {
    let mut room = 0_u64;
    loop {
        // An address behind all others is no memory's.
        let found = match address.checked_add(room) {
            Some(at) => piece(at)?.map(|found| (at, found)),
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
        let more = more.ok_or_else(|| foreign("the driver contradicts itself".to_owned()))?;
        room = room.saturating_add(more);
        if bytes <= room {
            return Ok(());
        }
    }
}

/// Whether a stream belongs to this context.
///
/// # Safety
/// 1. `stream` is a stream that lives.
pub(super) unsafe fn check_stream(
    context: &Context,
    stream: sys::CUstream,
) -> Result<(), DeviceError> {
    const WRAP: &str = "wrap a stream";
    let _current = context.enter(WRAP)?.relax();
    let mut owner: CUcontext = std::ptr::null_mut();
    // SAFETY: a place for a context, and condition 1.
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

// SAFETY: plain memory; who reads and writes it is ruled by the conditions of those who get its
// address.
unsafe impl Send for PinnedMemory {}
// SAFETY: as above.
unsafe impl Sync for PinnedMemory {}

impl PinnedMemory {
    /// Reserves memory with no flags: write-combined memory would be slow to read.
    pub(super) fn new(context: &Arc<Context>, bytes: usize) -> Result<Self, DeviceError> {
        const ALLOC: &str = "allocate page-locked memory";
        let _current = context.enter(ALLOC)?.relax();
        let mut base = std::ptr::null_mut();
        // SAFETY: a place for an address; the context is current.
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
        // SAFETY: reserved by `new`, freed here and nowhere else.
        let code = unsafe { sys::cuMemFreeHost(self.base.as_ptr().cast()) };
        let _ = self.context.check("free page-locked memory", code);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Memory of these pieces, each a base and a size.
    fn checked(address: u64, bytes: u64, pieces: &[(u64, u64)]) -> Result<(), DeviceErrorKind> {
        let holds = |at: u64, (base, size)| at.checked_sub(base).is_some_and(|begin| begin < size);
        require_range(address, bytes, |at| {
            Ok(pieces.iter().copied().find(|piece| holds(at, *piece)))
        })
        .map_err(|error| error.kind())
    }

    #[test]
    fn ranges_end_where_allocations_do() {
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
    fn ranges_go_on_in_pieces_that_are_side_by_side() {
        let pieces = [(1000, 24), (1024, 100), (2000, 50), (u64::MAX - 9, 9)];
        for (address, bytes) in [(1000, 124), (1010, 20), (1024, 100), (1010, 114)] {
            assert_eq!(checked(address, bytes, &pieces), Ok(()), "{address} {bytes}");
        }
        // What is behind a gap, and the end of all addresses.
        for (address, bytes) in [(1000, 125), (1010, 1000), (u64::MAX - 9, 100)] {
            let refused = Err(DeviceErrorKind::OutOfRange);
            assert_eq!(checked(address, bytes, &pieces), refused, "{address} {bytes}");
        }
    }
}
