//! Tests of the driver on the first device. Without one they print why, and test the rest.
use std::sync::Arc;

use kv_core::error::DeviceErrorKind;

use super::*;
use crate::gpu::{HostCopy, Launch};
use crate::params::TableParams;

/// Opens the device; `None` if this machine has none.
fn gpu() -> Option<CudaGpu> {
    match CudaGpu::open(&CudaOptions::default()) {
        Ok(gpu) => Some(gpu),
        Err(error) => {
            assert_eq!(error.kind(), DeviceErrorKind::Unsupported, "{error}");
            println!("skipped: {error}");
            None
        }
    }
}

/// Allocates page-locked memory that holds `bytes`.
fn pinned(gpu: &CudaGpu, bytes: &[u8]) -> Box<dyn Pinned> {
    let memory = gpu.pinned(bytes.len()).unwrap();
    assert_eq!(memory.len(), bytes.len());
    // SAFETY: fresh memory of exactly this length.
    unsafe { memory.base().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    memory
}

fn held(memory: &dyn Pinned) -> Vec<u8> {
    // SAFETY: memory that was written, by `pinned` or a completed download.
    unsafe { std::slice::from_raw_parts(memory.base(), memory.len()) }.to_vec()
}

fn download(gpu: &CudaGpu, stream: &mut dyn Stream, from: Address, bytes: usize) -> Vec<u8> {
    let memory = pinned(gpu, &vec![0xee; bytes]);
    // SAFETY: the memory lives until the event is done, and callers allocated the range.
    unsafe { stream.download(memory.base(), from, bytes) }.unwrap();
    let event = stream.record().unwrap();
    event.wait().unwrap();
    assert!(event.is_done().unwrap());
    held(&*memory)
}

/// Holds on any machine: a device is opened, or the error says why not.
#[test]
fn opening_never_panics() {
    for ordinal in [0, 99, u32::MAX] {
        match CudaGpu::open(&CudaOptions::new(ordinal)) {
            Ok(gpu) => assert!(gpu.facts().capability >= 80),
            Err(error) => {
                assert_eq!(error.kind(), DeviceErrorKind::Unsupported, "{error}");
                assert!(error.to_string().contains('('), "no reason: {error}");
            }
        }
    }
}

#[test]
fn a_missing_driver_is_the_reason() {
    if facts::is_driver_present() {
        return;
    }
    let error = CudaGpu::open(&CudaOptions::default()).unwrap_err();
    assert_eq!(error.kind(), DeviceErrorKind::Unsupported);
    let said = error.to_string();
    assert_eq!(said, "open cuda: Unsupported (no CUDA driver library on this machine)");
}

#[test]
fn memory_is_zeroed_copied_and_zeroed() {
    let Some(gpu) = gpu() else { return };
    let mut stream = gpu.stream().unwrap();
    let device = gpu.alloc(1000).unwrap();
    assert_eq!(device % 256, 0);
    assert_eq!(download(&gpu, &mut *stream, device, 1000), [0; 1000]);
    let bytes: Vec<u8> = (0..=255).cycle().take(900).collect();
    let memory = pinned(&gpu, &bytes);
    // SAFETY: 900 bytes from 50 on lie in the 1000, as do the 100 zeroes; the host memory lives.
    unsafe { stream.upload(device + 50, memory.base(), 900) }.unwrap();
    // SAFETY: as above.
    unsafe { stream.zero(device + 100, 100) }.unwrap();
    let mut expected = [vec![0; 50], bytes, vec![0; 50]].concat();
    expected[100..200].fill(0);
    assert_eq!(download(&gpu, &mut *stream, device, 1000), expected);
    // SAFETY: 300 bytes from 20 and from 600 on lie in the 1000, and do not overlap.
    unsafe { stream.copy(device + 600, device + 20, 300) }.unwrap();
    expected.copy_within(20..320, 600);
    assert_eq!(download(&gpu, &mut *stream, device, 1000), expected);
    // SAFETY: allocated above, and not used any more.
    unsafe { gpu.free(device) };
}

#[test]
fn batches_make_every_copy() {
    /// More than three calls of the driver.
    const PIECES: u16 = 3 * 4096 + 1;
    let Some(gpu) = gpu() else { return };
    let mut stream = gpu.stream().unwrap();
    let device = gpu.alloc(u64::from(PIECES) * 256).unwrap();
    let bytes: Vec<u8> =
        (0..PIECES).flat_map(|piece| [piece; 50]).flat_map(u16::to_le_bytes).collect();
    let (from, to) = (pinned(&gpu, &bytes), pinned(&gpu, &vec![0xee; bytes.len()]));
    let all = usize::from(PIECES);
    for (pieces, captured) in [
        (1, false),
        (64, false),
        (64, true),
        (4095, false),
        (4096, false),
        (4097, false),
        (all, false),
    ] {
        // SAFETY: memory that nothing else uses now.
        unsafe { to.base().write_bytes(0xee, to.len()) };
        if captured {
            stream.begin_capture().unwrap();
        }
        let copies = |memory: &dyn Pinned| -> Vec<HostCopy> {
            let piece = |index: usize| HostCopy {
                host: memory.base().wrapping_add(index * 100),
                device: device + u64::try_from(index * 256).unwrap(),
                bytes: 100,
            };
            (0..pieces).map(piece).collect()
        };
        // SAFETY: all copies lie in both memories, which live until the event below is done.
        unsafe { stream.upload_batch(&copies(&*from)) }.unwrap();
        // SAFETY: as above.
        unsafe { stream.download_batch(&copies(&*to)) }.unwrap();
        if captured {
            let graph = stream.end_capture().unwrap();
            // SAFETY: as above.
            unsafe { stream.replay(&*graph) }.unwrap();
        }
        stream.record().unwrap().wait().unwrap();
        assert_eq!(held(&*to)[..pieces * 100], bytes[..pieces * 100]);
    }
    // SAFETY: allocated above, and nothing uses it.
    unsafe { gpu.free(device) };
}

#[test]
fn streams_wait_for_each_other() {
    let Some(gpu) = gpu() else { return };
    let (mut first, mut second) = (gpu.stream().unwrap(), gpu.stream().unwrap());
    let bytes = vec![7_u8; 1 << 20];
    let device = gpu.alloc(1 << 20).unwrap();
    let memory = pinned(&gpu, &bytes);
    for _ in 0..20 {
        // SAFETY: the range is what was allocated, and the host memory lives.
        unsafe { first.zero(device, 1 << 20) }.unwrap();
        // SAFETY: as above.
        unsafe { first.upload(device, memory.base(), 1 << 20) }.unwrap();
        let event = first.record().unwrap();
        second.wait_for(&event).unwrap();
        drop(event);
        assert_eq!(download(&gpu, &mut *second, device, 1 << 20), bytes);
    }
    // SAFETY: allocated above, and nothing uses it.
    unsafe { gpu.free(device) };
}

#[test]
fn handles_of_another_opening_are_refused() {
    let (Some(one), Some(other)) = (gpu(), gpu()) else { return };
    let mut stream = one.stream().unwrap();
    let event = other.stream().unwrap().record().unwrap();
    let error = stream.wait_for(&event).unwrap_err();
    assert_eq!(error.kind(), DeviceErrorKind::ForeignHandle);
}

#[test]
fn memory_of_callers_is_checked() {
    let Some(gpu) = gpu() else { return };
    let device = gpu.alloc(4096).unwrap();
    gpu.check_foreign(device, 4096).unwrap();
    gpu.check_foreign(device + 96, 4000).unwrap();
    let kind = |address, bytes| gpu.check_foreign(address, bytes).unwrap_err().kind();
    assert_eq!(kind(device, 1 << 40), DeviceErrorKind::OutOfRange);
    assert_eq!(kind(64, 1), DeviceErrorKind::ForeignHandle);
    // SAFETY: allocated above, and nothing uses it.
    unsafe { gpu.free(device) };
}

#[test]
fn reserved_memory_stays_with_the_device() {
    let options = CudaOptions::default();
    let Ok(gpu) = CudaGpu::open(&options.clone().with_reserved_bytes(64 << 20)) else { return };
    let Some(held) = gpu.memory.held_bytes() else { return };
    assert!(held >= 64 << 20, "{held} bytes");
    for _ in 0..4 {
        let address = gpu.alloc(48 << 20).unwrap();
        // SAFETY: allocated above, and nothing uses it.
        unsafe { gpu.free(address) };
    }
    assert_eq!(gpu.memory.held_bytes(), Some(held), "the reserve was enough");
    let error = CudaGpu::open(&options.with_reserved_bytes(1 << 50)).unwrap_err();
    assert_eq!(error.kind(), DeviceErrorKind::OutOfMemory, "{error}");
}

#[test]
fn memory_is_freed_after_work_on_every_stream() {
    let Some(gpu) = gpu() else { return };
    let (mut stream, bytes) = (gpu.stream().unwrap(), vec![7_u8; 32 << 20]);
    let (memory, kept) = (pinned(&gpu, &bytes), gpu.alloc(32 << 20).unwrap());
    let mut captured = gpu.stream().unwrap();
    captured.begin_capture().unwrap();
    for _ in 0..10 {
        let device = gpu.alloc(32 << 20).unwrap();
        // SAFETY: the range is what was allocated, and the host memory lives.
        unsafe { stream.upload(device, memory.base(), 32 << 20) }.unwrap();
        // SAFETY: both were allocated with this length.
        unsafe { stream.copy(kept, device, 32 << 20) }.unwrap();
        // SAFETY: allocated above; nothing that is submitted from here on uses it.
        unsafe { gpu.free(device) };
        // The allocation is zeroed, which must not happen before the copy.
        let next = gpu.alloc(32 << 20).unwrap();
        assert!(download(&gpu, &mut *stream, kept, 32 << 20) == bytes);
        // SAFETY: allocated above, and nothing uses it.
        unsafe { gpu.free(next) };
    }
    captured.end_capture().unwrap();
    // A stream that is dropped while it captures.
    captured.begin_capture().unwrap();
    drop(captured);
    // SAFETY: allocated above, and nothing uses it.
    unsafe { gpu.free(kept) };
    assert!(gpu.stream().unwrap().record().unwrap().wait().is_ok());
}

/// Entry of the tables, and its new block.
type TableChange = [u32; 2];

/// A change of block tables: the smallest kernel.
struct Change {
    tables: Address,
    changes: Address,
    memory: Box<dyn Pinned>,
}

impl Change {
    const BYTES: usize = size_of::<[TableChange; 2]>();

    fn new(gpu: &CudaGpu, changes: [TableChange; 2]) -> Self {
        let tables = gpu.alloc(64).unwrap();
        let memory = pinned(gpu, bytemuck::must_cast_slice(&changes));
        Self { tables, changes: gpu.alloc(256).unwrap(), memory }
    }

    fn submit(&self, stream: &mut dyn Stream) -> Result<(), DeviceError> {
        // SAFETY: the host memory lives as long as `self`, which tests keep until the work is done.
        unsafe { stream.upload(self.changes, self.memory.base(), Self::BYTES) }?;
        let (changes, tables) = (self.changes, self.tables);
        let params = TableParams { changes, tables, num_changes: 2, pad: 0 };
        let launch =
            Launch { kernel: "update_tables", grid: [1, 1, 1], threads: 256, shared_bytes: 0 };
        // SAFETY: the parameters of `update_tables`; 16 tables and two changes were allocated.
        unsafe { stream.launch(&launch, bytemuck::bytes_of(&params)) }
    }

    fn result(&self, gpu: &CudaGpu, stream: &mut dyn Stream) -> Vec<u32> {
        bytemuck::pod_collect_to_vec(&download(gpu, stream, self.tables, 16))
    }

    fn free(self, gpu: &CudaGpu) {
        for address in [self.tables, self.changes] {
            // SAFETY: allocated by `new`; tests have waited for all work that uses it.
            unsafe { gpu.free(address) };
        }
    }
}

const CHANGES: [TableChange; 2] = [[1, 77], [3, 99]];

/// Loads every kernel of the archives, and reports all failures together.
#[test]
fn every_kernel_loads() {
    let Some(gpu) = gpu() else { return };
    let names = gpu.modules.kernels();
    assert!(names.len() > 50, "{names:?}");
    let load = |name: &&'static str| gpu.modules.function(name).err();
    let failed: Vec<_> = names.iter().filter_map(|name| Some((name, load(name)?))).collect();
    assert!(failed.is_empty(), "{failed:#?}");
}

#[test]
fn kernels_run_by_name() {
    let Some(gpu) = gpu() else { return };
    gpu.modules.function("update_tables").unwrap();
    let mut stream = gpu.stream().unwrap();
    let change = Change::new(&gpu, CHANGES);
    change.submit(&mut *stream).unwrap();
    assert_eq!(change.result(&gpu, &mut *stream), [0, 77, 0, 99]);
    let error = gpu.modules.function("no_such_kernel").unwrap_err();
    assert_eq!(error.kind(), DeviceErrorKind::Unsupported);
    let launch = Launch { kernel: "update_tables", grid: [0, 1, 1], threads: 1, shared_bytes: 0 };
    // SAFETY: nothing runs: the driver refuses an empty grid.
    let error = unsafe { stream.launch(&launch, &[0; size_of::<TableParams>()]) }.unwrap_err();
    assert_eq!(error.kind(), DeviceErrorKind::Driver, "{error}");
    assert_eq!(change.result(&gpu, &mut *stream), [0, 77, 0, 99], "the device is unchanged");
    change.free(&gpu);
}

#[test]
fn captured_work_runs_again() {
    let Some(gpu) = gpu() else { return };
    let mut stream = gpu.stream().unwrap();
    let change = Change::new(&gpu, CHANGES);
    // Loading a kernel during a capture is allowed.
    stream.begin_capture().unwrap();
    change.submit(&mut *stream).unwrap();
    let graph = stream.end_capture().unwrap();
    assert_eq!(change.result(&gpu, &mut *stream), [0; 4], "captured work has not run");
    for _ in 0..3 {
        // SAFETY: the memory of `change` is there.
        unsafe { stream.zero(change.tables, 64) }.unwrap();
        // SAFETY: as above.
        unsafe { stream.replay(&*graph) }.unwrap();
        assert_eq!(change.result(&gpu, &mut *stream), [0, 77, 0, 99]);
    }
    // A replay reads the current content of page-locked memory.
    let block = change.memory.base().wrapping_add(4);
    // SAFETY: nothing reads the memory now, and a change has 8 bytes.
    unsafe { block.write(5) };
    // SAFETY: the memory of `change` is there.
    unsafe { stream.replay(&*graph) }.unwrap();
    assert_eq!(change.result(&gpu, &mut *stream), [0, 5, 0, 99]);
    drop(graph);
    change.free(&gpu);
}

#[test]
fn a_callers_stream_is_not_destroyed() {
    use cudarc::driver::sys;

    let Some(gpu) = gpu() else { return };
    let raw = gpu.context.open_stream("test").unwrap();
    let change = Change::new(&gpu, CHANGES);
    for _ in 0..2 {
        // SAFETY: the stream is alive until the end of this test, and is of this context.
        let mut stream = unsafe { gpu.foreign_stream(raw.cast()) }.unwrap();
        change.submit(&mut *stream).unwrap();
        assert_eq!(change.result(&gpu, &mut *stream), [0, 77, 0, 99]);
    }
    change.free(&gpu);
    let _current = gpu.context.enter("test").unwrap();
    // SAFETY: opened above; no wrapper is left.
    let code = unsafe { sys::cuStreamDestroy_v2(raw) };
    assert_eq!(code, sys::CUresult::CUDA_SUCCESS, "the wrapper must not have destroyed it");
}

#[test]
fn a_callers_stream_is_marked_and_held() {
    use cudarc::driver::sys;

    let Some(gpu) = gpu() else { return };
    let raw = gpu.context.open_stream("test").unwrap();
    let (change, mut ours) = (Change::new(&gpu, CHANGES), gpu.stream().unwrap());
    // SAFETY: the stream is alive until the end of this test, and is of this context.
    let mut theirs = unsafe { gpu.foreign_stream(raw.cast()) }.unwrap();
    change.submit(&mut *theirs).unwrap();
    // SAFETY: as above, and nobody captures.
    let marked = unsafe { gpu.mark_foreign(raw.cast()) }.unwrap();
    ours.wait_for(&marked).unwrap();
    assert_eq!(change.result(&gpu, &mut *ours), [0, 77, 0, 99]);
    let done = ours.record().unwrap();
    // SAFETY: as above.
    unsafe { gpu.hold_foreign(raw.cast(), &done) }.unwrap();
    assert_eq!(change.result(&gpu, &mut *theirs), [0, 77, 0, 99]);
    // The legacy default stream is one of every context.
    // SAFETY: it always exists, and nobody captures.
    let legacy = unsafe { gpu.mark_foreign(std::ptr::null_mut()) }.unwrap();
    legacy.wait().unwrap();
    drop(theirs);
    change.free(&gpu);
    let _current = gpu.context.enter("test").unwrap();
    // SAFETY: opened above; no wrapper is left.
    let code = unsafe { sys::cuStreamDestroy_v2(raw) };
    assert_eq!(code, sys::CUresult::CUDA_SUCCESS);
}

/// Staging memory is reused: a graph of the caller would read other bytes.
#[test]
fn uploads_into_a_capture_of_the_owner_are_refused() {
    use cudarc::driver::sys;

    let Some(gpu) = gpu() else { return };
    let raw = gpu.context.open_stream("test").unwrap();
    let change = Change::new(&gpu, CHANGES);
    // SAFETY: the stream is alive until the end of this test, and is of this context.
    let mut stream = unsafe { gpu.foreign_stream(raw.cast()) }.unwrap();
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
    let mut graph = std::ptr::null_mut();
    {
        let _current = gpu.context.enter("test").unwrap();
        // SAFETY: a live stream.
        unsafe { sys::cuStreamBeginCapture_v2(raw, mode) }.result().unwrap();
    }
    let error = change.submit(&mut *stream).unwrap_err();
    assert_eq!(error.kind(), DeviceErrorKind::Unsupported, "{error}");
    {
        let _current = gpu.context.enter("test").unwrap();
        // SAFETY: a capturing stream, and an out-pointer for a graph.
        unsafe { sys::cuStreamEndCapture(raw, &raw mut graph) }.result().unwrap();
        // SAFETY: a graph that was just made, destroyed once.
        unsafe { sys::cuGraphDestroy(graph) }.result().unwrap();
    }
    // Afterwards, and in a capture of this crate, uploads work.
    change.submit(&mut *stream).unwrap();
    assert_eq!(change.result(&gpu, &mut *stream), [0, 77, 0, 99]);
    drop(stream);
    change.free(&gpu);
}

#[test]
fn dropped_at_any_time() {
    let Some(gpu) = gpu() else { return };
    let mut stream = gpu.stream().unwrap();
    let memory = pinned(&gpu, &[1; 64]);
    let event = stream.record().unwrap();
    drop(gpu);
    drop(stream);
    assert!(event.wait().is_ok());
    drop(memory);
    drop(event);
}

#[test]
fn threads_share_a_device() {
    let Some(gpu) = gpu().map(Arc::new) else { return };
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let mut stream = gpu.stream().unwrap();
                let change = Change::new(&gpu, CHANGES);
                change.submit(&mut *stream).unwrap();
                assert_eq!(change.result(&gpu, &mut *stream), [0, 77, 0, 99]);
                change.free(&gpu);
            });
        }
    });
}
