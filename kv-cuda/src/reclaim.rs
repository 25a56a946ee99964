//! Device memory on its way back, behind the work that may still use it.
//!
//! A buffer goes with its last handle, while streams may be busy with its memory. Nobody waits for
//! them, and still no byte is given out again early:
//!
//! 1. No handle is left, so what is submitted from now on uses the memory nowhere. Captured
//!    launches hold theirs.
//! 2. Every open stream is marked with an event as it stands, whether it is ours or a caller's. The
//!    device frees behind all of these events.
//! 3. A stream that closes is marked for the last time, and everything that is freed later is freed
//!    behind that event too.
//! 4. The mark of a stream that captures for a graph of ours is that of the capture's beginning:
//!    what is captured has not run.
//! 5. A stream that cannot be marked, because its owner captures on it, keeps memory waiting until
//!    the next free or allocation that finds it otherwise. One that closes like that makes the next
//!    free wait for all work of the device.
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kv_core::{DeviceError, DeviceErrorKind};

use crate::gpu::Event;
use crate::params::Address;

/// A stream, for those who do not own it.
pub(crate) trait Lane: fmt::Debug + Send + Sync {
    /// An event behind all work that was submitted and has not run. Any thread may ask.
    fn mark(&self) -> Result<Arc<dyn Event>, DeviceError>;
}

/// What frees memory, in an order of its own.
pub(crate) trait Heap {
    /// Takes memory; one thread at a time.
    fn alloc(&self, bytes: u64) -> Result<Address, DeviceError>;
    /// Returns once everything that was freed can be taken again.
    fn wait_for_frees(&self) -> Result<(), DeviceError>;
    /// Frees from here on only once `event` is done.
    fn wait_for(&self, event: &dyn Event) -> Result<(), DeviceError>;
    /// Returns once everything that was submitted to the device is done.
    fn wait_for_device(&self) -> Result<(), DeviceError>;
    /// Frees memory once the events are done that it was told to wait for.
    ///
    /// # Safety
    /// 1. `address` came from this device and was not freed.
    /// 2. All work that uses it stands before those events.
    unsafe fn free(&self, address: Address);
}

/// The open streams of a device, and memory that could not be freed yet.
#[derive(Debug, Default)]
pub(crate) struct Reclaim {
    state: Mutex<State>,
    /// A pool of the driver need not stand several threads that take memory.
    taking: Mutex<()>,
}

#[derive(Debug, Default)]
struct State {
    lanes: Vec<Arc<dyn Lane>>,
    /// A stream has closed without a mark.
    is_unmarked: bool,
    waiting: Vec<Address>,
}

impl Reclaim {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes memory. Waits for work on streams only where nothing is left but what this work uses,
    /// and what nobody has a handle of any more.
    pub(crate) fn alloc(&self, bytes: u64, heap: &impl Heap) -> Result<Address, DeviceError> {
        self.retry(heap);
        let _one = self.taking.lock().unwrap_or_else(PoisonError::into_inner);
        match heap.alloc(bytes) {
            Err(error) if error.kind() == DeviceErrorKind::OutOfMemory => {
                heap.wait_for_frees()?;
                heap.alloc(bytes)
            }
            done => done,
        }
    }

    /// From here on, memory is freed behind the work of this stream.
    pub(crate) fn open(&self, lane: Arc<dyn Lane>) {
        self.lock().lanes.push(lane);
    }

    /// The stream gets no more work. Before it is destroyed.
    pub(crate) fn close(&self, lane: &dyn Lane, heap: &impl Heap) {
        let mut state = self.lock();
        state.lanes.retain(|open| !std::ptr::addr_eq(Arc::as_ptr(open), lane));
        let marked = lane.mark().and_then(|event| heap.wait_for(&*event));
        state.is_unmarked |= marked.is_err();
    }

    /// Frees memory behind everything that was submitted before; waits for nothing.
    ///
    /// # Safety
    /// 1. `address` came from this device and was not freed.
    /// 2. Nothing submitted from now on uses it.
    pub(crate) unsafe fn free(&self, address: Address, heap: &impl Heap) {
        let mut state = self.lock();
        state.waiting.push(address);
        state.free(heap);
    }

    /// Waits for the device where the events of streams that have closed do not stand for all their
    /// work.
    pub(crate) fn settle(&self, heap: &impl Heap) -> Result<(), DeviceError> {
        self.lock().settle(heap)
    }

    /// Frees what could not be freed before.
    fn retry(&self, heap: &impl Heap) {
        self.lock().free(heap);
    }
}

impl State {
    fn free(&mut self, heap: &impl Heap) {
        if self.waiting.is_empty() || self.pass(heap).is_err() {
            return;
        }
        for address in self.waiting.drain(..) {
            // SAFETY: conditions 1 and 2 of `Reclaim::free`; `pass` has named an event behind the
            // work of every stream, those that have closed too.
            unsafe { heap.free(address) };
        }
    }

