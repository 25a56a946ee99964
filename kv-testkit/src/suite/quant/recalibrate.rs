//! Constants exchanged under windows, forks, tails and pins: every row that a sequence can read
//! keeps its values, no other block is touched, and a device that fails at any operation leaves the
//! cache as it was.
use std::ops::Range;

use kv_core::calibration::{LayerCalibration, PlaneCalibration};
use kv_core::{
    CacheError, CacheSpec, CacheSpecBuilder, Calibration, DType, GroupId, KeyMean, KvCache,
    KvFormat, Plane, QkvFormat, ScaleGroup, Scaling, SequenceId, StartOptions, StepInput,
    TensorView, Transform,
};

use crate::case::{At, Case, CaseError, CaseResult, Outcome, ensure, same};
use crate::device::{Device, Place, Staged, dim};
use crate::erratic::{Erratic, Failing};
use crate::lab::{dense, seq};
use crate::named;
use crate::suite::case;

pub(super) fn cases<B: Device>() -> Vec<Case<B>> {
    vec![
        case("quant/recalibrated_window_that_reuses_its_blocks", wrapped),
        case("quant/recalibrated_window_leaves_other_sequences_alone", taken_over),
        case("quant/recalibrated_every_geometry", every_geometry),
        case("quant/recalibration_fails_at_every_operation", every_failure),
    ]
}

const INT8: KvFormat = KvFormat::Int8(Scaling::Row);
const L6: KvFormat = KvFormat::L6(ScaleGroup::Row);

/// Rows are uniform in -1..1; two roundings of these formats stay well below this.
const TOLERANCE: f32 = 0.15;

/// A cache, and the tokens of its sequences.
struct World<B: Device> {
    device: Erratic<B>,
    cache: KvCache<Erratic<B>>,
    texts: Vec<(SequenceId, Vec<u32>)>,
}

/// What can be read of one sequence in one plane, from a position on.
#[derive(Debug, PartialEq)]
struct Readable {
    sequence: SequenceId,
    layer: u16,
    plane: Plane,
    begin: u32,
    values: Vec<f32>,
}

impl<B: Device> World<B> {
    fn new(backend: &B, spec: CacheSpec) -> Result<Self, CaseError> {
        let device = Erratic::new(backend.clone());
        let cache = KvCache::new(device.clone(), spec)?;
        Ok(Self { device, cache, texts: Vec::new() })
    }

    /// Starts a sequence on a prompt and brings what is not cached, `chunk` tokens a step.
    fn prompt(&mut self, id: u64, prompt: &[u32], chunk: usize) -> Result<u32, CaseError> {
        let reused = self.cache.start(seq(id), prompt, StartOptions::default())?;
        self.texts.push((seq(id), prompt[..reused as usize].to_vec()));
        for tokens in prompt[reused as usize..].chunks(chunk) {
            self.bring(&[(id, tokens)])?;
        }
        Ok(reused)
    }

    fn fork(&mut self, parent: u64, child: u64) -> Result<(), CaseError> {
        self.cache.fork(seq(parent), seq(child))?;
        let text = self.text(seq(parent)).to_vec();
        self.texts.push((seq(child), text));
        Ok(())
    }

    fn truncate(&mut self, id: u64, len: usize) -> Result<(), CaseError> {
        self.cache.truncate(seq(id), len as u32)?;
        let text = self.texts.iter_mut().find(|(known, _)| *known == seq(id));
        text.ok_or("an unknown sequence")?.1.truncate(len);
        Ok(())
    }

    fn release(&mut self, id: u64) -> Result<(), CaseError> {
        self.texts.retain(|(known, _)| *known != seq(id));
        Ok(self.cache.release(seq(id))?)
    }

    fn text(&self, id: SequenceId) -> &[u32] {
        let text = self.texts.iter().find(|(known, _)| *known == id);
        text.map_or(&[], |(_, text)| text)
    }

    /// One step of these tokens.
    fn bring(&mut self, batch: &[(u64, &[u32])]) -> Result<(), CaseError> {
        let mut names = Vec::new();
        for (id, tokens) in batch {
            let text = self.texts.iter_mut().find(|(known, _)| *known == seq(*id));
            let (_, text) = text.ok_or("an unknown sequence")?;
            let before = text.len();
            text.extend(*tokens);
            let all = named::names(text, &StartOptions::default());
            names.extend_from_slice(&all[before..]);
        }
        let inputs: Vec<_> =
            batch.iter().map(|(id, tokens)| StepInput::tokens(seq(*id), tokens)).collect();
        let spec = self.cache.spec().clone();
        let mut step = self.cache.begin_step(&inputs)?;
        for layer in 0..spec.num_layers() {
            let rows = [Plane::Key, Plane::Value].map(|plane| {
                let dims = shape(&spec, layer, plane);
                let values = named::rows(&names, layer, plane, dims[0] * dims[1]);
                (values, [names.len() as u32, dims[0] as u32, dims[1] as u32])
            });
            let [k, v] = &rows;
            let [k, v] = [k, v].map(|(values, dims)| TensorView::host(values, dims));
            step.write(layer, k, v, QkvFormat::Thd)?;
        }
        Ok(step.commit()?)
    }

