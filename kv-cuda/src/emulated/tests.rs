//! The interface between the library and this module.
use kv_core::backend::{Backend, Queue, Readback};

use super::*;
use crate::CudaBackend;
use crate::gpu::Launch;
use crate::params::SIZES;

fn open() -> Emulator {
    Emulator::open(&EmulatorOptions::default()).unwrap()
}

#[test]
fn structures_have_the_sizes_of_the_kernels() {
    let library = open().kernels;
    for (name, bytes) in SIZES {
        assert_eq!(library.sizeof(&format!("Kv{name}")), *bytes, "{name}");
    }
    assert_eq!(library.sizeof("KvNothing"), 0);
}

#[test]
fn kernel_names_are_unique() {
    let mut names = open().kernels.kernels();
    let count = names.len();
    assert!(count > 0);
    names.sort();
    names.dedup();
    assert_eq!(names.len(), count);
}

#[test]
fn a_wrong_launch_is_refused() {
    let gpu = open();
    let mut stream = gpu.stream().unwrap();
    let mut refused = |launch: &Launch, params: &[u8]| {
        // SAFETY: refused before the kernel runs, as this test checks.
        let error = unsafe { stream.launch(launch, params) }.unwrap_err();
        assert_eq!(error.kind(), DeviceErrorKind::Driver);
        error.to_string()
    };
    let unknown = Launch { kernel: "no_kernel", grid: [1; 3], threads: 32, shared_bytes: 0 };
    assert!(refused(&unknown, &[]).contains("no kernel is named no_kernel"));
    let nobody = gpu.kernels.kernels().into_iter().next().unwrap();
    let kernel: &'static str = nobody.leak();
    // No block has so few threads or such large parameters.
    let none = Launch { kernel, threads: 1, ..unknown };
    assert!(refused(&none, &[]).contains("threads a block"));
}

#[test]
fn memory_is_aligned_zeroed_counted_and_bounded() {
    let gpu = Emulator::open(&EmulatorOptions::default().with_memory(4096)).unwrap();
    let address = gpu.alloc(1000).unwrap();
    assert_eq!((address % 256, gpu.allocated()), (0, (1, 1000)));
    let pinned = gpu.pinned(1000).unwrap();
    let mut stream = gpu.stream().unwrap();
    // SAFETY: both have 1000 bytes.
    unsafe { stream.download(pinned.base(), address, 1000) }.unwrap();
    // SAFETY: `pinned` has 1000 bytes that nothing writes now.
    assert!(unsafe { std::slice::from_raw_parts(pinned.base(), 1000) }.iter().all(|b| *b == 0));
    let full = gpu.alloc(3097).unwrap_err();
    assert_eq!(full.kind(), DeviceErrorKind::OutOfMemory);
    // SAFETY: refused, because the range ends past the allocation.
    let outside = unsafe { stream.zero(address + 1, 1000) }.unwrap_err();
    assert_eq!(outside.kind(), DeviceErrorKind::OutOfRange);
    // SAFETY: allocated above and not used below.
    unsafe { gpu.free(address) };
    assert_eq!(gpu.allocated(), (0, 0));
}

#[test]
fn reserved_memory_is_not_shared() {
    let options = EmulatorOptions::default().with_memory(4096);
    let error = Emulator::open(&options.clone().with_reserved_bytes(4097)).unwrap_err();
    assert_eq!(error.kind(), DeviceErrorKind::OutOfMemory);
    assert!(error.to_string().contains("4097 bytes of 4096"), "{error}");
    let gpu = Emulator::open(&options.with_reserved_bytes(3000)).unwrap();
    assert!(!gpu.memory.take_elsewhere(1097));
    assert!(gpu.memory.take_elsewhere(1000));
    // Freed memory is available again, still to this device only.
    let mut refused = 0;
    for _ in 0..3 {
        let first = gpu.alloc(2000).unwrap();
        let second = gpu.alloc(1000).unwrap();
        refused += u32::from(gpu.alloc(97).is_err());
        for address in [first, second] {
            // SAFETY: allocated above and not used below.
            unsafe { gpu.free(address) };
        }
        assert!(!gpu.memory.take_elsewhere(97));
    }
    assert_eq!(refused, 3);
    // Memory beyond the reserve is allocated as needed, and kept.
    let all = gpu.alloc(3096).unwrap();
    // SAFETY: allocated above and not used below.
    unsafe { gpu.free(all) };
    assert!(!gpu.memory.take_elsewhere(1));
    assert_eq!(gpu.alloc(3097).unwrap_err().kind(), DeviceErrorKind::OutOfMemory);
    assert_eq!(gpu.allocated(), (0, 0));
}

