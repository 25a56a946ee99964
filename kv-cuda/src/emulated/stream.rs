//! Streams of the emulated GPU: what is submitted is done at once.
use std::any::Any;
use std::ptr;
use std::sync::Arc;

use kv_core::{DeviceError, DeviceErrorKind};

use super::library::Library;
use super::memory::Memory;
use crate::gpu::{Event, Launch, Stream};
use crate::params::Address;

/// An ordered lane of work that is done as soon as it is submitted.
#[derive(Debug)]
pub(super) struct EmulatedStream {
    library: Arc<Library>,
    memory: Arc<Memory>,
    /// 0 keeps blocks and threads in order.
    seed: u32,
    launches: u32,
}

impl EmulatedStream {
    pub(super) fn new(library: Arc<Library>, memory: Arc<Memory>, seed: u32) -> Self {
        Self { library, memory, seed, launches: 0 }
    }

    /// The seed of the next launch; 0 stays 0.
    fn next_seed(&mut self) -> u32 {
        if self.seed == 0 {
            return 0;
        }
        self.launches = self.launches.wrapping_add(1);
        self.seed.wrapping_add(self.launches.wrapping_mul(SEED_STEP)).max(1)
    }
}

impl Stream for EmulatedStream {
    unsafe fn upload(
        &mut self,
        to: Address,
        from: *const u8,
        bytes: usize,
    ) -> Result<(), DeviceError> {
        let to = self.memory.find(to, byte_count(bytes), "upload")?;
        // SAFETY: `find` has found the bytes at `to`, those at `from` are condition 1; memory of
        // the device and page-locked memory are allocations of their own.
        unsafe { ptr::copy_nonoverlapping(from, to, bytes) };
        Ok(())
    }

    unsafe fn download(
        &mut self,
        to: *mut u8,
        from: Address,
        bytes: usize,
    ) -> Result<(), DeviceError> {
        let from = self.memory.find(from, byte_count(bytes), "download")?;
        // SAFETY: `find` has found the bytes at `from`, those at `to` are condition 1; memory of
        // the device and page-locked memory are allocations of their own.
        unsafe { ptr::copy_nonoverlapping(from, to, bytes) };
        Ok(())
    }

    unsafe fn zero(&mut self, at: Address, bytes: u64) -> Result<(), DeviceError> {
        let to = self.memory.find(at, bytes, "zero")?;
        let bytes = usize::try_from(bytes).unwrap_or(0);
        // SAFETY: `find` has found the bytes at `at`, so their number is one that memory has.
        unsafe { ptr::write_bytes(to, 0, bytes) };
        Ok(())
    }

    unsafe fn launch(&mut self, launch: &Launch, params: &[u8]) -> Result<(), DeviceError> {
        let seed = self.next_seed();
        // SAFETY: condition 1 of this function is that of the library's.
        unsafe { self.library.launch(launch, params, seed) }
    }

    fn record(&mut self) -> Result<Arc<dyn Event>, DeviceError> {
        Ok(Arc::new(Done { memory: Arc::clone(&self.memory) }))
    }

    fn wait_for(&mut self, event: &Arc<dyn Event>) -> Result<(), DeviceError> {
        let event: &dyn Any = &**event;
        let ours = event.downcast_ref::<Done>();
        if ours.is_some_and(|done| Arc::ptr_eq(&done.memory, &self.memory)) {
            return Ok(());
        }
        Err(DeviceError::new(DeviceErrorKind::ForeignHandle, "wait_for"))
    }
}

/// An event: everything before it was done when it was recorded.
#[derive(Debug)]
struct Done {
    /// Tells devices apart.
    memory: Arc<Memory>,
}

impl Event for Done {
    fn is_done(&self) -> Result<bool, DeviceError> {
        Ok(true)
    }

    fn wait(&self) -> Result<(), DeviceError> {
        Ok(())
    }
}

fn byte_count(bytes: usize) -> u64 {
    u64::try_from(bytes).unwrap_or(u64::MAX)
}

/// An odd number with bits all over, so that the seeds of neighbours have little in common.
const SEED_STEP: u32 = 0x9e37_79b9;
