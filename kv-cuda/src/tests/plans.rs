//! Decode plans that the layers of a step share, and the kernels of a captured step.
use std::sync::Arc;

use half::f16;
use kv_core::backend::Backend;
use kv_core::{
    AttentionOptions, Axes, CacheSpec, DType, KvCache, KvFormat, SequenceId, StartOptions,
    StepInput, TensorView, TensorViewMut,
};

use super::late::{LateGpu, Note, lock};
use crate::emulated::kernels_of;
use crate::{CudaBackend, EmulatorOptions, StepLimits};

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

/// Returns the kernels of a captured step of two layers, which has one query and room for two.
fn captured(format: KvFormat, dtype: DType, has_lse: bool) -> Vec<&'static str> {
    const LAYERS: u16 = 2;
    const LIMITS: StepLimits = StepLimits {
        sequences: 2,
        tokens_per_sequence: 1,
        cached_sequences: 2,
        max_seq_len: 64,
        splits: 8,
    };
    let (backend, width) =
        (CudaBackend::emulated(&EmulatorOptions::default()).unwrap(), [2, 2, 64]);
    let [inputs, out, lse] = [(); 3].map(|()| backend.alloc(2 * 2 * 64 * 4).unwrap());
    let spec = CacheSpec::builder().layers(LAYERS).kv_heads(2).head_dim(64).format(format);
    let spec = spec.max_seq_len(64).max_sequences(2).paged(16, 8);
    let mut cache = KvCache::new(backend, spec.build().unwrap()).unwrap();
    cache.queue_mut().set_step_limits(LIMITS);
    cache.start(SequenceId(1), &[], StartOptions::default()).unwrap();
    let mut graph = None;
    for captures in [false, true] {
        let mut step = cache.begin_step(&[StepInput::count(SequenceId(1), 1)]).unwrap();
        if captures {
            step.queue_mut().begin_capture().unwrap();
        }
        for layer in 0..LAYERS {
            let rows = || TensorView::device(dtype, &inputs, 0, &width);
            step.write(layer, rows(), rows(), Axes::Thd).unwrap();
            let out = TensorViewMut::device(dtype, &out, 0, &width);
            let options = AttentionOptions::causal(0.125);
            if has_lse {
                let lse = TensorViewMut::device(DType::F32, &lse, 0, &width[..2]);
                step.attend_lse(layer, rows(), out, lse, &options).unwrap();
            } else {
                step.attend(layer, rows(), out, &options).unwrap();
            }
        }
        if captures {
            graph = Some(step.queue_mut().end_capture().unwrap());
            step.mark_written();
        }
        step.commit().unwrap();
    }
    kernels_of(graph.unwrap().graph.as_ref())
}

/// A layer of a captured decode step is two kernels, and the plan is made once.
#[test]
fn a_captured_layer_is_two_kernels() {
    for has_lse in [false, true] {
        let attend = "decode_bf16_64";
        let all = ["write_plain", "plan_decode", attend, "write_plain", attend];
        assert_eq!(captured(KvFormat::Bf16, DType::Bf16, has_lse), all);
    }
    // The general kernel leaves rows without a query to another one.
    let all = captured(KvFormat::Bf16, DType::F16, false);
    assert_eq!(all, ["write_plain", "attend_rows", "pad_rows"].repeat(2));
}
