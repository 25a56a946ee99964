//! A small cache with known content, and the expected results of attention over it.
use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;

use half::{bf16, f16};
use kv_core::backend::{Backend, PlaneLayout, PlaneView, Queue, Readback};
use kv_core::block::BlockTables;
use kv_core::calibration::PlaneConstants;
use kv_core::plan::{AttendArgs, BatchEntry, Determinism, PlanBuffers, PlannedSequence, WriteArgs};
use kv_core::{
    AttentionOptions, Axes, BlockId, BlockOrder, DType, KvFormat, TensorView, TensorViewMut,
};

use super::{Random, stored};
use crate::{CpuBackend, CpuBuffer};

/// The inputs that a test varies.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Case {
    pub(super) seed: u64,
    pub(super) batch: Vec<BatchEntry>,
    pub(super) kv_heads: u32,
    pub(super) group: u32,
    pub(super) dims: [u32; 2],
    pub(super) block_size: u32,
    pub(super) order: BlockOrder,
    pub(super) formats: [KvFormat; 2],
    /// Whether K and V are transformed, and tokens kept in 16 bits among codes.
    pub(super) transforms: [bool; 2],
    pub(super) full_precision_prefix: u32,
    /// Tokens of every sequence that begin with a value no model makes.
    pub(super) broken: Vec<(usize, f32)>,
    pub(super) dtype: DType,
    pub(super) qkv: Axes,
    /// Batch entries and tokens of padding.
    pub(super) padding: [u32; 2],
    pub(super) blocks_per_segment: u32,
    pub(super) workers: u32,
    pub(super) determinism: Determinism,
}

/// The options that a test sets.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Choice {
    pub(super) full: bool,
    pub(super) window: Option<u32>,
    pub(super) sink_tokens: u32,
    pub(super) cap: Option<f32>,
    pub(super) sink_logits: Option<Vec<f32>>,
}

impl Choice {
    pub(super) fn options(&self, case: &Case) -> AttentionOptions<'_> {
        let scale = 1.0 / (case.dims[0] as f32).sqrt() * 3.0;
        let mut options =
            if self.full { AttentionOptions::full(scale) } else { AttentionOptions::causal(scale) };
        if let Some(window) = self.window {
            options = options.with_window_left(window);
        }
        options = options.with_sink_tokens(self.sink_tokens);
        if let Some(cap) = self.cap {
            options = options.with_soft_cap(cap);
        }
        if let Some(sink_logits) = &self.sink_logits {
            options = options.with_sink_logits(sink_logits);
        }
        options.with_axes(case.qkv)
    }

    /// Returns whether a query at `position` sees `key`.
    pub(super) fn sees(&self, position: i64, key: u32) -> bool {
        let after = !self.full && i64::from(key) > position;
        let before = |left| i64::from(key) < position - i64::from(left) && key >= self.sink_tokens;
        !after && !self.window.is_some_and(before)
    }
}

/// Values rounded to a type.
pub(super) fn round(dtype: DType, x: f32) -> f32 {
    match dtype {
        DType::F16 => f16::from_f32(x).to_f32(),
        DType::Bf16 => bf16::from_f32(x).to_f32(),
        _ => x,
    }
}

pub(super) fn to_bytes(dtype: DType, values: &[f32]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for x in values {
        match dtype {
            DType::F16 => bytes.extend(f16::from_f32(*x).to_bits().to_ne_bytes()),
            DType::Bf16 => bytes.extend(bf16::from_f32(*x).to_bits().to_ne_bytes()),
            _ => bytes.extend(x.to_ne_bytes()),
        }
    }
    bytes
}

pub(super) fn from_bytes(dtype: DType, bytes: &[u8]) -> Vec<f32> {
    let two = |b: &[u8]| u16::from_ne_bytes([b[0], b[1]]);
    match dtype {
        DType::F16 => bytes.chunks(2).map(|b| f16::from_bits(two(b)).to_f32()).collect(),
        DType::Bf16 => bytes.chunks(2).map(|b| bf16::from_bits(two(b)).to_f32()).collect(),
        _ => bytes.chunks(4).map(|b| f32::from_ne_bytes([b[0], b[1], b[2], b[3]])).collect(),
    }
}

