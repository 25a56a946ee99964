//! Recalibration under windows, forks, tails and pins: every row that a sequence can read keeps its
//! values, no other block changes, and a device failure at any operation leaves the cache as it
//! was.
use std::ops::Range;

use kv_core::backend::{AnyBackend, Plane};
use kv_core::calibration::{Calibration, LayerCalibration, PlaneCalibration};
use kv_core::spec::{CacheSpecBuilder, KeyMean, Transform};
use kv_core::{
    Axes, CacheError, CacheSpec, DType, GroupId, KvCache, KvFormat, ScaleGroup, Scaling,
    SequenceId, StartOptions, StepInput, TensorView,
};

use crate::case::{At, Case, CaseError, CaseResult, Outcome, ensure, same};
use crate::device::{Place, Staged, dim};
use crate::fault::{FaultInjector, FaultKind};
use crate::fixture::{dense, seq};
use crate::provenance;
use crate::suite::case;

pub(super) fn cases() -> Vec<Case> {
    vec![
        case("quant/recalibrated_window_that_reuses_its_blocks", wrapped),
        case("quant/recalibrated_window_leaves_other_sequences_alone", taken_over),
        case("quant/recalibrated_every_geometry", every_geometry),
        case("quant/recalibration_fails_at_every_operation", every_failure),
    ]
}

const INT8: KvFormat = KvFormat::Int8(Scaling::Row);
const L6: KvFormat = KvFormat::L6(ScaleGroup::Row);

/// Limit of errors. Rows are uniform in -1..1, and two roundings of these formats stay well below
/// it.
const TOLERANCE: f32 = 0.15;

/// A cache and the tokens of its sequences.
struct Fixture {
    faults: FaultInjector<AnyBackend>,
    device: AnyBackend,
    cache: KvCache,
    texts: Vec<(SequenceId, Vec<u32>)>,
}

/// The readable rows of one sequence in one plane, from a position on.
#[derive(Debug, PartialEq)]
struct Readable {
    sequence: SequenceId,
    layer: u16,
    plane: Plane,
    begin: u32,
    values: Vec<f32>,
}

impl Fixture {
    fn new(backend: &AnyBackend, spec: CacheSpec) -> Result<Self, CaseError> {
        let faults = FaultInjector::new(backend.clone());
        let device = AnyBackend::new(faults.clone());
        let cache = KvCache::new(device.clone(), spec)?;
        Ok(Self { faults, device, cache, texts: Vec::new() })
    }

