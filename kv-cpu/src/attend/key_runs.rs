//! Where visible keys lie: runs of rows in the blocks of K and V.
//!
//! Only keys that a query sees are looked up: table entries of others may name blocks of another
//! owner.
#![expect(
    clippy::arithmetic_side_effects,
    clippy::indexing_slicing,
    reason = "indices come from the plan's guarantees and the work item's own bounds"
)]
use std::ops::Deref;

use kv_core::plan::PlannedSequence;
use kv_core::{PlaneLayout, SlotMap};
use kv_cpu_kernels::num::{offset, to_u32, to_usize};
use kv_cpu_kernels::{HeadRows, KeyRows, RowLayout};

use super::call::AttendCall;
use super::plan::WorkItem;
use super::visible::Visible;
use crate::layout::PlaneRows;

/// Most tokens that are looked up at a time.
pub(super) const TILE_MAX: usize = 128;
/// Slots of a block of AMX, to which tiles are aligned.
const ALIGN: u32 = 16;

/// Which rows of a sequence are stored in one way, and may share a tile: the first tokens in 16
/// bits, codes, the tail in 16 bits; codes of one block where blocks have means.
struct StorageRegions<'a> {
    map: &'a SlotMap,
    sequence: &'a PlannedSequence,
    /// First position of the tail.
    tail: u32,
    by_block: bool,
    /// First position behind sink tokens that are seen besides a window. A tile ends there, so that
    /// every query sees one range of it.
    sink_tokens: u32,
    /// Tokens of a tile.
    tokens: u32,
    /// How far the first code lies behind a multiple of [`ALIGN`] slots.
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
            sink_tokens: call.options.window().map_or(0, |_| call.options.num_sink_tokens()),
            tokens: to_u32(tokens),
            odd_slots: map.sinks().wrapping_mul(map.wide_slots()) % ALIGN,
        }
    }

    /// The tile at `from` or, where nothing is seen there, the next one; empty behind the last.
    ///
    /// Tiles lie at multiples of their length, so that the order of a sum does not depend on the
    /// queries; those of codes behind rows in 16 bits are shifted to where blocks of [`ALIGN`]
    /// slots begin.
    fn tile(&self, visible: Visible, from: u32) -> (u32, u32) {
        let (from, end) = visible.seen_from(from);
        if from >= end {
            return (end, end);
        }
        let cut = if from < self.sink_tokens { self.sink_tokens } else { u32::MAX };
        let limit = self.end(from).min(cut).min(end);
        let inside = match from.checked_sub(self.map.sinks()) {
            Some(behind) => behind % self.tokens + self.odd_slots,
            None => from,
        };
        (from, from.saturating_add(self.tokens - inside % self.tokens).min(limit))
    }

    fn is_wide(&self, position: u32) -> bool {
        position < self.map.sinks() || position >= self.tail
    }

    /// One past the last row that is stored like that of `position`.
    fn end(&self, position: u32) -> u32 {
        if position < self.map.sinks() {
            self.map.sinks()
        } else if position >= self.tail {
            u32::MAX
        } else if self.by_block {
            self.tail.min(self.map.tokens(self.map.place(position).index.saturating_add(1)))
        } else {
            self.tail
        }
    }

    /// The mean that is subtracted from the row of `position`, as stored.
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
    runs: [(&'a [u8], usize); TILE_MAX],
    len: usize,
    /// Bytes from a token of a run to the next, and from a head to the next.
    stride: usize,
    per_head: usize,
}

impl<'a> BlockRuns<'a> {
    const fn new() -> Self {
        Self { runs: [(&[], 0); TILE_MAX], len: 0, stride: 0, per_head: 0 }
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
        self.len = 0;
        let mut position = begin;
        while position < end {
            let place = layout.slot_map().place_in(position, sequence.coded);
            let at = layout.row_begin(place, 0);
            self.per_head = offset(layout.row_begin(place, 1)) - offset(at);
            // Rows in 16 bits are few and leave gaps; the others follow each other to the end of a
            // block.
            let tokens = if place.is_wide {
                self.stride = plane.rows(true).bytes();
                1
            } else {
                self.stride = offset(layout.token_stride());
                (layout.block_size() - place.inside).min(end - position)
            };
            let rest = offset(layout.block_bytes()) - offset(at);
            let block = plane.get(table[to_usize(place.index)].0, at, rest);
            self.runs[self.len] = (block, to_usize(tokens));
            self.len += 1;
            position += tokens;
        }
    }

    /// Rows of a run, of so many heads from one on.
    fn of_heads<'l>(
        &self,
        run: usize,
        (first, heads): (u32, usize),
        layout: &'l RowLayout,
    ) -> HeadRows<'l>
    where
        'a: 'l,
    {
        let (block, tokens) = self.runs[run];
        let block = &block[to_usize(first) * self.per_head..];
        HeadRows::new(block, (self.stride, self.per_head), (tokens, heads), layout)
    }

    /// Rows of a run and a head.
    fn of_head<'l>(&self, run: usize, head: u32, layout: &'l RowLayout) -> KeyRows<'l>
    where
        'a: 'l,
    {
        let (block, tokens) = self.runs[run];
        KeyRows::new(&block[to_usize(head) * self.per_head..], self.stride, tokens, layout)
    }
}

