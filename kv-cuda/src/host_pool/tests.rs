//! Chunks return blocks unchanged and in order, and their memory is neither reused nor freed early.
//!
//! The conformance suite has the guarantees of every host pool, as `tier/*`.
#![expect(
    clippy::as_conversions,
    clippy::cast_possible_truncation,
    reason = "small numbers, and overflow checks are on"
)]

use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};

use kv_core::backend::{
    Backend, ChunkShape, Fence, HostPool, KvStorage, PendingChunk, Plane, PlaneLayout, PlaneShape,
    Queue, Readback,
};
use kv_core::error::DeviceErrorKind;
use kv_core::{BlockId, BlockOrder};

use crate::fence::CudaFence;
use crate::host_pool::{CudaChunk, CudaHostPool, CudaPendingChunk};
use crate::tests::late::{LateGpu, LateState, Note, lock};
use crate::tests::random::Random;
use crate::{CudaBackend, CudaBuffer, CudaOptions, CudaQueue, EmulatorOptions};

const BLOCKS: u32 = 8;
const SHAPE: ChunkShape = ChunkShape { blocks: 4, header_bytes: 1 };

/// A group's planes, and the bytes they should hold.
struct Fixture {
    backend: CudaBackend,
    queue: CudaQueue,
    storage: KvStorage<CudaBuffer>,
    planes: Vec<Vec<u8>>,
    random: Random,
}

fn layout(format: &str, order: BlockOrder, head_dim: u32) -> PlaneLayout {
    layout_of_heads(format, order, (3, head_dim))
}

fn layout_of_heads(
    format: &str,
    order: BlockOrder,
    (num_kv_heads, head_dim): (u32, u32),
) -> PlaneLayout {
    let (format, block_size) = (format.parse().unwrap(), 5);
    let shape =
        PlaneShape { num_blocks: BLOCKS, block_size, num_kv_heads, head_dim, order, format };
    PlaneLayout::new(shape).unwrap()
}

fn odd_layouts() -> [PlaneLayout; 2] {
    // Rows of 40 bytes and of 18: blocks of V are not multiples of 16.
    [layout("bf16", BlockOrder::Hnd, 20), layout("q4_0", BlockOrder::Nhd, 32)]
}

impl Fixture {
    fn new(backend: CudaBackend, layouts: [PlaneLayout; 2], layers: usize) -> Self {
        let mut storage = KvStorage::new(&backend, layouts).unwrap();
        for layer in 0..layers {
            storage.allocate(&backend, layer).unwrap();
        }
        let queue = backend.queue().unwrap();
        let mut fixture = Self { backend, queue, storage, planes: Vec::new(), random: Random(7) };
        fixture.overwrite();
        fixture
    }

    /// Creates one whose streams run late.
    fn late(layers: usize) -> (Self, Arc<Mutex<LateState>>) {
        let gpu = LateGpu::open(1 << 30);
        let late = Arc::clone(&gpu.state);
        (Self::new(CudaBackend::on(gpu), odd_layouts(), layers), late)
    }

    fn pool(&self, chunks: u32) -> CudaHostPool {
        self.backend.host_pool(self.storage.view(), SHAPE, chunks).unwrap()
    }

    /// Writes other bytes to every plane, on the cache's queue.
    fn overwrite(&mut self) {
        self.planes.clear();
        for view in self.storage.view().planes() {
            let layout = view.layout();
            let bytes: Vec<u8> =
                (0..layout.plane_bytes()).map(|_| self.random.next() as u8).collect();
            let mut rest = &bytes[..];
            for index in 0..layout.num_segments() {
                let (segment, behind) = rest.split_at(layout.segment_bytes(index) as usize);
                self.queue.upload(view.segment(index as usize).unwrap(), 0, segment).unwrap();
                rest = behind;
            }
            self.planes.push(bytes);
        }
    }

    fn fence(&mut self) -> CudaFence {
        self.queue.submit().unwrap()
    }

