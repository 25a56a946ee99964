//! Page-locked memory of the host, and memory and streams of callers.
use std::ptr::NonNull;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUcontext, CUpointer_attribute as PointerAttribute, CUresult};
use kv_core::{DeviceError, DeviceErrorKind};

use super::context::Context;
use super::error::refuse;
use crate::gpu::Pinned;
use crate::params::Address;

/// Whether a caller's memory is of this device, and reaches as far as is said.
pub(super) fn check_foreign(
    context: &Context,
    address: Address,
    bytes: u64,
) -> Result<(), DeviceError> {
    const WRAP: &str = "wrap device memory";
    let _current = context.enter(WRAP)?.relax();
    let foreign = |reason| Err(refuse(DeviceErrorKind::ForeignHandle, WRAP, reason));
    let mut ordinal = -1;
    // SAFETY: any number may be asked for; `ordinal` is the place that this attribute takes.
    let code = unsafe {
        sys::cuPointerGetAttribute(
            (&raw mut ordinal).cast(),
            PointerAttribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
            address,
        )
    };
    match code {
        CUresult::CUDA_ERROR_INVALID_VALUE => {
            return foreign("the driver knows no memory there".to_owned());
        }
        code => context.check(WRAP, code)?,
    }
    if ordinal != context.device() {
        return foreign(format!("it is memory of device {ordinal}"));
    }
    let (mut base, mut size) = (0, 0);
    // SAFETY: places for an address and a size; the driver knows the memory, see above.
    let code = unsafe { sys::cuMemGetAddressRange_v2(&raw mut base, &raw mut size, address) };
    context.check(WRAP, code)?;
    require_range(address, bytes, base, u64::try_from(size).unwrap_or(u64::MAX))
}

fn require_range(address: u64, bytes: u64, base: u64, size: u64) -> Result<(), DeviceError> {
    let room = address.checked_sub(base).and_then(|begin| size.checked_sub(begin));
    let room = room.unwrap_or(0);
    if bytes <= room {
        return Ok(());
    }
    let reason = format!("{bytes} bytes, and {room} to the end of the allocation");
    Err(refuse(DeviceErrorKind::OutOfRange, "wrap device memory", reason))
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

    #[test]
    fn ranges_end_where_allocations_do() {
        assert!(require_range(1000, 24, 1000, 24).is_ok());
        assert!(require_range(1010, 14, 1000, 24).is_ok());
        for (address, bytes) in [(1000, 25), (1010, 15), (1024, 1), (999, 1), (1010, u64::MAX)] {
            let error = require_range(address, bytes, 1000, 24).unwrap_err();
            assert_eq!(error.kind(), DeviceErrorKind::OutOfRange, "{address} {bytes}");
        }
    }
}
