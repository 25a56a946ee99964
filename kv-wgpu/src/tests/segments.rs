//! Planes that are larger than a binding.
use kv_core::DeviceErrorKind;

use super::*;

/// 16 blocks of a plane.
const BINDING: u64 = 128 << 10;

fn small(limits: &mut wgpu::Limits) {
    limits.max_storage_buffer_binding_size = BINDING;
}

#[test]
fn a_plane_of_many_segments_is_the_same_plane() {
    let Some(adapter) = find() else { return };
    let (device, queue) = device(&adapter, small);
    let (large, small) = (open().unwrap(), WgpuBackend::on(device, queue));
    let num_blocks = 40;
    let segments = |backend: &WgpuBackend| {
        let cache = KvCache::new(backend.clone(), spec(num_blocks)).unwrap();
        let storage = cache.storage(kv_core::GroupId(0)).unwrap();
        storage.layouts().each_ref().map(kv_core::PlaneLayout::num_segments)
    };
    assert_eq!((segments(&large), segments(&small)), ([1, 1], [3, 3]));
    let limited = kv_testkit::device::limited(&large, |c| c.with_binding_bytes_max(BINDING / 2));
    let (outputs, rows) = play(large, num_blocks);
    assert!(outputs.iter().all(|x| x.is_finite()) && rows.iter().any(|x| *x != 0.0));
    for (name, got) in
        [("a small limit", play(small, num_blocks)), ("a promise", play(limited, num_blocks))]
    {
        assert!(got.1 == rows, "{name}: rows are moved, not changed");
        let apart = outputs.iter().zip(&got.0).map(|(a, b)| (a - b).abs());
        let worst = apart.fold(0.0, f32::max);
        // Parts of a sum are added in another order.
        assert!(worst < 1e-5 && got.0.len() == outputs.len(), "{name}: {worst}");
    }
}

#[test]
fn a_block_that_no_binding_holds_is_refused() {
    let Some(adapter) = find() else { return };
    let (device, queue) = device(&adapter, |limits| {
        limits.max_storage_buffer_binding_size = 4096;
    });
    let error = KvCache::new(WgpuBackend::on(device, queue), spec(4)).expect_err("8 KiB");
    let kv_core::CacheError::Device(error) = error else { panic!("{error}") };
    assert_eq!(error.kind(), DeviceErrorKind::Unsupported);
    assert!(error.to_string().contains("8192 bytes"), "{error}");
}
