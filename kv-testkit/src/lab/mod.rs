//! A cache on a device beside the naive model, moved together and compared.
//!
//! Every pool is filled with NaN before use, so that each comparison also proves that no stale slot
//! reaches a result.
pub(crate) mod agree;
mod how;
mod prompt;
mod step;
mod unseen;

use std::collections::BTreeMap;

use kv_core::{
    CacheError, CacheSpec, Calibration, DType, KvCache, KvFormat, LayerId, Plane, QkvFormat,
    Scaling, SequenceId, SlotMap, StartOptions, StepInput, Usage,
};

use crate::case::{At, CaseError, ensure, same};
use crate::device::{Device, Place, Staged};
use crate::model::{Model, Rows};
use crate::oracle::{Stored, Turn};
use crate::rng::Rng;
use crate::tokens::{Room, TokenLayout};
pub(crate) use how::{DTYPES, FORMATS, options};
pub use how::{Finish, How};
pub use step::{Brings, Outputs};
pub(crate) use step::{calibrate, dense, join, judge_layer, judge_values, liken};
pub(crate) use unseen::Spoiled;

/// What one layer stores.
#[derive(Debug, Clone)]
pub struct LayerShape {
    /// Heads of K and V.
    pub heads: usize,
    /// Values of one row of K and of V.
    pub dims: [usize; 2],
    /// What K and V keep of a row.
    pub stored: [Stored; 2],
}

impl LayerShape {
    /// Values of one token of K or V.
    pub fn width(&self, plane: usize) -> usize {
        self.heads * self.dims[plane]
    }
    /// The transform of its rows.
    pub fn turn(&self) -> Turn {
        let [k, v] = self.stored.each_ref().map(|plane| plane.turned().cloned());
        Turn { k, v }
    }
}

/// A cache, its model, and a source of numbers.
#[derive(Debug)]
pub struct Lab<B: Device> {
    /// The device.
    pub backend: B,
    /// What is tested.
    pub cache: KvCache<B>,
    /// What it must equal.
    pub model: Model,
    /// Where inputs come from.
    pub rng: Rng,
    layers: Vec<LayerShape>,
    /// Tokens of the next step, where they are told.
    told: BTreeMap<SequenceId, Vec<u32>>,
}

/// A sequence id.
pub(crate) fn seq(id: u64) -> SequenceId {
    SequenceId(id)
}

/// Shapes of all layers of a geometry.
fn layer_shapes(
    spec: &CacheSpec,
    calibration: Option<&Calibration>,
) -> Result<Vec<LayerShape>, CaseError> {
    let shape = |layer| {
        let layer = LayerId(layer);
        let (group, _) = spec.locate(layer).ok_or("a layer of no group")?;
        let layouts = *spec.groups()[usize::from(group.0)].layouts();
        let plane = |plane, index: usize| {
            Stored::new(layer, plane, layouts[index], calibration).map_err(CacheError::from)
        };
        let [k, v] = layouts;
        Ok(LayerShape {
            heads: k.num_kv_heads() as usize,
            dims: [k.head_dim() as usize, v.head_dim() as usize],
            stored: [plane(Plane::Key, 0)?, plane(Plane::Value, 1)?],
        })
    };
    (0..spec.num_layers()).map(shape).collect()
}

impl<B: Device> Lab<B> {
    /// A cache whose every reachable slot holds NaN and is free.
    ///
    /// # Errors
    /// Whatever the cache answers.
    pub fn new(backend: &B, spec: CacheSpec, seed: u64) -> Result<Self, CaseError> {
        Self::open(backend, spec, None, seed)
    }

    /// The same with the constants of a model.
    ///
    /// # Errors
    /// Whatever the cache answers.
    pub fn calibrated(
        backend: &B,
        spec: CacheSpec,
        calibration: Calibration,
        seed: u64,
    ) -> Result<Self, CaseError> {
        Self::open(backend, spec, Some(calibration), seed)
    }

    fn open(
        backend: &B,
        spec: CacheSpec,
        calibration: Option<Calibration>,
        seed: u64,
    ) -> Result<Self, CaseError> {
        let layers = layer_shapes(&spec, calibration.as_ref())?;
        let widths = layers.iter().map(|l| [l.width(0), l.width(1)]).collect();
        let cache = match calibration {
            None => KvCache::new(backend.clone(), spec)?,
            Some(given) => KvCache::with_calibration(backend.clone(), spec, given)?,
        };
        let maps = layers.iter().map(|layer| layer.stored[0].tail()).collect();
        let mut lab = Self {
            backend: backend.clone(),
            cache,
            model: Model::new(widths).with_tails(maps),
            rng: Rng::new(seed),
            layers,
            told: BTreeMap::new(),
        };
        lab.poison().at("filling the pool with NaN")?;
        Ok(lab)
    }