    /// Copies blocks out after all work of the cache's queue.
    fn copy_out(
        &mut self,
        pool: &mut CudaHostPool,
        chunk: CudaChunk,
        (blocks, first): (&[u32], u32),
    ) -> CudaPendingChunk {
        let after = self.fence();
        pool.copy_out(&after, self.storage.view(), &ids(blocks), chunk, first).unwrap()
    }

    /// Copies blocks in after all work of the cache's queue, which waits for them.
    fn copy_in(
        &mut self,
        pool: &mut CudaHostPool,
        chunk: &CudaChunk,
        (blocks, first): (&[u32], u32),
    ) {
        let after = self.fence();
        let copied = pool.copy_in(&after, self.storage.view(), &ids(blocks), chunk, first).unwrap();
        self.queue.wait_for(&copied).unwrap();
    }

    /// Updates the model: block `to` has the content of block `from`.
    fn expect(&mut self, was: &[Vec<u8>], from: usize, to: usize) {
        for ((plane, was), view) in
            self.planes.iter_mut().zip(was).zip(self.storage.view().planes())
        {
            let bytes = view.layout().block_bytes() as usize;
            let block = &was[from * bytes..][..bytes];
            plane[to * bytes..][..bytes].copy_from_slice(block);
        }
    }

    /// Compares all bytes of all planes.
    fn check(&mut self, what: &str) {
        for (index, (plane, view)) in
            self.planes.iter().zip(self.storage.view().planes()).enumerate()
        {
            let mut bytes = Vec::new();
            for segment in 0..view.layout().num_segments() {
                let buffer = view.segment(segment as usize).unwrap();
                let read = self.queue.download(buffer, 0, buffer.len()).unwrap();
                bytes.extend(read.wait().unwrap());
            }
            assert!(bytes == *plane, "plane {index}, {what}");
        }
    }
}

fn ids(blocks: &[u32]) -> Vec<BlockId> {
    blocks.iter().copied().map(BlockId).collect()
}

/// Copies out, overwrites, and copies in elsewhere, twice, to and from one chunk.
fn round_trip(mut fixture: Fixture, what: &str) {
    let mut pool = fixture.pool(1);
    let chunk = pool.take().unwrap();
    let first = fixture.planes.clone();
    let pending = fixture.copy_out(&mut pool, chunk, (&[3, 0, 7], 0));
    fixture.queue.wait_for(&pending.fence).unwrap();
    fixture.overwrite();
    let chunk = pending.wait().unwrap();
    fixture.copy_in(&mut pool, &chunk, (&[6, 1], 1));
    fixture.expect(&first, 0, 6);
    fixture.expect(&first, 7, 1);
    // Places 2 and 3 are overwritten without a wait for the reads of 2; 0 still has block 3.
    let second = fixture.planes.clone();
    let pending = fixture.copy_out(&mut pool, chunk, (&[1, 2], 2));
    fixture.queue.wait_for(&pending.fence).unwrap();
    fixture.overwrite();
    let chunk = pending.wait().unwrap();
    fixture.copy_in(&mut pool, &chunk, (&[7], 0));
    fixture.copy_in(&mut pool, &chunk, (&[0, 4], 2));
    fixture.expect(&first, 3, 7);
    fixture.expect(&second, 1, 0);
    fixture.expect(&second, 2, 4);
    fixture.check(what);
}

#[test]
fn blocks_return_unchanged() {
    let formats = ["f32", "q4_0", "int8", "l3", "nvfp4", "fp8-e4m3", "q8_0", "bf16", "l6"];
    for (index, pair) in formats.windows(2).enumerate() {
        let order = [BlockOrder::Nhd, BlockOrder::Hnd][index % 2];
        let k = layout(pair[0], order, 64);
        let v = layout(pair[1], order, 32);
        let k = if k.format().is_quantised() { k.with_block_means().unwrap() } else { k };
        // One segment for all blocks, and segments of 3 with a shorter last one.
        let longest = k.block_bytes().max(v.block_bytes());
        for bytes_max in [1 << 30, longest * 3] {
            for is_early in [false, true] {
                let gpu = LateGpu::open(bytes_max);
                lock(&gpu.state).is_early = is_early;
                let fixture = Fixture::new(CudaBackend::on(gpu), [k, v], 1 + index % 3);
                let segments = if bytes_max == 1 << 30 { 1 } else { 3 };
                assert_eq!(fixture.storage.layouts().first().num_segments(), segments);
                round_trip(fixture, &format!("{pair:?} {order:?} {segments} {is_early}"));
            }
        }
    }
    let backend = CudaBackend::emulated(&EmulatorOptions::default()).unwrap();
    round_trip(Fixture::new(backend, odd_layouts(), 2), "emulated");
}

