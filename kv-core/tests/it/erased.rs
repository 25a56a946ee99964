//! Erased caches give a backend its own types back.
use kv_core::backend::{AnyBackend, AnyFence, AnyQueue, Backend, NullBackend, NullBuffer};
use kv_core::backend::{NullFence, Queue};
use kv_core::{Axes, CacheSpec, GroupId, KvCache, SequenceId, StartOptions, StepInput, TensorView};

#[test]
fn storage_and_fences_downcast_to_the_backends_types() {
    let spec = CacheSpec::builder().layers(2).kv_heads(1).head_dim(8).paged(4, 3).build().unwrap();
    let mut cache = KvCache::new(AnyBackend::new(NullBackend::new()), spec).unwrap();
    let view = cache.storage(GroupId(0)).unwrap().view();
    assert!(view.downcast::<AnyFence>().is_none());
    let own = view.downcast::<NullBuffer>().unwrap();
    assert_eq!(own.layouts(), view.layouts());
    let buffers: Vec<&NullBuffer> = own.planes().filter_map(|plane| plane.segment(0)).collect();
    assert_eq!((buffers.len(), view.planes().count()), (4, 4), "K and V of two layers");

    let fence = cache.queue_mut().submit().unwrap();
    assert!(fence.downcast_ref::<AnyFence>().is_none());
    let own: &NullFence = fence.downcast_ref().unwrap();
    for again in [AnyFence::new(*own), AnyFence::new(fence.clone())] {
        cache.queue_mut().wait_for(&again).unwrap();
        assert!(again.downcast_ref::<NullFence>().is_some(), "erased once");
    }
}

#[test]
fn a_callers_queue_is_erased_once() {
    let spec = CacheSpec::builder().layers(1).kv_heads(1).head_dim(2).paged(4, 3).build().unwrap();
    let backend = NullBackend::new();
    let (queue, control) = (backend.queue().unwrap(), backend.control());
    let queue = AnyQueue::new(AnyQueue::new(queue));
    let mut cache = KvCache::builder(AnyBackend::new(backend), spec).queue(queue).build().unwrap();
    cache.start(SequenceId(0), &[], StartOptions::default()).unwrap();
    let before = control.recorded();
    cache.begin_step(&[StepInput::count(SequenceId(0), 1)]).unwrap().hold();
    let row = TensorView::host(&[0.0_f32; 2], &[1, 1, 2]);
    // A queue that was erased twice would know no buffer of the cache.
    let mut step = cache.held().unwrap();
    step.write(0, row, row, Axes::Thd).unwrap();
    step.commit().unwrap();
    assert_eq!(control.recorded() - before, 3, "the plans, a write and a flush");
}