#[test]
fn bytes_round_trip() {
    let gpu = open();
    let address = gpu.alloc(16).unwrap();
    let (from, to) = (gpu.pinned(8).unwrap(), gpu.pinned(16).unwrap());
    // SAFETY: `from` has 8 bytes that nothing else uses.
    unsafe { std::slice::from_raw_parts_mut(from.base(), 8) }.copy_from_slice(b"12345678");
    let mut stream = gpu.stream().unwrap();
    // SAFETY: bytes 4 to 12 of 16, from 8.
    unsafe { stream.upload(address + 4, from.base(), 8) }.unwrap();
    // SAFETY: bytes 6 to 8 of 16.
    unsafe { stream.zero(address + 6, 2) }.unwrap();
    // SAFETY: all 16 of both.
    unsafe { stream.download(to.base(), address, 16) }.unwrap();
    let event = stream.record().unwrap();
    assert!(event.is_done().unwrap());
    // SAFETY: `to` has 16 bytes, written above.
    let bytes = unsafe { std::slice::from_raw_parts(to.base(), 16) };
    assert_eq!(bytes, [0, 0, 0, 0, b'1', b'2', 0, 0, b'5', b'6', b'7', b'8', 0, 0, 0, 0]);
    // SAFETY: allocated above and not used below.
    unsafe { gpu.free(address) };
}

#[test]
fn events_of_another_device_are_refused() {
    let (gpu, other) = (open(), open());
    let mut stream = gpu.stream().unwrap();
    let event = stream.record().unwrap();
    stream.wait_for(&event).unwrap();
    let foreign = other.stream().unwrap().record().unwrap();
    assert_eq!(stream.wait_for(&foreign).unwrap_err().kind(), DeviceErrorKind::ForeignHandle);
}

/// The handles are never used.
#[test]
fn a_callers_stream_is_any_handle() {
    let [backend, other] =
        [(); 2].map(|()| CudaBackend::emulated(&EmulatorOptions::default()).unwrap());
    let handle = std::ptr::without_provenance_mut(77);
    let memory = backend.alloc(16).unwrap();
    // SAFETY: the emulator has no streams that end, and nobody captures.
    let mut queue = unsafe { backend.queue_on(handle) }.unwrap();
    queue.upload(&memory, 0, &[7; 16]).unwrap();
    // SAFETY: as above.
    let marked = unsafe { backend.mark_stream(handle) }.unwrap();
    queue.wait_for(&marked).unwrap();
    let submitted = queue.submit().unwrap();
    // SAFETY: as above.
    unsafe { backend.hold_stream(handle, &submitted) }.unwrap();
    // SAFETY: as above.
    let refused = unsafe { other.hold_stream(handle, &submitted) }.unwrap_err();
    assert_eq!(refused.kind(), DeviceErrorKind::ForeignHandle);
    assert_eq!(queue.download(&memory, 0, 16).unwrap().wait().unwrap(), [7; 16]);
}

#[test]
fn a_missing_library_names_the_command_that_builds_it() {
    let nowhere = EmulatorOptions::default().with_library("/nowhere/libkv_emulator.so");
    let error = Emulator::open(&nowhere).unwrap_err();
    assert_eq!(error.kind(), DeviceErrorKind::Unsupported);
    let text = error.to_string();
    assert!(text.contains("/nowhere/libkv_emulator.so") && text.contains("cargo xtask emulator"));
}
