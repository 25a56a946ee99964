//! A cache filled with contexts, and the timed operations on it.
use std::sync::Arc;
use std::time::Instant;

use kv::backend::plan::{BlockCopy, CopyArgs, CopyPlan, GatherArgs, GatherPlan, GatherRange};
use kv::backend::{Backend, Fence, Queue};
use kv::backend::{KvStorage, Plane};
use kv::error::DeviceError;
use kv::{
    AttentionOptions, Axes, BlockId, CacheSpec, DType, GroupId, KvCache, SequenceId, StartOptions,
    Step, StepInput, TensorView, TensorViewMut,
};

use super::error::Error;
use super::options::Formats;
use super::work::{self, Operation, Shape, VALUE_BYTES};
use crate::num::{to_f32, to_offset, to_u32};
use crate::random::Random;

/// The only group.
const GROUP: GroupId = GroupId(0);
/// Values per upload to a device.
const SENT: u64 = 1 << 22;
/// Tokens of a context that are written in one step.
const FILLED: u32 = 4096;

/// The sequences of a batch, each one token short of its context or empty, and their spares.
pub(super) struct Workload<'a, B: Backend> {
    shape: &'a Shape,
    cache: KvCache<Arc<B>>,
    /// A queue for operations outside a step.
    queue: B::Queue,
    tensors: Tensors<B::Buffer>,
}

/// Inputs and outputs of a model in device memory, as bf16.
struct Tensors<Buf> {
    /// `[tokens, kv_heads, head_dim]`, as many tokens as the largest write has.
    k: Buf,
    v: Buf,
    /// `[tokens, q_heads, head_dim]`.
    q: Buf,
    out: Buf,
    /// `[tokens, kv_heads, head_dim]`, of K and of V.
    gathered: [Buf; 2],
}

/// Sizes of tensors in tokens.
struct Sizes {
    new: u64,
    queries: u64,
    gathered: u64,
}

impl Sizes {
    fn new(shape: &Shape, operations: &[Operation]) -> Self {
        let cached = if shape.is_filled { shape.context.saturating_sub(1) } else { 0 };
        let mut sizes = Self { new: cached.min(FILLED).into(), queries: 0, gathered: 0 };
        for operation in operations {
            let (new, queries, gathered) = match operation {
                Operation::Decode => (shape.batch.into(), shape.batch.into(), 0),
                Operation::Prefill => (shape.batch_tokens(), shape.batch_tokens(), 0),
                Operation::Append => (shape.batch.into(), 0, 0),
                Operation::AppendPrompt => (shape.context.into(), 0, 0),
                Operation::Gather => (0, 0, shape.batch_tokens()),
                Operation::Copy | Operation::Plan => (0, 0, 0),
            };
            sizes.new = sizes.new.max(new);
            sizes.queries = sizes.queries.max(queries);
            sizes.gathered = sizes.gathered.max(gathered);
        }
        sizes
    }
}

/// Returns the number of values of `tokens` tokens; `u64::MAX` if more, as a shape may be any.
fn values(shape: &Shape, tokens: u64, heads: u32) -> u64 {
    u64::from(shape.head_dim).saturating_mul(heads.into()).saturating_mul(tokens)
}

/// Returns the bytes that a workload allocates; `u64::MAX`, which no device has, if more.
pub(super) fn bytes(shape: &Shape, spec: &CacheSpec, operations: &[Operation]) -> u64 {
    let Sizes { new, queries, gathered } = Sizes::new(shape, operations);
    let rows = values(shape, new.saturating_add(gathered), shape.kv_heads);
    let tensors = rows.saturating_add(values(shape, queries, shape.q_heads));
    let memory = spec.memory();
    let cache = memory.all_bytes();
    // Each pair: K and V, queries and outputs.
    cache.saturating_add(tensors.saturating_mul(VALUE_BYTES).saturating_mul(2))
}

impl<'a, B: Backend> Workload<'a, B> {
    /// Allocates the memory that `operations` need, and writes the contexts.
    pub(super) fn new(
        shape: &'a Shape,
        stored: Formats,
        backend: &Arc<B>,
        operations: &[Operation],
    ) -> Result<Self, Error> {
        let spec = work::spec(shape, stored)?;
        let mut queue = backend.queue()?;
        let Sizes { new, queries, gathered } = Sizes::new(shape, operations);
        // Buffers must not be empty.
        let count = |tokens: u64, heads| values(shape, tokens.max(1), heads);
        let rows = count(new, shape.kv_heads);
        let queries = count(queries, shape.q_heads);
        let gathered = count(gathered, shape.kv_heads) * VALUE_BYTES;
        let tensors = Tensors {
            k: random(&**backend, &mut queue, 1, rows)?,
            v: random(&**backend, &mut queue, 2, rows)?,
            q: random(&**backend, &mut queue, 3, queries)?,
            out: backend.alloc(queries * VALUE_BYTES)?,
            gathered: [backend.alloc(gathered)?, backend.alloc(gathered)?],
        };
        let calibration = work::calibration(shape);
        let cache = KvCache::builder(Arc::clone(backend), spec).calibration(calibration).build()?;
        let mut workload = Self { shape, cache, queue, tensors };
        workload.fill()?;
        Ok(workload)
    }