    /// Starts a sequence on a prompt and computes the rest, `chunk` tokens a step.
    fn prompt(&mut self, id: u64, prompt: &[u32], chunk: usize) -> Result<u32, CaseError> {
        let reused = self.cache.start(seq(id), prompt, StartOptions::default())?;
        self.texts.push((seq(id), prompt[..reused as usize].to_vec()));
        for tokens in prompt[reused as usize..].chunks(chunk) {
            self.append(&[(id, tokens)])?;
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

    /// Runs one step with these tokens.
    fn append(&mut self, batch: &[(u64, &[u32])]) -> Result<(), CaseError> {
        let mut hashes = Vec::new();
        for (id, tokens) in batch {
            let text = self.texts.iter_mut().find(|(known, _)| *known == seq(*id));
            let (_, text) = text.ok_or("an unknown sequence")?;
            let before = text.len();
            text.extend(*tokens);
            let all = provenance::prefix_hashes(text, &StartOptions::default());
            hashes.extend_from_slice(&all[before..]);
        }
        let inputs: Vec<_> =
            batch.iter().map(|(id, tokens)| StepInput::tokens(seq(*id), tokens)).collect();
        let spec = self.cache.state().spec().clone();
        let mut step = self.cache.begin_step(&inputs)?;
        for layer in 0..spec.num_layers() {
            let rows = [Plane::Key, Plane::Value].map(|plane| {
                let dims = shape(&spec, layer, plane);
                let values = provenance::rows(&hashes, layer, plane, dims[0] * dims[1]);
                (values, [hashes.len() as u32, dims[0] as u32, dims[1] as u32])
            });
            let [k, v] = &rows;
            let [k, v] = [k, v].map(|(values, dims)| TensorView::host(values, dims));
            step.write(layer, k, v, Axes::Thd)?;
        }
        Ok(step.commit()?)
    }

    /// Returns the positions of a sequence that its blocks of a group still hold.
    fn kept(&self, id: SequenceId, group: GroupId) -> [Range<u32>; 2] {
        let map = self.cache.state().spec().groups()[usize::from(group.0)].slot_map();
        let len = self.cache.state().seq_len(id).unwrap_or(0);
        let vacant = self.cache.state().vacant_entries(id, group).unwrap_or_default();
        if vacant.is_empty() {
            return [0..len, len..len];
        }
        [0..map.tokens(vacant.start).min(len), map.tokens(vacant.end).min(len)..len]
    }

    /// Reads all rows that sequences can read.
    fn read(&mut self) -> Result<Vec<Readable>, CaseError> {
        let spec = self.cache.state().spec().clone();
        let mut all = Vec::new();
        let ids: Vec<_> = self.texts.iter().map(|(id, _)| *id).collect();
        for (layer, sequence) in
            (0..spec.num_layers()).flat_map(|l| ids.iter().map(move |s| (l, *s)))
        {
            let group = spec.locate(layer.into()).ok_or("a layer of no group")?.0;
            for range in self.kept(sequence, group).into_iter().filter(|range| !range.is_empty()) {
                for plane in [Plane::Key, Plane::Value] {
                    let layout = dense(Axes::Thd, &[range.len()], shape(&spec, layer, plane));
                    let made = (layout, DType::F32);
                    let queue = self.cache.queue_mut();
                    let mut out = Staged::output(&self.device, queue, made, Place::Device)?;
                    let part = (sequence, range.start, range.len() as u32);
                    let format = Axes::Thd;
                    self.cache.gather(layer, plane, &[part], out.view_mut(), format)?;
                    let facts = kv_core::backend::Backend::capabilities(&self.device);
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
        let spec = self.cache.state().spec().clone();
        for Readable { sequence, layer, plane, begin, values } in self.read()? {
            let [heads, dim] = shape(&spec, layer, plane);
            let hashes = provenance::prefix_hashes(self.text(sequence), &StartOptions::default());
            let rows = values.len() / (heads * dim);
            let own = &hashes[begin as usize..begin as usize + rows];
            let expected = provenance::rows(own, layer, plane, heads * dim);
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

    /// Returns every byte of every plane.
    fn bytes(&mut self) -> Result<Vec<Vec<Vec<u8>>>, CaseError> {
        let groups = 0..self.cache.state().spec().groups().len() as u8;
        groups.map(|group| crate::suite::bytes(&mut self.cache, GroupId(group))).collect()
    }

    /// Recalibrates: all readable rows stay within rounding, and blocks that no sequence holds keep
    /// their bytes.
    fn recalibrate(&mut self, mean: f32) -> Result<(), CaseError> {
        self.check().at("before recalibration")?;
        let held = self.held();
        let before = self.bytes()?;
        let key = self.cache.state().encoding_key();
        self.cache.recalibrate(calibration(self.cache.state().spec(), mean))?;
        ensure(self.cache.state().encoding_key() != key, || {
            "other constants, the same key".to_owned()
        })?;
        self.check().at("after recalibration")?;
        let after = self.bytes()?;
        for (group, held) in held.iter().enumerate() {
            let layouts = self.cache.state().spec().groups()[group].layouts();
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

    /// Returns the blocks that sequences hold, by group.
    fn held(&self) -> Vec<Vec<u32>> {
        let groups = 0..self.cache.state().spec().groups().len() as u8;
        let of = |group| {
            let mut held = Vec::new();
            for (id, _) in &self.texts {
                let vacant = self.cache.state().vacant_entries(*id, group).unwrap_or_default();
                let table = self.cache.state().block_table(*id, group).unwrap_or_default();
                let live = (0..).zip(table).filter(|(at, _)| !vacant.contains(at));
                held.extend(live.map(|(_, block)| block.0));
            }
            held
        };
        groups.map(|group| of(GroupId(group))).collect()
    }

    /// Makes the first operation of a recalibration fail, then the second, and so on, each time
    /// from the same state.
    fn fail_everywhere(&mut self, mean: f32) -> Result<u64, CaseError> {
        let given = calibration(self.cache.state().spec(), mean);
        let (before, key) = (self.read()?, self.cache.state().encoding_key());
        let probes = self.probes();
        for operation in 0.. {
            let some = if operation % 3 == 0 { &FaultKind::ALL[..] } else { &FaultKind::ALL[1..] };
            for failing in some.iter().copied() {
                let place = || format!("operation {operation} fails, {failing:?}");
                self.faults.fail(operation, failing);
                let exchanged = self.cache.recalibrate(given.clone());
                if !self.faults.clear() {
                    exchanged.at(place())?;
                    // No operation was left to fail, so the recalibration succeeded.
                    self.check().at("after recalibration")?;
                    return Ok(operation);
                }
                let is_told = matches!(exchanged, Err(CacheError::Device(_)));
                ensure(is_told, || format!("{}: {exchanged:?}", place()))?;
                same(format!("{}: encoding key", place()), self.cache.state().encoding_key(), key)?;
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
            self.cache.state().probe(&longer, StartOptions::default())
        };
        self.texts.iter().map(probe).collect()
    }
}

/// Returns heads and head dim of a plane.
fn shape(spec: &CacheSpec, layer: u16, plane: Plane) -> [usize; 2] {
    let group = spec.locate(layer.into()).map_or(0, |(group, _)| usize::from(group.0));
    let layout = &spec.groups()[group].layouts()[usize::from(plane == Plane::Value)];
    [layout.num_kv_heads() as usize, layout.head_dim() as usize]
}

/// Makes constants with the same mean in all keys, and a balance for keys with block means.
fn calibration(spec: &CacheSpec, mean: f32) -> Calibration {
    let layer = |layer| {
        let [heads, dim] = shape(spec, layer, Plane::Key);
        let (mean, balance) = (vec![mean; heads * dim], vec![1.0 + mean.abs(); heads * dim]);
        let k = PlaneCalibration { mean, balance, ..Default::default() };
        LayerCalibration { k, ..Default::default() }
    };
    Calibration::new((0..spec.num_layers()).map(layer).collect())
}

/// Makes token ids that differ from those of another `salt`.
fn text(salt: u32, len: usize) -> Vec<u32> {
    (0..len as u32).map(|at| salt * 1000 + at).collect()
}

fn spec(backend: &AnyBackend, format: KvFormat) -> CacheSpecBuilder {
    CacheSpec::builder().layers(1).kv_heads(1).head_dim(dim(backend, 32)).format(format)
}

/// A window of 6 tokens in 5 blocks: after 61 tokens its table names every block several times.
fn wrapped(backend: &AnyBackend) -> CaseResult {
    let mut fixture =
        Fixture::new(backend, spec(backend, INT8).paged(4, 5).window_left(6).build()?)?;
    fixture.prompt(1, &text(1, 61), 4)?;
    fixture.recalibrate(0.05)?;
    fixture.append(&[(1, &[9, 9, 9])])?;
    fixture.check().at("with new constants")?;
    fixture.recalibrate(-0.5)?;
    Ok(Outcome::Holds)
}

/// Other sequences hold the blocks that left a long sequence's window, with rows of other kinds.
fn taken_over(backend: &AnyBackend) -> CaseResult {
    for full_precision_prefix in [0, 2] {
        let spec = spec(backend, INT8)
            .paged(16, 12)
            .window_left(12)
            .full_precision_prefix(full_precision_prefix);
        let mut fixture = Fixture::new(backend, spec.build()?)?;
        for id in 1..3 {
            fixture.prompt(id, &text(id as u32, 3), 8)?;
        }
        fixture.prompt(3, &text(3, 150), 8)?;
        for id in 1..3 {
            fixture.release(id)?;
        }
        for id in 4..11 {
            fixture.prompt(id, &text(id as u32, 10), 16)?;
        }
        fixture.recalibrate(0.05).at(format!("{full_precision_prefix} rows in 16 bits"))?;
    }
    Ok(Outcome::Holds)
}

/// Geometries with forks, shared prefixes and pins: with a window, with a full-precision prefix,
/// with a tail, with two groups, contiguous.
fn geometries(backend: &AnyBackend) -> Result<Vec<CacheSpec>, CaseError> {
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

/// Sequences that share, fork, wrap and were truncated.
fn settle(fixture: &mut Fixture) -> Result<(), CaseError> {
    fixture.prompt(1, &text(1, 37), 5)?;
    fixture.fork(1, 2)?;
    fixture.append(&[(2, &[5, 6, 7])])?;
    fixture.fork(2, 3)?;
    fixture.append(&[(1, &[1]), (3, &[3, 3])])?;
    if !fixture.cache.state().spec().groups().iter().any(|group| group.slot_map().has_tail()) {
        fixture.truncate(3, 41)?;
    }
    fixture.cache.pin_prefix(&text(1, 37), StartOptions::default());
    // Reuses the tokens that the others hold, up to the last token but one.
    let reused = fixture.prompt(4, &[text(1, 33), text(4, 2)].concat(), 9)?;
    let contiguous = fixture.cache.state().spec().groups()[0].is_contiguous();
    let windows =
        fixture.cache.state().spec().groups().iter().any(|group| group.window().is_some());
    ensure(reused > 0 || contiguous || windows, || "nothing is shared".to_owned())?;
    fixture.prompt(5, &text(5, 2), 2).map(drop)
}

fn every_geometry(backend: &AnyBackend) -> CaseResult {
    for (number, spec) in geometries(backend)?.into_iter().enumerate() {
        let mut fixture = Fixture::new(backend, spec)?;
        let done = settle(&mut fixture).and_then(|()| fixture.recalibrate(0.4)).and_then(|()| {
            fixture.append(&[(1, &[8]), (2, &[2]), (3, &[1, 2, 3]), (5, &[4; 9])])?;
            fixture.check()
        });
        done.at(format!("geometry {number}"))?;
    }
    Ok(Outcome::Holds)
}

fn every_failure(backend: &AnyBackend) -> CaseResult {
    // A window, one sequence per block, a tail in a window, two groups.
    let some = [1, 3, 5, 6];
    let all = geometries(backend)?.into_iter().enumerate();
    for (number, spec) in all.filter(|(number, _)| some.contains(number)) {
        let mut fixture = Fixture::new(backend, spec)?;
        let failed = settle(&mut fixture).and_then(|()| fixture.fail_everywhere(0.4));
        let operations = failed.at(format!("geometry {number}"))?;
        ensure(operations > 8, || format!("only {operations} operations can fail"))?;
    }
    Ok(Outcome::Holds)
}