    /// Positions of a sequence that its blocks of a group still hold.
    fn kept(&self, id: SequenceId, group: GroupId) -> [Range<u32>; 2] {
        let map = self.cache.spec().groups()[usize::from(group.0)].slot_map();
        let len = self.cache.seq_len(id).unwrap_or(0);
        let vacant = self.cache.vacant_entries(id, group).unwrap_or_default();
        if vacant.is_empty() {
            return [0..len, len..len];
        }
        [0..map.tokens(vacant.start).min(len), map.tokens(vacant.end).min(len)..len]
    }

    /// Everything that sequences can read.
    fn read(&mut self) -> Result<Vec<Readable>, CaseError> {
        let spec = self.cache.spec().clone();
        let mut all = Vec::new();
        let ids: Vec<_> = self.texts.iter().map(|(id, _)| *id).collect();
        for (layer, sequence) in
            (0..spec.num_layers()).flat_map(|l| ids.iter().map(move |s| (l, *s)))
        {
            let group = spec.locate(layer.into()).ok_or("a layer of no group")?.0;
            for range in self.kept(sequence, group).into_iter().filter(|range| !range.is_empty()) {
                for plane in [Plane::Key, Plane::Value] {
                    let layout = dense(QkvFormat::Thd, &[range.len()], shape(&spec, layer, plane));
                    let made = (layout, DType::F32);
                    let queue = self.cache.queue_mut();
                    let mut out = Staged::output(&self.device, queue, made, Place::Device)?;
                    let asked = (sequence, range.start, range.len() as u32);
                    let format = QkvFormat::Thd;
                    self.cache.gather(layer, plane, &[asked], out.view_mut(), format)?;
                    let facts = kv_core::Backend::capabilities(&self.device);
                    let values = out.read(facts, self.cache.queue_mut())?.values();
                    let begin = range.start;
                    all.push(Readable { sequence, layer, plane, begin, values });
                }
            }
        }
        Ok(all)
    }

    /// Fails unless rows are those of the sequences' own tokens, up to rounding.
    fn check(&mut self) -> Result<(), CaseError> {
        let spec = self.cache.spec().clone();
        for Readable { sequence, layer, plane, begin, values } in self.read()? {
            let [heads, dim] = shape(&spec, layer, plane);
            let names = named::names(self.text(sequence), &StartOptions::default());
            let rows = values.len() / (heads * dim);
            let own = &names[begin as usize..begin as usize + rows];
            let expected = named::rows(own, layer, plane, heads * dim);
            let off = |(got, value): (&f32, &f32)| (got - value).abs();
            let is_right = |pair| off(pair) <= TOLERANCE;
            let first = values.iter().zip(&expected).position(|pair| !is_right(pair));
            ensure(first.is_none(), || {
                let at = first.unwrap_or(0);
                format!(
                    "sequence {sequence}, {plane} of layer {layer}, position {}: {} for {}",
                    begin as usize + at / (heads * dim),
                    values[at],
                    expected[at],
                )
            })?;
        }
        Ok(())
    }

    /// Every byte of every plane.
    fn bytes(&mut self) -> Result<Vec<Vec<Vec<u8>>>, CaseError> {
        let groups = 0..self.cache.spec().groups().len() as u8;
        groups.map(|group| crate::suite::bytes(&mut self.cache, GroupId(group))).collect()
    }

    /// Exchanges constants: all readable rows stay within rounding, and blocks that no sequence
    /// holds keep their bytes.
    fn recalibrate(&mut self, mean: f32) -> Result<(), CaseError> {
        self.check().at("before constants are exchanged")?;
        let held = self.held();
        let before = self.bytes()?;
        let key = self.cache.encoding_key();
        self.cache.recalibrate(calibration(self.cache.spec(), mean))?;
        ensure(self.cache.encoding_key() != key, || "other constants, the same key".to_owned())?;
        self.check().at("after constants were exchanged")?;
        let after = self.bytes()?;
        for (group, held) in held.iter().enumerate() {
            let layouts = self.cache.spec().groups()[group].layouts();
            for (number, (old, new)) in before[group].iter().zip(&after[group]).enumerate() {
                let size = layouts[number % 2].block_bytes() as usize;
                let blocks = old.chunks(size).zip(new.chunks(size)).enumerate();
                let other = blocks.filter(|(block, _)| !held.contains(&(*block as u32)));
                let changed: Vec<_> =
                    other.filter(|(_, (a, b))| a != b).map(|(block, _)| block).collect();
                same(format!("blocks of group {group} that changed"), changed, vec![])?;
            }
        }
        Ok(())
    }

