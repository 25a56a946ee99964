//! A cache with contexts in it, and everything that is run on it.
use std::sync::Arc;
use std::time::Instant;

use anyhow::Context;
use kv::backend::{Backend, Fence, Queue};
use kv::plan::{BlockCopy, CopyArgs, CopyPlan};
use kv::{
    AttentionOptions, BlockId, DType, DeviceError, GroupId, KvCache, QkvFormat, SequenceId,
    StartOptions, Step, StepInput, TensorView, TensorViewMut,
};

use super::plain::PlainCopy;
use super::work::{self, Operation, Shape, VALUE_BYTES, Work};
use crate::num::to_f32;
use crate::stored::Stored;

/// The layers of one cache, all of one group.
const GROUP: GroupId = GroupId(0);
/// Values that are sent to a device at once.
const SENT: u64 = 1 << 22;

/// Sequences of the batch, each one token short of its context, and one that is empty.
pub(super) struct Rig<'a, B: PlainCopy> {
    shape: &'a Shape,
    backend: Arc<B>,
    cache: KvCache<Arc<B>>,
    /// For what needs no step.
    queue: B::Queue,
    tensors: Tensors<B::Buffer>,
    memory: B::Memory,
    works: [(Operation, Work); 4],
}

/// What a model would give and take, in device memory, as bf16.
struct Tensors<Buf> {
    /// `[batch or context, kv_heads, head_dim]`, whichever is more.
    k: Buf,
    v: Buf,
    /// `[batch, q_heads, head_dim]`.
    q: Buf,
    out: Buf,
}

impl<'a, B: PlainCopy> Rig<'a, B> {
    /// Reserves all memory, and writes the contexts.
    pub(super) fn new(shape: &'a Shape, stored: &Stored, backend: &Arc<B>) -> anyhow::Result<Self> {
        let spec = work::spec(shape, stored)?;
        let mut works = Operation::ALL.map(|one| (one, Work { read: 0, written: 0 }));
        for (operation, bytes) in &mut works {
            *bytes = work::work(shape, &spec, *operation)?;
        }
        let most = works.iter().map(|(_, work)| work.copied()).max().unwrap_or(0);
        let mut queue = backend.queue()?;
        let product = |rows: u32, heads: u32| {
            let row = u64::from(shape.head_dim).saturating_mul(heads.into());
            row.saturating_mul(rows.into())
        };
        let rows = product(shape.batch.max(shape.context), shape.kv_heads);
        let queries = product(shape.batch, shape.q_heads);
        let tensors = Tensors {
            k: random(&**backend, &mut queue, 1, rows)?,
            v: random(&**backend, &mut queue, 2, rows)?,
            q: random(&**backend, &mut queue, 3, queries)?,
            out: backend.alloc(queries.saturating_mul(VALUE_BYTES))?,
        };
        let calibration = work::calibration(shape);
        let mut rig = Self {
            shape,
            cache: KvCache::with_calibration(Arc::clone(backend), spec, calibration)?,
            backend: Arc::clone(backend),
            queue,
            tensors,
            memory: backend.reserve(most)?,
            works,
        };
        rig.fill()?;
        Ok(rig)
    }

    /// What one run of an operation moves.
    pub(super) fn work(&self, operation: Operation) -> Work {
        let found = self.works.iter().find(|(one, _)| *one == operation);
        found.map_or(Work { read: 0, written: 0 }, |(_, work)| *work)
    }

    fn fill(&mut self) -> anyhow::Result<()> {
        let Self { shape, cache, tensors, .. } = self;
        let cached = shape.context.saturating_sub(1);
        for sequence in batch(shape) {
            cache.start(sequence, &[], StartOptions::default())?;
            if cached > 0 {
                let mut step = cache.begin_step(&[StepInput::count(sequence, cached)])?;
                write(&mut step, (shape, tensors), cached)?;
                step.commit()?;
                drain(cache.queue_mut())?;
            }
        }
        cache.start(prompt(shape), &[], StartOptions::default())?;
        Ok(())
    }

    /// Seconds that so many runs of an operation take, from the first call to the end of their
    /// work. Planning is not among them, nor what a step brings to the device once for all layers.
    pub(super) fn run(&mut self, operation: Operation, runs: u32) -> anyhow::Result<f64> {
        let Self { shape, cache, queue, tensors, .. } = self;
        let newest = |sequence| StepInput::count(sequence, 1);
        let whole = StepInput::count(prompt(shape), shape.context);
        let inputs: Vec<_> = match operation {
            Operation::Decode | Operation::Append => batch(shape).map(newest).collect(),
            Operation::Prefill => vec![whole],
            Operation::Copy => batch(shape).take(1).map(newest).chain([whole]).collect(),
        };
        // Dropped at the end, so that the cache is what it was.
        let mut step = cache.begin_step(&inputs)?;
        match operation {
            Operation::Decode => {
                write(&mut step, (shape, tensors), shape.batch)?;
                drain(step.queue_mut())?;
                let begin = Instant::now();
                for _ in 0..runs {
                    attend(&mut step, (shape, tensors))?;
                }
                drain(step.queue_mut())?;
                Ok(begin.elapsed().as_secs_f64())
            }
            Operation::Append | Operation::Prefill => {
                let is_prompt = operation == Operation::Prefill;
                let tokens = if is_prompt { shape.context } else { shape.batch };
                drain(step.queue_mut())?;
                let begin = Instant::now();
                for _ in 0..runs {
                    write(&mut step, (shape, tensors), tokens)?;
                }
                drain(step.queue_mut())?;
                Ok(begin.elapsed().as_secs_f64())
            }
            Operation::Copy => {
                drain(step.queue_mut())?;
                copy_blocks::<B>(step.cache(), queue, (shape, runs))
            }
        }
    }

