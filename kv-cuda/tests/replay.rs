//! Launches of one decode step, captured once, serve later steps of other batches: sequences start
//! and end between replays, and every output equals that of a step without capture, bit for bit.
//!
//! On the emulator, or on the card whose number `KV_CUDA_TEST_CARD` holds.
#![expect(clippy::unwrap_used, reason = "a test that overflows or finds nothing fails")]

use half::f16;
use kv_core::backend::{Backend, Queue, Readback};
use kv_core::error::{DeviceError, DeviceErrorKind};
use kv_core::{
    AttentionOptions, Axes, CacheSpec, DType, KvCache, KvFormat, ScaleGroup, Scaling, SequenceId,
    StartOptions, Step, StepInput, TensorView, TensorViewMut,
};
use kv_cuda::{CudaBackend, CudaBuffer, CudaGraph, CudaOptions, StepLimits};

const LAYERS: u16 = 2;
const KV_HEADS: u32 = 2;
const Q_HEADS: u32 = 8;
const DIM: u32 = 64;
/// Maximum sequences in a batch.
const BATCH: u32 = 4;
/// Values of the keys, and of the queries, of one layer.
const K_LEN: u32 = BATCH * KV_HEADS * DIM;
const Q_LEN: u32 = BATCH * Q_HEADS * DIM;

const LIMITS: StepLimits = StepLimits {
    sequences: BATCH,
    tokens_per_sequence: 1,
    cached_sequences: 8,
    max_seq_len: 1500,
    splits: 64,
};

/// A cache, and the tensors of every decode step.
struct Side {
    cache: KvCache<CudaBackend>,
    /// Queries, keys and values of all layers, one after another.
    inputs: [CudaBuffer; 3],
    out: CudaBuffer,
    graph: Option<CudaGraph>,
    /// Number of decode steps so far.
    steps: u32,
    /// Tokens of each sequence in such a step.
    new: u32,
}

/// Opens the requested card, else the emulator; `None` without either.
fn open() -> Option<CudaBackend> {
    if let Ok(card) = std::env::var("KV_CUDA_TEST_CARD") {
        return Some(CudaBackend::open(&CudaOptions::new(card.parse().unwrap())).unwrap());
    }
    cfg!(feature = "emulated").then(|| emulated().unwrap())
}

#[cfg(feature = "emulated")]
fn emulated() -> Result<CudaBackend, DeviceError> {
    CudaBackend::emulated(&kv_cuda::EmulatorOptions::default().with_seed(3))
}

#[cfg(not(feature = "emulated"))]
fn emulated() -> Result<CudaBackend, DeviceError> {
    Err(DeviceError::new(DeviceErrorKind::Unsupported, "open"))
}

fn seq(n: u64) -> SequenceId {
    SequenceId(n)
}

/// Returns numbers that differ from call to call.
fn values(seed: u32, len: u32) -> Vec<f16> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(1);
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        let byte = u8::try_from(state >> 24).unwrap_or(0);
        f16::from_f32(f32::from(byte) / 128.0 - 1.0)
    };
    (0..len).map(|_| next()).collect()
}

impl Side {
    fn new(format: KvFormat, window: Option<u32>) -> Option<Self> {
        Self::with_steps_of(1, format, window)
    }

    fn with_steps_of(new: u32, format: KvFormat, window: Option<u32>) -> Option<Self> {
        let backend = open()?;
        let buffer =
            |len: u32| backend.alloc(u64::from(len * new) * u64::from(LAYERS) * 2).unwrap();
        let (inputs, out) = ([buffer(Q_LEN), buffer(K_LEN), buffer(K_LEN)], buffer(Q_LEN));
        let mut spec = CacheSpec::builder()
            .layers(LAYERS)
            .kv_heads(KV_HEADS)
            .head_dim(DIM)
            .format(format)
            .max_seq_len(1500)
            .max_sequences(8)
            .paged(16, 300);
        if let Some(left) = window {
            spec = spec.window_left(left);
        }
        let cache = KvCache::new(backend, spec.build().unwrap()).unwrap();
        Some(Self { cache, inputs, out, graph: None, steps: 0, new })
    }

    fn prefill(&mut self, sequence: SequenceId, tokens: u32) {
        self.cache.start(sequence, &[], StartOptions::default()).unwrap();
        let mut step = self.cache.begin_step(&[StepInput::count(sequence, tokens)]).unwrap();
        for layer in 0..LAYERS {
            let seed = u32::try_from(sequence.0).unwrap() * 100 + u32::from(layer);
            let rows = values(seed, tokens * KV_HEADS * DIM);
            let rows = TensorView::host(&rows, &[tokens, KV_HEADS, DIM]);
            step.write(layer, rows, rows, Axes::Thd).unwrap();
        }
        step.commit().unwrap();
    }

