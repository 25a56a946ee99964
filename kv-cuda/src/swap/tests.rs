//! Swapped blocks return unchanged and in order, and refused calls change nothing.
#![expect(
    clippy::arithmetic_side_effects,
    clippy::as_conversions,
    clippy::cast_possible_truncation,
    reason = "small numbers, and overflow checks are on"
)]

mod erased;

use std::sync::{Arc, Mutex};

use kv_core::backend::{Backend, Fence, KvStorage, PlaneLayout, PlaneShape, Queue, Readback};
use kv_core::error::{DeviceError, DeviceErrorKind};
use kv_core::{BlockId, BlockOrder};

use crate::fence::CudaFence;
use crate::swap::CudaSwap;
use crate::tests::late::{LateGpu, LateState, Note, lock};
use crate::tests::random::Random;
use crate::{CudaBackend, CudaBuffer, CudaOptions, CudaQueue, EmulatorOptions};

const BLOCKS: u32 = 8;

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

    fn swap(&self, capacity: u32) -> CudaSwap {
        self.backend.swap(self.storage.view(), capacity).unwrap()
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

    fn swap_out(&mut self, swap: &mut CudaSwap, blocks: &[(BlockId, u32)]) {
        let after = self.fence();
        let away = swap.swap_out(&after, self.storage.view(), blocks).unwrap();
        self.queue.wait_for(&away).unwrap();
    }

    fn swap_in(&mut self, swap: &mut CudaSwap, blocks: &[(BlockId, u32)]) {
        let after = self.fence();
        let back = swap.swap_in(&after, self.storage.view(), blocks).unwrap();
        self.queue.wait_for(&back).unwrap();
    }

    /// Updates the model: block `to` holds what block `from` was.
    fn expect(&mut self, was: &[Vec<u8>], from: BlockId, to: BlockId) {
        for ((plane, was), view) in
            self.planes.iter_mut().zip(was).zip(self.storage.view().planes())
        {
            let bytes = view.layout().block_bytes() as usize;
            let block = &was[from.0 as usize * bytes..][..bytes];
            plane[to.0 as usize * bytes..][..bytes].copy_from_slice(block);
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

fn block(block: u32, host: u32) -> (BlockId, u32) {
    (BlockId(block), host)
}

/// Swaps out, overwrites, and swaps in elsewhere, twice, with reused host blocks.
fn round_trip(mut fixture: Fixture, what: &str) {
    let mut swap = fixture.swap(5);
    let first = fixture.planes.clone();
    fixture.swap_out(&mut swap, &[block(3, 1), block(0, 4), block(7, 0)]);
    fixture.overwrite();
    fixture.swap_in(&mut swap, &[block(6, 4), block(1, 0)]);
    fixture.expect(&first, BlockId(0), BlockId(6));
    fixture.expect(&first, BlockId(7), BlockId(1));
    fixture.check(what);
    // Host block 4 is overwritten and read again without a wait in between; 1 still holds block 3.
    let second = fixture.planes.clone();
    fixture.swap_out(&mut swap, &[block(1, 4), block(2, 3)]);
    fixture.overwrite();
    fixture.swap_in(&mut swap, &[block(0, 4), block(7, 1), block(4, 3)]);
    fixture.expect(&second, BlockId(1), BlockId(0));
    fixture.expect(&first, BlockId(3), BlockId(7));
    fixture.expect(&second, BlockId(2), BlockId(4));
    fixture.check(what);
}

#[test]
fn swapped_blocks_return_unchanged() {
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
                assert_eq!(fixture.storage.layouts()[0].num_segments(), segments);
                round_trip(fixture, &format!("{pair:?} {order:?} {segments} {is_early}"));
            }
        }
    }
    let backend = CudaBackend::emulated(&EmulatorOptions::default()).unwrap();
    round_trip(Fixture::new(backend, odd_layouts(), 2), "emulated");
}

#[test]
fn swapped_blocks_return_unchanged_on_a_card() {
    match CudaBackend::open(&CudaOptions::default()) {
        Ok(backend) => round_trip(Fixture::new(backend, odd_layouts(), 5), "a card"),
        Err(error) => assert_eq!(error.kind(), DeviceErrorKind::Unsupported, "{error}"),
    }
}

