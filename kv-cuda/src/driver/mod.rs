//! A real GPU, through NVIDIA's driver library, which is loaded when a device is opened.
//!
//! A machine without a driver, a device or fitting code gets `Unsupported` with the reason, never a
//! panic. Below [`CudaGpu`], everything uses cudarc's raw bindings: its safe layer keeps events for
//! every allocation, which this crate's queues order themselves.
mod batch;
mod compile;
mod context;
mod dependent;
mod error;
mod event;
mod facts;
mod graph;
mod handle;
mod library;
mod memory;
mod modules;
mod options;
mod pool;
mod stream;
#[cfg(test)]
mod tests;

use std::ffi::c_void;
use std::sync::Arc;

use kv_core::error::DeviceError;

use crate::gpu::{Event, Facts, Gpu, Pinned, Stream};
use crate::params::Address;
use context::Context;
use event::CudaEvent;
use memory::PinnedMemory;
use modules::Modules;
use pool::DeviceMemory;
use stream::CudaStream;

pub use facts::{CardFacts, cards};
pub use options::CudaOptions;

/// An opened device.
#[derive(Debug)]
pub(crate) struct CudaGpu {
    facts: Facts,
    context: Arc<Context>,
    memory: Arc<DeviceMemory>,
    modules: Arc<Modules>,
}

impl CudaGpu {
    /// Opens a device.
    ///
    /// # Errors
    /// `Unsupported` without a driver library, without the device, for a device older than compute
    /// capability 8.0, for a driver that lacks a needed function, if neither the embedded code nor
    /// a compiler on this machine fits, and if memory is to be reserved and the device has no
    /// pools; `OutOfMemory` if it has less memory than is to be reserved; `Lost` and `Driver`.
    pub(crate) fn open(options: &CudaOptions) -> Result<Self, DeviceError> {
        let driver = facts::require_driver()?;
        let device = facts::device(options.ordinal)?;
        let facts = facts::read(device)?;
        facts::require_capability(&facts)?;
        let context = Arc::new(Context::open(device, driver)?);
        let memory = Arc::new(DeviceMemory::open(&context, options.reserved_bytes)?);
        let modules = Modules::new((&context, &memory), &facts, options)?;
        modules.probe()?;
        Ok(Self { facts, context, memory, modules: Arc::new(modules) })
    }
}

impl Gpu for CudaGpu {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn facts(&self) -> &Facts {
        &self.facts
    }

    fn serial_launches(&self) -> Option<String> {
        self.modules.serial_launches()
    }

    fn alloc(&self, bytes: u64) -> Result<Address, DeviceError> {
        self.memory.alloc(bytes)
    }

    unsafe fn free(&self, address: Address) {
        // SAFETY: both are conditions of this function.
        unsafe { self.memory.free(address) }
    }

    fn expect_others(&self) {
        self.memory.expect_others();
    }

    fn pinned(&self, bytes: usize) -> Result<Box<dyn Pinned>, DeviceError> {
        Ok(Box::new(PinnedMemory::new(&self.context, bytes)?))
    }

    fn stream(&self) -> Result<Box<dyn Stream>, DeviceError> {
        Ok(Box::new(CudaStream::open(&self.context, &self.modules, &self.memory)?))
    }

    fn check_foreign(&self, address: Address, bytes: u64) -> Result<(), DeviceError> {
        memory::check_foreign(&self.context, address, bytes)
    }

    fn is_context(&self, raw: *const c_void) -> bool {
        raw.addr() == self.context.raw().addr()
    }

    unsafe fn foreign_stream(&self, raw: *mut c_void) -> Result<Box<dyn Stream>, DeviceError> {
        // SAFETY: both are conditions of this function.
        let stream = unsafe { CudaStream::wrap(&self.context, &self.modules, &self.memory, raw) }?;
        Ok(Box::new(stream))
    }

    unsafe fn mark_foreign(&self, raw: *mut c_void) -> Result<Arc<dyn Event>, DeviceError> {
        // SAFETY: condition 1.
        unsafe { memory::check_stream(&self.context, raw.cast()) }?;
        // SAFETY: condition 1; it was found to be of this context.
        let event = unsafe { CudaEvent::record(&self.context, raw.cast()) }?;
        Ok(Arc::new(event))
    }

    unsafe fn hold_foreign(
        &self,
        raw: *mut c_void,
        event: &Arc<dyn Event>,
    ) -> Result<(), DeviceError> {
        // SAFETY: condition 1.
        unsafe { memory::check_stream(&self.context, raw.cast()) }?;
        // SAFETY: condition 1; it was found to be of this context.
        unsafe { CudaEvent::hold(&self.context, raw.cast(), &**event) }
    }
}
