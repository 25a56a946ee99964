//! The device's memory: a pool of the driver's, and what is freed behind the work that uses it.
//!
//! Memory that was freed stays in the pool for the next allocation, so that neither stalls the
//! device. Allocations are ordered on the setup stream, which the host waits for; frees on a stream
//! of their own, which [`Reclaim`] lets wait for every other. The driver gives a freed piece out
//! again only where that stream has passed it, or makes the allocation wait until it has.
//!
//! A device without pools gets plain allocations: there the host waits for the streams before it
//! frees, as the driver would.
use std::any::Any;
use std::sync::Arc;

use cudarc::driver::sys::CUmemAllocationHandleType as HandleType;
use cudarc::driver::sys::{
    self, CUdevice_attribute, CUmemAllocationType, CUmemLocation, CUmemLocationType,
    CUmemPool_attribute, CUmemPoolProps, CUmemoryPool, CUresult, CUstream,
};
use kv_core::{DeviceError, DeviceErrorKind};

use super::context::Context;
use super::error::refuse;
use super::event::CudaEvent;
use super::facts::{self, OPEN};
use crate::gpu::Event;
use crate::params::Address;
use crate::reclaim::{Heap, Lane, Reclaim};

/// All memory that one opening of a device gives out.
#[derive(Debug)]
pub(super) struct DeviceMemory {
    pool: Pool,
    reclaim: Reclaim,
}

impl DeviceMemory {
    /// Opens the pool and reserves memory for it.
    ///
    /// # Errors
    /// `OutOfMemory` where the device has not so much left, `Unsupported` where it has no pools to
    /// reserve for; `Lost` or `Driver`.
    pub(super) fn open(context: &Arc<Context>, reserved_bytes: u64) -> Result<Self, DeviceError> {
        let pool = Pool::open(context)?;
        let memory = Self { pool, reclaim: Reclaim::default() };
        memory.pool.reserve(reserved_bytes)?;
        Ok(memory)
    }

    /// Memory with all bytes zero. Waits for the zeroes, and for work on other streams only where
    /// the memory is that of buffers which this work uses and nothing else is left.
    pub(super) fn alloc(&self, bytes: u64) -> Result<Address, DeviceError> {
        let address = self.reclaim.alloc(bytes, &self.pool)?;
        Fresh { pool: &self.pool, address }.zeroed(size_of_bytes(bytes, "allocate")?)
    }

    /// Gives memory back behind the work that was submitted; waits for nothing where the device has
    /// pools.
    ///
    /// # Safety
    /// 1. `address` came from [`Self::alloc`] and was not freed.
    /// 2. Nothing submitted from now on uses it.
    pub(super) unsafe fn free(&self, address: Address) {
        // SAFETY: conditions 1 and 2.
        unsafe { self.reclaim.free(address, &self.pool) };
    }

    /// Memory is freed behind the work of this stream too, from here to [`Self::close_lane`].
    pub(super) fn open_lane(&self, lane: Arc<dyn Lane>) {
        self.reclaim.open(lane);
    }

    /// The stream gets no more work and may be destroyed.
    pub(super) fn close_lane(&self, lane: &dyn Lane) {
        self.reclaim.close(lane, &self.pool);
    }

    /// Waits for all streams that were closed.
    pub(super) fn wait_for_closed(&self) -> Result<(), DeviceError> {
        self.reclaim.settle(&self.pool)?;
        self.pool.wait_for_frees()
    }

    /// Bytes that the pool has from the driver, in use or not; `None` without a pool.
    #[cfg(test)]
    pub(super) fn held_bytes(&self) -> Option<u64> {
        let attribute = CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT;
        let _current = self.pool.context.enter("test").unwrap();
        let mut bytes = 0_u64;
        let place = (&raw mut bytes).cast::<std::ffi::c_void>();
        // SAFETY: a pool that is there, and the place that this attribute takes.
        let code = unsafe { sys::cuMemPoolGetAttribute(self.pool.raw?, attribute, place) };
        self.pool.context.check("test", code).unwrap();
        Some(bytes)
    }
}

/// The driver's part of it.
#[derive(Debug)]
struct Pool {
    context: Arc<Context>,
    /// None where the device has no pools.
    raw: Option<CUmemoryPool>,
    /// The stream that frees are ordered on.
    frees: CUstream,
}