#[test]
fn blocks_return_unchanged_on_a_card() {
    match CudaBackend::open(&CudaOptions::default()) {
        Ok(backend) => round_trip(Fixture::new(backend, odd_layouts(), 5), "a card"),
        Err(error) => assert_eq!(error.kind(), DeviceErrorKind::Unsupported, "{error}"),
    }
}

#[test]
fn copies_are_one_batch_between_events() {
    let (mut fixture, late) = Fixture::late(3);
    let mut pool = fixture.pool(1);
    let submitted = |from: usize| lock(&late).notes[from..].to_vec();
    let written = fixture.fence();
    let begin = submitted(0).len();
    assert_eq!(submitted(begin - 1), [(0, Note::Mark(0))]);
    let chunk = pool.take().unwrap();
    let blocks = ids(&[0, 5]);
    let mut pending = pool.copy_out(&written, fixture.storage.view(), &blocks, chunk, 1).unwrap();
    let copies = 2 * 3 * 2;
    let out = [(1, Note::Wait(0)), (1, Note::Down(copies)), (1, Note::Mark(1))];
    assert_eq!(submitted(begin), out);
    // Nothing has waited, so no call has blocked: not even the first upload has run.
    assert_eq!(lock(&late).num_late(), begin + out.len());
    let mut cx = Context::from_waker(Waker::noop());
    assert!(pending.poll(&mut cx).is_pending());
    pending.fence.wait().unwrap();
    let Poll::Ready(Ok(chunk)) = pending.poll(&mut cx) else { panic!("the chunk has arrived") };
    let begin = submitted(0).len();
    let free = fixture.fence();
    let loaded = pool.copy_in(&free, fixture.storage.view(), &ids(&[3]), &chunk, 2).unwrap();
    fixture.queue.wait_for(&loaded).unwrap();
    let and_in = [
        (0, Note::Mark(2)),
        (1, Note::Wait(2)),
        (1, Note::Up(copies / 2)),
        (1, Note::Mark(3)),
        (0, Note::Wait(3)),
    ];
    assert_eq!(submitted(begin), and_in);
    assert_eq!(lock(&late).num_late(), and_in.len());
    loaded.wait().unwrap();
    assert_eq!(lock(&late).num_late(), 1, "the queue waits for completed work");
    // A call with nothing to copy still returns a fence, wherever it begins.
    let none = pool.copy_in(&free, fixture.storage.view(), &[], &chunk, u32::MAX).unwrap();
    none.wait().unwrap();
    pool.copy_out(&free, fixture.storage.view(), &[], chunk, 4).unwrap().wait().unwrap();
}

#[test]
#[should_panic(expected = "a pending chunk is returned once")]
fn a_chunk_arrives_once() {
    let (mut fixture, _) = Fixture::late(1);
    let mut pool = fixture.pool(1);
    let chunk = pool.take().unwrap();
    let mut pending = fixture.copy_out(&mut pool, chunk, (&[0], 0));
    pending.fence.wait().unwrap();
    let mut cx = Context::from_waker(Waker::noop());
    assert!(matches!(pending.poll(&mut cx), Poll::Ready(Ok(_))));
    let _ = pending.poll(&mut cx);
}