    /// Seconds that so many plain copies of `bytes` bytes take.
    pub(super) fn plain_copy(&mut self, bytes: u64, runs: u32) -> anyhow::Result<f64> {
        let Self { backend, queue, memory, .. } = self;
        let begin = Instant::now();
        for _ in 0..runs {
            backend.copy(queue, memory, bytes)?;
        }
        drain(queue)?;
        Ok(begin.elapsed().as_secs_f64())
    }
}

/// The sequences that decode.
fn batch(shape: &Shape) -> impl Iterator<Item = SequenceId> + use<> {
    (0..u64::from(shape.batch)).map(SequenceId)
}

/// The sequence behind them, which is empty outside of a step.
fn prompt(shape: &Shape) -> SequenceId {
    SequenceId(shape.batch.into())
}

/// Writes the rows of a step, `tokens` of them, into every layer.
fn write<B: Backend>(
    step: &mut Step<'_, B>,
    (shape, tensors): (&Shape, &Tensors<B::Buffer>),
    tokens: u32,
) -> anyhow::Result<()> {
    let dims = [tokens, shape.kv_heads, shape.head_dim];
    for layer in 0..shape.layers {
        let [k, v] = [&tensors.k, &tensors.v]
            .map(|buffer| TensorView::device(DType::Bf16, buffer, 0, &dims));
        step.write(layer, k, v, QkvFormat::Thd)?;
    }
    Ok(())
}

/// One query a sequence, in every layer.
fn attend<B: Backend>(
    step: &mut Step<'_, B>,
    (shape, tensors): (&Shape, &Tensors<B::Buffer>),
) -> anyhow::Result<()> {
    let dims = [shape.batch, shape.q_heads, shape.head_dim];
    let options = AttentionOptions::causal(to_f32(f64::from(shape.head_dim).sqrt().recip()));
    for layer in 0..shape.layers {
        let q = TensorView::device(DType::Bf16, &tensors.q, 0, &dims);
        let out = TensorViewMut::device(DType::Bf16, &tensors.out, 0, &dims);
        step.attend(layer, q, out, &options)?;
    }
    Ok(())
}

/// Seconds that so many copies of the first sequence's blocks to those of the prompt take, in every
/// layer. Both have all their blocks while a step is open that brings them to their contexts.
fn copy_blocks<B: PlainCopy>(
    cache: &KvCache<Arc<B>>,
    queue: &mut B::Queue,
    (shape, runs): (&Shape, u32),
) -> anyhow::Result<f64> {
    let table = |sequence| cache.block_table(sequence, GROUP).context("a sequence has blocks");
    let mut left = work::slot_map(cache.spec())?.slots(shape.context);
    let pair = |(from, to): (&BlockId, &BlockId)| {
        let slots = left.min(shape.block_size);
        left = left.saturating_sub(slots);
        BlockCopy { from: *from, to: *to, slots }
    };
    let pairs = table(SequenceId(0))?.iter().zip(table(prompt(shape))?);
    let copies: Vec<_> = pairs.map(pair).filter(|copy| copy.slots > 0).collect();
    anyhow::ensure!(left == 0, "{left} slots of a context are in no block");
    let storage = cache.storage(GROUP).context("a cache has a group")?;
    let [layout, _] = storage.layouts();
    let plan = CopyPlan::new(layout, &copies)?;
    let begin = Instant::now();
    for _ in 0..runs {
        queue.copy_blocks(&plan, CopyArgs::new(&plan, storage.view())?)?;
    }
    drain(queue)?;
    Ok(begin.elapsed().as_secs_f64())
}

/// Waits for all that a queue was given.
fn drain<Q: Queue>(queue: &mut Q) -> Result<(), DeviceError> {
    queue.submit()?.wait()
}

/// Values between -1 and 1 in device memory that look random, as bf16.
fn random<B: Backend>(
    backend: &B,
    queue: &mut B::Queue,
    seed: u32,
    count: u64,
) -> Result<B::Buffer, DeviceError> {
    let buffer = backend.alloc(count.saturating_mul(VALUE_BYTES))?;
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let [_, _, low, high] = state.to_le_bytes();
        let value = f32::from(i16::from_le_bytes([low, high])) / 32768.0;
        // bf16 is the upper half of f32.
        let [_, _, low, high] = value.to_le_bytes();
        [low, high]
    };
    let mut at = 0;
    while at < count {
        let now = SENT.min(count.saturating_sub(at));
        let part: Vec<u8> = (0..now).flat_map(|_| next()).collect();
        queue.upload(&buffer, at.saturating_mul(VALUE_BYTES), &part)?;
        at = at.saturating_add(now);
    }
    drain(queue)?;
    Ok(buffer)
}
