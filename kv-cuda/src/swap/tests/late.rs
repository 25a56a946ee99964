//! An emulated GPU whose streams do nothing before somebody waits.
//!
//! Work that lacks an order then takes effect in the wrong one: a stream runs up to the event that
//! is waited for, and other streams only as far as it waits for theirs. Or all streams but the
//! first run at once, and the first is the late one. A batch runs backwards.
use std::any::Any;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kv_core::{DeviceError, DeviceErrorKind};

use crate::emulated::{Emulator, EmulatorOptions};
use crate::gpu::{Event, Facts, Gpu, HostCopy, Launch, Pinned, Stream};
use crate::params::Address;

/// What was submitted, for tests to compare.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Note {
    /// Pieces of a batch to the device.
    Up(usize),
    /// Pieces of a batch to the host.
    Down(usize),
    Zero,
    /// For the event with this number.
    Wait(usize),
    /// The event with this number.
    Mark(usize),
}

#[derive(Debug)]
pub(super) struct LateGpu {
    emulator: Emulator,
    facts: Facts,
    pub(super) world: Arc<Mutex<World>>,
}

/// All streams of the device.
#[derive(Debug, Default)]
pub(super) struct World {
    lanes: Vec<Lane>,
    /// Stream of each event, and whether it is done.
    events: Vec<(usize, bool)>,
    /// Everything that was submitted, with its stream.
    pub(super) notes: Vec<(usize, Note)>,
    /// Page-locked memory that is there.
    pub(super) pinned: usize,
    /// Page-locked memory was freed under a copy.
    pub(super) freed_early: bool,
    /// All streams but the first run at once.
    pub(super) is_early: bool,
    /// How much can be submitted before the device is lost, if it will be.
    pub(super) submits_left: Option<usize>,
}

#[derive(Debug)]
struct Lane {
    stream: Box<dyn Stream>,
    work: VecDeque<Work>,
}

#[derive(Debug)]
struct Work {
    note: Note,
    copies: Vec<HostCopy>,
    zero: (Address, u64),
}

// SAFETY: its addresses are used by one thread at a time, behind the mutex of the world.
unsafe impl Send for Work {}

/// A test that fails drops what it holds, and that needs the world too.
pub(super) fn lock(world: &Mutex<World>) -> MutexGuard<'_, World> {
    world.lock().unwrap_or_else(PoisonError::into_inner)
}

impl LateGpu {
    /// One whose buffers have so many bytes at most.
    pub(super) fn open(buffer_bytes_max: u64) -> Arc<Self> {
        let emulator = Emulator::open(&EmulatorOptions::default()).unwrap();
        let facts = Facts { memory: buffer_bytes_max, ..emulator.facts().clone() };
        Arc::new(Self { emulator, facts, world: Arc::default() })
    }
}

impl World {
    /// Work that was submitted and has not run.
    pub(super) fn num_late(&self) -> usize {
        self.lanes.iter().map(|lane| lane.work.len()).sum()
    }

    fn submit(&mut self, lane: usize, work: Work) -> Result<(), DeviceError> {
        match &mut self.submits_left {
            Some(0) => return Err(DeviceError::new(DeviceErrorKind::Lost, "submit")),
            Some(left) => *left -= 1,
            None => {}
        }
        self.notes.push((lane, work.note.clone()));
        self.lanes[lane].work.push_back(work);
        while self.is_early && lane > 0 && !self.lanes[lane].work.is_empty() {
            self.step(lane)?;
        }
        Ok(())
    }

    /// Runs the stream of an event up to it.
    fn reach(&mut self, event: usize) -> Result<(), DeviceError> {
        if self.submits_left == Some(0) {
            return Err(DeviceError::new(DeviceErrorKind::Lost, "wait"));
        }
        while !self.events[event].1 {
            let lane = self.events[event].0;
            self.step(lane)?;
        }
        Ok(())
    }

    fn step(&mut self, lane: usize) -> Result<(), DeviceError> {
        let work = self.lanes[lane].work.pop_front().unwrap();
        let stream = &mut self.lanes[lane].stream;
        for copy in work.copies.iter().rev() {
            match work.note {
                // SAFETY: who submitted it promised that both ranges stay until it has run.
                Note::Up(_) => unsafe { stream.upload(copy.device, copy.host, copy.bytes)? },
                // SAFETY: as above.
                _ => unsafe { stream.download(copy.host, copy.device, copy.bytes)? },
            }
        }
        match work.note {
            // SAFETY: as above.
            Note::Zero => unsafe { stream.zero(work.zero.0, work.zero.1)? },
            Note::Wait(event) => self.reach(event)?,
            Note::Mark(event) => self.events[event].1 = true,
            Note::Up(_) | Note::Down(_) => {}
        }
        Ok(())
    }

