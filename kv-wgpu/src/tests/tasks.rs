//! Tasks that wait without blocking a thread.
use std::future::poll_fn;
use std::sync::mpsc::channel;
use std::thread;
use std::time::Duration;

use kv_core::backend::Fence;

use super::*;

#[test]
fn a_task_is_woken_when_work_is_done() {
    let Some(backend) = open() else { return };
    let (sender, receiver) = channel();
    thread::spawn(move || {
        let mut queue = backend.queue().unwrap();
        let buffer = backend.alloc(1 << 22).unwrap();
        for round in 1..=4_u8 {
            // Dispatches keep the device busy when the fence is polled.
            queue.zero(&buffer, 1, (1 << 22) - 2).unwrap();
            queue.upload(&buffer, 5, &[round; 3]).unwrap();
            let fence = queue.submit().unwrap();
            // Sleeps until it is woken: no other thread polls the device.
            pollster::block_on(poll_fn(|cx| fence.poll(cx))).unwrap();
            fence.wait().unwrap();
            let mut readback = queue.download(&buffer, 4, 5).unwrap();
            let bytes = pollster::block_on(poll_fn(|cx| readback.poll(cx))).unwrap();
            assert_eq!(bytes, [0, round, round, round, 0]);
        }
        sender.send(()).unwrap();
    });
    receiver.recv_timeout(Duration::from_mins(2)).expect("the task was not woken, or has failed");
}

#[test]
fn host_outputs_are_refused_where_threads_may_not_block() {
    let Some(adapter) = find() else { return };
    let (device, queue) = device(&adapter, |_| {});
    let mut shared = crate::device::Shared::new(device, queue, true);
    shared.may_wait = false;
    let backend = WgpuBackend::of(shared);
    let facts = backend.capabilities();
    assert!(!facts.blocking_wait && !facts.host_outputs);
    let mut cache = KvCache::new(backend, spec(4)).unwrap();
    let sequence = SequenceId(1);
    cache.start(sequence, &[], StartOptions::default()).unwrap();
    let mut step = cache.begin_step(&[StepInput::count(sequence, 1)]).unwrap();
    let (kv_dims, q_dims) = ([1, KV_HEADS, DIM], [1, HEADS, DIM]);
    let (rows, q) = (vec![1.0_f32; 128], vec![1.0_f32; 256]);
    let rows = TensorView::host(&rows, &kv_dims);
    step.write(0, rows, rows, Axes::Thd).unwrap();
    let mut out = vec![7.0_f32; 256];
    let view = TensorViewMut::host(&mut out, &q_dims);
    let options = AttentionOptions::causal(1.0);
    let refused = step.attend(0, TensorView::host(&q, &q_dims), view, &options).unwrap_err();
    assert!(refused.to_string().contains("would have to wait"), "{refused}");
    assert_eq!(out, [7.0; 256]);
    // An output in device memory with an awaited download works.
    let buffer = step.cache().backend().alloc(1024).unwrap();
    let view = TensorViewMut::device(DType::F32, &buffer, 0, &q_dims);
    step.attend(0, TensorView::host(&q, &q_dims), view, &options).unwrap();
    let mut readback = step.queue_mut().download(&buffer, 0, 1024).unwrap();
    let bytes = pollster::block_on(poll_fn(|cx| readback.poll(cx))).unwrap();
    assert_eq!(floats(&bytes), [1.0; 256]);
    let fence = step.queue_mut().submit().unwrap();
    let refused = fence.wait().unwrap_err();
    assert_eq!(refused.kind(), kv_core::error::DeviceErrorKind::Unsupported, "{refused}");
    pollster::block_on(poll_fn(|cx| fence.poll(cx))).unwrap();
}
