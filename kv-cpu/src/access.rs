//! The memory one operation touches: ranges are entered, checked against each other, then locked.
//!
//! Gates are passed in the order of their addresses, each once, so two operations never wait for
//! each other. Knows nothing of the meaning of the bytes.
use std::sync::Arc;

use kv_core::backend::{PlaneView, TensorData, TensorDataMut, TokenTensor, TokenTensorMut};
use kv_core::error::DeviceError;

use crate::buffer::{CpuBuffer, Memory};
use crate::layout::unsupported;
use kv_core::num;

/// A range of bytes that an operation has entered in its [`Access`], or has from a host slice.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Span {
    base: *mut u8,
    len: usize,
}

// SAFETY: a span is an address and a length; using them is unsafe and argued for at each use.
unsafe impl Send for Span {}
// SAFETY: as above.
unsafe impl Sync for Span {}

impl Span {
    pub(crate) fn base(self) -> *mut u8 {
        self.base
    }
    pub(crate) fn len(self) -> usize {
        self.len
    }
}

/// One entered range of an allocation.
pub(crate) struct Entry {
    memory: Arc<Memory>,
    begin: usize,
    end: usize,
    write: bool,
    /// Whether this entry passed its gate for writing; `None` if another entry passed it.
    entered: Option<bool>,
}

impl Entry {
    fn address(&self) -> usize {
        Arc::as_ptr(&self.memory).addr()
    }
}

impl std::fmt::Debug for Entry {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (begin, end, write) = (self.begin, self.end, self.write);
        f.debug_struct("Entry")
            .field("range", &(begin..end))
            .field("write", &write)
            .finish_non_exhaustive()
    }
}

/// The ranges of one operation, before they are locked.
#[derive(Debug)]
pub(crate) struct Access<'w> {
    entries: &'w mut Vec<Entry>,
    operation: &'static str,
}

/// Every range of an operation, its gates passed until this is dropped.
#[derive(Debug)]
pub(crate) struct Locked<'w> {
    entries: &'w mut Vec<Entry>,
}

impl<'w> Access<'w> {
    /// Starts from an empty list, whose capacity is kept from call to call.
    pub(crate) fn new(entries: &'w mut Vec<Entry>, operation: &'static str) -> Self {
        entries.clear();
        Self { entries, operation }
    }

    /// Enters bytes `offset..offset + bytes` of a buffer.
    pub(crate) fn enter(
        &mut self,
        buffer: &CpuBuffer,
        (offset, bytes): (u64, u64),
        write: bool,
    ) -> Result<Span, DeviceError> {
        let (begin, len) = buffer.range(offset, bytes, self.operation)?;
        let base = buffer.base().wrapping_add(begin);
        if len > 0 {
            self.entries.push(Entry {
                memory: Arc::clone(buffer.memory()),
                begin: base.addr(),
                end: base.addr() + len,
                write,
                entered: None,
            });
        }
        Ok(Span { base, len })
    }

    /// Enters an input tensor.
    pub(crate) fn input(&mut self, t: &TokenTensor<'_, CpuBuffer>) -> Result<Span, DeviceError> {
        match t.data() {
            TensorData::Host(bytes) => {
                Ok(Span { base: bytes.as_ptr().cast_mut(), len: bytes.len() })
            }
            TensorData::Device { buffer, offset } => {
                self.enter(buffer, (offset, t.bytes_reached()), false)
            }
        }
    }

    /// Enters an output tensor.
    pub(crate) fn output(
        &mut self,
        t: &mut TokenTensorMut<'_, CpuBuffer>,
    ) -> Result<Span, DeviceError> {
        let reached = t.bytes_reached();
        match t.data() {
            TensorDataMut::Host(bytes) => Ok(Span { base: bytes.as_mut_ptr(), len: bytes.len() }),
            TensorDataMut::Device { buffer, offset } => {
                self.enter(buffer, (*offset, reached), true)
            }
        }
    }

    /// Enters every segment of a plane, each of which must have the size its layout says, and the
    /// constants that its rows are read and written with, whose span is returned.
    pub(crate) fn plane(
        &mut self,
        plane: &PlaneView<'_, CpuBuffer>,
        write: bool,
    ) -> Result<Option<Span>, DeviceError> {
        let layout = plane.layout();
        for index in 0..layout.num_segments() {
            let Some(buffer) = plane.segment(num::to_usize(index)) else {
                return Err(unsupported(
                    self.operation,
                    format!("the plane has no buffer for segment {index}"),
                ));
            };
            self.enter(buffer, (0, layout.segment_bytes(index)), write)?;
        }
        let constants = plane.constants().filter(|_| layout.has_constants());
        constants
            .map(|buffer| self.enter(buffer, (0, num::to_u64(buffer.len())), false))
            .transpose()
    }