/// Axes of a batch of rows with padding, and where the row of a token is.
pub(super) struct Rows {
    pub(super) dims: Vec<u32>,
    axes: Axes,
    heads: u32,
    dim: u32,
}

impl Rows {
    /// Rows of entries with the given lengths.
    pub(super) fn new(
        (axes, padding): (Axes, [u32; 2]),
        lens: &[u32],
        heads: u32,
        dim: u32,
    ) -> Self {
        let batch = lens.len() as u32 + padding[0];
        let longest = lens.iter().copied().max().unwrap_or(0) + padding[1];
        let total = lens.iter().sum::<u32>() + padding[1];
        let dims = match axes {
            Axes::Bshd => vec![batch, longest, heads, dim],
            Axes::Sbhd => vec![longest, batch, heads, dim],
            _ => vec![total, heads, dim],
        };
        Self { dims, axes, heads, dim }
    }
    pub(super) fn len(&self) -> usize {
        self.dims.iter().map(|n| *n as usize).product()
    }
    /// First value of a token's row.
    pub(super) fn at(&self, entry: usize, start: u32, token: u32) -> usize {
        let entry = entry as u32;
        let index = match self.axes {
            Axes::Bshd => entry * self.dims[1] + token,
            Axes::Sbhd => token * self.dims[1] + entry,
            _ => start + token,
        };
        (index * self.heads * self.dim) as usize
    }
}

/// The content of a case's cache. It depends on no backend: it is made once for all backends that
/// run the case.
pub(super) struct Content {
    layouts: [PlaneLayout; 2],
    constants: [Option<PlaneConstants>; 2],
    tables: BlockTables,
    /// K and V as they are written: sequence, then token, head, dim.
    inputs: [Vec<Vec<f32>>; 2],
    /// K and V as a reader must see them.
    pub(super) values: [Vec<Vec<f32>>; 2],
}

impl Content {
    fn of(case: &Case) -> Rc<Self> {
        let recent = CONTENTS.with_borrow(|recent| recent.find(|known| known == case));
        recent.unwrap_or_else(|| {
            let content = Self::new(case);
            CONTENTS.with_borrow_mut(|recent| recent.add(case.clone(), content))
        })
    }

    fn new(case: &Case) -> Self {
        let mut random = Random::new(case.seed);
        let lens: Vec<_> = case.batch.iter().map(|e| e.cached + e.new_tokens).collect();
        let layouts = stored::layouts(case, &lens);
        let num_blocks = layouts[0].num_blocks();
        let constants = [0, 1].map(|which| stored::constants(&mut random, which, &layouts[which]));
        let mut free: Vec<u32> = (0..num_blocks).collect();
        let mut tables = BlockTables::new(num_blocks, 1);
        tables.ensure_rows(lens.len());
        for (entry, len) in case.batch.iter().zip(&lens) {
            for _ in 0..layouts[0].slot_map().blocks(*len) {
                let block = free.remove(random.below(free.len() as u32) as usize);
                tables.push(entry.row, BlockId(block)).unwrap();
            }
        }
        let row = |which: usize| (case.kv_heads * case.dims[which]) as usize;
        let mut inputs: [Vec<Vec<f32>>; 2] = [0, 1].map(|which| {
            let mut rows = |len: &u32| random.units(*len as usize * row(which)).into_iter();
            lens.iter().map(|len| rows(len).map(|x| round(case.dtype, x)).collect()).collect()
        });
        for (token, value) in &case.broken {
            for (which, sequences) in inputs.iter_mut().enumerate() {
                for tokens in sequences {
                    tokens[token * row(which)] = *value;
                }
            }
        }
        let values = [0, 1].map(|which| {
            let mut values = inputs[which].clone();
            for tokens in &mut values {
                for (token, position) in tokens.chunks_mut(row(which)).zip(0..) {
                    for (head, row) in token.chunks_mut(case.dims[which] as usize).enumerate() {
                        let constants = constants[which].as_ref();
                        stored::round_trip(&layouts[which], constants, (head, position), row);
                    }
                }
            }
            values
        });
        Self { layouts, constants, tables, inputs, values }
    }
}