    fn fill(&mut self) -> Result<(), Error> {
        let Self { shape, cache, tensors, .. } = self;
        let cached = if shape.is_filled { shape.context.saturating_sub(1) } else { 0 };
        for sequence in batch(shape) {
            cache.start(sequence, &[], StartOptions::default())?;
            let mut left = cached;
            while left > 0 {
                let tokens = left.min(FILLED);
                let mut step = cache.begin_step(&[StepInput::count(sequence, tokens)])?;
                write(&mut step, (shape, tensors), tokens)?;
                step.commit()?;
                drain(cache.queue_mut())?;
                left -= tokens;
            }
        }
        for sequence in spares(shape) {
            cache.start(sequence, &[], StartOptions::default())?;
        }
        Ok(())
    }

    /// Runs an operation `runs` times; returns the seconds from the first call to the end of the
    /// work. Planning is not timed, nor uploads that a step does once for all layers.
    pub(super) fn run(&mut self, operation: Operation, runs: u32) -> Result<f64, Error> {
        let Self { shape, cache, queue, tensors, .. } = self;
        let newest = |sequence| StepInput::count(sequence, 1);
        let whole = |sequence| StepInput::count(sequence, shape.context);
        let inputs: Vec<_> = match operation {
            Operation::Decode | Operation::Append | Operation::Gather | Operation::Plan => {
                batch(shape).map(newest).collect()
            }
            Operation::Prefill => batch(shape).map(whole).collect(),
            Operation::AppendPrompt if shape.is_filled => {
                spares(shape).take(1).map(whole).collect()
            }
            Operation::AppendPrompt => batch(shape).take(1).map(whole).collect(),
            Operation::Copy => {
                let from = batch(shape).zip(spares(shape)).map(|(from, _)| newest(from));
                from.chain(spares(shape).map(whole)).collect()
            }
        };
        // Dropped at the end, so that the cache does not change.
        let mut step = cache.begin_step(&inputs)?;
        let tokens = to_u32(step.positions().len());
        if matches!(operation, Operation::Decode | Operation::Prefill) {
            write(&mut step, (shape, tensors), tokens)?;
        }
        drain(step.queue_mut())?;
        let begin = Instant::now();
        match operation {
            Operation::Decode | Operation::Prefill => {
                for _ in 0..runs {
                    attend(&mut step, (shape, tensors), tokens)?;
                }
            }
            Operation::Append | Operation::AppendPrompt => {
                for _ in 0..runs {
                    write(&mut step, (shape, tensors), tokens)?;
                }
            }
            Operation::Gather => return gather(&step, queue, (shape, tensors), runs),
            Operation::Copy => return copy_blocks::<B>(step.cache(), queue, (shape, runs)),
            Operation::Plan => {}
        }
        drain(step.queue_mut())?;
        Ok(begin.elapsed().as_secs_f64())
    }
}

/// Returns the sequences that decode.
fn batch(shape: &Shape) -> impl Iterator<Item = SequenceId> + use<> {
    (0..u64::from(shape.batch)).map(SequenceId)
}

/// Returns the spare sequences, which are empty outside of a step.
fn spares(shape: &Shape) -> impl Iterator<Item = SequenceId> + use<> {
    let batch = u64::from(shape.batch);
    (batch..batch + u64::from(shape.spares)).map(SequenceId)
}

/// Writes `tokens` rows of a step to every layer.
fn write<B: Backend>(
    step: &mut Step<'_, B>,
    (shape, tensors): (&Shape, &Tensors<B::Buffer>),
    tokens: u32,
) -> Result<(), Error> {
    let dims = [tokens, shape.kv_heads, shape.head_dim];
    for layer in 0..shape.layers {
        let [k, v] = [&tensors.k, &tensors.v]
            .map(|buffer| TensorView::device(DType::Bf16, buffer, 0, &dims));
        step.write(layer, k, v, Axes::Thd)?;
    }
    Ok(())
}

/// Attends with one query per token of a step, in every layer.
fn attend<B: Backend>(
    step: &mut Step<'_, B>,
    (shape, tensors): (&Shape, &Tensors<B::Buffer>),
    tokens: u32,
) -> Result<(), Error> {
    let dims = [tokens, shape.q_heads, shape.head_dim];
    let options = AttentionOptions::causal(to_f32(f64::from(shape.head_dim).sqrt().recip()));
    for layer in 0..shape.layers {
        let q = TensorView::device(DType::Bf16, &tensors.q, 0, &dims);
        let out = TensorViewMut::device(DType::Bf16, &tensors.out, 0, &dims);
        step.attend(layer, q, out, &options)?;
    }
    Ok(())
}

