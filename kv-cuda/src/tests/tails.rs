//! `write_tails`: sequences that grow, are truncated and grow again, compared with their whole
//! history.
use std::collections::BTreeMap;

use crate::params::FORMATS;
use half::f16;
use kv_core::backend::{Place, PlaneLayout, PlaneShape, SlotMap};
use kv_core::{BlockOrder, KvFormat};
use kv_quant::block::{self, BlockMean};

use super::device::{Device, round16};
use super::random::Random;
use super::rows::{Fixture, elements, ragged};
use crate::params::{Counts, Plan, Sequence, Tensor, WriteParams};

/// A model of one sequence: rows of [plane][head][position] as they are stored, before encoding.
#[derive(Debug, Default)]
struct SequenceModel {
    rows: [Vec<Vec<Vec<f32>>>; 2],
    len: u32,
    coded: u32,
    /// Blocks of the full-precision prefix and of codes, and those of the tail after them.
    codes: Vec<u32>,
    tail: Vec<u32>,
    /// Means of blocks, by plane, head and index in the table.
    means: BTreeMap<(usize, usize, u32), Vec<f32>>,
}

fn tail_blocks(map: &SlotMap, len: u32, coded: u32) -> u32 {
    (len - map.tail_begin(len, coded)).div_ceil(16 / map.wide_slots())
}

/// Returns the block and the place of a position.
fn place_block(model: &SequenceModel, map: &SlotMap, position: u32) -> (u32, Place) {
    let place = map.place_in(position, model.coded);
    let at = place.index as usize;
    let blocks = model.codes.len();
    (if at < blocks { model.codes[at] } else { model.tail[at - blocks] }, place)
}

impl SequenceModel {
    /// Grows by `new_len` rows that were added already. Returns the sequence of the open step,
    /// whose table is appended to `tables`.
    fn grow(
        &mut self,
        map: &SlotMap,
        new_len: u32,
        (pool, held): (&mut Vec<u32>, &mut Vec<u32>),
        tables: &mut Vec<u32>,
    ) -> Sequence {
        let (coded_before, len) = (self.coded, self.len + new_len);
        let coded = map.coded_after(coded_before, len);
        let sealed =
            if coded == coded_before { Vec::new() } else { std::mem::take(&mut self.tail) };
        let mut more = |blocks: &mut Vec<u32>, count: u32| {
            while blocks.len() < count as usize {
                blocks.push(pool.pop().unwrap());
            }
        };
        more(&mut self.codes, map.blocks(map.tail_begin(len, coded)));
        more(&mut self.tail, tail_blocks(map, len, coded));
        let table = tables.len() as u32;
        tables.extend(self.codes.iter().chain(&self.tail).chain(&sealed));
        let sealed_index = (self.codes.len() + self.tail.len()) as u32;
        held.extend(sealed);
        (self.len, self.coded) = (len, coded);
        Sequence {
            new_len,
            kv_len: len,
            coded,
            coded_before,
            sealed_index,
            table,
            ..Default::default()
        }
    }

    /// Truncates it.
    fn truncate(&mut self, map: &SlotMap, len: u32, pool: &mut Vec<u32>) {
        (self.coded, self.len) = (map.coded_truncated(self.coded, len), len);
        for head in self.rows.iter_mut().flatten() {
            head.truncate(len as usize);
        }
        let before_tail = map.blocks(map.tail_begin(len, self.coded)) as usize;
        pool.splice(0..0, self.codes.drain(before_tail..));
        let tail = tail_blocks(map, len, self.coded) as usize;
        pool.splice(0..0, self.tail.drain(tail..));
        // A block without codes gets a new mean.
        let coded = self.coded;
        self.means
            .retain(|(_, _, index), _| map.tokens(*index).max(map.full_precision_prefix()) < coded);
    }

    /// Writes the value of every position into the expected content of a plane.
    fn put(&mut self, fixture: &mut Fixture, which: usize) {
        let map = *fixture.layout.slot_map();
        for head in 0..self.rows[which].len() {
            for position in 0..self.len {
                let (block, place) = place_block(self, &map, position);
                let mut values = self.rows[which][head][position as usize].clone();
                if !place.is_wide && fixture.layout.has_block_means() {
                    let mean = self.mean(fixture, (which, head, place.index), block);
                    values.iter_mut().zip(&mean).for_each(|(value, mean)| *value -= mean);
                }
                fixture.put(block, place, head, &values);
            }
        }
    }

    /// Returns the mean of a block: computed from all its rows when first used, and written to the
    /// expected content.
    fn mean(&mut self, fixture: &mut Fixture, key: (usize, usize, u32), block: u32) -> Vec<f32> {
        let (plane, head, index) = key;
        let map = *fixture.layout.slot_map();
        let rows = &self.rows[plane][head];
        let begin = map.tokens(index).max(map.full_precision_prefix());
        let end =
            map.tokens(index + 1).min(self.coded.max(map.full_precision_prefix())).min(self.len);
        let mean = self.means.entry(key).or_insert_with(|| {
            let mut mean = BlockMean::default();
            mean.reset(fixture.layout.head_dim() as usize);
            rows[begin as usize..end as usize].iter().for_each(|row| mean.add(row));
            mean.finish().to_vec()
        });
        let at = fixture.layout.block_bytes() * u64::from(block)
            + fixture.layout.mean_begin(head as u32);
        let bytes = mean.iter().flat_map(|mean| f16::from_f32(*mean).to_le_bytes());
        for (to, byte) in fixture.image[at as usize..].iter_mut().zip(bytes) {
            *to = byte;
        }
        mean.clone()
    }
}