/// A cache filled through the backend, with the values it must hold.
pub(super) struct Fixture {
    pub(super) case: Case,
    pub(super) content: Rc<Content>,
    pub(super) layouts: [PlaneLayout; 2],
    pub(super) tables: BlockTables,
    pub(super) segments: [Vec<CpuBuffer>; 2],
    constants: [Option<CpuBuffer>; 2],
}

impl Fixture {
    pub(super) fn new(backend: &CpuBackend, case: Case) -> Self {
        let content = Content::of(&case);
        let layouts = content.layouts;
        let mut queue = backend.queue().unwrap();
        let segments = layouts.map(|layout| {
            (0..layout.num_segments())
                .map(|index| {
                    let bytes = layout.segment_bytes(index);
                    let buffer = backend.alloc(bytes).unwrap();
                    // Stale content that is NaN in every format.
                    let stale = vec![0xff; bytes as usize];
                    queue.upload(&buffer, 0, &stale).unwrap();
                    buffer
                })
                .collect()
        });
        let constants = [0, 1]
            .map(|which: usize| Some(stored::upload(backend, content.constants[which].as_ref()?)));
        let tables = content.tables.clone();
        let fixture = Self { case, content, layouts, tables, segments, constants };
        let all: Vec<_> = fixture.case.batch.clone();
        let before = |e: &BatchEntry| BatchEntry { cached: 0, new_tokens: e.cached, ..*e };
        fixture.write(backend, &all.iter().map(before).collect::<Vec<_>>());
        fixture.write(backend, &all);
        fixture
    }