    fn settle(&mut self, heap: &impl Heap) -> Result<(), DeviceError> {
        if self.is_unmarked {
            heap.wait_for_device()?;
            self.is_unmarked = false;
        }
        Ok(())
    }

    /// Makes the heap wait for everything that was submitted. Events that it waits for in vain,
    /// because a later stream cannot be marked, are done some time too.
    fn pass(&mut self, heap: &impl Heap) -> Result<(), DeviceError> {
        self.settle(heap)?;
        self.lanes.iter().try_for_each(|lane| heap.wait_for(&*lane.mark()?))
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    /// A stream whose marks have its name, or which its owner captures on.
    #[derive(Debug)]
    struct Named(&'static str, Mutex<bool>);

    #[derive(Debug)]
    struct Mark(&'static str);

    impl Event for Mark {
        fn is_done(&self) -> Result<bool, DeviceError> {
            Ok(false)
        }
        fn wait(&self) -> Result<(), DeviceError> {
            unreachable!("nobody waits for a stream")
        }
    }

    impl Lane for Named {
        fn mark(&self) -> Result<Arc<dyn Event>, DeviceError> {
            if *self.1.lock().unwrap() {
                return Err(DeviceError::new(DeviceErrorKind::Unsupported, "mark"));
            }
            Ok(Arc::new(Mark(self.0)))
        }
    }

    /// What was done to it.
    #[derive(Debug, Default)]
    struct Log(RefCell<Vec<String>>);

    impl Log {
        fn take(&self) -> Vec<String> {
            self.0.take()
        }
    }

    impl Heap for Log {
        fn alloc(&self, bytes: u64) -> Result<Address, DeviceError> {
            let full = || DeviceError::new(DeviceErrorKind::OutOfMemory, "alloc");
            self.0.borrow_mut().push("alloc".into());
            if self.0.borrow().contains(&"frees".into()) { Ok(bytes) } else { Err(full()) }
        }
        fn wait_for_frees(&self) -> Result<(), DeviceError> {
            self.0.borrow_mut().push("frees".into());
            Ok(())
        }
        fn wait_for(&self, event: &dyn Event) -> Result<(), DeviceError> {
            let event: &dyn std::any::Any = event;
            self.0.borrow_mut().push(event.downcast_ref::<Mark>().unwrap().0.into());
            Ok(())
        }
        fn wait_for_device(&self) -> Result<(), DeviceError> {
            self.0.borrow_mut().push("device".into());
            Ok(())
        }
        unsafe fn free(&self, address: Address) {
            self.0.borrow_mut().push(address.to_string());
        }
    }

    fn open(reclaim: &Reclaim, name: &'static str) -> Arc<Named> {
        let lane = Arc::new(Named(name, Mutex::new(false)));
        reclaim.open(Arc::<Named>::clone(&lane));
        lane
    }

    fn free(reclaim: &Reclaim, address: Address, log: &Log) {
        // SAFETY: a number that nothing is at.
        unsafe { reclaim.free(address, log) };
    }

    #[test]
    fn memory_goes_behind_every_open_stream_and_every_one_that_was() {
        let (reclaim, log) = (Reclaim::default(), Log::default());
        free(&reclaim, 1, &log);
        assert_eq!(log.take(), ["1"]);
        let [a, _b] = ["a", "b"].map(|name| open(&reclaim, name));
        free(&reclaim, 2, &log);
        assert_eq!(log.take(), ["a", "b", "2"]);
        reclaim.close(&*a, &log);
        assert_eq!(log.take(), ["a"]);
        free(&reclaim, 3, &log);
        assert_eq!(log.take(), ["b", "3"], "what a did is waited for already");
        reclaim.retry(&log);
        assert_eq!(log.take(), [""; 0]);
    }

    #[test]
    fn memory_stays_while_a_stream_cannot_be_marked() {
        let (reclaim, log) = (Reclaim::default(), Log::default());
        let [_a, b] = ["a", "b"].map(|name| open(&reclaim, name));
        *b.1.lock().unwrap() = true;
        free(&reclaim, 1, &log);
        free(&reclaim, 2, &log);
        assert_eq!(log.take(), ["a", "a"]);
        *b.1.lock().unwrap() = false;
        reclaim.retry(&log);
        assert_eq!(log.take(), ["a", "b", "1", "2"]);
        // And for the device, where the stream is gone for good.
        *b.1.lock().unwrap() = true;
        reclaim.close(&*b, &log);
        free(&reclaim, 3, &log);
        free(&reclaim, 4, &log);
        assert_eq!(log.take(), ["device", "a", "3", "a", "4"]);
    }

    #[test]
    fn a_lack_of_memory_waits_for_what_is_on_its_way_back() {
        let (reclaim, log) = (Reclaim::default(), Log::default());
        let a = open(&reclaim, "a");
        *a.1.lock().unwrap() = true;
        free(&reclaim, 1, &log);
        *a.1.lock().unwrap() = false;
        assert_eq!(reclaim.alloc(7, &log).unwrap(), 7);
        assert_eq!(log.take(), ["a", "1", "alloc", "frees", "alloc"]);
    }
}
