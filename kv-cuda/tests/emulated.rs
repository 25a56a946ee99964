//! Emulated devices through the public interface.
#![cfg(feature = "emulated")]
#![expect(clippy::unwrap_used, reason = "tests")]

use kv_core::backend::Backend;
use kv_core::error::DeviceErrorKind;
use kv_core::{
    Axes, CacheError, CacheSpec, DType, KvCache, SequenceId, StartOptions, StepInput, TensorView,
};
use kv_cuda::{CudaBackend, EmulatorOptions};

fn open() -> (CudaBackend, KvCache<CudaBackend>) {
    let backend = CudaBackend::emulated(&EmulatorOptions::default()).unwrap();
    let spec = CacheSpec::builder().layers(1).kv_heads(2).head_dim(64).paged(16, 8);
    let mut cache = KvCache::new(backend.clone(), spec.build().unwrap()).unwrap();
    cache.start(SequenceId(1), &[], StartOptions::default()).unwrap();
    (backend, cache)
}

/// A kernel with misaligned reads loses a card, so a view off its element is refused before.
#[test]
fn tensors_off_their_element_are_refused() {
    const ROWS: [u32; 3] = [1, 2, 64];
    let (backend, mut cache) = open();
    let memory = backend.alloc(1024).unwrap();
    let mut step = cache.begin_step(&[StepInput::count(SequenceId(1), 1)]).unwrap();
    for (begin, is_refused) in [(1, true), (2, false)] {
        let view = memory.view(begin, 512).unwrap();
        let rows = TensorView::device(DType::F16, &view, 0, &ROWS);
        let written = step.write(0, rows, rows, Axes::Thd);
        match written {
            Ok(()) => assert!(!is_refused, "written from byte {begin}"),
            Err(CacheError::Device(error)) => {
                assert!(is_refused && error.kind() == DeviceErrorKind::Unsupported, "{error}");
            }
            Err(error) => panic!("{error}"),
        }
    }
}

/// The stacks of emulated threads are mapped once, however often devices are opened and closed.
#[cfg(target_os = "linux")]
#[test]
fn devices_that_are_opened_again_map_no_more_memory() {
    let mappings = || std::fs::read_to_string("/proc/self/maps").unwrap().lines().count();
    let run = || {
        let (_, mut cache) = open();
        let rows = [0.0_f32; 128];
        let rows = TensorView::host(&rows, &[1, 2, 64]);
        let mut step = cache.begin_step(&[StepInput::count(SequenceId(1), 1)]).unwrap();
        step.write(0, rows, rows, Axes::Thd).unwrap();
        step.commit().unwrap();
    };
    run();
    let before = mappings();
    (0..20).for_each(|_| run());
    // A second test in parallel may map the stacks of one more block.
    assert!(mappings() < before + 3 * 1024, "{before} mappings before, {} now", mappings());
}
