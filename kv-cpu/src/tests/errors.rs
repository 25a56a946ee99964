//! Refused arguments: ranges, overlaps, planes and plans that do not belong together.
use kv_core::backend::{Backend, PlaneLayout, PlaneShape, PlaneView, Queue};
use kv_core::block::BlockTables;
use kv_core::error::{DeviceError, DeviceErrorKind};
use kv_core::plan::{
    AttendArgs, AttentionPlan, BatchEntry, ConvertArgs, ConvertPlan, Determinism, GatherArgs,
    GatherPlan, GatherRange, PlanBuffers, WriteArgs, WritePlan,
};
use kv_core::{
    AttentionOptions, Axes, BlockId, BlockOrder, DType, KvFormat, TensorView, TensorViewMut,
};

use crate::{CpuBackend, CpuBuffer, CpuOptions, Isa};

fn backend() -> CpuBackend {
    CpuBackend::open(CpuOptions::default().with_threads(1)).unwrap()
}

fn layout(num_blocks: u32, num_kv_heads: u32) -> PlaneLayout {
    PlaneLayout::new(PlaneShape {
        num_blocks,
        block_size: 4,
        num_kv_heads,
        head_dim: 8,
        order: BlockOrder::Nhd,
        format: KvFormat::F32,
    })
    .unwrap()
}

/// Plans of one sequence of `tokens` new tokens.
fn with_plans<R>(
    layout: &PlaneLayout,
    tokens: u32,
    then: impl FnOnce(WritePlan<'_>, AttentionPlan<'_>) -> R,
) -> R {
    let mut tables = BlockTables::new(layout.num_blocks(), 1);
    tables.ensure_rows(1);
    for block in 0..tokens.div_ceil(4) {
        tables.push(0, BlockId(block)).unwrap();
    }
    let batch = [BatchEntry { row: 0, cached: 0, new_tokens: tokens, queries: tokens }];
    let mut buffers = PlanBuffers::default();
    let (write, attend) = buffers.plan(layout, &tables, &batch, 1, Determinism::Fast).unwrap();
    then(write, attend)
}

fn kind(result: Result<(), DeviceError>) -> DeviceErrorKind {
    result.unwrap_err().kind()
}

#[test]
fn ranges_past_the_end_are_refused() {
    let backend = backend();
    let mut queue = backend.queue().unwrap();
    let buffer = backend.alloc(64).unwrap();
    for offset in [61, 64, 65, u64::MAX] {
        assert_eq!(kind(queue.upload(&buffer, offset, &[0; 4])), DeviceErrorKind::OutOfRange);
        assert_eq!(kind(queue.zero(&buffer, offset, 4)), DeviceErrorKind::OutOfRange);
        let refused = queue.download(&buffer, offset, 4).unwrap_err();
        assert_eq!(refused.kind(), DeviceErrorKind::OutOfRange);
    }
    queue.upload(&buffer, 60, &[0; 4]).unwrap();
    queue.zero(&buffer, 64, 0).unwrap();
}

#[test]
fn device_tensors_past_the_end_are_refused() {
    let backend = backend();
    let mut queue = backend.queue().unwrap();
    let plane_layout = layout(2, 1);
    let planes = [0, 1].map(|_| [backend.alloc(plane_layout.plane_bytes()).unwrap()]);
    let [k_plane, v_plane] =
        [0, 1].map(|which: usize| PlaneView::new(plane_layout, &planes[which]).unwrap());
    // Five rows of eight floats are 160 bytes.
    let (enough, short) = (backend.alloc(160).unwrap(), backend.alloc(159).unwrap());
    let view = |buffer| TensorView::device(DType::F32, buffer, 0, &[5, 1, 8]);
    with_plans(&plane_layout, 5, |write, attend| {
        let mut run = |k, v| {
            let args =
                WriteArgs::new(&write, view(k), view(v), Axes::Thd, k_plane, v_plane).unwrap();
            queue.write_kv(&write, args)
        };
        run(&enough, &enough).unwrap();
        assert_eq!(kind(run(&short, &enough)), DeviceErrorKind::OutOfRange);
        assert_eq!(kind(run(&enough, &short)), DeviceErrorKind::OutOfRange);
        let other = backend.alloc(160).unwrap();
        let mut run = |q, out, offset| {
            let out = TensorViewMut::device(DType::F32, out, offset, &[5, 1, 8]);
            let options = AttentionOptions::causal(1.0);
            let args =
                AttendArgs::new(&attend, view(q), out, None, [k_plane, v_plane], options).unwrap();
            queue.attend(&attend, args)
        };
        run(&enough, &other, 0).unwrap();
        assert_eq!(kind(run(&enough, &short, 0)), DeviceErrorKind::OutOfRange);
        assert_eq!(kind(run(&enough, &other, 4)), DeviceErrorKind::OutOfRange);
        assert_eq!(kind(run(&short, &other, 0)), DeviceErrorKind::OutOfRange);
        // Its own input.
        assert_eq!(kind(run(&enough, &enough, 0)), DeviceErrorKind::Unsupported);
    });
}