#[test]
fn copies_are_one_batch_between_events() {
    let (mut fixture, late) = Fixture::late(3);
    let mut swap = fixture.swap(4);
    let submitted = |from: usize| lock(&late).notes[from..].to_vec();
    let written = fixture.fence();
    let begin = submitted(0).len();
    assert_eq!(submitted(begin - 1), [(0, Note::Mark(0))]);
    let away =
        swap.swap_out(&written, fixture.storage.view(), &[block(0, 1), block(5, 2)]).unwrap();
    let copies = 2 * 3 * 2;
    let out = [(1, Note::Wait(0)), (1, Note::Down(copies)), (1, Note::Mark(1))];
    assert_eq!(submitted(begin), out);
    fixture.queue.wait_for(&away).unwrap();
    let free = fixture.fence();
    let back = swap.swap_in(&free, fixture.storage.view(), &[block(3, 2)]).unwrap();
    fixture.queue.wait_for(&back).unwrap();
    let and_in = [
        (0, Note::Wait(1)),
        (0, Note::Mark(2)),
        (1, Note::Wait(2)),
        (1, Note::Up(copies / 2)),
        (1, Note::Mark(3)),
        (0, Note::Wait(3)),
    ];
    assert_eq!(submitted(begin + 3), and_in);
    // Nothing has waited, so no call has blocked: not even the first upload has run.
    assert_eq!(lock(&late).num_late(), begin + 3 + and_in.len());
    back.wait().unwrap();
    assert_eq!(lock(&late).num_late(), 1, "the queue waits for completed work");
    // A call with nothing to copy still returns a fence.
    let none = swap.swap_out(&free, fixture.storage.view(), &[]).unwrap();
    none.wait().unwrap();
}

type Call = fn(&mut CudaSwap, &CudaFence, &Fixture) -> Result<CudaFence, DeviceError>;

#[test]
fn refused_calls_change_nothing() {
    use DeviceErrorKind::{OutOfRange, Unsupported};
    let refused: [(&str, DeviceErrorKind, Call); 9] = [
        ("block 8 of 8", OutOfRange, |swap, after, fixture| {
            swap.swap_out(after, fixture.storage.view(), &[block(0, 1), block(8, 2)])
        }),
        ("host block 3 of 3", OutOfRange, |swap, after, fixture| {
            swap.swap_out(after, fixture.storage.view(), &[block(0, 1), block(1, 3)])
        }),
        ("host block 1 is named twice", Unsupported, |swap, after, fixture| {
            swap.swap_out(after, fixture.storage.view(), &[block(0, 1), block(1, 2), block(2, 1)])
        }),
        ("block 4294967295 of 8", OutOfRange, |swap, after, fixture| {
            swap.swap_in(after, fixture.storage.view(), &[block(u32::MAX, 0)])
        }),
        ("host block 4294967295 of 3", OutOfRange, |swap, after, fixture| {
            swap.swap_in(after, fixture.storage.view(), &[block(0, u32::MAX)])
        }),
        ("host block 0 is named twice", Unsupported, |swap, after, fixture| {
            swap.swap_in(after, fixture.storage.view(), &[block(0, 0), block(1, 0)])
        }),
        ("host block 1 holds nothing", Unsupported, |swap, after, fixture| {
            swap.swap_in(after, fixture.storage.view(), &[block(0, 0), block(1, 1)])
        }),
        ("block 5 is named twice", Unsupported, |swap, after, fixture| {
            swap.swap_in(after, fixture.storage.view(), &[block(5, 0), block(5, 2)])
        }),
        ("the planes are not those", Unsupported, |swap, after, fixture| {
            // Equal planes of another cache.
            let mut other = KvStorage::new(&fixture.backend, odd_layouts()).unwrap();
            other.allocate(&fixture.backend, 0).unwrap();
            swap.swap_out(after, other.view(), &[block(0, 1)])
        }),
    ];
    let (mut fixture, late) = Fixture::late(1);
    let mut swap = fixture.swap(3);
    let was = fixture.planes.clone();
    fixture.swap_out(&mut swap, &[block(4, 0), block(6, 2)]);
    fixture.overwrite();
    let after = fixture.fence();
    let (mut elsewhere, _) = Fixture::late(1);
    let foreign = elsewhere.fence();
    let submitted = lock(&late).notes.len();
    for (text, kind, call) in refused {
        let error = call(&mut swap, &after, &fixture).unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        assert!(error.to_string().contains(text), "{error}");
        let error = call(&mut swap, &foreign, &fixture).unwrap_err();
        assert_eq!(error.kind(), DeviceErrorKind::ForeignHandle, "{error}");
        let error = call(&mut swap, &after, &elsewhere).unwrap_err();
        let foreign_or_other = [DeviceErrorKind::ForeignHandle, Unsupported];
        assert!(foreign_or_other.contains(&error.kind()), "{error}");
    }
    let error = swap.swap_out(&after, elsewhere.storage.view(), &[block(0, 0)]).unwrap_err();
    assert_eq!(error.kind(), DeviceErrorKind::ForeignHandle);
    assert_eq!(lock(&late).notes.len(), submitted);
    assert_eq!([0, 1, 2, 3].map(|host| swap.holds(host)), [true, false, true, false]);
    fixture.swap_in(&mut swap, &[block(0, 0), block(1, 2)]);
    fixture.expect(&was, BlockId(4), BlockId(0));
    fixture.expect(&was, BlockId(6), BlockId(1));
    fixture.check("after refusals");
    // A layer that is allocated later is not part of the swap space.
    fixture.storage.allocate(&fixture.backend, 1).unwrap();
    let error = swap.swap_in(&after, fixture.storage.view(), &[block(0, 0)]).unwrap_err();
    assert_eq!(error.kind(), Unsupported, "{error}");
}