    /// Refuses overlaps with written ranges, then waits for every gate.
    pub(crate) fn lock(self) -> Result<Locked<'w>, DeviceError> {
        let Self { entries, operation } = self;
        entries.sort_unstable_by_key(|entry| (entry.address(), entry.begin));
        check_overlaps(entries, operation)?;
        let locked = Locked { entries };
        let mut index = 0;
        while let Some(entry) = locked.entries.get(index) {
            let address = entry.address();
            let same =
                locked.entries[index..].iter().take_while(|other| other.address() == address);
            let (count, write) = same
                .fold((0_usize, false), |(count, write), other| (count + 1, write || other.write));
            entry.memory.enter(write);
            locked.entries[index].entered = Some(write);
            index += count;
        }
        Ok(locked)
    }
}

/// Checks ranges, sorted by allocation and start, in one sweep.
fn check_overlaps(entries: &[Entry], operation: &'static str) -> Result<(), DeviceError> {
    let (mut address, mut end_any, mut end_written) = (0, 0, 0);
    for entry in entries {
        if entry.address() != address {
            (address, end_any, end_written) = (entry.address(), 0, 0);
        }
        let taken = if entry.write { end_any } else { end_written };
        if entry.begin < taken {
            return Err(unsupported(operation, "bytes it writes overlap others it names"));
        }
        end_any = end_any.max(entry.end);
        if entry.write {
            end_written = end_written.max(entry.end);
        }
    }
    Ok(())
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        for entry in self.entries.iter() {
            if let Some(write) = entry.entered {
                entry.memory.leave(write);
            }
        }
        self.entries.clear();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    use kv_core::error::DeviceErrorKind;

    use super::*;

    fn lock(ranges: &[(&CpuBuffer, u64, u64, bool)]) -> Result<(), DeviceError> {
        let mut entries = Vec::new();
        let mut access = Access::new(&mut entries, "test");
        for (buffer, offset, bytes, write) in ranges {
            access.enter(buffer, (*offset, *bytes), *write)?;
        }
        access.lock().map(drop)
    }

    #[test]
    fn one_allocation_may_be_named_many_times() {
        let a = CpuBuffer::alloc(100).unwrap();
        let b = a.clone();
        let view = a.view(50, 50).unwrap();
        lock(&[(&a, 0, 50, false), (&view, 0, 50, true)]).unwrap();
        lock(&[(&a, 0, 100, false), (&b, 0, 100, false)]).unwrap();
        lock(&[(&a, 0, 10, true), (&b, 10, 10, true)]).unwrap();
        // The gates are open again.
        lock(&[(&a, 0, 100, true)]).unwrap();
    }

    #[test]
    fn overlaps_with_written_bytes_are_refused() {
        let a = CpuBuffer::alloc(100).unwrap();
        let view = a.view(50, 50).unwrap();
        for ranges in [
            [(&a, 0, 51, false), (&view, 0, 50, true)],
            [(&a, 0, 51, true), (&view, 0, 50, false)],
            [(&a, 5, 10, true), (&a, 5, 10, true)],
        ] {
            assert_eq!(lock(&ranges).unwrap_err().kind(), DeviceErrorKind::Unsupported);
        }
        // Read under a write that began earlier and ended later.
        let nested = [(&a, 0, 90, true), (&a, 10, 10, true)];
        assert!(lock(&nested).is_err());
        lock(&[(&a, 0, 100, true)]).unwrap();
    }

    #[test]
    fn calls_wait_for_each_other() {
        let a = CpuBuffer::alloc(100).unwrap();
        let is_free = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let waits = a.write(|_| {
                let waits = scope.spawn(|| {
                    lock(&[(&a, 0, 1, false)]).unwrap();
                    is_free.load(Ordering::SeqCst)
                });
                std::thread::sleep(Duration::from_millis(20));
                is_free.store(true, Ordering::SeqCst);
                waits
            });
            assert!(waits.join().unwrap(), "a read overlapped a write");
        });
    }
}
