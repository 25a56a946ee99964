//! One step on the device and in the model, its attention held to the oracle.
use kv_core::{DType, QkvFormat, SequenceId, StepInput};

use crate::case::{At, CaseError, same};
use crate::device::{Device, Staged};
use crate::lab::how::{Finish, How, options};
use crate::lab::{Lab, seq};
use crate::model::{Model, Rows};
use crate::oracle::round::round_f32;
use crate::oracle::{Attended, Attention, Stored};
use crate::tokens::{Room, TokenLayout};
use crate::tolerance::Reference;

/// What a sequence brings to a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Brings {
    /// New tokens, which attend.
    Tokens(u32),
    /// Queries only.
    Query(u32),
    /// Nothing.
    Idle,
}

impl Brings {
    /// New tokens and queries.
    pub(super) fn counts(self) -> (usize, usize) {
        match self {
            Self::Tokens(n) => (n as usize, n as usize),
            Self::Query(n) => (0, n as usize),
            Self::Idle => (0, 0),
        }
    }
    /// The same for a cache; `told`: the ids of new tokens, where they are known.
    pub(crate) fn input(self, sequence: SequenceId, told: Option<&Vec<u32>>) -> StepInput<'_> {
        match (self, told) {
            (Self::Tokens(_), Some(tokens)) => StepInput::tokens(sequence, tokens),
            (Self::Tokens(n), None) => StepInput::count(sequence, n),
            (Self::Query(n), _) => StepInput::query(sequence, n),
            (Self::Idle, _) => StepInput::idle(sequence),
        }
    }
}

/// Results of a step, by layer and entry.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Outputs {
    /// Attention outputs.
    pub out: Vec<Vec<Vec<f32>>>,
    /// Log-sum-exp; empty unless asked for.
    pub lse: Vec<Vec<Vec<f32>>>,
}

/// One layer's tensors on their way through a step.
struct LayerWork<Buf> {
    kv: [Staged<Buf>; 2],
    q: Staged<Buf>,
    out: Staged<Buf>,
    lse: Option<Staged<Buf>>,
    /// Queries, by entry, as the device sees them.
    q_rows: Vec<Vec<f32>>,
    oracle: Attention,
}

impl<B: Device> Lab<B> {
    /// Runs a step with random content, checks positions, attention of every layer, and updates the
    /// model.
    ///
    /// # Errors
    /// The cache's refusal of the step, or a broken promise.
    pub fn step(&mut self, inputs: &[(u64, Brings)], how: &How) -> Result<Outputs, CaseError> {
        let new: Vec<_> = inputs.iter().map(|(_, brings)| brings.counts().0).collect();
        let rows = self.random_rows(&new, how);
        self.step_with(inputs, &rows, how)
    }

    /// K and V of new tokens, by entry.
    pub fn random_rows(&mut self, lens: &[usize], how: &How) -> Vec<Rows> {
        let layers = self.layers().to_vec();
        let mut values = |len: usize, stored: &Stored| -> Vec<f32> {
            let rows = self.rng.normals(len * stored.width());
            liken(stored, rows, how.kv_dtype)
        };
        let mut entry = |len: usize| -> Rows {
            layers.iter().map(|l| l.stored.each_ref().map(|stored| values(len, stored))).collect()
        };
        lens.iter().map(|len| entry(*len)).collect()
    }

