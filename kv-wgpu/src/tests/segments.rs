//! Planes that are larger than a binding.
use kv_core::backend::{PlaneLayout, PlaneShape, PlaneView};
use kv_core::block::BlockTables;
use kv_core::error::DeviceErrorKind;
use kv_core::plan::{GatherArgs, GatherPlan};

use super::*;

/// Bytes of 16 blocks of a plane.
const BINDING: u64 = 128 << 10;

fn small(limits: &mut wgpu::Limits) {
    limits.max_storage_buffer_binding_size = BINDING;
}

#[test]
fn a_plane_of_many_segments_gives_equal_results() {
    let Some(adapter) = find() else { return };
    let (device, queue) = device(&adapter, small);
    let (large, small) = (open().unwrap(), WgpuBackend::on(device, queue));
    let num_blocks = 40;
    let segments = |backend: &WgpuBackend| {
        let cache = KvCache::new(backend.clone(), spec(num_blocks)).unwrap();
        let storage = cache.storage(kv_core::GroupId(0)).unwrap();
        storage.layouts().rows().unwrap().map(PlaneLayout::num_segments)
    };
    assert_eq!((segments(&large), segments(&small)), ([1, 1], [3, 3]));
    let limited = kv_testkit::device::limited(&large, |c| c.with_binding_bytes_max(BINDING / 2));
    let (outputs, rows) = play(large, num_blocks);
    assert!(outputs.iter().all(|x| x.is_finite()) && rows.iter().any(|x| *x != 0.0));
    for (name, got) in
        [("a small limit", play(small, num_blocks)), ("a promise", play(limited, num_blocks))]
    {
        assert!(got.1 == rows, "{name}: cached rows must be equal");
        let apart = outputs.iter().zip(&got.0).map(|(a, b)| (a - b).abs());
        let worst = apart.fold(0.0, f32::max);
        // Partial results are added in another order.
        assert!(worst < 1e-5 && got.0.len() == outputs.len(), "{name}: {worst}");
    }
}

#[test]
fn a_block_beyond_the_binding_limit_is_refused() {
    let Some(adapter) = find() else { return };
    let (device, queue) = device(&adapter, |limits| {
        limits.max_storage_buffer_binding_size = 4096;
    });
    let error = KvCache::new(WgpuBackend::on(device, queue), spec(4)).expect_err("8 KiB");
    let kv_core::CacheError::Device(error) = error else { panic!("{error}") };
    assert_eq!(error.kind(), DeviceErrorKind::Unsupported);
    assert!(error.to_string().contains("8192 bytes"), "{error}");
}

#[test]
fn planes_of_callers_are_checked_for_head_dim() {
    let Some(backend) = open() else { return };
    let plane = |head_dim| {
        let order = kv_core::BlockOrder::Hnd;
        let shape = PlaneShape {
            num_blocks: 1,
            block_size: 4,
            num_kv_heads: 1,
            head_dim,
            order,
            format: KvFormat::F32,
        };
        PlaneLayout::new(shape).unwrap()
    };
    let mut queue = backend.queue().unwrap();
    for (dim, is_taken) in [(6, false), (8, true), (256, true), (260, false)] {
        let buffers = [backend.alloc(4 * u64::from(dim) * 4).unwrap()];
        let view = PlaneView::new(plane(dim), &buffers).unwrap();
        let tables = BlockTables::new(1, 1);
        let plan = GatherPlan::new(view.layout(), &tables, &[]).unwrap();
        let out = TensorViewMut::device(DType::F32, &buffers[0], 0, &[4, 1, dim]);
        let args = GatherArgs::new(&plan, view, out, Axes::Thd).unwrap();
        let gathered = queue.gather(&plan, args).map_err(|error| error.kind());
        assert_eq!(gathered.is_ok(), is_taken, "{dim}: {gathered:?}");
        assert!(is_taken || gathered == Err(DeviceErrorKind::Unsupported), "{dim}: {gathered:?}");
    }
}
