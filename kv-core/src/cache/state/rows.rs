//! The rows that live sequences hold, block by block: those that an exchange of constants
//! re-encodes.
use hashbrown::HashMap;
use hashbrown::hash_map::Entry;

use crate::cache::state::{CacheState, Group};
use crate::ids::{BlockId, SequenceId};
use crate::invariant::Invariant;
use crate::plan::{BatchEntry, GatherRange};

/// Rows of one sequence that an exchange encodes anew: all that some blocks hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::cache) struct Run {
    row: u32,
    begin: u32,
    end: u32,
}

/// The rows that a group keeps.
#[derive(Debug, Default)]
pub(in crate::cache) struct Kept {
    /// In ascending order.
    pub(in crate::cache) blocks: Vec<BlockId>,
    /// Every row of these blocks once, in batches of a bounded number of tokens.
    pub(in crate::cache) batches: Vec<Vec<Run>>,
}

impl CacheState {
    /// Lists the blocks that live sequences hold in a group, each with the rows of the holder that
    /// has filled most of it, in batches of at most `most` tokens or one block.
    pub(in crate::cache) fn kept_rows(&self, index: usize, most: u32) -> Kept {
        let group = self.groups.at(index);
        let mut runs: HashMap<BlockId, Run> = HashMap::new();
        for (row, state) in self.sequences.iter() {
            each_block(group, row, state.len, |block, run| match runs.entry(block) {
                Entry::Vacant(vacant) => {
                    vacant.insert(run);
                }
                Entry::Occupied(mut known) => {
                    let known = known.get_mut();
                    assert_eq!(known.begin, run.begin, "holders agree on a block's first token");
                    if run.end > known.end {
                        *known = run;
                    }
                }
            });
        }
        let mut blocks: Vec<_> = runs.keys().copied().collect();
        blocks.sort_unstable();
        let mut runs: Vec<_> = runs.into_values().collect();
        runs.sort_unstable_by_key(|run| (run.row, run.begin));
        let most = most.max(group.block_size());
        Kept { blocks, batches: into_batches(&runs, most) }
    }

    /// Returns the first sequence with a tail that was truncated inside quantised tokens.
    pub(in crate::cache) fn cut_in_codes(&self) -> Option<SequenceId> {
        let cut = self.sequences.iter().find(|(row, state)| {
            self.groups.iter().any(|group| {
                let (map, coded) = (group.slot_map(), group.tables.coded(*row));
                map.has_tail() && map.coded_after(0, state.len) != coded
            })
        });
        cut.map(|(row, _)| self.sequences.id(row).invariant("a sequence's row has its id"))
    }
}

impl Run {
    fn tokens(&self) -> u32 {
        self.end - self.begin
    }
    pub(in crate::cache) fn range(&self) -> GatherRange {
        GatherRange { row: self.row, begin: self.begin, len: self.tokens() }
    }
    pub(in crate::cache) fn entry(&self) -> BatchEntry {
        let (row, cached, new_tokens) = (self.row, self.begin, self.tokens());
        BatchEntry { row, cached, new_tokens, queries: 0 }
    }
}

/// Returns the tokens of a batch.
pub(in crate::cache) fn tokens(runs: &[Run]) -> u32 {
    runs.iter().map(Run::tokens).sum()
}

/// Calls `each` for every block that a sequence of `len` tokens holds rows in, with those rows.
fn each_block(group: &Group, row: u32, len: u32, mut each: impl FnMut(BlockId, Run)) {
    let map = group.slot_map();
    let coded = group.tables.coded(row);
    let tail_begin = map.tail_begin(len, coded);
    let (count, vacant) = (map.blocks(tail_begin), group.vacant(row));
    let (sink_blocks, live) =
        if vacant.is_empty() { (0, 0) } else { (vacant.start.min(count), vacant.end) };
    for at in (0..sink_blocks).chain(live..count) {
        let (begin, end) = (map.tokens(at), map.tokens(at + 1).min(tail_begin));
        if begin < end {
            each(group.entry(row, at), Run { row, begin, end });
        }
    }
    let mut begin = tail_begin;
    while begin < len {
        let at = map.place_in(begin, coded).index;
        let is_here = |position: &u32| map.place_in(*position, coded).index == at;
        let end = (begin..len).take_while(is_here).last().unwrap_or(begin) + 1;
        each(group.entry(row, at), Run { row, begin, end });
        begin = end;
    }
}

/// Joins runs that follow each other, in batches of at most `most` tokens: whole blocks, one at
/// least.
fn into_batches(runs: &[Run], most: u32) -> Vec<Vec<Run>> {
    let mut batches: Vec<Vec<Run>> = Vec::new();
    let mut room = 0_u32;
    for run in runs {
        let last = batches.last_mut().filter(|_| run.tokens() <= room);
        let Some(batch) = last else {
            room = most - run.tokens();
            batches.push(vec![*run]);
            continue;
        };
        room -= run.tokens();
        match batch.last_mut().filter(|b| b.row == run.row && b.end == run.begin) {
            Some(before) => before.end = run.end,
            None => batch.push(*run),
        }
    }
    batches
}
