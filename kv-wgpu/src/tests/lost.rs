//! A device that is lost in the middle of a step.
use std::task::{Context, Poll, Waker};

use kv_core::CacheError;
use kv_core::backend::Fence;
use kv_core::error::DeviceErrorKind;
use kv_core::plan::{ConvertArgs, ConvertPlan};

use super::*;

fn is_lost<T>(outcome: Result<T, DeviceError>) {
    let error = outcome.err().expect("the device is gone");
    assert_eq!(error.kind(), DeviceErrorKind::Lost, "{error}");
}
fn is_lost_to_the_cache<T>(outcome: Result<T, CacheError>) {
    match outcome.err().expect("the device is gone") {
        CacheError::Device(error) => is_lost::<()>(Err(error)),
        error => panic!("{error}"),
    }
}

#[test]
fn a_lost_device_is_reported_and_the_step_rolled_back() {
    let Some(backend) = open() else { return };
    let mut cache = KvCache::new(backend.clone(), spec(8)).unwrap();
    let id = SequenceId(1);
    cache.start(id, &[], StartOptions::default()).unwrap();
    run(&mut cache, &[StepInput::count(id, 5)], 5, 1);
    let free = cache.state().free_blocks(kv_core::GroupId(0));
    let mut queue = backend.queue().unwrap();
    let buffer = backend.alloc(64).unwrap();
    let fence = queue.submit().unwrap();
    fence.wait().unwrap();
    let kv = values(4, 20 * 128);
    let rows = TensorView::host::<f32>(&kv, &[20, KV_HEADS, DIM]);

    let mut step = cache.begin_step(&[StepInput::count(id, 20)]).unwrap();
    step.write(0, rows, rows, Axes::Thd).unwrap();
    backend.device().destroy();
    is_lost_to_the_cache(step.write(1, rows, rows, Axes::Thd));
    let q = TensorView::host::<f32>(&kv, &[20, KV_HEADS, DIM]);
    let to = TensorViewMut::device(DType::F32, &buffer, 0, &[20, KV_HEADS, DIM]);
    assert!(step.attend(0, q, to, &AttentionOptions::causal(1.0)).is_err());
    assert!(step.commit().is_err(), "a layer is unwritten");
    assert_eq!(cache.state().seq_len(id), Some(5));
    assert_eq!(cache.state().free_blocks(kv_core::GroupId(0)), free);
    is_lost_to_the_cache(cache.begin_step(&[StepInput::count(id, 1)]));
    assert_eq!(cache.state().seq_len(id), Some(5));

    is_lost(backend.alloc(4));
    is_lost(backend.queue());
    is_lost(queue.upload(&buffer, 0, &[1; 8]));
    is_lost(queue.upload(&buffer, 1, &[1; 8]));
    is_lost(queue.zero(&buffer, 0, 8));
    is_lost(queue.download(&buffer, 0, 8));
    let plan = ConvertPlan::new(&[1]).unwrap();
    let args = ConvertArgs::new(
        &plan,
        (TensorView::host::<f32>(&kv[..4], &[1, 1, 4]), Axes::Thd),
        (TensorViewMut::device(DType::F32, &buffer, 0, &[1, 1, 4]), Axes::Thd),
    );
    is_lost(queue.convert(&plan, args.unwrap()));
    is_lost(queue.flush());
    is_lost(queue.submit());
    is_lost(queue.wait_for(&fence));
    is_lost(fence.wait());
    match fence.poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(outcome) => is_lost(outcome),
        Poll::Pending => panic!("nothing is left to wait for"),
    }
    drop((queue, cache, backend));
}

#[test]
fn pending_downloads_end_when_the_device_is_lost() {
    let Some(backend) = open() else { return };
    let mut queue = backend.queue().unwrap();
    let buffer = backend.alloc(1 << 20).unwrap();
    queue.zero(&buffer, 1, (1 << 20) - 2).unwrap();
    let pending = queue.download(&buffer, 0, 16).unwrap();
    queue.zero(&buffer, 1, 2).unwrap();
    let other = queue.download(&buffer, 0, 16).unwrap();
    backend.device().destroy();
    for outcome in [pending.wait(), pollster::block_on(task(other))] {
        // Earlier work may have completed.
        match outcome {
            Ok(bytes) => assert_eq!(bytes, [0; 16]),
            Err(error) => assert_eq!(error.kind(), DeviceErrorKind::Lost, "{error}"),
        }
    }
}

async fn task(mut readback: crate::WgpuReadback) -> Result<Vec<u8>, DeviceError> {
    std::future::poll_fn(move |cx| readback.poll(cx)).await
}
