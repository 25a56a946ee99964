//! Memory of the late GPU: its frees, and the detection of work that runs after them.
use std::any::Any;
use std::sync::{Arc, Mutex};

use kv_core::error::{DeviceError, DeviceErrorKind};

use super::{LateEvent, LateState, Work, lock};
use crate::emulated::Emulator;
use crate::gpu::{Event, Gpu, Pinned};
use crate::params::Address;
use crate::reclaim::Heap;

/// The stream of frees.
#[derive(Debug)]
pub(super) struct LateHeap {
    pub(super) emulator: Arc<Emulator>,
    pub(super) state: Arc<Mutex<LateState>>,
}

impl LateHeap {
    fn submit(&self, work: Work) -> Result<(), DeviceError> {
        let mut state = lock(&self.state);
        state.frees.push_back(work);
        if state.is_early { state.run_frees(&self.emulator) } else { Ok(()) }
    }
}

impl Heap for LateHeap {
    fn alloc(&self, bytes: u64) -> Result<Address, DeviceError> {
        self.emulator.alloc(bytes)
    }
    fn wait_for_frees(&self) -> Result<(), DeviceError> {
        lock(&self.state).run_frees(&self.emulator)
    }
    fn wait_for(&self, event: &dyn Event) -> Result<(), DeviceError> {
        let event: &dyn Any = event;
        self.submit(Work::Wait(event.downcast_ref::<LateEvent>().unwrap().event))
    }
    fn wait_for_device(&self) -> Result<(), DeviceError> {
        assert_eq!(lock(&self.state).submits_left, Some(0), "every stream can be marked");
        Err(DeviceError::new(DeviceErrorKind::Lost, "wait"))
    }
    unsafe fn free(&self, address: Address) {
        // Memory of a lost device is gone.
        let _ = self.submit(Work::Free(address));
    }
}

#[derive(Debug)]
pub(super) struct LatePinned {
    pub(super) memory: Box<dyn Pinned>,
    pub(super) state: Arc<Mutex<LateState>>,
}

impl Pinned for LatePinned {
    fn base(&self) -> *mut u8 {
        self.memory.base()
    }
    fn len(&self) -> usize {
        self.memory.len()
    }
}

impl Drop for LatePinned {
    fn drop(&mut self) {
        let range = self.base().addr()..self.base().addr() + self.len();
        let mut state = lock(&self.state);
        let work = state.streams.iter().flat_map(|stream| &stream.work);
        let is_used = work.flat_map(Work::copies).any(|copy| range.contains(&copy.host.addr()));
        state.freed_early |= is_used;
        state.pinned -= 1;
        if is_used {
            // Later runs must not touch freed memory.
            state.streams.iter_mut().for_each(|stream| stream.work.clear());
        }
    }
}
