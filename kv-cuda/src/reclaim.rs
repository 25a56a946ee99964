//! Freeing of device memory, ordered after the work that may still use it.
//!
//! A buffer is freed with its last handle, while streams may still use its memory. The free does
//! not wait for them, and still no byte is reused early:
//!
//! 1. No handle is left, so later work does not use the memory. Captured launches hold theirs.
//! 2. Every open stream, of this crate or of a caller, is marked with an event. The device frees
//!    after all of these events.
//! 3. A stream that closes is marked for the last time, and later frees are ordered after that
//!    event too.
//! 4. While a stream captures for a graph of this crate, its mark is the one from the beginning of
//!    the capture: captured work has not run.
//! 5. A stream that cannot be marked, because its owner captures on it, delays frees until a later
//!    free or allocation can mark it. If it closes in that state, the next free waits for all work
//!    of the device.
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kv_core::error::{DeviceError, DeviceErrorKind};

use crate::gpu::Event;
use crate::params::Address;

/// A non-owning handle of a stream.
pub(crate) trait StreamHandle: fmt::Debug + Send + Sync {
    /// Returns an event after all submitted work. Any thread may call it.
    fn mark(&self) -> Result<Arc<dyn Event>, DeviceError>;
}

/// Allocates and frees memory, on a stream of its own.
pub(crate) trait Heap {
    /// Allocates memory; called by one thread at a time.
    fn alloc(&self, bytes: u64) -> Result<Address, DeviceError>;
    /// Returns once everything that was freed can be allocated again.
    fn wait_for_frees(&self) -> Result<(), DeviceError>;
    /// Orders later frees after `event`.
    fn wait_for(&self, event: &dyn Event) -> Result<(), DeviceError>;
    /// Waits for all work that was submitted to the device.
    fn wait_for_device(&self) -> Result<(), DeviceError>;
    /// Frees memory after the events that it was told to wait for.
    ///
    /// # Safety
    /// 1. `address` came from this device and was not freed.
    /// 2. All work that uses it precedes those events.
    unsafe fn free(&self, address: Address);
}

/// The open streams of a device, and memory that could not be freed yet.
#[derive(Debug, Default)]
pub(crate) struct Reclaim {
    state: Mutex<State>,
    /// Serialises allocations: a pool of the driver need not support several threads.
    taking: Mutex<()>,
}

#[derive(Debug, Default)]
struct State {
    handles: Vec<Arc<dyn StreamHandle>>,
    /// Whether a stream has closed without a mark, or is somebody else's.
    is_unmarked: bool,
    waiting: Vec<Address>,
}

impl Reclaim {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Allocates memory. Waits for streams only if nothing is left but memory of dropped buffers
    /// that their work still uses.
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

    /// Orders later frees after the work of this stream too.
    pub(crate) fn open(&self, handle: Arc<dyn StreamHandle>) {
        self.lock().handles.push(handle);
    }

    /// Ends that: the stream gets no more work and may be destroyed afterwards.
    pub(crate) fn close(&self, handle: &dyn StreamHandle, heap: &impl Heap) {
        let mut state = self.lock();
        state.handles.retain(|open| !std::ptr::addr_eq(Arc::as_ptr(open), handle));
        let marked = handle.mark().and_then(|event| heap.wait_for(&*event));
        state.is_unmarked |= marked.is_err();
    }

    /// Makes the next free wait for the device: somebody has submitted work to a stream that was
    /// not opened here.
    pub(crate) fn expect_others(&self) {
        self.lock().is_unmarked = true;
    }

    /// Frees memory after everything that was submitted before; does not wait.
    ///
    /// # Safety
    /// 1. `address` came from this device and was not freed.
    /// 2. Nothing submitted from now on uses it.
    pub(crate) unsafe fn free(&self, address: Address, heap: &impl Heap) {
        let mut state = self.lock();
        state.waiting.push(address);
        state.free(heap);
    }

    /// Waits for the device if a stream has closed without a mark, or is somebody else's.
    pub(crate) fn settle(&self, heap: &impl Heap) -> Result<(), DeviceError> {
        self.lock().settle(heap)
    }

