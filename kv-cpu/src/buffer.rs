//! Memory of the CPU "device", and the gates that order access to it.
//!
//! Bytes are reached through raw pointers, never through a `&mut` that outlives a call. The gate of
//! each allocation makes that sound: every operation passes it for the length of its call
//! (`access.rs`). Knows nothing of planes and tensors.
use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::any::Any;
use std::fmt;
use std::ptr::NonNull;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use kv_core::error::{DeviceError, DeviceErrorKind};
use memmap2::MmapMut;

use kv_core::num;

/// Alignment of memory allocated here: a cache line, and the widest vector.
const ALIGN: usize = 64;
/// Allocations of this many bytes and more are mapped from the system: pages that are never written
/// cost nothing, and pages may be large. With small pages, a decode step over a long context would
/// need a TLB entry for nearly every block.
const MAPPED: usize = 1 << 20;

/// Bytes in host memory; a cheap handle that keeps them alive.
///
/// Made by [`Backend::alloc`](kv_core::backend::Backend::alloc) (zeroed, aligned to 64 bytes), from
/// a caller's own memory ([`Self::from_boxed`], [`Self::from_raw`]), or as a part of another
/// ([`Self::view`]).
///
/// # Guarantees
/// Each allocation has one gate: reading operations pass it together, a writing operation passes
/// alone, and a thread that must wait blocks. An operation may name an allocation several times, as
/// handle, clone or view: it passes the gate once, and is refused (`Unsupported`) when its written
/// bytes overlap others that it names. Operations run nothing but their own work, so they may wait
/// for each other on the workers of any pool.
#[derive(Clone)]
pub struct CpuBuffer {
    memory: Arc<Memory>,
    offset: usize,
    len: usize,
}

/// One allocation.
pub(crate) struct Memory {
    base: NonNull<u8>,
    owner: Owner,
    gate: Gate,
}

