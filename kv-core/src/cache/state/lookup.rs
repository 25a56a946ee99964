//! Prefix lookup: the cached blocks that a prompt can begin with.
use crate::cache::state::Group;
use crate::cache::state::history::History;
use crate::ids::BlockId;
use crate::invariant::Invariant;
use crate::num::{recycle, to_u32, to_usize};
use crate::reuse::Content;
use crate::slot_map::SlotMap;
use crate::spec::{PrefixReuse, Window};

/// A prefix hit. Its buffers are reused for later lookups.
#[derive(Debug, Default)]
pub(super) struct PrefixHit {
    /// Tokens of whole blocks; a block boundary in every group.
    pub(super) whole: u32,
    /// Further tokens, in another block.
    pub(super) part: u32,
    pub(super) groups: Vec<HitBlocks>,
    /// Snapshots of recurrent states behind the tokens, by group of states.
    pub(super) states: Vec<BlockId>,
    /// Tokens whose rows are cached, with or without states behind them.
    pub(super) rows: u32,
}

/// Hit blocks of one group.
#[derive(Debug, Default)]
pub(super) struct HitBlocks {
    /// Blocks by index; some outside the window may be missing.
    pub(super) blocks: Vec<Option<BlockId>>,
    /// The block with the further tokens.
    pub(super) donor: Option<BlockId>,
}

impl PrefixHit {
    /// Returns the number of tokens that need not be computed.
    pub(super) fn tokens(&self) -> u32 {
        self.whole + self.part
    }

    /// Returns the blocks that the sequence holds, by index; missing ones are vacant entries.
    pub(super) fn needed(&self, group: usize, window: Option<Window>, map: &SlotMap) -> Needed<'_> {
        let found = self.groups.get(group).invariant("a lookup lists the blocks of every group");
        let count = to_usize(map.full_blocks(self.whole));
        Needed {
            blocks: found.blocks.get(..count).invariant("a hit ends where the blocks found do"),
            donor: found.donor,
            live: [self.whole, self.tokens()]
                .map(|len| window.map_or(0, |window| first_live(map, window, len))),
            sink_blocks: sink_blocks(window, map),
        }
    }

    /// Looks up a prompt; at most `limit` tokens are reused.
    pub(super) fn search(
        &mut self,
        groups: &[Group],
        history: &mut History,
        (limit, backoff): (u32, u32),
        reuse: PrefixReuse,
    ) {
        (self.whole, self.part, self.rows) = (0, 0, 0);
        self.states.clear();
        self.groups.resize_with(groups.len(), HitBlocks::default);
        if reuse == PrefixReuse::Off || history.space().is_none() {
            return;
        }
        let mut len = limit;
        for (found, group) in self.groups.iter_mut().zip(groups) {
            let map = group.slot_map();
            // The caller's `backoff` may be any number.
            let count = map.full_blocks(len).saturating_add(backoff).min(map.full_blocks(limit));
            found.find_blocks(group, history, count);
            len = found.longest(group, len, backoff);
        }
        len = self.agree(groups, len, backoff);
        self.whole = len;
        self.groups.iter_mut().for_each(|found| found.donor = None);
        if reuse == PrefixReuse::Partial && backoff == 0 {
            self.find_part(groups, history, limit);
        }
    }

    /// Returns the longest prefix of at most `len` tokens that is cached in all groups, followed by
    /// `backoff` more blocks in each.
    pub(super) fn agree(&self, groups: &[Group], mut len: u32, backoff: u32) -> u32 {
        loop {
            let before = len;
            for (found, group) in self.groups.iter().zip(groups) {
                len = found.longest(group, len, backoff);
            }
            if len == before || groups.len() == 1 {
                return len;
            }
        }
    }

    /// Finds the block that agrees with the prompt for longest. Its part is copied when the
    /// sequence first writes, so blocks that the open step has not written yet are excluded.
    pub(super) fn find_part(&mut self, groups: &[Group], history: &mut History, limit: u32) {
        if groups.iter().any(|group| group.slot_map().has_tail()) {
            return;
        }
        let mut part = limit - self.whole;
        for (found, group) in self.groups.iter_mut().zip(groups) {
            let map = group.slot_map();
            let index = map.full_blocks(self.whole);
            let end = map.tokens(index + 1).min(limit);
            let content = history.partial(group.chain, &map, (index, end));
            let found_block = content.and_then(|content| {
                let Content { parent, namespace, tokens, contents, .. } = content;
                group.pool.longest_beginning(parent, namespace, (tokens, contents))
            });
            let Some((block, common)) = found_block else {
                return;
            };
            found.donor = Some(block);
            part = part.min(common);
        }
        self.part = part;
    }
}

