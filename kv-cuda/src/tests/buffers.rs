//! Buffers of a queue.
use kv_core::backend::{Backend, Queue, Readback};
use kv_core::error::DeviceErrorKind;

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