    pub(super) fn plane(&self, which: usize) -> PlaneView<'_, CpuBuffer> {
        let plane = PlaneView::new(self.layouts[which], &self.segments[which]).unwrap();
        match &self.constants[which] {
            Some(constants) => plane.with_constants(constants),
            None => plane,
        }
    }

    /// Writes the new tokens of a batch; padding is NaN.
    fn write(&self, backend: &CpuBackend, batch: &[BatchEntry]) {
        let case = &self.case;
        let mut buffers = PlanBuffers::default();
        let (plan, _) =
            buffers.plan(&self.layouts[0], &self.tables, batch, 1, Determinism::Fast).unwrap();
        let lens: Vec<_> = batch.iter().map(|e| e.new_tokens).collect();
        let tensors = [0, 1].map(|which| {
            let dim = case.dims[which];
            let rows = Rows::new((case.qkv, case.padding), &lens, case.kv_heads, dim);
            let row = (case.kv_heads * dim) as usize;
            let mut values = vec![f32::NAN; rows.len()];
            for (index, sequence) in plan.sequences().iter().enumerate() {
                for token in 0..sequence.new_len {
                    let position = (sequence.kv_len - sequence.new_len + token) as usize;
                    let from = &self.content.inputs[which][index][position * row..][..row];
                    values[rows.at(index, sequence.new_start, token)..][..row]
                        .copy_from_slice(from);
                }
            }
            (to_bytes(case.dtype, &values), rows.dims)
        });
        let [k, v] = [0, 1].map(|which| {
            let (bytes, dims) = &tensors[which];
            TensorView::host_bytes(case.dtype, bytes, dims)
        });
        let (k_plane, v_plane) = (self.plane(0), self.plane(1));
        let args = WriteArgs::new(&plan, k, v, case.qkv, k_plane, v_plane).unwrap();
        backend.queue().unwrap().write_kv(&plan, args).unwrap();
    }

    /// Attends on `backend`, with q and out in one device buffer, and compares every value with the
    /// reference. Returns out and log-sum-exp.
    pub(super) fn attend(
        &self,
        name: &str,
        backend: &CpuBackend,
        choice: &Choice,
    ) -> [Vec<f32>; 2] {
        let case = &self.case;
        let mut buffers = PlanBuffers::default();
        let (_, plan) = buffers
            .plan(&self.layouts[0], &self.tables, &case.batch, case.workers, case.determinism)
            .unwrap();
        let heads = case.kv_heads * case.group;
        let lens: Vec<_> = case.batch.iter().map(|e| e.queries).collect();
        let rows = |dim| Rows::new((case.qkv, case.padding), &lens, heads, dim);
        let (q_rows, out_rows, lse_rows) = (rows(case.dims[0]), rows(case.dims[1]), rows(1));
        let q = self.queries(&q_rows, plan.sequences());
        let size = case.dtype.size();
        let out_begin = (q_rows.len() * size).next_multiple_of(64);
        let lse_begin = (out_begin + out_rows.len() * size).next_multiple_of(64);
        let all = lse_begin + lse_rows.len() * 4;
        let device = backend.alloc(all as u64).unwrap();
        let mut queue = backend.queue().unwrap();
        queue.upload(&device, 0, &vec![0xff; all]).unwrap();
        queue.upload(&device, 0, &to_bytes(case.dtype, &q)).unwrap();
        let lse_dims = &lse_rows.dims[..lse_rows.dims.len() - 1];
        let args = AttendArgs::new(
            &plan,
            TensorView::device(case.dtype, &device, 0, &q_rows.dims),
            TensorViewMut::device(case.dtype, &device, out_begin as u64, &out_rows.dims),
            Some(TensorViewMut::device(DType::F32, &device, lse_begin as u64, lse_dims)),
            [self.plane(0), self.plane(1)],
            choice.options(case),
        )
        .unwrap();
        queue.attend(&plan, args).unwrap();
        let bytes = queue.download(&device, 0, all as u64).unwrap().wait().unwrap();
        let out = from_bytes(case.dtype, &bytes[out_begin..][..out_rows.len() * size]);
        let lse = from_bytes(DType::F32, &bytes[lse_begin..]);
        let expected = Expected::of(case, choice, || {
            self.expected(plan.sequences(), (&q, &q_rows), [&out_rows, &lse_rows], choice)
        });
        // A rotation and its inverse round more often than a product.
        let least = if case.transforms == [false; 2] { 1e-5 } else { 4e-5 };
        let tolerance = |x: f64, dtype| match dtype {
            DType::F16 => least + x.abs() / 1024.0,
            DType::Bf16 => least + x.abs() / 128.0,
            _ => least * (1.0 + x.abs()),
        };
        let check = |what: &str, got: &[f32], expected: &[f64], dtype| {
            for (i, (got, expected)) in got.iter().zip(expected).enumerate() {
                let near = (f64::from(*got) - expected).abs() <= tolerance(*expected, dtype);
                let same = f64::from(*got) == *expected || got.is_nan() && expected.is_nan();
                let exact = *expected == 0.0 || !expected.is_finite();
                assert!(
                    if exact { same } else { near },
                    "{name}: {what}[{i}] is {got}, not {expected}: {case:?} {choice:?}"
                );
            }
        };
        check("out", &out, &expected.out, case.dtype);
        check("lse", &lse, &expected.lse, DType::F32);
        [out, lse]
    }

    /// The result of attention in `f64`; padding is 0 and -inf.
    fn expected(
        &self,
        sequences: &[PlannedSequence],
        (q, q_rows): (&[f32], &Rows),
        [out_rows, lse_rows]: [&Rows; 2],
        choice: &Choice,
    ) -> Expected {
        let mut out = vec![0.0; out_rows.len()];
        let mut lse = vec![f64::NEG_INFINITY; lse_rows.len()];
        for (index, sequence) in sequences.iter().enumerate() {
            for token in 0..sequence.q_len {
                for head in 0..q_rows.heads {
                    let at = |rows: &Rows| {
                        let row = rows.at(index, sequence.q_start, token);
                        row + (head * rows.dim) as usize
                    };
                    let query = &q[at(q_rows)..][..q_rows.dim as usize];
                    let place = (index, token, head);
                    let (row, sum) = self.reference(sequence, place, query, choice);
                    out[at(out_rows)..][..row.len()].copy_from_slice(&row);
                    lse[at(lse_rows)] = sum;
                }
            }
        }
        Expected { out, lse }
    }

    /// Queries rounded to the tensor's type; padding is NaN.
    fn queries(&self, rows: &Rows, sequences: &[PlannedSequence]) -> Vec<f32> {
        let mut q = vec![f32::NAN; rows.len()];
        let row = (rows.heads * rows.dim) as usize;
        for (index, sequence) in sequences.iter().enumerate() {
            for token in 0..sequence.q_len {
                // Counted from the end, so that a query is the same with fewer before it.
                let from_end = u64::from(sequence.q_len - token);
                let mut random = Random::new(self.case.seed ^ (from_end << 8) ^ index as u64);
                for x in &mut q[rows.at(index, sequence.q_start, token)..][..row] {
                    *x = round(self.case.dtype, random.unit());
                }
            }
        }
        q
    }

    /// One query row in `f64`.
    fn reference(
        &self,
        sequence: &PlannedSequence,
        (index, token, head): (usize, u32, u32),
        query: &[f32],
        choice: &Choice,
    ) -> (Vec<f64>, f64) {
        let case = &self.case;
        let options = choice.options(case);
        let row = |which: usize, position: u32| {
            let dim = case.dims[which] as usize;
            let width = dim * case.kv_heads as usize;
            let kv_head = (head / case.group) as usize;
            &self.content.values[which][index][position as usize * width + kv_head * dim..][..dim]
        };
        let position = i64::from(sequence.kv_len) - i64::from(sequence.q_len) + i64::from(token);
        let mut scores = Vec::new();
        for key in (0..sequence.kv_len).filter(|key| choice.sees(position, *key)) {
            let pairs = query.iter().zip(row(0, key));
            let dot: f64 = pairs.map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
            let score = dot * f64::from(options.scale());
            let capped =
                choice.cap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh());
            scores.push((key, capped));
        }
        let sink_logit =
            choice.sink_logits.as_ref().map(|sink_logits| f64::from(sink_logits[head as usize]));
        let logits = scores.iter().map(|(_, s)| *s).chain(sink_logit);
        let max = logits.clone().fold(f64::NEG_INFINITY, f64::max);
        let mut out = vec![0.0; case.dims[1] as usize];
        if max == f64::NEG_INFINITY {
            return (out, max);
        }
        let total: f64 = logits.map(|s| (s - max).exp()).sum();
        for (key, score) in &scores {
            let weight = (score - max).exp() / total;
            for (out, v) in out.iter_mut().zip(row(1, *key)) {
                *out += weight * f64::from(*v);
            }
        }
        (out, max + total.ln())
    }
}

