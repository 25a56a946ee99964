//! Device memory: a pool of the driver, and frees that are ordered after the work that uses the
//! memory.
//!
//! Freed memory stays in the pool for later allocations, so that neither stalls the device.
//! Allocations are ordered on the setup stream, which the host waits for. Frees are ordered on a
//! stream of their own, which [`Reclaim`] makes wait for all other streams. The driver reuses freed
//! memory only when that stream has passed the free, or makes the allocation wait for it.
//!
//! A device without pools gets plain allocations: the host then waits for the streams before it
//! frees, as the driver would.
use std::any::Any;
use std::sync::Arc;

use cudarc::driver::sys::{
    self, CUdevice_attribute, CUmemAllocationType, CUmemPool_attribute, CUmemPoolProps,
    CUmemoryPool, CUresult, CUstream,
};
use kv_core::error::{DeviceError, DeviceErrorKind};

use super::context::Context;
use super::error::refuse;
use super::event::CudaEvent;
use super::facts::{self, OPEN};
use super::library;
use crate::gpu::Event;
use crate::params::Address;
use crate::reclaim::{Heap, Reclaim, StreamHandle};

/// All memory that one opened device allocates.
#[derive(Debug)]
pub(super) struct DeviceMemory {
    pool: Pool,
    reclaim: Reclaim,
}

impl DeviceMemory {
    /// Opens the pool and reserves memory for it.
    ///
    /// # Errors
    /// `OutOfMemory` if the device has not enough left, `Unsupported` if it has no pools to reserve
    /// in; `Lost` or `Driver`.
    pub(super) fn open(context: &Arc<Context>, reserved_bytes: u64) -> Result<Self, DeviceError> {
        let pool = Pool::open(context)?;
        let memory = Self { pool, reclaim: Reclaim::default() };
        memory.pool.reserve(reserved_bytes)?;
        Ok(memory)
    }

    /// Allocates zeroed memory. Waits for the zeroing, and for other streams only if nothing is
    /// left but memory of dropped buffers that their work still uses.
    pub(super) fn alloc(&self, bytes: u64) -> Result<Address, DeviceError> {
        let address = self.reclaim.alloc(bytes, &self.pool)?;
        Fresh { pool: &self.pool, address }.zeroed(size_of_bytes(bytes, "allocate")?)
    }

    /// Frees memory after the work that was submitted; does not wait if the device has pools.
    ///
    /// # Safety
    /// 1. `address` came from [`Self::alloc`] and was not freed.
    /// 2. Nothing submitted from now on uses it.
    pub(super) unsafe fn free(&self, address: Address) {
        // SAFETY: conditions 1 and 2.
        unsafe { self.reclaim.free(address, &self.pool) };
    }

    /// Makes the next free wait for all work of the device, on streams of others too.
    pub(super) fn expect_others(&self) {
        self.reclaim.expect_others();
    }

    /// Orders frees after the work of this stream too, until [`Self::close_stream`].
    pub(super) fn open_stream(&self, handle: Arc<dyn StreamHandle>) {
        self.reclaim.open(handle);
    }

    /// Ends that: the stream gets no more work and may be destroyed.
    pub(super) fn close_stream(&self, handle: &dyn StreamHandle) {
        self.reclaim.close(handle, &self.pool);
    }

    /// Waits for all closed streams.
    pub(super) fn wait_for_closed(&self) -> Result<(), DeviceError> {
        self.reclaim.settle(&self.pool)?;
        self.pool.wait_for_frees()
    }

    /// Returns the bytes that the pool holds from the driver, used or not; `None` without a pool.
    #[cfg(test)]
    pub(super) fn held_bytes(&self) -> Option<u64> {
        let attribute = CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT;
        let _current = self.pool.context.enter("test").unwrap();
        let mut bytes = 0_u64;
        let place = (&raw mut bytes).cast::<std::ffi::c_void>();
        // SAFETY: an existing pool, and an out-pointer of the type of this attribute.
        let code = unsafe { sys::cuMemPoolGetAttribute(self.pool.raw?, attribute, place) };
        self.pool.context.check("test", code).unwrap();
        Some(bytes)
    }
}

/// The driver's objects.
#[derive(Debug)]
struct Pool {
    context: Arc<Context>,
    /// `None` if the device has no pools.
    raw: Option<CUmemoryPool>,
    /// The stream that frees are ordered on.
    frees: CUstream,
}