    /// Runs a decode step of some sequences, and returns its outputs, row by row.
    fn decode(&mut self, sequences: &[SequenceId], captures: bool, window: Option<u32>) -> Vec<u8> {
        self.steps += 1;
        for (buffer, (which, len)) in self.inputs.iter().zip([(1, Q_LEN), (2, K_LEN), (3, K_LEN)]) {
            let len = len * self.new * u32::from(LAYERS);
            let rows = values(self.steps * 10 + which, len);
            let queue = self.cache.queue_mut();
            queue.upload(buffer, 0, bytemuck::cast_slice(&rows)).unwrap();
        }
        let new = self.new;
        let inputs: Vec<_> = sequences.iter().map(|id| StepInput::count(*id, new)).collect();
        let tensors = (&self.inputs, &self.out);
        let mut step = self.cache.begin_step(&inputs).unwrap();
        if captures {
            if self.graph.is_none() {
                step.queue_mut().begin_capture().unwrap();
                layers_of(&mut step, tensors, window, BATCH * new);
                self.graph = Some(step.queue_mut().end_capture().unwrap());
            }
            step.queue_mut().replay(self.graph.as_ref().unwrap()).unwrap();
            step.mark_written();
        } else {
            layers_of(&mut step, tensors, window, BATCH * new);
        }
        step.commit().unwrap();
        let queue = self.cache.queue_mut();
        queue.download(&self.out, 0, self.out.len()).unwrap().wait().unwrap()
    }
}

/// Writes and attends every layer of a step, with tensors in device memory.
fn layers(
    step: &mut Step<'_, CudaBackend>,
    tensors: (&[CudaBuffer; 3], &CudaBuffer),
    window: Option<u32>,
) {
    layers_of(step, tensors, window, BATCH);
}

/// The same with tensors of `rows` rows, or of [`BATCH`] if that is more for each layer.
fn layers_of(
    step: &mut Step<'_, CudaBackend>,
    (inputs, out): (&[CudaBuffer; 3], &CudaBuffer),
    window: Option<u32>,
    rows: u32,
) {
    let [q, k, v] = inputs;
    let mut options = AttentionOptions::causal(0.125);
    if let Some(left) = window {
        options = options.with_window_left(left);
    }
    for layer in 0..LAYERS {
        let at = |len: u32| u64::from(len / BATCH * rows.max(BATCH)) * u64::from(layer) * 2;
        let kv = |buffer| TensorView::device(DType::F16, buffer, at(K_LEN), &[rows, KV_HEADS, DIM]);
        step.write(layer, kv(k), kv(v), Axes::Thd).unwrap();
        let dims = [rows, Q_HEADS, DIM];
        let q = TensorView::device(DType::F16, q, at(Q_LEN), &dims);
        let out = TensorViewMut::device(DType::F16, out, at(Q_LEN), &dims);
        step.attend(layer, q, out, &options).unwrap();
    }
}

