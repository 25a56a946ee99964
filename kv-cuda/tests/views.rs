//! Views of device memory must be aligned to their elements: a kernel with misaligned reads loses
//! the device, so such a view is refused before.
#![cfg(feature = "emulated")]

use kv_core::backend::Backend;
use kv_core::error::DeviceErrorKind;
use kv_core::{
    CacheError, CacheSpec, DType, KvCache, QkvFormat, SequenceId, StartOptions, StepInput,
    TensorView,
};
use kv_cuda::{CudaBackend, EmulatorOptions};

#[test]
fn tensors_off_their_element_are_refused() {
    const ROWS: [u32; 3] = [1, 2, 64];
    let backend = CudaBackend::emulated(&EmulatorOptions::default()).unwrap();
    let memory = backend.alloc(1024).unwrap();
    let spec = CacheSpec::builder().layers(1).kv_heads(2).head_dim(64).paged(16, 8);
    let mut cache = KvCache::new(backend, spec.build().unwrap()).unwrap();
    cache.start(SequenceId(1), &[], StartOptions::default()).unwrap();
    let mut step = cache.begin_step(&[StepInput::count(SequenceId(1), 1)]).unwrap();
    for (begin, is_refused) in [(1, true), (2, false)] {
        let view = memory.view(begin, 512).unwrap();
        let rows = TensorView::device(DType::F16, &view, 0, &ROWS);
        let written = step.write(0, rows, rows, QkvFormat::Thd);
        match written {
            Ok(()) => assert!(!is_refused, "written from byte {begin}"),
            Err(CacheError::Device(error)) => {
                assert!(is_refused && error.kind() == DeviceErrorKind::Unsupported, "{error}");
            }
            Err(error) => panic!("{error}"),
        }
    }
}
