//! The split of a call into work items and merges.
//!
//! A work item is some queries of some kv heads against one split of one context. Its content
//! depends on the plan alone, so neither the number of threads nor their order changes a bit.
use kv_core::invariant::Invariant;
use kv_core::num::{to_u32, to_usize};

use super::call::AttendCall;
use super::strategy::AMX_BLOCK;
use super::visible::Visible;

/// Query rows per kv head of a work item, which stay in L2.
const ROWS: usize = 128;
/// The same on AMX, where more rows share the packing of K and V.
const ROWS_AMX: usize = 512;
/// Query rows per kv head from which on a work item has one kv head: a tile is decoded once for all
/// rows, and longer runs of memory gain nothing.
const ROWS_ONE_HEAD: usize = 16;
/// Query rows of all kv heads of a work item that has several, which stay in L2.
const ROWS_SEVERAL_HEADS: usize = 64;
/// Minimum number of work items per thread before an item has several kv heads, so that threads end
/// at about the same time.
const ITEMS_PER_THREAD: usize = 2;

/// Some queries of some kv heads, and one split of a context.
///
/// The heads of a block follow each other in memory, so several of them at once make longer runs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WorkItem {
    /// Entry of the batch.
    pub(super) entry: usize,
    /// First kv head, and one past the last.
    pub(super) kv_heads: (u32, u32),
    /// First key of the split, and one past the last.
    pub(super) keys: (u32, u32),
    /// First query, and one past the last.
    pub(super) queries: (u32, u32),
    /// Partial result of the first head of the sequence's first query, where the context is split.
    partial: Option<usize>,
}

/// One query whose context was split.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Merge {
    pub(super) entry: usize,
    /// Query of the sequence.
    pub(super) query: u32,
    /// Partial result of its first head in the first split.
    pub(super) first: usize,
    /// Partial results from one split to the next.
    pub(super) stride: usize,
    pub(super) splits: usize,
}

/// All work items and merges of a call.
#[derive(Debug, Default)]
pub(crate) struct WorkPlan {
    pub(super) items: Vec<WorkItem>,
    pub(super) merges: Vec<Merge>,
    /// Entries whose queries see no key.
    pub(super) empty: Vec<usize>,
    /// Number of partial results.
    pub(super) partials: usize,
}

impl WorkItem {
    /// Number of queries.
    pub(super) fn num_queries(&self) -> u32 {
        self.queries.1 - self.queries.0
    }
    /// Number of kv heads.
    pub(super) fn num_heads(&self) -> usize {
        to_usize(self.kv_heads.1 - self.kv_heads.0)
    }
    /// Query head and query of row `row` of kv head `head`, counted from the item's first: queries
    /// one after another, the heads of the group within each.
    pub(super) fn place(&self, head: usize, row: usize, group: usize) -> (u32, u32) {
        let kv_head = to_usize(self.kv_heads.0) + head;
        (to_u32(kv_head * group + row % group), self.queries.0 + to_u32(row / group))
    }
    /// The same for one of its kv heads alone.
    pub(super) fn of_head(&self, head: u32) -> Self {
        Self { kv_heads: (head, head + 1), ..*self }
    }
    /// The partial result of a query and a query head, where the context is split.
    pub(super) fn partial(&self, call: &AttendCall<'_>, head: u32, query: u32) -> Option<usize> {
        let first = self.partial?;
        Some(first + to_usize(query) * call.q_heads() + to_usize(head))
    }
}

impl WorkPlan {
    /// Plans a call anew. Splits in which no query sees a key have no work item.
    pub(super) fn plan(&mut self, call: &AttendCall<'_>) {
        self.items.clear();
        self.merges.clear();
        self.empty.clear();
        self.partials = 0;
        let rows = if call.facts(1).may_use_amx() { ROWS_AMX } else { ROWS };
        let per_item = to_u32((rows / call.heads.group).max(1));
        let kv_heads = call.k.layout().num_kv_heads();
        for (entry, sequence) in call.plan.sequences().iter().enumerate() {
            let first = to_usize(sequence.split_start);
            let splits = call.plan.splits().get(first..first + to_usize(sequence.num_splits));
            let splits = splits.invariant("the splits of a sequence are on the batch's list");
            let visible = Visible::of(&call.options, sequence, (0, sequence.q_len));
            let splits =
                splits.iter().filter(|split| visible.intersects(split.kv_begin, split.kv_end));
            let count = splits.clone().count();
            if count == 0 && sequence.q_len > 0 {
                self.empty.push(entry);
            }
            let rows = to_usize(sequence.q_len) * call.q_heads();
            let is_split = count > 1;
            if is_split {
                self.merges.extend((0..sequence.q_len).map(|query| Merge {
                    entry,
                    query,
                    first: self.partials + to_usize(query) * call.q_heads(),
                    stride: rows,
                    splits: count,
                }));
            }
            let heads = heads_per_item(call, sequence.q_len.min(per_item));
            for split in splits {
                let partial = is_split.then_some(self.partials);
                self.partials += if is_split { rows } else { 0 };
                // Late queries see most keys, so their items come first.
                for part in (0..sequence.q_len.div_ceil(per_item)).rev() {
                    let begin = part * per_item;
                    let queries = (begin, (begin + per_item).min(sequence.q_len));
                    self.items.extend((0..kv_heads).step_by(heads).map(|head| WorkItem {
                        entry,
                        kv_heads: (head, (head + to_u32(heads)).min(kv_heads)),
                        keys: (split.kv_begin, split.kv_end),
                        queries,
                        partial,
                    }));
                }
            }
        }
    }
}

/// Returns the kv heads of a work item of `queries` queries. Results do not depend on them.
fn heads_per_item(call: &AttendCall<'_>, queries: u32) -> usize {
    let kv_heads = to_usize(call.k.layout().num_kv_heads());
    let rows = to_usize(queries.max(1)) * call.heads.group;
    if rows >= ROWS_ONE_HEAD {
        return 1;
    }
    // As many as leave enough items, if every split has its queries in one item.
    let splits = call.plan.splits().len();
    let enough = call.cpu.threads.count().saturating_sub(1) * ITEMS_PER_THREAD;
    let most = splits * kv_heads / enough.max(1);
    (ROWS_SEVERAL_HEADS / rows).min(most).clamp(1, kv_heads.max(1))
}

const _: () = assert!(ROWS_ONE_HEAD <= AMX_BLOCK, "AMX GEMM has one kv head a work item");