/// Gathers all rows of a step's sequences from every layer, K and V separately, `runs` times;
/// returns the seconds. [`KvCache::gather`] does the same for one plane, but plans it each time.
fn gather<B: Backend>(
    step: &Step<'_, Arc<B>>,
    queue: &mut B::Queue,
    (shape, tensors): (&Shape, &Tensors<B::Buffer>),
    runs: u32,
) -> Result<f64, Error> {
    let plan = step
        .attention_plan(GROUP)
        .unwrap_or_else(|| unreachable!("a step has a plan of every group"));
    let range = |sequence: &kv::backend::plan::PlannedSequence| GatherRange {
        row: sequence.row,
        begin: 0,
        len: sequence.kv_len,
    };
    let ranges: Vec<_> = plan.sequences().iter().map(range).collect();
    let storage = storage(step.cache());
    let begin = Instant::now();
    for _ in 0..runs {
        for layer in 0..usize::from(shape.layers) {
            for (plane, out) in [Plane::Key, Plane::Value].into_iter().zip(&tensors.gathered) {
                let view = storage.plane(layer, plane);
                let view = view.unwrap_or_else(|| unreachable!("a layer has its planes"));
                let plan = GatherPlan::new(view.layout(), plan.tables(), &ranges)?;
                let dims = [plan.total(), shape.kv_heads, shape.head_dim];
                let out = TensorViewMut::device(DType::Bf16, out, 0, &dims);
                let args = GatherArgs::new(&plan, view, out, Axes::Thd)?;
                queue.gather(&plan, args)?;
            }
        }
    }
    drain(queue)?;
    Ok(begin.elapsed().as_secs_f64())
}

/// Copies the blocks of sequences to the blocks of the spares in every layer, `runs` times; returns
/// the seconds. An open step has brought all sequences to their full contexts, so they have all
/// their blocks.
fn copy_blocks<B: Backend>(
    cache: &KvCache<Arc<B>>,
    queue: &mut B::Queue,
    (shape, runs): (&Shape, u32),
) -> Result<f64, Error> {
    let table = |sequence| {
        let table = cache.state().block_table(sequence, GROUP);
        table.unwrap_or_else(|| unreachable!("a sequence of a workload has blocks"))
    };
    let storage = storage(cache);
    let layout = storage.layouts().first();
    let slots = work::slot_map(cache.state().spec()).slots(shape.context);
    let mut copies = Vec::new();
    for (from, to) in batch(shape).zip(spares(shape)) {
        let mut left = slots;
        let pair = |(from, to): (&BlockId, &BlockId)| {
            let slots = left.min(layout.block_size());
            left -= slots;
            BlockCopy { from: *from, to: *to, slots }
        };
        let pairs = table(from).iter().zip(table(to)).map(pair);
        copies.extend(pairs.filter(|copy| copy.slots > 0));
        assert!(left == 0, "{left} slots of a context are in no block");
    }
    let plan = CopyPlan::new(layout, &copies)?;
    let begin = Instant::now();
    for _ in 0..runs {
        queue.copy_blocks(&plan, CopyArgs::new(&plan, storage.view())?)?;
    }
    drain(queue)?;
    Ok(begin.elapsed().as_secs_f64())
}

/// Returns the storage of the only group.
fn storage<B: Backend>(cache: &KvCache<B>) -> &KvStorage<B::Buffer> {
    cache.storage(GROUP).unwrap_or_else(|| unreachable!("a cache has a group"))
}

/// Waits until a queue has finished its work.
pub(super) fn drain<Q: Queue>(queue: &mut Q) -> Result<(), DeviceError> {
    queue.submit()?.wait()
}

/// Makes pseudo-random values between -1 and 1 in device memory, as bf16.
fn random<B: Backend>(
    backend: &B,
    queue: &mut B::Queue,
    seed: u32,
    count: u64,
) -> Result<B::Buffer, DeviceError> {
    let buffer = backend.alloc(count * VALUE_BYTES)?;
    // bf16 is the upper half of f32.
    let mut bytes = Random::new(seed).flat_map(|value| {
        let [_, _, low, high] = value.to_le_bytes();
        [low, high]
    });
    let mut at = 0;
    while at < count {
        let now = SENT.min(count - at);
        let len = to_offset(now * VALUE_BYTES);
        let part: Vec<u8> = bytes.by_ref().take(len).collect();
        queue.upload(&buffer, at * VALUE_BYTES, &part)?;
        at += now;
    }
    drain(queue)?;
    Ok(buffer)
}
