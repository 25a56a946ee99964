//! An emulated GPU whose streams run only when something waits for them.
//!
//! Missing ordering then shows: a stream runs up to the event that is waited for, and other streams
//! only as far as it waits for theirs. In another mode, all streams but the first run at once, and
//! only the first is late. Copies of a batch run in reverse. Memory is freed on a stream of its
//! own, as the driver does it: work that runs after the free fails.
mod memory;

use std::any::Any;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kv_core::error::{DeviceError, DeviceErrorKind};

use crate::emulated::{Emulator, EmulatorOptions};
use crate::gpu::{Event, Facts, Gpu, HostCopy, Launch, Pinned, Stream};
use crate::params::Address;
use crate::reclaim::{Reclaim, StreamHandle};
use memory::{LateHeap, LatePinned};

/// Submitted work, for tests to compare.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Note {
    /// Copies of a batch to the device.
    Up(usize),
    /// Copies of a batch to the host.
    Down(usize),
    Zero,
    Copy,
    Launch(&'static str),
    /// A wait for the event with this number.
    Wait(usize),
    /// A record of the event with this number.
    Mark(usize),
}

#[derive(Debug)]
pub(crate) struct LateGpu {
    emulator: Arc<Emulator>,
    facts: Facts,
    reclaim: Arc<Reclaim>,
    pub(crate) state: Arc<Mutex<LateState>>,
}

/// All streams of the device.
#[derive(Debug, Default)]
pub(crate) struct LateState {
    streams: Vec<LateWork>,
    /// The stream of frees.
    frees: VecDeque<Work>,
    /// Stream of each event, and whether it is done.
    events: Vec<(usize, bool)>,
    /// All submitted work, with its stream.
    pub(crate) notes: Vec<(usize, Note)>,
    /// Number of page-locked allocations.
    pub(crate) pinned: usize,
    /// Whether page-locked memory was freed before a copy had run.
    pub(crate) freed_early: bool,
    /// Whether all streams but the first run at once.
    pub(crate) is_early: bool,
    /// Whether batches fail after half of their copies.
    pub(crate) is_failing: bool,
    /// Number of submissions before the device is lost, if it will be.
    pub(crate) submits_left: Option<usize>,
}

#[derive(Debug)]
struct LateWork {
    stream: Box<dyn Stream>,
    work: VecDeque<Work>,
}

#[derive(Debug, Clone)]
enum Work {
    Up(Vec<HostCopy>),
    Down(Vec<HostCopy>),
    Zero(Address, u64),
    Copy(Address, Address, u64),
    Launch(Launch, Vec<u8>),
    Wait(usize),
    Mark(usize),
    /// A mark that frees are ordered after.
    QuietMark(usize),
    Free(Address),
}

// SAFETY: its addresses are used by one thread at a time, under the mutex.
unsafe impl Send for Work {}

impl Work {
    fn note(&self) -> Option<Note> {
        Some(match self {
            Self::Up(copies) => Note::Up(copies.len()),
            Self::Down(copies) => Note::Down(copies.len()),
            Self::Zero(..) => Note::Zero,
            Self::Copy(..) => Note::Copy,
            Self::Launch(launch, _) => Note::Launch(launch.kernel),
            Self::Wait(event) => Note::Wait(*event),
            Self::Mark(event) => Note::Mark(*event),
            Self::QuietMark(_) | Self::Free(_) => return None,
        })
    }

    fn copies(&self) -> &[HostCopy] {
        match self {
            Self::Up(copies) | Self::Down(copies) => copies,
            _ => &[],
        }
    }
}

/// Locks even after a panic: a failing test drops handles that need the lock.
pub(crate) fn lock(state: &Mutex<LateState>) -> MutexGuard<'_, LateState> {
    state.lock().unwrap_or_else(PoisonError::into_inner)
}

impl LateGpu {
    /// Opens one with a limit for the bytes of buffers.
    pub(crate) fn open(buffer_bytes_max: u64) -> Arc<Self> {
        let gpu = Self::with(&EmulatorOptions::default());
        let facts = Facts { memory: buffer_bytes_max, ..gpu.facts };
        Arc::new(Self { facts, ..gpu })
    }

    pub(crate) fn with(options: &EmulatorOptions) -> Self {
        let emulator = Arc::new(Emulator::open(options).unwrap());
        let (reclaim, state) = (Arc::default(), Arc::default());
        Self { facts: emulator.facts().clone(), emulator, reclaim, state }
    }