    /// Blocks that sequences hold, by group.
    fn held(&self) -> Vec<Vec<u32>> {
        let groups = 0..self.cache.spec().groups().len() as u8;
        let of = |group| {
            let mut held = Vec::new();
            for (id, _) in &self.texts {
                let vacant = self.cache.vacant_entries(*id, group).unwrap_or_default();
                let table = self.cache.block_table(*id, group).unwrap_or_default();
                let live = (0..).zip(table).filter(|(at, _)| !vacant.contains(at));
                held.extend(live.map(|(_, block)| block.0));
            }
            held
        };
        groups.map(|group| of(GroupId(group))).collect()
    }

    /// Fails at operation after operation of an exchange, each time from the same state on.
    fn fail_everywhere(&mut self, mean: f32) -> Result<u64, CaseError> {
        let given = calibration(self.cache.spec(), mean);
        let (before, key) = (self.read()?, self.cache.encoding_key());
        let probes = self.probes();
        for operation in 0.. {
            let some = if operation % 3 == 0 { &Failing::ALL[..] } else { &Failing::ALL[1..] };
            for failing in some.iter().copied() {
                let place = || format!("operation {operation} fails, {failing:?}");
                self.device.fail(operation, failing);
                let exchanged = self.cache.recalibrate(given.clone());
                if !self.device.calm() {
                    exchanged.at(place())?;
                    // Nothing was left to fail: the exchange is done.
                    self.check().at("after constants were exchanged")?;
                    return Ok(operation);
                }
                let is_told = matches!(exchanged, Err(CacheError::Device(_)));
                ensure(is_told, || format!("{}: {exchanged:?}", place()))?;
                same(format!("{}: encoding key", place()), self.cache.encoding_key(), key)?;
                let after = self.read().at(place())?;
                ensure(after == before, || format!("{}: rows differ from before", place()))?;
                same(format!("{}: reusable tokens", place()), self.probes(), probes.clone())?;
            }
        }
        Ok(0)
    }

    fn probes(&self) -> Vec<u32> {
        let probe = |(_, text): &(_, Vec<u32>)| {
            let longer = [text.as_slice(), &[7]].concat();
            self.cache.probe(&longer, StartOptions::default())
        };
        self.texts.iter().map(probe).collect()
    }
}

/// Heads and values of a row.
fn shape(spec: &CacheSpec, layer: u16, plane: Plane) -> [usize; 2] {
    let group = spec.locate(layer.into()).map_or(0, |(group, _)| usize::from(group.0));
    let layout = &spec.groups()[group].layouts()[usize::from(plane == Plane::Value)];
    [layout.num_kv_heads() as usize, layout.head_dim() as usize]
}

/// A mean of all keys, and a balance for those that have means by block.
fn calibration(spec: &CacheSpec, mean: f32) -> Calibration {
    let layer = |layer| {
        let [heads, dim] = shape(spec, layer, Plane::Key);
        let (mean, balance) = (vec![mean; heads * dim], vec![1.0 + mean.abs(); heads * dim]);
        let k = PlaneCalibration { mean, balance, ..Default::default() };
        LayerCalibration { k, ..Default::default() }
    };
    Calibration::new((0..spec.num_layers()).map(layer).collect())
}

/// Token ids that differ from those of another `salt`.
fn text(salt: u32, len: usize) -> Vec<u32> {
    (0..len as u32).map(|at| salt * 1000 + at).collect()
}

fn spec<B: Device>(backend: &B, format: KvFormat) -> CacheSpecBuilder {
    CacheSpec::builder().layers(1).kv_heads(1).head_dim(dim(backend, 32)).format(format)
}

/// A window of 6 in 5 blocks: after 61 tokens its table names every block several times.
fn wrapped<B: Device>(backend: &B) -> CaseResult {
    let mut world = World::new(backend, spec(backend, INT8).paged(4, 5).window_left(6).build()?)?;
    world.prompt(1, &text(1, 61), 4)?;
    world.recalibrate(0.05)?;
    world.bring(&[(1, &[9, 9, 9])])?;
    world.check().at("with new constants")?;
    world.recalibrate(-0.5)?;
    Ok(Outcome::Holds)
}