// SAFETY: the driver lets any thread use a pool and a stream.
unsafe impl Send for Pool {}
// SAFETY: and several threads at the same time; `Reclaim` serialises allocations.
unsafe impl Sync for Pool {}

impl Pool {
    fn open(context: &Arc<Context>) -> Result<Self, DeviceError> {
        const POOL: &str = "open a memory pool";
        let frees = context.open_stream(POOL)?;
        let mut pool = Self { context: Arc::clone(context), raw: None, frees };
        if !has_pools(context)? {
            return Ok(pool);
        }
        let _current = context.enter(POOL)?.relax();
        // SAFETY: numbers, a null pointer, and enumerations with a variant 0. Zeroes ask for no
        // handles and no limit, also in fields of later versions.
        let mut properties: CUmemPoolProps = unsafe { std::mem::zeroed() };
        properties.allocType = CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        library::set_device(&mut properties.location, context.device());
        let mut raw = std::ptr::null_mut();
        // SAFETY: an out-pointer for a pool, and properties whose other fields are zero; the driver
        // exports the function, see `has_pools`.
        let code = unsafe { sys::cuMemPoolCreate(&raw mut raw, &raw const properties) };
        if code == CUresult::CUDA_ERROR_NOT_SUPPORTED {
            return Ok(pool);
        }
        context.check(POOL, code)?;
        pool.raw = Some(raw);
        let mut all = u64::MAX;
        let attribute = CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        // SAFETY: a pool that was just made, and a number of the size of this attribute.
        let code = unsafe { sys::cuMemPoolSetAttribute(raw, attribute, (&raw mut all).cast()) };
        context.check(POOL, code)?;
        Ok(pool)
    }

    /// Makes the pool hold `bytes` bytes: it keeps memory that was allocated once.
    fn reserve(&self, bytes: u64) -> Result<(), DeviceError> {
        const RESERVE: &str = "reserve memory";
        if bytes == 0 {
            return Ok(());
        }
        if self.raw.is_none() {
            let reason = "the device has no memory pools";
            return Err(refuse(DeviceErrorKind::Unsupported, RESERVE, reason));
        }
        let address = self.alloc(bytes).map_err(|error| {
            let asked = format!("{bytes} bytes: {error}");
            DeviceError::new(error.kind(), RESERVE).with_detail(asked).with_source(error)
        })?;
        let _current = self.context.enter(RESERVE)?.relax();
        let stream = self.context.setup_stream();
        // SAFETY: allocated above on this stream, and handed to no caller.
        let code = unsafe { sys::cuMemFreeAsync(address, stream) };
        self.context.check(RESERVE, code)?;
        // SAFETY: a stream of the context.
        self.context.check(RESERVE, unsafe { sys::cuStreamSynchronize(stream) })
    }

    /// # Safety
    /// 1. `address` came from `alloc` and was not freed.
    /// 2. The work that uses it is done when `stream` reaches this point; without a pool, it is
    ///    done now.
    unsafe fn free_on(&self, address: Address, stream: CUstream) {
        const FREE: &str = "free";
        // The memory of a lost device is gone.
        let Ok(current) = self.context.enter(FREE) else { return };
        let _current = current.relax();
        let code = match self.raw {
            // SAFETY: conditions 1 and 2.
            Some(_) => unsafe { sys::cuMemFreeAsync(address, stream) },
            // SAFETY: as above.
            None => unsafe { sys::cuMemFree_v2(address) },
        };
        // An error belongs to earlier work; `check` records a loss.
        let _ = self.context.check(FREE, code);
    }
}

impl Heap for Pool {
    fn alloc(&self, bytes: u64) -> Result<Address, DeviceError> {
        const ALLOC: &str = "allocate";
        let size = size_of_bytes(bytes, ALLOC)?;
        let _current = self.context.enter(ALLOC)?.relax();
        let mut address = 0;
        let code = match self.raw {
            Some(pool) => {
                let stream = self.context.setup_stream();
                // SAFETY: an out-pointer for an address, and a pool and a stream of this device.
                unsafe { sys::cuMemAllocFromPoolAsync(&raw mut address, size, pool, stream) }
            }
            // SAFETY: an out-pointer for an address; the context is current.
            None => unsafe { sys::cuMemAlloc_v2(&raw mut address, size) },
        };
        self.context.check(ALLOC, code)?;
        Ok(address)
    }