#[test]
fn a_dropped_chunk_is_taken_when_its_copies_are_done() {
    let (mut fixture, late) = Fixture::late(1);
    let mut pool = fixture.pool(2);
    let (chunk, idle) = (pool.take().unwrap(), pool.take().unwrap());
    let at = chunk.as_ref().as_ptr();
    let pending = fixture.copy_out(&mut pool, chunk, (&[1, 2], 0));
    let fence = pending.fence.clone();
    drop(pending);
    let submitted = lock(&late).num_late();
    assert!(pool.take().is_none(), "the copy out is pending");
    // Another chunk can be taken meanwhile.
    drop(idle);
    let idle = pool.take().unwrap();
    assert_ne!(idle.as_ref().as_ptr(), at);
    assert!(pool.take().is_none(), "the copy out is pending");
    assert_eq!(lock(&late).num_late(), submitted, "nothing has waited");
    fence.wait().unwrap();
    let chunk = pool.take().unwrap();
    assert_eq!(chunk.as_ref().as_ptr(), at);
    // The same after copies in, of which the second is done last.
    fixture.copy_in(&mut pool, &chunk, (&[3], 0));
    let after = fixture.fence();
    let copied = pool.copy_in(&after, fixture.storage.view(), &ids(&[4]), &chunk, 1).unwrap();
    drop(chunk);
    assert!(pool.take().is_none(), "the copies in are pending");
    copied.wait().unwrap();
    assert_eq!(pool.take().unwrap().as_ref().as_ptr(), at);
}

#[test]
fn bytes_are_written_after_a_copy_of_them() {
    let (mut fixture, late) = Fixture::late(2);
    let mut pool = fixture.pool(1);
    let chunk = pool.take().unwrap();
    let was = fixture.planes.clone();
    let mut chunk = fixture.copy_out(&mut pool, chunk, (&[5], 3)).wait().unwrap();
    fixture.overwrite();
    fixture.copy_in(&mut pool, &chunk, (&[2], 3));
    let submitted = lock(&late).num_late();
    let copy = chunk.as_ref().to_vec();
    assert_eq!(lock(&late).num_late(), submitted, "bytes are read beside the copy");
    chunk.as_mut().fill(0xEE);
    assert_eq!(lock(&late).num_late(), 1, "the queue waits for completed work");
    assert!(copy != chunk.as_ref());
    fixture.expect(&was, 5, 2);
    fixture.check("after the chunk was overwritten");
    // The caller's bytes are copied.
    chunk.as_mut().copy_from_slice(&copy);
    fixture.copy_in(&mut pool, &chunk, (&[7], 3));
    fixture.expect(&was, 5, 7);
    fixture.check("after the chunk was written");
}

#[test]
fn refused_calls_submit_nothing_and_return_the_chunk() {
    use DeviceErrorKind::{ForeignHandle, OutOfRange, Unsupported};
    let (mut fixture, late) = Fixture::late(1);
    let (mut elsewhere, _) = Fixture::late(1);
    // Equal planes of another cache.
    let mut equal = KvStorage::new(&fixture.backend, odd_layouts()).unwrap();
    equal.allocate(&fixture.backend, 0).unwrap();
    let mut pool = fixture.pool(1);
    let fences = [fixture.fence(), elsewhere.fence()];
    let own = fixture.storage.view();
    let refused = [
        ("block 8 of 8", OutOfRange, 0, own, vec![0, 8], 0),
        ("block 4294967295 of 8", OutOfRange, 0, own, vec![u32::MAX], 0),
        ("2 blocks from place 3, of 4", OutOfRange, 0, own, vec![0, 1], 3),
        ("1 blocks from place 4294967295, of 4", OutOfRange, 0, own, vec![0], u32::MAX),
        ("the planes are not those", Unsupported, 0, equal.view(), vec![0], 0),
        ("", ForeignHandle, 0, elsewhere.storage.view(), vec![0], 0),
        ("", ForeignHandle, 1, own, vec![0], 0),
    ];
    let submitted = lock(&late).notes.len();
    for (text, kind, fence, storage, blocks, first) in &refused {
        let chunk = pool.take().unwrap();
        let blocks = ids(blocks);
        let errors = [
            pool.copy_in(&fences[*fence], *storage, &blocks, &chunk, *first).unwrap_err(),
            pool.copy_out(&fences[*fence], *storage, &blocks, chunk, *first).unwrap_err(),
        ];
        for error in errors {
            assert_eq!(error.kind(), *kind, "{error}");
            assert!(error.to_string().contains(text), "{error}");
        }
    }
    let chunk = pool.take().unwrap();
    let error = pool.copy_in(&fences[0], own, &ids(&[5, 1, 5]), &chunk, 0).unwrap_err();
    assert_eq!(error.kind(), Unsupported);
    assert!(error.to_string().contains("block 5 is named twice"), "{error}");
    let (mut stranger, chunk_of_stranger) = (fixture.pool(1), elsewhere.pool(1).take().unwrap());
    for chunk in [stranger.take().unwrap(), chunk_of_stranger] {
        let error = pool.copy_in(&fences[0], own, &ids(&[0]), &chunk, 0).unwrap_err();
        assert_eq!(error.kind(), ForeignHandle, "{error}");
        let error = pool.copy_out(&fences[0], own, &ids(&[0]), chunk, 0).unwrap_err();
        assert_eq!(error.kind(), ForeignHandle, "{error}");
    }
    assert_eq!(lock(&late).notes.len(), submitted);
    // A block may be copied to two places.
    let pending = pool.copy_out(&fences[0], own, &ids(&[6, 6]), chunk, 0).unwrap();
    let (chunk, layout) = (pending.wait().unwrap(), pool.layout());
    assert!(
        chunk.as_ref()[layout.piece(0, 0, Plane::Value)]
            == chunk.as_ref()[layout.piece(1, 0, Plane::Value)]
    );
}