enum Owner {
    /// From the allocator, with this layout.
    Allocated(Layout),
    /// From the system, in whole pages.
    Mapped(#[expect(dead_code, reason = "held for its destructor")] MmapMut),
    /// A box of this many bytes, taken apart.
    Boxed(usize),
    /// Foreign memory, kept alive by this value.
    Raw(#[expect(dead_code, reason = "held for its destructor")] Box<dyn Any + Send + Sync>),
}

// SAFETY: the bytes belong to the allocation alone (conditions of `CpuBuffer::from_raw` for foreign
// ones), its owner is `Send`, and freeing on another thread is allowed for all three owners.
unsafe impl Send for Memory {}
// SAFETY: shared access to the bytes goes through the gate, which separates writers from all
// others.
unsafe impl Sync for Memory {}

impl Drop for Memory {
    fn drop(&mut self) {
        match &self.owner {
            // SAFETY: `base` came from `alloc_zeroed` with this layout, and nothing else holds it.
            Owner::Allocated(layout) => unsafe { dealloc(self.base.as_ptr(), *layout) },
            Owner::Boxed(len) => {
                let bytes = std::ptr::slice_from_raw_parts_mut(self.base.as_ptr(), *len);
                // SAFETY: `from_boxed` took this very box apart, and nothing else holds it.
                drop(unsafe { Box::from_raw(bytes) });
            }
            Owner::Mapped(_) | Owner::Raw(_) => {}
        }
    }
}

impl CpuBuffer {
    /// Reserves zeroed memory.
    pub(crate) fn alloc(bytes: u64) -> Result<Self, DeviceError> {
        let refuse = || {
            DeviceError::new(DeviceErrorKind::OutOfMemory, "alloc")
                .with_detail(format!("{bytes} bytes"))
        };
        let len = usize::try_from(bytes).map_err(|_| refuse())?;
        if len == 0 {
            return Ok(Self::from_boxed(Box::default()));
        }
        if len >= MAPPED && cfg!(any(unix, windows)) {
            return Self::map(len).map_err(|error| refuse().with_source(error));
        }
        let layout = Layout::from_size_align(len, ALIGN).map_err(|_| refuse())?;
        // SAFETY: the layout's size is not zero.
        let base = unsafe { alloc_zeroed(layout) };
        let base = NonNull::new(base).ok_or_else(refuse)?;
        Ok(Self::own(base, len, Owner::Allocated(layout)))
    }

    /// Reserves zeroed pages.
    fn map(len: usize) -> std::io::Result<Self> {
        let mut pages = MmapMut::map_anon(len)?;
        // A system without large pages refuses, and small ones work as well.
        #[cfg(target_os = "linux")]
        let _ = pages.advise(memmap2::Advice::HugePage);
        let base = NonNull::new(pages.as_mut_ptr()).ok_or(std::io::ErrorKind::OutOfMemory)?;
        Ok(Self::own(base, len, Owner::Mapped(pages)))
    }

    /// Takes over a caller's bytes without copying them, from a `Box<[u8]>` or a full `Vec<u8>`.
    ///
    /// ```
    /// let buffer = kv::cpu::CpuBuffer::from_boxed(vec![7; 4096].into());
    /// assert_eq!(buffer.read(|bytes| bytes[4095]), 7);
    /// ```
    pub fn from_boxed(bytes: Box<[u8]>) -> Self {
        let len = bytes.len();
        let base = Box::into_raw(bytes).cast::<u8>();
        // A box is never null, so the dangling pointer is never used.
        let base = NonNull::new(base).unwrap_or(NonNull::dangling());
        Self::own(base, len, Owner::Boxed(len))
    }

    /// Uses foreign memory (a mapped file, another library's tensor), which `owner` keeps alive
    /// until the last handle is gone.
    ///
    /// # Safety
    /// 1. `base..base + bytes` is readable and writable for as long as `owner` exists, from any
    ///    thread.
    /// 2. While an operation that names this buffer runs, nothing else writes those bytes, and
    ///    nothing else reads the bytes that the operation writes. Only handles made from this call
    ///    share a gate, so the same bytes may not be wrapped twice.
    /// 3. The bytes are initialised.
    pub unsafe fn from_raw(base: NonNull<u8>, bytes: usize, owner: impl Any + Send + Sync) -> Self {
        Self::own(base, bytes, Owner::Raw(Box::new(owner)))
    }

    fn own(base: NonNull<u8>, len: usize, owner: Owner) -> Self {
        let gate = Gate::default();
        Self { memory: Arc::new(Memory { base, owner, gate }), offset: 0, len }
    }

    /// Returns `bytes` bytes from `offset` on as a buffer, such as K or V of one allocation.
    ///
    /// # Errors
    /// `OutOfRange` past the end of this buffer.
    pub fn view(&self, offset: u64, bytes: u64) -> Result<Self, DeviceError> {
        let (begin, len) = self.range(offset, bytes, "view")?;
        Ok(Self { memory: Arc::clone(&self.memory), offset: self.offset + begin, len })
    }

    /// Returns the size, in bytes.
    pub fn len(&self) -> usize {
        self.len
    }
    /// Returns whether the buffer is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Lends the bytes for the length of `look`. A call inside `look` that writes the same
    /// allocation would wait for its own caller. So would a call that a pool runs on this thread
    /// while `look` waits for the pool, as `rayon::join` does.
    pub fn read<R>(&self, look: impl FnOnce(&[u8]) -> R) -> R {
        let _pass = Pass::new(&self.memory.gate, false);
        // SAFETY: the handle's range lies inside the allocation, and the pass keeps writers out.
        look(unsafe { std::slice::from_raw_parts(self.base(), self.len) })
    }

    /// Lends the bytes for writing for the length of `change`. A call inside it that names the same
    /// allocation would wait for its own caller, as for [`Self::read`].
    pub fn write<R>(&self, change: impl FnOnce(&mut [u8]) -> R) -> R {
        let _pass = Pass::new(&self.memory.gate, true);
        // SAFETY: the handle's range lies inside the allocation, and the pass keeps all others out.
        change(unsafe { std::slice::from_raw_parts_mut(self.base(), self.len) })
    }

    /// Checks that a range lies inside and returns it as offset and length.
    pub(crate) fn range(
        &self,
        offset: u64,
        bytes: u64,
        operation: &'static str,
    ) -> Result<(usize, usize), DeviceError> {
        match offset.checked_add(bytes) {
            Some(end) if end <= num::to_u64(self.len) => {
                Ok((num::to_offset(offset), num::to_offset(bytes)))
            }
            _ => Err(DeviceError::new(DeviceErrorKind::OutOfRange, operation)
                .with_detail(format!("{bytes} bytes at {offset} of a buffer of {}", self.len))),
        }
    }

    /// First byte. The handle's range lies inside the allocation, by its constructors.
    pub(crate) fn base(&self) -> *mut u8 {
        self.memory.base.as_ptr().wrapping_add(self.offset)
    }
    pub(crate) fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }
}

impl fmt::Debug for CpuBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CpuBuffer").field("bytes", &self.len).finish_non_exhaustive()
    }
}