    fn wait_for_frees(&self) -> Result<(), DeviceError> {
        const WAIT: &str = "wait for frees";
        let _current = self.context.enter(WAIT)?.relax();
        // SAFETY: a stream of the context, alive as long as `self`.
        self.context.check(WAIT, unsafe { sys::cuStreamSynchronize(self.frees) })
    }

    fn wait_for(&self, event: &dyn Event) -> Result<(), DeviceError> {
        const WAIT: &str = "free after an event";
        if self.raw.is_none() {
            return event.wait();
        }
        let event: &dyn Any = event;
        let event = event.downcast_ref::<CudaEvent>();
        let event = event.filter(|event| event.is_of(&self.context)).ok_or_else(|| {
            refuse(DeviceErrorKind::ForeignHandle, WAIT, "an event of another device")
        })?;
        let _current = self.context.enter(WAIT)?.relax();
        // SAFETY: a live stream and a live event of this context.
        let code = unsafe { sys::cuStreamWaitEvent(self.frees, event.handle().0, 0) };
        self.context.check(WAIT, code)
    }

    fn wait_for_device(&self) -> Result<(), DeviceError> {
        const WAIT: &str = "wait for the device";
        let _current = self.context.enter(WAIT)?.relax();
        // SAFETY: the context is current.
        self.context.check(WAIT, unsafe { sys::cuCtxSynchronize() })
    }

    unsafe fn free(&self, address: Address) {
        // SAFETY: both conditions: `frees`, or the host, has waited for the events.
        unsafe { self.free_on(address, self.frees) };
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        const CLOSE: &str = "close a memory pool";
        let Ok(current) = self.context.enter(CLOSE) else { return };
        let _current = current.relax();
        if let Some(pool) = self.raw {
            // SAFETY: made by `open`, destroyed only here. Pending frees complete.
            let code = unsafe { sys::cuMemPoolDestroy(pool) };
            let _ = self.context.check(CLOSE, code);
        }
        // SAFETY: opened by `open`, destroyed only here. Submitted work completes.
        let code = unsafe { sys::cuStreamDestroy_v2(self.frees) };
        let _ = self.context.check(CLOSE, code);
    }
}

/// Memory that was not handed out yet; freed if the rest of the allocation fails.
struct Fresh<'a> {
    pool: &'a Pool,
    address: Address,
}

impl Fresh<'_> {
    fn zeroed(self, size: usize) -> Result<Address, DeviceError> {
        const ZERO: &str = "zero fresh memory";
        if !self.address.is_multiple_of(ALIGNMENT) {
            let reason = format!("the driver's memory is not aligned to {ALIGNMENT} bytes");
            return Err(refuse(DeviceErrorKind::Driver, ZERO, reason));
        }
        let context = &self.pool.context;
        let _current = context.enter(ZERO)?.relax();
        let stream = context.setup_stream();
        // SAFETY: the range was just allocated, on this stream.
        let code = unsafe { sys::cuMemsetD8Async(self.address, 0, size, stream) };
        context.check(ZERO, code)?;
        // SAFETY: a stream of the context.
        context.check(ZERO, unsafe { sys::cuStreamSynchronize(stream) })?;
        let address = self.address;
        std::mem::forget(self);
        Ok(address)
    }
}

impl Drop for Fresh<'_> {
    fn drop(&mut self) {
        // SAFETY: allocated on this stream, and handed to no caller.
        unsafe { self.pool.free_on(self.address, self.pool.context.setup_stream()) };
    }
}

/// Returns whether driver and device have memory pools.
fn has_pools(context: &Context) -> Result<bool, DeviceError> {
    let attribute = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED;
    let supported = facts::number(OPEN, |value| {
        // SAFETY: an out-pointer for a number, and a device of this driver.
        unsafe { sys::cuDeviceGetAttribute(value, attribute, context.device()) }
    })?;
    Ok(context.driver.pools && supported != 0)
}

fn size_of_bytes(bytes: u64, operation: &'static str) -> Result<usize, DeviceError> {
    usize::try_from(bytes).map_err(|_| {
        let reason = format!("{bytes} bytes exceed the address space");
        refuse(DeviceErrorKind::OutOfMemory, operation, reason)
    })
}

/// Alignment that `Gpu::alloc` guarantees.
const ALIGNMENT: u64 = 256;
