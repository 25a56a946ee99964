//! A GPU that does nothing, so that benches measure the host's work alone.
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kv_core::error::{DeviceError, DeviceErrorKind};

use super::SHARED_BYTES_MAX;
use super::memory::HostMemory;
use crate::gpu::{Event, Facts, Gpu, Launch, Pinned, Stream};
use crate::params::Address;

/// Alignment of its addresses.
const ALIGN: u64 = 256;

/// Hands out addresses without memory; all work is done at once.
#[derive(Debug)]
pub(crate) struct Idle {
    facts: Facts,
    /// Address of the next allocation.
    next: AtomicU64,
}

impl Idle {
    pub(crate) fn new(multiprocessors: u32) -> Self {
        let facts = Facts {
            card: "a GPU that does nothing".to_owned(),
            multiprocessors,
            capability: 90,
            memory: 1 << 46,
            shared_bytes_max: SHARED_BYTES_MAX,
        };
        Self { facts, next: AtomicU64::new(ALIGN) }
    }
}

impl Gpu for Idle {
    fn name(&self) -> &'static str {
        "idle"
    }
    fn facts(&self) -> &Facts {
        &self.facts
    }
    fn alloc(&self, bytes: u64) -> Result<Address, DeviceError> {
        // Its memory has no end: what counts is that addresses differ.
        let bytes = bytes.checked_next_multiple_of(ALIGN).unwrap_or(u64::MAX);
        Ok(self.next.fetch_add(bytes, Ordering::Relaxed))
    }
    unsafe fn free(&self, _address: Address) {}
    fn pinned(&self, bytes: usize) -> Result<Box<dyn Pinned>, DeviceError> {
        let memory = HostMemory::new(bytes);
        let memory =
            memory.ok_or_else(|| DeviceError::new(DeviceErrorKind::OutOfMemory, "pinned"))?;
        Ok(Box::new(memory))
    }
    fn stream(&self) -> Result<Box<dyn Stream>, DeviceError> {
        Ok(Box::new(IdleStream))
    }
}

/// Accepts work and ignores it.
#[derive(Debug)]
struct IdleStream;

impl Stream for IdleStream {
    unsafe fn upload(
        &mut self,
        _to: Address,
        _from: *const u8,
        _bytes: usize,
    ) -> Result<(), DeviceError> {
        Ok(())
    }
    unsafe fn download(
        &mut self,
        _to: *mut u8,
        _from: Address,
        _bytes: usize,
    ) -> Result<(), DeviceError> {
        Err(DeviceError::new(DeviceErrorKind::Unsupported, "download"))
    }
    unsafe fn zero(&mut self, _at: Address, _bytes: u64) -> Result<(), DeviceError> {
        Ok(())
    }
    unsafe fn launch(&mut self, launch: &Launch, params: &[u8]) -> Result<(), DeviceError> {
        std::hint::black_box((launch, params));
        Ok(())
    }
    fn record(&mut self) -> Result<Arc<dyn Event>, DeviceError> {
        Ok(Arc::new(Done))
    }
    fn wait_for(&mut self, _event: &Arc<dyn Event>) -> Result<(), DeviceError> {
        Ok(())
    }
}

/// The event of work that is always done.
#[derive(Debug)]
struct Done;

impl Event for Done {
    fn is_done(&self) -> Result<bool, DeviceError> {
        Ok(true)
    }
    fn wait(&self) -> Result<(), DeviceError> {
        Ok(())
    }
}
