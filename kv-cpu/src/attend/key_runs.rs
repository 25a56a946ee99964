//! The visible keys in memory: runs of rows in the blocks of K and V.
//!
//! Only keys that a query sees are looked up: the table entries of other keys may name blocks of
//! another sequence.
use arrayvec::ArrayVec;
use kv_core::backend::{PlaneLayout, SlotMap};
use kv_core::num::{to_offset, to_u32, to_usize};
use kv_core::plan::PlannedSequence;
use kv_cpu_kernels::{KeyRows, Prefetch, PrefetchTarget, RowLayout, TileRows};

use super::call::AttendCall;
use super::plan::WorkItem;
use super::visible::Visible;
use crate::layout::PlaneRows;

/// Maximum number of tokens that are looked up at a time.
pub(super) const TILE_MAX: usize = 128;
/// Slots of a block of AMX, to which tiles are aligned.
const ALIGN: u32 = 16;

/// Regions of a sequence whose rows are stored alike and may share a tile: the first tokens in 16
/// bits, codes, the tail in 16 bits; codes of one block where blocks have means.
struct StorageRegions<'a> {
    map: &'a SlotMap,
    sequence: &'a PlannedSequence,
    /// First position of the tail.
    tail: u32,
    by_block: bool,
    /// First position after the sink tokens that are visible besides a window. A tile ends there,
    /// so that every query sees one range of it.
    sink_tokens: u32,
    /// Tokens of a tile.
    tokens: u32,
    /// Distance of the first code from the multiple of [`ALIGN`] slots before it.
    odd_slots: u32,
}

impl<'a> StorageRegions<'a> {
    fn new(call: &'a AttendCall<'_>, sequence: &'a PlannedSequence, tokens: usize) -> Self {
        let layout: &PlaneLayout = call.k.layout();
        let map = layout.slot_map();
        Self {
            map,
            sequence,
            tail: map.tail_begin(sequence.kv_len, sequence.coded),
            by_block: layout.has_block_means(),
            sink_tokens: call.options.window_left().map_or(0, |_| call.options.sink_tokens()),
            tokens: to_u32(tokens),
            odd_slots: map.full_precision_prefix().wrapping_mul(map.wide_slots()) % ALIGN,
        }
    }

    /// Returns the tile at `from` or, if no key there is seen, the next one; empty after the last.
    ///
    /// Tiles lie at multiples of their length, so that the order of a sum does not depend on the
    /// queries; those of codes after rows in 16 bits are shifted to where blocks of [`ALIGN`]
    /// slots begin.
    fn tile(&self, visible: Visible, from: u32) -> (u32, u32) {
        let (from, end) = visible.seen_from(from);
        if from >= end {
            return (end, end);
        }
        let cut = if from < self.sink_tokens { self.sink_tokens } else { u32::MAX };
        let limit = self.end(from).min(cut).min(end);
        let inside = match from.checked_sub(self.map.full_precision_prefix()) {
            Some(after) => after % self.tokens + self.odd_slots,
            None => from,
        };
        (from, (from + (self.tokens - inside % self.tokens)).min(limit))
    }

    fn is_wide(&self, position: u32) -> bool {
        position < self.map.full_precision_prefix() || position >= self.tail
    }

    /// Returns one past the last row that is stored like the row of `position`.
    fn end(&self, position: u32) -> u32 {
        if position < self.map.full_precision_prefix() {
            self.map.full_precision_prefix()
        } else if position >= self.tail {
            u32::MAX
        } else if self.by_block {
            self.tail.min(self.map.tokens(self.map.place(position).index + 1))
        } else {
            self.tail
        }
    }

    /// Returns the mean that is subtracted from the row of `position`, as stored.
    fn mean<'k>(&self, call: &AttendCall<'k>, position: u32, head: u32) -> Option<&'k [u8]> {
        if !self.by_block || self.is_wide(position) {
            return None;
        }
        let index = to_usize(self.map.place(position).index);
        let block = call.plan.tables().row(self.sequence.row)[index];
        Some(call.k.mean(block.0, head))
    }
}

/// Runs of rows of a tile in one plane, for all kv heads.
struct BlockRuns<'a> {
    /// Memory of a block from the first head's first row on, and how many tokens follow there.
    runs: ArrayVec<(&'a [u8], usize), TILE_MAX>,
    /// Bytes from a token of a run to the next, and from a head to the next.
    stride: usize,
    per_head: usize,
}

impl<'a> BlockRuns<'a> {
    const fn new() -> Self {
        Self { runs: ArrayVec::new_const(), stride: 0, per_head: 0 }
    }

    /// Looks up tokens `begin..end` of a sequence, which lie in one storage region.
    fn find(
        &mut self,
        call: &AttendCall<'a>,
        plane: &PlaneRows<'a>,
        sequence: &PlannedSequence,
        (begin, end): (u32, u32),
    ) {
        let table = call.plan.tables().row(sequence.row);
        let layout = plane.layout();
        self.runs.clear();
        let mut position = begin;
        while position < end {
            let slot = layout.slot_map().place_in(position, sequence.coded);
            let at = layout.row_begin(slot, 0);
            self.per_head = to_offset(layout.row_begin(slot, 1)) - to_offset(at);
            // Rows in 16 bits are few and leave gaps; codes follow each other to the end of a
            // block. Runs of one length are prefetched alternately.
            let tokens = if slot.is_wide {
                self.stride = plane.rows(true).bytes();
                1
            } else {
                self.stride = to_offset(layout.token_stride());
                (layout.block_size() - slot.inside).min(end - position).min(ALIGN)
            };
            let rest = to_offset(layout.block_bytes()) - to_offset(at);
            let block = plane.get(table[to_usize(slot.index)].0, at, rest);
            self.runs.push((block, to_usize(tokens)));
            position += tokens;
        }
    }