    fn run_all(&mut self) {
        if self.submits_left == Some(0) {
            return;
        }
        for lane in 0..self.lanes.len() {
            while !self.lanes[lane].work.is_empty() {
                self.step(lane).unwrap();
            }
        }
    }
}

impl Gpu for LateGpu {
    fn name(&self) -> &'static str {
        "late"
    }
    fn facts(&self) -> &Facts {
        &self.facts
    }
    fn alloc(&self, bytes: u64) -> Result<Address, DeviceError> {
        self.emulator.alloc(bytes)
    }
    unsafe fn free(&self, address: Address) {
        lock(&self.world).run_all();
        // SAFETY: conditions of this function; what was submitted has run.
        unsafe { self.emulator.free(address) };
    }
    fn pinned(&self, bytes: usize) -> Result<Box<dyn Pinned>, DeviceError> {
        let memory = self.emulator.pinned(bytes)?;
        lock(&self.world).pinned += 1;
        Ok(Box::new(LatePinned { memory, world: Arc::clone(&self.world) }))
    }
    fn stream(&self) -> Result<Box<dyn Stream>, DeviceError> {
        let mut world = lock(&self.world);
        let lane = world.lanes.len();
        world.lanes.push(Lane { stream: self.emulator.stream()?, work: VecDeque::new() });
        Ok(Box::new(LateStream { world: Arc::clone(&self.world), lane }))
    }
}

#[derive(Debug)]
struct LatePinned {
    memory: Box<dyn Pinned>,
    world: Arc<Mutex<World>>,
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
        let mut copies = world.lanes.iter().flat_map(|lane| &lane.work).flat_map(|w| &w.copies);
        let is_used = copies.any(|copy| range.contains(&copy.host.addr()));
        world.freed_early |= is_used;
        world.pinned -= 1;
        if is_used {
            // So that what runs later touches nothing that is gone.
            world.lanes.iter_mut().for_each(|lane| lane.work.clear());
        }
    }
}

#[derive(Debug)]
struct LateStream {
    world: Arc<Mutex<World>>,
    lane: usize,
}

impl LateStream {
    fn submit(
        &self,
        note: Note,
        copies: &[HostCopy],
        zero: (Address, u64),
    ) -> Result<(), DeviceError> {
        let work = Work { note, copies: copies.to_vec(), zero };
        lock(&self.world).submit(self.lane, work)
    }
}

impl Stream for LateStream {
    unsafe fn upload(
        &mut self,
        to: Address,
        from: *const u8,
        bytes: usize,
    ) -> Result<(), DeviceError> {
        let copy = HostCopy { host: from.cast_mut(), device: to, bytes };
        self.submit(Note::Up(1), &[copy], (0, 0))
    }
    unsafe fn download(
        &mut self,
        to: *mut u8,
        from: Address,
        bytes: usize,
    ) -> Result<(), DeviceError> {
        let copy = HostCopy { host: to, device: from, bytes };
        self.submit(Note::Down(1), &[copy], (0, 0))
    }
    unsafe fn upload_batch(&mut self, copies: &[HostCopy]) -> Result<(), DeviceError> {
        self.submit(Note::Up(copies.len()), copies, (0, 0))
    }
    unsafe fn download_batch(&mut self, copies: &[HostCopy]) -> Result<(), DeviceError> {
        self.submit(Note::Down(copies.len()), copies, (0, 0))
    }
    unsafe fn zero(&mut self, at: Address, bytes: u64) -> Result<(), DeviceError> {
        self.submit(Note::Zero, &[], (at, bytes))
    }
    unsafe fn launch(&mut self, launch: &Launch, _params: &[u8]) -> Result<(), DeviceError> {
        unreachable!("swapping launches nothing, and here is {launch:?}")
    }
    fn record(&mut self) -> Result<Arc<dyn Event>, DeviceError> {
        let event = {
            let mut world = lock(&self.world);
            world.events.push((self.lane, false));
            world.events.len() - 1
        };
        self.submit(Note::Mark(event), &[], (0, 0))?;
        Ok(Arc::new(LateEvent { world: Arc::clone(&self.world), event }))
    }
    fn wait_for(&mut self, event: &Arc<dyn Event>) -> Result<(), DeviceError> {
        let event: &dyn Any = &**event;
        let event = event.downcast_ref::<LateEvent>().unwrap();
        assert!(Arc::ptr_eq(&event.world, &self.world), "an event of another device");
        self.submit(Note::Wait(event.event), &[], (0, 0))
    }
}

#[derive(Debug)]
struct LateEvent {
    world: Arc<Mutex<World>>,
    event: usize,
}

impl Event for LateEvent {
    fn is_done(&self) -> Result<bool, DeviceError> {
        Ok(lock(&self.world).events[self.event].1)
    }
    fn wait(&self) -> Result<(), DeviceError> {
        lock(&self.world).reach(self.event)
    }
}
