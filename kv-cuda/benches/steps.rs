//! The host's work for one decode step: planning, sending lists, launch parameters. The device does
//! nothing.
#![expect(clippy::unwrap_used, reason = "a bench that cannot be set up has nothing to measure")]
use std::time::{Duration, Instant};

use criterion::Criterion;
use kv_core::backend::{Backend, NullBackend};
use kv_core::plan::Determinism;
use kv_core::{
    AttentionOptions, Axes, CacheSpec, DType, KvCache, KvFormat, SequenceId, StartOptions, Step,
    StepInput, TensorView, TensorViewMut,
};
use kv_cuda::{CudaBackend, StepLimits};

const BLOCK_SIZE: u32 = 16;
const LAYERS: u16 = 64;
const KV_HEADS: u32 = 8;
const GROUP: u32 = 4;
const HEAD_DIM: u32 = 128;
/// Tokens by which sequences may grow before they are reset.
const ROOM: u32 = 512;

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    let is_smoke = std::env::args().any(|arg| arg == "--test");
    let sizes: &[u32] = if is_smoke { &[4] } else { &[16, 64, 256] };
    for &sequences in sizes {
        let mut bench = |name: &str, cache: &mut dyn Decode, part: Part| {
            criterion.bench_function(&format!("{name}/{sequences}"), |bencher| {
                bencher.iter_custom(|n| median(n, || cache.step(part)));
            });
        };
        let fast = Determinism::Fast;
        let mut core = Full::new(NullBackend::new(), sequences, fast);
        bench("core/begin", &mut core, Part::Begin);
        let mut cuda = Full::new(CudaBackend::idle(132), sequences, fast);
        bench("cuda/begin", &mut cuda, Part::Begin);
        bench("cuda/write", &mut cuda, Part::Write);
        bench("cuda/next_write", &mut cuda, Part::NextWrite);
        bench("cuda/first_attend", &mut cuda, Part::FirstAttend);
        bench("cuda/next_attend", &mut cuda, Part::NextAttend);
        bench("cuda/commit", &mut cuda, Part::Commit);
        bench("cuda/all_layers", &mut cuda, Part::Layers);
        let invariant = Determinism::BatchInvariant;
        let mut cuda = Full::new(CudaBackend::idle(132), sequences, invariant);
        bench("cuda/first_attend_invariant", &mut cuda, Part::FirstAttend);
        let mut cuda = Full::new(CudaBackend::idle(132), sequences, fast);
        cuda.cache.queue_mut().set_step_limits(StepLimits {
            sequences,
            tokens_per_sequence: 1,
            cached_sequences: sequences,
            max_seq_len: 1 << 16,
            splits: 1 << 14,
        });
        bench("cuda/limits/begin", &mut cuda, Part::Begin);
        bench("cuda/limits/first_attend", &mut cuda, Part::FirstAttend);
    }
    criterion.final_summary();
}

/// Returns the time of `n` rounds that all take as long as the median: interruptions of this
/// process affect few of them.
fn median(n: u64, round: impl FnMut() -> Duration) -> Duration {
    let mut took: Vec<_> =
        std::iter::repeat_with(round).take(usize::try_from(n).unwrap()).collect();
    took.sort_unstable();
    took[took.len() / 2] * u32::try_from(n).unwrap()
}

/// The part of a step that is timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    Begin,
    /// The write of the first layer.
    Write,
    NextWrite,
    /// Attention of the first layer, which plans how the batch is decoded.
    FirstAttend,
    /// Attention of another layer.
    NextAttend,
    /// Writes and attention of all layers.
    Layers,
    Commit,
}

/// A cache that decodes.
trait Decode {
    /// Decodes one token of every sequence, and returns the time of a part of it.
    fn step(&mut self, part: Part) -> Duration;
}

/// Sequences of 1 to 32 thousand tokens.
struct Full<B: Backend> {
    cache: KvCache<B>,
    lens: Vec<u32>,
    grown: u32,
    kv: B::Buffer,
    q: B::Buffer,
    out: B::Buffer,
}