/// The expected results of attention: out and log-sum-exp, in the axes of the call.
#[derive(Debug)]
struct Expected {
    out: Vec<f64>,
    lse: Vec<f64>,
}

impl Expected {
    /// Returns the result of a case, which depends on no backend: it is computed once for all
    /// backends that a test runs the case on.
    fn of(case: &Case, choice: &Choice, compute: impl FnOnce() -> Self) -> Rc<Self> {
        let is_same = |(known, chosen): &(Case, Choice)| known == case && chosen == choice;
        let recent = RESULTS.with_borrow(|recent| recent.find(is_same));
        recent.unwrap_or_else(|| {
            let expected = compute();
            let key = (case.clone(), choice.clone());
            RESULTS.with_borrow_mut(|recent| recent.add(key, expected))
        })
    }
}

/// The last few values that were computed: a test runs a few cases on all backends before the next.
struct Recent<K, V>(VecDeque<(K, Rc<V>)>);

impl<K, V> Recent<K, V> {
    const MAX: usize = 4;

    const fn new() -> Self {
        Self(VecDeque::new())
    }
    fn find(&self, is_same: impl Fn(&K) -> bool) -> Option<Rc<V>> {
        self.0.iter().find(|(key, _)| is_same(key)).map(|(_, value)| Rc::clone(value))
    }
    fn add(&mut self, key: K, value: V) -> Rc<V> {
        let value = Rc::new(value);
        self.0.truncate(Self::MAX - 1);
        self.0.push_front((key, Rc::clone(&value)));
        value
    }
}

thread_local! {
    static CONTENTS: RefCell<Recent<Case, Content>> = const { RefCell::new(Recent::new()) };
    static RESULTS: RefCell<Recent<(Case, Choice), Expected>> =
        const { RefCell::new(Recent::new()) };
}