#[test]
fn a_plane_in_too_small_a_buffer_is_refused() {
    let backend = backend();
    let mut queue = backend.queue().unwrap();
    let plane_layout = layout(2, 1);
    let bytes = plane_layout.plane_bytes();
    let (good, bad) = ([backend.alloc(bytes).unwrap()], [backend.alloc(bytes - 1).unwrap()]);
    let [good, bad] = [&good, &bad].map(|buffers| PlaneView::new(plane_layout, buffers).unwrap());
    let values = [0.0_f32; 40];
    let view = TensorView::host(&values, &[5, 1, 8]);
    with_plans(&plane_layout, 5, |write, _| {
        let args = WriteArgs::new(&write, view, view, Axes::Thd, good, bad).unwrap();
        assert_eq!(kind(queue.write_kv(&write, args)), DeviceErrorKind::OutOfRange);
        // K and V in the same bytes.
        let args = WriteArgs::new(&write, view, view, Axes::Thd, good, good).unwrap();
        assert_eq!(kind(queue.write_kv(&write, args)), DeviceErrorKind::Unsupported);
    });
}

/// K and V as parts of one allocation of the caller's.
#[test]
fn both_planes_may_share_one_allocation() {
    let backend = backend();
    let mut queue = backend.queue().unwrap();
    let plane_layout = layout(2, 1);
    let bytes = plane_layout.plane_bytes();
    let all = CpuBuffer::from_boxed(vec![0; 2 * bytes as usize].into());
    let parts = [0, bytes].map(|offset| [all.view(offset, bytes).unwrap()]);
    let [k_plane, v_plane] =
        [0, 1].map(|which: usize| PlaneView::new(plane_layout, &parts[which]).unwrap());
    let (k, v) = ([1.0_f32; 40], [2.0_f32; 40]);
    let mut out = [0.0_f32; 40];
    with_plans(&plane_layout, 5, |write, attend| {
        let [k, v] = [&k, &v].map(|rows| TensorView::host(rows, &[5, 1, 8]));
        let args = WriteArgs::new(&write, k, v, Axes::Thd, k_plane, v_plane).unwrap();
        queue.write_kv(&write, args).unwrap();
        let to = TensorViewMut::host(&mut out, &[5, 1, 8]);
        let planes = [k_plane, v_plane];
        let args =
            AttendArgs::new(&attend, k, to, None, planes, AttentionOptions::causal(1.0)).unwrap();
        queue.attend(&attend, args).unwrap();
    });
    assert!(out.iter().all(|x| (x - 2.0).abs() < 1e-6));
    assert_eq!(all.read(|bytes| bytes[0..4].to_vec()), 1.0_f32.to_ne_bytes());
}

/// Arguments checked against one plan and used with another must not reach past a tensor.
#[test]
fn arguments_of_another_plan_are_refused() {
    let backend = backend();
    let mut queue = backend.queue().unwrap();
    let plane_layout = layout(4, 1);
    let planes = [0, 1].map(|_| [backend.alloc(plane_layout.plane_bytes()).unwrap()]);
    let [k_plane, v_plane] =
        [0, 1].map(|which: usize| PlaneView::new(plane_layout, &planes[which]).unwrap());
    let (values, mut out) = ([0.0_f32; 40], [0.0_f32; 40]);
    let view = TensorView::host(&values, &[5, 1, 8]);
    with_plans(&plane_layout, 5, |small, small_attend| {
        with_plans(&plane_layout, 9, |large, large_attend| {
            let args = WriteArgs::new(&small, view, view, Axes::Thd, k_plane, v_plane);
            let refused = queue.write_kv(&large, args.unwrap());
            assert_eq!(kind(refused), DeviceErrorKind::Unsupported);
            let to = TensorViewMut::host(&mut out, &[5, 1, 8]);
            let planes = [k_plane, v_plane];
            let options = AttentionOptions::causal(1.0);
            let args = AttendArgs::new(&small_attend, view, to, None, planes, options).unwrap();
            let refused = queue.attend(&large_attend, args);
            assert_eq!(kind(refused), DeviceErrorKind::Unsupported);
        });
    });
    let (small, large) = (ConvertPlan::new(&[5]).unwrap(), ConvertPlan::new(&[9]).unwrap());
    let to = TensorViewMut::host(&mut out, &[5, 1, 8]);
    let args = ConvertArgs::new(&small, (view, Axes::Thd), (to, Axes::Thd)).unwrap();
    assert_eq!(kind(queue.convert(&large, args)), DeviceErrorKind::Unsupported);
}