// SAFETY: the driver lets any thread use a pool and a stream.
unsafe impl Send for Pool {}
// SAFETY: and several at the same time; `Reclaim` lets one at a time take memory.
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
        let properties = CUmemPoolProps {
            allocType: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            handleTypes: HandleType::CU_MEM_HANDLE_TYPE_NONE,
            location: CUmemLocation {
                type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
                id: context.device(),
            },
            win32SecurityAttributes: std::ptr::null_mut(),
            maxSize: 0,
            usage: 0,
            reserved: [0; 54],
        };
        let mut raw = std::ptr::null_mut();
        // SAFETY: a place for a pool, and properties of which all that is not named is zero; the
        // driver exports the function, see `has_pools`.
        let code = unsafe { sys::cuMemPoolCreate(&raw mut raw, &raw const properties) };
        if code == CUresult::CUDA_ERROR_NOT_SUPPORTED {
            return Ok(pool);
        }
        context.check(POOL, code)?;
        pool.raw = Some(raw);
        let mut all = u64::MAX;
        let attribute = CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        // SAFETY: a pool that was just made, and a number of the size that this attribute has.
        let code = unsafe { sys::cuMemPoolSetAttribute(raw, attribute, (&raw mut all).cast()) };
        context.check(POOL, code)?;
        Ok(pool)
    }

    /// Makes the pool hold so many bytes: what was allocated once, it keeps.
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
        // SAFETY: allocated above on this stream, and given to nobody.
        let code = unsafe { sys::cuMemFreeAsync(address, stream) };
        self.context.check(RESERVE, code)?;
        // SAFETY: a stream of the context.
        self.context.check(RESERVE, unsafe { sys::cuStreamSynchronize(stream) })
    }

    /// # Safety
    /// 1. `address` came from `alloc` and was not freed.
    /// 2. What uses it is done when `stream` gets here; or everywhere, without a pool.
    unsafe fn free_on(&self, address: Address, stream: CUstream) {
        const FREE: &str = "free";
        // Memory of a lost device went with its context.
        let Ok(current) = self.context.enter(FREE) else { return };
        let _current = current.relax();
        let code = match self.raw {
            // SAFETY: conditions 1 and 2.
            Some(_) => unsafe { sys::cuMemFreeAsync(address, stream) },
            // SAFETY: as above.
            None => unsafe { sys::cuMemFree_v2(address) },
        };
        // An error is one of the work before it; `check` remembers a loss.
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
                // SAFETY: a place for an address, and a pool and a stream of this device.
                unsafe { sys::cuMemAllocFromPoolAsync(&raw mut address, size, pool, stream) }
            }
            // SAFETY: a place for an address; the context is current.
            None => unsafe { sys::cuMemAlloc_v2(&raw mut address, size) },
        };
        self.context.check(ALLOC, code)?;
        Ok(address)
    }

    fn wait_for_frees(&self) -> Result<(), DeviceError> {
        const WAIT: &str = "wait for frees";
        let _current = self.context.enter(WAIT)?.relax();
        // SAFETY: a stream of the context, which lives as long as `self`.
        self.context.check(WAIT, unsafe { sys::cuStreamSynchronize(self.frees) })
    }

    fn wait_for(&self, event: &dyn Event) -> Result<(), DeviceError> {
        const WAIT: &str = "free behind an event";
        if self.raw.is_none() {
            return event.wait();
        }
        let event: &dyn Any = event;
        let event = event.downcast_ref::<CudaEvent>();
        let event = event.filter(|event| event.is_of(&self.context)).ok_or_else(|| {
            refuse(DeviceErrorKind::ForeignHandle, WAIT, "an event of another device")
        })?;
        let _current = self.context.enter(WAIT)?.relax();
        // SAFETY: a stream and an event of this context that live.
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
            // SAFETY: made by `open`, destroyed here alone. What is not free yet stays until it is.
            let code = unsafe { sys::cuMemPoolDestroy(pool) };
            let _ = self.context.check(CLOSE, code);
        }
        // SAFETY: opened by `open`, destroyed here alone. Work that was submitted goes on.
        let code = unsafe { sys::cuStreamDestroy_v2(self.frees) };
        let _ = self.context.check(CLOSE, code);
    }
}

/// Memory that nobody has yet, which goes back when the rest of an allocation fails.
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
        // SAFETY: the range is what was just reserved, on this stream.
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
        // SAFETY: reserved on this stream, and given to nobody.
        unsafe { self.pool.free_on(self.address, self.pool.context.setup_stream()) };
    }
}

/// Whether the driver and the device have memory pools.
fn has_pools(context: &Context) -> Result<bool, DeviceError> {
    let attribute = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED;
    let supported = facts::number(OPEN, |value| {
        // SAFETY: a place for a number, and a device of this driver.
        unsafe { sys::cuDeviceGetAttribute(value, attribute, context.device()) }
    })?;
    Ok(context.driver.pools && supported != 0)
}

fn size_of_bytes(bytes: u64, operation: &'static str) -> Result<usize, DeviceError> {
    usize::try_from(bytes).map_err(|_| {
        let reason = format!("{bytes} bytes have no size");
        refuse(DeviceErrorKind::OutOfMemory, operation, reason)
    })
}

/// What `Gpu::alloc` promises.
const ALIGNMENT: u64 = 256;
