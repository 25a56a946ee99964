//! Buffers of a queue.
use std::sync::Arc;

use kv_core::backend::{Backend, Queue, Readback};
use kv_core::error::DeviceErrorKind;

use crate::buffer::{CallerStream, CudaBuffer};
use crate::{CudaBackend, EmulatorOptions};

#[test]
fn bytes_are_copied_between_buffers() {
    let open = || CudaBackend::emulated(&EmulatorOptions::default()).unwrap();
    let device = open();
    let mut queue = device.queue().unwrap();
    let [from, to] = [8, 10].map(|bytes| device.alloc(bytes).unwrap());
    queue.upload(&from, 0, &[1, 2, 3, 4, 5, 6, 7, 8]).unwrap();
    queue.copy((&from, 2), (&to, 4), 5).unwrap();
    // An empty copy is allowed, also at the end.
    queue.copy((&from, 8), (&to, 10), 0).unwrap();
    let read = queue.download(&to, 0, 10).unwrap().wait().unwrap();
    assert_eq!(read, [0, 0, 0, 0, 3, 4, 5, 6, 7, 0]);
    // Disjoint ranges of one buffer.
    queue.copy((&to, 4), (&to, 0), 4).unwrap();
    let read = queue.download(&to, 0, 10).unwrap().wait().unwrap();
    assert_eq!(read, [3, 4, 5, 6, 3, 4, 5, 6, 7, 0]);
    let other = open().alloc(8).unwrap();
    let refusals = [
        (queue.copy((&to, 4), (&to, 1), 4), DeviceErrorKind::Unsupported),
        (queue.copy((&from, 4), (&to, 0), 5), DeviceErrorKind::OutOfRange),
        (queue.copy((&from, 0), (&to, 3), 8), DeviceErrorKind::OutOfRange),
        (queue.copy((&other, 0), (&to, 0), 4), DeviceErrorKind::ForeignHandle),
    ];
    for (refused, kind) in refusals {
        assert_eq!(refused.unwrap_err().kind(), kind);
    }
    assert_eq!(
        queue.download(&to, 0, 10).unwrap().wait().unwrap(),
        read,
        "refused copies change nothing"
    );
}

#[test]
fn memory_of_the_caller_is_written_in_place_and_not_freed() {
    let backend = CudaBackend::emulated(&EmulatorOptions::default()).unwrap();
    let mut queue = backend.queue().unwrap();
    // Memory of another library on this device.
    let theirs = backend.alloc(256).unwrap();
    queue.upload(&theirs, 0, &[7; 256]).unwrap();
    // SAFETY: memory of this device that outlives the handle, used by one queue.
    let checked = unsafe { backend.wrap(theirs.address(), 64) }.unwrap();
    // SAFETY: the same.
    let unchecked = unsafe { backend.wrap_unchecked(theirs.address() + 128, 64) }.unwrap();
    for (buffer, value) in [(&checked, 8), (&unchecked, 9)] {
        assert_eq!(buffer.len(), 64);
        queue.upload(buffer, 0, &[value; 64]).unwrap();
    }
    drop((checked, unchecked));
    let bytes = queue.download(&theirs, 0, 256).unwrap().wait().unwrap();
    let expected = [[8; 64], [7; 64], [9; 64], [7; 64]].concat();
    assert_eq!(bytes, expected);
    for address in [theirs.address() + 8, theirs.address() + 1] {
        // SAFETY: memory of this device; it is refused.
        let checked = unsafe { backend.wrap(address, 64) };
        // SAFETY: the same.
        let unchecked = unsafe { backend.wrap_unchecked(address, 64) };
        for refused in [checked, unchecked] {
            assert_eq!(refused.unwrap_err().kind(), DeviceErrorKind::Unsupported);
        }
    }
    // SAFETY: refused, because the allocation ends before.
    let beyond = unsafe { backend.wrap(theirs.address(), 1 << 20) }.unwrap_err();
    assert_eq!(beyond.kind(), DeviceErrorKind::OutOfRange);
}

/// Only work that is recorded on the lender's stream ends before the lender frees the memory.
#[test]
fn lent_memory_is_refused_on_other_streams() {
    let backend = CudaBackend::emulated(&EmulatorOptions::default()).unwrap();
    let theirs = backend.alloc(64).unwrap();
    let stream = CallerStream(0x100);
    // SAFETY: memory of this device that outlives the handle, used by queues of this test.
    let lent = unsafe { CudaBuffer::lent(&backend.gpu, (theirs.address(), 64), stream) };
    let mut own = backend.queue().unwrap();
    let [mut same, mut other] = [stream, CallerStream(0x200)].map(|stream| {
        let mut queue = backend.queue().unwrap();
        queue.set_lending(stream, Arc::new(()));
        queue
    });
    for queue in [&mut own, &mut other] {
        let refused = queue.upload(&lent, 0, &[1; 64]).unwrap_err();
        assert_eq!(refused.kind(), DeviceErrorKind::ForeignHandle);
        assert!(refused.to_string().contains("another stream"), "{refused}");
    }
    same.upload(&lent, 0, &[2; 64]).unwrap();
    assert_eq!(own.download(&theirs, 0, 64).unwrap().wait().unwrap(), [2; 64]);
    assert!(lent.is_only_handle(), "no call keeps lent memory");
    let kept = lent.view(0, 8).unwrap();
    assert!(!lent.is_only_handle());
    drop(kept);
    assert!(lent.is_only_handle());
}
