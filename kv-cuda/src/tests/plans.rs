//! Decode plans that the layers of a step share.
use std::sync::Arc;

use half::f16;
use kv_core::backend::Backend;
use kv_core::{
    AttentionOptions, Axes, CacheSpec, DType, KvCache, KvFormat, SequenceId, StartOptions,
    StepInput, TensorView, TensorViewMut,
};

use super::late::{LateGpu, Note, lock};
use crate::{CudaBackend, EmulatorOptions};

/// A step plans every kind of attention once, however many kinds its layers have.
#[test]
fn a_step_plans_every_kind_of_attention_once() {
    const KINDS: u32 = 40;
    const WIDTH: [u32; 3] = [1, 2, 64];
    let gpu = Arc::new(LateGpu::with(&EmulatorOptions::default()));
    lock(&gpu.state).is_early = true;
    let backend = CudaBackend::on(Arc::<LateGpu>::clone(&gpu));
    let out = backend.alloc(2 * 64 * 2).unwrap();
    let spec = CacheSpec::builder().layers(1).kv_heads(2).head_dim(64).format(KvFormat::F16);
    let mut cache = KvCache::new(backend, spec.paged(16, 8).build().unwrap()).unwrap();
    let sequence = SequenceId(1);
    cache.start(sequence, &[], StartOptions::default()).unwrap();
    let rows = [f16::ONE; 2 * 64];
    let rows = || TensorView::host(&rows, &WIDTH);
    for step in 0..3 {
        lock(&gpu.state).notes.clear();
        let mut step_of = cache.begin_step(&[StepInput::count(sequence, 1)]).unwrap();
        step_of.write(0, rows(), rows(), Axes::Thd).unwrap();
        for window_left in (0..KINDS).chain(0..KINDS) {
            let options = AttentionOptions::causal(0.125).with_window_left(window_left);
            let to = TensorViewMut::device(DType::F16, &out, 0, &WIDTH);
            step_of.attend(0, rows(), to, &options).unwrap();
        }
        step_of.commit().unwrap();
        let notes = &lock(&gpu.state).notes;
        let launches = |name| notes.iter().filter(|(_, note)| *note == Note::Launch(name)).count();
        assert_eq!(launches("decode_f16_64"), 2 * KINDS as usize, "step {step}");
        assert_eq!(launches("plan_decode"), KINDS as usize, "step {step}");
    }
}
