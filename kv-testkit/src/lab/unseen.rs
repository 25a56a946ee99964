//! Poisons cached rows that are masked from the queries of a step.
use std::collections::BTreeSet;

use kv_core::backend::Queue;
use kv_core::{CacheError, GroupId, LayerId, Plane, PlaneLayout, SequenceId, SlotMap};

use super::{Brings, How, Lab, seq};
use crate::case::CaseError;
use crate::device::Device;

/// Number of poisoned blocks and rows, over all layers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Spoiled {
    /// Blocks without a visible token.
    pub(crate) blocks: usize,
    /// Masked rows in blocks that have visible ones.
    pub(crate) rows: usize,
}

/// Bytes of a block: offset and length.
type Span = (u64, u64);

impl<B: Device> Lab<B> {
    /// Fills every cached row that no query of the next step sees with 0xFF, which is NaN wherever
    /// a format has one. A block without a visible row is filled whole, as if it belonged to
    /// another sequence by now. The model keeps the old rows, so later steps must not see them
    /// either.
    ///
    /// Not for steps that encode a tail, because they read all rows of it.
    ///
    /// # Errors
    /// The queue's refusal.
    pub(crate) fn spoil_unseen(
        &mut self,
        inputs: &[(u64, Brings)],
        how: &How,
    ) -> Result<Spoiled, CaseError> {
        let mut spoiled = Spoiled::default();
        for layer in 0..self.layers().len() {
            let located = self.cache.spec().locate(LayerId(layer as u16));
            let (group, index) = located.ok_or("a layer of no group")?;
            let oracle = how.oracle(&self.layers()[layer], &[]);
            for (id, brings) in inputs {
                let len = self.model.len(seq(*id)).unwrap_or(0);
                let (new, queries) = brings.counts();
                let after = len as usize + new;
                let is_seen =
                    |j: u32| (0..queries).any(|i| oracle.sees(i, queries, j as usize, after));
                let unseen: Vec<_> = (0..len).filter(|j| !is_seen(*j)).collect();
                let rest = (0..len).filter(|j| is_seen(*j)).collect();
                let coded = self.model.coded(seq(*id), layer);
                for plane in [Plane::Key, Plane::Value] {
                    let at = (seq(*id), group, index, plane);
                    let counts = self.spoil(at, coded, &unseen, &rest)?;
                    spoiled.blocks += counts.blocks;
                    spoiled.rows += counts.rows;
                }
            }
        }
        Ok(spoiled)
    }

    fn spoil(
        &mut self,
        (id, group, index, plane): (SequenceId, GroupId, usize, Plane),
        coded: u32,
        unseen: &[u32],
        seen: &BTreeSet<u32>,
    ) -> Result<Spoiled, CaseError> {
        let mut counts = Spoiled::default();
        let table = self.cache.block_table(id, group).unwrap_or_default().to_vec();
        let storage = self.cache.storage(group);
        let Some(view) = storage.and_then(|storage| storage.plane(index, plane)) else {
            return Ok(counts);
        };
        let layout = *view.layout();
        let map: SlotMap = *layout.slot_map();
        let used: BTreeSet<_> = seen.iter().map(|j| map.place_in(*j, coded).index).collect();
        let mut spans: Vec<(u32, Span)> = Vec::new();
        let blocks: BTreeSet<_> = unseen.iter().map(|j| map.place_in(*j, coded).index).collect();
        for block in blocks.difference(&used) {
            counts.blocks += 1;
            spans.push((table[*block as usize].0, (0, layout.block_bytes())));
        }
        for j in unseen {
            let found = map.place_in(*j, coded);
            if used.contains(&found.index) {
                counts.rows += 1;
                let rows = row_spans(&layout, found);
                spans.extend(rows.map(|span| (table[found.index as usize].0, span)));
            }
        }
        let mut located = Vec::new();
        for (block, (begin, bytes)) in spans {
            let (segment, at) = layout.locate(block);
            let buffer = view.segment(segment).ok_or("a block of no segment")?.clone();
            located.push((buffer, at + begin, vec![0xFF; bytes as usize]));
        }
        let queue = self.cache.queue_mut();
        for (buffer, at, bytes) in located {
            queue.upload(&buffer, at, &bytes).map_err(CacheError::from)?;
        }
        Ok(counts)
    }
}

/// Returns the rows of all heads of one token.
fn row_spans(layout: &PlaneLayout, place: kv_core::Place) -> impl Iterator<Item = Span> + '_ {
    let bytes = if place.is_wide { layout.wide_row_bytes() } else { layout.row_bytes() };
    (0..layout.num_kv_heads()).map(move |head| (layout.row_begin(place, head), bytes))
}