/// Others hold the blocks that a long sequence has left, and lie there as other kinds of rows.
fn taken_over<B: Device>(backend: &B) -> CaseResult {
    for full_precision_prefix in [0, 2] {
        let spec = spec(backend, INT8)
            .paged(16, 12)
            .window_left(12)
            .full_precision_prefix(full_precision_prefix);
        let mut world = World::new(backend, spec.build()?)?;
        for id in 1..3 {
            world.prompt(id, &text(id as u32, 3), 8)?;
        }
        world.prompt(3, &text(3, 150), 8)?;
        for id in 1..3 {
            world.release(id)?;
        }
        for id in 4..11 {
            world.prompt(id, &text(id as u32, 10), 16)?;
        }
        world.recalibrate(0.05).at(format!("{full_precision_prefix} tokens in 16 bits"))?;
    }
    Ok(Outcome::Holds)
}

/// Geometries with forks, shared prefixes and pins: with a window, in the full-precision prefix,
/// with a tail, in two groups, contiguous.
fn geometries<B: Device>(backend: &B) -> Result<Vec<CacheSpec>, CaseError> {
    let base = |format| spec(backend, format).layers(2).kv_heads(2);
    let tail = |spec: CacheSpecBuilder| spec.paged(8, 60).tail(true);
    let specs = [
        base(INT8).paged(4, 40),
        base(INT8).paged(4, 40).window_left(6).sink_tokens(2),
        base(L6).paged(16, 20).window_left(9).full_precision_prefix(2),
        base(INT8).contiguous(6, 80).full_precision_prefix(3),
        tail(base(L6)).full_precision_prefix(1),
        tail(base(INT8))
            .window_left(7)
            .sink_tokens(1)
            .full_precision_prefix(2)
            .key_mean(KeyMean::PerBlock),
        base(INT8).paged(4, 40).group([1], |group| group.paged(6, 40).window_left(5)),
        tail(base(L6)).group([1], |group| {
            group.tail(false).format(KvFormat::F32).paged(4, 60).window_left(3)
        }),
        base(KvFormat::Q8_0)
            .transform(Transform::On)
            .formats(KvFormat::Q8_0, KvFormat::F16)
            .paged(4, 40),
    ];
    let built: Result<Vec<_>, _> = specs.into_iter().map(CacheSpecBuilder::build).collect();
    Ok(built?)
}

/// Sequences that share, fork, wrap and were cut.
fn settle<B: Device>(world: &mut World<B>) -> Result<(), CaseError> {
    world.prompt(1, &text(1, 37), 5)?;
    world.fork(1, 2)?;
    world.bring(&[(2, &[5, 6, 7])])?;
    world.fork(2, 3)?;
    world.bring(&[(1, &[1]), (3, &[3, 3])])?;
    if !world.cache.spec().groups().iter().any(|group| group.slot_map().has_tail()) {
        world.truncate(3, 41)?;
    }
    world.cache.pin_prefix(&text(1, 37), StartOptions::default());
    // Takes over what the others hold, up to the last token but one.
    let reused = world.prompt(4, &[text(1, 33), text(4, 2)].concat(), 9)?;
    let contiguous = world.cache.spec().groups()[0].is_contiguous();
    let windows = world.cache.spec().groups().iter().any(|group| group.window().is_some());
    ensure(reused > 0 || contiguous || windows, || "nothing is shared".to_owned())?;
    world.prompt(5, &text(5, 2), 2).map(drop)
}

fn every_geometry<B: Device>(backend: &B) -> CaseResult {
    for (number, spec) in geometries(backend)?.into_iter().enumerate() {
        let mut world = World::new(backend, spec)?;
        let done = settle(&mut world).and_then(|()| world.recalibrate(0.4)).and_then(|()| {
            world.bring(&[(1, &[8]), (2, &[2]), (3, &[1, 2, 3]), (5, &[4; 9])])?;
            world.check()
        });
        done.at(format!("geometry {number}"))?;
    }
    Ok(Outcome::Holds)
}

fn every_failure<B: Device>(backend: &B) -> CaseResult {
    // A window, one sequence a block, a tail in a window, two groups.
    let some = [1, 3, 5, 6];
    let all = geometries(backend)?.into_iter().enumerate();
    for (number, spec) in all.filter(|(number, _)| some.contains(number)) {
        let mut world = World::new(backend, spec)?;
        let failed = settle(&mut world).and_then(|()| world.fail_everywhere(0.4));
        let operations = failed.at(format!("geometry {number}"))?;
        ensure(operations > 8, || format!("only {operations} operations can fail"))?;
    }
    Ok(Outcome::Holds)
}
