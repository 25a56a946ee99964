//! The naive cache: a map from sequence to rows.
use std::collections::BTreeMap;

use kv_core::SequenceId;
use kv_core::backend::SlotMap;

use crate::oracle::{Stored, Tail};

/// Cached rows of one sequence, by layer: K rows one after another, and V rows.
pub type Rows = Vec<[Vec<f32>; 2]>;

/// A cache without blocks or a device.
#[derive(Debug, Clone, PartialEq)]
pub struct Model {
    /// Number of values of one token, K and V, by layer.
    widths: Vec<[usize; 2]>,
    sequences: BTreeMap<SequenceId, Rows>,
    /// Slot maps of the layers that have a tail in 16 bits, and the rows of the tails.
    maps: Vec<Option<SlotMap>>,
    tails: BTreeMap<SequenceId, Vec<Option<Tail>>>,
}

impl Model {
    /// Creates an empty cache of layers with these numbers of values per token.
    pub fn new(widths: Vec<[usize; 2]>) -> Self {
        let maps = vec![None; widths.len()];
        Self { widths, sequences: BTreeMap::new(), maps, tails: BTreeMap::new() }
    }
    /// Adds tails in 16 bits to some layers.
    #[must_use]
    pub fn with_tails(mut self, maps: Vec<Option<SlotMap>>) -> Self {
        self.maps = maps;
        self
    }
    /// Starts a sequence.
    pub fn start(&mut self, sequence: SequenceId) {
        let empty = vec![[Vec::new(), Vec::new()]; self.widths.len()];
        self.sequences.insert(sequence, empty);
        let tails = self.maps.iter().map(|map| map.map(Tail::new)).collect();
        self.tails.insert(sequence, tails);
    }
    /// Appends rows to a layer with a tail; returns their stored form, or `None` for a layer
    /// without a tail. Earlier rows that become codes are replaced.
    pub fn grow(
        &mut self,
        sequence: SequenceId,
        layer: usize,
        stored: &[Stored; 2],
        rows: &[Vec<f32>; 2],
    ) -> Option<[Vec<f32>; 2]> {
        let len = self.len(sequence)?;
        let tail = self.tails.get_mut(&sequence)?.get_mut(layer)?.as_mut()?;
        let (first, kept) = tail.grow(stored, rows);
        let mut new = kept.clone();
        for (plane, (kept, new)) in kept.iter().zip(&mut new).enumerate() {
            let old = (len - first) as usize * self.widths[layer][plane];
            self.replace(sequence, (layer, plane), first, &kept[..old]);
            new.drain(..old);
        }
        Some(new)
    }
    /// Returns the number of leading tokens that are codes in the layer; all tokens without a tail.
    pub fn coded(&self, sequence: SequenceId, layer: usize) -> u32 {
        let tail = self.tails.get(&sequence).and_then(|tails| tails[layer].as_ref());
        tail.map_or_else(|| self.len(sequence).unwrap_or(0), Tail::coded)
    }
    /// Appends the rows of a step in their stored form.
    pub fn append(&mut self, sequence: SequenceId, rows: &Rows) {
        if let Some(cached) = self.sequences.get_mut(&sequence) {
            for (cached, new) in cached.iter_mut().flatten().zip(rows.iter().flatten()) {
                cached.extend_from_slice(new);
            }
        }
    }
    /// Replaces rows of one plane of one layer, from token `first` on.
    pub fn replace(&mut self, sequence: SequenceId, at: (usize, usize), first: u32, rows: &[f32]) {
        let (layer, plane) = at;
        if let Some(cached) = self.sequences.get_mut(&sequence) {
            let begin = first as usize * self.widths[layer][plane];
            cached[layer][plane][begin..begin + rows.len()].copy_from_slice(rows);
        }
    }
    /// Starts `child` with the rows of `parent`.
    pub fn fork(&mut self, parent: SequenceId, child: SequenceId) {
        let rows = self.sequences.get(&parent).cloned().unwrap_or_default();
        self.sequences.insert(child, rows);
        let tails = self.tails.get(&parent).cloned().unwrap_or_default();
        self.tails.insert(child, tails);
    }
    /// Truncates a sequence.
    pub fn truncate(&mut self, sequence: SequenceId, len: u32) {
        let widths = &self.widths;
        let tails = self.tails.get_mut(&sequence).into_iter().flatten();
        tails.flatten().for_each(|tail| tail.truncate(len));
        if let Some(rows) = self.sequences.get_mut(&sequence) {
            for (rows, widths) in rows.iter_mut().zip(widths) {
                for (rows, width) in rows.iter_mut().zip(widths) {
                    rows.truncate(len as usize * width);
                }
            }
        }
    }
    /// Releases a sequence.
    pub fn release(&mut self, sequence: SequenceId) {
        self.sequences.remove(&sequence);
        self.tails.remove(&sequence);
    }
    /// Releases all sequences.
    pub fn reset(&mut self) {
        self.sequences.clear();
        self.tails.clear();
    }
    /// Returns the number of tokens of a sequence.
    pub fn len(&self, sequence: SequenceId) -> Option<u32> {
        let rows = self.sequences.get(&sequence)?;
        let (rows, widths) = (rows.first()?, self.widths.first()?);
        Some((rows[0].len() / widths[0]) as u32)
    }
    /// Returns whether there is no sequence.
    pub fn is_empty(&self) -> bool {
        self.sequences.is_empty()
    }
    /// Returns K and V of one layer; empty for an unknown sequence.
    pub fn layer(&self, sequence: SequenceId, layer: usize) -> [Vec<f32>; 2] {
        self.sequences.get(&sequence).map(|rows| rows[layer].clone()).unwrap_or_default()
    }
    /// Returns the sequences in ascending order.
    pub fn sequences(&self) -> Vec<SequenceId> {
        self.sequences.keys().copied().collect()
    }
    /// Returns the number of blocks that all sequences need in the first layer's group when none is
    /// shared.
    pub fn blocks_unshared(&self, map: &SlotMap) -> u64 {
        let blocks =
            |id: &SequenceId| map.blocks_in(self.len(*id).unwrap_or(0), self.coded(*id, 0));
        self.sequences.keys().map(|id| u64::from(blocks(id))).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forks_diverge_and_truncation_forgets() {
        let [a, b] = [1, 2].map(SequenceId);
        let mut model = Model::new(vec![[2, 1]]);
        model.start(a);
        model.append(a, &vec![[vec![1.0, 2.0, 3.0, 4.0], vec![5.0, 6.0]]]);
        model.fork(a, b);
        model.truncate(b, 1);
        model.append(b, &vec![[vec![7.0, 8.0], vec![9.0]]]);
        assert_eq!(model.layer(a, 0), [vec![1.0, 2.0, 3.0, 4.0], vec![5.0, 6.0]]);
        assert_eq!(model.layer(b, 0), [vec![1.0, 2.0, 7.0, 8.0], vec![5.0, 9.0]]);
        assert_eq!((model.len(a), model.len(b)), (Some(2), Some(2)));
        model.replace(b, (0, 0), 1, &[6.0, 5.0]);
        assert_eq!(model.layer(b, 0)[0], [1.0, 2.0, 6.0, 5.0]);
        model.release(a);
        assert_eq!(model.len(a), None);
    }
}