#[test]
fn swap_space_outlives_pending_copies() {
    let (mut fixture, late) = Fixture::late(2);
    let mut swap = fixture.swap(2);
    let after = fixture.fence();
    let away = swap.swap_out(&after, fixture.storage.view(), &[block(1, 0), block(2, 1)]).unwrap();
    assert!(lock(&late).num_late() > 0);
    drop(swap);
    assert!(!lock(&late).freed_early);
    assert_eq!(lock(&late).num_late(), 0, "it waited");
    away.wait().unwrap();
    // One direction pending, with the cache dropped first.
    let mut swap = fixture.swap(2);
    fixture.swap_out(&mut swap, &[block(1, 0)]);
    fixture.swap_in(&mut swap, &[block(2, 0)]);
    drop(fixture);
    drop(swap);
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
fn after_a_loss_contents_are_undefined_and_nothing_is_freed() {
    // Lost when the batch, and when the event after it, is submitted.
    for submits in [1, 2] {
        let (mut fixture, late) = Fixture::late(1);
        let mut swap = fixture.swap(3);
        fixture.swap_out(&mut swap, &[block(0, 0), block(1, 1)]);
        let after = fixture.fence();
        fixture.check("before it is lost");
        let pinned = lock(&late).pinned;
        lock(&late).submits_left = Some(submits);
        let out = [block(2, 0), block(3, 2)];
        let error = swap.swap_out(&after, fixture.storage.view(), &out).unwrap_err();
        assert_eq!(error.kind(), DeviceErrorKind::Lost);
        assert_eq!([0, 1, 2].map(|host| swap.holds(host)), [false, true, false]);
        drop(swap);
        assert_eq!(lock(&late).pinned, pinned, "it may still be used");
        assert!(!lock(&late).freed_early);
    }
}

#[test]
fn swap_space_has_the_size_of_its_blocks() {
    let (fixture, _) = Fixture::late(3);
    let [k, v] = *fixture.storage.layouts();
    assert!(!v.block_bytes().is_multiple_of(16));
    let swap = fixture.swap(7);
    let bytes = k.block_bytes().next_multiple_of(16) + v.block_bytes().next_multiple_of(16);
    assert_eq!((swap.capacity(), swap.block_bytes()), (7, 3 * bytes));
    assert!(!(0..8).any(|host| swap.holds(host)));
    assert_eq!(fixture.swap(0).capacity(), 0);

    let empty = KvStorage::new(&fixture.backend, odd_layouts()).unwrap();
    let error = fixture.backend.swap(empty.view(), 1).unwrap_err();
    assert_eq!(error.kind(), DeviceErrorKind::Unsupported, "{error}");
    let (other, _) = Fixture::late(1);
    let error = fixture.backend.swap(other.storage.view(), 1).unwrap_err();
    assert_eq!(error.kind(), DeviceErrorKind::ForeignHandle, "{error}");
    // More than any address space.
    let wide = [layout_of_heads("f32", BlockOrder::Hnd, (3 << 12, 1 << 8)); 2];
    let wide = Fixture { storage: KvStorage::new(&fixture.backend, wide).unwrap(), ..fixture };
    let mut storage = wide.storage;
    storage.allocate(&wide.backend, 0).unwrap();
    let error = wide.backend.swap(storage.view(), u32::MAX).unwrap_err();
    assert_eq!(error.kind(), DeviceErrorKind::OutOfMemory, "{error}");
}
