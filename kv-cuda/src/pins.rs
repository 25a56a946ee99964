//! A pool of page-locked memory.
//!
//! Allocating page-locked memory costs more than most copies through it, and freeing it may wait
//! for the device. A queue therefore keeps the memory of its uploads and downloads, up to a bound.
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kv_core::error::DeviceError;

use crate::gpu::{Gpu, Pinned};

/// Bytes of unused memory that are kept. Memory in use has no bound, so that a caller that sends
/// faster than the device reads does not have to wait.
const KEPT_BYTES: usize = 32 << 20;
/// Bytes of the smallest buffer: a page.
const BYTES_MIN: usize = 4096;

/// The free buffers of one queue.
#[derive(Debug, Clone)]
pub(crate) struct Pins {
    gpu: Arc<dyn Gpu>,
    free: Arc<Mutex<Vec<Box<dyn Pinned>>>>,
}

/// A page-locked buffer, returned to the pool when dropped: when no copy uses it any more.
pub(crate) struct PinnedBuffer {
    /// Taken when this is dropped.
    memory: Option<Box<dyn Pinned>>,
    pins: Pins,
}

impl Pins {
    pub(crate) fn new(gpu: &Arc<dyn Gpu>) -> Self {
        Self { gpu: Arc::clone(gpu), free: Arc::default() }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Box<dyn Pinned>>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a buffer of at least `len` bytes with arbitrary content.
    pub(crate) fn take(&self, len: usize) -> Result<PinnedBuffer, DeviceError> {
        let mut free = self.lock();
        let fitting = free.iter().enumerate().filter(|(_, memory)| memory.len() >= len);
        let smallest = fitting.min_by_key(|(_, memory)| memory.len()).map(|(index, _)| index);
        let kept = smallest.map(|index| free.swap_remove(index));
        drop(free);
        let memory = match kept {
            Some(memory) => memory,
            // Powers of two, so that later requests of similar length fit.
            None => {
                self.gpu.pinned(len.max(BYTES_MIN).checked_next_power_of_two().unwrap_or(len))?
            }
        };
        Ok(PinnedBuffer { memory: Some(memory), pins: self.clone() })
    }

    fn give(&self, memory: Box<dyn Pinned>) {
        let mut free = self.lock();
        let kept: usize = memory.len() + free.iter().map(|kept| kept.len()).sum::<usize>();
        if kept <= KEPT_BYTES {
            free.push(memory);
        }
    }
}

impl PinnedBuffer {
    /// Returns the first byte.
    pub(crate) fn base(&self) -> *mut u8 {
        self.memory.as_ref().map_or(std::ptr::null_mut(), |memory| memory.base())
    }
    /// Returns the number of bytes.
    pub(crate) fn len(&self) -> usize {
        self.memory.as_ref().map_or(0, |memory| memory.len())
    }
    /// Leaks the buffer, because a copy may use it for ever.
    pub(crate) fn leak(mut self) {
        std::mem::forget(self.memory.take());
    }
}

impl fmt::Debug for PinnedBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.memory.fmt(f)
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        if let Some(memory) = self.memory.take() {
            self.pins.give(memory);
        }
    }
}

#[cfg(test)]
#[cfg(feature = "emulated")]
mod tests {
    use super::*;
    use crate::emulated::EmulatorOptions;
    use crate::tests::late::{LateGpu, lock};

    #[test]
    fn buffers_are_reused_up_to_a_bound() {
        let gpu = Arc::new(LateGpu::with(&EmulatorOptions::default()));
        let pinned = || lock(&gpu.state).pinned;
        let as_gpu: Arc<dyn Gpu> = Arc::<LateGpu>::clone(&gpu);
        let pins = Pins::new(&as_gpu);
        let (small, large) = (pins.take(10).unwrap(), pins.take(5000).unwrap());
        assert_eq!((small.len(), large.len(), pinned()), (4096, 8192, 2));
        let (small_base, large_base) = (small.base(), large.base());
        drop((small, large));
        for (len, base) in [(4096, small_base), (4097, large_base), (1, small_base)] {
            assert_eq!(pins.take(len).unwrap().base(), base);
        }
        let held: Vec<_> = (0..3).map(|_| pins.take(1).unwrap()).collect();
        assert_eq!(pinned(), 3);
        // More than the bound is freed.
        let huge = pins.take(KEPT_BYTES).unwrap();
        drop(held);
        drop(huge);
        assert_eq!(pinned(), 3);
        drop(pins);
        assert_eq!(pinned(), 0);
    }
}
