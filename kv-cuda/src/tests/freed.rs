//! Memory that is freed while streams still use it.
use std::sync::Arc;

use kv_core::backend::{Backend, Fence, Queue, Readback};
use kv_core::error::DeviceErrorKind;
use kv_core::{
    AttentionOptions, Axes, CacheSpec, KvCache, SequenceId, StartOptions, StepInput, TensorView,
    TensorViewMut,
};

use super::late::{LateGpu, lock};
use super::random::Random;
use crate::{CudaBackend, EmulatorOptions};

/// Opens a device all of whose streams run late, or only the first.
fn late(bytes: u64, is_early: bool) -> (Arc<LateGpu>, CudaBackend) {
    let gpu = Arc::new(LateGpu::with(&EmulatorOptions::default().with_memory(bytes)));
    lock(&gpu.state).is_early = is_early;
    let backend = CudaBackend::on(Arc::<LateGpu>::clone(&gpu));
    (gpu, backend)
}

#[test]
fn frees_do_not_wait_and_are_not_early() {
    let (gpu, backend) = late(1 << 20, false);
    let (mut queue, mut other) = (backend.queue().unwrap(), backend.queue().unwrap());
    let [from, to] = [16, 16].map(|bytes| backend.alloc(bytes).unwrap());
    queue.upload(&from, 0, &[7; 16]).unwrap();
    let sent = queue.submit().unwrap();
    other.wait_for(&sent).unwrap();
    other.copy((&from, 0), (&to, 0), 16).unwrap();
    drop(from);
    assert_eq!(gpu.allocated(), (2, 32), "the copy has not run");
    assert_eq!(lock(&gpu.state).num_late(), 4, "nothing has waited");
    let read = other.download(&to, 0, 16).unwrap().wait().unwrap();
    assert_eq!(read, [7; 16]);
    // Work of a dropped stream completes.
    queue.zero(&to, 0, 8).unwrap();
    drop(queue);
    drop(to);
    drop(other);
    assert_eq!(gpu.allocated(), (2, 32));
    // All memory is available again.
    let all = backend.alloc(1 << 20).unwrap();
    assert_eq!(gpu.allocated(), (1, 1 << 20));
    assert_eq!(lock(&gpu.state).num_late(), 0);
    let error = backend.alloc(1).unwrap_err();
    assert_eq!(error.kind(), DeviceErrorKind::OutOfMemory, "memory in use is not freed");
    drop(all);
}

#[test]
fn memory_is_reused_after_the_work_that_used_it() {
    for is_early in [false, true] {
        let (gpu, backend) = late(1000, is_early);
        let mut queue = backend.queue().unwrap();
        let mut sum = Vec::new();
        let kept = backend.alloc(100).unwrap();
        for round in 0..5_u8 {
            // No two buffers fit: each allocation waits for the copy out of the one before.
            let buffer = backend.alloc(600).unwrap();
            queue.upload(&buffer, 0, &[round; 600]).unwrap();
            queue.copy((&buffer, 500), (&kept, u64::from(round) * 20), 20).unwrap();
            sum.extend([round; 20]);
        }
        let read = queue.download(&kept, 0, 100).unwrap().wait().unwrap();
        assert_eq!(read, sum);
        let fence = queue.submit().unwrap();
        fence.wait().unwrap();
        drop(kept);
        backend.alloc(1000).unwrap();
        assert!(gpu.allocated().0 <= 1);
    }
}

/// Runs prompts, each longer than the one before, so that scratch memory grows while work is
/// pending.
fn outputs(backend: CudaBackend) -> Vec<Vec<u8>> {
    let spec = CacheSpec::builder().layers(2).kv_heads(2).head_dim(64).paged(4, 200);
    let mut cache = KvCache::new(backend, spec.build().unwrap()).unwrap();
    let mut random = Random(11);
    let mut outputs = Vec::new();
    for (index, tokens) in [1, 3, 40, 41, 150].into_iter().enumerate() {
        let sequence = SequenceId(index as u64);
        cache.start(sequence, &[], StartOptions::default()).unwrap();
        let mut values = |heads: u32| -> Vec<f32> {
            (0..tokens * heads * 64).map(|_| (random.next() % 200) as f32 / 100.0 - 1.0).collect()
        };
        let out = cache.backend().alloc(u64::from(tokens) * 4 * 64 * 4).unwrap();
        let mut step = cache.begin_step(&[StepInput::count(sequence, tokens)]).unwrap();
        for layer in 0..2 {
            let (q, k, v) = (values(4), values(2), values(2));
            let rows = |values, heads| TensorView::host(values, &[tokens, heads, 64]);
            step.write(layer, rows(&k, 2), rows(&v, 2), Axes::Thd).unwrap();
            let shape = [tokens, 4, 64];
            let to = TensorViewMut::device(kv_core::DType::F32, &out, 0, &shape);
            step.attend(layer, rows(&q, 4), to, &AttentionOptions::causal(0.125)).unwrap();
        }
        step.commit().unwrap();
        let read = cache.queue_mut().download(&out, 0, out.len()).unwrap();
        // The last output's memory is freed before the copy has run.
        drop(out);
        outputs.push(read);
    }
    outputs.into_iter().map(|read| read.wait().unwrap()).collect()
}

#[test]
fn a_cache_computes_equal_results_on_late_streams() {
    let expected = outputs(CudaBackend::emulated(&EmulatorOptions::default()).unwrap());
    for is_early in [false, true] {
        assert!(outputs(late(1 << 30, is_early).1) == expected, "early: {is_early}");
    }
}