impl Memory {
    /// See [`Gate::enter`].
    pub(crate) fn enter(&self, write: bool) {
        self.gate.enter(write);
    }
    /// See [`Gate::leave`].
    pub(crate) fn leave(&self, write: bool) {
        self.gate.leave(write);
    }
}

/// A lock for several readers or one writer. Unlike `std`'s lock it needs no guard to be kept, so a
/// call can hold any number of them without allocating, and readers never queue behind a waiting
/// writer, so a thread may read twice.
#[derive(Debug, Default)]
struct Gate {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Clone, Copy, Default)]
struct State {
    readers: usize,
    writing: bool,
}

impl State {
    /// Lets one more reader or writer pass if that is possible. Returns whether it was.
    fn pass(&mut self, write: bool) -> bool {
        let may = !self.writing && (!write || self.readers == 0);
        match (may, write) {
            (true, true) => self.writing = true,
            (true, false) => self.readers += 1,
            (false, _) => {}
        }
        may
    }
}

impl Gate {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Passes as reader or writer, once that is possible.
    fn enter(&self, write: bool) {
        let mut state = self.state();
        while !state.pass(write) {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Takes back one [`Self::enter`] of the same kind.
    fn leave(&self, write: bool) {
        let mut state = self.state();
        if write {
            state.writing = false;
        } else {
            state.readers -= 1;
        }
        drop(state);
        self.changed.notify_all();
    }
}

/// An entered gate, left on drop.
struct Pass<'a> {
    gate: &'a Gate,
    write: bool,
}

impl<'a> Pass<'a> {
    fn new(gate: &'a Gate, write: bool) -> Self {
        gate.enter(write);
        Self { gate, write }
    }
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        self.gate.leave(self.write);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_zeroed_aligned_and_bounded() {
        let buffer = CpuBuffer::alloc(1000).unwrap();
        assert_eq!(buffer.base().align_offset(ALIGN), 0);
        assert!(buffer.read(|bytes| bytes.iter().all(|b| *b == 0)));
        assert!(buffer.range(1000, 0, "test").is_ok());
        for (offset, bytes) in [(1000, 1), (0, 1001), (u64::MAX, 1), (1, u64::MAX)] {
            let refused = buffer.range(offset, bytes, "test").unwrap_err();
            assert_eq!(refused.kind(), DeviceErrorKind::OutOfRange);
        }
    }

    #[test]
    fn impossible_sizes_are_out_of_memory() {
        for bytes in [u64::MAX, 1 << 62] {
            let refused = CpuBuffer::alloc(bytes).unwrap_err();
            assert_eq!(refused.kind(), DeviceErrorKind::OutOfMemory);
        }
        assert!(CpuBuffer::alloc(0).unwrap().is_empty());
    }

    #[test]
    fn a_view_shares_the_bytes() {
        let whole = CpuBuffer::from_boxed(vec![0; 10].into());
        let view = whole.view(4, 3).unwrap();
        view.write(|bytes| bytes.fill(9));
        let seen = whole.read(<[u8]>::to_vec);
        assert_eq!(seen, [0, 0, 0, 0, 9, 9, 9, 0, 0, 0]);
        assert!(view.view(1, 3).is_err());
    }

    #[test]
    fn the_owner_of_raw_memory_outlives_the_handles() {
        struct Tell(Arc<Mutex<bool>>);
        impl Drop for Tell {
            fn drop(&mut self) {
                *self.0.lock().unwrap() = true;
            }
        }
        let mut bytes = vec![1_u8; 16].into_boxed_slice();
        let gone = Arc::new(Mutex::new(false));
        let base = NonNull::new(bytes.as_mut_ptr()).unwrap();
        // SAFETY: `bytes` is valid to the end of the test and is not touched meanwhile.
        let buffer = unsafe { CpuBuffer::from_raw(base, 16, Tell(Arc::clone(&gone))) };
        let view = buffer.view(8, 8).unwrap();
        drop(buffer);
        assert!(!*gone.lock().unwrap());
        view.write(|bytes| bytes.fill(2));
        drop(view);
        assert!(*gone.lock().unwrap());
        assert_eq!(bytes[7..9], [1, 2]);
    }

    #[test]
    fn the_gate_separates_writers() {
        let gate = Gate::default();
        assert!(gate.state().pass(false) && gate.state().pass(false));
        assert!(!gate.state().pass(true));
        gate.leave(false);
        gate.leave(false);
        assert!(gate.state().pass(true));
        assert!(!gate.state().pass(false) && !gate.state().pass(true));
        gate.leave(true);
        gate.enter(false);
        assert!(!gate.state().pass(true));
    }
}