#[test]
fn memory_outlives_pending_copies() {
    let (mut fixture, late) = Fixture::late(2);
    let staged = lock(&late).pinned;
    let mut pool = fixture.pool(2);
    let (chunk, second) = (pool.take().unwrap(), pool.take().unwrap());
    let pending = fixture.copy_out(&mut pool, chunk, (&[1, 2], 0));
    drop(pool);
    assert_eq!(lock(&late).pinned, staged + 1, "chunks keep it");
    drop(second);
    assert!(lock(&late).num_late() > 0);
    drop(pending);
    assert!(!lock(&late).freed_early);
    assert_eq!(lock(&late).pinned, staged);
    assert_eq!(lock(&late).num_late(), 0, "the last drop waited");
    // Both directions pending, with the chunk, then the cache dropped first.
    let mut pool = fixture.pool(1);
    let chunk = pool.take().unwrap();
    let chunk = fixture.copy_out(&mut pool, chunk, (&[1], 0)).wait().unwrap();
    fixture.copy_in(&mut pool, &chunk, (&[2], 0));
    drop(fixture.copy_out(&mut pool, chunk, (&[3], 1)));
    drop(fixture);
    drop(pool);
    let late = lock(&late);
    assert_eq!((late.freed_early, late.pinned), (false, 0));
}

#[test]
fn late_copies_detect_memory_that_was_freed_early() {
    use crate::gpu::Gpu;
    let gpu = LateGpu::open(1 << 20);
    let address = gpu.alloc(64).unwrap();
    let (mut stream, pinned) = (gpu.stream().unwrap(), gpu.pinned(64).unwrap());
    // SAFETY: both have 64 bytes; the copy never runs.
    unsafe { stream.download(pinned.base(), address, 64) }.unwrap();
    drop(pinned);
    assert!(lock(&gpu.state).freed_early);
    // SAFETY: allocated above and not used below.
    unsafe { gpu.free(address) };
}

#[test]
fn a_batch_that_fails_half_way_is_waited_for() {
    let (mut fixture, late) = Fixture::late(2);
    let mut pool = fixture.pool(1);
    let after = fixture.fence();
    lock(&late).is_failing = true;
    let chunk = pool.take().unwrap();
    let error = pool.copy_out(&after, fixture.storage.view(), &ids(&[1]), chunk, 0).unwrap_err();
    assert_eq!(error.kind(), DeviceErrorKind::Driver);
    let notes = lock(&late).notes.clone();
    assert!(matches!(notes[notes.len() - 2..], [(1, Note::Down(2)), (1, Note::Mark(_))]));
    assert!(pool.take().is_none(), "half of the copies are pending");
    lock(&late).is_failing = false;
    // An event of the pool's stream, after them.
    let mut other = fixture.pool(1);
    let chunk = other.take().unwrap();
    fixture.copy_out(&mut other, chunk, (&[0], 0)).wait().unwrap();
    assert!(pool.take().is_none(), "another stream does not end them");
    drop(pool);
    assert!(!lock(&late).freed_early);
    // The same for copies in, of a chunk that stays with the caller.
    let mut chunk = other.take().unwrap();
    lock(&late).is_failing = true;
    let after = fixture.fence();
    let error = other.copy_in(&after, fixture.storage.view(), &ids(&[1]), &chunk, 0).unwrap_err();
    assert_eq!(error.kind(), DeviceErrorKind::Driver);
    assert!(lock(&late).num_late() > 0);
    chunk.as_mut().fill(0);
    assert_eq!(lock(&late).num_late(), 0, "it waited for the copies before it wrote");
    drop(chunk);
    assert!(other.take().is_some());
}