    /// Exchanges the constants, and stores all rows anew. Not for layers with a tail.
    ///
    /// # Errors
    /// The cache's refusal.
    pub fn recalibrate(&mut self, calibration: Calibration) -> Result<(), CaseError> {
        let layers = layer_shapes(self.cache.spec(), Some(&calibration))?;
        self.cache.recalibrate(calibration)?;
        for id in self.model.sequences() {
            for (layer, (old, new)) in self.layers.iter().zip(&layers).enumerate() {
                for (index, (old, new)) in old.stored.iter().zip(&new.stored).enumerate() {
                    let rows = old.read(&self.model.layer(id, layer)[index]);
                    self.model.replace(id, (layer, index), 0, &new.kept(0, &rows));
                }
            }
        }
        self.layers = layers;
        Ok(())
    }

    /// Shapes of the layers.
    pub fn layers(&self) -> &[LayerShape] {
        &self.layers
    }

    fn poison(&mut self) -> Result<(), CaseError> {
        let max_len = self.cache.spec().max_seq_len();
        for id in 0.. {
            let groups = self.cache.spec().groups().iter().zip(0..);
            let room = groups.map(|(group, id)| {
                fits(group.slot_map(), self.cache.free_blocks(kv_core::GroupId(id)))
            });
            let len = room.min().unwrap_or(0).min(max_len);
            if len == 0 || self.cache.num_sequences() >= self.cache.spec().max_sequences() {
                break;
            }
            self.cache.start(seq(u64::MAX - id), &[], StartOptions::default())?;
            self.write_nan(seq(u64::MAX - id), len as usize)?;
        }
        Ok(self.cache.reset()?)
    }

    fn write_nan(&mut self, sequence: SequenceId, len: usize) -> Result<(), CaseError> {
        let mut staged = Vec::new();
        for layer in self.layers.clone() {
            for (dim, stored) in layer.dims.into_iter().zip(&layer.stored) {
                let layout =
                    TokenLayout::new(QkvFormat::Thd, &[len], [layer.heads, dim], Room::default());
                let tensor = layout.pack(DType::F32, &[], poison(stored.format()));
                let queue = self.cache.queue_mut();
                staged.push(Staged::new(&self.backend, queue, (layout, tensor), Place::Host)?);
            }
        }
        let mut step = self.cache.begin_step(&[StepInput::count(sequence, len as u32)])?;
        for (layer, kv) in (0_u16..).zip(staged.chunks_exact(2)) {
            step.write(layer, kv[0].view(), kv[1].view(), QkvFormat::Thd)?;
        }
        Ok(step.commit()?)
    }

    /// Begins a sequence.
    ///
    /// # Errors
    /// The cache's refusal; the model is as before then, here and below.
    pub fn start(&mut self, id: u64) -> Result<(), CaseError> {
        self.cache.start(seq(id), &[], StartOptions::default())?;
        self.model.start(seq(id));
        Ok(())
    }
    /// Shares a sequence.
    ///
    /// # Errors
    /// The cache's refusal.
    pub fn fork(&mut self, parent: u64, child: u64) -> Result<(), CaseError> {
        self.cache.fork(seq(parent), seq(child))?;
        self.model.fork(seq(parent), seq(child));
        Ok(())
    }
    /// Takes tokens back.
    ///
    /// # Errors
    /// The cache's refusal.
    pub fn truncate(&mut self, id: u64, len: u32) -> Result<(), CaseError> {
        self.cache.truncate(seq(id), len)?;
        self.model.truncate(seq(id), len);
        Ok(())
    }
    /// Ends a sequence.
    ///
    /// # Errors
    /// The cache's refusal.
    pub fn release(&mut self, id: u64) -> Result<(), CaseError> {
        self.cache.release(seq(id))?;
        self.model.release(seq(id));
        Ok(())
    }
    /// Ends all sequences.
    ///
    /// # Errors
    /// The cache's refusal.
    pub fn reset(&mut self) -> Result<(), CaseError> {
        self.cache.reset()?;
        self.model.reset();
        Ok(())
    }

    /// What a refusal must leave as it is, the peak aside.
    pub fn state(&self) -> (Usage, Vec<(SequenceId, Option<u32>)>) {
        let mut ids: Vec<_> =
            self.cache.sequences().map(|id| (id, self.cache.seq_len(id))).collect();
        ids.sort_unstable();
        let mut usage = self.cache.usage();
        usage.blocks_peak = 0;
        (usage, ids)
    }

    /// Compares every length and every stored row with the model.
    ///
    /// # Errors
    /// The first difference.
    pub fn check(&mut self) -> Result<(), CaseError> {
        let ids = self.model.sequences();
        same("live sequences", self.cache.num_sequences() as usize, ids.len())?;
        for id in &ids {
            same(format!("length of sequence {id}"), self.cache.seq_len(*id), self.model.len(*id))?;
        }
        for layer in 0..self.layers.len() {
            for (index, plane) in [Plane::Key, Plane::Value].into_iter().enumerate() {
                let rows = self.gather(layer, plane, &ids, QkvFormat::Thd)?;
                for (id, got) in ids.iter().zip(rows) {
                    let kept = &self.model.layer(*id, layer)[index];
                    agree::reads(&self.layers[layer].stored[index], kept, &got, DType::F32)
                        .at(format!("cached {plane:?} of layer {layer}, sequence {id}"))?;
                }
            }
        }
        Ok(())
    }