/// A plan for a larger pool of the same shape must not reach past the planes of a smaller one.
#[test]
fn a_plan_of_another_pool_is_refused() {
    let backend = backend();
    let mut queue = backend.queue().unwrap();
    let (small, large) = (layout(2, 1), layout(8, 1));
    let planes = [0, 1].map(|_| [backend.alloc(small.plane_bytes()).unwrap()]);
    let [k_plane, v_plane] =
        [0, 1].map(|which: usize| PlaneView::new(small, &planes[which]).unwrap());
    let values = [0.0_f32; 40];
    let view = TensorView::host(&values, &[5, 1, 8]);
    with_plans(&small, 5, |fitting, _| {
        with_plans(&large, 5, |other, _| {
            let args = WriteArgs::new(&fitting, view, view, Axes::Thd, k_plane, v_plane);
            let refused = queue.write_kv(&other, args.unwrap());
            assert_eq!(kind(refused), DeviceErrorKind::Unsupported);
        });
    });
}

/// Checks that ranges planned for another geometry are refused: rows that take several slots need
/// more blocks.
#[test]
fn ranges_of_another_geometry_are_refused() {
    let backend = backend();
    let mut queue = backend.queue().unwrap();
    let plain = layout(4, 1);
    let wide = plain.with_wide_rows(4, false, 2).unwrap();
    let plane = [backend.alloc(wide.plane_bytes()).unwrap()];
    let view = PlaneView::new(wide, &plane).unwrap();
    let mut tables = BlockTables::new(4, 2);
    tables.ensure_rows(2);
    for (row, block) in [(0, 0), (0, 1), (1, 2)] {
        tables.push(row, BlockId(block)).unwrap();
    }
    let [fitting, short] = [0, 1].map(|row| [GatherRange { row, begin: 0, len: 4 }]);
    let fitting = GatherPlan::new(&wide, &tables, &fitting).unwrap();
    let short = GatherPlan::new(&plain, &tables, &short).unwrap();
    let mut out = [7.0_f32; 32];
    let to = TensorViewMut::host(&mut out, &[4, 1, 8]);
    let args = GatherArgs::new(&fitting, view, to, Axes::Thd).unwrap();
    assert_eq!(kind(queue.gather(&short, args)), DeviceErrorKind::Unsupported);
    assert_eq!(out, [7.0; 32]);
}

#[test]
fn impossible_options_are_refused_in_words() {
    let refused = CpuBackend::open(CpuOptions::default().with_threads(0)).unwrap_err();
    assert_eq!(refused.kind(), DeviceErrorKind::Unsupported);
    for isa in Isa::ALL.iter().filter(|isa| !isa.is_available()) {
        let refused = CpuBackend::open(CpuOptions::default().with_isa(*isa)).unwrap_err();
        assert_eq!(refused.kind(), DeviceErrorKind::Unsupported);
        assert!(refused.to_string().contains("scalar"), "{refused}");
    }
    assert_eq!(kind(backend().alloc(u64::MAX).map(drop)), DeviceErrorKind::OutOfMemory);
}

#[test]
fn capabilities_say_what_the_cpu_can_do() {
    let backend = CpuBackend::open(CpuOptions::default().with_threads(3)).unwrap();
    let facts = backend.capabilities();
    assert_eq!((backend.name(), facts.workers), ("cpu", 3));
    assert!(facts.host_outputs && facts.blocking_wait);
    assert_eq!((facts.buffer_bytes_max, facts.binding_bytes_max), (u64::MAX, u64::MAX));
}
