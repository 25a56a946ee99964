//! With one thread, a step allocates nothing once the queue's buffers have met their size.
//!
//! A test binary of its own: the allocator counts for the whole process.
#![expect(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    reason = "a test, and its helpers outside the test function"
)]
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use kv_core::backend::{Backend, Queue};
use kv_core::block::BlockTables;
use kv_core::plan::{
    AttendArgs, BatchEntry, BlockCopy, CopyArgs, CopyPlan, PlanBuffers, WriteArgs,
};
use kv_core::{
    AnyBackend, AttentionOptions, BlockId, BlockOrder, DType, Determinism, KvFormat, KvStorage,
    Plane, PlaneLayout, PlaneShape, QkvFormat, TensorView, TensorViewMut,
};
use kv_cpu::{CpuBackend, CpuOptions};

struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's conditions are passed on.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller's conditions are passed on.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// One step: a long decode that is cut, a prefill, a copy; with q and out on the device.
fn step<B: Backend>(buffers: &mut PlanBuffers, parts: &mut Parts<B>) {
    let Parts { layout, tables, storage, queue, device, values } = parts;
    let batch = [
        BatchEntry { row: 0, cached: 1000, new_tokens: 1, queries: 1 },
        BatchEntry { row: 1, cached: 0, new_tokens: 40, queries: 40 },
    ];
    let (write, attend) = buffers.plan(layout, tables, &batch, 8, Determinism::Fast).unwrap();
    let plane = |which| storage.plane(0, which).unwrap();
    let (k_plane, v_plane) = (plane(Plane::Key), plane(Plane::Value));
    let kv = TensorView::host(&values[..41 * 2 * 32], &[41, 2, 32]);
    let args = WriteArgs::new(&write, kv, kv, QkvFormat::Thd, k_plane, v_plane).unwrap();
    queue.write_kv(&write, args).unwrap();
    let q = TensorView::device(DType::F32, device, 0, &[41, 8, 32]);
    let out = TensorViewMut::device(DType::F32, device, 41 * 8 * 32 * 4, &[41, 8, 32]);
    let options = AttentionOptions::causal(0.1);
    let args = AttendArgs::new(&attend, q, out, None, [k_plane, v_plane], options).unwrap();
    queue.attend(&attend, args).unwrap();
    let copies = [BlockCopy { from: BlockId(0), to: BlockId(70), tokens: 9 }];
    let plan = CopyPlan::new(layout, &copies).unwrap();
    queue.copy_blocks(&plan, CopyArgs::new(&plan, storage.view()).unwrap()).unwrap();
    queue.submit().unwrap();
}

struct Parts<B: Backend> {
    layout: PlaneLayout,
    tables: BlockTables,
    storage: KvStorage<B::Buffer>,
    queue: B::Queue,
    device: B::Buffer,
    values: Vec<f32>,
}

/// Allocations of the third step; one for the erased fence where there is one.
fn count<B: Backend>(backend: &B) -> usize {
    let shape = PlaneShape {
        num_blocks: 71,
        block_size: 16,
        num_kv_heads: 2,
        head_dim: 32,
        order: BlockOrder::Hnd,
        format: KvFormat::Bf16,
    };
    let layout = PlaneLayout::new(shape).unwrap();
    let mut storage = KvStorage::new(backend, [layout, layout]).unwrap();
    storage.allocate(backend, 0).unwrap();
    let mut tables = BlockTables::new(71, 64);
    tables.ensure_rows(2);
    for block in 0..66 {
        tables.push(u32::from(block >= 63), BlockId(block)).unwrap();
    }
    let queue = backend.queue().unwrap();
    let device = backend.alloc(2 * 41 * 8 * 32 * 4).unwrap();
    let values = vec![0.5; 41 * 8 * 32];
    let mut parts: Parts<B> = Parts { layout, tables, storage, queue, device, values };
    let mut buffers = PlanBuffers::default();
    step(&mut buffers, &mut parts);
    step(&mut buffers, &mut parts);
    let before = ALLOCATIONS.load(Ordering::Relaxed);
    step(&mut buffers, &mut parts);
    ALLOCATIONS.load(Ordering::Relaxed) - before
}

#[test]
fn a_repeated_step_allocates_nothing() {
    let backend = CpuBackend::open(CpuOptions::default().threads(1)).unwrap();
    assert_eq!(count(&backend), 0);
    assert_eq!(count(&AnyBackend::new(backend)), 1, "the erased fence");
}