    /// Returns the number of buffers that were not freed, and their bytes.
    pub(crate) fn allocated(&self) -> (usize, u64) {
        self.emulator.allocated()
    }

    fn heap(&self) -> LateHeap {
        LateHeap { emulator: Arc::clone(&self.emulator), state: Arc::clone(&self.state) }
    }
}

impl LateState {
    /// Counts submitted work that has not run, without frees.
    pub(crate) fn num_late(&self) -> usize {
        let work = self.streams.iter().flat_map(|stream| &stream.work);
        work.filter(|work| work.note().is_some()).count()
    }

    fn submit(&mut self, index: usize, work: Work) -> Result<(), DeviceError> {
        match &mut self.submits_left {
            Some(0) => return Err(DeviceError::new(DeviceErrorKind::Lost, "submit")),
            Some(left) if work.note().is_some() => *left -= 1,
            _ => {}
        }
        self.notes.extend(work.note().map(|note| (index, note)));
        self.streams[index].work.push_back(work);
        while self.is_early && index > 0 && !self.streams[index].work.is_empty() {
            self.step(index)?;
        }
        Ok(())
    }

    fn mark(
        &mut self,
        index: usize,
        work: impl FnOnce(usize) -> Work,
    ) -> Result<usize, DeviceError> {
        self.events.push((index, false));
        let event = self.events.len() - 1;
        self.submit(index, work(event))?;
        Ok(event)
    }

    /// Runs the stream of an event up to it.
    fn reach(&mut self, event: usize) -> Result<(), DeviceError> {
        if self.submits_left == Some(0) {
            return Err(DeviceError::new(DeviceErrorKind::Lost, "wait"));
        }
        while !self.events[event].1 {
            let index = self.events[event].0;
            self.step(index)?;
        }
        Ok(())
    }

    fn step(&mut self, index: usize) -> Result<(), DeviceError> {
        let work = self.streams[index].work.pop_front().unwrap();
        let stream = &mut self.streams[index].stream;
        for copy in work.copies().iter().rev() {
            match work {
                // SAFETY: the submitter guaranteed that both ranges stay valid until this has run.
                Work::Up(_) => unsafe { stream.upload(copy.device, copy.host, copy.bytes)? },
                // SAFETY: as above.
                _ => unsafe { stream.download(copy.host, copy.device, copy.bytes)? },
            }
        }
        match work {
            // SAFETY: as above.
            Work::Zero(at, bytes) => unsafe { stream.zero(at, bytes)? },
            // SAFETY: as above.
            Work::Copy(to, from, bytes) => unsafe { stream.copy(to, from, bytes)? },
            // SAFETY: as above, for all memory in the parameters.
            Work::Launch(launch, params) => unsafe { stream.launch(&launch, &params)? },
            Work::Wait(event) => self.reach(event)?,
            Work::Mark(event) | Work::QuietMark(event) => self.events[event].1 = true,
            Work::Up(_) | Work::Down(_) => {}
            Work::Free(_) => unreachable!("memory is freed elsewhere"),
        }
        Ok(())
    }

    /// Runs the stream of frees, and the work that it waits for.
    pub(crate) fn run_frees(&mut self, emulator: &Emulator) -> Result<(), DeviceError> {
        while let Some(work) = self.frees.pop_front() {
            match work {
                Work::Wait(event) => self.reach(event)?,
                // SAFETY: `Heap::free` got it under its conditions, and the events it waits for are
                // done.
                Work::Free(address) => unsafe { emulator.free(address) },
                _ => unreachable!("nothing else is ordered with frees"),
            }
        }
        Ok(())
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
        self.reclaim.alloc(bytes, &self.heap())
    }
    unsafe fn free(&self, address: Address) {
        // SAFETY: both are conditions of this function.
        unsafe { self.reclaim.free(address, &self.heap()) };
    }
    fn pinned(&self, bytes: usize) -> Result<Box<dyn Pinned>, DeviceError> {
        let memory = self.emulator.pinned(bytes)?;
        lock(&self.state).pinned += 1;
        Ok(Box::new(LatePinned { memory, state: Arc::clone(&self.state) }))
    }
    fn stream(&self) -> Result<Box<dyn Stream>, DeviceError> {
        let mut state = lock(&self.state);
        let handle = Arc::new(LateStreamHandle {
            index: state.streams.len(),
            state: Arc::clone(&self.state),
        });
        state.streams.push(LateWork { stream: self.emulator.stream()?, work: VecDeque::new() });
        drop(state);
        self.reclaim.open(Arc::<LateStreamHandle>::clone(&handle));
        Ok(Box::new(LateStream { handle, reclaim: Arc::clone(&self.reclaim), heap: self.heap() }))
    }
}