    /// As [`Self::step`], with given K and V.
    ///
    /// # Errors
    /// As [`Self::step`].
    pub fn step_with(
        &mut self,
        inputs: &[(u64, Brings)],
        rows: &[Rows],
        how: &How,
    ) -> Result<Outputs, CaseError> {
        let place = || format!("step {inputs:?} as {how:?}");
        let mut work = Vec::new();
        for layer in 0..self.layers().len() {
            work.push(self.stage(layer, inputs, rows, how)?);
        }
        let told = std::mem::take(&mut self.told);
        let input = |(id, brings): &(u64, Brings)| brings.input(seq(*id), told.get(&seq(*id)));
        let list: Vec<_> = inputs.iter().map(input).collect();
        let mut after = self.model.clone();
        let new = self.append(&mut after, inputs.iter().map(|(id, _)| *id), rows);
        let mut step = self.cache.begin_step(&list)?;
        let expected = positions(inputs, &after);
        same("positions", step.positions().to_vec(), expected).at(place())?;
        let mut order: Vec<_> = (0..work.len()).collect();
        if how.shuffled {
            order.push(0);
            order.reverse();
        }
        for layer in order {
            let LayerWork { kv, q, out, lse, oracle, .. } = &mut work[layer];
            let options = options(oracle, how.q_format);
            let id = layer as u16;
            step.write(id, kv[0].view(), kv[1].view(), how.kv_format).at(place())?;
            match lse {
                None => step.attend(id, q.view(), out.view_mut(), &options).at(place())?,
                Some(lse) => step
                    .attend_lse(id, q.view(), out.view_mut(), lse.lse_mut(), &options)
                    .at(place())?,
            }
        }
        match how.finish {
            Finish::Commit => step.commit().at(place())?,
            Finish::Drop => step.roll_back(),
        }
        if how.finish == Finish::Commit {
            self.adopt(&mut after, &new, rows).at(place())?;
        }
        let outputs = self.judge(work, inputs, &after, how).at(place())?;
        if how.finish == Finish::Commit {
            self.model = after;
        }
        Ok(outputs)
    }

    /// Appends to a model what its planes keep of new rows; says where they begin and how many they
    /// are.
    pub(super) fn append(
        &self,
        model: &mut Model,
        ids: impl Iterator<Item = u64>,
        rows: &[Rows],
    ) -> Vec<(SequenceId, u32, u32)> {
        let mut new = Vec::new();
        for (id, rows) in ids.map(seq).zip(rows) {
            let first = model.len(id).unwrap_or(0);
            let mut kept = Vec::new();
            for ((shape, rows), layer) in self.layers().iter().zip(rows).zip(0..) {
                let stored = &shape.stored;
                let plain = || [0, 1].map(|plane| stored[plane].kept(first, &rows[plane]));
                kept.push(model.grow(id, layer, stored, rows).unwrap_or_else(plain));
            }
            model.append(id, &kept);
            new.push((id, first, model.len(id).unwrap_or(first) - first));
        }
        new
    }

    fn stage(
        &mut self,
        layer: usize,
        inputs: &[(u64, Brings)],
        rows: &[Rows],
        how: &How,
    ) -> Result<LayerWork<B::Buffer>, CaseError> {
        let shape = self.layers()[layer].clone();
        let new: Vec<_> = inputs.iter().map(|(_, brings)| brings.counts().0).collect();
        let queries: Vec<_> = inputs.iter().map(|(_, brings)| brings.counts().1).collect();
        let q_heads = shape.heads * how.group;
        let sink_logits = self.rng.normals(q_heads);
        let mut q_row = |n: &usize| -> Vec<f32> {
            let values = self.rng.normals(n * q_heads * shape.dims[0]);
            values.into_iter().map(|x| round_f32(how.q_dtype, x * how.spread)).collect()
        };
        let q_rows: Vec<_> = queries.iter().map(&mut q_row).collect();
        let backend = self.backend.clone();
        let queue = self.cache.queue_mut();
        let mut input = |format, lens: &[usize], heads_dim, dtype, rows: &[Vec<f32>]| {
            let layout = TokenLayout::new(format, lens, heads_dim, how.room);
            let tensor = layout.pack(dtype, rows, f32::NAN);
            Staged::new(&backend, queue, (layout, tensor), how.inputs)
        };
        let mut plane = |plane: usize| {
            let rows: Vec<_> = rows.iter().map(|rows| rows[layer][plane].clone()).collect();
            input(how.kv_format, &new, [shape.heads, shape.dims[plane]], how.kv_dtype, &rows)
        };
        let kv = [plane(0)?, plane(1)?];
        let q = input(how.q_format, &queries, [q_heads, shape.dims[0]], how.q_dtype, &q_rows)?;
        let queue = self.cache.queue_mut();
        let mut output = |dim, dtype| {
            let layout = TokenLayout::new(how.q_format, &queries, [q_heads, dim], how.room);
            Staged::output(&backend, queue, (layout, dtype), how.outputs)
        };
        let out = output(shape.dims[1], how.q_dtype)?;
        let lse = if how.lse { Some(output(1, DType::F32)?) } else { None };
        let oracle = how.oracle(&shape, &sink_logits);
        Ok(LayerWork { kv, q, out, lse, q_rows, oracle })
    }