    /// Takes over what the device keeps of new rows, after a look at whether it may.
    ///
    /// # Errors
    /// Rows that are none of those the definition of the format allows.
    fn adopt(
        &mut self,
        model: &mut Model,
        new: &[(SequenceId, u32, u32)],
        rows: &[Rows],
    ) -> Result<(), CaseError> {
        for layer in 0..self.layers.len() {
            for (index, plane) in [Plane::Key, Plane::Value].into_iter().enumerate() {
                let stored = self.layers[layer].stored[index].clone();
                // Rows that waited may be codes of several steps: they are compared, not adopted.
                if !stored.format().is_quantised() || stored.tail().is_some() {
                    continue;
                }
                let got = self.gather_ranges(layer, plane, new, QkvFormat::Thd)?;
                for (((id, first, _), rows), got) in new.iter().zip(rows).zip(got) {
                    let kept = agree::adopted(&stored, *first, &rows[layer][index], &got).at(
                        format!("new {plane:?} of layer {layer}, sequence {id}, from {first}"),
                    )?;
                    model.replace(*id, (layer, index), *first, &kept);
                }
            }
        }
        Ok(())
    }

    /// Rows of some sequences as a gather returns them.
    ///
    /// # Errors
    /// The cache's refusal, or padding that is not zero.
    pub fn gather(
        &mut self,
        layer: usize,
        plane: Plane,
        ids: &[SequenceId],
        format: QkvFormat,
    ) -> Result<Vec<Vec<f32>>, CaseError> {
        let range = |id: &SequenceId| (*id, 0, self.cache.seq_len(*id).unwrap_or(0));
        let ranges: Vec<_> = ids.iter().map(range).collect();
        self.gather_ranges(layer, plane, &ranges, format)
    }

    fn gather_ranges(
        &mut self,
        layer: usize,
        plane: Plane,
        ranges: &[(SequenceId, u32, u32)],
        format: QkvFormat,
    ) -> Result<Vec<Vec<f32>>, CaseError> {
        let lens: Vec<_> = ranges.iter().map(|range| range.2 as usize).collect();
        let shape = &self.layers[layer];
        let dim = shape.dims[usize::from(plane == Plane::Value)];
        let layout = TokenLayout::new(format, &lens, [shape.heads, dim], Room::default());
        let queue = self.cache.queue_mut();
        let mut out = Staged::output(&self.backend, queue, (layout, DType::F32), Place::Device)?;
        self.cache.gather(layer as u16, plane, ranges, out.view_mut(), format)?;
        let capabilities = self.backend.capabilities().clone();
        let tensor = out.read(&capabilities, self.cache.queue_mut())?;
        Ok(layout.unpack("gathered rows", tensor, &lens, 0.0)?)
    }
}

/// The longest sequence that can be written to so many blocks at once.
fn fits(map: &SlotMap, blocks: u32) -> u32 {
    let held = |len: &u32| map.blocks_in(*len, map.coded_after(0, *len)) <= blocks;
    (0..=map.tokens(blocks)).rev().find(held).unwrap_or(0)
}

/// What a stale slot is filled with: NaN, or the largest code where there is none.
fn poison(format: KvFormat) -> f32 {
    match format {
        KvFormat::Int8(Scaling::Tensor | Scaling::Head) => 1e30,
        _ => f32::NAN,
    }
}

/// Compares rows bit by bit, zeros of either sign and NaNs alike.
pub(crate) fn check_rows(got: &[f32], expected: &[f32], width: usize) -> Result<(), CaseError> {
    same("values", got.len(), expected.len())?;
    let other =
        |(got, expected): (&f32, &f32)| got != expected && !(got.is_nan() && expected.is_nan());
    match got.iter().zip(expected).position(other) {
        None => Ok(()),
        Some(i) => Err(CaseError::Broken(format!(
            "position {}, value {}: expected {}, got {}",
            i / width,
            i % width,
            expected[i],
            got[i]
        ))),
    }
}

/// Fails unless the state is as it was.
pub(crate) fn unchanged<B: Device>(
    lab: &mut Lab<B>,
    before: &(Usage, Vec<(SequenceId, Option<u32>)>),
    after_what: &str,
) -> Result<(), CaseError> {
    let after = lab.state();
    ensure(after == *before, || {
        format!("{after_what} changed the state: expected {before:?}, got {after:?}")
    })?;
    lab.check().at(format!("after {after_what}"))
}