/// A stream's handle for frees.
#[derive(Debug)]
struct LateStreamHandle {
    index: usize,
    state: Arc<Mutex<LateState>>,
}

impl LateStreamHandle {
    fn event(&self, work: impl FnOnce(usize) -> Work) -> Result<Arc<dyn Event>, DeviceError> {
        let event = lock(&self.state).mark(self.index, work)?;
        Ok(Arc::new(LateEvent { state: Arc::clone(&self.state), event }))
    }
}

impl StreamHandle for LateStreamHandle {
    fn mark(&self) -> Result<Arc<dyn Event>, DeviceError> {
        self.event(Work::QuietMark)
    }
}

#[derive(Debug)]
struct LateStream {
    handle: Arc<LateStreamHandle>,
    reclaim: Arc<Reclaim>,
    heap: LateHeap,
}

impl LateStream {
    fn submit(&self, work: Work) -> Result<(), DeviceError> {
        lock(&self.handle.state).submit(self.handle.index, work)
    }

    fn batch(
        &self,
        copies: &[HostCopy],
        work: impl FnOnce(Vec<HostCopy>) -> Work,
    ) -> Result<(), DeviceError> {
        if !lock(&self.handle.state).is_failing {
            return self.submit(work(copies.to_vec()));
        }
        self.submit(work(copies[..copies.len() / 2].to_vec()))?;
        Err(DeviceError::new(DeviceErrorKind::Driver, "submit a batch"))
    }
}

impl Drop for LateStream {
    fn drop(&mut self) {
        self.reclaim.close(&*self.handle, &self.heap);
    }
}

impl Stream for LateStream {
    unsafe fn upload(
        &mut self,
        to: Address,
        from: *const u8,
        bytes: usize,
    ) -> Result<(), DeviceError> {
        self.submit(Work::Up(vec![HostCopy { host: from.cast_mut(), device: to, bytes }]))
    }
    unsafe fn download(
        &mut self,
        to: *mut u8,
        from: Address,
        bytes: usize,
    ) -> Result<(), DeviceError> {
        self.submit(Work::Down(vec![HostCopy { host: to, device: from, bytes }]))
    }
    unsafe fn upload_batch(&mut self, copies: &[HostCopy]) -> Result<(), DeviceError> {
        self.batch(copies, Work::Up)
    }
    unsafe fn download_batch(&mut self, copies: &[HostCopy]) -> Result<(), DeviceError> {
        self.batch(copies, Work::Down)
    }
    unsafe fn copy(&mut self, to: Address, from: Address, bytes: u64) -> Result<(), DeviceError> {
        self.submit(Work::Copy(to, from, bytes))
    }
    unsafe fn zero(&mut self, at: Address, bytes: u64) -> Result<(), DeviceError> {
        self.submit(Work::Zero(at, bytes))
    }
    unsafe fn launch(&mut self, launch: &Launch, params: &[u8]) -> Result<(), DeviceError> {
        self.submit(Work::Launch(*launch, params.to_vec()))
    }
    fn record(&mut self) -> Result<Arc<dyn Event>, DeviceError> {
        self.handle.event(Work::Mark)
    }
    fn wait_for(&mut self, event: &Arc<dyn Event>) -> Result<(), DeviceError> {
        let event: &dyn Any = &**event;
        let event = event.downcast_ref::<LateEvent>().unwrap();
        assert!(Arc::ptr_eq(&event.state, &self.handle.state), "an event of another device");
        self.submit(Work::Wait(event.event))
    }
}

#[derive(Debug)]
struct LateEvent {
    state: Arc<Mutex<LateState>>,
    event: usize,
}

impl Event for LateEvent {
    fn is_done(&self) -> Result<bool, DeviceError> {
        Ok(lock(&self.state).events[self.event].1)
    }
    fn wait(&self) -> Result<(), DeviceError> {
        lock(&self.state).reach(self.event)
    }
}