/// The blocks of one group that a sequence begins with.
#[derive(Debug, Clone, Copy)]
pub(super) struct Needed<'a> {
    blocks: &'a [Option<BlockId>],
    donor: Option<BlockId>,
    /// First block needed after those of the sink tokens, without the donor and with it.
    live: [u32; 2],
    sink_blocks: u32,
}

impl Needed<'_> {
    /// Iterates in table order, with `None` for a vacant entry. `part`: with the donor, whose entry
    /// is vacant too if the window begins after it.
    pub(super) fn iter(&self, part: bool) -> impl Iterator<Item = Option<BlockId>> + '_ {
        let is_vacant = move |index: u32| index >= self.sink_blocks && index < self.live(part);
        let donor = self.donor.filter(|_| part).map(Some);
        let blocks = self.blocks.iter().copied().chain(donor).zip(0..);
        blocks.map(move |(block, index)| block.filter(|_| !is_vacant(index)))
    }
    /// Returns the number of whole blocks, without vacant entries.
    pub(super) fn num_blocks(&self, part: bool) -> u32 {
        let whole = to_u32(self.blocks.len());
        whole - self.live(part).min(whole).saturating_sub(self.sink_blocks)
    }
    pub(super) fn live(&self, part: bool) -> u32 {
        let [whole, with_part] = self.live;
        if part { with_part } else { whole }
    }
    /// Returns the block with the further tokens.
    pub(super) fn donor(&self) -> Option<BlockId> {
        self.donor
    }
}

/// Returns the number of blocks that hold the sink tokens of a window.
pub(super) fn sink_blocks(window: Option<Window>, map: &SlotMap) -> u32 {
    window.map_or(0, |window| map.blocks(window.sink_tokens))
}

/// Returns the first block that a query after `len` tokens sees, sink tokens aside.
pub(super) fn first_live(map: &SlotMap, window: Window, len: u32) -> u32 {
    let begin = window.begin(len);
    if begin >= len { map.full_blocks(len) } else { map.place(begin).index }
}

impl HitBlocks {
    /// Finds the first `count` blocks up to the first that is missing; all of them if a window may
    /// not need the first.
    fn find_blocks(&mut self, group: &Group, history: &mut History, count: u32) {
        let map = group.slot_map();
        recycle(&mut self.blocks);
        let (blocks, may_lack) = (&mut self.blocks, group.window.is_some());
        history.each_full(group.chain, &map, count, |content| {
            let found = group.pool.find(content);
            if found.is_some() || may_lack {
                blocks.push(found);
            }
            found.is_some() || may_lack
        });
    }

    /// Returns the longest prefix of at most `len` tokens that is cached in this group, followed by
    /// `backoff` more blocks.
    fn longest(&self, group: &Group, len: u32, backoff: u32) -> u32 {
        let map = group.slot_map();
        let known = to_u32(self.blocks.len()).saturating_sub(backoff);
        let mut blocks = map.full_blocks(len).min(known);
        let Some(window) = group.window else {
            return map.tokens(blocks);
        };
        let is_there = |i: &u32| self.blocks.get(to_usize(*i)).is_some_and(Option::is_some);
        let num_sink_blocks = sink_blocks(Some(window), &map);
        while blocks > 0 {
            let end = blocks + backoff;
            // A window of only the query itself needs no block; still something must be cached.
            let live = first_live(&map, window, map.tokens(blocks)).min(end - 1);
            // A gap at `i` excludes every prefix that needs `i`: the next candidate ends before it.
            if let Some(gap) = (live..end).rev().find(|i| !is_there(i)) {
                blocks = gap.saturating_sub(backoff);
                continue;
            }
            match (0..num_sink_blocks.min(blocks)).find(|i| !is_there(i)) {
                Some(gap) => blocks = gap.saturating_sub(backoff),
                None => break,
            }
        }
        map.tokens(blocks)
    }
}