#[test]
fn memory_of_a_lost_device_is_never_used_again() {
    // Lost when the wait, the batch, and the event after it are submitted.
    for submits in [0, 1, 2] {
        let (mut fixture, late) = Fixture::late(1);
        let mut pool = fixture.pool(2);
        let (chunk, mut kept) = (pool.take().unwrap(), pool.take().unwrap());
        let after = fixture.fence();
        fixture.check("before it is lost");
        let pinned = lock(&late).pinned;
        lock(&late).submits_left = Some(submits);
        let view = fixture.storage.view();
        let error = pool.copy_out(&after, view, &ids(&[2, 3]), chunk, 0).unwrap_err();
        assert_eq!(error.kind(), DeviceErrorKind::Lost);
        let began = submits > 0;
        assert_eq!(pool.take().is_none(), began, "{submits}");
        let error = pool.copy_in(&after, view, &ids(&[2]), &kept, 0).unwrap_err();
        assert_eq!(error.kind(), DeviceErrorKind::Lost);
        // Nothing waits for ever.
        kept.as_mut().fill(1);
        drop((pool, kept));
        assert_eq!(lock(&late).pinned, pinned - usize::from(!began), "it may still be used");
        assert!(!lock(&late).freed_early);
    }
}

#[test]
fn a_chunk_that_the_device_loses_does_not_arrive() {
    let (mut fixture, late) = Fixture::late(1);
    let mut pool = fixture.pool(2);
    let (chunk, second) = (pool.take().unwrap(), pool.take().unwrap());
    let pinned = lock(&late).pinned;
    let lost = [chunk, second].map(|chunk| fixture.copy_out(&mut pool, chunk, (&[1], 0)));
    lock(&late).submits_left = Some(0);
    for pending in lost {
        assert_eq!(pending.wait().unwrap_err().kind(), DeviceErrorKind::Lost);
    }
    assert!(pool.take().is_none());
    drop(pool);
    assert_eq!(lock(&late).pinned, pinned, "the device may still write it");
}

#[test]
fn impossible_pools_are_refused() {
    let (fixture, late) = Fixture::late(1);
    let staged = lock(&late).pinned;
    assert!(fixture.pool(0).take().is_none());
    let refused = |backend: &CudaBackend, storage: &KvStorage<CudaBuffer>, blocks, chunks| {
        let shape = ChunkShape { blocks, ..SHAPE };
        backend.host_pool(storage.view(), shape, chunks).unwrap_err().kind()
    };
    let empty = KvStorage::new(&fixture.backend, odd_layouts()).unwrap();
    assert_eq!(refused(&fixture.backend, &empty, 1, 1), DeviceErrorKind::Unsupported);
    let (other, _) = Fixture::late(1);
    assert_eq!(refused(&fixture.backend, &other.storage, 1, 1), DeviceErrorKind::ForeignHandle);
    // More than any address space.
    let wide = [layout_of_heads("f32", BlockOrder::Hnd, (3 << 12, 1 << 8)); 2];
    let mut wide = KvStorage::new(&fixture.backend, wide).unwrap();
    wide.allocate(&fixture.backend, 0).unwrap();
    assert_eq!(refused(&fixture.backend, &wide, 1 << 16, u32::MAX), DeviceErrorKind::OutOfMemory);
    assert_eq!(lock(&late).pinned, staged);
}
