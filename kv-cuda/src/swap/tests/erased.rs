//! Swapping for a cache whose backend was chosen at run time.
use kv_core::backend::{AnyBackend, AnyBuffer, NullBackend, Queue, Readback, StorageView};
use kv_core::error::{DeviceError, DeviceErrorKind};
use kv_core::{
    BlockId, CacheSpec, GroupId, KvCache, QkvFormat, SequenceId, StartOptions, StepInput,
    TensorView,
};

use crate::{CudaBackend, EmulatorOptions};

const TOKENS: u32 = 8;

fn cache(backend: AnyBackend) -> KvCache<AnyBackend> {
    let spec = CacheSpec::builder().layers(2).kv_heads(1).head_dim(64).paged(4, 6).build().unwrap();
    KvCache::new(backend, spec).unwrap()
}

fn storage(cache: &KvCache<AnyBackend>) -> StorageView<'_, AnyBuffer> {
    cache.storage(GroupId(0)).unwrap().view()
}

/// Fills one sequence of two blocks, and returns these.
fn filled(cache: &mut KvCache<AnyBackend>) -> Vec<BlockId> {
    cache.start(SequenceId(1), &[], StartOptions::default()).unwrap();
    let mut step = cache.begin_step(&[StepInput::count(SequenceId(1), TOKENS)]).unwrap();
    for layer in 0..2_u16 {
        let rows: Vec<f32> = (0..TOKENS * 64).map(|n| f32::from(n as u16 + layer)).collect();
        let rows = TensorView::host(&rows, &[TOKENS, 1, 64]);
        step.write(layer, rows, rows, QkvFormat::Thd).unwrap();
    }
    step.commit().unwrap();
    (0..6).map(BlockId).filter(|block| bytes(cache, *block).iter().any(|byte| *byte != 0)).collect()
}

/// Reads a block in every plane.
fn bytes(cache: &mut KvCache<AnyBackend>, block: BlockId) -> Vec<u8> {
    let places: Vec<(AnyBuffer, u64, u64)> = storage(cache)
        .planes()
        .map(|plane| {
            let (segment, offset) = plane.layout().locate(block.0);
            let buffer = plane.segment(segment).unwrap().clone();
            (buffer, offset, plane.layout().block_bytes())
        })
        .collect();
    let queue = cache.queue_mut();
    let mut read = |(buffer, at, len)| queue.download(&buffer, at, len).unwrap().wait().unwrap();
    places.into_iter().flat_map(&mut read).collect()
}

#[test]
fn blocks_of_an_erased_cache_return_unchanged() {
    let device = CudaBackend::emulated(&EmulatorOptions::default()).unwrap();
    let mut cache = cache(AnyBackend::new(device));
    let blocks = filled(&mut cache);
    assert_eq!(blocks.len(), 2);
    let was: Vec<_> = blocks.iter().map(|block| bytes(&mut cache, *block)).collect();
    let backend = cache.backend().downcast_ref::<CudaBackend>().unwrap();
    let mut swap = backend.swap_any(storage(&cache), 2).unwrap();
    let out = [(blocks[0], 1), (blocks[1], 0)];
    let written = cache.queue_mut().submit().unwrap();
    let away = swap.swap_out_any(&written, storage(&cache), &out).unwrap();
    cache.queue_mut().wait_for(&away).unwrap();
    let free: Vec<_> = (0..6).map(BlockId).filter(|block| !blocks.contains(block)).collect();
    let back = [(free[2], 1), (free[0], 0)];
    let ready = cache.queue_mut().submit().unwrap();
    let back = swap.swap_in_any(&ready, storage(&cache), &back).unwrap();
    cache.queue_mut().wait_for(&back).unwrap();
    assert!(bytes(&mut cache, free[2]) == was[0]);
    assert!(bytes(&mut cache, free[0]) == was[1]);
}

#[test]
fn handles_of_another_backend_are_refused() {
    let kind = |error: DeviceError| error.kind();
    let device = CudaBackend::emulated(&EmulatorOptions::default()).unwrap();
    let mut other = cache(AnyBackend::new(NullBackend::default()));
    filled(&mut other);
    let refused = device.swap_any(storage(&other), 1).unwrap_err();
    assert_eq!(kind(refused), DeviceErrorKind::ForeignHandle);
    let mut cache = cache(AnyBackend::new(device));
    let blocks = filled(&mut cache);
    let backend = cache.backend().downcast_ref::<CudaBackend>().unwrap();
    let mut swap = backend.swap_any(storage(&cache), 1).unwrap();
    let (ours, theirs) = (cache.queue_mut().submit().unwrap(), other.queue_mut().submit().unwrap());
    let blocks = [(blocks[0], 0)];
    for (fence, from) in [(&theirs, &cache), (&ours, &other)] {
        let refused = swap.swap_out_any(fence, storage(from), &blocks).unwrap_err();
        assert_eq!(kind(refused), DeviceErrorKind::ForeignHandle);
        let refused = swap.swap_in_any(fence, storage(from), &blocks).unwrap_err();
        assert_eq!(kind(refused), DeviceErrorKind::ForeignHandle);
    }
    assert!(!swap.holds(0));
}