    /// Frees memory that could not be freed before.
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
            // SAFETY: conditions 1 and 2 of `Reclaim::free`; `pass` has named an event after the
            // work of every stream, closed ones included.
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

    /// Makes the heap wait for all submitted work. If a later stream cannot be marked, the events
    /// that it waits for already are harmless.
    fn pass(&mut self, heap: &impl Heap) -> Result<(), DeviceError> {
        self.settle(heap)?;
        self.handles.iter().try_for_each(|handle| heap.wait_for(&*handle.mark()?))
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    /// A stream whose marks carry its name; the flag says that its owner captures on it.
    #[derive(Debug)]
    struct Named(&'static str, Mutex<bool>);

    #[derive(Debug)]
    struct Mark(&'static str);

    impl Event for Mark {
        fn is_done(&self) -> Result<bool, DeviceError> {
            Ok(false)
        }
        fn wait(&self) -> Result<(), DeviceError> {
            unreachable!("the test never waits for a stream")
        }
    }

    impl StreamHandle for Named {
        fn mark(&self) -> Result<Arc<dyn Event>, DeviceError> {
            if *self.1.lock().unwrap() {
                return Err(DeviceError::new(DeviceErrorKind::Unsupported, "mark"));
            }
            Ok(Arc::new(Mark(self.0)))
        }
    }

    /// Records the calls.
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
        let handle = Arc::new(Named(name, Mutex::new(false)));
        reclaim.open(Arc::<Named>::clone(&handle));
        handle
    }

    fn free(reclaim: &Reclaim, address: Address, log: &Log) {
        // SAFETY: the address is only recorded.
        unsafe { reclaim.free(address, log) };
    }

    #[test]
    fn memory_is_freed_after_open_and_closed_streams() {
        let (reclaim, log) = (Reclaim::default(), Log::default());
        free(&reclaim, 1, &log);
        assert_eq!(log.take(), ["1"]);
        let [a, _b] = ["a", "b"].map(|name| open(&reclaim, name));
        free(&reclaim, 2, &log);
        assert_eq!(log.take(), ["a", "b", "2"]);
        reclaim.close(&*a, &log);
        assert_eq!(log.take(), ["a"]);
        free(&reclaim, 3, &log);
        assert_eq!(log.take(), ["b", "3"], "a's last mark is waited for already");
        reclaim.retry(&log);
        assert_eq!(log.take(), [""; 0]);
    }

    #[test]
    fn memory_is_kept_while_a_stream_cannot_be_marked() {
        let (reclaim, log) = (Reclaim::default(), Log::default());
        let [_a, b] = ["a", "b"].map(|name| open(&reclaim, name));
        *b.1.lock().unwrap() = true;
        free(&reclaim, 1, &log);
        free(&reclaim, 2, &log);
        assert_eq!(log.take(), ["a", "a"]);
        *b.1.lock().unwrap() = false;
        reclaim.retry(&log);
        assert_eq!(log.take(), ["a", "b", "1", "2"]);
        // The device is waited for if the stream has closed.
        *b.1.lock().unwrap() = true;
        reclaim.close(&*b, &log);
        free(&reclaim, 3, &log);
        free(&reclaim, 4, &log);
        assert_eq!(log.take(), ["device", "a", "3", "a", "4"]);
    }

    #[test]
    fn memory_that_others_have_used_is_freed_after_all_work_of_the_device() {
        let (reclaim, log) = (Reclaim::default(), Log::default());
        let _a = open(&reclaim, "a");
        reclaim.expect_others();
        assert_eq!(log.take(), [""; 0]);
        free(&reclaim, 1, &log);
        free(&reclaim, 2, &log);
        assert_eq!(log.take(), ["device", "a", "1", "a", "2"]);
    }

    #[test]
    fn an_allocation_without_memory_waits_for_frees() {
        let (reclaim, log) = (Reclaim::default(), Log::default());
        let a = open(&reclaim, "a");
        *a.1.lock().unwrap() = true;
        free(&reclaim, 1, &log);
        *a.1.lock().unwrap() = false;
        assert_eq!(reclaim.alloc(7, &log).unwrap(), 7);
        assert_eq!(log.take(), ["a", "1", "alloc", "frees", "alloc"]);
    }
}
