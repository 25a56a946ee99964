//! Memory of the late GPU: what frees it, and what finds that it was freed under work.
use std::any::Any;
use std::sync::{Arc, Mutex};

use kv_core::{DeviceError, DeviceErrorKind};

use super::{LateEvent, Work, World, lock};
use crate::emulated::Emulator;
use crate::gpu::{Event, Gpu, Pinned};
use crate::params::Address;
use crate::reclaim::Heap;

/// The stream that memory is freed on.
#[derive(Debug)]
pub(super) struct LateHeap {
    pub(super) emulator: Arc<Emulator>,
    pub(super) world: Arc<Mutex<World>>,
}

impl LateHeap {
    fn submit(&self, work: Work) -> Result<(), DeviceError> {
        let mut world = lock(&self.world);
        world.frees.push_back(work);
        if world.is_early { world.run_frees(&self.emulator) } else { Ok(()) }
    }
}

impl Heap for LateHeap {
    fn alloc(&self, bytes: u64) -> Result<Address, DeviceError> {
        self.emulator.alloc(bytes)
    }
    fn wait_for_frees(&self) -> Result<(), DeviceError> {
        lock(&self.world).run_frees(&self.emulator)
    }
    fn wait_for(&self, event: &dyn Event) -> Result<(), DeviceError> {
        let event: &dyn Any = event;
        self.submit(Work::Wait(event.downcast_ref::<LateEvent>().unwrap().event))
    }
    fn wait_for_device(&self) -> Result<(), DeviceError> {
        assert_eq!(lock(&self.world).submits_left, Some(0), "every stream can be marked");
        Err(DeviceError::new(DeviceErrorKind::Lost, "wait"))
    }
    unsafe fn free(&self, address: Address) {
        // What a lost device had is gone.
        let _ = self.submit(Work::Free(address));
    }
}

#[derive(Debug)]
pub(super) struct LatePinned {
    pub(super) memory: Box<dyn Pinned>,
    pub(super) world: Arc<Mutex<World>>,
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
        let mut world = lock(&self.world);
        let work = world.streams.iter().flat_map(|stream| &stream.work);
        let is_used = work.flat_map(Work::copies).any(|copy| range.contains(&copy.host.addr()));
        world.freed_early |= is_used;
        world.pinned -= 1;
        if is_used {
            // So that what runs later touches nothing that is gone.
            world.streams.iter_mut().for_each(|stream| stream.work.clear());
        }
    }
}