    /// Fetches the outputs and holds them to the oracle.
    fn judge(
        &mut self,
        work: Vec<LayerWork<B::Buffer>>,
        inputs: &[(u64, Brings)],
        after: &Model,
        how: &How,
    ) -> Result<Outputs, CaseError> {
        let capabilities = self.backend.capabilities().clone();
        let queries: Vec<_> = inputs.iter().map(|(_, brings)| brings.counts().1).collect();
        let mut outputs = Outputs::default();
        for (layer, mut work) in work.into_iter().enumerate() {
            let queue = self.cache.queue_mut();
            let layout = work.out.layout;
            let tensor = work.out.read(&capabilities, queue)?;
            let out = layout.unpack("out", tensor, &queries, 0.0)?;
            let lse = match &mut work.lse {
                None => None,
                Some(lse) => {
                    let layout = lse.layout;
                    let tensor = lse.read(&capabilities, queue)?;
                    Some(layout.unpack("lse", tensor, &queries, f32::NEG_INFINITY)?)
                }
            };
            let cached: Vec<_> =
                inputs.iter().map(|(id, _)| after.layer(seq(*id), layer)).collect();
            judge_layer(&work.oracle, &work.q_rows, &cached, (&out, lse.as_deref()), how.q_dtype)
                .at(format!("layer {layer}"))?;
            outputs.out.push(out);
            outputs.lse.extend(lse);
        }
        Ok(outputs)
    }
}

/// Normal rows as ones that the constants of a plane were made from.
pub(crate) fn liken(stored: &Stored, mut rows: Vec<f32>, dtype: DType) -> Vec<f32> {
    for (row, index) in rows.chunks_mut(stored.dim()).zip(0..) {
        if let Some(head) = stored.head(index) {
            for ((x, back), mean) in row.iter_mut().zip(head.back).zip(head.mean) {
                *x = *x * back.abs() + mean;
            }
        }
    }
    rows.into_iter().map(|x| round_f32(dtype, x)).collect()
}

/// Where queries stand: the last ones of each sequence, at 0 while there are more queries than
/// keys.
fn positions(inputs: &[(u64, Brings)], after: &Model) -> Vec<u32> {
    let entry = |(id, brings): &(u64, Brings)| {
        let (len, queries) = (after.len(seq(*id)).unwrap_or(0), brings.counts().1 as u32);
        let first = len.saturating_sub(queries);
        (0..queries).map(move |i| first + i).collect::<Vec<_>>()
    };
    inputs.iter().flat_map(entry).collect()
}

/// Holds one layer's results of a batch to the oracle.
pub(crate) fn judge_layer(
    oracle: &Attention,
    q: &[Vec<f32>],
    cached: &[[Vec<f32>; 2]],
    (out, lse): (&[Vec<f32>], Option<&[Vec<f32>]>),
    dtype: DType,
) -> Result<(), String> {
    let mut exact = Attended::default();
    let mut plain = [(); 3].map(|()| Attended::default());
    for (q, [k, v]) in q.iter().zip(cached) {
        join(&mut exact, oracle.exact(q, k, v));
        plain.iter_mut().zip(oracle.plain(q, k, v)).for_each(|(all, one)| join(all, one));
    }
    let floors = calibrate(oracle, q, cached);
    judge_values(&exact, &plain, floors, (out, lse), dtype)
}

/// Fewer rows than this do not show how far off a plain computation can be.
const ROWS_MIN: usize = 64;

/// Relative errors of the plain computation, for out and lse, on further queries of the same kind:
/// those given, with their dims turned round.
pub(crate) fn calibrate(oracle: &Attention, q: &[Vec<f32>], cached: &[[Vec<f32>; 2]]) -> [f64; 2] {
    let rows = q.iter().map(|q| q.len() / oracle.dk).sum::<usize>();
    let mut floors = [0.0_f64; 2];
    if rows >= ROWS_MIN {
        return floors;
    }
    for shift in 1..=ROWS_MIN.div_ceil(rows.max(1)).min(8) {
        for (q, [k, v]) in q.iter().zip(cached) {
            let mut q = q.clone();
            q.chunks_exact_mut(oracle.dk).for_each(|row| row.rotate_left(shift % oracle.dk));
            let (exact, plain) = (oracle.exact(&q, k, v), oracle.plain(&q, k, v));
            let error = |exact, plain, magnitude| {
                Reference { exact, plain, magnitude, dtype: DType::F32, floor: 0.0 }.plain_error()
            };
            let out = plain.each_ref().map(|plain| plain.out.as_slice());
            let lse = plain.each_ref().map(|plain| plain.lse.as_slice());
            floors[0] = floors[0].max(error(&exact.out, out, &exact.magnitude));
            floors[1] = floors[1].max(error(&exact.lse, lse, &exact.lse_magnitude));
        }
    }
    floors
}

