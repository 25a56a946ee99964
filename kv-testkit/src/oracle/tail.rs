//! The rows of one sequence in a layer with a tail: they stay in 16 bits until their block is full.
use std::collections::BTreeMap;

use kv_core::backend::SlotMap;
use kv_quant::block::BlockMean;

use super::Stored;

/// The rows of one sequence in one layer.
#[derive(Debug, Clone, PartialEq)]
pub struct Tail {
    map: SlotMap,
    len: u32,
    /// Leading tokens that are codes or in the full-precision prefix.
    coded: u32,
    /// Rows of K and V in the tail: transformed, in 16 bits where the format has codes.
    waiting: [Vec<f32>; 2],
    /// Means of the blocks of K that have codes, each `[heads, dim]`.
    means: BTreeMap<u32, Vec<f32>>,
}

impl Tail {
    /// Starts with no rows.
    pub fn new(map: SlotMap) -> Self {
        Self { map, len: 0, coded: 0, waiting: [Vec::new(), Vec::new()], means: BTreeMap::new() }
    }

    /// Returns the number of leading tokens that are codes.
    pub fn coded(&self) -> u32 {
        self.coded
    }

    /// Appends rows of K and V. Returns the first token whose kept form changed, and the kept rows
    /// from there on.
    pub fn grow(&mut self, stored: &[Stored; 2], rows: &[Vec<f32>; 2]) -> (u32, [Vec<f32>; 2]) {
        for ((waiting, stored), rows) in self.waiting.iter_mut().zip(stored).zip(rows) {
            waiting.extend(stored.waiting(rows));
        }
        let new = (rows[0].len() / stored[0].width()) as u32;
        let (old, len) = (self.len, self.len + new);
        self.len = len;
        let before = self.coded.max(self.map.full_precision_prefix()).min(len);
        self.coded = self.map.coded_after(self.coded, len);
        let codes = before..self.coded.max(before);
        if stored[0].has_block_means() {
            for position in codes.clone() {
                self.take_mean(&stored[0], position, codes.end);
            }
        }
        let kept = |plane: usize| {
            let keep = |position: u32| self.keep(&stored[plane], plane, position);
            (before.min(old)..len).flat_map(keep).collect()
        };
        (before.min(old), [kept(0), kept(1)])
    }

    /// Truncates the sequence.
    pub fn truncate(&mut self, len: u32) {
        self.coded = self.map.coded_truncated(self.coded, len);
        for waiting in &mut self.waiting {
            let width = waiting.len().checked_div(self.len as usize).unwrap_or(0);
            waiting.truncate(len as usize * width);
        }
        self.len = len;
        // The mean of a block is dropped with its last code.
        let (map, coded) = (self.map, self.coded);
        self.means.retain(|index, _| map.tokens(*index).max(map.full_precision_prefix()) < coded);
    }

    fn row(&self, stored: &Stored, plane: usize, position: u32) -> &[f32] {
        &self.waiting[plane][position as usize * stored.width()..][..stored.width()]
    }

    /// Computes the mean of the block of a token that becomes a code, over all its rows that do, in
    /// order.
    fn take_mean(&mut self, stored: &Stored, position: u32, end: u32) {
        let index = self.map.place(position).index;
        if self.means.contains_key(&index) {
            return;
        }
        let rows: Vec<_> = (position..end)
            .filter(|position| self.map.place(*position).index == index)
            .map(|position| self.row(stored, 0, position))
            .collect();
        let dim = stored.dim();
        let mut means = Vec::new();
        for head in 0..stored.width() / dim {
            let mut mean = BlockMean::default();
            mean.reset(dim);
            for row in &rows {
                mean.add(&row[head * dim..][..dim]);
            }
            means.extend_from_slice(mean.finish());
        }
        self.means.insert(index, means);
    }

    /// Returns the kept form of one token.
    fn keep(&self, stored: &Stored, plane: usize, position: u32) -> Vec<f32> {
        let mut row = self.row(stored, plane, position).to_vec();
        if position < self.map.full_precision_prefix() || position >= self.coded {
            return row;
        }
        let mean = self.means.get(&self.map.place(position).index).filter(|_| plane == 0);
        if let Some(mean) = mean {
            row.iter_mut().zip(mean).for_each(|(x, mean)| *x -= mean);
        }
        for (row, head) in row.chunks_mut(stored.dim()).zip(0..) {
            stored.code(head, row);
        }
        if let Some(mean) = mean {
            row.iter_mut().zip(mean).for_each(|(x, mean)| *x += mean);
        }
        row
    }
}