/// Some tokens that follow each other in memory, for all kv heads of a work item.
#[derive(Debug, Clone, Copy)]
pub(super) struct KeyRun<'a> {
    pub(super) k: HeadRows<'a>,
    pub(super) v: HeadRows<'a>,
    /// Whether rows are those kept in 16 bits.
    pub(super) is_wide: bool,
    /// Position of the first token.
    position: u32,
}

/// The keys of a work item in memory order: block by block, head by head inside of a block.
pub(super) struct KeyRuns<'c, 'a> {
    call: &'c AttendCall<'a>,
    sequence: &'c PlannedSequence,
    visible: Visible,
    regions: StorageRegions<'c>,
    first_head: u32,
    heads: usize,
    planes: [BlockRuns<'a>; 2],
    bounds: (u32, u32),
    /// The next run of the tile.
    run: usize,
}

impl<'c, 'a> KeyRuns<'c, 'a> {
    pub(super) fn new(
        call: &'c AttendCall<'a>,
        item: &WorkItem,
        sequence: &'c PlannedSequence,
    ) -> Self {
        Self {
            call,
            sequence,
            visible: Visible::of(&call.options, sequence, item.queries)
                .within(item.keys.0, item.keys.1),
            regions: StorageRegions::new(call, sequence, TILE_MAX),
            first_head: item.kv_heads.0,
            heads: item.num_heads(),
            planes: [const { BlockRuns::new() }; 2],
            bounds: (item.keys.0, item.keys.0),
            run: 0,
        }
    }

    /// The next run, `None` behind the last.
    pub(super) fn next(&mut self) -> Option<KeyRun<'c>> {
        if self.run == self.planes[0].len {
            self.bounds = self.regions.tile(self.visible, self.bounds.1);
            if self.bounds.0 >= self.bounds.1 {
                return None;
            }
            let [k, v] = &mut self.planes;
            k.find(self.call, &self.call.k, self.sequence, self.bounds);
            v.find(self.call, &self.call.v, self.sequence, self.bounds);
            self.run = 0;
        }
        let is_wide = self.regions.is_wide(self.bounds.0);
        let heads = (self.first_head, self.heads);
        let [k, v] = &self.planes;
        let found = KeyRun {
            k: k.of_heads(self.run, heads, self.call.k.rows(is_wide)),
            v: v.of_heads(self.run, heads, self.call.v.rows(is_wide)),
            is_wide,
            position: self.bounds.0,
        };
        self.run += 1;
        Some(found)
    }