    /// Returns the rows of a run and a head.
    fn of_head<'l>(&self, run: usize, head: u32, layout: &'l RowLayout) -> KeyRows<'l>
    where
        'a: 'l,
    {
        let (block, tokens) = self.runs[run];
        KeyRows::new(&block[to_usize(head) * self.per_head..], self.stride, tokens, layout)
    }
}

/// A tile of one kv head: some positions that follow each other, in one storage region.
#[derive(Debug)]
pub(super) struct KeyTile<'a> {
    /// Kv head, counted from the work item's first one.
    pub(super) head: usize,
    /// Positions of its tokens; empty after the last tile.
    pub(super) bounds: (u32, u32),
    /// Runs of K, then the same number of runs of V.
    runs: ArrayVec<KeyRows<'a>, { 2 * TILE_MAX }>,
    pub(super) is_wide: bool,
    /// The mean that is subtracted from the rows of K, in f16.
    pub(super) k_mean: Option<&'a [u8]>,
}

impl<'a> KeyTile<'a> {
    const fn new() -> Self {
        let runs = ArrayVec::new_const();
        Self { head: 0, bounds: (0, 0), runs, is_wide: false, k_mean: None }
    }
    /// Number of tokens.
    pub(super) fn len(&self) -> usize {
        to_usize(self.bounds.1 - self.bounds.0)
    }
    /// Rows of K, and of V, of a tile that is not empty.
    pub(super) fn planes(&self) -> [TileRows<'_>; 2] {
        let (k, v) = self.runs();
        [TileRows::new(k), TileRows::new(v)]
    }
    /// Runs of K, and of V; none in an empty tile.
    fn runs(&self) -> (&[KeyRows<'a>], &[KeyRows<'a>]) {
        self.runs.split_at(self.runs.len() / 2)
    }
    /// The prefetches during QK of this tile, and during its PV.
    pub(super) fn prefetch<'p>(
        &'p self,
        next: &'p Self,
        target: PrefetchTarget,
    ) -> [Prefetch<'p>; 2] {
        let ((_, v), (next_k, next_v)) = (self.runs(), next.runs());
        [Prefetch::new(target, next_k, v), Prefetch::new(target, next_v, next_k)]
    }
}

/// The tiles of a work item of which its queries see a token, head by head.
struct Tiles<'c, 'a> {
    call: &'c AttendCall<'a>,
    item: &'c WorkItem,
    sequence: &'c PlannedSequence,
    visible: Visible,
    regions: StorageRegions<'c>,
    /// Bounds of the last tile, its head, and its runs for all heads.
    bounds: (u32, u32),
    head: usize,
    planes: [BlockRuns<'a>; 2],
}

impl<'c> Tiles<'c, '_> {
    /// Steps to the next tile, which is empty after the last.
    fn next(&mut self, tile: &mut KeyTile<'c>) {
        let [k, v] = &mut self.planes;
        self.head += 1;
        if self.head == self.item.num_heads() {
            self.head = 0;
            self.bounds = self.regions.tile(self.visible, self.bounds.1);
            k.find(self.call, &self.call.k, self.sequence, self.bounds);
            v.find(self.call, &self.call.v, self.sequence, self.bounds);
        }
        tile.runs.clear();
        (tile.head, tile.bounds, tile.k_mean) = (self.head, self.bounds, None);
        if tile.len() == 0 {
            return;
        }
        let kv_head = self.item.kv_heads.0 + to_u32(self.head);
        tile.is_wide = self.regions.is_wide(self.bounds.0);
        tile.k_mean = self.regions.mean(self.call, self.bounds.0, kv_head);
        for (plane, runs) in [(&self.call.k, k), (&self.call.v, v)] {
            let rows = plane.rows(tile.is_wide);
            tile.runs.extend((0..runs.runs.len()).map(|run| runs.of_head(run, kv_head, rows)));
        }
    }
}

/// Calls `attend` with every tile, of at most `tokens` tokens, of which a query of the work item
/// sees one, head by head. The second argument is the next tile for prefetching, empty after the
/// last.
pub(super) fn for_tiles<'c>(
    call: &'c AttendCall<'_>,
    item: &'c WorkItem,
    sequence: &'c PlannedSequence,
    tokens: usize,
    mut attend: impl FnMut(&KeyTile<'c>, &KeyTile<'c>),
) {
    let mut tiles = Tiles {
        call,
        item,
        sequence,
        visible: Visible::of(&call.options, sequence, item.queries)
            .within(item.keys.0, item.keys.1),
        regions: StorageRegions::new(call, sequence, tokens),
        bounds: (item.keys.0, item.keys.0),
        head: item.num_heads() - 1,
        planes: [const { BlockRuns::new() }; 2],
    };
    let (mut first, mut second) = (KeyTile::new(), KeyTile::new());
    let (mut now, mut next) = (&mut first, &mut second);
    tiles.next(now);
    while now.len() > 0 {
        tiles.next(next);
        attend(now, next);
        std::mem::swap(&mut now, &mut next);
    }
}
