//! Devices, queues and buffers that the caller owns.
use kv_core::error::DeviceErrorKind;
use kv_core::plan::{ConvertArgs, ConvertPlan};
use wgpu::BufferUsages as Usages;

use super::*;

const ALL: Usages = Usages::STORAGE.union(Usages::COPY_SRC).union(Usages::COPY_DST);

fn buffer(device: &wgpu::Device, size: u64, usage: Usages) -> wgpu::Buffer {
    let label = Some("the caller's");
    device.create_buffer(&wgpu::BufferDescriptor { label, size, usage, mapped_at_creation: false })
}

#[test]
fn a_callers_buffers_are_used_in_place() {
    let Some(adapter) = find() else { return };
    let (device, own) = device(&adapter, |_| {});
    let backend = WgpuBackend::on(device.clone(), own.clone());
    assert!(backend.facts().is_none());
    let mut queue = backend.queue().unwrap();
    let [src, dst] = [64, 64].map(|size| buffer(&device, size, ALL));
    let [from, to] = [&src, &dst].map(|buffer| backend.wrap(buffer.clone()).unwrap());
    assert!(from.buffer() == &src && (from.offset(), from.len()) == (0, 64));
    // A submission of the caller is visible to the backend.
    let sent = values(7, 12);
    own.write_buffer(&src, 16, bytemuck::cast_slice(&sent));
    own.submit([]);
    let plan = ConvertPlan::new(&[3]).unwrap();
    let dims = [3, 1, 4];
    let args = ConvertArgs::new(
        &plan,
        (TensorView::device(DType::F32, &from, 16, &dims), Axes::Thd),
        (TensorViewMut::device(DType::F32, &to, 4, &dims), Axes::Thd),
    );
    queue.convert(&plan, args.unwrap()).unwrap();
    queue.submit().unwrap();
    // The caller's next submission sees the backend's writes.
    let seen = buffer(&device, 48, Usages::COPY_DST | Usages::MAP_READ);
    let mut encoder = device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
    encoder.copy_buffer_to_buffer(&dst, 4, &seen, 0, 48);
    own.submit([encoder.finish()]);
    seen.slice(..).map_async(wgpu::MapMode::Read, |how| how.unwrap());
    device.poll(wgpu::PollType::wait_indefinitely()).unwrap();
    assert_eq!(floats(&seen.slice(..).get_mapped_range().unwrap()), sent);
}

#[test]
fn buffers_without_the_needed_usages_are_refused() {
    let Some(backend) = open() else { return };
    for (size, usage, words) in [
        (64, ALL - Usages::STORAGE, "STORAGE"),
        (64, ALL - Usages::COPY_SRC, "COPY_SRC"),
        (64, ALL - Usages::COPY_DST, "COPY_DST"),
        (62, ALL, "62 bytes"),
    ] {
        let error = backend.wrap(buffer(backend.device(), size, usage)).unwrap_err();
        assert_eq!(error.kind(), DeviceErrorKind::Unsupported);
        assert!(error.to_string().contains(words), "{error}");
    }
}

#[test]
fn wgpu_errors_name_the_operation() {
    let Some(adapter) = find() else { return };
    let (one, two) = (device(&adapter, |_| {}), device(&adapter, |_| {}));
    let stranger = buffer(&two.0, 64, ALL);
    let backend = WgpuBackend::on(one.0, one.1);
    let mut queue = backend.queue().unwrap();
    let wrapped = backend.wrap(stranger).unwrap();
    // A shader binding is refused at once, a copy command at submission.
    let error = queue.zero(&wrapped, 1, 2).unwrap_err();
    assert_eq!((error.kind(), error.operation()), (DeviceErrorKind::Driver, "zero"), "{error}");
    queue.zero(&wrapped, 0, 8).unwrap();
    let error = queue.submit().unwrap_err();
    assert_eq!((error.kind(), error.operation()), (DeviceErrorKind::Driver, "submit"), "{error}");
    // The queue stays usable.
    let mine = backend.alloc(8).unwrap();
    queue.upload(&mine, 0, &[5; 8]).unwrap();
    assert_eq!(read(&mut queue, &mine).unwrap(), [5; 8]);
}

#[test]
fn an_output_may_share_a_buffer_with_inputs() {
    let Some(backend) = open() else { return };
    let mut cache = KvCache::new(backend.clone(), spec(8)).unwrap();
    let id = SequenceId(1);
    cache.start(id, &[], StartOptions::default()).unwrap();
    let dims = [3, HEADS, DIM];
    let bytes = u64::from(3 * HEADS * DIM) * 4;
    let q = values(3, 3 * 256);
    let kv = values(4, 3 * 128);
    let mut step = cache.begin_step(&[StepInput::count(id, 3)]).unwrap();
    let rows = TensorView::host::<f32>(&kv, &[3, KV_HEADS, DIM]);
    step.write(0, rows, rows, Axes::Thd).unwrap();
    let both = backend.alloc(bytes * 2 + 64).unwrap();
    let apart = backend.alloc(bytes).unwrap();
    let options = AttentionOptions::causal(0.125);
    step.queue_mut().upload(&both, 64, bytemuck::cast_slice(&q)).unwrap();
    let host = TensorView::host::<f32>(&q, &dims);
    let device = TensorView::device(DType::F32, &both, 64, &dims);
    let to = TensorViewMut::device(DType::F32, &apart, 0, &dims);
    step.attend(0, host, to, &options).unwrap();
    let to = TensorViewMut::device(DType::F32, &both, 64 + bytes, &dims);
    step.attend(0, device, to, &options).unwrap();
    let expected = read(step.queue_mut(), &apart).unwrap();
    let got = read(step.queue_mut(), &both).unwrap();
    assert!(expected.iter().any(|byte| *byte != 0));
    assert_eq!(floats(&got[64..][..q.len() * 4]), q, "inputs stay");
    assert!(got[64 + q.len() * 4..] == expected);
}