/// Appends the results of one sequence to those of a batch.
pub(crate) fn join(all: &mut Attended, one: Attended) {
    all.out.extend(one.out);
    all.lse.extend(one.lse);
    all.magnitude.extend(one.magnitude);
    all.lse_magnitude.extend(one.lse_magnitude);
}

/// Holds results of a batch to a reference and its plain computation.
pub(crate) fn judge_values(
    exact: &Attended,
    plain: &[Attended; 3],
    floors: [f64; 2],
    (out, lse): (&[Vec<f32>], Option<&[Vec<f32>]>),
    dtype: DType,
) -> Result<(), String> {
    let flat =
        |rows: &[Vec<f32>]| -> Vec<f64> { rows.iter().flatten().map(|x| f64::from(*x)).collect() };
    let simple = plain.each_ref().map(|plain| plain.out.as_slice());
    let (want, magnitude) = (&exact.out, &exact.magnitude);
    Reference { exact: want, plain: simple, magnitude, dtype, floor: floors[0] }
        .check("out", &flat(out))?;
    if let Some(lse) = lse {
        let simple = plain.each_ref().map(|plain| plain.lse.as_slice());
        let (want, magnitude, dtype) = (&exact.lse, &exact.lse_magnitude, DType::F32);
        Reference { exact: want, plain: simple, magnitude, dtype, floor: floors[1] }
            .check("lse", &flat(lse))?;
    }
    Ok(())
}

/// A dense layout.
pub(crate) fn dense(format: QkvFormat, lens: &[usize], heads_dim: [usize; 2]) -> TokenLayout {
    TokenLayout::new(format, lens, heads_dim, Room::default())
}

impl<B: Device> Lab<B> {
    /// Commits tokens with given K and V without attending.
    ///
    /// # Errors
    /// The cache's refusal.
    pub fn write_only(
        &mut self,
        inputs: &[(u64, u32)],
        rows: &[Rows],
        dtype: DType,
    ) -> Result<(), CaseError> {
        let lens: Vec<_> = inputs.iter().map(|(_, n)| *n as usize).collect();
        let mut staged = Vec::new();
        for (layer, shape) in self.layers().to_vec().into_iter().enumerate() {
            for (plane, dim) in shape.dims.into_iter().enumerate() {
                let rows: Vec<_> = rows.iter().map(|rows| rows[layer][plane].clone()).collect();
                let layout = dense(QkvFormat::Thd, &lens, [shape.heads, dim]);
                let made = (layout, layout.pack(dtype, &rows, f32::NAN));
                let queue = self.cache.queue_mut();
                staged.push(Staged::new(&self.backend, queue, made, crate::device::Place::Host)?);
            }
        }
        let list: Vec<_> = inputs.iter().map(|(id, n)| StepInput::count(seq(*id), *n)).collect();
        let mut step = self.cache.begin_step(&list)?;
        for (layer, kv) in (0_u16..).zip(staged.chunks_exact(2)) {
            step.write(layer, kv[0].view(), kv[1].view(), QkvFormat::Thd)?;
        }
        step.commit()?;
        let mut after = self.model.clone();
        let new = self.append(&mut after, inputs.iter().map(|(id, _)| *id), rows);
        self.adopt(&mut after, &new, rows)?;
        self.model = after;
        Ok(())
    }

    /// Starts a sequence and fills it with random tokens, without attending.
    ///
    /// # Errors
    /// The cache's refusal.
    pub fn fill(&mut self, id: u64, tokens: u32) -> Result<(), CaseError> {
        self.start(id)?;
        if tokens == 0 {
            return Ok(());
        }
        let rows = self.random_rows(&[tokens as usize], &How::default());
        self.write_only(&[(id, tokens)], &rows, DType::F32)
    }
}