#[derive(Debug, Clone, Copy)]
struct Case {
    formats: [KvFormat; 2],
    dim: u32,
    order: BlockOrder,
    transforms: bool,
    means: bool,
    full_precision_prefix: u32,
}

const HEADS: u32 = 2;
const SEQUENCES: usize = 3;
const BLOCKS: u32 = 160;

fn layout(case: Case, plane: usize, wide_slots: u32) -> PlaneLayout {
    let shape = PlaneShape {
        num_blocks: BLOCKS,
        block_size: 16,
        num_kv_heads: HEADS,
        head_dim: case.dim,
        order: case.order,
        format: case.formats[plane],
    };
    let layout = PlaneLayout::new(shape).unwrap().with_transform(case.transforms);
    let layout = layout.with_wide_rows(case.full_precision_prefix, true, wide_slots).unwrap();
    let means = case.means && plane == 0 && case.formats[0].is_quantised();
    if means { layout.with_block_means().unwrap() } else { layout }
}

/// Adds new rows to every sequence model, and returns the tensor with them.
fn append(
    models: &mut [SequenceModel; SEQUENCES],
    new_lens: [u32; SEQUENCES],
    (fixture, which): (&Fixture, usize),
    device: &mut Device,
    random: &mut Random,
) -> Tensor {
    let (dim, format) = (fixture.layout.head_dim(), fixture.layout.format());
    let mut all = Vec::new();
    for (model, new_len) in models.iter_mut().zip(new_lens) {
        for head in (0..HEADS as usize).cycle().take((new_len * HEADS) as usize) {
            let row = random.row(dim as usize);
            let mut stored = fixture.stored(head, &row);
            if format.is_quantised() {
                for value in &mut stored {
                    *value = block::round_wide(*value);
                }
            }
            model.rows[which][head].push(stored);
            all.extend(row);
        }
    }
    let (bytes, _) = elements(0, &all);
    ragged(device.put(&bytes), 0, new_lens.iter().sum(), (HEADS, dim))
}

fn run(case: Case, seed: u64) {
    let mut random = Random(seed);
    let mut device = Device::open(random.below(4));
    let wide_slots = case.formats[0].wide_slots(case.dim).max(case.formats[1].wide_slots(case.dim));
    let mut fixtures: [Fixture; 2] = std::array::from_fn(|plane| {
        Fixture::new(&mut device, layout(case, plane, wide_slots), &mut random)
    });
    let map = *fixtures[0].layout.slot_map();
    let mut models: [SequenceModel; SEQUENCES] = Default::default();
    for model in &mut models {
        model.rows = std::array::from_fn(|_| vec![Vec::new(); HEADS as usize]);
    }
    let mut pool: Vec<u32> = (0..BLOCKS).collect();
    for step in 0..10 {
        for model in &mut models {
            if model.len > 0 && random.below(5) == 0 {
                model.truncate(&map, random.below(model.len + 1), &mut pool);
            }
        }
        let mut start = 0;
        let new_lens: [u32; SEQUENCES] = std::array::from_fn(|_| match random.below(4) {
            0 => random.below(40),
            1 => 0,
            _ => 1 + random.below(3),
        });
        let inputs = [0, 1].map(|plane| {
            append(&mut models, new_lens, (&fixtures[plane], plane), &mut device, &mut random)
        });
        // Tails that become codes are read in this step, so their blocks are not reused yet.
        let (mut sequences, mut tables, mut held) = (Vec::new(), Vec::new(), Vec::new());
        for (model, new_len) in models.iter_mut().zip(new_lens) {
            let sequence = model.grow(&map, new_len, (&mut pool, &mut held), &mut tables);
            sequences.push(Sequence { new_start: start, ..sequence });
            start += new_len;
        }
        let counts = Counts { sequences: SEQUENCES as u32, total_new: start, ..Default::default() };
        let plan = Plan {
            counts: device.put(&[counts]),
            sequences: device.put(&sequences),
            splits: 0,
            slots: 0,
            tables: device.put(&tables),
        };
        let [k, v] = inputs;
        let [k_plane, v_plane] = [fixtures[0].plane, fixtures[1].plane];
        let params = WriteParams { plan, k, v, k_plane, v_plane };
        let row_bytes = k_plane.row_bytes.max(v_plane.row_bytes);
        let shared = 4 * (2 * round16(4 * case.dim) + 256 + round16(row_bytes));
        let grid = [1 + random.below(4), 1 + random.below(4), 1];
        device.launch("write_tails", grid, shared, &params);
        pool.splice(0..0, held);
        for (plane, fixture) in fixtures.iter_mut().enumerate() {
            for (model, new_len) in models.iter_mut().zip(new_lens) {
                if new_len > 0 {
                    model.put(fixture, plane);
                }
            }
            fixture.check(
                &mut device,
                &format!("{case:?}, step {step}, plane {plane}, {sequences:?}"),
            );
        }
    }
}

#[test]
fn tails_are_quantised_block_by_block() {
    for (i, format) in FORMATS.iter().enumerate() {
        let case = Case {
            formats: [*format, FORMATS[(i + 7) % FORMATS.len()]],
            dim: [64, 33, 80][i % 3],
            order: [BlockOrder::Nhd, BlockOrder::Hnd][i % 2],
            transforms: i % 4 < 2,
            means: i % 3 < 2,
            full_precision_prefix: (i % 4) as u32,
        };
        run(case, i as u64);
        run(
            Case { means: true, transforms: true, full_precision_prefix: 2, ..case },
            1000 + i as u64,
        );
    }
}