    /// The mean that is subtracted from the rows of K of a run, in f16.
    pub(super) fn k_mean(&self, run: &KeyRun<'_>, head: usize) -> Option<&'a [u8]> {
        self.regions.mean(self.call, run.position, self.first_head + to_u32(head))
    }
}

/// A tile of one kv head: some positions that follow each other, in one storage region.
#[derive(Debug)]
pub(super) struct KeyTile<'a> {
    /// Kv head, counted from the work item's first one.
    pub(super) head: usize,
    /// Positions of its tokens; empty behind the last tile.
    pub(super) bounds: (u32, u32),
    pub(super) runs: TileRuns<'a>,
    pub(super) is_wide: bool,
    /// The mean that is subtracted from the rows of K, in f16.
    pub(super) k_mean: Option<&'a [u8]>,
}

/// Runs of K, then as many of V.
#[derive(Debug)]
pub(super) struct TileRuns<'a> {
    runs: [KeyRows<'a>; 2 * TILE_MAX],
    len: usize,
}

impl<'a> TileRuns<'a> {
    fn push(&mut self, run: KeyRows<'a>) {
        self.runs[self.len] = run;
        self.len += 1;
    }
}

impl<'a> Deref for TileRuns<'a> {
    type Target = [KeyRows<'a>];
    fn deref(&self) -> &Self::Target {
        &self.runs[..self.len]
    }
}

impl<'a> KeyTile<'a> {
    fn new(layout: &'a RowLayout) -> Self {
        let runs = TileRuns { runs: [KeyRows::empty(layout); _], len: 0 };
        Self { head: 0, bounds: (0, 0), runs, is_wide: false, k_mean: None }
    }
    /// Number of tokens.
    pub(super) fn len(&self) -> usize {
        to_usize(self.bounds.1 - self.bounds.0)
    }
    /// Runs of K, and of V.
    pub(super) fn planes(&self) -> [&[KeyRows<'a>]; 2] {
        let (k, v) = self.runs.split_at(self.runs.len() / 2);
        [k, v]
    }
}

/// Calls `attend` with every tile of `tokens` at most that a query of the work item sees, head by
/// head, and with the one behind it for prefetching, which is empty at last.
pub(super) fn for_tiles<'c, 'a>(
    call: &'c AttendCall<'a>,
    item: &WorkItem,
    sequence: &'c PlannedSequence,
    tokens: usize,
    mut attend: impl FnMut(&KeyTile<'c>, &KeyTile<'c>),
) {
    let visible =
        Visible::of(&call.options, sequence, item.queries).within(item.keys.0, item.keys.1);
    let regions = StorageRegions::new(call, sequence, tokens);
    let mut planes: [BlockRuns<'a>; 2] = [const { BlockRuns::new() }; 2];
    let mut fill = |tile: &mut KeyTile<'c>, bounds: (u32, u32), head: usize| {
        let [k, v] = &mut planes;
        if bounds != tile.bounds || head == 0 {
            k.find(call, &call.k, sequence, bounds);
            v.find(call, &call.v, sequence, bounds);
        }
        tile.runs.len = 0;
        (tile.head, tile.bounds) = (head, bounds);
        if bounds.0 < bounds.1 {
            let kv_head = item.kv_heads.0 + to_u32(head);
            tile.is_wide = regions.is_wide(bounds.0);
            tile.k_mean = regions.mean(call, bounds.0, kv_head);
            let (k_rows, v_rows) = (call.k.rows(tile.is_wide), call.v.rows(tile.is_wide));
            for run in 0..k.len {
                tile.runs.push(k.of_head(run, kv_head, k_rows));
            }
            for run in 0..v.len {
                tile.runs.push(v.of_head(run, kv_head, v_rows));
            }
        }
    };
    let mut tiles = [(); 2].map(|()| KeyTile::new(call.k.rows(false)));
    let [now, next] = &mut tiles;
    let (mut now, mut next) = (now, next);
    fill(now, regions.tile(visible, item.keys.0), 0);
    while now.len() > 0 {
        if now.head + 1 < item.num_heads() {
            fill(next, now.bounds, now.head + 1);
        } else {
            fill(next, regions.tile(visible, now.bounds.1), 0);
        }
        attend(now, next);
        std::mem::swap(&mut now, &mut next);
    }
}