/// An operation between decode steps, and its sequence.
enum Operation {
    Prefill(u64, u32),
    Decode(&'static [u64]),
    End(u64),
}

/// Runs the same operations on both caches, one with captured launches.
fn same_bits(format: KvFormat, window: Option<u32>, limits: StepLimits) {
    use Operation::{Decode, End, Prefill};
    let acts = [
        Prefill(1, 40),
        Prefill(2, 700),
        Decode(&[1, 2]), // before anything is captured
        Decode(&[1, 2]), // captured here
        Prefill(3, 17),
        Decode(&[3, 1, 2]),
        End(1),
        Decode(&[2, 3]),
        Prefill(4, 1300),
        Prefill(5, 1),
        Decode(&[5, 4, 3, 2]),
        Decode(&[4]),
        End(2),
        End(3),
        Prefill(6, 15),
        Decode(&[6, 5]),
        Decode(&[6, 4, 5]), // 6 and 5 continue in new blocks
        Decode(&[6, 5, 4]),
    ];
    let (Some(mut captured), Some(mut plain)) =
        (Side::new(format, window), Side::new(format, window))
    else {
        return;
    };
    captured.cache.queue_mut().set_step_limits(limits);
    for (index, act) in acts.iter().enumerate() {
        match act {
            Prefill(id, tokens) => {
                captured.prefill(seq(*id), *tokens);
                plain.prefill(seq(*id), *tokens);
            }
            Decode(ids) => {
                let ids: Vec<_> = ids.iter().map(|id| seq(*id)).collect();
                let is_warm = captured.steps > 0;
                let got = captured.decode(&ids, is_warm, window);
                assert_eq!(got, plain.decode(&ids, false, window), "{format}: act {index}");
            }
            End(id) => {
                captured.cache.release(seq(*id)).unwrap();
                plain.cache.release(seq(*id)).unwrap();
            }
        }
    }
    assert!(captured.graph.is_some(), "nothing was captured");
}

#[test]
fn a_replay_serves_every_batch_on_tensor_cores() {
    same_bits(KvFormat::F16, None, LIMITS);
}

#[test]
fn a_replay_serves_every_batch_of_quantised_rows() {
    same_bits(KvFormat::L4(ScaleGroup::Row), None, LIMITS);
    same_bits(KvFormat::Int8(Scaling::Row), None, LIMITS);
}

#[test]
fn a_replay_serves_every_batch_under_a_window() {
    same_bits(KvFormat::F16, Some(100), LIMITS);
}

/// A capture finds what only the largest step needs, although no step was that large: memory for
/// kernels that the steps before it did not launch.
#[test]
fn a_capture_does_not_need_a_step_of_the_largest_size() {
    let limits = StepLimits { tokens_per_sequence: 12, ..LIMITS };
    same_bits(KvFormat::F16, None, limits);
    same_bits(KvFormat::L4(ScaleGroup::Row), None, limits);
}

/// Steps of several queries split their own contexts: the captured one has none that is split.
#[test]
fn a_replay_splits_the_contexts_of_its_own_step() {
    const NEW: u32 = 12;
    let side = || Side::with_steps_of(NEW, KvFormat::F16, None);
    let (Some(mut captured), Some(mut plain)) = (side(), side()) else { return };
    captured.cache.queue_mut().set_step_limits(StepLimits { tokens_per_sequence: NEW, ..LIMITS });
    for side in [&mut captured, &mut plain] {
        for (id, tokens) in [(1, 20), (2, 1300), (3, 1000)] {
            side.prefill(seq(id), tokens);
        }
    }
    for ids in [&[1][..], &[1], &[2], &[1, 2], &[3, 2], &[1, 2, 3], &[1]] {
        let ids: Vec<_> = ids.iter().map(|id| seq(*id)).collect();
        let is_captured = captured.steps > 0;
        let got = captured.decode(&ids, is_captured, None);
        assert!(got == plain.decode(&ids, false, None), "other bits for {ids:?}");
    }
}

/// Launches of a batch without padding rows serve a batch with them.
#[test]
fn a_replay_clears_rows_that_its_capture_used() {
    let pair = (Side::new(KvFormat::F16, None), Side::new(KvFormat::F16, None));
    let (Some(mut captured), Some(mut plain)) = pair else { return };
    captured.cache.queue_mut().set_step_limits(LIMITS);
    for id in 1..=4_u32 {
        captured.prefill(seq(id.into()), id * 9);
        plain.prefill(seq(id.into()), id * 9);
    }
    for (ids, captures) in [(&[1, 2, 3, 4][..], false), (&[4, 3, 2, 1], true), (&[2, 3], true)] {
        let ids: Vec<_> = ids.iter().map(|id| seq(*id)).collect();
        assert_eq!(captured.decode(&ids, captures, None), plain.decode(&ids, false, None));
    }
}

/// Launches reach as far as the step that they run for, and the captured tensors end where they do.
#[test]
fn a_replay_refuses_a_step_that_is_larger_than_its_tensors() {
    let pair = (Side::new(KvFormat::F16, None), Side::new(KvFormat::F16, None));
    let (Some(mut captured), Some(mut plain)) = pair else { return };
    captured.cache.queue_mut().set_step_limits(LIMITS);
    for id in 1..=4_u32 {
        captured.prefill(seq(id.into()), id * 9);
        plain.prefill(seq(id.into()), id * 9);
    }
    let ids = [seq(1), seq(2), seq(3), seq(4)];
    assert_eq!(captured.decode(&ids, false, None), plain.decode(&ids, false, None));
    let inputs =
        |ids: &[SequenceId]| -> Vec<_> { ids.iter().map(|id| StepInput::count(*id, 1)).collect() };
    let mut step = captured.cache.begin_step(&inputs(&ids[..2])).unwrap();
    step.queue_mut().begin_capture().unwrap();
    layers_of(&mut step, (&captured.inputs, &captured.out), None, 2);
    let graph = step.queue_mut().end_capture().unwrap();
    drop(step);
    captured.graph = Some(graph);
    for larger in [&ids[..3], &ids[..]] {
        let mut step = captured.cache.begin_step(&inputs(larger)).unwrap();
        let refused = step.queue_mut().replay(captured.graph.as_ref().unwrap()).unwrap_err();
        assert_eq!(refused.kind(), DeviceErrorKind::Unsupported);
        let words = format!("queries: {}, and a captured tensor has room for 2", larger.len());
        assert!(refused.to_string().contains(&words), "{refused}");
    }
    // What fits is replayed, and what does not runs as ever.
    for (ids, captures) in [(&ids[..2], true), (&ids[1..2], true), (&ids[..], false)] {
        let rows = ids.len().min(2) * usize::try_from(Q_HEADS * DIM * 2).unwrap();
        let (got, expected) =
            (captured.decode(ids, captures, None), plain.decode(ids, false, None));
        assert_eq!(got[..rows], expected[..rows], "{ids:?}");
    }
}

/// A capture may begin after the step has attended already: earlier plans are made again by every
/// replay, and by the calls after the capture.
#[test]
fn a_capture_shares_no_plan_with_other_calls() {
    let pair = (Side::new(KvFormat::F16, None), Side::new(KvFormat::F16, None));
    let (Some(mut captured), Some(mut plain)) = pair else { return };
    captured.cache.queue_mut().set_step_limits(LIMITS);
    for side in [&mut captured, &mut plain] {
        side.prefill(seq(1), 40);
        side.prefill(seq(2), 700);
        side.decode(&[seq(1), seq(2)], false, None);
    }
    // The first capture is between other calls of its step.
    let mut step = captured.cache.begin_step(&[StepInput::count(seq(1), 1)]).unwrap();
    layers(&mut step, (&captured.inputs, &captured.out), None);
    step.queue_mut().begin_capture().unwrap();
    layers(&mut step, (&captured.inputs, &captured.out), None);
    captured.graph = Some(step.queue_mut().end_capture().unwrap());
    step.commit().unwrap();
    let mut step = plain.cache.begin_step(&[StepInput::count(seq(1), 1)]).unwrap();
    layers(&mut step, (&plain.inputs, &plain.out), None);
    step.commit().unwrap();
    for ids in [[seq(2), seq(1)], [seq(1), seq(2)]] {
        assert_eq!(captured.decode(&ids, true, None), plain.decode(&ids, false, None));
    }
    // And this one is after a capture that never runs.
    let mut step = captured.cache.begin_step(&[StepInput::count(seq(2), 1)]).unwrap();
    step.queue_mut().begin_capture().unwrap();
    layers(&mut step, (&captured.inputs, &captured.out), None);
    drop(step.queue_mut().end_capture().unwrap());
    layers(&mut step, (&captured.inputs, &captured.out), None);
    step.commit().unwrap();
    let mut step = plain.cache.begin_step(&[StepInput::count(seq(2), 1)]).unwrap();
    layers(&mut step, (&plain.inputs, &plain.out), None);
    step.commit().unwrap();
    let out = |side: &mut Side| {
        side.cache.queue_mut().download(&side.out, 0, side.out.len()).unwrap().wait().unwrap()
    };
    assert_eq!(out(&mut captured), out(&mut plain));
}

/// A replay could not write host memory again; the capture continues without the call.
#[test]
fn a_capture_refuses_outputs_in_host_memory() {
    let Some(mut side) = Side::new(KvFormat::F16, None) else { return };
    side.cache.queue_mut().set_step_limits(LIMITS);
    side.prefill(seq(1), 40);
    side.decode(&[seq(1)], false, None);
    let mut step = side.cache.begin_step(&[StepInput::count(seq(1), 1)]).unwrap();
    step.queue_mut().begin_capture().unwrap();
    layers(&mut step, (&side.inputs, &side.out), None);
    let dims = [BATCH, Q_HEADS, DIM];
    let mut host = vec![f16::ONE; dims.iter().product::<u32>().try_into().unwrap()];
    let q = TensorView::device(DType::F16, &side.inputs[0], 0, &dims);
    let out = TensorViewMut::host(&mut host, &dims);
    let refused = step.attend(0, q, out, &AttentionOptions::causal(0.125)).unwrap_err();
    let refused = match refused {
        kv_core::CacheError::Device(error) => error,
        other => unreachable!("{other}"),
    };
    assert_eq!(refused.kind(), DeviceErrorKind::Unsupported);
    assert!(refused.to_string().contains("host memory"), "{refused}");
    assert!(host.iter().all(|value| *value == f16::ONE));
    side.graph = Some(step.queue_mut().end_capture().unwrap());
    step.queue_mut().replay(side.graph.as_ref().unwrap()).unwrap();
    step.mark_written();
    step.commit().unwrap();
}

/// Blocks of a sequence beyond the limits are sent with its step, and fixed lists stay where they
/// are.
#[test]
fn a_sequence_longer_than_the_limits_runs_and_is_not_captured() {
    let pair = (Side::new(KvFormat::F16, None), Side::new(KvFormat::F16, None));
    let (Some(mut captured), Some(mut plain)) = pair else { return };
    captured.cache.queue_mut().set_step_limits(StepLimits { max_seq_len: 64, ..LIMITS });
    for side in [&mut captured, &mut plain] {
        side.prefill(seq(1), 20);
        side.prefill(seq(2), 700);
        side.prefill(seq(3), 30);
    }
    for (ids, captures) in [
        (&[1, 3][..], false),
        (&[3, 1], true),
        (&[1, 2], false),
        (&[2], false),
        (&[3, 1], true),
        (&[1, 2, 3], false),
        (&[1], true),
    ] {
        let ids: Vec<_> = ids.iter().map(|id| seq(*id)).collect();
        assert_eq!(captured.decode(&ids, captures, None), plain.decode(&ids, false, None));
    }
    let mut step = captured.cache.begin_step(&[StepInput::count(seq(2), 1)]).unwrap();
    let refused = step.queue_mut().begin_capture().unwrap_err();
    assert_eq!(refused.kind(), DeviceErrorKind::Unsupported);
}

#[test]
fn a_queue_can_be_dropped_during_a_capture() {
    let Some(mut side) = Side::new(KvFormat::F16, None) else { return };
    side.cache.queue_mut().set_step_limits(LIMITS);
    side.prefill(seq(1), 20);
    side.decode(&[seq(1)], false, None);
    let mut step = side.cache.begin_step(&[StepInput::count(seq(1), 1)]).unwrap();
    step.queue_mut().begin_capture().unwrap();
    layers(&mut step, (&side.inputs, &side.out), None);
    drop(step);
    // The memory of the capture, and of earlier work, is freed; the device stays usable.
    drop(side);
    let mut side = Side::new(KvFormat::F16, None).unwrap();
    side.prefill(seq(1), 20);
    side.decode(&[seq(1)], false, None);
}

#[test]
fn uncapturable_calls_are_refused_and_the_step_continues() {
    let Some(mut side) = Side::new(KvFormat::F16, None) else { return };
    side.prefill(seq(1), 20);
    let is_refused = |error: DeviceError| error.kind() == DeviceErrorKind::Unsupported;
    let queue = side.cache.queue_mut();
    assert!(is_refused(queue.begin_capture().unwrap_err()), "no limits");
    assert!(is_refused(queue.end_capture().unwrap_err()), "no capture");
    queue.set_step_limits(LIMITS);
    side.decode(&[seq(1)], false, None);
    side.decode(&[seq(1)], true, None);
    let graph = side.graph.take().unwrap();

    // A step beyond the limits runs, but cannot be captured or replayed.
    let mut step = side.cache.begin_step(&[StepInput::count(seq(1), 2)]).unwrap();
    assert!(is_refused(step.queue_mut().begin_capture().unwrap_err()));
    assert!(is_refused(step.queue_mut().replay(&graph).unwrap_err()));
    drop(step);

    // A tensor in host memory during a capture: refused, and the capture can end.
    let mut step = side.cache.begin_step(&[StepInput::count(seq(1), 1)]).unwrap();
    step.queue_mut().begin_capture().unwrap();
    let rows = values(1, KV_HEADS * DIM);
    let rows = TensorView::host(&rows, &[1, KV_HEADS, DIM]);
    assert!(step.write(0, rows, rows, Axes::Thd).is_err());
    // Uploads, downloads and a replay during a capture are refused too.
    let queue = step.queue_mut();
    assert!(is_refused(queue.upload(&side.out, 0, &[0; 4]).unwrap_err()));
    assert!(is_refused(queue.download(&side.out, 0, 4).unwrap_err()));
    assert!(is_refused(queue.replay(&graph).unwrap_err()));
    queue.end_capture().unwrap();
    step.write(0, rows, rows, Axes::Thd).unwrap();
    drop(step);

    // Other limits mean other addresses.
    side.cache.queue_mut().set_step_limits(LIMITS);
    let mut step = side.cache.begin_step(&[StepInput::count(seq(1), 1)]).unwrap();
    assert!(is_refused(step.queue_mut().replay(&graph).unwrap_err()));
    drop(step);

    // Another device.
    let mut other = Side::new(KvFormat::F16, None).unwrap();
    let refused = other.cache.queue_mut().replay(&graph).unwrap_err();
    assert_eq!(refused.kind(), DeviceErrorKind::ForeignHandle);
}