impl<B: Backend> Full<B> {
    fn new(backend: B, sequences: u32, determinism: Determinism) -> Self {
        // Equally many of every length, in no order.
        let len = |i: u32| 1024 + (i * 7919 % sequences) * 31 * 1024 / sequences + i % BLOCK_SIZE;
        let lens: Vec<_> = (0..sequences).map(len).collect();
        let blocks = lens.iter().map(|len| (len + ROOM + 2).div_ceil(BLOCK_SIZE)).sum();
        let spec = CacheSpec::builder()
            .layers(LAYERS)
            .kv_heads(KV_HEADS)
            .head_dim(HEAD_DIM)
            .format(KvFormat::F16)
            .determinism(determinism)
            .max_sequences(sequences)
            .max_seq_len(1 << 16)
            .paged(BLOCK_SIZE, blocks);
        let alloc = |heads: u32| {
            backend.alloc(u64::from(sequences) * u64::from(heads * HEAD_DIM) * 2).unwrap()
        };
        let (kv, q, out) = (alloc(KV_HEADS), alloc(KV_HEADS * GROUP), alloc(KV_HEADS * GROUP));
        let mut cache = KvCache::new(backend, spec.build().unwrap()).unwrap();
        for (sequence, len) in ids(&lens).zip(&lens) {
            cache.start(sequence, &[], StartOptions::default()).unwrap();
            let mut step = cache.begin_step(&[StepInput::count(sequence, *len)]).unwrap();
            step.mark_written();
            step.commit().unwrap();
        }
        Self { cache, lens, grown: 0, kv, q, out }
    }

    /// Resets sequences to their first length, with one step that sends all tables again.
    fn reset(&mut self) {
        for (sequence, len) in ids(&self.lens).zip(&self.lens) {
            self.cache.truncate(sequence, *len).unwrap();
        }
        self.grown = 0;
        self.step(Part::Layers);
    }
}

fn ids(lens: &[u32]) -> impl Iterator<Item = SequenceId> + use<> {
    (0..u64::try_from(lens.len()).unwrap()).map(SequenceId)
}

impl<B: Backend> Decode for Full<B> {
    fn step(&mut self, part: Part) -> Duration {
        if self.grown == ROOM {
            self.reset();
        }
        self.grown += 1;
        let batch = u32::try_from(self.lens.len()).unwrap();
        let inputs: Vec<_> = ids(&self.lens).map(|id| StepInput::count(id, 1)).collect();
        let mut clock = Clock { part, took: Duration::ZERO };
        let begin = Instant::now();
        let mut step = self.cache.begin_step(&inputs).unwrap();
        clock.add(Part::Begin, begin);
        let begin = Instant::now();
        let layers = match part {
            Part::Begin | Part::Commit => 0,
            Part::Layers => LAYERS,
            _ => 2,
        };
        for layer in 0..layers {
            let begin = Instant::now();
            write(&mut step, layer, batch, &self.kv);
            clock.add(if layer == 0 { Part::Write } else { Part::NextWrite }, begin);
            let begin = Instant::now();
            attend(&mut step, layer, batch, (&self.q, &mut self.out));
            clock.add(if layer == 0 { Part::FirstAttend } else { Part::NextAttend }, begin);
        }
        clock.add(Part::Layers, begin);
        step.mark_written();
        let begin = Instant::now();
        step.commit().unwrap();
        clock.add(Part::Commit, begin);
        clock.took
    }
}

struct Clock {
    part: Part,
    took: Duration,
}

impl Clock {
    fn add(&mut self, part: Part, begin: Instant) {
        if part == self.part {
            self.took += begin.elapsed();
        }
    }
}

fn write<B: Backend>(step: &mut Step<'_, B>, layer: u16, batch: u32, kv: &B::Buffer) {
    let dims = [batch, KV_HEADS, HEAD_DIM];
    let rows = || TensorView::device(DType::F16, kv, 0, &dims);
    step.write(layer, rows(), rows(), Axes::Thd).unwrap();
}

fn attend<B: Backend>(
    step: &mut Step<'_, B>,
    layer: u16,
    batch: u32,
    (q, out): (&B::Buffer, &mut B::Buffer),
) {
    let dims = [batch, KV_HEADS * GROUP, HEAD_DIM];
    let q = TensorView::device(DType::F16, q, 0, &dims);
    let out = TensorViewMut::device(DType::F16, out, 0, &dims);
    step.attend(layer, q, out, &AttentionOptions::causal(0.088)).unwrap();
}
